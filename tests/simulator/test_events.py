"""Planned events: a replica slows down, dies, comes back, joins, drains."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from .factories import (
    Run,
    assert_all_served,
    assert_same_outcome,
    make_cluster,
    make_workload,
    random_workload,
)

# At most 8 sequences, so that there is a queue.
SCHEDULERS: dict[str, dict[str, Any]] = {
    "vllm-v1": {"kind": "vllm-v1", "num_blocks": 320, "max_num_seqs": 8},
    "vllm": {"kind": "vllm", "num_blocks": 320, "max_batch_size": 8},
    "sarathi": {"kind": "sarathi", "num_blocks": 320, "max_batch_size": 8, "chunk_size": 32},
    "orca": {"kind": "orca", "num_blocks": 320, "max_batch_size": 8, "max_sequence_tokens": 640},
}
STEP_S = 0.25
FIXED = {"kind": "linear", "a": STEP_S}


def event(at_s: float, kind: str, replica: int = 0, **options: float) -> dict[str, Any]:
    return {"at_s": at_s, "kind": kind, "replica": replica, **options}


def serial_cluster(*events: dict[str, Any], **cluster: Any) -> Any:
    """Replicas that run one sequence at a time, each step taking STEP_S."""
    scheduler = {"kind": "vllm-v1", "max_num_seqs": 1, "max_num_batched_tokens": 64, "num_blocks": 100}
    return make_cluster(scheduler=scheduler, cost=FIXED, events=events, **cluster)


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_failure_sends_everything_again_from_scratch(kind: str, num_stages: int) -> None:
    scheduler = SCHEDULERS[kind] | {"pipeline_stages": num_stages}
    workload = random_workload(200, 80.0, mean_tokens=50)
    calm = Run(make_cluster(scheduler=scheduler), workload).to_end()
    run = Run(make_cluster(scheduler=scheduler, events=[event(2.0, "fail")]), workload).to_end()
    assert_all_served(run)

    before, after = calm.requests, run.requests
    was_sent = before["dispatched_at"] < 2.0
    is_lost = was_sent & (before["replica"] == 0) & (before["completed_at"] > 2.0)
    assert is_lost.sum() > 5
    assert run.sim.num_resent == is_lost.sum()
    assert np.all(after["dispatched_at"][is_lost] == 2.0)
    assert np.all(after["restarts"][is_lost] >= 1)
    assert np.all(after["replica"][is_lost | ~was_sent] == 1)
    assert np.all(after["completed_at"][is_lost] > 2.0)

    # What the client saw before stays: the first token, and everything that was finished.
    has_token = is_lost & (before["first_token_at"] < 2.0)
    assert has_token.sum() > 2 and np.sum(is_lost & ~has_token) > 0
    np.testing.assert_array_equal(after["first_token_at"][has_token], before["first_token_at"][has_token])
    np.testing.assert_array_equal(after["scheduled_at"][has_token], before["scheduled_at"][has_token])
    assert np.all(after["first_token_at"][is_lost & ~has_token] > 2.0)
    is_done = before["completed_at"] <= 2.0
    np.testing.assert_array_equal(after[is_done], before[is_done])


def test_request_sent_again_takes_its_full_time() -> None:
    run = Run(serial_cluster(event(1.0, "fail")), make_workload([0.0], 10, 8), "round-robin").to_end()
    request = run.requests[0]
    assert (request.replica, request.restarts, request.dispatched_at) == (1, 1, 1.0)
    assert request.first_token_at == STEP_S
    assert request.completed_at == 1.0 + 8 * STEP_S
    assert run.sim.num_held == 0 and run.sim.held_s == 0.0  # sent at once, both times


def test_queue_keeps_the_order_of_arrival_through_a_failure() -> None:
    """Returned requests come before those that arrived while nobody was there."""
    events = [event(0.6, "fail"), event(5.0, "recover")]
    run = Run(serial_cluster(*events, replicas=1), make_workload([0.0, 0.1, 0.2, 0.7, 3.0], 5, 2)).to_end()
    assert run.requests["dispatched_at"].tolist() == [0.0, 5.0, 5.0, 5.0, 5.0]
    assert run.requests["completed_at"].tolist() == [0.5, 5.5, 6.0, 6.5, 7.0]
    assert run.requests["restarts"].tolist() == [0, 1, 1, 0, 0]


def test_failed_replica_starts_empty_when_it_comes_back() -> None:
    events = [event(0.6, "fail"), event(0.6, "recover")]
    run = Run(serial_cluster(*events, replicas=1), make_workload([0.0], 5, 4)).to_end()
    # The step that was under way ends at 0.75 on a replica that no longer knows of it.
    assert run.requests["completed_at"][0] == 0.6 + 4 * STEP_S
    assert run.sim.num_batches == 2 + 4


def test_nothing_happens_to_the_dead_or_the_living_twice() -> None:
    workload = random_workload(60, 20.0)
    once = [event(1.0, "fail"), event(2.0, "recover")]
    twice = [event(1.0, "fail"), event(1.5, "fail"), event(2.0, "recover"), event(2.5, "recover")]
    runs = [Run(make_cluster(events=events), workload).to_end() for events in (once, twice)]
    assert_same_outcome(*runs)


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_draining_replica_finishes_what_it_has_and_gets_nothing_new(kind: str) -> None:
    workload = random_workload(150, 40.0)
    run = Run(make_cluster(scheduler=SCHEDULERS[kind], events=[event(2.0, "drain")]), workload).to_end()
    assert_all_served(run)
    is_late = run.requests["dispatched_at"] >= 2.0
    assert is_late.sum() > 50
    assert np.all(run.requests["replica"][is_late] == 1)
    assert run.sim.num_resent == 0

    # It serves the others as if nothing more had come.
    mine = run.requests["replica"] == 0
    assert np.any(run.requests["completed_at"][mine] > 2.5)
    columns = (run.requests["arrived_at"], run.requests["num_prefill"], run.requests["num_decode"])
    alone = Run(
        make_cluster(scheduler=SCHEDULERS[kind], replicas=1),
        make_workload(*(column[mine] for column in columns)),
    ).to_end()
    np.testing.assert_array_equal(run.requests["completed_at"][mine], alone.requests["completed_at"])


def test_drained_replica_can_return() -> None:
    events = [event(1.0, "drain"), event(2.0, "recover")]
    run = Run(make_cluster(events=events), random_workload(120, 40.0), "round-robin").to_end()
    sent_at = run.requests["dispatched_at"][run.requests["replica"] == 0]
    assert not np.any((sent_at >= 1.0) & (sent_at < 2.0))
    assert np.any(sent_at < 1.0) and np.any(sent_at > 2.0)


def test_replica_that_joins_is_not_there_before() -> None:
    run = Run(
        make_cluster(events=[event(1.0, "join", 1)]), random_workload(120, 40.0), "round-robin"
    ).to_end()
    sent_at = run.requests["dispatched_at"][run.requests["replica"] == 1]
    assert sent_at.min() >= 1.0
    assert len(sent_at) == pytest.approx(np.sum(run.requests["dispatched_at"] >= 1.0) / 2, abs=1)


def test_recovery_alone_does_not_mean_absence_before() -> None:
    workload = random_workload(60, 20.0)
    calm = Run(make_cluster(), workload).to_end()
    assert_same_outcome(calm, Run(make_cluster(events=[event(1.0, "recover", 1)]), workload).to_end())


def test_requests_wait_at_the_router_until_somebody_is_there() -> None:
    cluster = serial_cluster(event(3.0, "join"), replicas=1, hold={"max_hold_s": 0.5})
    run = Run(cluster, make_workload([0.0, 1.0, 4.0], 5, 1)).to_end()
    assert run.requests["dispatched_at"].tolist() == [3.0, 3.0, 4.0]
    assert run.sim.num_held == 2 and run.sim.held_s == 3.0 + 2.0
    assert run.sim.num_decisions == 3


def batch_times(run: Run, replica: int) -> tuple[np.ndarray, np.ndarray]:
    log = run.batch_log[: run.sim.num_logged_batches]
    mine = log[log["replica"] == replica]
    return mine["formed_at"], mine["ended_at"] - mine["formed_at"]


@pytest.mark.parametrize("own_slowdown", [1.0, 2.0])
def test_slow_replica_takes_exactly_that_many_times_as_long(own_slowdown: float) -> None:
    """The factor comes on top of the group's own; a step that has begun ends as planned."""
    groups = [{"slowdown": own_slowdown}, {}]
    events = [event(2.1, "slow", factor=4.0), event(20.1, "slow", factor=1.0)]
    cluster = serial_cluster(*events, replicas=groups)
    run = Run(cluster, make_workload([0.0] * 8, 5, 40), num_logged_batches=10_000).to_end()
    formed_at, step_s = batch_times(run, 0)
    is_slow = (formed_at > 2.1) & (formed_at < 20.1)
    assert is_slow.sum() > 8 and np.sum(~is_slow) > 8
    assert np.all(step_s[is_slow] == 4.0 * own_slowdown * STEP_S)
    assert np.all(step_s[~is_slow] == own_slowdown * STEP_S)
    assert np.all(batch_times(run, 1)[1] == STEP_S)


