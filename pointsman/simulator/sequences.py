"""Sequences on a replica: its queue, its KV blocks, and the lazy count of processed tokens.

A request holds no list of blocks; how many it holds follows from what it has processed:
ceil(prompt / B) from admission on for Vidur's schedulers (ceil(processed / B) while `vllm-v1` prefills in
chunks), one more whenever the next token does not fit, and a fixed reservation for orca.
"""

from __future__ import annotations

import math

from pointsman.compiled.jit import kernel
from pointsman.compiled.memory import int_list, long_list
from pointsman.routing.booking import forget_tokens, signals_of
from pointsman.routing.records import NOBODY, ticket_at
from pointsman.routing.signals import QUEUE_LENGTH
from pointsman.simulator.prefixes import let_go
from pointsman.simulator.state import (
    NUM_TBT_BINS,
    ORCA,
    TBT_BINS_PER_OCTAVE,
    TBT_LOWEST_EXPONENT,
    VLLM_V1,
    replica_at,
    request_at,
)


@kernel
def blocks_for(num_tokens, block_size):
    return (num_tokens + block_size - 1) // block_size


@kernel
def push_waiting(sim, k, i):
    signals = signals_of(sim.router)
    replica = replica_at(sim.replicas, k)
    request_at(sim.requests, i).next = NOBODY
    if replica.waiting_head == NOBODY:
        replica.waiting_head = i
    else:
        request_at(sim.requests, replica.waiting_tail).next = i
    replica.waiting_tail = i
    replica.num_waiting += 1
    signals[QUEUE_LENGTH, k] += 1.0


@kernel
def push_waiting_front(sim, k, i):
    signals = signals_of(sim.router)
    replica = replica_at(sim.replicas, k)
    request_at(sim.requests, i).next = replica.waiting_head
    if replica.waiting_head == NOBODY:
        replica.waiting_tail = i
    replica.waiting_head = i
    replica.num_waiting += 1
    signals[QUEUE_LENGTH, k] += 1.0


@kernel
def remove_waiting(sim, k, i):
    """Take request i out of the queue, wherever it stands; False if it is not in there."""
    signals = signals_of(sim.router)
    replica = replica_at(sim.replicas, k)
    before = NOBODY
    at = replica.waiting_head
    while at != NOBODY and at != i:
        before = at
        at = request_at(sim.requests, at).next
    if at == NOBODY:
        return False
    after = request_at(sim.requests, i).next
    if before == NOBODY:
        replica.waiting_head = after
    else:
        request_at(sim.requests, before).next = after
    if after == NOBODY:
        replica.waiting_tail = before
    replica.num_waiting -= 1
    signals[QUEUE_LENGTH, k] -= 1.0
    return True


@kernel
def pop_waiting(sim, k):
    signals = signals_of(sim.router)
    replica = replica_at(sim.replicas, k)
    i = replica.waiting_head
    replica.waiting_head = request_at(sim.requests, i).next
    replica.num_waiting -= 1
    signals[QUEUE_LENGTH, k] -= 1.0
    return i


@kernel
def num_processed(sim, k, i):
    request = request_at(sim.requests, i)
    return request.processed + replica_at(sim.replicas, k).steps if request.is_decoding else request.processed


@kernel
def held_blocks(sim, k, i):
    """Blocks of a request that is not part of the batch being formed or in flight."""
    replica = replica_at(sim.replicas, k)
    request = request_at(sim.requests, i)
    if replica.scheduler == ORCA:
        return replica.blocks_per_seq
    if request.is_decoding:
        return blocks_for(request.processed + replica.steps - 1, replica.block_size)
    if replica.scheduler == VLLM_V1:
        return blocks_for(request.processed, replica.block_size)
    return blocks_for(request.prefill, replica.block_size)


@kernel
def integrate_kv(sim, k):
    replica = replica_at(sim.replicas, k)
    replica.kv_area += replica.used_blocks * (sim.now - replica.kv_since)
    replica.kv_since = sim.now


@kernel
def start_decoding(sim, k, i):
    """From here on the request's tokens are counted by `steps`."""
    replica = replica_at(sim.replicas, k)
    phase_count = int_list(replica.phase_count, replica.block_size)
    request = request_at(sim.requests, i)
    request.is_decoding = 1
    request.processed -= replica.steps
    phase_count[(request.processed - 1) % replica.block_size] += 1
    replica.num_decoding += 1
    replica.sum_processed += request.processed
    replica.next_finish = min(replica.next_finish, request.limit - request.processed)


