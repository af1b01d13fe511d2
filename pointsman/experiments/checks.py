"""What a user should know before a run: more traffic than the cluster serves, requests no server takes."""

from __future__ import annotations

import warnings
from functools import lru_cache
from pathlib import Path

import numpy as np

from pointsman.config import Config
from pointsman.errors import PointsmanWarning
from pointsman.experiments.capacity import capacity_rps, rate_text
from pointsman.simulator.plan import ReplicaPlan, plan_replicas
from pointsman.simulator.spec import ClusterSpec
from pointsman.workload import Workload, WorkloadSpec
from pointsman.workload.spec import Rated

MAX_BACKLOG_S = 60.0  # of work that waits, where the mean rate is below capacity
MIN_REQUESTS = 100  # fewer are a burst, not a rate


def check_traffic(
    config: Config, plans: list[ReplicaPlan], workload: Workload, base_dir: Path | None
) -> None:
    """Warn about a trace or a rate that nobody compared with the cluster; a load says what it is."""
    spec = config.workload
    if spec.trace is not None:
        _check_context(spec.trace.path, plans, workload)
    is_trace = spec.trace is not None and spec.trace.load is None
    is_rate = isinstance(spec.arrivals, Rated) and spec.arrivals.rate is not None
    if (is_trace or is_rate) and len(workload) >= MIN_REQUESTS:
        name = spec.trace.path if spec.trace is not None else "workload.arrivals.rate"
        capacity = _capacity_rps(spec, config.cluster, base_dir)
        _check_load(name, workload.arrived_at, capacity, workload.is_shared)


def _check_context(path: str, plans: list[ReplicaPlan], workload: Workload) -> None:
    largest = max(plans, key=lambda plan: plan.max_context_tokens)
    sizes = workload.num_prefill_tokens + workload.num_decode_tokens
    num_too_long = int(np.count_nonzero(sizes > largest.max_context_tokens))
    if num_too_long:
        limit = largest.max_context_tokens
        _warn(
            f"{path}: {num_too_long:,} of {len(workload):,} requests (the longest {sizes.max():,} tokens) "
            f"are beyond the context of {largest.model} ({limit:,} tokens): its servers would refuse them; "
            f"set workload.max_tokens={limit} to cut prompts, or another cluster.model"
        )


@lru_cache(maxsize=16)
def _capacity_rps(workload: WorkloadSpec, cluster: ClusterSpec, base_dir: Path | None) -> float:
    return capacity_rps(workload, plan_replicas(cluster, base_dir), base_dir)


def _check_load(name: str, arrived_at: np.ndarray, capacity_rps: float, is_shared: bool) -> None:
    span_s = float(arrived_at[-1] - arrived_at[0])
    if span_s <= 0.0 or capacity_rps <= 0.0:
        return
    rate_rps = (len(arrived_at) - 1) / span_s
    if rate_rps > capacity_rps:
        above = (
            f"{name}: {rate_text(rate_rps)} requests/s are above capacity (about {rate_text(capacity_rps)}/s"
        )
        if is_shared:
            _warn(f"{above} with nothing cached): queues grow, unless enough of the prompts is cached")
        else:
            _warn(f"{above}), queues grow until the last arrival; add replicas, or set load below 1")
        return
    # As if the cluster were one server that is never idle while something waits.
    ahead = np.arange(len(arrived_at)) - arrived_at * capacity_rps
    backlog_s = float((ahead - np.minimum.accumulate(ahead)).max()) / capacity_rps
    if backlog_s > MAX_BACKLOG_S:
        _warn(
            f"{name}: at its busiest above capacity (about {rate_text(capacity_rps)} requests/s), so that "
            f"{backlog_s:,.0f} s of work wait; add replicas, or set load"
        )


def _warn(text: str) -> None:
    warnings.warn(PointsmanWarning(text), stacklevel=5)
