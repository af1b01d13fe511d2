"""Whose turn it is: the order in which requests that wait at the router are decided about.

In order of arrival, unless small ones go first. With `small_first` p, a wait counts the less the larger the
request is, 2^-p as much with each doubling: of 0.4, half as much for a request six times as large. This is
a policy's own, and costs no tail to speak of, because who has waited for long yields to few. Where more is
held than a burst leaves behind, past saturation, it would: whatever small ones gain, large ones then wait. So
p falls with the square of the crowd beyond `CROWDED` requests a replica. With
`overtake_s`, the router's setting for more traffic than servers can take, the largest counts as one that
arrived so much later. Whoever has waited for `max_hold_s` goes before all who have not, however many small
ones come.

A router knows the prompt and expects an output; the true length of the answer is in neither. Sizes are powers
of two, which is what such an estimate is good for, and requests of one size stay in order of arrival: those
that wait form `NUM_SIZES` lines, and the next is the first of one of them.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

from pointsman.compiled.jit import entry_point, kernel
from pointsman.routing.booking import expected_output
from pointsman.routing.records import UNKNOWN, router_at

SMALL_TOKENS = 512  # fewer are of size 0; each doubling is one size more
NUM_SIZES = 10
SMALL_FIRST = 0.4  # of trained policies; more gains more of the mean, and pays with P99 TTFT in overload
CROWDED = 32.0  # requests held for each replica that accepts any, up to which sizes count in full
LARGE = 6  # the size from which on requests give way by all of `overtake_s`


@kernel
def size_of(router, prompt_tokens, max_tokens):
    """How large a request is, from 0: by its prompt and the output that the router expects.

    `max_tokens`: the limit its client set on the output; UNKNOWN.
    """
    output_tokens = expected_output(router, prompt_tokens)
    if max_tokens != UNKNOWN:
        output_tokens = min(output_tokens, float(max_tokens))
    doublings = math.frexp((prompt_tokens + output_tokens) / SMALL_TOKENS)[1]
    return min(max(doublings, 0), NUM_SIZES - 1)


@partial(entry_point, keeps_gil=True)
def expected_size(routers, prompt_tokens, max_tokens):
    """`size_of`, where the router is known by its address."""
    return size_of(router_at(routers, 0), prompt_tokens, max_tokens)


def turn_at(
    arrived_at: float, size: int, now: float, overtake_s: float, max_hold_s: float, small_first: float
) -> float:
    """When a request counts as arrived; the lowest is next.

    Overdue ones count by their arrival alone, which is before that of anybody who is not overdue.
    """
    waited_s = now - arrived_at
    if waited_s >= max_hold_s or size == 0:
        return arrived_at
    counted_later_s: float = (
        waited_s * (1.0 - 2.0 ** (-small_first * size)) + overtake_s * min(size, LARGE) / LARGE
    )
    return arrived_at + counted_later_s


def calmed(small_first: float, num_held: int, num_accepting: int) -> float:
    """How much sizes count where so many are held for so many replicas."""
    crowd = num_held / (CROWDED * max(num_accepting, 1))
    return small_first if crowd <= 1.0 else small_first / (crowd * crowd)


compiled_turn_at, compiled_calmed = kernel(turn_at), kernel(calmed)


class Order(NamedTuple):
    """How a router orders what it holds: by arrival, if both of the others are 0."""

    overtake_s: float
    max_hold_s: float
    small_first: float = 0.0

    @property
    def is_by_size(self) -> bool:
        return self.overtake_s > 0.0 or self.small_first > 0.0

    def among(self, num_held: int, num_accepting: int) -> Order:
        """The order while so many are held."""
        return self._replace(small_first=calmed(self.small_first, num_held, num_accepting))

    def turn_at(self, arrived_at: float, size: int, now: float) -> float:
        return turn_at(arrived_at, size, now, *self)
