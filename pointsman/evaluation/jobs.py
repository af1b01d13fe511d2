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
from pointsman.jobs.clusters import JobClusters, JobPolicyTables
from pointsman.jobs.heuristics import EARLIEST_DEADLINE, HEURISTICS, heuristics_for
from pointsman.jobs.observation import job_space, lookahead_size, sees_deadlines
from pointsman.jobs.rollout import play_all
from pointsman.jobs.state import FINISHED
from pointsman.jobs.table import Jobs
from pointsman.jobs.workload import draw_jobs, has_deadlines

BASELINES = ("random-feasible", "fifo", BASELINE)  # beside a policy while it trains
NUM_THREADS = 2
HEADERS = {"noop_frac": "no-op", "finished": "finished"}
DEADLINE_HEADERS = {"finished": "finished", "missed_deadlines": "missed", "lateness_s": "late by"}


class JobsJudge:
    """A `Judge`: plays episodes of one kind of cluster and workload."""

    baseline = BASELINE
    num_episodes = 300
    heuristics: Mapping[str, str] = {name: one.what for name, one in HEURISTICS.items()}

    def __init__(self, spec: JobsSpec) -> None:
        self.spec = spec
        self.has_deadlines = has_deadlines(spec.workload, spec.num_gpus)
        self.rivals: Sequence[str] = heuristics_for(self.has_deadlines)
        self.headers: Mapping[str, str] = DEADLINE_HEADERS if self.has_deadlines else HEADERS
        self._jobs: dict[int, Jobs] = {}

    def play(self, policy: str | Checkpoint, seeds: Sequence[int], where: str = "policy") -> Metrics:
        """Play one episode per seed; -> values [S] by metric."""
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
        played = measure(clusters)
        return played | (measure_deadlines(clusters) if self.has_deadlines else {})

    def _require_space(self, policy: Checkpoint, where: str) -> None:
        """It must know these features; other numbers of GPUs can be told in as many numbers as it knows."""
        spec, size = self.spec, lookahead_size(policy.space)
        if size != spec.num_gpus and spec.lookahead == "per_gpu":
            problem = f"was trained with {size} GPUs, and lookahead per_gpu tells of each by its place"
            raise InputError(
                where, spec.num_gpus, problem, "train with this num_gpus, or with lookahead sorted or cdf"
            )
        # A policy may know of deadlines where there are none, and may have been trained without.
        has_all, knows_deadlines = spec.features == "full", sees_deadlines(policy.space)
        policy.require_space(job_space(size, spec.window, has_all, knows_deadlines), where)

    def _episode(self, seed: int) -> Jobs:
        if seed not in self._jobs:
            self._jobs[seed] = draw_jobs(self.spec.workload, self.spec.num_gpus, seed)
        return self._jobs[seed]


def measure(clusters: JobClusters) -> Metrics:
    """What the episodes came to.

    noop_frac: of the decisions at which a job could be started, those that started none.
    invalid_frac: of all actions, those that the cluster found to be illegal.
    """
    sims = clusters.sims
    return {
        RETURN: sims.episode_return.copy(),
        "noop_frac": sims.num_noops / np.maximum(1, sims.num_choices),
        "invalid_frac": sims.num_illegal / sims.num_steps,
        "finished": (sims.status == FINISHED).astype(np.float64),
        "time_used": np.minimum(sims.now / sims.horizon_s, 1.0),
        "length": sims.num_steps.astype(np.float64),
    }


def measure_deadlines(clusters: JobClusters) -> Metrics:
    """missed_deadlines: their share. lateness_s: by how much jobs end after their deadlines, on average.

    A job that ends in time counts as 0, one that has not started at the cut-off as if it ended then.
    """
    missed, lateness_s = np.zeros(len(clusters.sims)), np.zeros(len(clusters.sims))
    for i, sim in enumerate(clusters.sims):
        jobs = clusters.jobs[i, : sim.num_jobs]
        jobs = jobs[np.isfinite(jobs["deadline_at"])]
        if len(jobs):
            ended_at = np.where(jobs["started_at"] >= 0, jobs["started_at"] + jobs["duration_s"], sim.now)
            lateness_s[i] = np.maximum(0.0, ended_at - jobs["deadline_at"]).mean()
            missed[i] = sim.num_missed / sim.num_deadlines
    return {"missed_deadlines": missed, "lateness_s": lateness_s}


class JobsSelection:
    """An `Evaluate` for the trainer: a checkpoint in, metrics named eval_* out."""

    def __init__(self, spec: JobsSpec) -> None:
        self.judge = JobsJudge(spec)
        self.num_blocks = spec.evaluation.blocks
        self.seeds = SELECTION_SEEDS[: self.num_blocks * spec.evaluation.episodes]

    @cached_property
    def baselines(self) -> dict[str, float]:
        """Mean returns."""
        names = (*BASELINES, EARLIEST_DEADLINE) if self.judge.has_deadlines else BASELINES
        return {name: float(self.judge.play(name, self.seeds)[RETURN].mean()) for name in names}

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
        shown = ("noop_frac", "invalid_frac", "finished", "time_used", "missed_deadlines", "lateness_s")
        for name in [name for name in shown if name in played]:
            metrics[f"eval_{name}"] = float(played[name].mean())
        metrics["eval_baseline_score"] = max(self.baselines.values())
        metrics["eval_score"] = metrics["eval_mean_return"]
        return metrics


def make_evaluate(spec: JobsSpec) -> JobsSelection:
    return JobsSelection(spec)


def make_judge(spec: JobsSpec) -> JobsJudge:
    return JobsJudge(spec)