@kernel
def stop_decoding(sim, k, i):
    replica = replica_at(sim.replicas, k)
    phase_count = int_list(replica.phase_count, replica.block_size)
    request = request_at(sim.requests, i)
    phase_count[(request.processed - 1) % replica.block_size] -= 1
    replica.num_decoding -= 1
    replica.sum_processed -= request.processed
    request.processed += replica.steps
    request.is_decoding = 0


@kernel
def blocks_next_step(sim, k):
    """How many decoding requests need another block for their next token."""
    replica = replica_at(sim.replicas, k)
    phase_count = int_list(replica.phase_count, replica.block_size)
    if replica.scheduler == ORCA:
        return 0
    return phase_count[replica.step_phase]


@kernel
def record_interval(sim, interval_s, num_tokens):
    """Count `num_tokens` tokens that came `interval_s` after the previous one of their stream."""
    mantissa, exponent = math.frexp(interval_s)
    octave = exponent - 1 - TBT_LOWEST_EXPONENT
    position = max(0, int((octave + 2.0 * mantissa - 1.0) * TBT_BINS_PER_OCTAVE))
    long_list(sim.tbt_histogram, NUM_TBT_BINS)[min(position, NUM_TBT_BINS - 1)] += num_tokens


@kernel
def last_token_at(sim, k, i):
    return max(request_at(sim.requests, i).last_token_at, replica_at(sim.replicas, k).last_step_at)


@kernel
def set_last_token(sim, k, i):
    """Note a token that did not come with a step of all decoding requests."""
    replica = replica_at(sim.replicas, k)
    fresh = int_list(replica.fresh, sim.max_seqs)
    request = request_at(sim.requests, i)
    if not request.is_fresh:
        request.is_fresh = 1
        fresh[replica.num_fresh] = i
        replica.num_fresh += 1
    request.last_token_at = sim.now


@kernel
def forget_fresh(sim, k, i):
    if not request_at(sim.requests, i).is_fresh:
        return
    request_at(sim.requests, i).is_fresh = 0
    replica = replica_at(sim.replicas, k)
    fresh = int_list(replica.fresh, sim.max_seqs)
    position = 0
    while fresh[position] != i:
        position += 1
    replica.num_fresh -= 1
    fresh[position] = fresh[replica.num_fresh]


@kernel
def evict(sim, k, i):
    """Preemption by recomputation: free the memory, start over from the front of the queue."""
    replica = replica_at(sim.replicas, k)
    request = request_at(sim.requests, i)
    integrate_kv(sim, k)
    if replica.cache != 0:
        let_go(sim, k, i, num_processed(sim, k, i) - request.is_decoding, False)
    else:
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
            # Vidur's quirk: the rest of the prompt becomes output, and tokens seen before come again.
            if ticket_at(sim.router.tickets, i).is_started:
                forget_tokens(sim.router, k, request.prefill - request.processed)
            request.prefill = request.processed
    request.processed = 0
    request.restarts += 1
    sim.num_preemptions += 1
    push_waiting_front(sim, k, i)


@kernel
def append_running(sim, k, i):
    replica = replica_at(sim.replicas, k)
    running = int_list(replica.running, sim.max_seqs)
    position = replica.num_running
    if position > 0:
        last = running[position - 1]
        if request_at(sim.requests, i).arrived_at < request_at(sim.requests, last).arrived_at:
            replica.is_unsorted = 1
    running[position] = i
    replica.num_running = position + 1
    if not request_at(sim.requests, i).is_decoding:
        replica.num_partial += 1
        replica.first_partial = min(replica.first_partial, position)
    elif replica.num_partial == 0:
        replica.first_partial = position + 1


@kernel
def find_first_partial(sim, k, start):
    """No partly prefilled request stands before `start`."""
    replica = replica_at(sim.replicas, k)
    running = int_list(replica.running, sim.max_seqs)
    position = start
    if replica.num_partial == 0:
        position = replica.num_running
    else:
        while request_at(sim.requests, running[position]).is_decoding:
            position += 1
    replica.first_partial = position


@kernel
def sort_by_arrival(sim, items, start, stop):
    """Stable insertion sort of request numbers; the lists are short and nearly sorted."""
    for position in range(start + 1, stop):
        i = items[position]
        arrived_at = request_at(sim.requests, i).arrived_at
        hole = position
        while hole > start and request_at(sim.requests, items[hole - 1]).arrived_at > arrived_at:
            items[hole] = items[hole - 1]
            hole -= 1
        items[hole] = i
