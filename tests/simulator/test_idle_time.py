"""Time in which nothing happens costs nothing, and changes nothing that anybody sees."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pointsman.simulator import loop
from pointsman.simulator.state import DECISION, DONE
from pointsman.workload import Workload

from .factories import Run, make_cluster, make_policy, make_workload

add_repeatedly = getattr(loop.add_repeatedly, "py_func", loop.add_repeatedly)
SCRAPED = {"scraped_kv_use": 1.0, "scraped_running": 0.3, "scrape_age_s": 0.1, "outstanding": 0.01}


@given(
    st.floats(0.0, 1e9),
    st.floats(1e-3, 100.0) | st.sampled_from([0.1, 0.25, 0.5, 2.0**-22]),
    st.integers(0, 5000),
)
@settings(max_examples=300, deadline=None)
def test_many_additions_at_once_are_exact(start: float, step: float, num_steps: int) -> None:
    limit = start + num_steps * step
    total = start
    while total < limit:
        total += step
    assert add_repeatedly(start, step, limit) == total


def test_a_million_additions_across_powers_of_two() -> None:
    slow = np.cumsum(np.full(1_000_000, 0.1))  # adds one by one
    assert add_repeatedly(0.1, 0.1, 99_999.95) == slow[np.searchsorted(slow, 99_999.95)]


def gappy_workload(num_bursts: int, gap_s: float) -> Workload:
    """Bursts with nothing between them, each at another phase of the scrapes."""
    rng = np.random.default_rng(7)
    starts = np.cumsum(gap_s * (1 + rng.random(num_bursts)))
    times = np.sort((starts[:, None] + rng.exponential(0.05, (num_bursts, 12))).ravel())
    return make_workload(times, 1 + rng.integers(1, 300, len(times)), 1 + rng.integers(1, 60, len(times)))


def walked(run: Run, every_s: float) -> Run:
    """To the end in slices too short to leave out a scrape."""
    run.sim.stop_at = every_s
    while run.step():
        assert run.sim.status != DECISION
        run.sim.stop_at = run.sim.now + every_s
    return run


@pytest.mark.parametrize("delay_s", [0.0, 0.03, 0.1])
@pytest.mark.parametrize(
    "events",
    [
        (),
        (
            {"at_s": 100.0, "kind": "fail", "replica": 0},
            {"at_s": 101.0, "kind": "fail", "replica": 1},
            {"at_s": 400.0, "kind": "recover", "replica": 0},
        ),
    ],
    ids=["gaps", "nobody accepts"],
)
@pytest.mark.parametrize("users", [0, 3])
def test_the_same_as_scrape_by_scrape(delay_s: float, events: Any, users: int) -> None:
    cluster = make_cluster(
        signals={"scrape_interval_s": 0.1, "scrape_delay_s": delay_s},
        scheduler={"kind": "vllm-v1", "num_blocks": 100},
        events=events,
    )
    workload = gappy_workload(12, 40.0)
    if users:
        think_s = np.random.default_rng(3).exponential(30.0, len(workload))
        workload = make_workload(
            np.zeros(len(workload)), workload.num_prefill_tokens, 20, num_users=users, think_s=think_s
        )
    policy = make_policy("linear-score", weights=SCRAPED)
    fast = Run(cluster, workload, policy).to_end()
    slow = walked(Run(cluster, workload, policy), 0.15)
    assert fast.sim.status == DONE and fast.sim.num_completed == len(workload)
    assert slow.sim.next_seq - fast.sim.next_seq > 2_000  # events left out
    assert fast.requests.tobytes() == slow.requests.tobytes()
    assert fast.table.tobytes() == slow.table.tobytes()
    assert fast.sim.now == slow.sim.now


@pytest.mark.parametrize("gap_s", [1e4, 1e9])
def test_a_gap_of_years_takes_a_few_events(gap_s: float) -> None:
    run = Run(make_cluster(), make_workload([0.0, gap_s, 2 * gap_s])).to_end()
    assert run.sim.num_completed == 3
    assert run.sim.next_seq < 300
    age_s = run.requests["dispatched_at"][-1] - run.signal("scraped_at")
    assert np.all(age_s <= 0.15)
