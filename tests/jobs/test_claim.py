"""benchmarks/jobs_claim.py: what it reads off docs/jobs.md, and when it says that a figure differs."""

from __future__ import annotations

import pytest
from simulator.factories import load_benchmark

claim = load_benchmark("jobs_claim")

PAGE = """\
| policy | starts | return | worst block |
|---|---|---:|---:|
| sjf | the shortest | **0.527 ± 0.003** | 0.506 |
| easy-backfill | the head | −0.135 ± 0.022 | −0.315 |

| training | seed | return | worst block of 20 |
|---|--:|--:|--:|
| 200,000 steps | 0 | 0.809 [0.798, 0.818] | 0.755 |

| trace | gpus |
|---|---|
| Helios | 0.5 |
"""


def test_it_reads_the_returns_of_a_page() -> None:
    found = claim.figures(PAGE)
    assert list(found) == ["sjf", "easy-backfill", "200,000 steps, 0"]
    assert found["200,000 steps, 0"] == (0.809, 0.798, 0.818)
    assert found["easy-backfill"] == pytest.approx((-0.135, -0.178, -0.092), abs=1e-3)


def test_figures_differ_when_their_intervals_do_not_meet() -> None:
    page = claim.figures(PAGE)
    near, far = claim.Figure(0.825, 0.815, 0.835), claim.Figure(0.72, 0.71, 0.73)
    assert claim.differences(page, {"200,000 steps, 0": near}) == []
    (line,) = claim.differences(page, {"200,000 steps, 0": far})
    assert line == "differs: 200,000 steps, 0: 0.720 [0.710, 0.730], on the page 0.809 [0.798, 0.818]"
    assert claim.differences(page, {"new": far}) == ["not on the page: new: 0.720 [0.710, 0.730]"]


def test_what_it_prints_it_can_read() -> None:
    means = {0: 0.80, 1: 0.82}
    runs = {
        (claim.SHORT, seed): {
            "return": {"mean": mean, "low": mean - 0.01, "high": mean + 0.01},
            "gain": {"mean": 0.03, "low": 0.01, "high": 0.05},
            "worst_block": 0.75,
        }
        for seed, mean in means.items()
    }
    found = claim.figures(claim.training_table(runs))
    assert found["200,000 steps, 1"] == (0.82, 0.81, 0.83)
    mean = found["200,000 steps, mean of 2"]
    assert (mean.mean, mean.low) == pytest.approx((0.81, 0.81 - 12.71 * 0.01), abs=1e-3)
