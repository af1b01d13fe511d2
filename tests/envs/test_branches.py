"""The check of advantages (docs/results/advantages.md) branches off from copies of one state."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from pointsman.envs.routing import RoutingSpec
from tests.simulator.factories import load_benchmark


def test_the_copies_of_a_point_stay_alike_until_they_act_differently() -> None:
    check = load_benchmark("advantage_check")
    actor = SimpleNamespace(env=SimpleNamespace(env=SimpleNamespace(spec=RoutingSpec())))
    env = check.copies(actor, (2, 2, 1), seed=0)

    def is_alike(a: int, b: int) -> bool:
        return all(np.array_equal(array[a], array[b]) for array in check.copied(env))

    for _ in range(20):
        assert is_alike(0, 1) and is_alike(2, 3) and not is_alike(0, 2)
        actions = np.where(
            env._observation.action_mask[:, 1:].any(1), 1 + env._observation.action_mask[:, 1:].argmax(1), 0
        )
        env.step(actions)
    env.step(np.array([1, 2, 1, 2]))
    assert not is_alike(0, 1)
