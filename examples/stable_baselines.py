"""Stable-Baselines3 on our environments: MaskablePPO, which never tries an action that is not legal.

    pip install 'pointsman[train]' sb3-contrib
    python examples/stable_baselines.py pointsman/Jobs-v0 8000

Prints the mean return of an episode before and after, both with the best action by the network.
"""

import sys
from typing import Any

import gymnasium
import torch
from sb3_contrib import MaskablePPO
from sb3_contrib.common.maskable.evaluation import evaluate_policy
from stable_baselines3.common.env_util import make_vec_env

import pointsman.envs.gym  # noqa: F401  # registers the environments

NUM_JUDGED = 5  # episodes
torch.set_num_threads(1)  # more would wait for each other: the network is small


def train(name: str, num_steps: int, **settings: Any) -> tuple[float, float]:
    """-> mean return before and after; `settings`: of the environment"""
    envs = make_vec_env(lambda: gymnasium.make(name, **settings), n_envs=8, seed=0)
    model = MaskablePPO("MultiInputPolicy", envs, n_steps=256, batch_size=256, seed=0, device="cpu")
    judge = gymnasium.make(name, **settings)
    judge.reset(seed=1)
    before, _ = evaluate_policy(model, judge, n_eval_episodes=NUM_JUDGED, warn=False)
    model.learn(num_steps)
    judge.reset(seed=1)
    after, _ = evaluate_policy(model, judge, n_eval_episodes=NUM_JUDGED, warn=False)
    return float(before), float(after)


if __name__ == "__main__":
    returns = train(sys.argv[1], int(sys.argv[2]))
    print("mean return: {:.3f} before, {:.3f} after".format(*returns))
