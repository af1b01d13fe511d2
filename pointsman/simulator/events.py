"""The order in which things happen.

Vidur keeps one heap keyed by (time, event number) and numbers events as they are created. The same order
comes out of a heap for the future and a ring for this instant: whatever is created for `now` gets a number
higher than anything already in the ring. Arrivals and planned cluster events are never pushed: they are
numbered before everything else, so at equal times they go first, straight from their sorted tables.
"""

from __future__ import annotations

from numba import njit

from pointsman.compiled.jit import kernel
from pointsman.simulator.state import future_at, instant_at

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


@njit
def encode(kind, index, stage, slot):
    """index: a replica or a request (< 2^40)."""
    return kind | (stage << 4) | (slot << 12) | (index << 20)


@kernel
def kind_of(what):
    return what & 15


@kernel
def stage_of(what):
    return (what >> 4) & 255


@kernel
def slot_of(what):
    return (what >> 12) & 255


@kernel
def index_of(what):
    return what >> 20


@kernel
def push_now(sim, what):
    at = sim.ring_head + sim.ring_size
    if at >= sim.ring_capacity:
        at -= sim.ring_capacity
    instant = instant_at(sim.ring, at)
    instant.seq = sim.next_seq
    instant.what = what
    sim.ring_size += 1
    sim.next_seq += 1


@kernel
def pop_now(sim):
    head = sim.ring_head
    sim.ring_head = 0 if head + 1 == sim.ring_capacity else head + 1
    sim.ring_size -= 1
    return instant_at(sim.ring, head).what


@kernel
def set_future(future, time, seq, what):
    future.time = time
    future.seq = seq
    future.what = what


@kernel
def push_later(sim, time, what):
    insert(sim, time, sim.next_seq, what)
    sim.next_seq += 1


@kernel
def insert(sim, time, seq, what):
    hole = sim.heap_size
    sim.heap_size = hole + 1
    while hole > 0:
        above = (hole - 1) >> 1
        parent = future_at(sim.heap, above)
        if parent.time < time or (parent.time == time and parent.seq < seq):
            break
        set_future(future_at(sim.heap, hole), parent.time, parent.seq, parent.what)
        hole = above
    set_future(future_at(sim.heap, hole), time, seq, what)


@kernel
def sink(sim, time, seq, what):
    """Put an event in the first place of the heap and let it sink to where it belongs."""
    size = sim.heap_size
    hole = 0
    while True:
        below = 2 * hole + 1
        if below >= size:
            break
        child = future_at(sim.heap, below)
        if below + 1 < size:
            other = future_at(sim.heap, below + 1)
            if other.time < child.time or (other.time == child.time and other.seq < child.seq):
                below += 1
                child = other
        if time < child.time or (time == child.time and seq < child.seq):
            break
        set_future(future_at(sim.heap, hole), child.time, child.seq, child.what)
        hole = below
    set_future(future_at(sim.heap, hole), time, seq, what)


@kernel
def drop_first(sim):
    """Remove the heap's first event."""
    sim.heap_size -= 1
    last = future_at(sim.heap, sim.heap_size)
    sink(sim, last.time, last.seq, last.what)


@kernel
def replace_first(sim, time, what):
    """`drop_first` and `push_later` in one."""
    sink(sim, time, sim.next_seq, what)
    sim.next_seq += 1


@kernel
def forget_stage_ends(sim, k):
    """Take the ends of replica k's stages out of the heap, by building it anew without them."""
    size = sim.heap_size
    sim.heap_size = 0
    for position in range(size):
        future = future_at(sim.heap, position)
        if kind_of(future.what) == STAGE_END and index_of(future.what) == k:
            sim.num_live -= 1
        else:
            insert(sim, future.time, future.seq, future.what)  # never beyond `position`


@kernel
def is_first_alone(sim):
    """Whether no other event in the heap has the time of the first."""
    time = future_at(sim.heap, 0).time
    has_left = sim.heap_size > 1 and future_at(sim.heap, 1).time == time
    has_right = sim.heap_size > 2 and future_at(sim.heap, 2).time == time
    return not (has_left or has_right)
