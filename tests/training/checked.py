"""A few steps of training in which learned policies route the warm-up, shadow and teach, by a checkpoint.

NUMBA_DISABLE_JIT=1 python checked.py CHECKPOINT      # every access to memory by address is checked
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

from pointsman.spec import parse_spec  # noqa: E402
from pointsman.training.config import TrainConfig  # noqa: E402
from pointsman.training.ranks import Ranks  # noqa: E402
from pointsman.training.trainer import train  # noqa: E402
from training.fakes import MemoryHost  # noqa: E402

NO_SCORE = {"eval_score": 0.0, "eval_mean_return": 0.0, "eval_baseline_score": 0.0}


def small_config(checkpoint: str) -> TrainConfig:
    data = {
        "env": {
            "kind": "routing",
            "decisions": 3,
            "warmup_requests": 6,
            "warmup_policies": [checkpoint],
            "shadow": checkpoint,
            "teachers": [checkpoint],
            "reward": {"scale": "none"},
        },
        "network": {"width": 4, "depth": 1},
        "ppo": {"minibatch_size": 8, "num_epochs": 1},
        "warm_start": {"decisions": 8, "num_epochs": 1},
        "run": {"steps": 8, "num_envs": 2, "rollout_steps": 4, "settle_steps": 0},
    }
    return parse_spec(TrainConfig, data)


def train_a_little(checkpoint: str) -> int:
    """The decisions it was trained on."""
    config = small_config(checkpoint)
    host = MemoryHost(config)
    host.evaluate = lambda _: NO_SCORE
    train(Ranks(), config, None, host)
    return int(host.rows[-1]["timesteps"])


if __name__ == "__main__":
    sys.stdout.write(f"{train_a_little(sys.argv[1])}\n")
