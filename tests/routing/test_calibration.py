"""How fast a replica is, found out while it serves."""

from __future__ import annotations

import numpy as np
import pytest
from simulator.factories import make_cluster, random_workload

from pointsman.routing.books import Books
from pointsman.routing.calibration import FIGURES, LOWEST, USUAL, Estimator, pooled

from .recording import Decision, record, replay


def test_steps_are_fitted_by_a_line_that_prompts_do_not_bend() -> None:
    rng = np.random.default_rng(0)
    estimator = Estimator()
    for _ in range(2000):
        num_decoding = int(rng.integers(1, 100))
        step_s = 0.02 + 0.0003 * (num_decoding - 1) + rng.exponential(0.0002)
        estimator.saw_step(num_decoding, step_s * (5.0 if rng.random() < 0.3 else 1.0))
    figures = estimator.figures()
    assert figures["step_floor_s"] == pytest.approx(0.02, rel=0.15)
    assert figures["decode_s_per_token"] == pytest.approx(0.0003, rel=0.3)


def test_too_little_says_nothing_and_nothing_is_faster_than_the_lowest() -> None:
    estimator = Estimator()
    for _ in range(3):
        estimator.saw_step(1, 0.01)
        estimator.saw_first_token(1000, 0.1, 0.01)
        estimator.saw_gauges(100, 0.5)
    assert estimator.figures() == {}
    for _ in range(50):
        estimator.saw_step(1, 1e-5)
        estimator.saw_first_token(1000, 1e-4, 1e-5)
        estimator.saw_gauges(1, 1.0)
    assert estimator.figures() == {name: LOWEST[name] for name in FIGURES} | {
        "decode_s_per_token": pytest.approx(LOWEST["decode_s_per_token"], rel=10)
    }


def test_what_was_seen_long_ago_is_forgotten() -> None:
    estimator = Estimator()
    for _ in range(50):
        estimator.saw_step(1, 0.5)
    estimator.forget_if_old()
    assert estimator.figures()["step_floor_s"] == pytest.approx(0.5)
    estimator.forget_if_old()
    assert estimator.figures() == {}


def test_what_is_nearly_the_same_is_taken_to_be() -> None:
    one, two, three = pooled([{"step_floor_s": 0.010}, {"step_floor_s": 0.011}, {"step_floor_s": 0.030}])
    assert one["step_floor_s"] == two["step_floor_s"] == 0.011 and three["step_floor_s"] == 0.030
    assert one["kv_capacity_tokens"] == USUAL["kv_capacity_tokens"]


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
        # Steps with a part of a prompt in them are among those seen: a router cannot tell.
        assert found["step_floor_s"] == pytest.approx(plan.step_floor_s, rel=0.35), k
        assert found["kv_capacity_tokens"] == pytest.approx(plan.kv_capacity_tokens, rel=0.25), k
        assert found["prefill_s_per_token"] == pytest.approx(plan.prefill_s_per_token, rel=1.0), k
    slow, fast = books.replica_signals(1)["weight"], books.replica_signals(0)["weight"]
    assert fast / slow == pytest.approx(2.5, rel=0.3)
