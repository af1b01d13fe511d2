"""Environments with defaults for everything a test doesn't care about."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pointsman.envs.entity import Observation
from pointsman.envs.routing import RoutingEnv, RoutingSpec
from pointsman.spec import parse_spec

POLICY_SEES = ("entities", "context", "entity_mask", "action_mask")
CROWDED: dict[str, Any] = {"scenarios": ["overload", "tight-memory"], "warmup_requests": 1500}


def make_env(num_envs: int = 4, **fields: Any) -> RoutingEnv:
    """Four replicas in room for six. Rewards are not scaled: that saves the runs that find the scale."""
    small = {
        "max_replicas": 6,
        "decisions": 500,
        "warmup_requests": 300,
        "reward": {"scale": "none"},
        "teachers": [{"kind": "least-delay"}, {"kind": "hold-until-room"}],
    }
    return RoutingEnv(parse_spec(RoutingSpec, small | fields, "env"), num_envs)


def copy_of(observation: Observation) -> Observation:
    return Observation(*(array.copy() for array in observation))


def same(one: Observation, other: Observation, *fields: str) -> bool:
    return all(getattr(one, name).tobytes() == getattr(other, name).tobytes() for name in fields)


def any_legal(observation: Observation, rng: np.random.Generator) -> NDArray[np.int64]:
    mask = observation.action_mask
    return np.asarray((rng.random(mask.shape) * mask).argmax(axis=1), np.int64)


def column(observation: Observation, env: RoutingEnv, name: str) -> NDArray[np.float32]:
    """[N, R] or [N]: one named feature."""
    for array, features in (
        (observation.entities, env.space.entity_features),
        (observation.context, env.space.context_features),
    ):
        names = [feature.name for feature in features]
        if name in names:
            return array[..., names.index(name)]
    raise KeyError(name)
