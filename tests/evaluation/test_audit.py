from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from pointsman.envs.entity import Step
from pointsman.envs.routing import RoutingEnv, RoutingSpec
from pointsman.errors import InputError
from pointsman.evaluation.audit import Audited, Samples, audit, record, record_in, summarise
from pointsman.routing.features import CONTEXT_FEATURES, ENTITY_FEATURES
from pointsman.routing.policy import PolicySpec
from pointsman.simulator.privileged import PRIVILEGED_FEATURES

RNG = np.random.default_rng(0)


def samples(**columns: NDArray[np.float64]) -> Samples:
    """Harmless numbers, but for the replica features named."""

    def drawn(count: int) -> NDArray[np.float32]:
        return RNG.normal(size=(200, count)).astype(np.float32)

    replicas = drawn(len(ENTITY_FEATURES))
    for index, feature in enumerate(ENTITY_FEATURES):
        if feature.name in columns:
            replicas[:, index] = columns[feature.name]
    return Samples(replicas, drawn(len(CONTEXT_FEATURES)), drawn(len(PRIVILEGED_FEATURES)))


def by_name(audited: list[Audited], part: str = "replica") -> dict[str, Audited]:
    return {one.feature.name: one for one in audited if one.part == part}


def test_what_is_wrong_with_a_feature_is_named() -> None:
    mostly_zero = np.zeros(200)
    mostly_zero[:8] = 1.0
    odd = samples(
        outstanding=np.full(200, 3.0),
        waiting=mostly_zero,
        backlog=np.linspace(0, 11, 200),
        work=np.where(np.arange(200) == 7, np.nan, 0.5),
        has_room=np.arange(200) % 2,
    )
    found = by_name(summarise({"a": odd}))
    assert found["outstanding"].flags == ("dead",)
    assert found["waiting"].flags == ("saturated",)
    assert found["waiting"].at_low == pytest.approx(0.96)
    assert found["backlog"].flags == ("out of range",)
    assert found["work"].flags == ("not finite",)
    assert found["has_room"].flags == ()
    assert (found["has_room"].low, found["has_room"].high, found["has_room"].mean) == (0, 1, 0.5)
    assert [one.feature.name for one in found.values() if one.flags] == [
        "outstanding",
        "waiting",
        "backlog",
        "work",
    ]


def test_a_feature_may_be_flat_in_one_scenario_only() -> None:
    flat, varied = samples(speed=np.zeros(200)), samples(speed=np.arange(200) / 100)
    found = by_name(summarise({"equal": flat, "mixed": varied}))["speed"]
    assert found.flat_in == ("equal",)
    assert found.flags == ()


def test_rollouts_cover_every_scenario_and_leave_padding_out() -> None:
    recorded = record(["steady-chat", "mixed-hardware"], ["random", "least-outstanding"], 100, 0, None)
    assert {name: len(one.context) for name, one in recorded.items()} == {
        "steady-chat": 50,
        "mixed-hardware": 50,
    }
    accepting = [feature.name for feature in ENTITY_FEATURES].index("accepting")
    for one in recorded.values():
        assert one.entities.shape == (4 * 50, len(ENTITY_FEATURES))
        assert (one.entities[:, accepting] == 1).all()  # padding would be 0
    speed = [feature.name for feature in ENTITY_FEATURES].index("speed")
    assert len(np.unique(recorded["steady-chat"].entities[:, speed])) == 1
    assert len(np.unique(recorded["mixed-hardware"].entities[:, speed])) == 2


def test_each_policy_decides_in_environments_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = ("random", "round-robin", "least-outstanding")
    policies = [PolicySpec(kind=kind) for kind in kinds]
    spec = RoutingSpec.model_validate(
        {"teachers": policies, "max_replicas": 5, "warmup_requests": 10, "reward": {"scale": "none"}}
    )
    env = RoutingEnv(spec, 3)
    actions = []
    step = env.step

    def watched(taken: np.ndarray) -> Step:
        outstanding = env._observation.entities[2, :4, 0]
        assert outstanding[taken[2] - 1] == outstanding.min()
        actions.append(taken)
        return step(taken)

    monkeypatch.setattr(env, "step", watched)
    record_in(env, kinds, 3 * 24, 0, None)
    drawn, turns, _ = np.array(actions).T
    assert turns.tolist() == [1, 2, 3, 4] * 6
    assert set(drawn.tolist()) == {1, 2, 3, 4}
    assert drawn.tolist() != turns.tolist()


def test_the_same_seed_audits_alike() -> None:
    first, again, other = (audit(["steady-chat"], ["random"], 64, seed) for seed in (0, 0, 1))
    assert first == again
    assert first != other
    assert len(first) == len(ENTITY_FEATURES) + len(CONTEXT_FEATURES) + len(PRIVILEGED_FEATURES)


def test_bad_input() -> None:
    with pytest.raises(InputError, match="--decisions = 0: is not positive"):
        audit(num_decisions=0)
    with pytest.raises(InputError, match=r"policy = 'leest-work': unknown policy"):
        audit(policies=["leest-work"])
    with pytest.raises(InputError, match="did you mean 'steady-chat'"):
        audit(["steady-chats"])
