"""The last minutes of the router's counters, for the live page.

Counters only grow, so what happened lately is the difference of two readings. The clock takes a reading every
few seconds; requests cost nothing, and memory is bounded, however long the router runs.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pointsman.router.replicas.registry import Registry
from pointsman.router.telemetry.metrics import LATENCY_S, NO_REPLICA, Histogram, Metrics

SAMPLE_S = 5.0
NUM_SAMPLES = 60

Reading = dict[str, Counter[Any]]  # counts of each kind, by their labels


class Point(NamedTuple):
    """What one sample adds to the curves."""

    at: float
    answers_per_s: float
    errors_per_s: float
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    e2e_p50_s: float | None
    e2e_p99_s: float | None
    num_outstanding: int
    num_held: int


class History:
    def __init__(self, metrics: Metrics, registry: Registry, now: float) -> None:
        self._metrics = metrics
        self._registry = registry
        self._sampled_at = self._since = now
        self._sampled = self._start = read(metrics)
        self._samples: deque[tuple[float, Reading]] = deque()  # what each has counted, which is little
        self.points: deque[Point] = deque(maxlen=NUM_SAMPLES)

    def tick(self, now: float) -> None:
        if now - self._sampled_at < SAMPLE_S:
            return
        reading = read(self._metrics)
        new = difference(reading, self._sampled)
        self.points.append(self._point(new, now))
        self._samples.append((now, new))
        self._sampled_at, self._sampled = now, reading
        if len(self._samples) > NUM_SAMPLES:
            self._since, oldest = self._samples.popleft()
            self._start = {kind: counts + oldest[kind] for kind, counts in self._start.items()}

    def lately(self, now: float) -> tuple[float, Reading]:
        """How many seconds back the history goes, and what has been counted in them."""
        return now - self._since, difference(read(self._metrics), self._start)

    def _point(self, new: Reading, now: float) -> Point:
        over_s = now - self._sampled_at
        ttft, e2e = (over_all(new[kind]) for kind in ("ttft_s", "e2e_s"))
        return Point(
            at=now,
            answers_per_s=new["answers"].total() / over_s,
            errors_per_s=num_errors(new) / over_s,
            ttft_p50_s=quantile(ttft, 0.5),
            ttft_p99_s=quantile(ttft, 0.99),
            e2e_p50_s=quantile(e2e, 0.5),
            e2e_p99_s=quantile(e2e, 0.99),
            num_outstanding=sum(replica.all_numbers[0] for replica in self._registry),
            num_held=self._metrics.all_held,
        )


def read(metrics: Metrics) -> Reading:
    return {
        "ttft_s": _by_bucket(metrics.ttft_s),
        "e2e_s": _by_bucket(metrics.e2e_s),
        "hold_s": _by_bucket({(policy,): one for policy, one in metrics.hold_s.items()}),
        "answers": metrics.requests.copy(),
        "decisions": metrics.decisions.copy(),
        "retries": metrics.retries.copy(),
        "fallbacks": metrics.fallbacks.copy(),
        "shadow_decisions": metrics.shadow_decisions.copy(),
        "shadow_agreement": metrics.shadow_agreement.copy(),
        "shadow_failures": metrics.shadow_failures.copy(),
        "events": Counter(holds=metrics.holds, cancelled=metrics.cancelled),
    }


def difference(after: Reading, before: Reading) -> Reading:
    return {kind: counts - before[kind] for kind, counts in after.items()}


def by_replica(buckets: Counter[tuple[Any, ...]]) -> defaultdict[str, Counter[int]]:
    return _grouped(buckets, 0)


def by_policy(buckets: Counter[tuple[Any, ...]]) -> defaultdict[str, Counter[int]]:
    return _grouped(buckets, 1)


def _grouped(buckets: Counter[tuple[Any, ...]], label: int) -> defaultdict[str, Counter[int]]:
    grouped: defaultdict[str, Counter[int]] = defaultdict(Counter)
    for key, count in buckets.items():
        grouped[key[label]][key[-1]] += count
    return grouped


def over_all(buckets: Counter[tuple[Any, ...]]) -> Counter[int]:
    """The sums over all replicas; a request that none of them got has no latency to speak of."""
    total: Counter[int] = Counter()
    for (first, *_, bucket), count in buckets.items():
        if first != NO_REPLICA:
            total[bucket] += count
    return total


def num_errors(reading: Reading) -> int:
    return sum(count for (*_, status), count in reading["answers"].items() if status >= 500)


def quantile(buckets: Mapping[int, int], share: float, bounds: Sequence[float] = LATENCY_S) -> float | None:
    """Interpolated within its bucket; beyond the last bound it is the last bound. None: nothing counted."""
    rank = share * sum(buckets.values())
    if rank <= 0.0:
        return None
    below = 0
    for bucket, bound in enumerate(bounds):
        count = buckets.get(bucket, 0)
        if count and below + count >= rank:
            low = bounds[bucket - 1] if bucket else 0.0
            return low + (bound - low) * (rank - below) / count
        below += count
    return bounds[-1]


def _by_bucket(histograms: Mapping[Any, Histogram]) -> Counter[tuple[Any, ...]]:
    """`histograms` by their labels, a tuple."""
    return Counter(
        {
            (*labels, bucket): count
            for labels, histogram in histograms.items()
            for bucket, count in enumerate(histogram.counts)
            if count
        }
    )
