"""Recorded requests of one server again, in the simulator: what its times beside the steps are, and how far
off the description is on the very traffic that it comes from.

First tokens tell whether scheduling is asynchronous (a prompt then waits for one step more), how long the API
server takes, and which of vLLM's two usual budgets of tokens a step it has: all are tried, and what
reproduces the recorded first tokens best is kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from pointsman.config import Config
from pointsman.experiments.simulate import Prepared, simulate
from pointsman.simulator.measured import ServerTimes
from pointsman.simulator.plan import plan_replicas
from pointsman.spec import parse_spec
from pointsman.workload import Workload

Floats = NDArray[np.float64]

MAX_REPLAYED = 5000  # requests, the last ones
NUM_ROUNDS = 4  # in which the API server's time settles
BUDGETS = (8192, 2048)  # vLLM's defaults of max_num_batched_tokens, by device


@dataclass(frozen=True)
class Replayed:
    times: ServerTimes
    max_num_batched_tokens: int
    errors: dict[str, float]  # of means, as a share: simulated against recorded


def replay(rows: pl.DataFrame, cost: dict[str, float], scheduler: dict[str, Any]) -> Replayed:
    """`rows` as `read_traffic` gives them, of one server; `scheduler` without the times beside the steps."""
    rows = rows.sort("arrived_at").tail(MAX_REPLAYED)
    arrived, first, last = (
        rows[name].to_numpy() for name in ("arrived_at", "first_token_at", "completed_at")
    )
    workload = _workload(rows)
    ttft_s, e2e_s = first - arrived, last - arrived
    since = arrived - arrived[0]
    tried = []
    for budget, is_async in product(BUDGETS, (False, True)):
        api_s = 0.0
        for _ in range(NUM_ROUNDS):
            times = ServerTimes(async_scheduling=is_async, api_s=api_s)
            described = scheduler | {"max_num_batched_tokens": budget} | dict(times)
            found, ended = simulated({"kind": "linear", **cost}, described, workload)
            # Quantile by quantile: which step a single prompt just missed is chance.
            misses_s = np.sort(found - since) - np.sort(ttft_s)
            errors = {
                "ttft_mean": float((found - since).mean() / ttft_s.mean() - 1),
                "e2e_mean": float((ended - since).mean() / e2e_s.mean() - 1),
            }
            tried.append((float(np.abs(misses_s).mean()), Replayed(times, budget, errors)))
            api_s = max(0.0, api_s - float(np.median(misses_s)))
    return min(tried, key=lambda one: one[0])[1]


def simulated(cost: dict[str, Any], scheduler: dict[str, Any], workload: Workload) -> tuple[Floats, Floats]:
    """When one server with these costs would answer: first tokens and last ones."""
    config = parse_spec(
        Config,
        {
            "workload": {"trace": {"path": "recorded"}},  # not read: `workload` stands in for it
            "cluster": {"replicas": [{"count": 1, "cost": cost, "scheduler": scheduler}]},
            "policy": {"kind": "round-robin"},
        },
    )
    made = simulate([Prepared(config, plan_replicas(config.cluster), workload)])[0].requests
    return made["first_token_at"], made["completed_at"]


def _workload(rows: pl.DataFrame) -> Workload:
    arrived = rows["arrived_at"].to_numpy()
    num = len(rows)
    return Workload(
        arrived_at=arrived - arrived[0],
        num_prefill_tokens=np.maximum(rows["computed"].to_numpy(), 1).astype(np.int32),
        num_decode_tokens=np.maximum(rows["num_decode_tokens"].to_numpy(), 1).astype(np.int32),
        session=np.full(num, -1, np.int32),
        request_id=np.arange(num, dtype=np.int64),
    )
