"""Drawn jobs are distributed as described, and follow from the seed."""

from __future__ import annotations

import numpy as np
import pytest

from pointsman.errors import InputError
from pointsman.jobs.workload import JobsWorkloadSpec, draw_jobs
from pointsman.spec import parse_spec

MANY = JobsWorkloadSpec(num_jobs=100_000)
LONGEST_S = 10_000.0


def test_durations_have_a_heavy_tail() -> None:
    share = draw_jobs(MANY, 8, 0).duration_s / LONGEST_S
    is_short = share < 0.08
    assert share.min() >= 0.01 and share.max() <= 1.0
    assert is_short.mean() == pytest.approx(0.85, abs=0.005)
    assert share[is_short].mean() == pytest.approx(0.045, abs=0.0005)
    # Log-uniform: the logarithm is uniform, from 0.08 to 1.
    logs = np.log(share[~is_short]) / np.log(0.08)
    assert logs.mean() == pytest.approx(0.5, abs=0.01)
    assert np.quantile(logs, (0.1, 0.9)) == pytest.approx((0.1, 0.9), abs=0.02)


def test_uniform_durations() -> None:
    share = draw_jobs(JobsWorkloadSpec(num_jobs=50_000, durations="uniform"), 8, 0).duration_s / LONGEST_S
    assert np.quantile(share, (0.0, 0.5, 1.0)) == pytest.approx((0.05, 0.125, 0.2), abs=0.002)


@pytest.mark.parametrize(("num_gpus", "widest"), [(4, 4), (8, 8), (64, 8)])
def test_gpus_and_priorities_follow_the_duration(num_gpus: int, widest: int) -> None:
    jobs = draw_jobs(MANY, num_gpus, 1)
    share = jobs.duration_s / LONGEST_S
    # The correlated part of a job just short of the longest is one less than the widest, and so is the sum.
    assert (jobs.gpus.min(), jobs.gpus.max()) == (1, widest - 1)
    assert (jobs.priority.min(), jobs.priority.max()) == (1, 9)
    # All that a job of about half the longest duration can be: 0.7 of one value and 0.3 of any.
    near = np.abs(share - 0.5) < 0.01
    width = 1 + int(0.5**0.6 * (widest - 1))
    possible = {round(0.7 * width + 0.3 * other) for other in range(1, widest + 1)}
    assert set(jobs.gpus[near].tolist()) == possible
    urgency = 1 + int(0.5**0.8 * 9)
    assert set(jobs.priority[near].tolist()) == {round(0.6 * urgency + 0.4 * k) for k in range(1, 11)}


def test_arrivals_come_in_bursts() -> None:
    for seed in range(5):
        arrived_at = draw_jobs(MANY, 8, seed).arrived_at
        assert (np.diff(arrived_at) >= 0).all()
        assert arrived_at[0] >= 0 and arrived_at[-1] <= LONGEST_S
        counts, _ = np.histogram(arrived_at, 100, (0.0, LONGEST_S))
        # A fifth is even; of six bursts, each ± 3 % of the span, some may fall together.
        assert np.sort(counts)[:10].mean() < 400
        assert counts.max() > 2500
    assert not draw_jobs(JobsWorkloadSpec(arrivals="all_at_zero"), 8, 0).arrived_at.any()


def test_the_seed_decides() -> None:
    first, again, other = (draw_jobs(JobsWorkloadSpec(), 8, seed) for seed in (3, 3, 4))
    for name in ("arrived_at", "duration_s", "gpus", "priority"):
        assert np.array_equal(getattr(first, name), getattr(again, name))
        assert not np.array_equal(getattr(first, name), getattr(other, name))


def test_the_horizon_is_slack_times_the_packed_work_after_the_last_arrival() -> None:
    jobs = draw_jobs(JobsWorkloadSpec(), 8, 0)
    work = sum(duration * gpus for duration, gpus in zip(jobs.duration_s, jobs.gpus, strict=True))
    assert jobs.horizon_s(8, 1.3) == pytest.approx(jobs.arrived_at.max() + 1.3 * work / 8)


def test_bad_settings() -> None:
    with pytest.raises(InputError, match=r"workload\.arrivals = 'poisson': must be 'bursty' or"):
        parse_spec(JobsWorkloadSpec, {"arrivals": "poisson"}, "workload")
    with pytest.raises(InputError, match=r"workload\.num_job = 3: unknown key; did you mean 'num_jobs'"):
        parse_spec(JobsWorkloadSpec, {"num_job": 3}, "workload")
