"""Sequences on a replica: its queue, its KV blocks, and the lazy count of processed tokens.

A request holds no list of blocks; how many it holds follows from what it has processed:
ceil(prompt / B) from admission on for Vidur's schedulers (ceil(processed / B) while `vllm-v1` prefills in
chunks), one more whenever the next token does not fit, and a fixed reservation for orca.
"""

from __future__ import annotations

import math

from numba import njit

from pointsman.signals import QUEUE_LENGTH
from pointsman.simulator.state import (
    NOBODY,
    NUM_TBT_BINS,
    ORCA,
    TBT_LOG_WIDTH,
    TBT_LOWEST_S,
    VLLM_V1,
)


@njit
def blocks_for(num_tokens, block_size):  # type: ignore[no-untyped-def]
    return (num_tokens + block_size - 1) // block_size


@njit
def push_waiting(sim, k, i):  # type: ignore[no-untyped-def]
    replica = sim.replicas[k]
    sim.requests[i].next = NOBODY
    if replica.waiting_head == NOBODY:
        replica.waiting_head = i
    else:
        sim.requests[replica.waiting_tail].next = i
    replica.waiting_tail = i
    replica.num_waiting += 1
    sim.signals[QUEUE_LENGTH, k] += 1.0


@njit
def push_waiting_front(sim, k, i):  # type: ignore[no-untyped-def]
    replica = sim.replicas[k]
    sim.requests[i].next = replica.waiting_head
    if replica.waiting_head == NOBODY:
        replica.waiting_tail = i
    replica.waiting_head = i
    replica.num_waiting += 1
    sim.signals[QUEUE_LENGTH, k] += 1.0


@njit
def pop_waiting(sim, k):  # type: ignore[no-untyped-def]
    replica = sim.replicas[k]
    i = replica.waiting_head
    replica.waiting_head = sim.requests[i].next
    replica.num_waiting -= 1
    sim.signals[QUEUE_LENGTH, k] -= 1.0
    return i


@njit
def num_processed(sim, k, i):  # type: ignore[no-untyped-def]
    request = sim.requests[i]
    return request.processed + sim.replicas[k].steps if request.is_decoding else request.processed


@njit
def held_blocks(sim, k, i):  # type: ignore[no-untyped-def]
    """Blocks of a request that is not part of the batch being formed or in flight."""
    replica = sim.replicas[k]
    request = sim.requests[i]
    if replica.scheduler == ORCA:
        return replica.blocks_per_seq
    if request.is_decoding:
        return blocks_for(request.processed + replica.steps - 1, replica.block_size)
    if replica.scheduler == VLLM_V1:
        return blocks_for(request.processed, replica.block_size)
    return blocks_for(request.prefill, replica.block_size)


@njit
def integrate_kv(sim, k):  # type: ignore[no-untyped-def]
    replica = sim.replicas[k]
    replica.kv_area += replica.used_blocks * (sim.cluster[0].now - replica.kv_since)
    replica.kv_since = sim.cluster[0].now


@njit
def start_decoding(sim, k, i):  # type: ignore[no-untyped-def]
    """From here on the request's tokens are counted by `steps`."""
    replica = sim.replicas[k]
    request = sim.requests[i]
    total = request.num_prefill + request.num_decode
    request.is_decoding = 1
    request.processed -= replica.steps
    sim.phase_count[k, (request.processed - 1) % replica.block_size] += 1
    replica.num_decoding += 1
    replica.sum_processed += request.processed
    replica.next_finish = min(replica.next_finish, total - request.processed)


@njit
def stop_decoding(sim, k, i):  # type: ignore[no-untyped-def]
    replica = sim.replicas[k]
    request = sim.requests[i]
    sim.phase_count[k, (request.processed - 1) % replica.block_size] -= 1
    replica.num_decoding -= 1
    replica.sum_processed -= request.processed
    request.processed += replica.steps
    request.is_decoding = 0


