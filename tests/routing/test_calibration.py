"""How fast a replica is, found out while it serves."""

from __future__ import annotations

import numpy as np
import pytest
from simulator.factories import make_cluster, random_workload

from pointsman.routing.books import Books
from pointsman.routing.calibration import (
    FIGURES,
    LOWEST,
    NOTHING_SEEN,
    SPEEDS,
    USUAL,
    Estimate,
    Estimator,
    pooled,
)

from .recording import Decision, record, replay


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
    estimator.take_news(0)
    assert estimator.estimate() == NOTHING_SEEN
    windows_of(estimator, 1e-6, 1e-9, 1e-9, count=50)
    for _ in range(50):
        estimator.saw_gauges(1, 1.0)
    assert estimator.estimate().figures == {name: pytest.approx(LOWEST[name]) for name in FIGURES}


def test_what_was_seen_long_ago_is_forgotten() -> None:
    estimator = Estimator()
    windows_of(estimator, 0.5, 1e-4, 1e-4, count=20)
    estimator.forget_if_old()
    assert estimator.estimate().figures["step_floor_s"] == pytest.approx(0.5, rel=0.05)
    estimator.forget_if_old()
    assert estimator.estimate().figures == {}


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
