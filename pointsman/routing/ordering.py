"""Whose turn it is: the order in which requests that wait at the router are decided about.

In order of arrival, unless small ones go first. With `small_first` p, a wait counts the less the larger the
request is, 2^-p as much with each doubling: of 0.4, half as much for a request six times as large. This is
a policy's own, and costs no tail to speak of, because who has waited for long yields to few.

In a crowd, past saturation, it would: whatever small ones gain, large ones then wait. So if more than `CROWD`
requests a replica are held, those of the usual size or more count alike, and smaller ones gain so much more.
They are little work, so that nobody waits much longer for them.

With `overtake_s`, the router's setting for more traffic than servers can take, the largest counts as one that
arrived so much later. Whoever has waited for `max_hold_s` goes before all who have not, however many small
ones come.

A router knows the prompt and expects an output; the true length of the answer is in neither. Sizes are powers
of two, which is what such an estimate is good for, and requests of one size stay in order of arrival: those
that wait form `NUM_SIZES` lines, and the next is the first of one of them.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from pointsman.compiled.jit import entry_point, kernel
from pointsman.routing.booking import NUM_SIZES, expected_output, size_class
from pointsman.routing.records import UNKNOWN, router_at

SMALL_FIRST = 0.4  # of trained policies; more gains more of the mean, and pays with P99 TTFT in overload
CROWD = 16.0  # requests held for each replica that accepts any: more are a crowd
GAIN_IN_CROWD = 2.5  # how much more sizes count there, up to the usual one
LARGE = 6  # the size from which on requests give way by all of `overtake_s`


@kernel
def size_of(router, prompt_tokens, max_tokens):
    """How large a request is, from 0: by its prompt and the output that the router expects.

    `max_tokens`: the limit its client set on the output; UNKNOWN.
    """
    output_tokens = expected_output(router, prompt_tokens)
    if max_tokens != UNKNOWN:
        output_tokens = min(output_tokens, float(max_tokens))
    return size_class(prompt_tokens + output_tokens)


@partial(entry_point, keeps_gil=True)
def expected_size(routers, prompt_tokens, max_tokens):
    """`size_of`, where the router is known by its address."""
    return size_of(router_at(routers, 0), prompt_tokens, max_tokens)


def sizes_that_count(
    small_first: float, num_held: int, num_accepting: int, usual_size: float
) -> tuple[float, int]:
    """`small_first` where so many are held for so many replicas, and from which size on all count alike."""
    if num_held <= CROWD * max(num_accepting, 1):
        return small_first, NUM_SIZES - 1
    return min(GAIN_IN_CROWD * small_first, 1.0), int(usual_size)


def turn_at(
    arrived_at: float,
    size: int,
    now: float,
    overtake_s: float,
    max_hold_s: float,
    small_first: float,
    largest: int,
) -> float:
    """When a request counts as arrived; the lowest is next.

    Overdue ones count by their arrival alone, which is before that of anybody who is not overdue.
    """
    waited_s = now - arrived_at
    if waited_s >= max_hold_s or size == 0:
        return arrived_at
    slower = 1.0 - 2.0 ** (-small_first * min(size, largest))
    counted_later_s: float = waited_s * slower + overtake_s * min(size, LARGE) / LARGE
    return arrived_at + counted_later_s


compiled_sizes_that_count, compiled_turn_at = kernel(sizes_that_count), kernel(turn_at)


class Order(NamedTuple):
    """How a router orders what it holds: by arrival, if both of the others are 0."""

    overtake_s: float
    max_hold_s: float
    small_first: float = 0.0
    largest: int = NUM_SIZES - 1  # larger ones count as this

    @property
    def is_by_size(self) -> bool:
        return self.overtake_s > 0.0 or self.small_first > 0.0

    def among(self, num_held: int, num_accepting: int, usual_size: float) -> Order:
        """The order while so many are held for so many replicas."""
        share, largest = sizes_that_count(self.small_first, num_held, num_accepting, usual_size)
        return self._replace(small_first=share, largest=largest)

    def turn_at(self, arrived_at: float, size: int, now: float) -> float:
        return turn_at(arrived_at, size, now, *self)
