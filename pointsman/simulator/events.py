"""The order in which things happen.

Vidur keeps one heap keyed by (time, event number) and numbers events as they are created. The same order
comes out of a heap for the future and a ring for this instant: whatever is created for `now` gets a number
higher than anything already in the ring. Arrivals and planned cluster events are never pushed: they are
numbered before everything else, so at equal times they go first, straight from their sorted tables.
"""

from __future__ import annotations

from numba import njit

(
    ROUTER_WAKES,
    REPLICA_SCHEDULE,
    STAGE_ARRIVAL,
    STAGE_SCHEDULE,
    STAGE_END,
    BATCH_END,
    USER_ARRIVAL,
    HOLD_TIMER,
    SCRAPE,
    SCRAPE_VISIBLE,
) = range(10)


@njit(inline="always")
def encode(kind, index, stage, slot):  # type: ignore[no-untyped-def]
    """index: a replica or a request (< 2^40)."""
    return kind | (stage << 4) | (slot << 12) | (index << 20)


@njit(inline="always")
def kind_of(what):  # type: ignore[no-untyped-def]
    return what & 15


@njit(inline="always")
def stage_of(what):  # type: ignore[no-untyped-def]
    return (what >> 4) & 255


@njit(inline="always")
def slot_of(what):  # type: ignore[no-untyped-def]
    return (what >> 12) & 255


@njit(inline="always")
def index_of(what):  # type: ignore[no-untyped-def]
    return what >> 20


@njit
def push_now(sim, what):  # type: ignore[no-untyped-def]
    cluster = sim.cluster[0]
    capacity = sim.ring_seq.size
    at = cluster.ring_head + cluster.ring_size
    if at >= capacity:
        at -= capacity
    sim.ring_seq[at] = cluster.next_seq
    sim.ring_what[at] = what
    cluster.ring_size += 1
    cluster.next_seq += 1


@njit
def pop_now(sim):  # type: ignore[no-untyped-def]
    cluster = sim.cluster[0]
    head = cluster.ring_head
    what = sim.ring_what[head]
    cluster.ring_head = 0 if head + 1 == sim.ring_seq.size else head + 1
    cluster.ring_size -= 1
    return what


@njit
def push_later(sim, time, what):  # type: ignore[no-untyped-def]
    """Returns the event's number."""
    cluster = sim.cluster[0]
    times, seqs, whats = sim.heap_time, sim.heap_seq, sim.heap_what
    seq = cluster.next_seq
    cluster.next_seq = seq + 1
    hole = cluster.heap_size
    cluster.heap_size = hole + 1
    # The new event has the highest number, so it only rises above strictly later ones.
    while hole > 0:
        parent = (hole - 1) >> 1
        if times[parent] <= time:
            break
        times[hole] = times[parent]
        seqs[hole] = seqs[parent]
        whats[hole] = whats[parent]
        hole = parent
    times[hole] = time
    seqs[hole] = seq
    whats[hole] = what
    return seq


@njit
def drop_first(sim):  # type: ignore[no-untyped-def]
    """Remove the heap's first event."""
    cluster = sim.cluster[0]
    times, seqs, whats = sim.heap_time, sim.heap_seq, sim.heap_what
    size = cluster.heap_size - 1
    cluster.heap_size = size
    time = times[size]
    seq = seqs[size]
    what = whats[size]
    hole = 0
    while True:
        child = 2 * hole + 1
        if child >= size:
            break
        right = child + 1
        if right < size and (
            times[right] < times[child] or (times[right] == times[child] and seqs[right] < seqs[child])
        ):
            child = right
        if time < times[child] or (time == times[child] and seq < seqs[child]):
            break
        times[hole] = times[child]
        seqs[hole] = seqs[child]
        whats[hole] = whats[child]
        hole = child
    times[hole] = time
    seqs[hole] = seq
    whats[hole] = what
