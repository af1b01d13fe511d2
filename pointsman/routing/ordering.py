"""Whose turn it is: the order in which requests that wait at the router are decided about.

In order of arrival, unless `overtake_s` is more than zero. Then a request counts as one that arrived later,
the larger it is: a small one at its arrival, the largest `overtake_s` after it. So nobody is overtaken by a
request that arrived more than `overtake_s` later, however many small ones come, and whoever has waited for
`max_hold_s` goes before all who have not.

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
NUM_SIZES = 7


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


def turn_at(arrived_at: float, size: int, now: float, overtake_s: float, max_hold_s: float) -> float:
    """When a request counts as arrived; the lowest is next.

    Overdue ones count by their arrival alone, which is before that of anybody who is not overdue.
    """
    if now - arrived_at >= max_hold_s:
        return arrived_at
    return arrived_at + overtake_s * size / (NUM_SIZES - 1)


compiled_turn_at = kernel(turn_at)


class Order(NamedTuple):
    """How a router orders what it holds."""

    overtake_s: float  # 0: by arrival
    max_hold_s: float

    def turn_at(self, arrived_at: float, size: int, now: float) -> float:
        return turn_at(arrived_at, size, now, *self)
