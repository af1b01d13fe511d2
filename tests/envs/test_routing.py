"""Episodes of the routing environment: how they begin and end; the same seed gives the same bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from simulator.factories import GuardedClusters

from pointsman.envs import routing
from pointsman.envs.entity import Observation
from pointsman.envs.routing import RoutingEnv
from pointsman.errors import InputError

from .factories import any_legal, make_env, same


def history(env: RoutingEnv, num_steps: int, seed: int) -> list[bytes]:
    """All that a run under random actions shows and pays."""
    rng = np.random.default_rng(0)
    seen = env.reset(seed)
    rows = [b"".join(array.tobytes() for array in seen)]
    for _ in range(num_steps):
        step = env.step(any_legal(seen, rng))
        seen = step.observation
        paid = (step.reward, step.elapsed_s, *step.terms.values())
        rows.append(b"".join(array.tobytes() for array in (*seen, *paid)))
    return rows


def test_nothing_is_written_outside_its_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels reach their arrays by address: only guards beside them would show it."""
    begun: list[GuardedClusters] = []

    def guarded(*arguments: Any) -> GuardedClusters:
        begun.append(GuardedClusters(*arguments))
        return begun[-1]

    monkeypatch.setattr(routing, "Clusters", guarded)
    scenarios = ["random", "failure", "tight-memory", "overload"]
    env = make_env(4, scenarios=scenarios, max_replicas=8, decisions=40)
    rng = np.random.default_rng(0)
    seen = env.reset(0)
    for t in range(100):
        # In turn: any legal action, and holding wherever it is legal.
        seen = env.step(any_legal(seen, rng) if t % 2 else seen.action_mask.argmax(axis=1)).observation
        env.advise(t % len(env.teachers))
    assert len(begun) >= 3 * env.num_envs
    assert [clusters.broken_guards() for clusters in begun] == [[]] * len(begun)


def test_same_seed_same_bytes() -> None:
    settings = {"scenarios": ["steady-chat", "random"], "decisions": 20, "max_replicas": 8}
    first = history(make_env(**settings), 50, seed=7)
    again = make_env(**settings)
    history(again, 3, seed=1)  # what came before a reset leaves no trace
    assert history(again, 50, seed=7) == first
    assert history(again, 50, seed=8) != first


def test_environments_differ_from_each_other() -> None:
    seen = make_env(4).reset(0)
    assert len({row.tobytes() for row in seen.context}) == 4


def test_a_window_is_cut_off_and_what_was_seen_last_is_kept() -> None:
    cut, whole = make_env(2, decisions=20), make_env(2, decisions=20)
    cut.reset(0)
    whole.reset(0)
    whole._lengths -= 1  # the same traffic, cut off one decision later
    returns = np.zeros(2)
    for count in range(1, 21):
        step, after = cut.step(cut.advise(0)), whole.step(whole.advise(0))
        returns += step.reward
        assert not step.terminated.any()
        assert step.truncated.tolist() == [count == 20] * 2
        assert not after.truncated.any()
    assert same(step.final_observation, after.observation, *Observation._fields)
    assert not same(step.final_observation, step.observation, "entities", "context")
    for i, episode in enumerate(step.episodes):
        assert (episode.env, episode.group, episode.length) == (i, 0, 20)
        assert episode.episode_return == pytest.approx(returns[i], rel=1e-4, abs=1e-6)
        assert episode.metrics["in_system"] > 0
    # The next one begins at 0 and is as long.
    for count in range(1, 21):
        assert cut.step(cut.advise(0)).truncated.tolist() == [count == 20] * 2


def test_only_an_overhang_terminates_and_it_does_not_pay() -> None:
    env = make_env(2, scenarios=["overload"], warmup_requests=0, limits={"overhang": 2.0, "bad_end_s": 10.0})
    everything_to_one = np.ones(2, np.int64)
    env.reset(0)
    num_steps = 1
    while not (step := env.step(everything_to_one)).terminated.any():
        num_steps += 1
    assert num_steps < env.spec.decisions
    assert not step.truncated.any()
    i = int(np.argmax(step.terminated))
    excess = step.episodes[0].metrics["in_system"] - step.episodes[0].metrics["shadow_in_system"]
    assert excess > 2.0 * 4
    terms = sum(float(term[i]) for term in step.terms.values())
    assert step.reward[i] == pytest.approx(terms - 10.0 * excess, rel=1e-4)
    # The same again, but the window ends with that very decision: it still is a bad end.
    env.reset(0)
    for _ in range(num_steps - 1):
        env.step(everything_to_one)
    env._lengths[:] = env.spec.decisions - 1
    step = env.step(everything_to_one)
    assert step.terminated[i]
    assert step.truncated.tolist() == (~step.terminated).tolist()


def test_groups_take_turns_over_the_environments() -> None:
    env = make_env(5, scenarios=["steady-chat", "overload"], decisions=4)
    env.reset(0)
    for _ in range(9):
        assert env.step(env.advise(0)).groups.tolist() == [0, 1, 0, 1, 0]


def test_time_passes_between_decisions() -> None:
    env = make_env(2)
    env.reset(0)
    for _ in range(50):
        before = env._sims["now"].copy()
        step = env.step(env.advise(0))
        np.testing.assert_allclose(step.elapsed_s, env._sims["now"] - before, rtol=1e-5, atol=1e-6)
        assert env._shadows["now"].tolist() == env._sims["now"].tolist()


def test_difficulty_is_taken_back_by_an_empty_stage() -> None:
    env = make_env(1, difficulty={"load": 0.9})
    env.set_difficulty({"load": 0.5, "load_jitter": 0.0})
    assert (env.difficulty.load, env.difficulty.load_jitter) == (0.5, 0.0)
    env.set_difficulty({})
    assert env.difficulty == env.spec.difficulty
    with pytest.raises(InputError, match="loads"):
        env.set_difficulty({"loads": 1.0})
    with pytest.raises(InputError, match="at most 6"):
        make_env(1, scenarios=["random"], difficulty={"max_replicas": 7})
    make_env(1, scenarios=["steady-chat"], difficulty={"max_replicas": 7})  # it draws no clusters


def test_a_cluster_too_large_for_the_observation_is_named() -> None:
    with pytest.raises(InputError, match="an episode has 4 replicas"):
        make_env(1, max_replicas=3).reset(0)
