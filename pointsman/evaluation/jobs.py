"""How good a policy for GPU jobs is: the returns of whole episodes, decided by arg-max, on fixed seeds.

An episode follows from its seed, so that all policies get the same jobs. Selection and report seeds are those
of experiments/scenarios.py. Policies run inside the compiled simulator, a learned one too; no PyTorch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np

from pointsman.envs.jobs import BASELINE, JobsSpec, make_clusters
from pointsman.errors import InputError
from pointsman.evaluation.returns import RETURN, Metrics, block_means
from pointsman.experiments.scenarios import SELECTION_SEEDS
from pointsman.experiments.threads import run_in_threads
from pointsman.inference.checkpoint import Checkpoint
from pointsman.jobs.clusters import JobPolicyTables
from pointsman.jobs.heuristics import HEURISTICS
from pointsman.jobs.observation import job_space, lookahead_size
from pointsman.jobs.rollout import play_all
from pointsman.jobs.state import FINISHED
from pointsman.jobs.table import Jobs
from pointsman.jobs.workload import draw_jobs

BASELINES = ("random-feasible", "fifo", BASELINE)  # beside a policy while it trains
NUM_THREADS = 2


class JobsJudge:
    """A `Judge`: plays episodes of one kind of cluster and workload."""

    baseline = BASELINE
    heuristics: Mapping[str, str] = {name: one.what for name, one in HEURISTICS.items()}
    headers: Mapping[str, str] = {"noop_frac": "no-op", "finished": "finished"}

    def __init__(self, spec: JobsSpec) -> None:
        self.spec = spec
        self._jobs: dict[int, Jobs] = {}

    def play(self, policy: str | Checkpoint, seeds: Sequence[int], where: str = "policy") -> Metrics:
        """By metric [S], one episode a seed."""
        spec = self.spec
        if isinstance(policy, Checkpoint):
            self._require_space(policy, where)
        clusters = make_clusters(spec, len(seeds))
        for i, seed in enumerate(seeds):
            clusters.load(i, self._episode(seed), seed)
        tables = JobPolicyTables(policy, len(seeds), spec.window, spec.lookahead)
        to_the_end = np.full(len(seeds), spec.max_steps)
        bounds = np.linspace(0, len(seeds), NUM_THREADS + 1).astype(np.int64)

        def play_part(k: int) -> None:
            play_all(clusters.sims, tables.rows, to_the_end, bounds[k], bounds[k + 1])

        play_all(clusters.sims, tables.rows, to_the_end, 0, 0)  # compiled here: the compiler stops at Ctrl-C
        run_in_threads(play_part, NUM_THREADS, NUM_THREADS, lambda: to_the_end.fill(0))
        sims = clusters.sims
        return {
            RETURN: sims.episode_return.copy(),
            "noop_frac": sims.num_noops / sims.num_steps,
            "invalid_frac": sims.num_illegal / sims.num_steps,
            "finished": (sims.status == FINISHED).astype(np.float64),
            "time_used": np.minimum(sims.now / sims.horizon_s, 1.0),
            "length": sims.num_steps.astype(np.float64),
        }

    def _require_space(self, policy: Checkpoint, where: str) -> None:
        """It must know these features; other numbers of GPUs can be told in as many numbers as it knows."""
        spec, size = self.spec, lookahead_size(policy.space)
        if size != spec.num_gpus and spec.lookahead == "per_gpu":
            problem = f"was trained with {size} GPUs, and lookahead per_gpu tells of each by its place"
            raise InputError(
                where, spec.num_gpus, problem, "train with this num_gpus, or with lookahead sorted or cdf"
            )
        policy.require_space(job_space(size, spec.window, spec.features == "full"), where)

    def _episode(self, seed: int) -> Jobs:
        if seed not in self._jobs:
            self._jobs[seed] = draw_jobs(self.spec.workload, self.spec.num_gpus, seed)
        return self._jobs[seed]


class JobsSelection:
    """An `Evaluate` for the trainer: a checkpoint in, metrics named eval_* out."""

    def __init__(self, spec: JobsSpec) -> None:
        self.judge = JobsJudge(spec)
        self.num_blocks = spec.evaluation.blocks
        self.seeds = SELECTION_SEEDS[: self.num_blocks * spec.evaluation.episodes]

    @cached_property
    def baselines(self) -> dict[str, float]:
        """Mean returns."""
        return {name: float(self.judge.play(name, self.seeds)[RETURN].mean()) for name in BASELINES}

    def __call__(self, checkpoint: Checkpoint) -> dict[str, float]:
        played = self.judge.play(checkpoint, self.seeds)
        blocks = block_means(played[RETURN], self.num_blocks)
        metrics = {
            "eval_mean_return": float(blocks.mean()),
            "eval_min_block_return": float(blocks.min()),
            "eval_max_block_return": float(blocks.max()),
        }
        metrics |= {f"eval_block{k}_return": float(value) for k, value in enumerate(blocks)}
        metrics |= {f"eval_{name}_return": value for name, value in self.baselines.items()}
        for name in ("noop_frac", "invalid_frac", "finished", "time_used"):
            metrics[f"eval_{name}"] = float(played[name].mean())
        metrics["eval_baseline_score"] = max(self.baselines.values())
        metrics["eval_score"] = metrics["eval_mean_return"]
        return metrics


def make_evaluate(spec: JobsSpec) -> JobsSelection:
    return JobsSelection(spec)


def make_judge(spec: JobsSpec) -> JobsJudge:
    return JobsJudge(spec)
