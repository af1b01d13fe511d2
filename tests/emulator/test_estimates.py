"""What the router's books find out about emulated servers, in simulated time."""

from __future__ import annotations

import numpy as np
import pytest
from simulator.factories import load_benchmark

from pointsman.routing.calibration import typical_step_s

benchmark = load_benchmark("estimates")
LINEAR, _ = benchmark.CLUSTERS


def steps_at(served: object, time: float) -> np.ndarray:
    """[R] the typical step of each server, as it was estimated then."""
    return served.steps_s[np.searchsorted(served.at, time) - 1]  # type: ignore[attr-defined,no-any-return]


@pytest.mark.parametrize("policy", ["least-outstanding", "default"])
def test_within_ten_per_cent_after_200_requests_a_server(policy: str) -> None:
    plans, workload = benchmark.prepared(LINEAR, 0.6, 900, seed=950)
    served = benchmark.serve(plans, workload, policy)
    errors = benchmark.errors_of(served, plans)
    assert served.num_served[-1].min() > 220
    for k in range(len(plans)):
        assert errors[served.num_served[:, k] >= 200, k].max() < 0.1


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("is_told", [False, True])
def test_a_server_that_changes_is_noticed_within_half_a_minute(is_told: bool, restarts: bool) -> None:
    """It throttles, or it restarts on something slower; then it is as before."""
    plans, workload = benchmark.prepared(LINEAR, 0.3, 900, seed=951)
    told = [benchmark.figures_of(plan) for plan in plans] if is_told else None
    changes = [benchmark.Change(35.0, 0, 1.8, restarts), benchmark.Change(70.0, 0, 1.0, restarts)]
    served = benchmark.serve(plans, workload, "default", told, changes)
    assert served.at[-1] > 100.0
    truth = [typical_step_s(benchmark.figures_of(plan)) for plan in plans]
    for time, factor in ((34.0, 1.0), (65.0, 1.8), (100.0, 1.0)):
        assert steps_at(served, time) == pytest.approx([factor * truth[0], truth[1]], rel=0.12), time
