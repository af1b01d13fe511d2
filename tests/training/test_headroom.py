from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pointsman.envs.entity import Observation, Step
from pointsman.training.headroom import (
    Headroom,
    at_random,
    by_teacher,
    find_headroom,
    in_turn,
    play,
)
from pointsman.training.ranks import Ranks

from .fakes import FakeEnv, FakeSpec

NUM_ENVS, NUM_STEPS = 32, 64


class Rewarded(FakeEnv):
    """The fake environment with a reward of the test's choosing."""

    def reward(self, cost: NDArray[np.float32]) -> NDArray[np.float32]:
        return -cost

    def step(self, actions: NDArray[np.int64]) -> Step:
        step = super().step(actions)
        reward = self.reward(-step.reward)
        return step._replace(reward=reward, terms={"all": reward}, is_flat=reward >= 0.5)


class Ceiling(Rewarded):
    """A reward that nearly everything earns in full, as the seeds' was."""

    def reward(self, cost: NDArray[np.float32]) -> NDArray[np.float32]:
        return np.where(cost < 0.995, 0.5, 0.0).astype(np.float32)


class Sparse(Rewarded):
    def reward(self, cost: NDArray[np.float32]) -> NDArray[np.float32]:
        return np.where(cost < 0.05, 0.25, 0.0).astype(np.float32)


class InBursts(Rewarded):
    """Four decisions at once, and then a second: what the four earn comes with the last of them."""

    num_steps = 0

    def step(self, actions: NDArray[np.int64]) -> Step:
        step = super().step(actions)
        self.num_steps += 1
        if self.num_steps % 4 == 0:
            return step
        nothing = np.zeros_like(step.reward)
        return step._replace(reward=nothing, terms={"all": nothing}, elapsed_s=nothing)


class Noise(Rewarded):
    """A reward that has nothing to do with what was chosen."""

    def reward(self, cost: NDArray[np.float32]) -> NDArray[np.float32]:
        return np.random.default_rng(int(1e6 * cost.sum())).normal(size=len(cost)).astype(np.float32)


def headroom_of(kind: type[FakeEnv], **attributes: Any) -> Headroom:
    env = kind(FakeSpec(), NUM_ENVS)
    for name, value in attributes.items():
        setattr(env, name, value)
    return find_headroom(env, NUM_STEPS, seed=0)


def make_observation(masks: list[list[int]]) -> Observation:
    mask = np.array(masks, np.bool_)
    empty = np.zeros((len(mask), 1), np.float32)
    return Observation(empty[:, None], empty, mask[:, 1:], mask, empty)


def test_a_play_is_paid_by_the_second() -> None:
    """Against a loop of its own over the same steps."""
    env = FakeEnv(FakeSpec(), NUM_ENVS)
    result = play(env, by_teacher(env, 0), NUM_STEPS, seed=3)
    reward, time_s = np.zeros(2), np.zeros(2)
    env.reset(3)
    for _ in range(NUM_STEPS):
        step = env.step(env.advise(0))
        for n in range(NUM_ENVS):
            reward[step.groups[n]] += step.reward[n]
            time_s[step.groups[n]] += step.elapsed_s[n]
    for group in (0, 1):
        assert result.per_second(group) == pytest.approx(reward[group] / time_s[group], rel=1e-6)
    assert result.per_second() == pytest.approx(reward.sum() / time_s.sum(), rel=1e-6)
    by_env = result.rewards.sum(0) / result.elapsed_s.sum(0)
    np.testing.assert_allclose(result.per_second_by_env(), by_env, rtol=1e-5)
    assert np.isnan(result.per_second(7))


def test_all_meet_the_same_arrivals() -> None:
    env = FakeEnv(FakeSpec(), NUM_ENVS)
    first, second, other = (play(env, by_teacher(env, 0), 8, seed) for seed in (0, 0, 1))
    assert first.rewards.tobytes() == second.rewards.tobytes() != other.rewards.tobytes()


def test_several_ranks_are_one_play() -> None:
    class Pair(Ranks):
        def gather(self, value: Any) -> list[Any]:
            return [value, value]

    env = FakeEnv(FakeSpec(), NUM_ENVS)
    both = play(env, by_teacher(env, 0), 8, 0, Pair())
    assert both.rewards.shape == (8, 2 * NUM_ENVS)


def test_turns_skip_what_is_illegal() -> None:
    choose = in_turn()
    every = make_observation([[1, 1, 1, 1], [0, 1, 0, 1]])
    assert [choose(every).tolist() for _ in range(4)] == [[1, 1], [2, 3], [3, 1], [1, 3]]
    assert choose(make_observation([[1, 0, 0, 0], [0, 0, 1, 0]])).tolist() == [0, 2]
    assert choose(every).tolist() == [2, 3]  # holding took no turn


def test_random_is_even_over_legal_entities_and_holds_only_if_it_must() -> None:
    choose = at_random(0)
    seen = make_observation([[1, 1, 0, 1]] * 9000)
    assert np.bincount(choose(seen)) / 9000 == pytest.approx([0, 0.5, 0, 0.5], abs=0.02)
    assert choose(make_observation([[1, 0, 0, 0]] * 5)).tolist() == [0] * 5


def test_a_reward_with_headroom() -> None:
    found = headroom_of(Rewarded)
    assert found.warnings == []
    names = [one.name for one in found.earned]
    assert names == ["cheapest", "first", "round-robin", "random"]
    gain = found.gains["many"]
    assert gain.best == "cheapest"
    assert gain.per_second > 5 * gain.error > 0
    assert gain.share > 0.8  # "first" is no better than random
    assert found.earned[0].per_second > found.earned[1].per_second + 1.0


def test_a_baseline_at_the_ceiling_is_reported() -> None:
    found = headroom_of(Rewarded, baseline="cheapest")
    assert [warning for warning in found.warnings if "cheapest earns about as much" in warning]
    assert found.gains["few"].share == 0.0


def test_flat_rewards_are_reported() -> None:
    found = headroom_of(Ceiling)
    assert found.earned[1].flat_frac > 0.9
    assert "clipped or squashed" in found.warnings[0]


def test_rewards_of_zero_are_reported() -> None:
    found = headroom_of(Sparse)
    assert found.earned[1].zero_frac > 0.9
    assert "exactly 0" in found.warnings[0]


def test_decisions_at_one_moment_earn_together() -> None:
    found = headroom_of(InBursts)
    assert found.earned[1].zero_frac == 0.0
    assert not [warning for warning in found.warnings if "exactly 0" in warning]


def test_rewards_that_tell_nothing_from_chance_are_reported() -> None:
    assert any("more than random" in warning for warning in headroom_of(Noise).warnings)
    assert not any("more than random" in warning for warning in headroom_of(Rewarded).warnings)


def test_raw_rewards_are_described_before_clipping() -> None:
    found = headroom_of(Rewarded)
    cheapest = found.earned[0]
    assert sum(cheapest.histogram) == NUM_ENVS * NUM_STEPS
    assert len(found.edges) == len(cheapest.histogram) + 1
    assert cheapest.quantiles["p01"] < cheapest.quantiles["p50"] < cheapest.quantiles["p99"] < 0
    assert np.argmax(cheapest.histogram) > len(cheapest.histogram) / 2  # near zero cost, at the upper end


def test_plain_values_for_json() -> None:
    data = json.loads(json.dumps(headroom_of(Ceiling).to_dict()))
    assert data["baseline"] == "first"
    assert data["warnings"]
    assert set(data["gains"]) == {"few", "many"}
