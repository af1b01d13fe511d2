"""A server whose times are known, and what a prober would see of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np

from pointsman.emulator.engine import load_engine
from pointsman.emulator.replica import EmulatedReplica
from pointsman.live.probing import (
    Facts,
    Mixed,
)
from pointsman.simulator.plan import ReplicaPlan, plan_replicas
from pointsman.workload import Workload
from tests.simulator.factories import Run, make_cluster

TRUTH = {"kind": "linear", "a": 0.015, "b": 8e-5, "c": 4e-4, "d": 2e-7, "e": 5e-9}


SCHEDULER = {"kind": "vllm-v1", "num_blocks": 4000, "max_num_seqs": 12, "max_num_batched_tokens": 2048}


API_S = 0.012


FACTS = Facts("m", 4096, 16, 4000)


def truth(is_async: bool) -> ReplicaPlan:
    scheduler = SCHEDULER | {"async_scheduling": is_async, "api_s": API_S}
    return plan_replicas(make_cluster(replicas=1, scheduler=scheduler, cost=TRUTH))[0]


def step_s(num_prompt: int, num_decodes: int, context: float = 0.0) -> float:
    a, b, c, d, e = (float(TRUTH[name]) for name in "abcde")  # type: ignore[arg-type]
    return a + b * num_prompt + c * num_decodes + d * num_decodes * context + e * num_prompt**2 / 2


def decode_s(plan: ReplicaPlan, num_decodes: int, context: int) -> float:
    return plan.costs.stage_s(
        num_decodes=num_decodes, context_tokens=num_decodes * context, num_seqs=num_decodes
    )


def answers(
    cost: dict[str, Any], is_async: bool, api_s: float, loads: Sequence[tuple[int, Workload]]
) -> list[Mixed]:
    """For each load what is taken for the number of clients, and the requests."""
    scheduler = SCHEDULER | {"max_num_seqs": 64, "async_scheduling": is_async, "api_s": api_s}
    mixed: list[Mixed] = []
    for num_clients, workload in loads:
        requests = Run(make_cluster(replicas=1, scheduler=scheduler, cost=cost), workload).to_end().requests
        began_at = mixed[-1].sent_at + 1000 if mixed else 0.0
        mixed += [
            Mixed(
                num_clients,
                began_at + one.arrived_at,
                int(one.num_prefill),
                int(one.num_decode),
                began_at + one.first_token_at,
                began_at + one.completed_at,
            )
            for one in requests
        ]
    return mixed


def with_server(plan: ReplicaPlan, test: Callable[[EmulatedReplica], Awaitable[None]]) -> None:
    load_engine()

    async def run() -> None:
        server = EmulatedReplica("s", plan, "m", 1500, np.full(8, 16, np.int32), 1.0, "127.0.0.1", 0)
        await server.open()
        try:
            await asyncio.wait_for(test(server), 60)
        finally:
            server.close()
            await asyncio.sleep(0.01)

    asyncio.run(run())
