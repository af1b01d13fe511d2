"""Requests that are over, until metrics, log and recording have taken note of them, many at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, cached_property, partial
from struct import Struct
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pointsman.compiled import jit
from pointsman.compiled.jit import direct, kernel
from pointsman.compiled.memory import address_of, float_list, float_table, long_list

if TYPE_CHECKING:
    from pointsman.router.requests.booked import BookedRequest

entry_point = partial(jit.entry_point, keeps_gil=True)

# Columns of a row: its kind, which of `sessions` it has (0: none), the times and numbers of the request, and
# one that is 0, for the recorder. What is not known is below 0.
KIND, SESSION, ARRIVED_AT, HELD_S, TTFT_S, E2E_S = range(6)
PROMPT_TOKENS, OUTPUT_TOKENS, CACHED_TOKENS, NUM_LINK_BYTES, SPEED = range(6, 11)
NUM_COLUMNS = 11
MAX_ENDED = 256  # kept until they are counted
NUM_TOTALS = 4  # seconds to first tokens, seconds to ends, prompt tokens and output tokens
_ROW_BYTES = 8 * NUM_COLUMNS
_write_row = Struct(f"{SPEED}d").pack_into

# What many requests have in common: path without its query, which may carry a key; status, outcome, replica,
# policy, retries, and whether text was asked for.
Kind = tuple[str, int, str, str, str, int, bool]


class EndTotals(NamedTuple):
    """How some requests ended that have a kind in common."""

    ttft_counts: Sequence[int]  # by the bounds of a histogram
    ttft_s: float
    e2e_counts: Sequence[int]
    e2e_s: float
    prompt_tokens: int
    output_tokens: int


class EndedRequests:
    """MAX_ENDED at most. One by one, with an object for each, they took twice the time of this."""

    def __init__(self) -> None:
        self._add_up = _compiled()
        self._table = bytearray(MAX_ENDED * _ROW_BYTES)
        self._links: list[bytes] = []
        self.ids: list[str] = []  # without anything that JSON has to escape
        self.kinds: dict[Kind, int] = {}
        self.firsts: list[int] = []  # rows of kinds
        self.sessions: list[str] = []  # as clients named them; the first is 1

    def __len__(self) -> int:
        return len(self.ids)

    def add(
        self,
        request: BookedRequest,
        status: int,
        outcome: str,
        prompt_tokens: int,
        output_tokens: int,
        now: float,
    ) -> int:
        """-> how many there are."""
        kinds, ids, links = self.kinds, self.ids, request.links
        row = len(ids)
        kind = (
            request.request.head.wish.path,
            status,
            outcome,
            request.replica_name,
            request.decided_by,
            request.num_retries,
            request.generates,
        )
        number = kinds.get(kind)
        if number is None:
            number = kinds[kind] = len(kinds)
            self.firsts.append(row)
        session = 0
        if request.session_name:
            self.sessions.append(request.session_name)
            session = len(self.sessions)
        arrived_at, first_at = request.arrived_at, request.first_byte_at
        cached_tokens = request.cached_tokens
        _write_row(
            self._table,
            row * _ROW_BYTES,
            number,
            session,
            arrived_at,
            request.held_s,
            -1.0 if first_at is None else first_at - arrived_at,
            now - arrived_at,
            prompt_tokens,
            output_tokens,
            -1.0 if cached_tokens is None else cached_tokens,
            len(links),
        )
        ids.append(request.request_id)
        self._links.append(links)
        return row + 1

    @property
    def links(self) -> bytes:
        """The links of all prompts, one after the other."""
        return b"".join(self._links)

    @cached_property
    def rows(self) -> NDArray[np.float64]:
        """[N, NUM_COLUMNS]"""
        return np.frombuffer(self._table).reshape(-1, NUM_COLUMNS)[: len(self.ids)]

    def tallies(self, bounds: NDArray[np.float64]) -> Iterator[tuple[Kind, EndTotals]]:
        """What a histogram with these bounds counts, and what it is that was counted; kind by kind."""
        num_buckets = len(bounds) + 1
        counts = np.zeros((len(self.kinds), 2, num_buckets), np.int64)
        totals = np.zeros((len(self.kinds), NUM_TOTALS))
        self._add_up(
            address_of(self.rows),
            len(self.rows),
            address_of(bounds),
            num_buckets,
            address_of(counts),
            address_of(totals),
            len(self.kinds),
        )
        for kind, (ttfts, e2es), total in zip(self.kinds, counts.tolist(), totals.tolist(), strict=True):
            ttft_s, e2e_s, prompt_tokens, output_tokens = total
            yield kind, EndTotals(ttfts, ttft_s, e2es, e2e_s, int(prompt_tokens), int(output_tokens))


@cache
def _compiled() -> Callable[..., None]:
    return direct(add_up, "iiiiiii")


@entry_point
def add_up(rows, num_rows, bounds, num_buckets, counts, totals, num_kinds):
    """`EndedRequests.tallies`; arrays come by address."""
    table = float_table(rows, num_rows, NUM_COLUMNS)
    bounds = float_list(bounds, num_buckets - 1)
    counts = long_list(counts, 2 * num_kinds * num_buckets)
    totals = float_table(totals, num_kinds, NUM_TOTALS)
    for r in range(num_rows):
        row = table[r]
        kind = int(row[KIND])
        total = totals[kind]
        for n in range(2):
            value = row[TTFT_S + n]
            if value >= 0.0:
                counts[(2 * kind + n) * num_buckets + bucket_of(bounds, value)] += 1
                total[n] += value
        total[2] += row[PROMPT_TOKENS]
        total[3] += row[OUTPUT_TOKENS]


@kernel
def bucket_of(bounds, value):
    """The first whose bound is not below the value; the last has none."""
    low, high = 0, len(bounds)
    while low < high:
        middle = (low + high) // 2
        if bounds[middle] < value:
            low = middle + 1
        else:
            high = middle
    return low