def test_busy_time_of_a_replica_that_slows_down_in_the_middle_of_a_step() -> None:
    cluster = serial_cluster(event(0.1, "slow", factor=100.0), replicas=1)
    run = Run(cluster, make_workload([0.0], 5, 3), num_logged_batches=100).to_end()
    assert run.replicas["busy_s"][0] == pytest.approx(batch_times(run, 0)[1].sum())


def test_busy_time_of_a_pipeline_is_the_mean_over_its_stages() -> None:
    scheduler = {"kind": "vllm-v1", "num_blocks": 100, "pipeline_stages": 2}
    cluster = make_cluster(replicas=1, scheduler=scheduler, cost=FIXED)
    run = Run(cluster, make_workload([0.0, 0.1, 0.2], 5, 7)).to_end()
    assert run.replicas["busy_s"][0] == pytest.approx(STEP_S * run.sim.num_batches)


def test_busy_time_of_a_replica_that_fails_in_the_middle_of_a_step() -> None:
    cluster = make_cluster(cost={"kind": "linear", "a": 10.0}, events=[event(1.0, "fail")])
    run = Run(cluster, make_workload([0.0], 5, 1)).to_end()
    assert run.requests["completed_at"][0] == 11.0
    assert run.replicas["busy_s"].tolist() == [1.0, 10.0]


