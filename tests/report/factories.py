"""Comparisons without a simulation, and runs without training."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import yaml

from pointsman.evaluation.compare import COST, CURVES, HEADLINES, Comparison, LatencyHistogram
from pointsman.experiments.scenarios import find_scenario
from pointsman.report.evaluation import METRICS
from pointsman.report.tables import HEADERS
from pointsman.routing.policy import PolicySpec
from pointsman.training.logs import CsvLog


def make_comparison(
    values: Mapping[str, Sequence[float]],
    name: str = "steady-chat",
    baseline: str = "least-outstanding",
) -> Comparison:
    """`values[policy]`: one a seed, the same for every metric."""
    num_seeds = len(next(iter(values.values())))
    rng = np.random.default_rng(0)
    curves = {policy: {curve: LatencyHistogram() for curve in CURVES} for policy in values}
    for policy, row in values.items():
        for histogram in curves[policy].values():
            histogram.add(np.mean(row) * rng.lognormal(size=2000))
    return Comparison(
        name=name,
        what="made up <for> a test",
        seeds=tuple(range(1000, 1000 + num_seeds)),
        configs=tuple(find_scenario("steady-chat").config(1000 + i) for i in range(num_seeds)),
        policies=tuple(PolicySpec(kind=policy) for policy in values),
        baseline=baseline,
        metrics={
            policy: {
                metric: np.array(row, float)
                for metric in {*HEADLINES, *HEADERS, *METRICS, "ttft_square_mean_s2"} - {COST}
            }
            for policy, row in values.items()
        },
        curves=curves,
    )


NUM_UPDATES = 60
RUN_CONFIG = {
    "env": {"kind": "routing", "scenarios": ["steady-chat"]},
    "ppo": {"target_kl": 0.03},
    "run": {"steps": 100 * NUM_UPDATES, "minutes": None, "seed": 7},
}


def make_rows(num_updates: int = NUM_UPDATES, score: float = 0.2) -> list[dict[str, float]]:
    """A run whose score rises to `score`, evaluated every tenth update, with an intervention and an alert."""
    rng = np.random.default_rng(0)
    rows = []
    for update in range(1, num_updates + 1):
        share = update / num_updates
        row: dict[str, float] = {
            "update": update,
            "timesteps": 100 * update,
            "fraction_done": (update - 1) / num_updates,
            "elapsed_s": 2.0 * update,
            "mean_ep_return": -10.0 + 5 * share + rng.normal(),
            "entropy_frac": 0.9 - 0.4 * share,
            "approx_kl_mean": 0.004 * rng.uniform(0.5, 1.5),
            "approx_kl_max": 0.01 * rng.uniform(0.5, 1.5),
            "temperature": 1.3 - 0.3 * share,
            "ent_coef": 0.01,
            "noop_frac": 0.02,
            "action_frac_max": 0.3,
            "action_frac_min": 0.2,
            "clip_frac": 0.05,
            "explained_variance": 0.8,
            "lr": 1e-3,
            "reward/waiting": 0.02 * share,
            "reward/age": -0.01,
            "time/env_s": 0.5,
            "time/inference_s": 0.3,
            "time/update_s": 1.0,
            "steps_per_s": 60.0,
            "interventions": float(update == 20),
            "alerts": float(update == 30),
        }
        row |= {
            f"reward_raw_p{part}": at
            for part, at in (("01", -1), ("10", -0.1), ("50", 0), ("90", 0.1), ("99", 1))
        }
        if update % 10 == 0:
            now = score * share
            row |= {
                "eval_score": now,
                "eval_mean_return": now + 0.01,
                "eval_min_block_return": now - 0.02,
                "eval_max_block_return": now + 0.03,
                "eval_baseline_score": 0.0,
                "eval_random_return": -5.0,
                "eval_round-robin_return": -0.1,
                "eval_e2e_mean_s": 1.0 - now,
                "eval_ttft_p99_s": 0.5 + 0.1 * now,
                "eval_e2e_mean_s/least-outstanding": 1.0,
                "eval_ttft_p99_s/least-outstanding": 0.8,
                "eval_e2e_mean_s/late-binding": 0.98,
                "eval_ttft_p99_s/late-binding": 0.6,
                "eval_e2e_mean_s/random": 3.0,
                "eval_ttft_p99_s/random": 2.0,
            }
        rows.append(row)
    return rows


def make_run(folder: Path, rows: Sequence[Mapping[str, float]], **files: str | None) -> Path:
    """A run directory without checkpoints; `files` (config, meta, evaluation, headroom) replace what it has,
    None leaves one out."""
    gain = {"best": "least-delay", "per_second": 0.1, "error": 0.01, "share": 0.4}
    earned = [
        {
            "name": name,
            "per_second": rate,
            "quantiles": dict.fromkeys(("p01", "p10", "p50", "p90", "p99"), rate),
            "zero_frac": 0.1,
            "flat_frac": 0.0,
        }
        for name, rate in (("least-delay", 0.1), ("least-outstanding", 0.0), ("random", -1.0))
    ]
    evaluated = [row for row in rows if "eval_score" in row] or [{}]
    session = {"command": "pointsman train --preset <quick>", "started_at": "2026-01-01T00:00:00+00:00"}
    session |= {"from_update": 0, "pointsman": "0.1.0", "git_revision": "abc", "python": "3.11", "torch": "2"}
    contents = {
        "config": yaml.safe_dump(RUN_CONFIG),
        "meta": json.dumps({"seed": 7, "workers": 1, "sessions": [session]}),
        "evaluation": json.dumps({"best": evaluated[-1], "last": evaluated[-1]}),
        "headroom": json.dumps(
            {
                "baseline": "least-outstanding",
                "earned": earned,
                "gains": {"steady-chat": gain},
                "warnings": ["most rewards are <zero>"],
            }
        ),
    } | files
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in contents.items():
        if text is not None:
            (folder / f"{name}.{'yaml' if name == 'config' else 'json'}").write_text(text)
    log = CsvLog(folder / "progress.csv", 0)
    for row in rows:
        log.append(row)
    (folder / "news.txt").write_text("update 20: temperature 1 → 1.5, plateau\nupdate 30: KL <too> far\n")
    return folder
