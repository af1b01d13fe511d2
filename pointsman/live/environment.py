"""Live servers as an environment: the same observations, actions and masks as envs/routing.py, in real time.

Reward: minus the costs of the objective (outstanding, waiting, age) between two decisions of the trainer, by
the router's books, of all requests, whoever decided them. There is no shadow to compare with, so what a
second usually costs is added back, and all is divided by it: 0.1 for a second is 10 % less cost than usual.
What is usual is an average of the last minutes, which follows the policy slowly.
Episode: `decisions` decisions, then it is cut off. Time does not stop while the trainer learns: the starting
policy serves on, and the next episode begins wherever that has led.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pointsman.envs.entity import Episode, Observation, Step
from pointsman.errors import InputError
from pointsman.experiments.objective import find_objective
from pointsman.inference.checkpoint import Checkpoint
from pointsman.inference.space import EntitySpace
from pointsman.live.cluster import LiveCluster, current
from pointsman.live.costs import CostTotals
from pointsman.live.desk import Question
from pointsman.live.guard import excess, price
from pointsman.live.spec import LiveSpec
from pointsman.routing.features import CONTEXT_FEATURES, ENTITY_FEATURES
from pointsman.routing.policy import rules_of
from pointsman.simulator.privileged import PRIVILEGED_FEATURES

USUAL_S = 300.0  # over which the usual cost of a second is averaged


class Usual:
    """What a second costs on average, lately."""

    def __init__(self) -> None:
        self.per_second = 0.0
        self._seen_s = 0.0

    def see(self, cost: float, elapsed_s: float) -> None:
        self._seen_s = min(USUAL_S, self._seen_s + elapsed_s)
        if self._seen_s > 0.0:
            self.per_second += min(1.0, elapsed_s / self._seen_s) * (
                cost / max(elapsed_s, 1e-9) - self.per_second
            )


class LiveEnv:
    """An `EntityEnv` of one environment, the cluster that is open."""

    num_envs = 1
    teachers: tuple[str, ...] = ()
    baseline = ""

    def __init__(self, spec: LiveSpec, cluster: LiveCluster) -> None:
        self.spec = spec
        self._cluster = cluster
        checkpoint = spec.checkpoint
        count = len(spec.servers)
        self.space = EntitySpace(count, ENTITY_FEATURES, CONTEXT_FEATURES, PRIVILEGED_FEATURES)
        checkpoint.require_space(self.space, "env.start")
        self.groups: tuple[str, ...] = (spec.scenario if spec.config is None else spec.config.stem,)
        self.metadata: dict[str, Any] = {"objective": spec.objective} | rules_of(checkpoint)
        objective = find_objective(spec.objective)
        weights = {name: getattr(objective, name) for name in ("outstanding", "waiting", "age")}
        self._weights = {name: weight for name, weight in weights.items() if weight > 0}
        self._usual = Usual()
        self._length = 0
        self._return = 0.0
        self._question: Question | None = None
        self._totals = CostTotals(0.0, 0.0, 0.0, 0.0)
        self._counted = 0, 0
        self._observation = Observation(
            entities=np.zeros((1, count, len(ENTITY_FEATURES)), np.float32),
            context=np.zeros((1, len(CONTEXT_FEATURES)), np.float32),
            entity_mask=np.ones((1, count), np.bool_),
            action_mask=np.zeros((1, count + 1), np.bool_),
            privileged=np.zeros((1, len(PRIVILEGED_FEATURES)), np.float32),  # nobody can know them here
        )

    def reset(self, seed: int) -> Observation:
        """Take up with the next request. Nothing follows from the seed: servers have no memory to set."""
        self._release()
        self._length, self._return = 0, 0.0
        self._see()
        return self._observation

    def step(self, actions: NDArray[np.int64]) -> Step:
        action = int(actions[0])
        mask = self._observation.action_mask[0]
        if not (0 <= action < len(mask) and mask[action]):
            legal = np.flatnonzero(mask).tolist()
            raise InputError("action", action, "is not legal", f"legal: {legal}")
        if self._question is not None:
            self._cluster.desk.answer(self._question.number, action)
        before = self._totals
        self._see()
        elapsed_s = self._totals.now - before.now
        costs = {
            name: weight * (getattr(self._totals, name) - getattr(before, name))
            for name, weight in self._weights.items()
        }
        self._usual.see(sum(costs.values()), elapsed_s)
        unit = self._usual.per_second or 1.0
        terms = {name: -cost / unit for name, cost in costs.items()} | {"usual": elapsed_s}
        reward = sum(terms.values())
        self._length += 1
        self._return += reward
        is_over = self._length >= self.spec.decisions
        episodes = [self._ended()] if is_over else []
        return Step(
            observation=self._observation,
            reward=np.array([reward], np.float32),
            elapsed_s=np.array([elapsed_s], np.float32),
            terminated=np.zeros(1, np.bool_),
            truncated=np.array([is_over]),
            final_observation=self._observation,
            groups=np.zeros(1, np.int64),
            terms={name: np.array([term], np.float32) for name, term in terms.items()},
            is_flat=np.zeros(1, np.bool_),
            episodes=episodes,
        )

    def _see(self) -> None:
        """Wait for the next request that is ours to place."""
        self._cluster.check()
        question = self._question = self._cluster.desk.next_question(self._cluster.check)
        seen = self._observation
        seen.entities[0], seen.context[0], seen.action_mask[0] = (
            question.entities,
            question.context,
            question.legal,
        )
        self._totals = question.totals

    def _ended(self) -> Episode:
        """The trainer is going to learn now: whoever waits for its action should not."""
        self._release()
        desk = self._cluster.desk
        num_asked, num_late = desk.num_asked - self._counted[0], desk.num_late - self._counted[1]
        self._counted = desk.num_asked, desk.num_late
        metrics = {"late_share": num_late / max(1, num_asked), "cost_per_s": self._usual.per_second}
        if min(len(desk.learner.spent), len(desk.control.spent)) > 1:
            metrics["excess_cost"] = excess(desk.learner, desk.control)[0]
        episode = Episode(0, 0, self._return, self._length, metrics)
        self._length, self._return = 0, 0.0
        return episode

    def _release(self) -> None:
        if self._question is not None:
            self._cluster.desk.answer(self._question.number, None)
            self._question = None

    def advise(self, teacher: int) -> NDArray[np.int64]:
        raise InputError("env.kind", "live", "has no teachers", "leave out warm_start and ppo.imitation")

    def set_difficulty(self, difficulty: dict[str, Any]) -> None:
        if difficulty:
            raise InputError("curriculum", difficulty, "live servers are as they are", "leave it out")


class LiveEvaluate:
    """Arg-max decisions of the policy, beside those of the policy it started from: an `Evaluate`.

    A return is the share of the cost that is saved, of a block against one of the start; means are geometric.
    `eval_score` is the return that is reached with two standard errors to spare (95 % with six pairs), so
    that what is kept as best is better than the start, or is the start.
    """

    def __init__(self, spec: LiveSpec, cluster: LiveCluster) -> None:
        self.spec = spec
        self._cluster = cluster

    @property
    def expected_s(self) -> float:
        """How long an evaluation takes, at the rate of the arrivals."""
        evaluation = self.spec.evaluation
        return 2 * evaluation.pairs * evaluation.requests / self._cluster.rate_rps

    @property
    def least_s(self) -> float:
        """How long a run takes that makes one update."""
        return self.expected_s + self.spec.decisions / self.spec.share / self._cluster.rate_rps

    def __call__(self, checkpoint: Checkpoint) -> dict[str, float]:
        if checkpoint.metadata["update"] == 0:  # against itself: by definition, not by measurement
            return {"eval_score": 0.0, "eval_baseline_score": 0.0, "eval_mean_return": 0.0}
        evaluation = self.spec.evaluation
        blocks = self._cluster.play(checkpoint, evaluation.pairs, evaluation.requests)
        prices = [np.array([price(block.tally)[0] for block in of_one]) for of_one in blocks]
        returns = 1.0 - prices[0] / prices[1]
        logs = np.log(prices[0] / prices[1])
        mean, error = float(logs.mean()), float(logs.std(ddof=1) / np.sqrt(len(logs)))
        return {
            "eval_score": -math.expm1(mean + 2.0 * error),
            "eval_baseline_score": 0.0,
            "eval_mean_return": -math.expm1(mean),
            "eval_min_block_return": float(returns.min()),
            "eval_max_block_return": float(returns.max()),
            "eval_standard_error": error,
        }


def make_env(spec: LiveSpec, num_envs: int) -> LiveEnv:
    """`num_envs` is 1 in training (`LiveSpec.run_must_be`), and nobody else has servers open."""
    return LiveEnv(spec, current())


def make_evaluate(spec: LiveSpec) -> LiveEvaluate:
    return LiveEvaluate(spec, current())
