"""Run configurations: many clusters at once, on threads or workers, with the same result as one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

from pointsman.config import Config
from pointsman.errors import InputError
from pointsman.experiments.capacity import capacity_rps
from pointsman.experiments.checks import check_traffic
from pointsman.experiments.metrics import measure
from pointsman.experiments.running import Progress, run_to_end
from pointsman.experiments.threads import run_in_threads
from pointsman.inference.checkpoint import Checkpoint, load_checkpoint
from pointsman.routing.policy import PolicySpec, PolicyTables
from pointsman.simulator.cluster import Clusters
from pointsman.simulator.plan import ReplicaPlan, plan_replicas
from pointsman.workers.peers import LinkedProcess
from pointsman.workers.pool import WorkerPool
from pointsman.workload import Workload, build_workload

NUM_LOGGED_BATCHES = 65_536  # how many `on_batches` gets at a time
AnyPolicy = PolicySpec | Checkpoint
Workers = int | WorkerPool  # threads of this process, or processes anywhere
Digest = TypeVar("Digest")  # what is kept of an outcome
BatchSink = Callable[[Any], None]  # gets batches [n] BATCH_LOG in the order in which they ended


@dataclass(frozen=True)
class Prepared:
    """A configuration with everything drawn and resolved; the policy is free to vary."""

    config: Config
    plans: list[ReplicaPlan]
    workload: Workload


@dataclass(frozen=True, eq=False)
class Outcome:
    metrics: dict[str, float]
    requests: Any  # [num_requests] REQUEST
    request_id: Any  # [num_requests] row in the source of the workload
    replicas: Any  # [num_replicas] REPLICA


def prepare(config: Config, base_dir: Path | None = None) -> Prepared:
    plans = plan_replicas(config.cluster, base_dir)
    find_capacity = partial(capacity_rps, config.workload, plans, base_dir)
    workload = build_workload(config.workload, config.seed, find_capacity, base_dir)
    _check_served(config)
    check_traffic(config, plans, workload, base_dir)
    return Prepared(config, plans, workload)


def _check_served(config: Config) -> None:
    """After the last planned event some replica must accept requests, else some are never served."""
    accepting = [True] * config.cluster.num_replicas
    for event in sorted(config.cluster.events, key=lambda event: event.at_s):
        if event.kind != "slow":
            accepting[event.replica] = event.kind in ("join", "recover")
    if not any(accepting):
        raise InputError(
            "cluster.events",
            [f"{event.kind} {event.replica}" for event in config.cluster.events],
            "leave no replica that accepts requests",
            "add a recover or join event",
        )


def simulate(
    prepared: Sequence[Prepared],
    workers: Workers = 1,
    progress: Progress | None = None,
    on_batches: BatchSink | None = None,
    policies: Sequence[AnyPolicy] | None = None,
) -> list[Outcome]:
    """Run every cluster to its end. The number of workers, and where they are, changes nothing but the time.

    `on_batches` sees every batch of every replica; for a single cluster. `policies`, one for each cluster,
    stand in for those of the configurations.
    """
    assert on_batches is None or len(prepared) == 1
    policies = policies or [one.config.policy for one in prepared]
    if isinstance(workers, WorkerPool):
        return _simulate_elsewhere(prepared, workers, progress, policies, _whole)
    clusters = Clusters(
        [one.config.cluster for one in prepared],
        [one.plans for one in prepared],
        [one.workload for one in prepared],
        [one.config.seed for one in prepared],
        num_logged_batches=NUM_LOGGED_BATCHES if on_batches else 0,
    )

    def drain_log() -> None:
        if on_batches:
            sim = clusters.sims[0]
            on_batches(clusters.batch_logs[0][: sim.num_logged_batches])
            sim.num_logged_batches = 0

    tables = PolicyTables(policies, max(len(one.plans) for one in prepared))
    run_to_end(clusters, tables, workers, progress, drain_log)
    return [
        Outcome(
            measure(clusters, i, one.config.slo),
            clusters.requests[i],
            one.workload.request_id,
            clusters.replicas[i],
        )
        for i, one in enumerate(prepared)
    ]


def simulate_digests(
    prepared: Sequence[Prepared],
    digest: Callable[[Prepared, Outcome], Digest],
    workers: Workers = 1,
    progress: Progress | None = None,
) -> list[Digest]:
    """What `digest` makes of every outcome. Workers elsewhere do that: outcomes are large to send."""
    if isinstance(workers, WorkerPool):
        policies = [one.config.policy for one in prepared]
        return _simulate_elsewhere(prepared, workers, progress, policies, digest)
    return [
        digest(one, outcome)
        for one, outcome in zip(prepared, simulate(prepared, workers, progress), strict=True)
    ]


def _whole(prepared: Prepared, outcome: Outcome) -> Outcome:
    return outcome


def _simulate_elsewhere(
    prepared: Sequence[Prepared],
    pool: WorkerPool,
    progress: Progress | None,
    policies: Sequence[AnyPolicy],
    digest: Callable[[Prepared, Outcome], Digest],
) -> list[Digest]:
    """Learned policies go along: their files may be on this machine only."""
    load = cache(partial(load_checkpoint, where="policy.checkpoint"))
    digests: dict[int, Digest] = {}

    def run_one(i: int) -> None:
        policy = policies[i]
        if isinstance(policy, PolicySpec) and policy.checkpoint is not None:
            policy = load(policy.checkpoint)
        digests[i] = pool.call(_simulate_one, prepared[i], policy, digest)
        if progress:
            progress(len(prepared[i].workload))

    run_in_threads(run_one, len(prepared), pool.size + 1, pool.close)
    return [digests[i] for i in range(len(prepared))]


def _simulate_one(
    peer: LinkedProcess,
    prepared: Prepared,
    policy: AnyPolicy,
    digest: Callable[[Prepared, Outcome], Digest],
) -> Digest:
    (outcome,) = simulate([prepared], policies=[policy])
    return digest(prepared, outcome)
