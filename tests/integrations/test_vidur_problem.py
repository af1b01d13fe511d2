"""Vidur as a cluster behind our environment."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from simulator.factories import ROOT

pytest.importorskip("vidur")
pytestmark = pytest.mark.filterwarnings("default")  # of Vidur's own imports

from pointsman.errors import InputError  # noqa: E402
from pointsman.integrations.vidur.environment import VidurEnv  # noqa: E402
from pointsman.integrations.vidur.judging import VidurJudge, VidurSelection  # noqa: E402
from pointsman.integrations.vidur.running import run, simulator  # noqa: E402
from pointsman.integrations.vidur.scheduler import PointsmanGlobalSchedulerConfig  # noqa: E402
from pointsman.integrations.vidur.spec import BASELINE, ENGINES, VidurSpec, spent  # noqa: E402
from pointsman.routing.decider import Decider  # noqa: E402

SPEC = VidurSpec(requests=60)
SEED_OF_VIDUR = 42


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("engine", list(ENGINES))
@pytest.mark.parametrize("policy", [BASELINE, "default"])
def test_stepped_runs_are_those_of_the_scheduler_inside(policy: str, engine: Any) -> None:
    """To the last bit: whether Vidur asks a policy, or stops for whoever steps it to ask."""
    chosen = PointsmanGlobalSchedulerConfig(policy=policy)
    served = run(simulator(SPEC.arrivals(3), chosen, ENGINES[engine]()))
    times = SPEC.model_copy(update={"engine": engine}).cluster(3, policy).play()
    assert times.tolist() == [[s.arrived_at, s.first_token_at, s.completed_at] for s in served]


def test_clusters_in_turn_do_not_disturb_each_other() -> None:
    clusters = [SPEC.cluster(seed, BASELINE) for seed in (3, 4)]
    playing = list(clusters)
    while playing:
        for cluster in list(playing):
            name = cluster.decide() if cluster.advance() else None
            if name is None:
                playing.remove(cluster)
            else:
                cluster.send(name)
    for seed, cluster in zip((3, 4), clusters, strict=True):
        np.testing.assert_array_equal(cluster.times(), SPEC.cluster(seed, BASELINE).play())


def test_what_was_spent_is_an_integral() -> None:
    """Against adding up a thousand times a second."""
    times = np.array([[0.1, 0.4, 2.0], [0.5, 1.7, 1.9], [1.2, np.inf, np.inf], [3.0, 3.5, 4.0]])
    now, step = 1.8, 1e-3
    wanted = np.zeros(3)
    for t in np.arange(step / 2, now, step):
        is_there = (times[:, 0] <= t) & (t < times[:, 2])
        is_waiting = (times[:, 0] <= t) & (t < times[:, 1])
        wanted += step * np.array([is_there.sum(), is_waiting.sum(), (t - times[is_waiting, 0]).sum()])
    np.testing.assert_allclose(spent(times, now), wanted, atol=0.01)


def play(env: VidurEnv, seed: int, num_steps: int, by: str) -> tuple[np.ndarray, list[Any]]:
    """Rewards [T, N] of a heuristic, and the episodes that ended."""
    env.reset(seed)
    deciders: dict[int, tuple[Any, Decider]] = {}
    rewards, ended = [], []
    for _ in range(num_steps):
        actions = []
        for index, episode in enumerate(env._episodes):
            cluster = episode._cluster
            if deciders.get(index, (None,))[0] is not cluster:
                books = cluster._scheduler.core._books
                deciders[index] = cluster, Decider(books, by, SEED_OF_VIDUR)
            queued = cluster._scheduler.num_queued
            actions.append(deciders[index][1].decide(cluster.request, queued, cluster.now))
        step = env.step(np.array(actions))
        rewards.append(step.reward)
        ended += step.episodes
    return np.array(rewards), ended


def test_deciding_as_the_shadow_earns_nothing() -> None:
    rewards, ended = play(VidurEnv(SPEC, 2), 7, SPEC.requests, BASELINE)
    np.testing.assert_allclose(rewards, 0.0, atol=1e-5)
    assert [(one.env, one.length) for one in ended] == [(0, SPEC.requests), (1, SPEC.requests)]
    assert ended[0].metrics["e2e_mean_s"] != ended[1].metrics["e2e_mean_s"]


def test_rewards_add_up_to_the_cost_saved() -> None:
    rewards, (ended,) = play(VidurEnv(SPEC, 1), 7, SPEC.requests, "random")
    assert ended.metrics["cost_saved"] < -0.01
    assert rewards.sum() == pytest.approx(ended.episode_return, rel=1e-4)
    again, _ = play(VidurEnv(SPEC, 1), 7, SPEC.requests, "random")
    np.testing.assert_array_equal(rewards, again)


def test_holding_waits_for_room() -> None:
    """Twice what two replicas can prefill: a request that is held is asked about again."""
    spec = VidurSpec(replicas=2, requests=80, rate_rps=60.0)
    env = VidurEnv(spec, 1)
    seen, num_held, ended = env.reset(0), 0, []
    rng = np.random.default_rng(0)
    for _ in range(2000):
        legal = seen.action_mask[0]
        action = 0 if legal[0] else int(rng.choice(np.flatnonzero(legal)))
        num_held += action == 0
        step = env.step(np.array([action]))
        seen, ended = step.observation, [*ended, *step.episodes]
        if ended:
            break
    assert num_held > 10
    assert ended[0].length == num_held + spec.requests


def test_illegal_actions_are_refused() -> None:
    env = VidurEnv(SPEC, 1)
    assert not env.reset(0).action_mask[0, 0]  # there is room
    with pytest.raises(InputError, match="is not legal"):
        env.step(np.array([0]))


def test_default_saves_cost_on_vidur() -> None:
    judge = VidurJudge(VidurSpec())
    assert judge.play(BASELINE, [0, 1])["return"].tolist() == [0.0, 0.0]
    assert judge.play("default", [0, 1])["return"].mean() > 0.0
    found = VidurSelection(VidurSpec(requests=40))(SPEC.checkpoint)
    assert found["eval_score"] == found["eval_mean_return"] and "eval_late-binding_return" in found


def pointsman(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pointsman", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_compare_and_train_take_it_like_any_problem(tmp_path: Path) -> None:
    small = ("--set", "requests=30", "--set", "replicas=2", "--set", "rate_rps=8")
    policies = "default,round-robin,least-outstanding"
    done = pointsman("compare", "--env", "vidur", "--policies", policies, "--seeds", 2, *small, "--json")
    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout)["policies"]) == set(policies.split(","))
    pytest.importorskip("torch")
    short = ("--steps", 128, "--set", "run.num_envs=2", "--set", "run.rollout_steps=32")
    short += ("--set", "ppo.minibatch_size=32", "--set", "ppo.critic_first=0", "--set", "evaluation.seeds=2")
    done = pointsman("train", "--env", "vidur", *small, *short, "--out", tmp_path / "run", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["num_decisions"] == 128
    done = pointsman("evaluate", tmp_path / "run", "--seeds", 2, "--json")
    assert done.returncode == 0, done.stderr
