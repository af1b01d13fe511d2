"""Counters of the data path, and their exposition for Prometheus.

The hot path only adds to plain numbers; prometheus-client writes the text when somebody asks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from pointsman.router.breaker import CLOSED, HALF_OPEN, OPEN

if TYPE_CHECKING:
    from pointsman.router.replicas import Registry

# Close enough for percentiles, interpolated between two bounds, that can be compared.
LATENCY_S = (
    *(0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75),
    *(1, 1.5, 2, 3, 5, 7.5, 10, 15, 20, 30, 50, 75, 100, 150, 200, 300),
)
_DECISION_S = (5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 1e-2, 1e-1)
_BREAKER_STATES = {CLOSED: 0, HALF_OPEN: 1, OPEN: 2}
NO_REPLICA = ""
_COUNTERS = (
    "requests",
    "decisions",
    "retries",
    "hedges",
    "fallbacks",
    "tokens",
    "shadow_decisions",
    "shadow_agreement",
)
_NUMBERS = ("shadow_failures", "holds", "cancelled")
_HISTOGRAMS = ("decision_s", "hold_s")
_BY_REPLICA = ("ttft_s", "e2e_s")


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
        counts, bounds = self.counts, self.bounds
        for value in values:
            counts[bisect_left(bounds, value)] += 1
        self.total += sum(values)

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


class Metrics:
    def __init__(self) -> None:
        self.ttft_s: defaultdict[str, Histogram] = defaultdict(Histogram)
        self.e2e_s: defaultdict[str, Histogram] = defaultdict(Histogram)
        self.decision_s = Histogram(_DECISION_S)
        self.hold_s = Histogram()
        self.requests: Counter[tuple[str, int]] = Counter()  # by replica and status
        self.decisions: Counter[tuple[str, str]] = Counter()  # by policy and replica
        self.retries: Counter[str] = Counter()
        self.hedges: Counter[str] = Counter()  # by outcome
        self.fallbacks: Counter[str] = Counter()
        self.tokens: Counter[tuple[str, str]] = Counter()  # by replica and kind
        self.shadow_decisions: Counter[str] = Counter()
        self.shadow_agreement: Counter[bool] = Counter()
        self.shadow_failures = 0
        self.holds = 0
        self.cancelled = 0
        self.num_held = 0
        self.num_clients = 0
        # What other processes hold now, by process.
        self.elsewhere: dict[int, dict[str, int]] = {}

    @property
    def all_held(self) -> int:
        return self.num_held + sum(one["held"] for one in self.elsewhere.values())

    @property
    def all_clients(self) -> int:
        return self.num_clients + sum(one["clients"] for one in self.elsewhere.values())

    def take(self) -> dict[str, Any]:
        """All that was counted, as plain lists for `add` of another process; here counting starts again."""
        taken: dict[str, Any] = {}
        for name in _COUNTERS:
            counter = getattr(self, name)
            taken[name] = list(counter.items())
            counter.clear()
        for name in _NUMBERS:
            taken[name] = getattr(self, name)
            setattr(self, name, 0)
        for name in _HISTOGRAMS:
            taken[name] = getattr(self, name).take()
        for name in _BY_REPLICA:
            taken[name] = [(replica, one.take()) for replica, one in getattr(self, name).items()]
        return taken

    def add(self, taken: Mapping[str, Any]) -> None:
        for name in _COUNTERS:
            counter = getattr(self, name)
            for key, count in taken[name]:
                counter[tuple(key) if isinstance(key, list) else key] += count
        for name in _NUMBERS:
            setattr(self, name, getattr(self, name) + taken[name])
        for name in _HISTOGRAMS:
            getattr(self, name).add(*taken[name])
        for name in _BY_REPLICA:
            for replica, one in taken[name]:
                getattr(self, name)[replica].add(*one)

    def answered(
        self,
        statuses: Sequence[tuple[str, int]],
        ttft_s: Mapping[str, Sequence[float]],
        e2e_s: Mapping[str, Sequence[float]],
    ) -> None:
        """Replica and status of some answers, and their times by replica."""
        self.requests.update(statuses)
        for replica, values in ttft_s.items():
            self.ttft_s[replica].observe_all(values)
        for replica, values in e2e_s.items():
            self.e2e_s[replica].observe_all(values)


class Exposition:
    """Reads the counters and the state of the replicas at the time of a scrape."""

    def __init__(self, metrics: Metrics, registry: Registry, shadow: str | None) -> None:
        self._metrics = metrics
        self._registry = registry
        self._shadow = shadow
        self._prometheus = CollectorRegistry(auto_describe=False)
        self._prometheus.register(self)

    def text(self) -> bytes:
        return generate_latest(self._prometheus)

    def collect(self) -> Iterator[Metric]:
        yield from self._latencies()
        yield from self._counters()
        yield from self._replicas()

    def _latencies(self) -> Iterator[Metric]:
        metrics = self._metrics
        for name, what, histograms in (
            ("ttft", "Time from the arrival of a streamed request to its first token", metrics.ttft_s),
            ("request", "Time from the arrival of a request to the end of its answer", metrics.e2e_s),
        ):
            family = HistogramMetricFamily(f"pointsman_{name}_seconds", what, labels=["replica"])
            for replica, histogram in histograms.items():
                family.add_metric([replica], histogram.buckets(), histogram.total)
            yield family
        for name, what, histogram in (
            ("decision", "Time the policy takes for a decision", metrics.decision_s),
            ("hold", "Time a held request waited at the router", metrics.hold_s),
        ):
            yield HistogramMetricFamily(
                f"pointsman_{name}_seconds", what, buckets=histogram.buckets(), sum_value=histogram.total
            )

    def _counters(self) -> Iterator[Metric]:
        metrics = self._metrics
        yield _counter(
            "requests",
            "Answers to clients",
            ["replica", "code"],
            (((r, str(c)), n) for (r, c), n in metrics.requests.items()),
        )
        yield _counter(
            "decisions",
            "Who chose which replica, or to hold",
            ["policy", "replica"],
            metrics.decisions.items(),
        )
        yield _counter(
            "retries", "Requests sent again to another replica", ["reason"], _single(metrics.retries)
        )
        yield _counter("hedges", "Second copies of requests", ["outcome"], _single(metrics.hedges))
        yield _counter("fallbacks", "Decisions taken from the policy", ["reason"], _single(metrics.fallbacks))
        yield _counter("tokens", "Tokens read and written", ["replica", "kind"], metrics.tokens.items())
        if self._shadow is not None:
            shadow = self._shadow
            yield _counter(
                "shadow_decisions",
                "What the shadow policy would have chosen",
                ["policy", "replica"],
                (((shadow, replica), n) for replica, n in metrics.shadow_decisions.items()),
            )
            yield _counter(
                "shadow_agreement",
                "Whether it would have chosen the same",
                ["policy", "agrees"],
                (((shadow, str(agrees).lower()), n) for agrees, n in metrics.shadow_agreement.items()),
            )
            yield CounterMetricFamily(
                "pointsman_shadow_failures", "Failures of the shadow policy", value=metrics.shadow_failures
            )
        yield CounterMetricFamily("pointsman_holds", "Requests held at the router", value=metrics.holds)
        yield CounterMetricFamily(
            "pointsman_cancelled", "Requests given up by their client", value=metrics.cancelled
        )
        yield GaugeMetricFamily("pointsman_held", "Requests held now", value=metrics.all_held)
        yield GaugeMetricFamily("pointsman_clients", "Open client connections", value=metrics.all_clients)

    def _replicas(self) -> Iterator[Metric]:
        replicas = list(self._registry)
        numbers = [replica.all_numbers for replica in replicas]
        num_sent = sum(sent for _, sent, _ in numbers) or 1
        for name, what, values in (
            ("outstanding", "Requests sent and not finished", [outstanding for outstanding, _, _ in numbers]),
            ("accepting", "Whether it gets requests", [int(r.is_accepting) for r in replicas]),
            (
                "breaker_state",
                "0 closed, 1 half-open, 2 open",
                [_BREAKER_STATES[r.breaker.state] for r in replicas],
            ),
            ("share", "Its share of the requests sent", [sent / num_sent for _, sent, _ in numbers]),
            ("connections", "Open connections to it", [connections for _, _, connections in numbers]),
        ):
            family = GaugeMetricFamily(f"pointsman_replica_{name}", what, labels=["replica"])
            for replica, value in zip(replicas, values, strict=True):
                family.add_metric([replica.name], value)
            yield family


def _counter(
    name: str, what: str, labels: Sequence[str], rows: Iterable[tuple[Sequence[str], int]]
) -> CounterMetricFamily:
    family = CounterMetricFamily(f"pointsman_{name}", what, labels=labels)
    for values, count in rows:
        family.add_metric(values, count)
    return family


def _single(counts: Counter[str]) -> Iterable[tuple[Sequence[str], int]]:
    return (((value,), count) for value, count in counts.items())
