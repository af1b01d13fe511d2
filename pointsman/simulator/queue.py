"""The router's queue in the simulation: requests it has not sent yet, in order of arrival or of size."""

from __future__ import annotations

from pointsman.compiled.jit import kernel
from pointsman.routing.booking import NUM_SIZES
from pointsman.routing.ordering import compiled_sizes_that_count, compiled_turn_at, size_of
from pointsman.routing.records import NOBODY, UNKNOWN
from pointsman.simulator.events import ROUTER_WAKES, encode, push_now
from pointsman.simulator.sequences import last_token_at
from pointsman.simulator.state import line_at, request_at


@kernel
def wake_router(sim):
    """Something that the router can see has happened; it decides at this instant, after everything else."""
    if sim.router.queue_size > 0 and not sim.is_wake_planned:
        sim.is_wake_planned = 1
        push_now(sim, encode(ROUTER_WAKES, 0, 0, 0))


@kernel
def set_order(sim, small_first):
    """Requests are taken in the order of the policy that runs the cluster from now on.

    Those that came in order of arrival stay in the line of the smallest; and what once was in lines by size
    stays there, though its size may count for nothing now.
    """
    sim.router.small_first = small_first
    if small_first > 0.0 or sim.router.overtake_s > 0.0:
        sim.is_ordered = 1


@kernel
def push_queue(sim, i):
    request = request_at(sim.requests, i)
    size = size_of(sim.router, request.num_prefill, UNKNOWN) if sim.is_ordered else 0
    line = line_at(sim.lines, size)
    request.next = NOBODY
    if line.head == NOBODY:
        line.head = i
    else:
        request_at(sim.requests, line.tail).next = i
    line.tail = i
    sim.router.queue_size += 1
    sim.queued_prompt += request.num_prefill


@kernel
def find_head(sim):
    """The queue's next request; there is one."""
    if sim.is_ordered:
        find_line(sim)
    sim.queue_head = line_at(sim.lines, sim.next_line).head


@kernel
def find_line(sim):
    """Find the line whose first request is next; of two with the same turn, the one that arrived first."""
    router = sim.router
    small_first, largest = compiled_sizes_that_count(
        router.small_first, router.queue_size, router.num_accepting, router.usual_size
    )
    next_turn_at = float("inf")
    head = NOBODY
    for size in range(NUM_SIZES):
        i = line_at(sim.lines, size).head
        if i == NOBODY:
            continue
        arrived_at = request_at(sim.requests, i).arrived_at
        turn_at = compiled_turn_at(
            arrived_at, size, sim.now, router.overtake_s, router.max_hold_s, small_first, largest
        )
        if turn_at < next_turn_at or (turn_at == next_turn_at and is_older(sim, i, head)):
            next_turn_at = turn_at
            head = i
            sim.next_line = size


@kernel
def pop_queue(sim):
    i = sim.queue_head
    line_at(sim.lines, sim.next_line).head = request_at(sim.requests, i).next
    sim.router.queue_size -= 1
    sim.queued_prompt -= request_at(sim.requests, i).num_prefill
    return i


@kernel
def give_back(sim, k, i):
    """Put a request of replica k back into the queue; it starts from scratch, and gives way to nobody."""
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
    line = line_at(sim.lines, 0)
    before = NOBODY
    after = line.head
    while after != NOBODY and is_older(sim, after, i):
        before = after
        after = request_at(sim.requests, after).next
    request.next = after
    if before == NOBODY:
        line.head = i
    else:
        request_at(sim.requests, before).next = i
    if after == NOBODY:
        line.tail = i
    sim.router.queue_size += 1
    sim.queued_prompt += request.num_prefill


@kernel
def is_older(sim, i, j):
    first = request_at(sim.requests, i).arrived_at
    second = request_at(sim.requests, j).arrived_at
    return first < second or (first == second and i < j)
