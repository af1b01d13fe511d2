"""Small clusters beside their twins, with defaults for everything a test doesn't care about."""

from __future__ import annotations

from typing import Any

import numpy as np
from simulator.factories import load_benchmark

from pointsman.envs.jobs import JobsSpec, make_clusters
from pointsman.jobs.clusters import JobClusters
from pointsman.jobs.observation import LOOKAHEADS, job_space
from pointsman.jobs.rollout import decide_all, look
from pointsman.jobs.state import CUT_OFF, FINISHED, MISSED, TERMS
from pointsman.jobs.table import Jobs

reference = load_benchmark("reference_jobs")


def random_jobs(
    num_jobs: int,
    widest: int,
    seed: int,
    longest_s: float = 10_000.0,
    has_ties: bool = False,
    has_deadlines: bool = False,
) -> Jobs:
    """Of all sizes. With ties, many arrive or end at the same time, some at 0. A fifth have no deadlines."""
    rng = np.random.default_rng(seed)
    arrived_at = np.sort(rng.uniform(-0.1 * longest_s, longest_s, num_jobs).clip(min=0.0))
    duration_s = rng.uniform(0.01, 1.0, num_jobs) * longest_s
    if has_ties:
        # Powers of two, so that sums of them are exact and ties are ties.
        arrived_at, duration_s = (np.ceil(times / 512) * 512 for times in (arrived_at, duration_s))
        arrived_at -= arrived_at[0]
        duration_s = duration_s.clip(max=8192.0)
    gpus = rng.integers(1, widest + 1, num_jobs)
    priority = rng.integers(1, 11, num_jobs)
    deadline_at = np.full(num_jobs, np.inf)
    if has_deadlines:
        # Some cannot be met, some only if the job starts as it arrives; in halves, so that ties are ties.
        slack = np.ceil(rng.uniform(0.0, 12.0, num_jobs)) / 2
        has_one = rng.random(num_jobs) < 0.8
        deadline_at[has_one] = (arrived_at + slack * duration_s)[has_one]
    return Jobs(arrived_at, duration_s, gpus, priority, deadline_at)


class Pair:
    """One cluster and its twin, with the same jobs."""

    def __init__(self, jobs: Jobs, **settings: Any) -> None:
        self.spec = JobsSpec.model_validate({"workload": {"num_jobs": len(jobs)}, **settings})
        spec = self.spec
        self.clusters: JobClusters = make_clusters(spec, 1)
        self.clusters.load(0, jobs, seed=1)
        columns = (jobs.arrived_at, jobs.duration_s, jobs.gpus, jobs.priority, jobs.deadline_at)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        self.twin = reference.JobsTwin(
            [reference.Job(*row) for row in rows],
            spec.num_gpus,
            spec.window,
            spec.workload.max_duration_s,
            spec.max_steps,
            spec.horizon_slack,
            spec.noop_price,
            spec.deadline_price,
        )

    def step(self, action: int, skips_forced: bool = False) -> Any:
        """As the twin says it."""
        decide_all(self.clusters.sims, np.array([action]), skips_forced, 0, 1)
        sim = self.clusters.sims[0]
        return reference.Outcome(
            {name: float(sim[name]) for name in (*TERMS, MISSED)},
            float(sim.elapsed_s),
            bool(sim.status == FINISHED),
            bool(sim.status == CUT_OFF),
            bool(sim.is_illegal),
        )

    def look(self, lookahead: str, has_all: bool, has_deadlines: bool = False) -> tuple[Any, Any, Any, Any]:
        """Entities [K, F], context [C], entity mask [K], action mask [K + 1]; no old value is left."""
        space = job_space(self.spec.num_gpus, self.spec.window, has_all, has_deadlines)
        room = space.num_entities
        entities = np.full((1, room, len(space.entity_features)), np.nan, np.float32)
        context = np.full((1, len(space.context_features)), np.nan, np.float32)
        is_there, legal = np.zeros((1, room), np.bool_), np.ones((1, room + 1), np.bool_)
        privileged = np.full((1, len(space.privileged_features)), np.nan, np.float32)
        seen = (entities, context, is_there, legal, privileged)
        look(self.clusters.sims, LOOKAHEADS[lookahead], *seen, 0, 1)
        assert np.isfinite(privileged).all()
        return entities[0], context[0], is_there[0], legal[0]