@njit
def blocks_next_step(sim, k):  # type: ignore[no-untyped-def]
    """How many decoding requests need another block for their next token."""
    replica = sim.replicas[k]
    if replica.scheduler == ORCA:
        return 0
    return sim.phase_count[k, -replica.steps % replica.block_size]


@njit
def record_interval(sim, interval_s, num_tokens):  # type: ignore[no-untyped-def]
    """Count `num_tokens` tokens that came `interval_s` after the previous one of their stream."""
    position = math.log(max(interval_s, TBT_LOWEST_S) / TBT_LOWEST_S) / TBT_LOG_WIDTH
    sim.tbt_histogram[min(int(position), NUM_TBT_BINS - 1)] += num_tokens


@njit
def last_token_at(sim, k, i):  # type: ignore[no-untyped-def]
    return max(sim.requests[i].last_token_at, sim.replicas[k].last_step_at)


@njit
def set_last_token(sim, k, i):  # type: ignore[no-untyped-def]
    """Note a token that did not come with a step of all decoding requests."""
    replica = sim.replicas[k]
    request = sim.requests[i]
    if not request.is_fresh:
        request.is_fresh = 1
        sim.fresh[k, replica.num_fresh] = i
        replica.num_fresh += 1
    request.last_token_at = sim.cluster[0].now


@njit
def forget_fresh(sim, k, i):  # type: ignore[no-untyped-def]
    if not sim.requests[i].is_fresh:
        return
    sim.requests[i].is_fresh = 0
    replica = sim.replicas[k]
    position = 0
    while sim.fresh[k, position] != i:
        position += 1
    replica.num_fresh -= 1
    sim.fresh[k, position] = sim.fresh[k, replica.num_fresh]


@njit
def evict(sim, k, i):  # type: ignore[no-untyped-def]
    """Preemption by recomputation: free the memory, start over from the front of the queue."""
    replica = sim.replicas[k]
    request = sim.requests[i]
    integrate_kv(sim, k)
    replica.used_blocks -= held_blocks(sim, k, i)
    replica.num_holding -= 1
    request.last_token_at = last_token_at(sim, k, i)
    forget_fresh(sim, k, i)
    if request.is_decoding:
        stop_decoding(sim, k, i)
        request.prefill = request.processed
    else:
        replica.num_partial -= 1
        if replica.scheduler != VLLM_V1:
            request.prefill = request.processed  # Vidur's quirk: the rest of the prompt becomes output
    request.processed = 0
    request.restarts += 1
    sim.cluster[0].num_preemptions += 1
    push_waiting_front(sim, k, i)


@njit
def append_running(sim, k, i):  # type: ignore[no-untyped-def]
    replica = sim.replicas[k]
    position = replica.num_running
    if position > 0:
        last = sim.running[k, position - 1]
        if sim.requests[i].arrived_at < sim.requests[last].arrived_at:
            replica.is_unsorted = 1
    sim.running[k, position] = i
    replica.num_running = position + 1
    if not sim.requests[i].is_decoding:
        replica.num_partial += 1
        replica.first_partial = min(replica.first_partial, position)
    elif replica.num_partial == 0:
        replica.first_partial = position + 1


@njit
def find_first_partial(sim, k):  # type: ignore[no-untyped-def]
    replica = sim.replicas[k]
    position = 0
    if replica.num_partial == 0:
        position = replica.num_running
    else:
        while sim.requests[sim.running[k, position]].is_decoding:
            position += 1
    replica.first_partial = position


@njit
def sort_by_arrival(sim, items, start, stop):  # type: ignore[no-untyped-def]
    """Stable insertion sort of request numbers; the lists are short and nearly sorted."""
    for position in range(start + 1, stop):
        i = items[position]
        arrived_at = sim.requests[i].arrived_at
        hole = position
        while hole > start and sim.requests[items[hole - 1]].arrived_at > arrived_at:
            items[hole] = items[hole - 1]
            hole -= 1
        items[hole] = i
