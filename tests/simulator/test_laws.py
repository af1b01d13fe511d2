"""What holds for every cluster, workload and policy: Little's law, conservation, bounds, queueing theory."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pointsman.routing.policy import PolicySpec
from pointsman.routing.records import NOBODY
from pointsman.routing.signals import ORACLE, OWN, SIGNALS
from pointsman.simulator.spec import ClusterSpec
from pointsman.workload import Workload

from . import chaos
from .factories import Run, assert_all_served, make_cluster, make_policy, make_workload, random_workload

# Rows that count requests or tokens of the moment: back to zero when all is done.
COUNTS = [one.name for one in SIGNALS if one.source in (OWN, ORACLE) and one.unit in ("requests", "tokens")]


def assert_nothing_is_left(run: Run) -> None:
    sim, replicas = run.sim, run.replicas
    assert (
        sim.num_in_system == sim.router.queue_size == sim.sum_outstanding == sim.sum_squared_outstanding == 0
    )
    for name in COUNTS:
        np.testing.assert_array_equal(run.signal(name), 0.0, err_msg=name)
    np.testing.assert_allclose(run.signal("sent_at_sum"), 0.0, atol=1e-6)
    for field in ("used_blocks", "num_holding", "num_running", "num_decoding", "num_partial", "num_fresh"):
        np.testing.assert_array_equal(replicas[field], 0, err_msg=field)
    for field in ("num_waiting", "num_in_flight", "sum_processed"):
        np.testing.assert_array_equal(replicas[field], 0, err_msg=field)
    for phases in run.clusters.arrays("phase_count"):
        assert not phases.any()


def assert_littles_law(run: Run) -> None:
    """The time integral of the requests in the system is the sum of the times they spent there."""
    latency_s = run.requests["completed_at"] - run.requests["arrived_at"]
    assert run.sim.in_system_area == pytest.approx(math.fsum(latency_s), rel=1e-9)


@given(
    cluster=chaos.clusters(),
    workload=chaos.workloads(),
    policy=chaos.policies(),
    seed=st.integers(0, 9),
)
def test_every_request_comes_out_once_and_nothing_is_left(
    cluster: ClusterSpec, workload: Workload, policy: PolicySpec, seed: int
) -> None:
    run = Run(cluster, workload, policy, seed).to_end()
    assert_all_served(run)
    assert_littles_law(run)
    assert_nothing_is_left(run)
    num_sent = run.replicas["num_sent"]
    assert num_sent.sum() == len(workload) + run.sim.num_resent
    assert run.requests["restarts"].sum() == run.sim.num_preemptions + run.sim.num_resent


@settings(max_examples=settings.default.max_examples // 3)
@given(cluster=chaos.clusters(), workload=chaos.workloads(), seed=st.integers(0, 2**32 - 1))
def test_books_agree_with_a_recount_at_every_decision(
    cluster: ClusterSpec, workload: Workload, seed: int
) -> None:
    """Policy outside the kernel: at random wherever the server takes it, a tenth of the time it holds."""
    rng = np.random.default_rng(seed)
    run = Run(cluster, workload, None)
    for request in run.decisions():
        assert run.requests["replica"][request] == NOBODY
        assert run.requests["completed_at"][request] < 0
        assert_books_agree(run)
        takers = run.takers(request)
        run.action = 0 if rng.random() < 0.1 or not takers else int(rng.choice(takers)) + 1
    assert_all_served(run)
    assert_littles_law(run)
    assert_nothing_is_left(run)


def assert_books_agree(run: Run) -> None:
    """Rows of the signal table against what the table of requests says."""
    requests, replicas = run.requests, run.replicas
    is_out = (requests["replica"] != NOBODY) & (requests["completed_at"] < 0)
    here = requests[is_out]
    tickets = run.tickets[is_out]
    is_seen = tickets["is_started"] == 1
    num_tokens = run.num_tokens()[is_out]

    def total(values: np.ndarray, mask: np.ndarray) -> np.ndarray:
        return np.bincount(here["replica"], np.where(mask, values, 0), minlength=len(replicas))

    every = np.ones(len(here), bool)
    expected = {
        "outstanding": total(every, every),
        "waiting": total(every, ~is_seen),
        "decoding": total(every, is_seen),
        "pending_prefill_tokens": total(here["num_prefill"], ~is_seen),
        "context_tokens": total(num_tokens, is_seen),
        "generated_tokens": total(num_tokens - here["num_prefill"], is_seen),
        "expected_tokens": total(tickets["expected_output"], every),
        "queue_length": replicas["num_waiting"],
        "accepting": replicas["is_accepting"],
    }
    for name, values in expected.items():
        assert run.signal(name).tolist() == values.tolist(), name
    sent_at_sum = total(here["dispatched_at"], ~is_seen)
    np.testing.assert_allclose(run.signal("sent_at_sum"), sent_at_sum, atol=1e-6)
    assert np.all((replicas["used_blocks"] >= 0) & (replicas["used_blocks"] <= replicas["num_blocks"]))
    assert np.all(replicas["num_holding"] + replicas["num_waiting"] == run.signal("outstanding"))
    if run.sim.num_users == 0:
        is_in_system = (requests["completed_at"] < 0) & (requests["arrived_at"] <= run.sim.now)
        assert run.sim.num_in_system == is_in_system.sum()


def test_books_when_sarathi_evicts_a_recomputed_prompt() -> None:
    """Vidur's quirk makes it replay what it had generated; the router's rows must come back to zero."""
    scheduler = {"kind": "sarathi", "num_blocks": 8, "block_size": 4, "chunk_size": 5}
    cluster = make_cluster(replicas=1, scheduler=scheduler, cost={"kind": "linear", "a": 0.125})
    run = Run(cluster, make_workload([0.0] * 3, 6, 20)).to_end()
    assert_all_served(run)
    assert run.signal("context_tokens")[0] == 0.0  # 27
    assert run.signal("generated_tokens")[0] == 0.0  # 27


@settings(max_examples=settings.default.max_examples // 8)
@given(cluster=chaos.clusters(), workload=chaos.workloads(), policy=chaos.policies())
def test_memory_holds_after_every_batch(cluster: ClusterSpec, workload: Workload, policy: PolicySpec) -> None:
    run = Run(cluster, workload, policy, num_logged_batches=1)
    while run.step():
        batch = run.batch_log[0]
        replica = run.replicas[batch.replica]
        assert 0 <= batch.used_blocks <= replica.num_blocks
        assert 0 < batch.num_seqs <= run.plans[batch.replica].max_seqs
        assert (batch.prefill_tokens > 0) == (batch.num_seqs > batch.num_decodes)
        if run.plans[batch.replica].scheduler.kind == "vllm-v1":
            assert batch.num_decodes + batch.prefill_tokens <= replica.max_batch_tokens
        run.sim.num_logged_batches = 0


@settings(max_examples=settings.default.max_examples // 3)
@given(cluster=chaos.clusters(), workload=chaos.workloads(), limit=st.sampled_from((0.95, 0.3, 1e-9)))
def test_holding_is_bounded(cluster: ClusterSpec, workload: Workload, limit: float) -> None:
    """While a replica accepts requests, none stays with the router for longer than max_hold_s and a timer."""
    cluster = cluster.model_copy(update={"events": ()})
    run = Run(cluster, workload, make_policy("hold-until-room", kv_limit=limit)).to_end()
    held_s = run.requests["dispatched_at"] - run.requests["arrived_at"]
    assert held_s.max() <= cluster.hold.max_hold_s + cluster.hold.timer_s + 1e-9
    assert run.sim.held_s == pytest.approx(math.fsum(held_s), abs=1e-9)
    assert run.sim.num_held == np.sum(held_s > 0)


def num_intervals(run: Run) -> int:
    return int(run.clusters.tbt_histograms[0].sum())


@pytest.mark.parametrize("kind", chaos.KINDS)
@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("num_blocks", [12, 400])
def test_every_token_but_the_first_has_an_interval(kind: str, num_stages: int, num_blocks: int) -> None:
    """And the intervals of a stream add up to the time from its first to its last token."""
    scheduler = {"kind": kind, "block_size": 16, "num_blocks": num_blocks, "pipeline_stages": num_stages}
    if kind == "orca":
        scheduler |= {"max_sequence_tokens": 176}
    workload = random_workload(400, 8.0, seed=1)
    short = (workload.num_prefill_tokens + workload.num_decode_tokens) < 176
    columns = ("arrived_at", "num_prefill_tokens", "num_decode_tokens")
    workload = make_workload(*(getattr(workload, name)[short] for name in columns))
    cluster = make_cluster(replicas=2, scheduler=scheduler)
    run = Run(cluster, workload).to_end()
    assert_all_served(run)
    if kind != "orca":
        assert (run.sim.num_preemptions > 0) == (num_blocks == 12)
    # Vidur's sarathi plays the rest of an evicted partial prompt again, token by token.
    assert num_intervals(run) == (workload.num_decode_tokens - 1).sum() or kind == "sarathi"
    streams_s = (run.requests["completed_at"] - run.requests["first_token_at"]).sum()
    assert run.intervals_s() == pytest.approx(streams_s, rel=0.01)


def test_busy_time_is_the_time_of_the_batches() -> None:
    cluster = make_cluster(replicas=[{"slowdown": 1.0}, {"slowdown": 3.0}])
    run = Run(cluster, random_workload(200, 6.0), num_logged_batches=100_000).to_end()
    log = run.batch_log[: run.sim.num_logged_batches]
    for k in range(2):
        mine = log[log["replica"] == k]
        assert run.replicas["busy_s"][k] == pytest.approx(np.sum(mine["ended_at"] - mine["formed_at"]))


def test_memory_use_is_the_integral_of_the_blocks_held() -> None:
    """Orca reserves a fixed number of blocks from the first batch to the last token."""
    scheduler = {"kind": "orca", "num_blocks": 400, "block_size": 16, "max_sequence_tokens": 640}
    run = Run(make_cluster(scheduler=scheduler), random_workload(300, 10.0)).to_end()
    held_s = run.requests["completed_at"] - run.requests["scheduled_at"]
    for k in range(2):
        expected = 40 * held_s[run.requests["replica"] == k].sum()
        assert run.replicas["kv_area"][k] == pytest.approx(expected)


def test_imbalance_is_the_spread_of_outstanding_requests_over_time() -> None:
    run = Run(make_cluster(replicas=3), random_workload(300, 20.0), "random").to_end()
    requests = run.requests
    times = np.concatenate([requests["dispatched_at"], requests["completed_at"]])
    changes = np.zeros((len(times), 3))
    changes[np.arange(len(times)), np.tile(requests["replica"], 2)] = np.repeat([1, -1], len(requests))
    order = np.argsort(times, kind="stable")
    outstanding = np.cumsum(changes[order], axis=0)[:-1]
    elapsed = np.diff(times[order])
    mean = outstanding.mean(axis=1)
    cv = np.divide(outstanding.std(axis=1), mean, out=np.zeros_like(mean), where=mean > 0)
    busy_s = elapsed[mean > 0].sum()
    assert run.sim.busy_span == pytest.approx(busy_s)
    assert run.sim.imbalance_area == pytest.approx((cv * elapsed).sum())


# Queueing theory. A replica that runs one sequence at a time, each step taking STEP_S whatever it holds, is a
# single server; a geometric number of output tokens makes its service time all but exponential.
STEP_S = 0.001


def mean_wait_s(outputs: np.ndarray, load: float, num_replicas: int, policy: str, **options: float) -> float:
    """Mean time until service begins, Poisson arrivals at `load` of the capacity."""
    rng = np.random.default_rng(7)
    rate_rps = load * num_replicas / (outputs.mean() * STEP_S)
    workload = make_workload(np.cumsum(rng.exponential(1 / rate_rps, len(outputs))), 1, outputs)
    cluster = make_cluster(
        replicas=num_replicas,
        scheduler={"kind": "vllm-v1", "max_num_seqs": 1, "max_num_batched_tokens": 1, "num_blocks": 1000},
        cost={"kind": "linear", "a": STEP_S},
        hold={"max_hold_s": 1e9},
        signals={"scrape_interval_s": 1000.0},
    )
    run = Run(cluster, workload, make_policy(policy, **options), seed=3).to_end()
    assert_all_served(run)
    return float(np.mean(run.requests["scheduled_at"] - run.requests["arrived_at"]))


def pollaczek_khinchine_s(outputs: np.ndarray, load: float) -> float:
    """Mean wait in M/G/1, with the moments of the sample itself."""
    service_s = outputs * STEP_S
    return load / service_s.mean() * np.mean(service_s**2) / (2 * (1 - load))


def erlang_c(num_servers: int, load: float) -> float:
    """Probability of waiting in M/M/k."""
    offered = num_servers * load
    terms = [offered**n / math.factorial(n) for n in range(num_servers + 1)]
    waiting = terms[-1] / (1 - load)
    return waiting / (sum(terms[:-1]) + waiting)


def geometric(mean: float, count: int) -> np.ndarray:
    return np.random.default_rng(11).geometric(1 / mean, count)


@pytest.mark.parametrize("load", [0.3, 0.6])
def test_one_server_with_fixed_service_is_md1(load: float) -> None:
    outputs = np.full(100_000, 20)
    expected = load * 20 * STEP_S / (2 * (1 - load))
    assert pollaczek_khinchine_s(outputs, load) == pytest.approx(expected)
    assert mean_wait_s(outputs, load, 1, "round-robin") == pytest.approx(expected, rel=0.03)


def test_one_server_with_exponential_service_is_mm1() -> None:
    outputs = geometric(25, 200_000)
    expected = pollaczek_khinchine_s(outputs, 0.6)
    assert expected == pytest.approx(
        0.6 / 0.4 * 25 * STEP_S, rel=0.04
    )  # M/M/1 but for a geometric's variance
    assert mean_wait_s(outputs, 0.6, 1, "round-robin") == pytest.approx(expected, rel=0.03)


def test_random_routing_is_independent_single_servers() -> None:
    outputs = geometric(25, 200_000)
    expected = pollaczek_khinchine_s(outputs, 0.6)
    assert mean_wait_s(outputs, 0.6, 3, "random") == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("num_replicas", [2, 5])
def test_central_queue_is_mmk(num_replicas: int) -> None:
    """A replica is only given a request when it is idle: `kv_limit` leaves no other way in."""
    load, mean = 0.8, 50
    outputs = geometric(mean, 150_000)
    wait = mean_wait_s(outputs, load, num_replicas, "hold-until-room", kv_limit=1e-9)
    exponential = erlang_c(num_replicas, load) * mean * STEP_S / (num_replicas * (1 - load))
    variation = np.var(outputs) / np.mean(outputs) ** 2
    assert wait == pytest.approx(exponential * (1 + variation) / 2, rel=0.04)


def test_shortest_queue_lies_between_central_queue_and_random() -> None:
    outputs = geometric(25, 100_000)
    central = mean_wait_s(outputs, 0.8, 4, "hold-until-room", kv_limit=1e-9)
    shortest = mean_wait_s(outputs, 0.8, 4, "least-outstanding")
    two_choices = mean_wait_s(outputs, 0.8, 4, "power-of-two")
    at_random = mean_wait_s(outputs, 0.8, 4, "random")
    assert 1.05 * central < shortest < 0.9 * two_choices < 0.8 * at_random
