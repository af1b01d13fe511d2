"""Small runs of everything, printed as digests: the same with and without compilation.

NUMBA_DISABLE_JIT=1 python interpreted.py      # about 40 ms a request
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

from pointsman.routing.policy import HEURISTICS  # noqa: E402
from simulator.factories import OUTCOME, Run, make_cluster, make_policy, make_workload  # noqa: E402

NUM_REQUESTS = 10
SCHEDULERS: tuple[dict[str, Any], ...] = (
    {"kind": "vllm-v1", "max_num_seqs": 4, "max_num_batched_tokens": 8},
    {"kind": "vllm", "max_batch_size": 4},
    {"kind": "sarathi", "max_batch_size": 4, "chunk_size": 6},
    {"kind": "orca", "max_batch_size": 4, "max_sequence_tokens": 20},
)
EVENTS = (
    {"at_s": 0.02, "kind": "fail", "replica": 0},
    {"at_s": 0.05, "kind": "recover", "replica": 0},
    {"at_s": 0.06, "kind": "slow", "replica": 1, "factor": 3.0},
    {"at_s": 0.1, "kind": "drain", "replica": 2},
    {"at_s": 0.08, "kind": "join", "replica": 3},
)


def small_run(kind: str, number: int) -> Run:
    """Four replicas of four schedulers, little memory, all events; `number` varies the rest."""
    rng = np.random.default_rng(number)
    groups = [
        {"scheduler": scheduler | {"block_size": 4, "num_blocks": 7, "pipeline_stages": 1 + number % 2}}
        for scheduler in SCHEDULERS
    ]
    cluster = make_cluster(replicas=groups, events=EVENTS, hold={"max_hold_s": 0.1, "timer_s": 0.02})
    workload = make_workload(
        np.cumsum(rng.choice((0.0, 0.004, 0.01), NUM_REQUESTS)),
        rng.integers(1, 12, NUM_REQUESTS),
        rng.integers(1, 9, NUM_REQUESTS),
        rng.integers(0, 60_000, NUM_REQUESTS),  # as many sessions as a long run has
    )
    return Run(cluster, workload, make_policy(kind), seed=number).to_end()


def digest(run: Run) -> str:
    sha = hashlib.sha256()
    for name in OUTCOME:
        sha.update(np.ascontiguousarray(run.requests[name]).tobytes())
    sha.update(run.table.tobytes())
    sha.update(run.clusters.tbt_histograms[0].tobytes())
    numbers = (run.sim.num_batches, run.sim.num_decisions, run.sim.in_system_area, run.sim.imbalance_area)
    sha.update(repr([float(number) for number in numbers]).encode())
    return sha.hexdigest()[:16]


def digests() -> dict[str, str]:
    return {kind: digest(small_run(kind, number)) for number, kind in enumerate(HEURISTICS)}


if __name__ == "__main__":
    for kind, value in digests().items():
        sys.stdout.write(f"{kind} {value}\n")
