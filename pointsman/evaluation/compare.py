"""Several policies on the same arrivals: who serves them better, by how much, and how sure that is.

Common random numbers: for each seed the workload is drawn once, and every policy gets it. What is compared is
a metric's mean over seeds (so a P99 is the mean of the runs' P99), as a ratio to the baseline's.

A trace is the same for every seed. Its requests are cut into blocks in the order of their arrival, which
stand for the seeds; what only a whole run has (rates, preemptions) has no interval then. A short trace is
replayed several times, with neighbours in other places, and a block's value is the mean of its replays:
what a replay owes to chance would be most of what an interval shows.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

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
from pointsman.experiments.metrics import HitsOverTime, hits_over_time, latency, measure_blocks
from pointsman.experiments.objective import Objective
from pointsman.experiments.own import num_blocks_of, num_replays_of, quietly_prepared, reordered, replayed
from pointsman.experiments.setting import Setting, setting_of
from pointsman.experiments.simulate import Outcome, Prepared, Workers, prepare, simulate_digests
from pointsman.routing.heuristics import HEURISTICS
from pointsman.routing.policy import PolicySpec
from pointsman.routing.signals import SIGNAL_INDEX, SIGNALS
from pointsman.routing.sources import SHIPPED
from pointsman.spec import parse_spec

# What a table shows first: the two latencies a user feels, their mean and their tail.
HEADLINES = ("ttft_mean_s", "ttft_p99_s", "e2e_mean_s", "e2e_p99_s")
COST = "cost"  # where an objective is asked for, also what it says
CURVES = ("ttft", "e2e")

NEED_CONFIGURATION = ("linear-score",)
NEED_SESSIONS = ("session-affinity",)
NEED_PREFIXES = (
    "cache-aware",
    "cache-aware-nearby",
    "prefix-hash",
    "weighted-scorer",
    "load-aware",
    "overlap-cost",
)  # that prompts have in common

MIN_LIFETIMES = 5  # that a run lasts, in mean end-to-end latencies: then most of it is not filling up

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
    """`metrics[policy][name]` [S] and `curves[policy][latency]`, policies in the order asked for.

    S samples: one a seed; of a trace one a block, which may be `num_blocks` of the only run (its own metrics
    are [1]), and each is the mean of `num_replays`.
    """

    name: str
    what: str
    seeds: tuple[int, ...]
    configs: tuple[Config, ...]  # [S]
    policies: tuple[PolicySpec, ...]
    baseline: str
    metrics: Mapping[str, Mapping[str, NDArray[np.float64]]]
    curves: Mapping[str, Mapping[str, LatencyHistogram]]
    num_blocks: int = 1
    num_replays: int = 1
    setting: Setting | None = None  # None on real servers, whose capacity nobody knows
    hits: Mapping[str, HitsOverTime] = field(default_factory=dict)  # first sample, by policy; if simulated

    @property
    def num_samples(self) -> int:
        return len(self.seeds) * self.num_blocks

    @property
    def names(self) -> list[str]:
        return [policy.label for policy in self.policies]

    @property
    def headlines(self) -> tuple[str, ...]:
        return (*HEADLINES, COST) if COST in self.metrics[self.baseline] else HEADLINES

    def mean(self, policy: str, metric: str) -> float:
        return float(np.mean(self.metrics[policy][metric]))

    def table(self, policy: str, metrics: Sequence[str]) -> NDArray[np.float64]:
        """[S, M]"""
        return np.stack([self.metrics[policy][metric] for metric in metrics], axis=1)

    @cached_property
    def ratios(self) -> dict[str, dict[str, Ratio]]:
        """Ratios to the baseline, by policy and metric."""
        return {policy: self.ratios_between(policy, self.baseline) for policy in self.names}

    def ratios_between(self, policy: str, other: str) -> dict[str, Ratio]:
        """Ratios of one policy's means to another's, by metric."""
        found: dict[str, Ratio] = {}
        by_length = sorted(self.metrics[policy], key=lambda name: len(self.metrics[policy][name]))
        for _, group in groupby(by_length, lambda name: len(self.metrics[policy][name])):
            names = list(group)
            ratios = paired_ratios(self.table(policy, names), self.table(other, names))
            found |= zip(names, ratios, strict=True)
        return {name: found[name] for name in self.metrics[policy]}

    def is_oracle(self, policy: str) -> bool:
        """Whether it sees what no router can know."""
        if any(config.cluster.signals.oracle for config in self.configs):
            return True
        spec = self.policies[self.names.index(policy)]
        oracles = [name for name in spec.weights if SIGNALS[SIGNAL_INDEX[name]].source == "oracle"]
        return spec.kind == "vidur-lor" or bool(oracles)


def choose_policies(names: Sequence[str] | None, baseline: str, first: Prepared) -> list[PolicySpec]:
    """The policies named, or every one that works without configuration, `default` among them; the baseline
    is always there.

    Each is there once, under a name of its own.
    """
    own = first.config.policy
    if names is None:
        left_out = set(NEED_CONFIGURATION)
        if first.workload.session.max(initial=-1) < 0:
            left_out |= set(NEED_SESSIONS)
        if not first.workload.is_shared:
            left_out |= set(NEED_PREFIXES)
        names = [name for name in HEURISTICS if name not in left_out or name == own.kind]
        names += [*SHIPPED]
        names += [own.label] if own.kind not in HEURISTICS else []
    wanted: dict[str, PolicySpec] = {}
    for spec in (policy_named(name, own) for name in names):
        wanted.setdefault(_identity(spec), spec)
    first_spec = policy_named(baseline, own)
    if _identity(first_spec) not in wanted:
        wanted = {_identity(first_spec): first_spec, **wanted}
    return _with_unique_names(list(wanted.values()))


def _with_unique_names(specs: Sequence[PolicySpec]) -> list[PolicySpec]:
    """Two files of the same name become `tuned` and `tuned-2`."""
    renamed: dict[str, PolicySpec] = {}
    for spec in specs:
        name, number = spec.label, 2
        while name in renamed:
            name, number = f"{spec.label}-{number}", number + 1
        renamed[name] = spec if name == spec.label else spec.model_copy(update={"name": name})
    return list(renamed.values())


def policy_named(name: str, own: PolicySpec) -> PolicySpec:
    """A policy by its name or path. Limits of the configuration's `own` policy hold for all heuristics."""
    if name in (own.kind, own.label):
        return own
    options = (
        own.model_dump(include={"kv_limit", "prefill_limit_tokens", "stream_limit", "small_first"})
        if name in HEURISTICS
        else {}
    )
    return parse_spec(PolicySpec, {"kind": name, **options}, "policy")


