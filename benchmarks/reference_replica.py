"""A replica of the plain Python simulator: requests, batches, queues and KV blocks.

Part of reference_simulator.py, and independent of the package as that is: written from the text alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any


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
