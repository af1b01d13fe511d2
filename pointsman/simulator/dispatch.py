"""The router's side of the simulation: its queue, its decisions, and planned changes to the sim.

The router decides about the oldest request in its queue. Action 0 holds it until the next event the router
can see (arrival, first token, finish, scrape, timer); action k sends it to replica k - 1. Requests behind a
held one wait with it. A request that was held for `max_hold_s` must be sent.
"""

from __future__ import annotations

from pointsman.signals import ACCEPTING, KV_CAPACITY_TOKENS, MAX_PROMPT_TOKENS, NUM_SIGNALS
from pointsman.simulator.book import book_lost_all, book_sent, integrate_load, set_accepting, update_gauges
from pointsman.simulator.events import (
    HOLD_TIMER,
    REPLICA_SCHEDULE,
    encode,
    forget_stage_ends,
    push_later,
    push_now,
)
from pointsman.simulator.jit import kernel
from pointsman.simulator.memory import float_table, int_list
from pointsman.simulator.replica import FAR, wake_router
from pointsman.simulator.sequences import integrate_kv, last_token_at, pop_waiting, push_waiting
from pointsman.simulator.state import (
    DRAIN,
    FAIL,
    JOIN,
    NOBODY,
    SLOW,
    VLLM_V1,
    batch_at,
    entry_at,
    replica_at,
    request_at,
    stage_at,
)


@kernel
def arrive(sim, i):
    integrate_load(sim)
    request = request_at(sim.requests, i)
    sim.num_in_system += 1
    sim.num_unstarted += 1
    sim.sum_unstarted_at += sim.now
    sim.num_decode_left += request.num_decode
    request.next = NOBODY
    if sim.queue_size == 0:
        sim.queue_head = i
    else:
        request_at(sim.requests, sim.queue_tail).next = i
    sim.queue_tail = i
    sim.queue_size += 1
    wake_router(sim)


@kernel
def act(sim, action):
    """Carry out a decision about the oldest queued request."""
    sim.num_decisions += 1
    if action == 0:
        hold(sim)
        return
    k = action - 1
    i = sim.queue_head
    request = request_at(sim.requests, i)
    sim.queue_head = request.next
    sim.queue_size -= 1
    request.replica = k
    if request.dispatched_at < 0.0 and sim.now > request.arrived_at:
        sim.num_held += 1
        sim.held_s += sim.now - request.arrived_at
    request.dispatched_at = sim.now
    replica_at(sim.replicas, k).num_sent += 1
    pass_api_server(sim, k, i)
    book_sent(sim, k, i)
    push_waiting(sim, k, i)
    int_list(sim.touched, sim.num_replicas + 1)[sim.num_touched] = k
    sim.num_touched += 1
    if sim.num_touched > sim.num_replicas:
        compact_touched(sim)


@kernel
def pass_api_server(sim, k, i):
    """Note when the engine gets the request. Requests do not overtake each other on the way."""
    replica = replica_at(sim.replicas, k)
    request = request_at(sim.requests, i)
    on_the_way_s = replica.api_s + replica.api_s_per_token * request.num_prefill
    on_the_way_s += replica.api_s_per_stream * replica.num_decoding
    replica.reached_at = max(replica.reached_at, sim.now + on_the_way_s)
    request.reached_at = replica.reached_at


@kernel
def hold(sim):
    end_decisions(sim)
    if not sim.is_timer_planned and can_anyone_take(sim, sim.queue_head):
        sim.is_timer_planned = 1
        push_later(sim, sim.now + sim.hold_timer_s, encode(HOLD_TIMER, 0, 0, 0))


@kernel
def can_take(sim, k, i):
    """Whether replica k accepts requests and would ever serve one of this size."""
    request = request_at(sim.requests, i)
    signals = float_table(sim.signals, NUM_SIGNALS, sim.num_replicas)
    fits = request.num_prefill + request.num_decode <= signals[KV_CAPACITY_TOKENS, k]
    return signals[ACCEPTING, k] > 0.0 and fits and request.num_prefill <= signals[MAX_PROMPT_TOKENS, k]


