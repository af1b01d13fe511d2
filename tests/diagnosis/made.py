"""Curves made by hand: a healthy run with its noise, and ways to change it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pointsman.diagnosis.curves import Array, RunFacts, RunLog
from pointsman.diagnosis.findings import Finding, diagnose

ROWS = 120
EVALUATE_EVERY = 5
HOME_ROWS = 150

CONFIG = {
    "env": {"kind": "made"},
    "ppo": {
        "learning_rate": 1e-3,
        "num_epochs": 3,
        "minibatch_size": 512,
        "target_kl": 0.03,
        "discount": {"kind": "time", "horizon_s": 20.0, "horizon_steps": 200.0},
    },
    "run": {"num_envs": 32, "rollout_steps": 64},
}
GAIN = {"per_second": 0.05, "error": 0.005, "share": 0.5, "above_random": 0.1, "above_random_error": 0.006}
HEADROOM = {"baseline": "first", "gains": {"here": GAIN}}


def healthy(seed: int = 0, rows: int = ROWS) -> dict[str, Array]:
    """The columns of a run that learns and stays good; NaN where nothing was logged."""
    rng = np.random.default_rng(seed)
    update = np.arange(1.0, rows + 1)
    done = update / rows
    learned = 1.0 - np.exp(-8.0 * done)

    def noisy(values: Any, size: float) -> Array:
        return np.asarray(values + rng.normal(0.0, size, rows))

    def evaluated(values: Array) -> Array:
        return np.where(update % EVALUATE_EVERY == 0, values, np.nan)

    score = noisy(-0.3 * (1.0 - learned) + 0.05 * learned, 0.001)
    blocks = [evaluated(noisy(score, 0.003)) for _ in range(4)]
    entropy_frac = noisy(0.4 + 0.6 * np.exp(-3.0 * done), 0.01)
    return {
        "update": update,
        "timesteps": 2048.0 * update,
        "fraction_done": done - 1.0 / rows,
        "elapsed_s": 1.5 * update,
        "mean_ep_return": np.where(update % 4 == 0, noisy(-5.0 * (1.0 - learned), 0.3), np.nan),
        "mean_ep_length": np.where(update % 4 == 0, 1024.0, np.nan),
        "reward_mean": noisy(-0.005 * (1.0 - learned), 0.0005),
        "eval_score": evaluated(score),
        "eval_mean_return": np.mean(blocks, axis=0),
        "eval_min_block_return": np.min(blocks, axis=0),
        "eval_baseline_score": evaluated(np.zeros(rows)),
        "eval_random_return": evaluated(np.full(rows, -0.16)),
        "eval_noop_frac": evaluated(noisy(0.1, 0.02)),
        "noop_frac": noisy(0.04, 0.01),
        "invalid_frac": np.zeros(rows),
        "action_frac_max": noisy(0.26, 0.01),
        "greedy_frac_max": noisy(0.28, 0.02),
        "entropy_frac": entropy_frac,
        "entropy": np.log(5.0) * entropy_frac,
        "approx_kl_mean": 0.0015 * rng.lognormal(0.0, 0.5, rows),
        "early_stop": (rng.random(rows) < 0.02).astype(float),
        "num_steps": np.full(rows, 12.0),
        "pg_loss": noisy(-0.003, 0.001),
        "v_loss": 0.5 * np.exp(-10.0 * done) + 0.02 * rng.lognormal(0.0, 0.3, rows),
        "explained_variance": noisy(0.7 * learned, 0.2),
        "clip_frac": noisy(0.02, 0.005),
        "grad_norm": 0.3 * rng.lognormal(0.0, 0.3, rows),
        "temperature": np.ones(rows),
        "ent_coef": 0.01 - 0.009 * done,
        "lr": 1e-3 - 9e-4 * done,
        "reward_clipped_frac": np.zeros(rows),
        "reward_zero_frac": noisy(0.06, 0.02),
        "reward_share/latency": noisy(0.6, 0.05),
        "reward_share/age": noisy(0.4, 0.05),
        "elapsed_mean_s": noisy(0.04, 0.002),
        "time/env_s": noisy(0.4, 0.05),
        "time/inference_s": noisy(0.3, 0.05),
        "time/update_s": noisy(0.6, 0.05),
        "steps_per_s": noisy(1600.0, 100.0),
        "safety/entropy": np.zeros(rows),
        "safety/kl": np.zeros(rows),
    }


def make(columns: Mapping[str, Array], **facts: Any) -> RunLog:
    """A log of ours with these columns."""
    known = {"config": CONFIG, "headroom": HEADROOM, "schema": {"num_entities": 4}}
    return RunLog("made", "run directory", dict(columns), RunFacts(**(known | facts)))


def foreign(columns: Mapping[str, Array]) -> RunLog:
    """The same columns in a log of somebody else."""
    return RunLog("made", "CSV", dict(columns))


def found(log: RunLog) -> dict[str, str]:
    """Names and severities, the worst first, each followed by what it explains."""
    return {one.name: one.severity for one in told(log)}


def told(log: RunLog) -> list[Finding]:
    """Causes and their symptoms."""
    return [one for cause in diagnose(log).findings for one in (cause, *cause.symptoms)]


def log_of(seed: int, rows: int = HOME_ROWS, **changes: Any) -> dict[str, Array]:
    """A home-made trainer's log of a run that learns, but for the columns given."""
    rng = np.random.default_rng(seed)
    done = np.arange(rows) / rows
    columns: dict[str, Any] = {
        "update": np.arange(1.0, rows + 1),
        "reward": -200 + 150 * (1 - np.exp(-6 * done)) + rng.normal(0, 8, rows),
        "kl": 0.01 * rng.lognormal(0, 0.3, rows),
        "entropy": 1.38 - done,
        "explained_var": 0.8 * (1 - np.exp(-8 * done)),
    }
    return columns | {name: np.broadcast_to(values, rows).copy() for name, values in changes.items()}


def write(path: Path, columns: Mapping[str, Array]) -> Path:
    """As CSV, NaN as such."""
    np.savetxt(
        path, np.c_[tuple(columns.values())], "%g", delimiter=",", header=",".join(columns), comments=""
    )
    return path


def around(level: Any, size: float, seed: int, rows: int = HOME_ROWS) -> Array:
    return np.asarray(level + np.random.default_rng(seed + 100).normal(0.0, size, rows))