def _identity(policy: PolicySpec) -> str:
    return policy.model_dump_json(exclude={"name"})


def compare(
    name: str,
    what: str,
    configs: Sequence[Config],
    policies: Sequence[str] | None = None,
    baseline: str = "least-outstanding",
    base_dir: Path | None = None,
    workers: Workers = 1,
    progress: Shares | None = None,
    objective: Objective | None = None,
) -> Comparison:
    """`configs`: the same situation, one a seed. With an objective, its `cost` is one of the metrics."""
    first = prepare(configs[0], base_dir)
    specs = choose_policies(policies, baseline, first)
    wanted = _identity(policy_named(baseline, first.config.policy))
    traces, num_blocks, num_replays = [replayed(config) for config in configs], 1, 1
    if traces[0] is not None:
        if all(trace == traces[0] for trace in traces):
            num_blocks = num_blocks_of(len(first.workload), len(configs))
            configs = configs[:1]
        num_replays = num_replays_of(len(configs) * len(first.workload))
    metrics: dict[str, dict[str, list[float]]] = {spec.label: {} for spec in specs}
    curves = {spec.label: {curve: LatencyHistogram() for curve in CURVES} for spec in specs}
    hits: dict[str, HitsOverTime] = {}
    spans_s: list[float] = []
    gaps_s: list[float] = []
    for runs in _batches(configs, specs, first, base_dir, num_replays):
        share = len(runs) / (len(configs) * num_replays * len(specs))
        digest = partial(_digested, num_blocks=num_blocks, first_seed=first.config.seed)
        for run, digested in zip(runs, _run(runs, digest, workers, share, progress), strict=True):
            policy = run.config.policy.label
            if policy == specs[0].label:
                spans_s.append(float(run.workload.arrived_at[-1] - run.workload.arrived_at[0]))
                gaps_s.append(spans_s[-1] / max(len(run.workload) - 1, 1))
            for metric, values in digested.samples.items():
                metrics[policy].setdefault(metric, []).extend(values)
            for curve, histogram in curves[policy].items():
                histogram.counts += digested.curves[curve].counts
            if digested.hits is not None:
                hits.setdefault(policy, digested.hits)  # blocks of a trace share a seed: the first one's
    tables = {
        policy: {key: _mean_of_replays(row, len(configs), num_replays) for key, row in table.items()}
        for policy, table in metrics.items()
    }
    _warn_unfinished(name, tables)
    if objective is not None:
        tables = {policy: table | {COST: objective.cost(table)} for policy, table in tables.items()}
    label = next(spec.label for spec in specs if _identity(spec) == wanted)
    if traces[0] is not None:
        warn_short_runs(name, spans_s, tables[label])
    return Comparison(
        name,
        what,
        tuple(config.seed for config in configs),
        tuple(configs),
        tuple(specs),
        label,
        tables,
        curves,
        num_blocks,
        num_replays,
        setting_of(first, configs, gaps_s, base_dir),
        hits,
    )


class _Digested(NamedTuple):
    """What a comparison keeps of a run."""

    samples: dict[str, Sequence[float]]
    curves: dict[str, LatencyHistogram]
    hits: HitsOverTime | None  # of the first seed, where prompts share prefixes


def _digested(run: Prepared, outcome: Outcome, num_blocks: int, first_seed: int) -> _Digested:
    curves = {curve: LatencyHistogram() for curve in CURVES}
    for curve, histogram in curves.items():
        histogram.add(latency(outcome.requests, curve))
    hits = None
    if "hit_share" in outcome.metrics and run.config.seed == first_seed:
        hits = hits_over_time(outcome.requests, len(outcome.replicas))
    return _Digested(_samples(outcome, run.config, num_blocks), curves, hits)


