"""Counters of the data path: plain numbers, which are cheap to add to.

What a policy can be judged by is counted by policy, so that before and after a switch can be compared. The
policy of a request is who sent it where it went: the one in charge, its stand-in, or a probe.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pointsman.router.telemetry.ended import EndTotals, Kind

# Close enough for percentiles, interpolated between two bounds, that can be compared.
LATENCY_S = (
    *(0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75),
    *(1, 1.5, 2, 3, 5, 7.5, 10, 15, 20, 30, 50, 75, 100, 150, 200, 300),
)
_DECISION_S = (5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 1e-2, 1e-1)
NO_REPLICA = NO_POLICY = ""
MAX_DEPARTED = 64  # servers that are gone and whose figures are still kept
_COUNTERS = (
    "requests",
    "decisions",
    "retries",
    "hedges",
    "fallbacks",
    "tokens",
    "shadow_decisions",
    "shadow_agreement",
    "shadow_failures",
)
_NUMBERS = ("holds", "cancelled")
_HISTOGRAMS = ("ttft_s", "e2e_s", "decision_s", "hold_s")


class Histogram:
    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float] = LATENCY_S) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def observe_all(self, values: Sequence[float]) -> None:
        buckets = np.searchsorted(self.bounds, values)
        self.add(np.bincount(buckets, minlength=len(self.counts)).tolist(), sum(values))

    def take(self) -> tuple[list[int], float]:
        taken = self.counts, self.total
        self.counts, self.total = [0] * len(self.counts), 0.0
        return taken

    def add(self, counts: Sequence[int], total: float) -> None:
        self.counts = [mine + more for mine, more in zip(self.counts, counts, strict=True)]
        self.total += total

    def buckets(self) -> list[tuple[str, float]]:
        running, rows = 0, []
        for bound, count in zip((*self.bounds, "+Inf"), self.counts, strict=True):
            running += count
            rows.append((str(bound), float(running)))
        return rows


class Sharing:
    """How a router stands with others that it shares its books with."""

    def __init__(self) -> None:
        self.is_up = False
        self.num_routers = 0  # others
        self.delay_s = 0.0  # until the last message was back from the store
        self.num_losses = 0


class Metrics:
    def __init__(self) -> None:
        # By replica and policy, and by policy.
        self.ttft_s: defaultdict[tuple[str, str], Histogram] = defaultdict(Histogram)
        self.e2e_s: defaultdict[tuple[str, str], Histogram] = defaultdict(Histogram)
        self.decision_s: defaultdict[str, Histogram] = defaultdict(lambda: Histogram(_DECISION_S))
        self.hold_s: defaultdict[str, Histogram] = defaultdict(Histogram)
        self.requests: Counter[tuple[str, str, int]] = Counter()  # by replica, policy and status
        self.decisions: Counter[tuple[str, str]] = Counter()  # by policy and replica
        self.retries: Counter[str] = Counter()
        self.hedges: Counter[str] = Counter()  # by outcome
        self.fallbacks: Counter[str] = Counter()
        self.tokens: Counter[tuple[str, str, str]] = Counter()  # by replica, policy and kind
        # By shadow, and where it would have sent a request; whether that is the same.
        self.shadow_decisions: Counter[tuple[str, str]] = Counter()
        self.shadow_agreement: Counter[tuple[str, bool]] = Counter()
        self.shadow_failures: Counter[str] = Counter()
        self.holds = 0
        self.cancelled = 0
        self.num_held = 0
        self.num_clients = 0
        self.sharing: Sharing | None = None
        self._departed: deque[str] = deque()
        # What other processes hold now, by process.
        self.elsewhere: dict[int, dict[str, int]] = {}

    @property
    def all_held(self) -> int:
        return self.num_held + sum(one["held"] for one in self.elsewhere.values())

    @property
    def all_clients(self) -> int:
        return self.num_clients + sum(one["clients"] for one in self.elsewhere.values())

    def follow(self, replica: str, what: str) -> None:
        """Forget all but the last servers that left: where servers come and go, names never end."""
        if what == "added" and replica in self._departed:
            self._departed.remove(replica)
        elif what == "removed":
            self._departed.append(replica)
            if len(self._departed) > MAX_DEPARTED:
                self._forget(self._departed.popleft())

    def _forget(self, replica: str) -> None:
        first_label: tuple[dict[Any, Any], ...] = (self.ttft_s, self.e2e_s, self.requests, self.tokens)
        for labels, of_all in ((0, first_label), (1, (self.decisions, self.shadow_decisions))):
            for figures in of_all:
                for key in [key for key in figures if key[labels] == replica]:
                    del figures[key]

    def take(self) -> dict[str, Any]:
        """Hand out all that was counted, as lists for `add` of another process, and count anew from 0."""
        taken: dict[str, Any] = {}
        for name in _COUNTERS:
            counter = getattr(self, name)
            taken[name] = list(counter.items())
            counter.clear()
        for name in _NUMBERS:
            taken[name] = getattr(self, name)
            setattr(self, name, 0)
        for name in _HISTOGRAMS:
            taken[name] = [(key, one.take()) for key, one in getattr(self, name).items()]
        return taken

    def add(self, taken: Mapping[str, Any]) -> None:
        for name in _COUNTERS:
            counter = getattr(self, name)
            for key, count in taken[name]:
                counter[_key(key)] += count
        for name in _NUMBERS:
            setattr(self, name, getattr(self, name) + taken[name])
        for name in _HISTOGRAMS:
            for key, one in taken[name]:
                getattr(self, name)[_key(key)].add(*one)

    def answered(self, kind: Kind, totals: EndTotals) -> None:
        """Some requests are over."""
        _, status, outcome, replica, policy, _, generates = kind
        self.requests[replica, policy, status] += sum(totals.e2e_counts)
        if any(totals.ttft_counts):
            self.ttft_s[replica, policy].add(totals.ttft_counts, totals.ttft_s)
        self.e2e_s[replica, policy].add(totals.e2e_counts, totals.e2e_s)
        if generates and outcome == "completed":
            self.tokens[replica, policy, "prompt"] += totals.prompt_tokens
            self.tokens[replica, policy, "output"] += totals.output_tokens


def _key(key: Any) -> Any:
    """As it was before it became JSON."""
    return tuple(key) if isinstance(key, list) else key
