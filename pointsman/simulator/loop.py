"""The event loop.

Time moves to the next event: a planned change, an arrival, or the first in the heap; events of one instant
run in the order in which they were created (see events.py). The loop stops when a policy outside the kernel
has to decide, when the batch log is full or progress is to be shown, at a given time, and when nothing is
left to happen.
"""

from __future__ import annotations

import math

from pointsman.compiled.jit import kernel
from pointsman.simulator.dispatch import arrive, end_decisions, fill_ask, planned_event
from pointsman.simulator.events import (
    BATCH_END,
    HOLD_TIMER,
    REPLICA_SCHEDULE,
    ROUTER_WAKES,
    SCRAPE,
    SCRAPE_VISIBLE,
    STAGE_ARRIVAL,
    STAGE_END,
    STAGE_SCHEDULE,
    USER_ARRIVAL,
    drop_first,
    encode,
    index_of,
    is_first_alone,
    kind_of,
    pop_now,
    push_later,
    replace_first,
    slot_of,
    stage_of,
)
from pointsman.simulator.gauges import read_gauges, show_oracle, show_scrape
from pointsman.simulator.queue import wake_router
from pointsman.simulator.replica import (
    batch_end,
    replica_schedule,
    stage_arrival,
    stage_end,
    stage_schedule,
    step_alone,
    wake_replica,
)
from pointsman.simulator.state import (
    DECISION,
    DONE,
    PAUSED,
    READY,
    event_at,
    future_at,
    instant_at,
    replica_at,
    request_at,
)


@kernel
def advance(sim):
    """Run until a decision is needed, it is time to pause, or the end; the status says which."""
    while True:
        if sim.is_deciding:
            if sim.router.queue_size > 0 and sim.router.num_accepting > 0:
                fill_ask(sim)
                sim.status = DECISION
                return
            end_decisions(sim)
        is_log_full = 0 < sim.batch_log_capacity == sim.num_logged_batches
        if is_log_full or sim.num_completed >= sim.pause_at:
            sim.status = PAUSED
            return
        sim.status = next_event(sim)
        if sim.status != READY:
            return


@kernel
def has_arrivals(sim):
    """Whether the table holds requests that are still to arrive at a time that is known in advance."""
    return sim.num_users == 0 and sim.next_arrival < sim.num_requests - sim.num_later_turns


@kernel
def next_event(sim):
    """Handle the next event; the status says whether there was one, and whether it is time for it."""
    heap_time = future_at(sim.heap, 0).time if sim.heap_size > 0 else float("inf")
    arrival_time = float("inf")
    if has_arrivals(sim):
        arrival_time = request_at(sim.requests, sim.next_arrival).arrived_at
    planned_time = float("inf")
    if sim.next_event < sim.num_events:
        planned_time = event_at(sim.events, sim.next_event).at

    if sim.ring_size > 0 and planned_time > sim.now and arrival_time > sim.now:
        if heap_time > sim.now or instant_at(sim.ring, sim.ring_head).seq < future_at(sim.heap, 0).seq:
            handle_now(sim, pop_now(sim))
            return READY
    elif sim.num_completed == sim.num_requests:
        return DONE
    now = min(planned_time, arrival_time, heap_time)
    if now > sim.stop_at:
        sim.now = sim.stop_at
        return PAUSED
    if now == float("inf"):
        return DONE
    sim.now = now
    if planned_time == now:
        event = event_at(sim.events, sim.next_event)
        sim.next_event += 1
        planned_event(sim, event.kind, event.replica, event.value)
    elif arrival_time == now:
        i = sim.next_arrival
        sim.next_arrival += 1
        arrive(sim, i)
    else:
        handle_first(sim)
    return READY


@kernel
def handle_now(sim, what):
    kind = kind_of(what)
    k = index_of(what)
    if kind == STAGE_SCHEDULE:
        stage_schedule(sim, k, stage_of(what))
    elif kind == STAGE_ARRIVAL:
        stage_arrival(sim, k, stage_of(what), slot_of(what))
    elif kind == BATCH_END:
        batch_end(sim, k, slot_of(what))
    elif kind == REPLICA_SCHEDULE:
        replica_schedule(sim, k)
    elif kind == ROUTER_WAKES:
        sim.is_wake_planned = 0
        sim.is_deciding = 1
        if sim.is_oracle:
            show_oracle(sim)


