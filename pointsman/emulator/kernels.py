"""One simulated replica, driven from outside: requests come while it runs, and may be given up."""

from __future__ import annotations

from pointsman.compiled.jit import entry_point, kernel
from pointsman.compiled.memory import int_list, row_accessor
from pointsman.routing.booking import book_failed
from pointsman.routing.records import NEVER, NOBODY
from pointsman.simulator.dispatch import act, arrive
from pointsman.simulator.loop import advance
from pointsman.simulator.sequences import remove_waiting
from pointsman.simulator.state import (
    DECISION,
    READY,
    SIM,
    batch_at,
    entry_at,
    future_at,
    prefix_at,
    replica_at,
    request_at,
)

sim_at = row_accessor(SIM)


@entry_point
def advance_to(sims, now):
    """Simulate up to now; -> when the next step ends, infinite if nothing runs.

    sims is an address, as everywhere here. Whatever has arrived goes to the only replica there is.
    """
    sim = sim_at(sims, 0)
    sim.stop_at = now
    sim.status = READY
    while sim.status == READY:
        advance(sim)
        if sim.status == DECISION:
            act(sim, 1)
            sim.status = READY
    return future_at(sim.heap, 0).time if sim.heap_size > 0 else float("inf")


@entry_point
def admit(sims, i, num_prefill, num_decode, links, num_links, answer_key, now):
    """Put a new request into row i, which must be free; the cluster must have been advanced to now.

    links: address of [num_links] LINK, which must stay there until the request is over.
    """
    sim = sim_at(sims, 0)
    sim.now = max(sim.now, now)  # with nothing to do, time stands still
    request = request_at(sim.requests, i)
    request.arrived_at = now
    request.dispatched_at = request.scheduled_at = request.first_token_at = NEVER
    request.completed_at = request.last_token_at = NEVER
    request.num_prefill = request.prefill = num_prefill
    request.num_decode = num_decode
    request.processed = request.restarts = 0
    request.replica = NOBODY
    request.session = NOBODY
    request.seen = request.hit_tokens = 0
    if sim.prefixes != 0:
        prefix = prefix_at(sim.prefixes, i)
        prefix.links = links
        prefix.num_links = num_links
        prefix.answer_key = prefix.own_key = answer_key
        prefix.next_link = prefix.piece = prefix.num_blocks = 0
    request.is_decoding = request.is_in_flight = request.is_fresh = 0
    # The simulator's own table of arrivals is empty: all so far have been handled.
    sim.num_requests += 1
    sim.next_arrival = sim.num_requests
    arrive(sim, i)


@entry_point
def collect(sims, rows, counts, changed, num_rows):
    """Count the output tokens of the requests in these rows; -> how many have more than before.

    rows, counts and changed: addresses of [num_rows] i4; changed gets the positions of those that do.
    """
    sim = sim_at(sims, 0)
    row_of = int_list(rows, num_rows)
    count_of = int_list(counts, num_rows)
    is_new = int_list(changed, num_rows)
    steps = replica_at(sim.replicas, 0).steps
    num_changed = 0
    for position in range(num_rows):
        request = request_at(sim.requests, row_of[position])
        if request.completed_at >= 0.0:
            count = request.num_decode
        elif request.is_decoding:
            count = request.processed + steps - request.num_prefill
        else:
            count = request.prefill - request.num_prefill  # what a preempted request has to compute anew
        if count != count_of[position]:
            count_of[position] = count
            is_new[num_changed] = position
            num_changed += 1
    return num_changed


@kernel
def tokens_in_flight(sim, i):
    """How many tokens of request i's prompt are in the batch that runs; 1 if it is in none."""
    replica = replica_at(sim.replicas, 0)
    for slot in range(replica.num_stages):
        batch = batch_at(replica.batches, slot)
        for position in range(batch.num_entries if batch.is_used else 0):
            entry = entry_at(batch.entries, position)
            if entry.request == i:
                return entry.num_tokens
    return 1


@entry_point
def abort(sims, i):
    """Give up request i: at once if it is queued (True), else at the end of the step, as vLLM does.

    A running request is made shorter, so that it ends with its next token and its memory is free.
    """
    sim = sim_at(sims, 0)
    request = request_at(sim.requests, i)
    replica = replica_at(sim.replicas, 0)
    if request.completed_at >= 0.0:
        return True
    if remove_waiting(sim, 0, i):
        book_failed(sim.router, i, request.prefill - request.num_prefill)
        sim.num_requests -= 1
        sim.next_arrival = sim.num_requests
        return True
    if request.is_decoding:
        request.num_decode = request.processed + replica.steps - request.num_prefill + 1
        replica.next_finish = min(replica.next_finish, replica.steps + 1)
    else:
        request.prefill = request.num_prefill = request.processed + tokens_in_flight(sim, i)
        request.num_decode = 1
    request.limit = request.num_prefill + request.num_decode
    return False
