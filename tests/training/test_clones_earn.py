"""Clones of teachers that take turns or draw lots, on routing itself: judged by what they do."""

from __future__ import annotations

import pytest
from envs.factories import make_env

from pointsman.inference.checkpoint import NetworkSpec
from pointsman.training.networks import build_network
from pointsman.training.ranks import Ranks
from pointsman.training.warm_start import WarmStartSpec, doubt, warm_start


def clone_of(teachers: dict[str, float]) -> dict[str, float]:
    env = make_env(
        32,
        teachers=[{"kind": kind} for kind in teachers],
        reward={"scale": "episode"},
        warmup_policies=["least-outstanding"],
    )
    network = build_network(NetworkSpec(width=16, depth=1), env.space, 0)
    return warm_start(network, env, WarmStartSpec(decisions=8_192, teachers=teachers), 0, Ranks())[1]


@pytest.mark.parametrize(
    "teachers",
    [
        {"round-robin": 1.0},
        {"random": 1.0},
        {"power-of-two": 1.0},
        {"round-robin": 1.0, "random": 1.0, "least-outstanding": 1.0},
    ],
    ids=lambda teachers: "+".join(teachers),
)
def test_a_clone_starts_where_its_teachers_are(teachers: dict[str, float]) -> None:
    """A teacher that forgets its turn or its random numbers names one replica all the time: −0.45 here."""
    metrics = clone_of(teachers)
    assert metrics["teacher_reward_per_s"] > -0.2
    assert metrics["clone_reward_per_s"] == pytest.approx(metrics["teacher_reward_per_s"], abs=0.1)
    if len(teachers) == 1 and "power-of-two" not in teachers:  # they have no reasons at all
        said = doubt(metrics)
        assert said is not None
        assert "near-uniform" in said and "its arg-max" in said


def test_a_clone_of_a_teacher_with_reasons_is_in_no_doubt() -> None:
    metrics = clone_of({"least-delay": 1.0})
    assert doubt(metrics) is None
    assert metrics["clone_argmax_reward_per_s"] == pytest.approx(metrics["teacher_reward_per_s"], abs=0.05)