@kernel
def handle_first(sim):
    """Take the first event off the heap and handle it."""
    what = future_at(sim.heap, 0).what
    kind = kind_of(what)
    if kind == STAGE_END:
        k = index_of(what)
        stage = stage_of(what)
        replica = replica_at(sim.replicas, k)
        if replica.owed_s > 0.0:
            replace_first(sim, sim.now + replica.owed_s, what)
            replica.owed_s = 0.0
        elif replica.num_stages == 1 and sim.ring_size == 0 and is_first_alone(sim):
            step_alone(sim, k)
        else:
            drop_first(sim)
            sim.num_live -= 1
            stage_end(sim, k, stage, slot_of(what))
        return
    drop_first(sim)
    if kind == REPLICA_SCHEDULE:
        wake_replica(sim, index_of(what))
        return
    handle_router_event(sim, kind, index_of(what))


@kernel
def is_anything_coming(sim):
    """Whether scrapes can show anything new; else a run with a stuck request would never end."""
    has_events = sim.num_live > 0 or sim.ring_size > 0 or sim.next_event < sim.num_events
    return has_arrivals(sim) or has_events or sim.is_timer_planned


@kernel
def last_quiet_scrape(sim):
    """When to scrape next: after `scrape_interval_s`, or later if nothing happens meanwhile.

    Between two events the gauges stand still, and with nobody to place nobody looks at them, so that all
    scrapes but the last two before the next event are left out: of those one may still be on its way. The
    clock of the scrapes is what adding the interval again and again gives, to the last bit.
    """
    next_scrape = sim.now + sim.scrape_interval_s
    is_asked = sim.router.queue_size > 0 and sim.router.num_accepting > 0
    if sim.ring_size > 0 or is_asked:
        return next_scrape
    until = sim.stop_at
    if sim.heap_size > 0:
        until = min(until, future_at(sim.heap, 0).time)
    if has_arrivals(sim):
        until = min(until, request_at(sim.requests, sim.next_arrival).arrived_at)
    if sim.next_event < sim.num_events:
        until = min(until, event_at(sim.events, sim.next_event).at)
    if next_scrape + 2.0 * sim.scrape_interval_s < until < float("inf"):
        return add_repeatedly(next_scrape, sim.scrape_interval_s, until - 2.0 * sim.scrape_interval_s)
    return next_scrape


@kernel
def add_repeatedly(total, step, limit):
    """`while total < limit: total += step`, in as many turns as there are powers of two on the way.

    Between two powers of two, sums are multiples of one unit, and each addition is rounded by the same
    amount, but for the first one, which may be a tie: many of them are one product, which is exact.
    """
    while total < limit:
        total += step
        after_a_tie = total + step
        rounded_step = after_a_tie + step - after_a_tie
        if rounded_step <= 0.0:  # too small to be seen beside the sum
            return limit
        power_of_two = math.ldexp(1.0, math.frexp(after_a_tie)[1])  # the next one above
        num_steps = math.floor((min(limit, power_of_two) - after_a_tie) / rounded_step) - 2.0
        if num_steps > 0.0 and total >= 0.5 * power_of_two:
            total = after_a_tie + num_steps * rounded_step
    return total


@kernel
def handle_router_event(sim, kind, i):
    if kind == USER_ARRIVAL:
        sim.num_live -= 1
        request_at(sim.requests, i).arrived_at = sim.now
        arrive(sim, i)
    elif kind == HOLD_TIMER:
        sim.is_timer_planned = 0
        wake_router(sim)
    elif kind == SCRAPE:
        read_gauges(sim)
        next_scrape = last_quiet_scrape(sim)
        push_later(sim, sim.now + sim.scrape_delay_s, encode(SCRAPE_VISIBLE, 0, 0, 0))
        if is_anything_coming(sim):
            push_later(sim, next_scrape, encode(SCRAPE, 0, 0, 0))
    elif kind == SCRAPE_VISIBLE:
        show_scrape(sim, sim.now - sim.scrape_delay_s)
        wake_router(sim)
