"""How long runs are, and what of them counts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pointsman.evaluation import steady
from pointsman.evaluation.steady import growth, num_needed, stretch_of
from pointsman.workload import WorkloadSpec


def spec_of(arrivals: dict[str, Any], **more: Any) -> WorkloadSpec:
    return WorkloadSpec.model_validate({"arrivals": arrivals, "lengths": "azure-conv", **more})


POISSON = spec_of({"kind": "poisson", "rate": 10.0})


def test_many_servers_get_minutes_and_a_high_load_gets_more_requests() -> None:
    few, many = (stretch_of(POISSON, rate, 0.5, rate) for rate in (10.0, 1000.0))
    assert few.end_s == pytest.approx(4000) and many.end_s == pytest.approx(240)
    assert few.warm_up_s == pytest.approx(0.2 * few.end_s)
    assert num_needed(10.0, 0.99) == pytest.approx(200_000), "20 times 1 / (1 - load)²"
    assert num_needed(10.0, 0.0) == num_needed(10.0, 3.0) == steady.FEWEST_REQUESTS


@pytest.mark.parametrize("more", [{"requests": 150_000}, {"duration_s": 15_000.0}])
def test_a_run_is_at_least_what_the_file_says(more: dict[str, Any]) -> None:
    stretch = stretch_of(spec_of({"kind": "poisson", "rate": 10.0}, **more), 10.0, 0.5, 10.0)
    assert stretch.end_s == pytest.approx(15_000)


@pytest.mark.parametrize("rate_rps", [5.0, 50.0, 500.0])
def test_days_are_whole_however_fast_the_traffic(rate_rps: float) -> None:
    stretch = stretch_of(spec_of({"kind": "diurnal", "rate": 9.0, "period_s": 3600}), rate_rps, 0.5, 9.0)
    num_days = (stretch.end_s - stretch.warm_up_s) / 3600
    assert num_days >= 1 and num_days == pytest.approx(round(num_days))


def test_bursts_and_sessions_are_many() -> None:
    bursts = spec_of({"kind": "mmpp", "rate": 9.0, "burst_s": 100, "calm_s": 500})
    assert stretch_of(bursts, 100.0, 0.5, 9.0).end_s == pytest.approx(20 * 600)
    turns = spec_of({"kind": "poisson", "rate": 9.0}, prefixes={"turns": 5, "think_s": 600}, requests=9)
    assert stretch_of(turns, 100.0, 0.0, 9.0).end_s == pytest.approx(10 * 4 * 600)
    uneven = spec_of({"kind": "gamma", "rate": 9.0, "cv": 3})
    assert stretch_of(uneven, 10.0, 0.5, 9.0).end_s == pytest.approx(5 * 4000)


def test_a_ramp_is_judged_as_a_whole() -> None:
    ramp = spec_of({"kind": "ramp", "rate": 9.0}, requests=3000)
    stretch = stretch_of(ramp, 10.0, 0.5, 5.0)
    assert stretch == (0.0, 300.0) and not stretch.is_steady


@pytest.mark.parametrize(("served_rps", "grown"), [(10.0, 0.0), (9.5, 0.05), (9.0, 0.1)])
def test_growth_is_what_nobody_serves(served_rps: float, grown: float) -> None:
    """Arrivals at 10/s; what is there for 5 s from the beginning is no growth."""
    count = 40_000
    requests = np.zeros(count, [("arrived_at", "f8"), ("completed_at", "f8")])
    requests["arrived_at"] = np.arange(count) / 10
    requests["completed_at"] = 5 + np.arange(count) / served_rps
    assert growth(requests, 800.0, 4000.0) == pytest.approx(grown, abs=0.003)
