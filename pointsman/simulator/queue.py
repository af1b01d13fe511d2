"""The router's queue in the simulation: requests it has not sent yet, in order of arrival."""

from __future__ import annotations

from pointsman.compiled.jit import kernel
from pointsman.routing.records import NOBODY
from pointsman.simulator.events import ROUTER_WAKES, encode, push_now
from pointsman.simulator.sequences import last_token_at
from pointsman.simulator.state import request_at


@kernel
def wake_router(sim):
    """Something that the router can see has happened; it decides at this instant, after everything else."""
    if sim.router.queue_size > 0 and not sim.is_wake_planned:
        sim.is_wake_planned = 1
        push_now(sim, encode(ROUTER_WAKES, 0, 0, 0))


@kernel
def push_queue(sim, i):
    request_at(sim.requests, i).next = NOBODY
    if sim.router.queue_size == 0:
        sim.queue_head = i
    else:
        request_at(sim.requests, sim.queue_tail).next = i
    sim.queue_tail = i
    sim.router.queue_size += 1
    sim.queued_prompt += request_at(sim.requests, i).num_prefill


@kernel
def pop_queue(sim):
    i = sim.queue_head
    sim.queue_head = request_at(sim.requests, i).next
    sim.router.queue_size -= 1
    sim.queued_prompt -= request_at(sim.requests, i).num_prefill
    return i


@kernel
def give_back(sim, k, i):
    """Put a request of replica k back into the router's queue; it starts from scratch."""
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
    after = sim.queue_head if sim.router.queue_size > 0 else NOBODY
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
    sim.router.queue_size += 1
    sim.queued_prompt += request.num_prefill


@kernel
def is_older(sim, i, j):
    first = request_at(sim.requests, i).arrived_at
    second = request_at(sim.requests, j).arrived_at
    return first < second or (first == second and i < j)
