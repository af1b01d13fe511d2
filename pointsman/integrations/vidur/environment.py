"""Vidur as an environment: the same observations, actions and masks as envs/routing.py, slowly.

Episode: `requests` requests that come to empty replicas; it ends when all are placed, and what they take
until the last is done belongs to the last decision.
Reward: what the same arrivals cost under least-outstanding in the same time, less what they cost here, by the
objective's weights, over what that costs a second: 0.1 for a second is 10 % less. least-outstanding plays the
episode first, by itself.
A held request is decided anew when there is room, or after a second, as everywhere.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pointsman.envs.entity import Episode, Observation, Step
from pointsman.errors import InputError
from pointsman.inference.space import EntitySpace
from pointsman.integrations.vidur.spec import BASELINE, VidurSpec, spent
from pointsman.routing.deciding import HOLD
from pointsman.routing.features import CONTEXT_FEATURES, ENTITY_FEATURES
from pointsman.routing.policy import rules_of
from pointsman.simulator.privileged import PRIVILEGED_FEATURES

TERMS = ("outstanding", "waiting", "age")


class VidurEnv:
    """An `EntityEnv`: clusters that are stepped in turn."""

    groups: tuple[str, ...] = ("vidur",)
    teachers: tuple[str, ...] = ()
    baseline = ""

    def __init__(self, spec: VidurSpec, num_envs: int) -> None:
        self.spec, self.num_envs = spec, num_envs
        self.space = EntitySpace(spec.replicas, ENTITY_FEATURES, CONTEXT_FEATURES, PRIVILEGED_FEATURES)
        spec.checkpoint.require_space(self.space, "env.start")
        self.metadata: dict[str, Any] = {"objective": spec.objective} | rules_of(spec.checkpoint)
        self.metadata["env"] = {"kind": "vidur", **spec.model_dump(mode="json")}
        self._observation = Observation(
            entities=np.zeros((num_envs, spec.replicas, len(ENTITY_FEATURES)), np.float32),
            context=np.zeros((num_envs, len(CONTEXT_FEATURES)), np.float32),
            entity_mask=np.ones((num_envs, spec.replicas), np.bool_),
            action_mask=np.zeros((num_envs, spec.replicas + 1), np.bool_),
            privileged=np.zeros((num_envs, len(PRIVILEGED_FEATURES)), np.float32),  # a router's view only
        )

    def reset(self, seed: int) -> Observation:
        self._episodes = [
            _Episode(self.spec, np.random.SeedSequence([seed, index])) for index in range(self.num_envs)
        ]
        for index, episode in enumerate(self._episodes):
            episode.see(self._observation, index)
        return self._observation

    def step(self, actions: NDArray[np.int64]) -> Step:
        rows = np.arange(self.num_envs)
        if not self._observation.action_mask[rows, actions].all():
            raise InputError("action", actions.tolist(), "is not legal", "choose from the action mask")
        before = copy.deepcopy(self._observation)
        earned, elapsed_s = np.zeros((self.num_envs, len(TERMS))), np.zeros(self.num_envs)
        is_over, ended = np.zeros(self.num_envs, np.bool_), []
        lifetime_s = np.array([episode.lifetime_s for episode in self._episodes])
        for index, episode in enumerate(self._episodes):
            earned[index], elapsed_s[index] = episode.step(int(actions[index]))
            if episode.is_over:
                is_over[index] = True
                ended.append(episode.summary(index))
                episode = self._episodes[index] = _Episode(self.spec, episode.seeds)
            episode.see(self._observation, index)
        return Step(
            observation=self._observation,
            reward=earned.sum(axis=1).astype(np.float32),
            elapsed_s=elapsed_s.astype(np.float32),
            terminated=is_over,
            truncated=np.zeros(self.num_envs, np.bool_),
            final_observation=before,
            groups=np.zeros(self.num_envs, np.int64),
            terms={name: earned[:, k].astype(np.float32) for k, name in enumerate(TERMS)},
            is_flat=np.zeros(self.num_envs, np.bool_),
            episodes=ended,
            lifetime_s=lifetime_s.astype(np.float32),
        )

    def advise(self, teacher: int) -> NDArray[np.int64]:
        raise InputError("env.kind", "vidur", "has no teachers", "leave out warm_start and ppo.imitation")

    def set_difficulty(self, difficulty: dict[str, Any]) -> None:
        if difficulty:
            raise InputError("curriculum", difficulty, "Vidur has no stages", "leave it out")


class _Episode:
    def __init__(self, spec: VidurSpec, seeds: np.random.SeedSequence) -> None:
        """`seeds` gives the seed of this episode, and then those of the next ones."""
        self.seeds = seeds
        seed = int(seeds.spawn(1)[0].generate_state(1)[0])
        self._shadow = spec.cluster(seed, BASELINE).play()
        self._weights = spec.weights
        end = float(self._shadow[:, 2].max())
        self._unit = float(self._weights @ spent(self._shadow, end)) / end  # what a second costs there
        self.lifetime_s = float((self._shadow[:, 2] - self._shadow[:, 0]).mean())
        self._cluster = spec.cluster(seed, spec.start)
        self._recheck_s = spec.checkpoint.metadata.get("hold", {}).get("recheck_s", 1.0)
        self._seen_at, self._spent = 0.0, np.zeros((2, 3))
        self._length, self._return = 0, 0.0
        self.is_over = not self._find_question()

    def see(self, into: Observation, index: int) -> None:
        into.entities[index], into.context[index], into.action_mask[index] = self._seen

    def step(self, action: int) -> tuple[NDArray[np.float64], float]:
        """-> what was earned by each term, and the seconds to the next decision"""
        cluster = self._cluster
        if action == HOLD:
            if cluster.now >= cluster.request.hold_until:
                cluster.request.hold_until = cluster.now + self._recheck_s
            cluster.hold()
        else:
            cluster.send(cluster.replicas[action - 1])
        self.is_over = not self._find_question()
        now = math.inf if self.is_over else cluster.now  # after the last, whatever either has left
        spent_now = np.stack([spent(self._shadow, now), spent(cluster.times(), now)])
        costs = (spent_now - self._spent) * self._weights
        earned: NDArray[np.float64] = (costs[0] - costs[1]) / self._unit
        elapsed_s = cluster.now - self._seen_at
        self._seen_at, self._spent = cluster.now, spent_now
        self._length += 1
        self._return += float(earned.sum())
        return earned, elapsed_s

    def _find_question(self) -> bool:
        """Play on to the next decision; who is held stays so until there is room, or for a while."""
        cluster = self._cluster
        held = cluster.request if cluster.is_holding else None
        while cluster.advance():
            entities, context, legal = cluster.observe()
            if cluster.must_send:
                legal[HOLD] = False
                legal[1:] |= not legal.any()
            request = cluster.request
            if request is held and legal[HOLD] and cluster.now < request.hold_until:
                cluster.hold()
                continue
            self._seen = entities, context, legal
            return True
        return False

    def summary(self, index: int) -> Episode:
        times = self._cluster.times()
        saved = 1.0 - float(self._weights @ self._spent[1]) / float(self._weights @ self._spent[0])
        metrics = {
            "cost_saved": saved,
            "e2e_mean_s": float((times[:, 2] - times[:, 0]).mean()),
            "ttft_p99_s": float(np.percentile(times[:, 1] - times[:, 0], 99)),
        }
        return Episode(index, 0, self._return, self._length, metrics)


def make_env(spec: VidurSpec, num_envs: int) -> VidurEnv:
    return VidurEnv(spec, num_envs)
