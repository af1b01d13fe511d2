"""The router's side of the simulation: its queue, its decisions, and planned changes to the cluster.

The router decides about the oldest request in its queue. Action 0 holds it until the next event the router
can see (arrival, first token, finish, scrape, timer); action k sends it to replica k - 1. Requests behind a
held one wait with it. A request that was held for `max_hold_s` must be sent.
"""

from __future__ import annotations

from numba import njit

from pointsman.simulator.book import book_lost_all, book_sent, integrate_load, set_accepting, update_gauges
from pointsman.simulator.events import HOLD_TIMER, REPLICA_SCHEDULE, encode, push_later, push_now
from pointsman.simulator.replica import FAR, wake_router
from pointsman.simulator.sequences import integrate_kv, pop_waiting, push_waiting
from pointsman.simulator.state import DRAIN, FAIL, JOIN, NOBODY, SLOW, VLLM_V1


@njit
def arrive(sim, i):  # type: ignore[no-untyped-def]
    cluster = sim.cluster[0]
    integrate_load(cluster)
    cluster.num_in_system += 1
    sim.requests[i].next = NOBODY
    if cluster.queue_size == 0:
        cluster.queue_head = i
    else:
        sim.requests[cluster.queue_tail].next = i
    cluster.queue_tail = i
    cluster.queue_size += 1
    wake_router(sim)


@njit
def act(sim, action):  # type: ignore[no-untyped-def]
    """Carry out a decision about the oldest queued request."""
    cluster = sim.cluster[0]
    cluster.num_decisions += 1
    if action == 0:
        end_decisions(sim)
        if not cluster.is_timer_planned:
            cluster.is_timer_planned = 1
            push_later(sim, cluster.now + cluster.hold_timer_s, encode(HOLD_TIMER, 0, 0, 0))
        return
    k = action - 1
    i = cluster.queue_head
    request = sim.requests[i]
    cluster.queue_head = request.next
    cluster.queue_size -= 1
    request.replica = k
    request.dispatched_at = cluster.now
    if cluster.now > request.arrived_at:
        cluster.num_held += 1
        cluster.held_s += cluster.now - request.arrived_at
    sim.replicas[k].num_sent += 1
    book_sent(sim, k, i)
    push_waiting(sim, k, i)
    sim.touched[cluster.num_touched] = k
    cluster.num_touched += 1
    if cluster.num_touched == sim.touched.size:
        compact_touched(sim)


@njit
def compact_touched(sim):  # type: ignore[no-untyped-def]
    """Sort the touched replicas and drop repetitions."""
    cluster = sim.cluster[0]
    touched = sim.touched[: cluster.num_touched]
    touched.sort()
    kept = 0
    for position in range(touched.size):
        if kept == 0 or touched[position] != touched[kept - 1]:
            touched[kept] = touched[position]
            kept += 1
    cluster.num_touched = kept


@njit
def end_decisions(sim):  # type: ignore[no-untyped-def]
    cluster = sim.cluster[0]
    cluster.is_deciding = 0
    if cluster.num_touched > 1:
        compact_touched(sim)
    for position in range(cluster.num_touched):
        push_now(sim, encode(REPLICA_SCHEDULE, sim.touched[position], 0, 0))
    cluster.num_touched = 0


@njit
def planned_event(sim, kind, k, value):  # type: ignore[no-untyped-def]
    replica = sim.replicas[k]
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


@njit
def fail(sim, k):  # type: ignore[no-untyped-def]
    """The replica dies. Its requests return to the router's queue and start from scratch."""
    replica = sim.replicas[k]
    set_accepting(sim, k, 0)
    replica.is_alive = 0
    for position in range(replica.num_running):
        give_back(sim, sim.running[k, position])
    while replica.num_waiting > 0:
        give_back(sim, pop_waiting(sim, k))
    for slot in range(replica.num_stages):
        batch = sim.batches[k, slot]
        if batch.is_used and replica.scheduler != VLLM_V1:  # vllm-v1 keeps them on the running list
            for entry in range(batch.num_entries):
                give_back(sim, sim.entry_request[k, slot, entry])
        batch.is_used = 0
        sim.stages[k, slot].is_busy = 0
        sim.stages[k, slot].num_queued = 0
        sim.stages[k, slot].seq = NOBODY  # the end of a stage that is still in the heap means nothing now
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
    sim.phase_count[k, :] = 0
    update_gauges(replica)


@njit
def give_back(sim, i):  # type: ignore[no-untyped-def]
    """Put a request back into the router's queue, which is in order of arrival."""
    cluster = sim.cluster[0]
    request = sim.requests[i]
    request.prefill = request.num_prefill
    request.processed = 0
    request.is_decoding = 0
    request.is_in_flight = 0
    request.is_fresh = 0
    request.replica = NOBODY
    request.restarts += 1
    cluster.num_resent += 1
    before = NOBODY
    after = cluster.queue_head if cluster.queue_size > 0 else NOBODY
    while after != NOBODY and is_older(sim, after, i):
        before = after
        after = sim.requests[after].next
    request.next = after
    if before == NOBODY:
        cluster.queue_head = i
    else:
        sim.requests[before].next = i
    if after == NOBODY:
        cluster.queue_tail = i
    cluster.queue_size += 1


@njit
def is_older(sim, i, j):  # type: ignore[no-untyped-def]
    first = sim.requests[i].arrived_at
    second = sim.requests[j].arrived_at
    return first < second or (first == second and i < j)
