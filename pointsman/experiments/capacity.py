"""How many requests a second a cluster can serve, found by saturating it.

One replica of each kind gets a long queue at time 0. Its capacity is the rate of completions between the
20th and the 80th percentile of the run: after the start, before the queue runs dry. The cluster's capacity is
the sum over its replicas; of those on one card, each is taken to make as many steps as the others. The result
is remembered on disk under a digest of everything it depends on.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

from pointsman.compiled.jit import kernel_digest
from pointsman.experiments.running import run_to_end
from pointsman.files import replace_file
from pointsman.routing.policy import PolicySpec, PolicyTables
from pointsman.simulator.cluster import Clusters
from pointsman.simulator.plan import ReplicaPlan
from pointsman.simulator.run import run
from pointsman.simulator.spec import ClusterSpec
from pointsman.workload import Workload, WorkloadSpec, sample_lengths

NUM_REQUESTS = 8000
START, END = 0.2, 0.8
SEED = 20231116  # of the sampled lengths: a constant, so that capacity does not depend on the run's seed


def capacity_rps(workload: WorkloadSpec, plans: Sequence[ReplicaPlan], base_dir: Path | None = None) -> float:
    """Requests per second the cluster can sustain with this mix of lengths."""
    return sum(replica_capacities(workload, plans, base_dir))


def replica_capacities(
    workload: WorkloadSpec, plans: Sequence[ReplicaPlan], base_dir: Path | None = None
) -> list[float]:
    prompts, outputs = sample_lengths(workload, NUM_REQUESTS, SEED, base_dir)
    known: dict[int, float] = {}
    for plan in plans:
        if id(plan) not in known:
            known[id(plan)] = _remembered(plan, prompts, outputs)
    return [known[id(plan)] for plan in plans]


def _saturate(plan: ReplicaPlan, prompts: np.ndarray, outputs: np.ndarray) -> float:
    fits = (prompts + outputs <= plan.kv_capacity_tokens) & (prompts <= plan.max_prompt_tokens)
    prompts, outputs = prompts[fits], outputs[fits]
    if len(prompts) == 0:
        return 0.0
    count = len(prompts)
    workload = Workload(
        np.zeros(count), prompts, outputs, np.full(count, -1, np.int32), np.arange(count, dtype=np.int64)
    )
    alone = replace(plan, costs=plan.costs_beside, num_neighbours=0)
    clusters = Clusters([ClusterSpec(replicas=1)], [[alone]], [workload], [0])
    run_to_end(clusters, PolicyTables([PolicySpec(kind="round-robin")], max_replicas=1))
    finished = np.sort(clusters.requests[0]["completed_at"])
    first, last = int(START * count), int(END * count)
    if finished[last] == finished[first]:  # everything fits in one batch
        return float(count / finished[-1])
    return float((last - first) / (finished[last] - finished[first]))


def cache_dir() -> Path:
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "pointsman"


def _remembered(plan: ReplicaPlan, prompts: np.ndarray, outputs: np.ndarray) -> float:
    path = cache_dir() / "capacity" / f"{_digest(plan, prompts, outputs)}.json"
    try:
        known = float(json.loads(path.read_text())["requests_per_s"])
        if 0.0 <= known < math.inf:
            return known
    except (OSError, ValueError, KeyError, TypeError):
        pass  # not there, or not ours: find it again
    capacity = _saturate(plan, prompts, outputs)
    _write(path, json.dumps({"requests_per_s": capacity}))
    return capacity


def _digest(plan: ReplicaPlan, prompts: np.ndarray, outputs: np.ndarray) -> str:
    costs = plan.costs_beside
    digest = hashlib.sha256(kernel_digest(run.__module__).encode())
    digest.update(f"{plan.scheduler!r} {plan.num_blocks} {plan.max_seqs} {plan.slowdown}".encode())
    digest.update(f"{costs.kind} {costs.power!r}".encode())
    tables = (
        costs.coefficients,
        costs.token_s,
        costs.sequence_s,
        costs.decode_s,
        costs.prefill_s,
        costs.grid,
        costs.start_s,
    )
    for array in (*tables, prompts, outputs):
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:32]


def _write(path: Path, text: str) -> None:
    with suppress(OSError):  # a cache that cannot be written only costs time
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, text.encode())


def rate_text(rate_rps: float) -> str:
    """Three digits, and no exponent."""
    return f"{rate_rps:,.0f}" if rate_rps >= 1000 else f"{rate_rps:.3g}"
