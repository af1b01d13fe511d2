"""How fast a replica is, found out while it serves."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from simulator.factories import make_cluster, random_workload

from pointsman.routing.books import Books
from pointsman.routing.calibration import (
    FIGURES,
    LOWEST,
    SPEEDS,
    USUAL,
    Estimate,
    Estimator,
    pooled,
)
from pointsman.routing.sharing import SharedBooks
from pointsman.routing.signals import CONTEXT_TOKENS, KV_CAPACITY_TOKENS

from .recording import Decision, record, replay

NOTHING_SEEN = Estimate({}, math.inf)


def windows_of(estimator: Estimator, floor_s: float, decode_s: float, prefill_s: float, count: int) -> None:
    rng = np.random.default_rng(0)
    for _ in range(count):
        num_steps, others, prompt = 32.0, 32.0 * rng.integers(0, 60), float(rng.integers(0, 8000))
        elapsed_s = floor_s * num_steps + decode_s * others + prefill_s * prompt
        estimator.saw_window(num_steps, elapsed_s, others + num_steps, prompt)


def test_the_three_speeds_are_told_apart() -> None:
    estimator = Estimator()
    windows_of(estimator, 0.02, 0.0003, 0.00005, count=40)
    figures, error, source, *_ = estimator.estimate()
    assert source == "measured"
    assert figures["step_floor_s"] == pytest.approx(0.02, rel=0.05)
    assert figures["decode_s_per_token"] == pytest.approx(0.0003, rel=0.05)
    assert figures["prefill_s_per_token"] == pytest.approx(0.00005, rel=0.05)
    assert 0.0 < error < 0.05


def test_too_little_says_nothing_and_nothing_is_faster_than_the_lowest() -> None:
    estimator = Estimator()
    for _ in range(3):
        estimator.saw_first_token(1000, 0.1, 0.0)
        estimator.saw_gauges(100, 0.5)
    estimator.take_news(0, 3)
    assert estimator.estimate() == NOTHING_SEEN
    windows_of(estimator, 1e-6, 1e-9, 1e-9, count=50)
    for _ in range(50):
        estimator.saw_gauges(1, 1.0)
    assert estimator.estimate().figures == {name: pytest.approx(LOWEST[name]) for name in FIGURES}


def capacity_of(books: Books, slot: int) -> float:
    return books.replica_signals(slot)["kv_capacity_tokens"]


def test_what_a_server_says_of_its_memory_is_so_unless_something_was_told() -> None:
    books = Books(now=0.0)
    silent, told = books.add("silent"), books.add("told", {"kv_capacity_tokens": 5_000.0})
    for slot in (silent, told):
        books.has_capacity(slot, 900.0)
    assert (capacity_of(books, silent), capacity_of(books, told)) == (900.0, 5_000.0)
    estimator = Estimator()
    assert estimator.has_capacity(900.0) and not estimator.has_capacity(900.0)
    for _ in range(50):  # prompts that share a prefix are booked twice, and are in memory once
        estimator.saw_gauges(4_000, 0.5)
    assert estimator.estimate().figures == {"kv_capacity_tokens": 900.0}
    assert estimator.has_capacity(1_800.0)  # started anew, with another setting
    assert estimator.estimate().figures == {"kv_capacity_tokens": 1_800.0}


def test_servers_that_say_about_the_same_of_their_memory_are_the_same() -> None:
    """Equal GPUs differ by some blocks; what differs by more is not noise where the servers say it."""
    for sizes, is_same in (((400_000.0, 400_016.0), True), ((400_000.0, 500_000.0), False)):
        estimators = Estimator(), Estimator()
        for estimator, size in zip(estimators, sizes, strict=True):
            windows_of(estimator, 0.02, 0.0003, 0.00005, count=40)
            estimator.has_capacity(size)
        one, other = pooled([estimator.estimate() for estimator in estimators])
        assert (one == other) == is_same
        if not is_same:
            assert (one["kv_capacity_tokens"], other["kv_capacity_tokens"]) == sizes


def test_a_server_that_was_started_anew_is_what_it_was_until_traffic_says_otherwise() -> None:
    """It takes few windows then, also where the change is too small to be noticed by itself."""
    went_on, restarted = Estimator(), Estimator()
    for estimator in (went_on, restarted):
        windows_of(estimator, 0.02, 0.0003, 0.00005, count=200)
    before = restarted.estimate()
    restarted.was_restarted()
    after = restarted.estimate()
    assert after.figures == pytest.approx(before.figures, rel=0.08)
    assert after.source == "measured" and after.error > 2 * before.error
    for estimator in (went_on, restarted):
        windows_of(estimator, 0.024, 0.0003, 0.00005, count=20)
    assert restarted.estimate().figures["step_floor_s"] == pytest.approx(0.024, rel=0.05)
    assert went_on.estimate().figures["step_floor_s"] < 0.0225


def test_counters_that_begin_anew_are_a_restart() -> None:
    books = Books(now=0.0)
    slot = books.add("server")
    windows_of(books._estimators[0], 0.02, 0.0003, 0.00005, count=200)
    assert not books.counted(slot, 5000.0, 100.0)
    error = books._estimators[0].estimate().error
    assert books.counted(slot, 20.0, 0.0)
    assert books._estimators[0].estimate().error > 2 * error


def test_what_cannot_be_told_apart_is_the_same_and_the_rest_is_not() -> None:
    def estimate(factor: float, error: float) -> Estimate:
        return Estimate({name: factor * USUAL[name] for name in SPEEDS}, error)

    one, two, three = pooled([estimate(1.0, 0.01), estimate(1.05, 0.01), estimate(1.5, 0.01)])
    assert one == two and 1.0 < one["step_floor_s"] / USUAL["step_floor_s"] < 1.05
    assert three["step_floor_s"] == pytest.approx(1.5 * USUAL["step_floor_s"])
    one, two = pooled([estimate(1.0, 0.02), estimate(1.5, 0.02)])
    assert two["step_floor_s"] / one["step_floor_s"] == pytest.approx(1.5), "two servers are no crowd"
    one, two = pooled([estimate(1.0, 0.3), estimate(1.5, 0.3)])
    assert one == two, "too little is known of them"
    sure, unsure = {"step_floor_s": 0.02, "prefill_s_per_token": 0.05}, {"decode_s_per_token": 0.6}
    quick, slow = (
        Estimate(
            USUAL | {"step_floor_s": floor_s, "decode_s_per_token": 1e-4 / floor_s},
            0.12,
            errors=sure | unsure,
        )
        for floor_s in (0.010, 0.022)
    )
    one, two, three = pooled([quick, slow, quick])
    assert one == three and one["step_floor_s"] < 0.5 * two["step_floor_s"], "their steps differ for certain"
    small, large = (Estimate(USUAL | {"kv_capacity_tokens": size}, 0.3) for size in (3e4, 2e5))
    assert [one["kv_capacity_tokens"] for one in pooled([small, large])] == [3e4, 2e5], "other hardware"
    unseen, seen = pooled([NOTHING_SEEN, estimate(2.0, 0.01)])
    assert unseen["step_floor_s"] == pytest.approx(seen["step_floor_s"])
    assert unseen["kv_capacity_tokens"] == pytest.approx(USUAL["kv_capacity_tokens"])


def test_a_router_finds_out_how_fast_its_replicas_are() -> None:
    """Nothing is given; the truth is a simulated cluster with a replica that is 2.5 times as slow."""
    cluster = make_cluster(
        replicas=[{"count": 1}, {"count": 1, "slowdown": 2.5}],
        scheduler={"kind": "vllm-v1", "num_blocks": 2000},
    )

    def in_turn(decision: Decision, rng: np.random.Generator) -> int:
        return 1 + int(rng.random() < 0.25)

    recording = record(cluster, random_workload(1200, 9.0, seed=4, mean_tokens=150.0), in_turn)
    books = Books(now=0.0)
    for _ in replay(recording, books, is_calibrated=False):
        pass
    for k, plan in enumerate(recording.plans):
        found = books.replica_signals(k)
        assert found["step_floor_s"] == pytest.approx(plan.step_floor_s, rel=0.1), k
        assert found["kv_capacity_tokens"] == pytest.approx(plan.kv_capacity_tokens, rel=0.25), k
        assert found["prefill_s_per_token"] == pytest.approx(plan.prefill_s_per_token, rel=0.3), k
    slow, fast = books.replica_signals(1)["weight"], books.replica_signals(0)["weight"]
    assert fast / slow == pytest.approx(2.5, rel=0.3)


def test_routers_that_share_their_books_reckon_with_what_the_others_have_there(tmp_path: Path) -> None:
    """Each of three sees a third of the streams and prompts of a server whose steps all of them share."""
    truth, capacity = (0.02, 0.0005, 0.0002), 50_000
    shared = SharedBooks(tmp_path / "books", 3)
    routers = [Books(0.0, shared, index, prefix_bytes=0) for index in range(3)]
    for books in routers:
        books.add("http://a:8000")
    rng = np.random.default_rng(0)
    now = arrived_at = 0.0
    number = 0
    waiting: list[tuple[Books, int, int]] = []  # router, ticket, prompt
    decoding: list[tuple[Books, int, int, int]] = []  # and tokens to come
    while number < 600:
        while arrived_at <= now:
            prompt, books = int(rng.integers(50, 600)), routers[number % 3]
            waiting.append((books, books.sent(0, prompt, arrived_at), prompt))
            arrived_at += float(rng.exponential(0.25))
            number += 1
        begun, waiting = waiting[:1], waiting[1:]
        num_streams, num_prompt = len(decoding) + len(begun), sum(prompt for _, _, prompt in begun)
        now += float(np.dot(truth, (1.0, max(0, num_streams - 1), num_prompt)))
        for books, ticket, _, rest in decoding:
            books.tokens(ticket, 1, now)
            if rest == 1:
                books.finished(ticket, now)
        decoding = [(books, ticket, prompt, rest - 1) for books, ticket, prompt, rest in decoding if rest > 1]
        for books, ticket, prompt in begun:
            books.first_token(ticket, now)
            decoding.append((books, ticket, prompt, int(rng.integers(50, 400))))
        used = sum(float(books.signals[CONTEXT_TOKENS, 0]) for books in routers)
        for books in routers:
            books.scraped(0, len(decoding), len(waiting), used / capacity, now)
    for books in routers:
        assert books.speeds(0) == pytest.approx(truth, rel=0.1)
        assert books.signals[KV_CAPACITY_TOKENS, 0] == pytest.approx(capacity, rel=0.05)
