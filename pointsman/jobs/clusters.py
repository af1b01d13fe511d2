"""GPU clusters and policies as the kernels want them: arrays of records, and the memory they point to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pointsman.compiled.memory import Records
from pointsman.inference.checkpoint import Checkpoint
from pointsman.inference.network import NetworkTables, scratch_size
from pointsman.jobs import heuristics
from pointsman.jobs.observation import LOOKAHEADS, log_duration, log_work
from pointsman.jobs.rollout import begin_all
from pointsman.jobs.state import CLUSTER, JOB, RUNNING
from pointsman.jobs.table import Jobs


class JobClusters:
    """`sims` [N] CLUSTER, each with room for `num_jobs`. `load` before anything else."""

    def __init__(
        self,
        num_clusters: int,
        num_gpus: int,
        window: int,
        num_jobs: int,
        max_duration_s: float,
        max_steps: int,
        horizon_slack: float,
        noop_price: float,
        deadline_price: float,
    ) -> None:
        self.horizon_slack = horizon_slack
        self.jobs = np.zeros((num_clusters, num_jobs), JOB)
        self.window = np.zeros((num_clusters, window), np.int32)
        self.running = np.zeros((num_clusters, num_gpus), RUNNING)
        self.gpu_job = np.zeros((num_clusters, num_gpus), np.int32)
        self.sims = Records(num_clusters, CLUSTER)
        tables = {
            "jobs": self.jobs,
            "window": self.window,
            "running": self.running,
            "gpu_job": self.gpu_job,
            "free_in": np.zeros((num_clusters, num_gpus)),
            "durations": np.zeros((num_clusters, window), np.float32),
            "wider": np.zeros((num_clusters, num_gpus + 1), np.int32),
            "due_at": np.zeros((num_clusters, window)),
        }
        for name, table in tables.items():
            self.sims[name] = [self.sims.hold(row) for row in table]
        self.sims.num_gpus, self.sims.room = num_gpus, window
        self.sims.max_duration_s, self.sims.max_steps = max_duration_s, max_steps
        self.sims.noop_price, self.sims.deadline_price = noop_price, deadline_price

    def load(self, i: int, jobs: Jobs, seed: int) -> None:
        """Begin an episode with these jobs in cluster i; `seed` is that of random-feasible."""
        sim, rows = self.sims[i], self.jobs[i, : len(jobs)]
        work = jobs.duration_s * jobs.gpus
        rows["arrived_at"], rows["duration_s"], rows["gpus"] = jobs.arrived_at, jobs.duration_s, jobs.gpus
        rows["priority"], rows["work"], rows["started_at"] = jobs.priority, work, -1.0
        rows["deadline_at"], rows["is_missed"] = jobs.deadline_at, False
        rows["log_duration"] = log_duration(jobs.duration_s / sim.max_duration_s)
        rows["log_work"] = log_work(work / (sim.num_gpus * sim.max_duration_s))
        sim.num_jobs = len(jobs)
        sim.num_deadlines = np.isfinite(jobs.deadline_at).sum()
        sim.total_work = work.sum()
        sim.horizon_s = jobs.horizon_s(int(sim.num_gpus), self.horizon_slack)
        sim.rng = 1 + seed % 0xFFFFFFFE  # never 0, from which xorshift does not move
        begin_all(self.sims, i, i + 1)


class JobPolicyTables:
    """`rows` [N] POLICY, which hold what they use: one policy for N clusters."""

    def __init__(
        self, policy: str | Checkpoint, num_clusters: int, window: int, lookahead: str = "off"
    ) -> None:
        """A heuristic's name, or a network that sees `window` jobs and the GPUs by that look-ahead."""
        if window < 1:
            raise ValueError(f"a policy for a window of {window} jobs")
        self.rows = Records(num_clusters, heuristics.POLICY)
        if isinstance(policy, str):
            self.rows.kind = heuristics.HEURISTICS[policy].kernel
            return
        networks = NetworkTables(policy).rows
        network = networks[0]
        num_features, num_context = int(network.num_features), int(network.num_context)
        self.rows.kind = heuristics.LEARNED
        self.rows.network = self.rows.hold(networks)
        self.rows.window = window
        self.rows.lookahead = LOOKAHEADS[lookahead]
        self.rows.num_features, self.rows.num_context = num_features, num_context
        for name, shape in (
            ("entities", (window, num_features)),
            ("context", (num_context,)),
            ("logits", (window + 1,)),
            ("scratch", (scratch_size(network, window),)),
            ("state", (int(network.width),)),
        ):
            self.rows[name] = self._keep(num_clusters, shape, np.float32)
        self.rows.legal = self._keep(num_clusters, (window + 1,), np.bool_)

    def _keep(self, num_clusters: int, shape: Sequence[int], dtype: Any) -> list[int]:
        """Addresses of working memory, one for each cluster: they may run on several threads."""
        array = np.zeros((num_clusters, *shape), dtype)
        return [self.rows.hold(row) for row in array]