@kernel
def can_anyone_take(sim, i):
    """Else there is no point in asking again until a replica joins."""
    for k in range(sim.num_replicas):
        if can_take(sim, k, i):
            return True
    return False


@kernel
def compact_touched(sim):
    """Sort the touched replicas and drop repetitions."""
    touched = int_list(sim.touched, sim.num_touched)
    kept = 0
    for position in range(sim.num_touched):
        k = touched[position]
        hole = kept
        while hole > 0 and touched[hole - 1] > k:
            hole -= 1
        if hole > 0 and touched[hole - 1] == k:
            continue
        for later in range(kept, hole, -1):
            touched[later] = touched[later - 1]
        touched[hole] = k
        kept += 1
    sim.num_touched = kept


@kernel
def end_decisions(sim):
    sim.is_deciding = 0
    if sim.num_touched > 1:
        compact_touched(sim)
    touched = int_list(sim.touched, sim.num_touched)
    for position in range(sim.num_touched):
        push_now(sim, encode(REPLICA_SCHEDULE, touched[position], 0, 0))
    sim.num_touched = 0


@kernel
def planned_event(sim, kind, k, value):
    replica = replica_at(sim.replicas, k)
    if kind == SLOW:
        replica.slowdown = value
    elif kind == DRAIN:
        set_accepting(sim, k, 0)
    elif kind == JOIN:
        replica.is_alive = 1
        set_accepting(sim, k, 1)
        wake_router(sim)
    elif kind == FAIL and replica.is_alive:
        fail(sim, k)
        wake_router(sim)


@kernel
def fail(sim, k):
    """The replica dies. Its requests return to the router's queue and start from scratch."""
    replica = replica_at(sim.replicas, k)
    running = int_list(replica.running, sim.max_seqs)
    phase_count = int_list(replica.phase_count, replica.block_size)
    set_accepting(sim, k, 0)
    replica.is_alive = 0
    for position in range(replica.num_running):
        give_back(sim, k, running[position])
    while replica.num_waiting > 0:
        give_back(sim, k, pop_waiting(sim, k))
    for slot in range(replica.num_stages):
        batch = batch_at(replica.batches, slot)
        if batch.is_used and replica.scheduler != VLLM_V1:  # vllm-v1 keeps them on the running list
            for entry in range(batch.num_entries):
                give_back(sim, k, entry_at(batch.entries, entry).request)
        batch.is_used = 0
        stage = stage_at(replica.stages, slot)
        if stage.is_busy:
            replica.busy_s += (sim.now - stage.busy_since) / replica.num_stages
        stage.is_busy = 0
        stage.num_queued = 0
    forget_stage_ends(sim, k)
    book_lost_all(sim, k)
    integrate_kv(sim, k)
    replica.used_blocks = 0
    replica.num_holding = 0
    replica.num_running = 0
    replica.num_decoding = 0
    replica.num_partial = 0
    replica.first_partial = 0
    replica.num_in_flight = 0
    replica.num_fresh = 0
    replica.sum_processed = 0
    replica.next_finish = FAR
    replica.reached_at = 0.0
    for phase in range(replica.block_size):
        phase_count[phase] = 0
    update_gauges(replica)


@kernel
def give_back(sim, k, i):
    """Put a request of replica k back into the router's queue, which is in order of arrival."""
    request = request_at(sim.requests, i)
    if request.is_decoding:
        request.last_token_at = last_token_at(sim, k, i)
    request.prefill = request.num_prefill
    request.processed = 0
    request.is_decoding = 0
    request.is_in_flight = 0
    request.is_fresh = 0
    request.replica = NOBODY
    request.restarts += 1
    sim.num_resent += 1
    before = NOBODY
    after = sim.queue_head if sim.queue_size > 0 else NOBODY
    while after != NOBODY and is_older(sim, after, i):
        before = after
        after = request_at(sim.requests, after).next
    request.next = after
    if before == NOBODY:
        sim.queue_head = i
    else:
        request_at(sim.requests, before).next = i
    if after == NOBODY:
        sim.queue_tail = i
    sim.queue_size += 1


@kernel
def is_older(sim, i, j):
    first = request_at(sim.requests, i).arrived_at
    second = request_at(sim.requests, j).arrived_at
    return first < second or (first == second and i < j)
