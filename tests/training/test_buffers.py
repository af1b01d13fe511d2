"""What is counted while a rollout fills: actions, legality, the sizes of the reward's terms."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pointsman.envs.entity import Observation
from pointsman.training.buffers import Buffers

from .fakes import FakeEnv, FakeSpec

T, N, A = 40, 8, 5


def filled(masks: Any, actions: Any, is_illegal: Any = False) -> Buffers:
    """A rollout with these masks [T + 1, N, A] and actions [T, N]."""
    env = FakeEnv(FakeSpec(), N)
    buffers = Buffers(T, N, env.space, 0)
    seen = env.reset(0)
    for t in range(T):
        buffers.see(t, Observation(*seen[:3], masks[t], seen.privileged))
        buffers.actions[t] = actions[t]
        buffers.greedy_actions[t] = 1
        step = env.step(np.ones(N, np.int64))._replace(
            terminated=np.zeros(N, bool),
            truncated=np.zeros(N, bool),
            terms={"a": -np.ones(N), "b": np.full(N, 3.0)},
        )
        illegal = np.broadcast_to(is_illegal, (T, N))[t]
        buffers.record(t, step._replace(is_illegal=illegal if is_illegal is not False else None), None)
    buffers.see(T, Observation(*seen[:3], masks[T], seen.privileged))
    return buffers


@pytest.fixture
def masks() -> Any:
    """Action 0 comes and goes, the others stay."""
    masks = np.ones((T + 1, N, A), bool)
    masks[..., 0] = np.random.default_rng(0).random((T + 1, N)) < 0.5
    return masks


def drawn(masks: Any) -> Any:
    """Actions [T, N] legal by masks [T, N, A], often 0."""
    rng = np.random.default_rng(1)
    return np.where(masks[..., 0] & (rng.random((T, N)) < 0.7), 0, rng.integers(1, A, (T, N)))


def test_shares_of_actions_and_terms(masks: Any) -> None:
    actions = np.full((T, N), 2)
    actions[: T // 4] = 3
    metrics = filled(masks, actions).metrics()
    assert metrics["action_frac_max"] == 0.75
    assert (metrics["greedy_frac_max"], metrics["greedy_noop_frac"]) == (1.0, 0.0)
    assert (metrics["reward_share/a"], metrics["reward_share/b"]) == (0.25, 0.75)


def test_legal_actions_are_all_that_is_said(masks: Any) -> None:
    metrics = filled(masks, drawn(masks[:-1])).metrics()
    assert metrics["invalid_frac"] == 0.0
    assert "invalid_late_frac" not in metrics


def test_acting_by_the_mask_of_the_step_before_is_told_from_other_bugs(masks: Any) -> None:
    before = np.concatenate((masks[:1], masks[: T - 1]))
    metrics = filled(masks, drawn(before)).metrics()
    assert metrics["invalid_frac"] > 0.1
    assert metrics["invalid_late_frac"] == 1.0
    blind = filled(masks, drawn(np.ones_like(before))).metrics()
    assert blind["invalid_late_frac"] < 0.7


def test_an_environment_that_shows_its_mask_a_step_late_is_told_too(masks: Any) -> None:
    """`masks` is what holds; shown is that of the step before, and the environment complains."""
    shown = np.concatenate((masks[:1], masks[:-1]))
    actions = drawn(shown[:-1])
    is_illegal = ~np.take_along_axis(masks[:-1], actions[..., None], axis=-1)[..., 0]
    metrics = filled(shown, actions, is_illegal).metrics()
    assert metrics["invalid_frac"] == is_illegal.mean() > 0.1
    assert metrics["invalid_late_frac"] == 1.0
    everything = filled(np.ones_like(masks), actions, is_illegal).metrics()
    assert everything["invalid_late_frac"] == 0.0
