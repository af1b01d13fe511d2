"""Whose turn it is: small requests go first, and nobody is overtaken for longer than allowed."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulator.factories import AdvisedRun, Run, assert_same_outcome, make_cluster, make_policy, make_workload

from pointsman.routing.booking import NUM_SIZES
from pointsman.routing.books import Books
from pointsman.routing.core import Core, Request
from pointsman.routing.ordering import Order
from pointsman.routing.policy import PolicySpec
from pointsman.workload import Workload

TIMER_S = 0.05
LIMITS = st.sampled_from((0.0, 0.7, 4.0, 1e6))


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    """Bursts of requests of all sizes."""
    count = draw(st.integers(2, 50))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    pauses = draw(st.sampled_from((0.01, 0.125))) * rng.choice((0, 0, 1, 2, 9), count)
    prompts = (2.0 ** rng.uniform(0.0, 15.9, count)).astype(int)
    return make_workload(np.cumsum(pauses), prompts, rng.integers(1, 40, count))


def make_ordered(overtake_s: float = 0.0, max_hold_s: float = 1e6, **cluster: Any) -> Any:
    """Two replicas that take a while for each request."""
    return make_cluster(
        replicas=2,
        scheduler={"kind": "vllm-v1", "num_blocks": 20_000},
        cost={"kind": "linear", "a": 0.02, "b": 1e-5},
        hold={"overtake_s": overtake_s, "max_hold_s": max_hold_s, "timer_s": TIMER_S},
        **cluster,
    )


ONE_AT_A_TIME = make_policy("hold-until-room", stream_limit=1)


def small_first(share: float) -> PolicySpec:
    return make_policy("hold-until-room", stream_limit=1, small_first=share)


def waits_s(run: Run) -> np.ndarray:
    return np.asarray(run.requests["dispatched_at"] - run.requests["arrived_at"])


@settings(max_examples=settings.default.max_examples // 3)
@given(workload=workloads(), overtake_s=LIMITS, max_hold_s=LIMITS)
def test_overtaking_and_waiting_are_bounded(workload: Workload, overtake_s: float, max_hold_s: float) -> None:
    """Whatever comes, nobody is overtaken by one that arrived `overtake_s` later, or waits for too long."""
    run = Run(make_ordered(overtake_s, max_hold_s), workload, ONE_AT_A_TIME).to_end()
    assert run.sim.num_completed == len(workload)
    assert waits_s(run).max() <= max_hold_s + TIMER_S + 1e-9
    arrived_at, sent_at = run.requests["arrived_at"], run.requests["dispatched_at"]
    for i, j in itertools.combinations(range(len(workload)), 2):
        if sent_at[j] < sent_at[i]:
            assert arrived_at[j] - arrived_at[i] < overtake_s


@settings(max_examples=settings.default.max_examples // 3)
@given(workload=workloads(), share=st.sampled_from((0.2, 1 / 3, 1.0)), max_hold_s=LIMITS)
def test_who_has_waited_for_long_yields_to_few(workload: Workload, share: float, max_hold_s: float) -> None:
    """Nobody is overtaken by one that has waited for less than 2^-(share × 9) of its own wait."""
    run = Run(make_ordered(max_hold_s=max_hold_s), workload, small_first(share)).to_end()
    assert run.sim.num_completed == len(workload)
    assert waits_s(run).max() <= max_hold_s + TIMER_S + 1e-9
    arrived_at, sent_at = run.requests["arrived_at"], run.requests["dispatched_at"]
    for i, j in itertools.combinations(range(len(workload)), 2):
        if sent_at[j] < sent_at[i]:
            waited_s = sent_at[j] - arrived_at[[i, j]]
            assert waited_s[1] >= waited_s[0] * 2.0 ** (-share * (NUM_SIZES - 1)) * (1 - 1e-9) - 1e-9


@pytest.mark.parametrize(
    "policy",
    [small_first(1 / 3), make_policy("late-binding", stream_limit=2, small_first=1.0)],
)
def test_sizes_slow_down_ageing(policy: PolicySpec) -> None:
    """The twin looks at all that wait, and divides their waits by a power of their sizes."""
    rng = np.random.default_rng(4)
    prompts = (2.0 ** rng.uniform(4.0, 18.0, 150)).astype(int)
    workload = make_workload(np.cumsum(rng.exponential(0.05, 150)), prompts, rng.integers(1, 60, 150))
    cluster = make_ordered(max_hold_s=25.0)
    run = AdvisedRun(cluster, workload, policy)
    doublings: dict[int, float] = {}
    num_overtaken = num_overdue = num_crowds = 0
    for request in run.decisions():
        now, rows = float(run.sim.now), run.requests
        waiting = np.flatnonzero((rows["arrived_at"] <= now) & (rows["dispatched_at"] < 0)).tolist()
        for i in waiting:
            if i not in doublings:
                prompt = int(rows["num_prefill"][i])
                tokens = prompt + run.clusters.arrays("output_estimate")[0][prompt.bit_length() - 1]
                doublings[i] = np.clip(np.floor(np.log2(tokens)) - 8, 0, 9)
        is_crowd = len(waiting) > 32  # of two replicas
        power = min(1.0, 2.5 * policy.small_first) if is_crowd else policy.small_first
        usual = np.floor(run.sim.router.usual_size) if is_crowd else 9
        overdue = [i for i in waiting if now - rows["arrived_at"][i] >= 25.0]
        waits = {}
        for i in waiting:
            slower = 1.0 if i in overdue else 2.0 ** (power * min(doublings[i], usual))
            waits[i] = (now - rows["arrived_at"][i]) / slower
        longest = max(waits[i] for i in overdue or waiting)
        assert waits[request] == pytest.approx(longest, rel=1e-9)
        num_overdue += bool(overdue)
        num_crowds += is_crowd
        num_overtaken += request != waiting[0]
        run.action = run.advice()
    assert num_overtaken > 50 and num_overdue > 0 and num_crowds > 20
    assert_same_outcome(Run(cluster, workload, policy).to_end(), run)


def test_the_usual_size_is_the_median_of_what_was_sent() -> None:
    rng = np.random.default_rng(7)
    prompts = (2.0 ** rng.normal(11.0, 2.0, 3000)).astype(int).clip(1, 2**16)
    run = Run(make_ordered(), make_workload(np.arange(3000) * 2.0, prompts, 4), ONE_AT_A_TIME).to_end()
    sizes = np.clip(np.floor(np.log2(prompts + 4)) - 8, 0, 9)
    assert int(run.sim.router.usual_size) == np.median(sizes)


def test_past_saturation_small_ones_gain_and_large_ones_hardly_pay() -> None:
    rng = np.random.default_rng(6)
    prompts = (2.0 ** rng.uniform(8.0, 14.0, 1500)).astype(int)
    swamped = make_workload(np.cumsum(rng.exponential(0.02, 1500)), prompts, 4)
    by_arrival, by_size = (
        waits_s(Run(make_ordered(), swamped, small_first(share)).to_end()) for share in (0.0, 0.4)
    )
    assert by_size.mean() < 0.9 * by_arrival.mean()
    assert by_size.max() < 1.1 * by_arrival.max()


def test_a_crowd_has_an_order_of_its_own() -> None:
    order = Order(0.0, 60.0, 0.4)
    assert order.among(32, 2, 2.5) == order.among(0, 0, 2.5) == order
    crowded = order.among(33, 2, 2.5)
    assert (crowded.small_first, crowded.largest) == (1.0, 2)
    assert crowded.turn_at(0.0, 2, 10.0) == crowded.turn_at(0.0, 9, 10.0) > crowded.turn_at(0.0, 1, 10.0)
    by_arrival = Order(0.0, 60.0).among(99, 1, 2.5)
    assert by_arrival.turn_at(3.0, 0, 10.0) == by_arrival.turn_at(3.0, 9, 10.0)


@pytest.mark.parametrize("policy", [ONE_AT_A_TIME, make_policy("late-binding", stream_limit=2)])
def test_the_next_is_the_one_its_twin_would_take(policy: PolicySpec) -> None:
    """The twin looks at all that wait: it knows no lines."""
    rng = np.random.default_rng(3)
    prompts = (2.0 ** rng.uniform(4.0, 15.0, 150)).astype(int)
    workload = make_workload(np.cumsum(rng.exponential(0.05, 150)), prompts, rng.integers(1, 60, 150))
    cluster = make_ordered(12.0, 9.0)
    run = AdvisedRun(cluster, workload, policy)
    sizes: dict[int, float] = {}
    num_overtaken = num_overdue = 0
    for request in run.decisions():
        now, rows = float(run.sim.now), run.requests
        waiting = np.flatnonzero((rows["arrived_at"] <= now) & (rows["dispatched_at"] < 0)).tolist()
        for i in waiting:
            if i not in sizes:
                prompt = int(rows["num_prefill"][i])
                tokens = prompt + run.clusters.arrays("output_estimate")[0][prompt.bit_length() - 1]
                sizes[i] = np.clip(np.floor(np.log2(tokens)) - 8, 0, 6)
        overdue = [i for i in waiting if now - rows["arrived_at"][i] >= 9.0]
        due = {i: rows["arrived_at"][i] + (0 if i in overdue else 2.0 * sizes[i]) for i in waiting}
        assert request == min(overdue or waiting, key=lambda i: (due[i], i))
        num_overdue += bool(overdue)
        num_overtaken += request != waiting[0]
        run.action = run.advice()
    assert num_overtaken > 100 and num_overdue > 0
    assert_same_outcome(Run(cluster, workload, policy).to_end(), run)


def test_small_ones_first_shortens_the_wait() -> None:
    rng = np.random.default_rng(5)
    prompts = (2.0 ** rng.uniform(8.0, 15.0, 200)).astype(int)
    workload = make_workload(np.cumsum(rng.exponential(0.1, 200)), prompts, 4)
    by_arrival, by_size = (
        Run(make_ordered(overtake_s), workload, ONE_AT_A_TIME).to_end() for overtake_s in (0.0, 60.0)
    )
    assert waits_s(by_size).mean() < 0.7 * waits_s(by_arrival).mean()
    by_age = Run(make_ordered(), workload, small_first(1 / 3)).to_end()
    assert waits_s(by_age).mean() < 0.9 * waits_s(by_arrival).mean()
    assert waits_s(by_age).max() < waits_s(by_size).max()


def test_a_request_that_lost_its_replica_gives_way_to_nobody() -> None:
    """Of three large ones one waits behind a younger small one; the one that was lost goes before both."""
    cluster = make_ordered(60.0, events=[{"at_s": 1.0, "kind": "fail", "replica": 0}])
    workload = make_workload([0.0, 0.0, 0.5, 0.6], [20_000, 20_000, 20_000, 10], 100)
    run = Run(cluster, workload, ONE_AT_A_TIME).to_end()
    assert sorted(run.requests["restarts"]) == [0, 0, 0, 1]
    *both, large, small = run.requests["dispatched_at"]
    assert min(both) == 0.0 and 1.0 < max(both) < small < large


def test_sizes_are_powers_of_two_of_what_is_expected() -> None:
    books = Books(now=0.0)  # which expects 256 tokens of output as long as it has seen none
    assert [books.size_of(prompt, 0) for prompt in (1, 255, 256, 767, 768, 1791, 1792)] == [
        0,
        0,
        1,
        1,
        2,
        2,
        3,
    ]
    assert books.size_of(10**7, 0) == NUM_SIZES - 1
    assert books.size_of(400, 0) == 1 and books.size_of(400, 50) == 0  # its client wants no more


def test_nobody_sees_the_true_length() -> None:
    """Two runs that differ in the outputs of those still waiting decide alike."""
    prompts = [5000, 5000, 3000, 600, 100]
    first_asked = []
    for last_outputs in (1, 39):
        workload = make_workload([0.0, 0.0, 0.1, 0.2, 0.3], prompts, [30, 39, 1, last_outputs, last_outputs])
        run = Run(make_ordered(10.0), workload, ONE_AT_A_TIME).to_end()
        first_asked.append(np.argsort(run.requests["dispatched_at"], kind="stable")[:3].tolist())
    assert first_asked[0] == first_asked[1] == [0, 1, 4]


def test_a_gateway_asks_whose_turn_it_is() -> None:
    core = Core("hold-until-room", ["a"], overtake_s=60.0, max_hold_s=30.0, now=0.0)
    large, small = Request(20_000, arrived_at=0.0), Request(10, arrived_at=20.0)
    assert core.next_of([large, small], now=21.0) is small
    assert core.next_of([large, small], now=30.0) is large
    late = Request(10, arrived_at=61.0)
    assert Order(60.0, 1e6).turn_at(late.arrived_at, 0, 62.0) > Order(60.0, 1e6).turn_at(
        0.0, large.size, 62.0
    )
    by_arrival = Core("hold-until-room", ["a"], now=0.0)
    assert by_arrival.next_of([large, small], now=21.0) is large
    by_arrival.switch(PolicySpec(kind="hold-until-room", small_first=1 / 3))  # a fourth of its wait counts
    assert by_arrival.next_of([large, small], now=26.0) is large
    assert by_arrival.next_of([large, small], now=27.0) is small
