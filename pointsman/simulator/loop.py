"""The event loop.

Time moves to the next event: a planned change, an arrival, or the first in the heap; events of one instant
run in the order in which they were created (see events.py). The loop stops when a policy outside the kernel
has to decide, when the batch log is full, and when nothing is left to happen.
"""

from __future__ import annotations

from numba import njit

from pointsman.simulator.book import read_gauges, show_oracle, show_scrape
from pointsman.simulator.dispatch import arrive, end_decisions, planned_event
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
    kind_of,
    pop_now,
    push_later,
    slot_of,
    stage_of,
)
from pointsman.simulator.replica import (
    batch_end,
    replica_schedule,
    stage_arrival,
    stage_end,
    stage_schedule,
    wake_router,
)
from pointsman.simulator.state import BATCH_LOG_FULL, DECISION, DONE


@njit
def advance(sim):  # type: ignore[no-untyped-def]
    """Run until a decision is needed, the batch log is full, or the end; the status says which."""
    cluster = sim.cluster[0]
    is_logging = sim.batch_log.size > 0
    while True:
        if cluster.is_deciding:
            if cluster.queue_size > 0 and cluster.num_accepting > 0:
                cluster.status = DECISION
                return
            end_decisions(sim)
        if is_logging and cluster.num_logged_batches == sim.batch_log.size:
            cluster.status = BATCH_LOG_FULL
            return
        if not next_event(sim):
            cluster.status = DONE
            return


@njit
def next_event(sim):  # type: ignore[no-untyped-def]
    """Handle the next event; False if there is none."""
    cluster = sim.cluster[0]
    heap_time = sim.heap_time[0] if cluster.heap_size > 0 else float("inf")
    arrival_time = float("inf")
    if cluster.num_users == 0 and cluster.next_arrival < cluster.num_requests:
        arrival_time = sim.requests[cluster.next_arrival].arrived_at
    planned_time = float("inf")
    if cluster.next_event < sim.events.size:
        planned_time = sim.events[cluster.next_event].at

    if cluster.ring_size > 0 and planned_time > cluster.now and arrival_time > cluster.now:
        if heap_time > cluster.now or sim.ring_seq[cluster.ring_head] < sim.heap_seq[0]:
            handle_now(sim, pop_now(sim))
            return True
    elif cluster.num_completed == cluster.num_requests:
        return False
    now = min(planned_time, arrival_time, heap_time)
    if now == float("inf") or now > cluster.time_limit:
        return False
    cluster.now = now
    if planned_time == now:
        event = sim.events[cluster.next_event]
        cluster.next_event += 1
        planned_event(sim, event.kind, event.replica, event.value)
    elif arrival_time == now:
        i = cluster.next_arrival
        cluster.next_arrival += 1
        arrive(sim, i)
    else:
        what = sim.heap_what[0]
        seq = sim.heap_seq[0]
        drop_first(sim)
        handle_later(sim, what, seq)
    return True


@njit
def handle_now(sim, what):  # type: ignore[no-untyped-def]
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
        sim.cluster[0].is_wake_planned = 0
        sim.cluster[0].is_deciding = 1
        if sim.cluster[0].is_oracle:
            show_oracle(sim)


@njit
def handle_later(sim, what, seq):  # type: ignore[no-untyped-def]
    cluster = sim.cluster[0]
    kind = kind_of(what)
    if kind == STAGE_END:
        k = index_of(what)
        stage = stage_of(what)
        if sim.stages[k, stage].seq == seq:
            stage_end(sim, k, stage, slot_of(what))
    elif kind == USER_ARRIVAL:
        sim.requests[index_of(what)].arrived_at = cluster.now
        arrive(sim, index_of(what))
    elif kind == HOLD_TIMER:
        cluster.is_timer_planned = 0
        wake_router(sim)
    elif kind == SCRAPE:
        read_gauges(sim, sim.scraped, 0)
        push_later(sim, cluster.now + cluster.scrape_delay_s, encode(SCRAPE_VISIBLE, 0, 0, 0))
        push_later(sim, cluster.now + cluster.scrape_interval_s, encode(SCRAPE, 0, 0, 0))
    elif kind == SCRAPE_VISIBLE:
        show_scrape(sim, cluster.now - cluster.scrape_delay_s)
        wake_router(sim)
