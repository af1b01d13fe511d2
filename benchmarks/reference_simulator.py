"""A plain Python simulator of an LLM serving cluster with Vidur's semantics: our yardstick and slow twin.

It does what Vidur does (docs/simulator.md has its quirks), one event at a time and one object per request, in
plain Python without libraries. Two uses: the compiled simulator in `pointsman/simulator` is timed against it,
and tests compare the two request by request. For the second use it must stay independent: it is written from
the text alone and shares no code with the package.

Schedulers `vllm`, `sarathi`, `orca` are Vidur's, quirks included; `vllm-v1` follows today's vLLM. Routers are
`round-robin` and `vidur-lor`. Left out: every cost model but `linear`, heterogeneous replicas, failures,
holding, scraped signals, time limits, and Vidur's metrics beyond the three timestamps and the restarts.

    python benchmarks/check_reference.py            # against the golden runs of Vidur
    python benchmarks/check_reference.py --speed    # batch iterations/s and requests/s
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from reference_replica import Batch, Replica, Request
from reference_schedulers import OrcaScheduler, SarathiScheduler, Scheduler, VllmScheduler, VllmV1Scheduler


@dataclass(frozen=True)
class LinearCost:
    """Seconds a batch takes in each pipeline stage; evaluated left to right, as in the golden runs."""

    a: float
    b: float
    c: float
    d: float
    e: float

    def batch_time(self, batch: Batch) -> float:
        return (
            self.a
            + self.b * batch.num_prefill
            + self.c * batch.num_decode
            + self.d * batch.num_context
            + self.e * batch.prefill_attention
        )


Router = Callable[[Sequence[Request]], list[tuple[Replica, Request]]]


def round_robin(replicas: Sequence[Replica]) -> Router:
    num_routed = 0

    def route(requests: Sequence[Request]) -> list[tuple[Replica, Request]]:
        nonlocal num_routed
        placements = []
        for request in requests:
            placements.append((replicas[num_routed % len(replicas)], request))
            num_routed += 1
        return placements

    return route


def vidur_lor(replicas: Sequence[Replica]) -> Router:
    """Least waiting requests (running ones do not count); ties to the lowest id."""

    def route(requests: Sequence[Request]) -> list[tuple[Replica, Request]]:
        num_waiting = [len(replica.waiting) for replica in replicas]
        placements = []
        for request in requests:
            least = num_waiting.index(min(num_waiting))
            num_waiting[least] += 1
            placements.append((replicas[least], request))
        return placements

    return route


ROUTERS = {"round-robin": round_robin, "vidur-lor": vidur_lor}


@dataclass(frozen=True, slots=True)
class BatchRecord:
    replica_id: int
    scheduled_at: float  # when the batch was formed; with several stages it may start later
    completed_at: float
    batch_size: int
    num_prefill_tokens: int
    num_decode_tokens: int
    num_allocated_blocks: int  # on the replica, after the end of the batch


@dataclass
class Result:
    """Per request, in the order of the trace; a time is None if the moment never came."""

    replica_id: list[int | None] = field(default_factory=list)
    scheduled_at: list[float | None] = field(default_factory=list)
    first_token_at: list[float | None] = field(default_factory=list)
    completed_at: list[float | None] = field(default_factory=list)
    num_restarts: list[int] = field(default_factory=list)
    num_batches: int = 0
    batches: list[BatchRecord] = field(default_factory=list)  # in order of completion, if asked for


Handler = Callable[..., None]


class Simulation:
    """The event loop. An event is (time, event id, handler, arguments); ties go to the one created first."""

    def __init__(
        self,
        requests: Sequence[Request],
        replicas: Sequence[Replica],
        scheduler: Scheduler,
        route: Router,
        cost: LinearCost,
        log_batches: bool,
    ) -> None:
        self.replicas = replicas
        self.scheduler = scheduler
        self.route = route
        self.cost = cost
        self.log_batches = log_batches
        self.num_batches = 0
        self.batches: list[BatchRecord] = []
        self.unrouted: list[Request] = []
        self.num_events = 0
        self.events: list[tuple[float, int, Handler, tuple[Any, ...]]] = []
        for request in requests:
            self.push(request.arrived_at, self.on_arrival, request)

    def push(self, time: float, handler: Handler, *arguments: Any) -> None:
        self.num_events += 1
        heapq.heappush(self.events, (time, self.num_events, handler, arguments))

    def run(self) -> None:
        while self.events:
            now, _, handler, arguments = heapq.heappop(self.events)
            handler(now, *arguments)

    def on_arrival(self, now: float, request: Request) -> None:
        self.unrouted.append(request)
        self.push(now, self.on_global_schedule)

    def on_global_schedule(self, now: float) -> None:
        placements = self.route(self.unrouted)
        self.unrouted = []
        for replica, request in placements:
            request.replica_id = replica.replica_id
            replica.waiting.append(request)
        for replica_id in sorted({replica.replica_id for replica, _ in placements}):
            self.push(now, self.on_replica_schedule, self.replicas[replica_id])

    def on_replica_schedule(self, now: float, replica: Replica) -> None:
        while replica.num_running_batches < len(replica.stages):
            batch = self.scheduler.next_batch(replica)
            if batch is None:
                break
            replica.num_running_batches += 1
            batch.scheduled_at = now
            for request in batch.requests:
                if request.scheduled_at is None:
                    request.scheduled_at = now
            self.push(now, self.on_stage_arrival, replica, 0, batch)

    def on_stage_arrival(self, now: float, replica: Replica, stage_index: int, batch: Batch) -> None:
        replica.stages[stage_index].queue.append(batch)
        self.push(now, self.on_stage_schedule, replica, stage_index)

    def on_stage_schedule(self, now: float, replica: Replica, stage_index: int) -> None:
        stage = replica.stages[stage_index]
        if stage.is_busy or not stage.queue:
            return
        batch = stage.queue.popleft()
        stage.is_busy = True
        self.push(now + self.cost.batch_time(batch), self.on_stage_end, replica, stage_index, batch)

    def on_stage_end(self, now: float, replica: Replica, stage_index: int, batch: Batch) -> None:
        replica.stages[stage_index].is_busy = False
        self.push(now, self.on_stage_schedule, replica, stage_index)
        if stage_index + 1 == len(replica.stages):
            self.push(now, self.on_batch_end, replica, batch)
        else:
            self.push(now, self.on_stage_arrival, replica, stage_index + 1, batch)

    def on_batch_end(self, now: float, replica: Replica, batch: Batch) -> None:
        for request, num_tokens in zip(batch.requests, batch.num_tokens, strict=True):
            request.on_batch_end(now, num_tokens)
            if request.completed_at is not None and request.next_turn is not None:
                request.next_turn.arrived_at = now + request.next_turn.think_s
                self.push(request.next_turn.arrived_at, self.on_arrival, request.next_turn)
        replica.num_running_batches -= 1
        self.scheduler.on_batch_end(replica, batch)
        self.num_batches += 1
        if self.log_batches:
            self.batches.append(
                BatchRecord(
                    replica_id=replica.replica_id,
                    scheduled_at=batch.scheduled_at,
                    completed_at=now,
                    batch_size=len(batch.requests),
                    num_prefill_tokens=batch.num_prefill,
                    num_decode_tokens=batch.num_decode,
                    num_allocated_blocks=replica.num_blocks - replica.num_free_blocks,
                )
            )
        self.push(now, self.on_replica_schedule, replica)


def simulate(
    arrived_at: Iterable[float],
    num_prefill_tokens: Iterable[int],
    num_decode_tokens: Iterable[int],
    *,
    replicas: int = 4,
    scheduler: str = "sarathi",
    router: str = "round-robin",
    cost: tuple[float, float, float, float, float] = (0.0085, 8.0e-5, 3.0e-5, 8.0e-8, 3.4e-9),
    block_size: int = 16,
    num_blocks: int = 2048,
    watermark: float = 0.01,
    max_batch_size: int = 128,
    chunk_size: int = 512,
    max_tokens_in_batch: int = 4096,
    max_sequence_tokens: int = 4096,
    max_num_batched_tokens: int = 2048,
    max_num_seqs: int = 256,
    long_prefill_token_threshold: int = 0,
    pipeline_stages: int = 1,
    log_batches: bool = False,
) -> Result:
    """Run a trace to the end on a cluster of equal replicas.

    Times in seconds; `num_blocks` per replica; `watermark` is the share of the blocks kept free at admission.
    `max_batch_size` is for vllm, sarathi and orca, `max_tokens_in_batch` for vllm, `chunk_size` for sarathi,
    `max_sequence_tokens` for orca, and the three options that follow for vllm-v1.
    """
    policies: dict[str, Callable[[], Scheduler]] = {
        "vllm": lambda: VllmScheduler(max_batch_size, max_tokens_in_batch, pipeline_stages),
        "sarathi": lambda: SarathiScheduler(max_batch_size, chunk_size, pipeline_stages),
        "orca": lambda: OrcaScheduler(max_batch_size, max_sequence_tokens // block_size),
        "vllm-v1": lambda: VllmV1Scheduler(
            max_num_batched_tokens, max_num_seqs, long_prefill_token_threshold
        ),
    }
    requests = [
        Request(float(arrival), int(num_prefill), int(num_decode))
        for arrival, num_prefill, num_decode in zip(
            arrived_at, num_prefill_tokens, num_decode_tokens, strict=True
        )
    ]
    # vLLM counts a block that nobody may use.
    watermark_blocks = int(watermark * (num_blocks + (scheduler == "vllm-v1")))
    cluster = [Replica(i, num_blocks, block_size, watermark_blocks, pipeline_stages) for i in range(replicas)]
    simulation = Simulation(
        requests, cluster, policies[scheduler](), ROUTERS[router](cluster), LinearCost(*cost), log_batches
    )
    simulation.run()
    return Result(
        replica_id=[request.replica_id for request in requests],
        scheduled_at=[request.scheduled_at for request in requests],
        first_token_at=[request.first_token_at for request in requests],
        completed_at=[request.completed_at for request in requests],
        num_restarts=[request.num_restarts for request in requests],
        num_batches=simulation.num_batches,
        batches=simulation.batches,
    )
