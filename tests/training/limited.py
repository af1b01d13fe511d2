"""The problem of fakes.py with a limit: the entities picked may be no noisier than `LIMIT` on average."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray

from pointsman.envs.entity import Step
from pointsman.evaluation.problem import Evaluate, Problem
from pointsman.inference.checkpoint import Checkpoint
from pointsman.training.networks import TensorObservation, build_network

from .fakes import FakeEnv, FakeSpec

CHEAPEST_NOISE, LIMIT = 0.5, 0.35


class LimitedEnv(FakeEnv):
    tails = ("noise",)

    def step(self, actions: NDArray[np.int64]) -> Step:
        noise = self.noise(actions)
        return super().step(actions)._replace(tails={"noise": -noise})

    def noise(self, actions: NDArray[np.int64]) -> NDArray[np.float32]:
        """[N] of what is picked; holding has none."""
        picked = self._observation.entities[np.arange(self.num_envs), actions - 1, 1]
        return np.where(actions > 0, picked, 0.0).astype(np.float32)


def make_env(spec: FakeSpec, num_envs: int) -> LimitedEnv:
    return LimitedEnv(spec, num_envs)


def make_evaluate(spec: FakeSpec) -> Evaluate:
    def evaluate(checkpoint: Checkpoint) -> dict[str, float]:
        network = build_network(checkpoint.network, checkpoint.space, seed=0)
        network.load_state_dict({name: torch.from_numpy(array) for name, array in checkpoint.arrays.items()})
        env = LimitedEnv(spec, 2048)
        seen = TensorObservation.from_numpy(env.reset(seed=1))
        with torch.no_grad():
            actions = network.act(seen, network.initial_state(2048))[0].argmax(-1).numpy()
        noise = float(env.noise(actions).mean())
        breach = math.log(noise / LIMIT)
        found = {f"eval_breach/noise/{group}": breach for group in env.groups}
        score = float(env.step(actions).reward.mean()) - 2.0 * max(0.0, breach)
        return found | {"eval_score": score, "eval_noise": noise}

    return evaluate


PROBLEM = Problem(FakeSpec, make_env, make_evaluate)
