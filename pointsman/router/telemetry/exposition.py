"""The counters and the state of the replicas as text, in Prometheus' format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from operator import add

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from pointsman.router.replicas.breaker import CLOSED, HALF_OPEN, OPEN
from pointsman.router.replicas.registry import Registry, Replica
from pointsman.router.requests.decisions import DecisionMaker
from pointsman.router.telemetry.metrics import Metrics, Sharing
from pointsman.routing.books import Books

_BREAKER_STATES = {CLOSED: 0, HALF_OPEN: 1, OPEN: 2}
_FIGURES = (
    ("step_floor_s", "step_floor_seconds", "Estimated time of its smallest step"),
    ("decode_s_per_token", "decode_seconds_per_token", "Estimated time that one more stream adds to a step"),
    ("prefill_s_per_token", "prefill_seconds_per_token", "Estimated time of a prompt token"),
    ("kv_capacity_tokens", "kv_capacity_tokens", "Estimated KV memory"),
)


class Exposition:
    """Reads the counters and the state of the replicas at the time of a scrape."""

    def __init__(self, metrics: Metrics, registry: Registry, books: Books, decisions: DecisionMaker) -> None:
        self._metrics = metrics
        self._registry = registry
        self._books = books
        self._decisions = decisions
        self._prometheus = CollectorRegistry(auto_describe=False)
        self._prometheus.register(self)

    def text(self) -> bytes:
        return generate_latest(self._prometheus)

    def collect(self) -> Iterator[Metric]:
        yield from self._latencies()
        yield from self._counters()
        yield from self._replicas()
        yield from self._estimates()
        yield self._policies()
        if self._metrics.sharing is not None:
            yield from _sharing(self._metrics.sharing)

    def _latencies(self) -> Iterator[Metric]:
        metrics = self._metrics
        for name, what, histograms in (
            ("ttft", "Time from the arrival of a streamed request to its first token", metrics.ttft_s),
            ("request", "Time from the arrival of a request to the end of its answer", metrics.e2e_s),
        ):
            family = HistogramMetricFamily(f"pointsman_{name}_seconds", what, labels=["replica", "policy"])
            for labels, histogram in histograms.items():
                family.add_metric(labels, histogram.buckets(), histogram.total)
            yield family
        for name, what, by_policy in (
            ("decision", "Time the policy takes for a decision", metrics.decision_s),
            ("hold", "Time a held request waited at the router", metrics.hold_s),
        ):
            family = HistogramMetricFamily(f"pointsman_{name}_seconds", what, labels=["policy"])
            for policy, histogram in by_policy.items():
                family.add_metric([policy], histogram.buckets(), histogram.total)
            yield family

    def _counters(self) -> Iterator[Metric]:
        metrics = self._metrics
        yield _counter(
            "requests",
            "Answers to clients",
            ["replica", "policy", "code"],
            (((r, p, str(c)), n) for (r, p, c), n in metrics.requests.items()),
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
        labels = ["replica", "policy", "kind"]
        yield _counter("tokens", "Tokens read and written", labels, metrics.tokens.items())
        yield _counter(
            "shadow_decisions",
            "What the shadow policy would have chosen",
            ["policy", "replica"],
            metrics.shadow_decisions.items(),
        )
        yield _counter(
            "shadow_agreement",
            "Whether it would have chosen the same",
            ["policy", "agrees"],
            (((p, str(agrees).lower()), n) for (p, agrees), n in metrics.shadow_agreement.items()),
        )
        yield _counter(
            "shadow_failures", "Failures of the shadow policy", ["policy"], _single(metrics.shadow_failures)
        )
        yield CounterMetricFamily("pointsman_holds", "Requests held at the router", value=metrics.holds)
        yield CounterMetricFamily(
            "pointsman_cancelled", "Requests given up by their client", value=metrics.cancelled
        )
        yield GaugeMetricFamily("pointsman_held", "Requests held now", value=metrics.all_held)
        yield GaugeMetricFamily("pointsman_clients", "Open client connections", value=metrics.all_clients)

    def _replicas(self) -> Iterator[Metric]:
        replicas = self._present()
        totals = {replica.name: [0, 0, 0] for replica in replicas}
        for replica in self._registry:
            own = totals[replica.name]
            own[:] = map(add, own, replica.all_numbers)
        numbers = list(totals.values())
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

    def _present(self) -> list[Replica]:
        """One of each name: where a server is back before its old requests have ended, there are two."""
        by_name: dict[str, Replica] = {}
        for replica in self._registry:
            if replica.name not in by_name or not replica.is_leaving:
                by_name[replica.name] = replica
        return list(by_name.values())

    def _estimates(self) -> Iterator[Metric]:
        """How fast the servers are, as the policies are told, and how sure that is."""
        replicas = self._present()
        for figure, name, what in _FIGURES:
            family = GaugeMetricFamily(f"pointsman_replica_{name}", what, labels=["replica"])
            for replica in replicas:
                family.add_metric([replica.name], self._books.replica_signals(replica.slot)[figure])
            yield family
        what = "Relative standard error of an estimate of its speed"
        errors = GaugeMetricFamily("pointsman_replica_estimate_error", what, labels=["replica", "figure"])
        for replica in replicas:
            for figure, error in self._books.estimate(replica.slot).errors.items():
                errors.add_metric([replica.name, figure], error)
        yield errors

    def _policies(self) -> Metric:
        family = GaugeMetricFamily(
            "pointsman_policy", "Who decides now, and who is asked beside it", labels=["policy", "role"]
        )
        family.add_metric([self._decisions.policy, "deciding"], 1)
        if self._decisions.shadow is not None:
            family.add_metric([self._decisions.shadow, "shadow"], 1)
        return family


def _sharing(sharing: Sharing) -> Iterator[Metric]:
    for name, what, value in (
        ("up", "Whether books are shared with other routers", float(sharing.is_up)),
        ("routers", "Other routers whose books are known", float(sharing.num_routers)),
        ("delay_seconds", "Time of the last message to the store and back", sharing.delay_s),
    ):
        yield GaugeMetricFamily(f"pointsman_sharing_{name}", what, value=value)
    yield CounterMetricFamily(
        "pointsman_sharing_losses", "Times that the store was lost", value=sharing.num_losses
    )


def _counter(
    name: str, what: str, labels: Sequence[str], rows: Iterable[tuple[Sequence[str], int]]
) -> CounterMetricFamily:
    family = CounterMetricFamily(f"pointsman_{name}", what, labels=labels)
    for values, count in rows:
        family.add_metric(values, count)
    return family


def _single(counts: Counter[str]) -> Iterable[tuple[Sequence[str], int]]:
    return (((value,), count) for value, count in counts.items())