def _samples(outcome: Outcome, config: Config, num_blocks: int) -> dict[str, Sequence[float]]:
    whole: dict[str, Sequence[float]] = {metric: [value] for metric, value in outcome.metrics.items()}
    if num_blocks == 1:
        return whole
    blocks = measure_blocks(outcome.requests, config.slo, num_blocks)
    return whole | {metric: values.tolist() for metric, values in blocks.items()}


def _mean_of_replays(values: Sequence[float], num_configs: int, num_replays: int) -> NDArray[np.float64]:
    """[S] from what `_batches` gave, one replay of a seed or block after the other."""
    replays = np.array(values, np.float64).reshape(num_configs, num_replays, -1)
    means: NDArray[np.float64] = replays.mean(axis=1).reshape(-1)
    return means


def _batches(
    configs: Sequence[Config],
    policies: Sequence[PolicySpec],
    first: Prepared,
    base_dir: Path | None,
    num_replays: int,
) -> Iterator[list[Prepared]]:
    """All runs, seed by seed and each replay by replay, in portions of bounded size."""
    runs: list[Prepared] = []
    for index, config in enumerate(configs):
        prepared = first if index == 0 else quietly_prepared(config, base_dir)
        for number in range(num_replays):
            again = reordered(prepared, number)
            for policy in policies:
                runs.append(replace(again, config=again.config.model_copy(update={"policy": policy})))
                if sum(len(run.workload) for run in runs) >= BATCH_REQUESTS:
                    yield runs
                    runs = []
    if runs:
        yield runs


def _run(
    runs: list[Prepared],
    digest: Callable[[Prepared, Outcome], _Digested],
    workers: Workers,
    share: float,
    progress: Shares | None,
) -> list[_Digested]:
    num_requests = sum(len(run.workload) for run in runs)
    advance = (lambda num_done: progress(share * num_done / num_requests)) if progress else None
    return simulate_digests(runs, digest, workers, advance)


def _warn_unfinished(name: str, tables: Mapping[str, Mapping[str, NDArray[np.float64]]]) -> None:
    for policy, table in tables.items():
        num_unfinished = math.ceil(table["num_unfinished"].sum())
        if num_unfinished:
            text = f"{name}, {policy}: {num_unfinished} requests never finished and count in no latency"
            warnings.warn(PointsmanWarning(text), stacklevel=3)


def warn_short_runs(name: str, spans_s: Sequence[float], baseline: Mapping[str, NDArray[np.float64]]) -> None:
    """A run of a trace begins with an empty cluster, which fills while the first requests are served."""
    span_s, e2e_s = float(np.mean(spans_s)), float(np.mean(baseline["e2e_mean_s"]))
    if span_s < MIN_LIFETIMES * e2e_s:
        text = (
            f"{name}: the trace lasts {span_s:.2g} s, a request {e2e_s:.2g} s, and the cluster is empty when "
            "it begins, so the load looks lighter than it is; use a longer trace"
        )
        warnings.warn(PointsmanWarning(text), stacklevel=3)


def geometric_means(comparisons: Sequence[Comparison], metric: str) -> dict[str, Ratio]:
    """For each policy in all comparisons, the geometric mean of its ratios to the baseline."""
    in_all = [name for name in comparisons[0].names if all(name in one.names for one in comparisons)]
    baseline = comparisons[0].baseline
    return {policy: geometric_mean(comparisons, [metric], policy, baseline)[0] for policy in in_all}


def geometric_mean(
    comparisons: Sequence[Comparison], metrics: Sequence[str], policy: str, other: str
) -> list[Ratio]:
    """For each metric, of one policy's ratios to another's. A trace has some for each block, others once."""
    return [
        mean_ratios([(one.table(policy, [metric]), one.table(other, [metric])) for one in comparisons])[0]
        for metric in metrics
    ]


def cost_ratio(comparisons: Sequence[Comparison], objective: Objective, policy: str, other: str) -> Ratio:
    """The geometric mean of one policy's cost over another's."""
    pairs = [
        (objective.cost(one.metrics[policy])[:, None], objective.cost(one.metrics[other])[:, None])
        for one in comparisons
    ]
    return mean_ratios(pairs)[0]


def mean_ratios(pairs: Sequence[tuple[NDArray[np.float64], NDArray[np.float64]]]) -> list[Ratio]:
    """[M] geometric means of the ratios of pairs [S, M].

    Seeds are resampled together: scenarios with the same lengths share them for the same seed.
    """
    with np.errstate(divide="ignore"):  # a share of 0, such as of held requests
        ratios = [np.log(ratios_of_means(values, others)) for values, others in pairs]
        samples = [np.log(resampled_ratios(values, others)) for values, others in pairs]
    mean, spread = np.exp(np.mean(ratios, axis=0)), np.exp(np.mean(samples, axis=0))
    return with_intervals(mean, spread, min(len(values) for values, _ in pairs))
