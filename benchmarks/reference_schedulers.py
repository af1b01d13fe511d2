"""The schedulers of the plain Python simulator: Vidur's, quirks included, and today's vLLM.

Part of reference_simulator.py, and independent of the package as that is: written from the text alone.
"""

from __future__ import annotations

import sys
from operator import attrgetter
from pathlib import Path
from typing import Protocol

sys.path.insert(0, str(Path(__file__).parent))

from reference_replica import Batch, Replica, Request, ceil_div

by_arrival = attrgetter("arrived_at")


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
