"""RLlib on our environments: PPO with RLlib's own module for action masks.

    pip install 'pointsman[train]' 'ray[rllib]'
    python examples/rllib_masked.py pointsman/Jobs-v0 5

Prints the mean return of an episode after the first and after the last iteration.
"""

import sys
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.examples.rl_modules.classes.action_masking_rlm import ActionMaskingTorchRLModule
from ray.tune.registry import register_env

import pointsman.envs.gym  # noqa: F401  # registers the environments

torch.set_num_threads(1)  # more would wait for each other: the network is small


class Masked(gymnasium.ObservationWrapper):
    """What we show, as RLlib's module wants it: `observations` in one row, and `action_mask`."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        shown = dict(env.observation_space.items())
        mask = shown.pop("action_mask")
        self._shown = spaces.Dict(shown)
        row = spaces.flatten_space(self._shown)
        self.observation_space = spaces.Dict(
            {
                "observations": spaces.Box(row.low, row.high, dtype=np.float32),
                "action_mask": spaces.Box(0.0, 1.0, mask.shape, np.float32),
            }
        )

    def observation(self, observation: dict[str, Any]) -> dict[str, Any]:
        shown = {name: part for name, part in observation.items() if name != "action_mask"}
        row = spaces.flatten(self._shown, shown).astype(np.float32)
        return {"observations": row, "action_mask": observation["action_mask"].astype(np.float32)}


def train(name: str, num_iterations: int, **settings: Any) -> tuple[float, float]:
    """-> mean return after the first and after the last iteration; `settings`: of the environment"""
    register_env("masked", lambda _: Masked(gymnasium.make(name, **settings)))
    config = (
        PPOConfig()
        .environment("masked")
        # Whole episodes: else none may have ended in the first iteration, and there is no return to print.
        .env_runners(num_env_runners=0, num_envs_per_env_runner=8, batch_mode="complete_episodes")
        .training(train_batch_size=4096, minibatch_size=512, num_epochs=4, lr=3e-4)
        .rl_module(rl_module_spec=RLModuleSpec(module_class=ActionMaskingTorchRLModule))
        .debugging(seed=0)
    )
    algorithm = config.build_algo()
    returns = [algorithm.train()["env_runners"]["episode_return_mean"] for _ in range(num_iterations)]
    algorithm.stop()
    return returns[0], returns[-1]


if __name__ == "__main__":
    first, last = train(sys.argv[1], int(sys.argv[2]))
    print(f"mean return: {first:.3f} in the first iteration, {last:.3f} in the last")
