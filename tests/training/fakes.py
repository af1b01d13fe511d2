"""An environment small enough to know by heart, and a problem the trainer can be told to train by name.

Each decision shows up to R entities with a cost in [0, 1]; picking one gives minus its cost, holding -1.
The best reward is minus the smallest cost; a random policy gets about -1/2 or worse.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from pointsman.envs.entity import Episode, Observation, Step
from pointsman.evaluation.problem import Evaluate, Problem
from pointsman.inference.checkpoint import Checkpoint
from pointsman.inference.space import EntitySpace, Feature
from pointsman.spec import Spec, parse_spec
from pointsman.training.config import TrainConfig
from pointsman.training.exploration import Event
from pointsman.training.networks import TensorObservation, build_network
from pointsman.training.safety import Alert
from pointsman.training.state import TrainerState
from pointsman.training.trainer import Outlook


class FakeSpec(Spec):
    entities: int = Field(default=4, ge=2)
    episode_steps: int = Field(default=8, ge=1)
    objective: Literal["balanced", "mean"] = "balanced"
    poison_at_step: int = Field(default=-1, description="rewards are NaN from here on")


class FakeEnv:
    groups = ("few", "many")
    metadata: dict[str, Any] = {}  # noqa: RUF012
    teachers = ("cheapest", "first")
    baseline = "first"

    def __init__(self, spec: FakeSpec, num_envs: int) -> None:
        self.spec = spec
        self.num_envs = num_envs
        self.space = EntitySpace(
            spec.entities,
            (
                Feature("cost", "1", "cost", "of picking it"),
                Feature("noise", "1", "noise", "nothing"),
            ),
            (Feature("num", "1", "size", "entities here"),),
            (Feature("smallest", "1", "secret", "the smallest cost"),),
        )
        self.max_entities = spec.entities
        self.num_steps = 0

    def reset(self, seed: int) -> Observation:
        self._rng = np.random.default_rng(seed)
        self._age = np.zeros(self.num_envs, np.int64)
        self._sum = np.zeros(self.num_envs)
        self._num = np.full(self.num_envs, 2)
        self._draw_sizes(np.ones(self.num_envs, bool))
        self._observation = self._draw()
        return self._observation

    def _draw_sizes(self, where: NDArray[np.bool_]) -> None:
        self._num[where] = self._rng.integers(2, self.max_entities + 1, where.sum())

    def _draw(self) -> Observation:
        num, entities = self.num_envs, self.spec.entities
        values = self._rng.random((num, entities, 2)).astype(np.float32)
        mask = np.arange(entities) < self._num[:, None]
        self._costs = np.where(mask, values[:, :, 0], np.inf)
        values[~mask] = 0.0
        actions = np.ones((num, entities + 1), bool)
        actions[:, 0] = self._rng.random(num) < 0.5
        actions[:, 1:] = mask
        context = (self._num[:, None] / entities).astype(np.float32)
        return Observation(
            values, context, mask, actions, self._costs.min(1, keepdims=True).astype(np.float32)
        )

    def step(self, actions: NDArray[np.int64]) -> Step:
        rows = np.arange(self.num_envs)
        assert self._observation.action_mask[rows, actions].all()
        costs = np.where(actions > 0, self._costs[rows, actions - 1], 1.0).astype(np.float32)
        self.num_steps += 1
        if 0 <= self.spec.poison_at_step <= self.num_steps:
            costs[0] = np.nan
        self._sum -= costs
        self._age += 1
        is_end = self._age >= self.spec.episode_steps
        groups = (self._num > 2).astype(np.int64)
        episodes = [
            Episode(int(i), int(groups[i]), float(self._sum[i]), int(self._age[i]), {"latency_s": 1.0})
            for i in np.flatnonzero(is_end)
        ]
        final = self._draw()
        self._sum[is_end], self._age[is_end] = 0.0, 0
        self._draw_sizes(is_end)
        self._observation = self._draw()
        elapsed = self._rng.exponential(0.1, self.num_envs).astype(np.float32)
        terms = {"picked": np.where(actions > 0, -costs, 0.0), "held": np.where(actions > 0, 0.0, -costs)}
        none = np.zeros(self.num_envs, bool)
        return Step(self._observation, -costs, elapsed, none, is_end, final, groups, terms, none, episodes)

    def advise(self, teacher: int) -> NDArray[np.int64]:
        best = self._costs.argmin(1) + 1
        return np.asarray(best if teacher == 0 else np.ones_like(best), np.int64)

    def set_difficulty(self, difficulty: dict[str, Any]) -> None:
        self.max_entities = int(difficulty.get("entities", self.spec.entities))


def make_env(spec: FakeSpec, num_envs: int) -> FakeEnv:
    return FakeEnv(spec, num_envs)


def make_evaluate(spec: FakeSpec) -> Evaluate:
    """Mean reward of the arg-max policy on 512 fixed decisions; the baseline picks at random."""

    def evaluate(checkpoint: Checkpoint) -> dict[str, float]:
        network = build_network(checkpoint.network, checkpoint.space, seed=0)
        network.load_state_dict({name: torch.from_numpy(array) for name, array in checkpoint.arrays.items()})
        env = FakeEnv(spec, 512)
        seen = TensorObservation.from_numpy(env.reset(seed=1))
        with torch.no_grad():
            actions = network.act(seen, network.initial_state(512))[0].argmax(-1)
        score = float(env.step(actions.numpy()).reward.mean())
        return {"eval_score": score, "eval_mean_return": 8 * score, "eval_baseline_score": -0.5}

    return evaluate


PROBLEM = Problem(FakeSpec, make_env, make_evaluate)


def fake_config(**sections: Any) -> TrainConfig:
    """A run of a few updates, with the sections a test cares about replaced key by key."""
    data: dict[str, Any] = {
        "env": {"kind": "training.fakes"},
        "network": {"width": 16, "depth": 1},
        "ppo": {"minibatch_size": 128, "learning_rate": 0.003},
        "run": {
            "steps": 16 * 32 * 6,
            "num_envs": 32,
            "rollout_steps": 16,
            "settle_steps": 24,
            "evaluate_every": 2,
            "checkpoint_every": 4,
        },
    }
    for name, section in sections.items():
        data[name] = {**data.get(name, {}), **section}
    return parse_spec(TrainConfig, data)


class MemoryHost:
    """Keeps everything in memory; asks to stop after `stop_after` updates."""

    def __init__(self, config: TrainConfig, stop_after: int | None = None) -> None:
        self.config, self.stop_after = config, stop_after
        self.evaluate = make_evaluate(FakeSpec())
        self.rows: list[dict[str, float]] = []
        self.news: list[Event | Alert] = []
        self.states: list[TrainerState] = []

    def cuttable(self) -> AbstractContextManager[None]:
        return nullcontext()

    def outlook(self, num_decisions: int) -> Outlook:
        assert self.config.run.steps is not None
        is_enough = self.stop_after is not None and len(self.rows) + 1 >= self.stop_after
        return Outlook(num_decisions / self.config.run.steps, is_enough and num_decisions > 0)

    def prepared(self, metrics: dict[str, float]) -> None:
        self.warm_start = metrics

    def record(self, row: dict[str, float], news: Sequence[Event | Alert]) -> None:
        self.rows.append(row)
        self.news.extend(news)

    def failed(self, row: dict[str, float], error: Exception) -> None:
        self.rows.append(row)

    def keep(self, state: TrainerState, checkpoint: Checkpoint) -> None:
        self.kept = state

    def save(self) -> None:
        self.states.append(self.kept)
