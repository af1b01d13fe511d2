"""benchmarks/jobs_claim.py: the table of docs/jobs.md, and the interval of its mean."""

from __future__ import annotations

import pytest
from simulator.factories import load_benchmark

claim = load_benchmark("jobs_claim")
documented = load_benchmark("documented")


def test_the_mean_of_training_seeds_has_the_interval_of_other_seeds() -> None:
    rival = {"return": {"mean": 0.77, "low": 0.76, "high": 0.78}, "worst_block": 0.72}
    runs = {
        (claim.SHORT, seed): {
            "return": {"mean": mean, "low": mean - 0.01, "high": mean + 0.01},
            "gain": {"mean": 0.03, "low": 0.01, "high": 0.05},
            "worst_block": 0.75,
            "rival": rival,
        }
        for seed, mean in {0: 0.80, 1: 0.82}.items()
    }
    found = documented.figures(claim.training_table(runs))
    assert found["200,000 steps (2): return"] == [(0.82, 0.81, 0.83)]
    (mean,) = found["200,000 steps (3): return"]
    assert (mean.value, mean.low) == pytest.approx((0.81, 0.81 - 12.71 * 0.01), abs=1e-3)
    assert found["wide-and-short: return"] == [(0.77, 0.76, 0.78)]
