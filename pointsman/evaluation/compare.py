"""Several policies on the same arrivals: who serves them better, by how much, and how sure that is.

Common random numbers: for each seed the workload is drawn once, and every policy gets it. What is compared is
a metric's mean over seeds (so a P99 is the mean of the runs' P99), as a ratio to the baseline's.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pointsman.config import Config
from pointsman.errors import PointsmanWarning
from pointsman.evaluation.bootstrap import (
    Ratio,
    paired_ratios,
    ratios_of_means,
    resampled_ratios,
    with_intervals,
)
from pointsman.evaluation.metrics import latency
from pointsman.evaluation.simulate import Outcome, Prepared, prepare, simulate
from pointsman.policies.spec import HEURISTICS, PolicySpec
from pointsman.signals import SIGNAL_INDEX, SIGNALS
from pointsman.spec import parse_spec

# What a table shows first: the two latencies a user feels, their mean and their tail.
HEADLINES = ("ttft_mean_s", "ttft_p99_s", "e2e_mean_s", "e2e_p99_s")
CURVES = ("ttft", "e2e")

NEED_CONFIGURATION = ("linear-score",)
NEED_SESSIONS = ("session-affinity",)

# Requests simulated at once; bounds the memory of a long comparison (about 110 bytes a request).
BATCH_REQUESTS = 2_000_000

Shares = Callable[[float], None]  # gets what share of the comparison was finished since the last call


class LatencyHistogram:
    """Counts in bins 0.5 % wide, from 10 µs to 28 hours: bounded memory, and fine enough for any plot."""

    LOWEST_S = 1e-5
    LOG_WIDTH = math.log(1.005)
    NUM_BINS = 4618

    def __init__(self) -> None:
        self.counts: NDArray[np.int64] = np.zeros(self.NUM_BINS, np.int64)

    def add(self, values_s: NDArray[np.float64]) -> None:
        if len(values_s) == 0:
            return
        position = np.log(np.maximum(values_s, self.LOWEST_S) / self.LOWEST_S) / self.LOG_WIDTH
        bins = np.minimum(position.astype(np.int64), self.NUM_BINS - 1)
        self.counts += np.bincount(bins, minlength=self.NUM_BINS)

    def survival(self) -> tuple[list[float], list[float]]:
        """Times in seconds and the share of values above them: few points, more where the tail is."""
        total = int(self.counts.sum())
        if total == 0:
            return [], []
        body = np.linspace(1.0, 0.1, 46)
        tail = np.geomspace(0.1, 1.0 / total, 1 + round(20 * math.log10(max(total / 10, 1.01))))
        below = self.counts.cumsum()
        wanted = (1.0 - np.concatenate((body, tail))) * total
        bins = np.unique(np.searchsorted(below, wanted, side="left").clip(max=self.NUM_BINS - 1))
        shares = 1.0 - below[bins] / total
        edges_s = self.LOWEST_S * np.exp(self.LOG_WIDTH * (bins + 1))
        is_seen = shares > 0  # the largest value: 0 has no place on a logarithmic axis
        return [float(f"{x:.4g}") for x in edges_s[is_seen]], [float(f"{y:.4g}") for y in shares[is_seen]]


@dataclass(frozen=True)
class Comparison:
    """`metrics[policy][name]` [S] and `curves[policy][latency]`, policies in the order asked for."""

    name: str
    what: str
    seeds: tuple[int, ...]
    configs: tuple[Config, ...]  # [S]
    policies: tuple[PolicySpec, ...]
    baseline: str
    metrics: Mapping[str, Mapping[str, NDArray[np.float64]]]
    curves: Mapping[str, Mapping[str, LatencyHistogram]]

    @property
    def names(self) -> list[str]:
        return [policy.kind for policy in self.policies]

    def mean(self, policy: str, metric: str) -> float:
        return float(np.mean(self.metrics[policy][metric]))

    def table(self, policy: str, metrics: Sequence[str]) -> NDArray[np.float64]:
        """[S, M]"""
        return np.stack([self.metrics[policy][metric] for metric in metrics], axis=1)

    @cached_property
    def ratios(self) -> dict[str, dict[str, Ratio]]:
        """By policy and metric, to the baseline."""
        names = list(self.metrics[self.baseline])
        baseline = self.table(self.baseline, names)
        return {
            policy: dict(zip(names, paired_ratios(self.table(policy, names), baseline), strict=True))
            for policy in self.names
        }

    def is_oracle(self, policy: str) -> bool:
        """Whether it sees what no router can know."""
        if any(config.cluster.signals.oracle for config in self.configs):
            return True
        spec = self.policies[self.names.index(policy)]
        oracles = [name for name in spec.weights if SIGNALS[SIGNAL_INDEX[name]].source == "oracle"]
        return policy == "vidur-lor" or bool(oracles)


def choose_policies(names: Sequence[str] | None, baseline: str, first: Prepared) -> list[PolicySpec]:
    """The policies named, or every one that works without configuration; the baseline is always there.

    Options of the configuration's own `policy:` section (weights, limits) hold for all that have them.
    """
    own = first.config.policy
    if names is None:
        left_out = set(NEED_CONFIGURATION)
        if first.workload.session.max(initial=-1) < 0:
            left_out |= set(NEED_SESSIONS)
        names = [name for name in HEURISTICS if name not in left_out or name == own.kind]
    wanted = dict.fromkeys(names if baseline in names else [baseline, *names])
    options = own.model_dump(exclude={"kind", "weights"})
    return [
        parse_spec(
            PolicySpec,
            {"kind": name, **options, "weights": own.weights if name == own.kind else {}},
            "policy",
        )
        for name in wanted
    ]


def compare(
    name: str,
    what: str,
    configs: Sequence[Config],
    policies: Sequence[str] | None = None,
    baseline: str = "least-outstanding",
    base_dir: Path | None = None,
    num_threads: int = 1,
    progress: Shares | None = None,
) -> Comparison:
    """`configs`: the same situation, one a seed."""
    first = prepare(configs[0], base_dir)
    specs = choose_policies(policies, baseline, first)
    if first.config.workload.trace is not None and len(configs) > 1:
        text = f"{name}: a trace is the same for every seed; intervals only show how random ties are broken"
        warnings.warn(PointsmanWarning(text), stacklevel=2)
    metrics: dict[str, dict[str, list[float]]] = {spec.kind: {} for spec in specs}
    curves = {spec.kind: {curve: LatencyHistogram() for curve in CURVES} for spec in specs}
    for runs in _batches(configs, specs, first, base_dir):
        share = len(runs) / (len(configs) * len(specs))
        for run, outcome in zip(runs, _run(runs, num_threads, share, progress), strict=True):
            policy = run.config.policy.kind
            for metric, value in outcome.metrics.items():
                metrics[policy].setdefault(metric, []).append(value)
            for curve, histogram in curves[policy].items():
                histogram.add(latency(outcome.requests, curve))
    _warn_unfinished(name, metrics)
    return Comparison(
        name,
        what,
        tuple(config.seed for config in configs),
        tuple(configs),
        tuple(specs),
        baseline,
        {policy: {key: np.array(row) for key, row in table.items()} for policy, table in metrics.items()},
        curves,
    )


def _batches(
    configs: Sequence[Config], policies: Sequence[PolicySpec], first: Prepared, base_dir: Path | None
) -> Iterator[list[Prepared]]:
    """All runs, seed by seed, in portions of bounded size."""
    runs: list[Prepared] = []
    for index, config in enumerate(configs):
        prepared = first if index == 0 else prepare(config, base_dir)
        for policy in policies:
            runs.append(replace(prepared, config=prepared.config.model_copy(update={"policy": policy})))
            if sum(len(run.workload) for run in runs) >= BATCH_REQUESTS:
                yield runs
                runs = []
    if runs:
        yield runs


def _run(runs: list[Prepared], num_threads: int, share: float, progress: Shares | None) -> list[Outcome]:
    num_requests = sum(len(run.workload) for run in runs)
    advance = (lambda num_done: progress(share * num_done / num_requests)) if progress else None
    return simulate(runs, num_threads, advance)


def _warn_unfinished(name: str, metrics: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
    for policy, table in metrics.items():
        num_unfinished = int(sum(table["num_unfinished"]))
        if num_unfinished:
            text = f"{name}, {policy}: {num_unfinished} requests never finished and count in no latency"
            warnings.warn(PointsmanWarning(text), stacklevel=3)


def geometric_means(comparisons: Sequence[Comparison], metric: str) -> dict[str, Ratio]:
    """For each policy in all comparisons, the geometric mean of its ratios to the baseline.

    Seeds are resampled together: scenarios with the same lengths share them for the same seed.
    """
    in_all = [name for name in comparisons[0].names if all(name in one.names for one in comparisons)]
    means = {}
    for policy in in_all:
        pairs = [(one.table(policy, [metric]), one.table(one.baseline, [metric])) for one in comparisons]
        ratios = [np.log(ratios_of_means(values, baseline)) for values, baseline in pairs]
        samples = [np.log(resampled_ratios(values, baseline)) for values, baseline in pairs]
        mean, spread = np.exp(np.mean(ratios, axis=0)), np.exp(np.mean(samples, axis=0))
        means[policy] = with_intervals(mean, spread, len(comparisons[0].seeds))[0]
    return means