@pytest.mark.parametrize("kind", ["slow", "fail", "drain", "join"])
def test_event_at_the_instant_of_an_arrival_goes_first(kind: str) -> None:
    """The request arrives at 1.0, when replica 0 changes: it is already slow, gone, or there."""
    others = [event(0.0, "drain", 1)] if kind in ("slow", "join") else []
    cluster = serial_cluster(event(1.0, kind, factor=2.0), *others)
    run = Run(cluster, make_workload([1.0], 5, 1)).to_end()
    request = run.requests[0]
    assert request.replica == (1 if kind in ("fail", "drain") else 0)
    assert request.dispatched_at == 1.0
    assert request.completed_at == 1.0 + STEP_S * (2 if kind == "slow" else 1)


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("num_blocks", [14, 200])
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_intervals_add_up_through_failures(kind: str, num_blocks: int, num_stages: int) -> None:
    """The gap between the last token before a failure and the first after it counts once."""
    scheduler = SCHEDULERS[kind] | {"num_blocks": num_blocks, "pipeline_stages": num_stages}
    scheduler |= {"max_sequence_tokens": 64} if kind == "orca" else {}
    events = []
    for second in range(2, 40, 4):
        events += [event(second + 0.1, "fail"), event(second + 1.1, "recover")]
    cluster = make_cluster(replicas=1, scheduler=scheduler, cost={"kind": "linear", "a": 0.2}, events=events)
    run = Run(cluster, make_workload(np.arange(0.0, 30.0, 1.3), 20, 40)).to_end()
    assert_all_served(run)
    assert run.sim.num_resent > 10
    streams_s = (run.requests["completed_at"] - run.requests["first_token_at"]).sum()
    assert run.intervals_s() == pytest.approx(streams_s, rel=0.01)


@pytest.mark.parametrize("kind", ["vllm", "sarathi"])
def test_intervals_add_up_when_a_batch_under_memory_pressure_fails(kind: str) -> None:
    scheduler = {"kind": kind, "num_blocks": 13, "block_size": 16, "watermark": 0.0}
    events = [event(2.95, "fail"), event(2.95, "recover")]
    cluster = make_cluster(replicas=1, scheduler=scheduler, cost={"kind": "linear", "a": 0.1}, events=events)
    run = Run(cluster, make_workload([0.0] * 4, 20, 100)).to_end()
    streams_s = (run.requests["completed_at"] - run.requests["first_token_at"]).sum()
    assert run.intervals_s() == pytest.approx(streams_s, rel=0.012)  # 12 % more
