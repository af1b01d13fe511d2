"""A plain Python simulator of an LLM serving cluster with Vidur's semantics: our yardstick and slow twin.

It does what `shared/vidur/SEMANTICS.md` says, one event at a time and one object per request, in plain Python
without libraries. Two uses: the compiled simulator in `pointsman/simulator` is timed against it, and tests
compare the two request by request. For the second use it must stay independent: it is written from the text
alone and shares no code with the package.

Schedulers `vllm`, `sarathi`, `orca` are Vidur's, quirks included; `vllm-v1` follows today's vLLM. Routers are
`round-robin` and `vidur-lor`. Left out: every cost model but `linear`, heterogeneous replicas, failures,
holding, scraped signals, time limits, and Vidur's metrics beyond the three timestamps and the restarts.

    python benchmarks/check_reference.py            # against the golden runs of Vidur
    python benchmarks/check_reference.py --speed    # batch iterations/s and requests/s
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Protocol

by_arrival = attrgetter("arrived_at")


def ceil_div(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)


class Request:
    """One request: `num_prefill` tokens to compute before the next token comes out, `num_total` in the end.

    waiting -> (admitted) prefill -> decode -> completed; a restart goes back to waiting and recomputes.
    `num_processed` counts prompt and generated tokens. It jumps by one when the prefill completes, because
    the prefill itself emits a token, so it is never equal to `num_prefill` between two batches.
    """

    __slots__ = (
        "arrived_at",
        "completed_at",
        "first_token_at",
        "is_in_flight",
        "is_prefill_complete",
        "next_turn",
        "num_blocks",
        "num_prefill",
        "num_processed",
        "num_restarts",
        "num_total",
        "replica_id",
        "scheduled_at",
        "think_s",
        "tokens",
    )

    def __init__(self, arrived_at: float, num_prefill_tokens: int, num_decode_tokens: int) -> None:
        self.arrived_at = arrived_at
        self.num_prefill = num_prefill_tokens
        self.num_total = num_prefill_tokens + num_decode_tokens
        self.num_processed = 0
        self.num_blocks = 0  # KV blocks held
        self.num_restarts = 0
        self.is_prefill_complete = False
        self.is_in_flight = False  # kept by vllm-v1 only; in the others a request in a batch is in no list
        self.replica_id: int | None = None
        self.scheduled_at: float | None = None
        self.first_token_at: float | None = None
        self.completed_at: float | None = None
        self.tokens: Sequence[int] = ()  # of prompt and answer, where prefixes are cached
        self.next_turn: Request | None = None  # arrives its `think_s` after this one is completed
        self.think_s = 0.0

    def on_batch_end(self, now: float, num_tokens: int) -> None:
        self.num_processed += num_tokens
        if self.num_processed == self.num_prefill:
            self.is_prefill_complete = True
            self.num_processed += 1
            if self.first_token_at is None:
                self.first_token_at = now
        if self.num_processed == self.num_total:
            self.completed_at = now

    def restart(self, num_prefill: int) -> None:
        """Lose the KV cache; the next prefill recomputes `num_prefill` tokens. The total stays."""
        self.num_prefill = num_prefill
        self.num_processed = 0
        self.is_prefill_complete = False
        self.num_restarts += 1


class Batch:
    """Requests that run one iteration together, with the features its execution time depends on."""

    __slots__ = (
        "num_context",
        "num_decode",
        "num_prefill",
        "num_tokens",
        "prefill_attention",
        "requests",
        "scheduled_at",
    )

    def __init__(self, requests: list[Request], num_tokens: list[int]) -> None:
        self.requests = requests
        self.num_tokens = num_tokens
        self.scheduled_at = 0.0
        num_prefill = num_decode = num_context = 0
        prefill_attention = 0.0
        for request, chunk in zip(requests, num_tokens, strict=True):
            if request.is_prefill_complete:
                num_decode += 1
                num_context += request.num_processed
            else:
                num_prefill += chunk
                prefill_attention += chunk * (request.num_processed + chunk / 2)
        self.num_prefill = num_prefill  # P: tokens of requests whose prefill is not complete
        self.num_decode = num_decode  # D: requests whose prefill is complete, one token each
        self.num_context = num_context  # S: tokens those D requests have processed
        self.prefill_attention = prefill_attention  # Q: sum of chunk * (processed before + chunk / 2)


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


class Stage:
    """One pipeline stage: a FIFO of batches, one of which runs at a time."""

    __slots__ = ("is_busy", "queue")

    def __init__(self) -> None:
        self.queue: deque[Batch] = deque()
        self.is_busy = False


class Replica:
    """Queues and KV blocks of one replica; a `Scheduler` decides what runs."""

    __slots__ = (
        "block_size",
        "num_blocks",
        "num_free_blocks",
        "num_holders",
        "num_running_batches",
        "replica_id",
        "running",
        "stages",
        "waiting",
        "watermark_blocks",
    )

    def __init__(
        self, replica_id: int, num_blocks: int, block_size: int, watermark_blocks: int, num_stages: int
    ) -> None:
        self.replica_id = replica_id
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.num_free_blocks = num_blocks
        self.watermark_blocks = watermark_blocks
        self.num_holders = 0  # requests that hold blocks
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.stages = [Stage() for _ in range(num_stages)]
        self.num_running_batches = 0

    def allocate(self, request: Request, num_blocks: int) -> None:
        if request.num_blocks == 0:
            self.num_holders += 1
        request.num_blocks += num_blocks
        self.num_free_blocks -= num_blocks

    def find_hits(self, request: Request) -> list[Any]:
        """Blocks of the prompt that are cached; see reference_prefixes.py."""
        return []

    def num_idle(self, hits: list[Any]) -> int:
        """How many of them nobody holds."""
        return 0

    def use_hits(self, request: Request, hits: list[Any]) -> None:
        pass

    def cache(self, request: Request, num_tokens: int) -> None:
        """So many tokens of the request are computed with this step."""

    def free(self, request: Request) -> None:
        self.num_free_blocks += request.num_blocks
        self.num_holders -= 1
        request.num_blocks = 0

    def preempt(self, request: Request, num_prefill: int) -> None:
        """Send a request, already taken off `running`, to the front of the queue."""
        request.restart(num_prefill)
        self.free(request)
        self.waiting.appendleft(request)


class Scheduler(Protocol):
    """Forms the batches of a replica."""

    def next_batch(self, replica: Replica) -> Batch | None: ...

    def on_batch_end(self, replica: Replica, batch: Batch) -> None:
        """Free what has finished. The requests have counted their tokens already."""


# Vidur's schedulers: a request that is in a batch is on no list, and returns to the end of `running`.


def return_to_running(replica: Replica, batch: Batch) -> None:
    for request in batch.requests:
        if request.completed_at is not None:
            replica.free(request)
        else:
            replica.running.append(request)


def can_admit(replica: Replica, request: Request) -> bool:
    """Room for the whole prompt above the watermark."""
    num_needed = ceil_div(request.num_prefill, replica.block_size)
    return replica.num_free_blocks - num_needed >= replica.watermark_blocks


def admit(replica: Replica) -> Request:
    request = replica.waiting.popleft()
    replica.allocate(request, ceil_div(request.num_prefill, replica.block_size))
    return request


def grow(replica: Replica, request: Request) -> bool:
    """Get memory for one decode step, at the expense of the requests at the end of `running`.

    One free block is demanded even when the step needs none. False: the request itself had to go.
    """
    while replica.num_free_blocks < 1:
        if not replica.running:
            replica.preempt(request, request.num_processed)
            return False
        victim = replica.running.pop()
        # For a victim in the middle of its prefill this shortens the prompt: Vidur's quirk.
        replica.preempt(victim, victim.num_processed)
    if request.num_processed > request.num_blocks * replica.block_size:
        replica.allocate(request, 1)
    return True


class VllmScheduler:
    """Prefill first; a batch is all prefill or all decode."""

    def __init__(self, max_batch_size: int, max_tokens_in_batch: int, num_stages: int) -> None:
        self.max_batch_size = max_batch_size
        self.max_micro_batch_size = max_batch_size // num_stages
        self.max_tokens_in_batch = max_tokens_in_batch

    def next_batch(self, replica: Replica) -> Batch | None:
        return self._prefill_batch(replica) or self._decode_batch(replica)

    def _prefill_batch(self, replica: Replica) -> Batch | None:
        requests: list[Request] = []
        num_tokens: list[int] = []
        longest = 0
        while replica.waiting:
            request = replica.waiting[0]
            longest = max(longest, request.num_prefill)
            if (
                not can_admit(replica, request)
                or (len(requests) + 1) * longest > self.max_tokens_in_batch  # as if padded
                or replica.num_holders == self.max_batch_size
                or len(requests) == self.max_micro_batch_size
            ):
                break
            requests.append(admit(replica))
            num_tokens.append(request.num_prefill)
        return Batch(requests, num_tokens) if requests else None

    def _decode_batch(self, replica: Replica) -> Batch | None:
        requests: list[Request] = []
        running = replica.running
        running.sort(key=by_arrival)
        while running and len(requests) < self.max_micro_batch_size:
            request = running.pop(0)
            if grow(replica, request):
                requests.append(request)
        return Batch(requests, [1] * len(requests)) if requests else None

    def on_batch_end(self, replica: Replica, batch: Batch) -> None:
        return_to_running(replica, batch)


class SarathiScheduler:
    """Chunked prefill: decodes first, then prefill chunks up to `chunk_size` tokens in the batch."""

    def __init__(self, max_batch_size: int, chunk_size: int, num_stages: int) -> None:
        self.max_batch_size = max_batch_size
        self.max_micro_batch_size = max_batch_size // num_stages
        self.chunk_size = chunk_size

    def next_batch(self, replica: Replica) -> Batch | None:
        requests: list[Request] = []
        running = replica.running  # not sorted here, unlike in vllm
        partial: list[Request] = []
        while running and len(requests) < self.max_micro_batch_size:
            request = running.pop(0)
            if not request.is_prefill_complete:
                partial.append(request)
            elif grow(replica, request):
                requests.append(request)
        num_tokens = [1] * len(requests)
        budget = self.chunk_size - len(requests)

        skipped: list[Request] = []
        for request in partial:
            chunk = min(request.num_prefill - request.num_processed, budget)
            if chunk <= 0:
                skipped.append(request)
                continue
            requests.append(request)
            num_tokens.append(chunk)
            budget -= chunk
        running[:0] = skipped
        running.sort(key=by_arrival)

        while (
            replica.waiting
            and budget > 0
            and replica.num_holders != self.max_batch_size
            and len(requests) != self.max_micro_batch_size
            and can_admit(replica, replica.waiting[0])
        ):
            request = admit(replica)
            chunk = min(request.num_prefill, budget)
            requests.append(request)
            num_tokens.append(chunk)
            budget -= chunk
        return Batch(requests, num_tokens) if requests else None

    def on_batch_end(self, replica: Replica, batch: Batch) -> None:
        return_to_running(replica, batch)


class OrcaScheduler:
    """Iteration-level batching; every request reserves blocks for the longest sequence."""

    def __init__(self, max_batch_size: int, max_blocks_per_sequence: int) -> None:
        self.max_batch_size = max_batch_size
        self.max_blocks_per_sequence = max_blocks_per_sequence

    def next_batch(self, replica: Replica) -> Batch | None:
        requests = replica.running[: self.max_batch_size]
        del replica.running[: self.max_batch_size]
        num_tokens = [1] * len(requests)
        while (
            replica.waiting
            and len(requests) < self.max_batch_size
            and replica.num_free_blocks >= self.max_blocks_per_sequence
        ):
            request = replica.waiting.popleft()
            replica.allocate(request, self.max_blocks_per_sequence)
            requests.append(request)
            num_tokens.append(request.num_prefill)
        return Batch(requests, num_tokens) if requests else None

    def on_batch_end(self, replica: Replica, batch: Batch) -> None:
        return_to_running(replica, batch)


class VllmV1Scheduler:
    """Today's vLLM: one token budget per step, running requests first, then the queue in order.

    Requests stay on `running` while they are in a batch. Blocks are taken chunk by chunk, but a request is
    admitted only if its whole prompt would fit.
    """

    def __init__(
        self, max_num_batched_tokens: int, max_num_seqs: int, long_prefill_token_threshold: int
    ) -> None:
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        if long_prefill_token_threshold > 0:
            self.max_chunk = long_prefill_token_threshold
        else:
            self.max_chunk = max_num_batched_tokens

    def next_batch(self, replica: Replica) -> Batch | None:
        requests: list[Request] = []
        num_tokens: list[int] = []
        budget = self.max_num_batched_tokens
        running = replica.running
        num_running_before = len(running)
        is_alone = len(running) + len(replica.waiting) == 1
        max_chunk = self.max_num_batched_tokens if is_alone else self.max_chunk

        position = 0
        while position < len(running) and budget > 0:
            request = running[position]
            position += 1
            if request.is_in_flight:
                continue
            if request.is_prefill_complete:
                chunk = 1
                num_kv_tokens = request.num_processed  # the token emitted last is computed now
            else:
                chunk = min(request.num_prefill - request.num_processed, max_chunk, budget)
                num_kv_tokens = request.num_processed + chunk
            num_new_blocks = ceil_div(num_kv_tokens, replica.block_size) - request.num_blocks
            if num_new_blocks > 0:
                if not self._make_room(replica, request, num_new_blocks):
                    break
                replica.allocate(request, num_new_blocks)
            replica.cache(request, num_kv_tokens)
            requests.append(request)
            num_tokens.append(chunk)
            budget -= chunk

        was_preempted = len(running) < num_running_before
        while not was_preempted and replica.waiting and budget > 0 and len(running) < self.max_num_seqs:
            request = replica.waiting[0]
            watermark_blocks = replica.watermark_blocks if running else 0
            hits = replica.find_hits(request)
            num_prompt_blocks = ceil_div(request.num_prefill, replica.block_size) - len(hits)
            if num_prompt_blocks + replica.num_idle(hits) + watermark_blocks > replica.num_free_blocks:
                break
            replica.waiting.popleft()
            replica.use_hits(request, hits)
            chunk = min(request.num_prefill - request.num_processed, max_chunk, budget)
            num_kv_tokens = request.num_processed + chunk
            replica.allocate(request, ceil_div(num_kv_tokens, replica.block_size) - len(hits))
            replica.cache(request, num_kv_tokens)
            running.append(request)
            requests.append(request)
            num_tokens.append(chunk)
            budget -= chunk

        if not requests:
            return None
        for request in requests:
            request.is_in_flight = True
        return Batch(requests, num_tokens)

    def _make_room(self, replica: Replica, request: Request, num_blocks: int) -> bool:
        """Preempt from the end of `running` until the blocks are free. False: `request` itself had to go.

        The victim is never a request scheduled in this step: those come before `request`, which is itself
        a candidate.
        """
        while num_blocks > replica.num_free_blocks:
            victim = next(r for r in reversed(replica.running) if not r.is_in_flight)
            replica.running.remove(victim)
            replica.preempt(victim, max(victim.num_prefill, victim.num_processed))
            if victim is request:
                return False
        return True

    def on_batch_end(self, replica: Replica, batch: Batch) -> None:
        has_finished = False
        for request in batch.requests:
            request.is_in_flight = False
            if request.completed_at is not None:
                replica.free(request)
                has_finished = True
        if has_finished:
            replica.running = [request for request in replica.running if request.completed_at is None]


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
