"""The router's books, with what they say about costs: of everything so far, and of single requests.

A request costs, for each second, `outstanding` from its arrival to its end, and `waiting` and `age` times its
age until its first token: the terms of experiments/objective.py. What it cost while the policy held it is
booked when it is sent, because until then the router's table does not know it.
"""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple

from pointsman.experiments.objective import Objective
from pointsman.routing.books import Books


class CostTotals(NamedTuple):
    """Integrals over time, since the books were opened."""

    now: float
    outstanding: float  # of the number of requests
    waiting: float  # of those without a first token
    age: float  # of the sum of their ages


class Spent(NamedTuple):
    """What a finished request cost, and how long its answer was."""

    cost: float
    num_tokens: int


class Tally:
    """The finished requests of one kind, the last ones at least."""

    def __init__(self, max_kept: int | None = None) -> None:
        self.spent: deque[Spent] = deque(maxlen=max_kept)
        self.num_open = 0


class _Presence:
    """Integrals of how many there are, and of how old they are together."""

    def __init__(self) -> None:
        self._count = 0
        self._since = 0.0  # sum of the times of arrival, and of their squares
        self._since_square = 0.0
        self._area = self._age_area = 0.0  # of those gone

    def enter(self, at: float) -> None:
        self._change(1, at)

    def leave(self, since: float, now: float) -> None:
        self._change(-1, since)
        self._area += now - since
        self._age_area += 0.5 * (now - since) ** 2

    def _change(self, sign: int, at: float) -> None:
        self._count += sign
        self._since += sign * at
        self._since_square += sign * at * at

    def area(self, now: float) -> float:
        return self._area + self._count * now - self._since

    def age_area(self, now: float) -> float:
        return self._age_area + 0.5 * (self._count * now * now - 2.0 * now * self._since + self._since_square)


class _Open:
    """A request on its way."""

    __slots__ = ("arrived_at", "first_token_at", "tally")

    def __init__(self, tally: Tally | None, arrived_at: float) -> None:
        self.tally = tally
        self.arrived_at = arrived_at
        self.first_token_at: float | None = None


class CostBooks(Books):
    def __init__(self, objective: Objective) -> None:
        super().__init__()
        self._objective = objective
        self._opened_at = time.monotonic()
        self._all, self._unstarted = _Presence(), _Presence()
        self._open: dict[int, _Open] = {}
        self._next: tuple[Tally | None, float] | None = None

    def totals(self, now: float) -> CostTotals:
        now -= self._opened_at
        return CostTotals(now, self._all.area(now), self._unstarted.area(now), self._unstarted.age_area(now))

    def announce(self, tally: Tally | None, arrived_at: float) -> None:
        """Say whose the request is that is sent next, and when it came."""
        self._next = tally, arrived_at

    def sent(
        self, slot: int, prompt_tokens: int, now: float, streams: bool = True, links: bytes = b""
    ) -> int:
        ticket = super().sent(slot, prompt_tokens, now, streams, links)
        tally, arrived_at = self._next or (None, now)  # nobody decides about a probe
        self._next = None
        if tally is not None:
            tally.num_open += 1
        request = self._open[ticket] = _Open(tally, arrived_at - self._opened_at)
        self._all.enter(request.arrived_at)
        self._unstarted.enter(request.arrived_at)
        return ticket

    def first_token(self, ticket: int, now: float) -> None:
        super().first_token(ticket, now)
        self._start(self._open[ticket], now - self._opened_at)

    def finished(
        self,
        ticket: int,
        now: float,
        prompt_tokens: int | None = None,
        output_tokens: int | None = None,
        cached_tokens: int | None = None,
    ) -> None:
        super().finished(ticket, now, prompt_tokens, output_tokens, cached_tokens)
        request = self._end(ticket, now)
        if request.tally is not None:
            assert request.first_token_at is not None
            ttft_s = request.first_token_at - request.arrived_at
            e2e_s = now - self._opened_at - request.arrived_at
            weights = self._objective
            cost = weights.outstanding * e2e_s + weights.waiting * ttft_s + weights.age * 0.5 * ttft_s**2
            request.tally.spent.append(Spent(cost, output_tokens or 1))

    def failed(self, ticket: int, now: float) -> None:
        super().failed(ticket, now)
        self._end(ticket, now)

    def _start(self, request: _Open, now: float) -> None:
        if request.first_token_at is None:
            request.first_token_at = now
            self._unstarted.leave(request.arrived_at, now)

    def _end(self, ticket: int, now: float) -> _Open:
        request = self._open.pop(ticket)
        now -= self._opened_at
        self._start(request, now)
        self._all.leave(request.arrived_at, now)
        if request.tally is not None:
            request.tally.num_open -= 1
        return request
