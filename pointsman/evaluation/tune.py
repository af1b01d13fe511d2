"""The weights of `linear-score`, found by search: a policy in minutes, and the rival of every trained one; or
the parameters of another heuristic.

A score is a weighted sum of signals, lowest wins, so only the direction of the weights matters. The search
(evolution.py) moves in units of each signal's typical spread between replicas, measured first; it minimises
the geometric mean, over situations and seeds, of the cost relative to least-outstanding on the same arrivals,
subject to the objective's limits on tails: what is beyond them counts as cost, several times.
Every generation sees other seeds, all of them from `SELECTION_SEEDS`; the last word has a block of them that
the search never saw, so a lucky generation is not mistaken for a good policy.

A parameter is searched for in its own range, from what is usual and a few points drawn at random.

A sum cannot divide a load by a replica's speed. Where speeds differ, that is left to the signals in seconds
(`prefill_backlog_s`, `work_s`), which are loads times the time each takes there, and to the static ones
(`step_floor_s`, `prefill_s_per_token`), with which a slow replica starts at a disadvantage.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pointsman.evaluation.compare import BATCH_REQUESTS
from pointsman.evaluation.evolution import EvolutionStrategy
from pointsman.experiments.objective import Objective
from pointsman.experiments.own import (
    refuse_trace_of_nobody,
    replayed,
    selection_episodes,
    trained_on,
    training_episode,
)
from pointsman.experiments.running import run_to_end
from pointsman.experiments.scenarios import SELECTION_SEEDS, Scenario
from pointsman.experiments.simulate import Prepared, Workers, prepare, simulate
from pointsman.routing.heuristics import HEURISTICS
from pointsman.routing.policy import PolicySpec, PolicyTables
from pointsman.routing.signals import SIGNAL_INDEX
from pointsman.simulator.cluster import Clusters

BASELINE = PolicySpec(kind="least-outstanding")

TUNED_SIGNALS = (
    "outstanding",
    "waiting",
    "remaining_tokens",
    "kv_use",
    "prefill_backlog_s",
    "work_s",
    "oldest_wait_s",
    "ttft_s",
    "step_s",
    "scraped_waiting",
    "step_floor_s",
    "prefill_s_per_token",
    "expected_hit_tokens",
)

# In units of each signal's spread. The first is least-outstanding itself, and all have some of it.
STARTS: tuple[Mapping[str, float], ...] = (
    {"outstanding": 1.0},
    {"prefill_backlog_s": 1.0, "outstanding": 0.3},
    {"work_s": 1.0, "prefill_backlog_s": 0.7, "outstanding": 0.3, "waiting": 0.3},
)
HITS = "expected_hit_tokens"
PREFIX_START = {"prefill_backlog_s": 0.7, "outstanding": 0.5, HITS: -0.5}
STEP_SIZE = 0.2  # of weights that together have length 1, and of a parameter's range
NUM_DRAWN_STARTS = 7  # of parameters, beside the usual ones
STRETCH = 4.0  # half of the search is for the lowest eighth of a parameter's range
LINEAR_SCORE = "linear-score"

REQUESTS_PER_SCORE = 32_000  # a policy is judged by at least as many, over situations and seeds
MIN_SEEDS = 2
MAX_KEPT_REQUESTS = 20_000_000  # of prepared workloads; beyond, they are prepared again when needed
NUM_BLOCKS = 8  # of seeds, one a generation, then the first again: preparing a workload takes time, too
NUM_CHECK_BLOCKS = 4

# A scenario is searched on in short: policies differ by as much in a quarter of its requests.
SHORTENED = 4
TRACE_REQUESTS = 2000  # of a window of a trace

Floats = NDArray[np.float64]
Situation = Callable[[int], Prepared]  # what is to be served, for a seed
Progress = Callable[[float], None]  # gets what share of the budget was used since the last call


def tunable_kinds() -> list[str]:
    """What `tune` can improve: weights, and heuristics with parameters."""
    return [LINEAR_SCORE, *(name for name, one in HEURISTICS.items() if one.parameters)]


@dataclass(frozen=True)
class Budget:
    """Simulated decisions, or minutes; with decisions, the result depends on nothing but the seed."""

    decisions: int | None = None
    minutes: float | None = None

    def share(self, num_decisions: int, elapsed_s: float) -> float:
        if self.decisions is not None:
            return num_decisions / self.decisions
        assert self.minutes is not None
        return elapsed_s / (60 * self.minutes)


@dataclass(frozen=True)
class Tuned:
    policy: PolicySpec
    influence: dict[str, float]  # of a signal: its weight times its spread, as a share of all; or nothing
    cost_ratio: (
        float  # to least-outstanding, geometric mean over situations and `check_seeds`; NaN if stopped
    )
    breaches: Mapping[str, tuple[float, ...]]  # by limit: how far beyond it on each situation, as a logarithm
    search_seeds: range
    check_seeds: range
    num_generations: int
    num_decisions: int

    @property
    def is_stopped(self) -> bool:
        """Whether Ctrl-C ended the search, so that nothing has checked its result."""
        return math.isnan(self.cost_ratio)


def shortened(scenario: Scenario, overrides: Sequence[str] = ()) -> Situation:
    """Unless the user says how long it is to be."""
    lengths = ("workload=", "workload.requests=", "workload.duration_s=")
    num_requests = scenario.config(0, overrides).workload.requests
    if scenario.path is None and not any(override.startswith(lengths) for override in overrides):
        assert num_requests is not None
        overrides = [*overrides, f"workload.requests={num_requests // SHORTENED}"]
    return lambda seed: prepare(scenario.config(seed, overrides), scenario.folder)


def search_and_check(scenario: Scenario, overrides: Sequence[str] = ()) -> tuple[Situation, Situation]:
    """What weights are searched on, and what has the last word: of a trace, two parts of it."""
    refuse_trace_of_nobody(scenario, overrides)
    if scenario.path is None or replayed(scenario.config(0, overrides)) is None:
        one = shortened(scenario, overrides)
        return one, one
    blocks = selection_episodes(scenario, NUM_CHECK_BLOCKS * MIN_SEEDS, overrides)
    num_requests = min(TRACE_REQUESTS, trained_on(scenario, overrides))

    def search(seed: int) -> Prepared:
        assert scenario.path is not None
        rng = np.random.default_rng([seed, 0x5EA7])
        return training_episode(scenario.path, num_requests, 1.0, seed, rng, overrides)

    return search, lambda seed: blocks[seed % len(blocks)]


def tune(
    situations: Sequence[Situation],
    objective: Objective,
    budget: Budget,
    seed: int = 0,
    workers: Workers = 1,
    progress: Progress | None = None,
    checks: Sequence[Situation] | None = None,
    kind: str = LINEAR_SCORE,
) -> Tuned:
    """Search until the budget is used up, then choose between the start, the last mean and their average.

    Of a `kind` other than linear-score its parameters are searched for; the usual ones may win, too.

    `checks` are what that choice is made on, where it is not the same as what is searched on. Ctrl-C ends the
    search, from its first generation on: the result is what it has come to, unchecked.
    """
    meter = _Meter(budget, progress)
    bench = Bench(situations, objective, workers)
    judge = bench if checks is None else Bench(checks, objective, workers)
    block = max(MIN_SEEDS, REQUESTS_PER_SCORE // bench.num_requests)
    block = min(block, len(SELECTION_SEEDS) // (NUM_BLOCKS + NUM_CHECK_BLOCKS))
    search_seeds = SELECTION_SEEDS[: NUM_BLOCKS * block]
    check_seeds = SELECTION_SEEDS[-NUM_CHECK_BLOCKS * block :]
    space: WeightSpace | ParameterSpace
    if kind == LINEAR_SCORE:
        space = WeightSpace(bench.signal_spreads(search_seeds[:block]))
    else:
        space = ParameterSpace(kind)
    scores = bench.scores([space.policy(point) for point in space.starts], search_seeds[:block])
    start = space.starts[int(np.argmin(scores))]
    search = EvolutionStrategy(start, STEP_SIZE, np.random.default_rng(seed))
    average, num_generations, share = start, 0, 0.0
    best, cost_ratio = average, math.nan
    breaches: dict[str, tuple[float, ...]] = {}
    try:
        # Room for another generation, and for the choice at the end, which is as much work.
        while share * (num_generations + 2) <= max(num_generations, 1):
            first = num_generations * block % len(search_seeds)
            policies = [space.policy(point) for point in search.ask()]
            search.tell(bench.scores(policies, search_seeds[first : first + block]))
            space.settle(search)
            num_generations += 1
            # Later means count more. The average of noisy steps is often better than the last of them.
            average = best = average + 2 / (num_generations + 1) * (search.mean - average)
            share = meter.share(bench.num_decisions)
        finalists = [start, search.mean, average, *space.always_judged]
        judged = judge.judge([space.policy(point) for point in finalists], check_seeds)
        chosen = int(np.argmin(judged.score))
        best, cost_ratio = finalists[chosen], math.exp(float(judged.cost[chosen]))
        breaches = {metric: tuple(rows[:, chosen].tolist()) for metric, rows in judged.breaches.items()}
    except KeyboardInterrupt:
        if num_generations == 0:
            raise
    meter.finish()
    return Tuned(
        space.policy(best),
        space.influence(best),
        cost_ratio,
        breaches,
        search_seeds,
        check_seeds,
        num_generations,
        bench.num_decisions + (judge.num_decisions if judge is not bench else 0),
    )


class _Meter:
    """How much of the budget is used, shown as it grows."""

    def __init__(self, budget: Budget, progress: Progress | None) -> None:
        self._budget = budget
        self._progress = progress
        self._started = time.perf_counter()
        self._shown = 0.0

    def share(self, num_decisions: int) -> float:
        share = self._budget.share(num_decisions, time.perf_counter() - self._started)
        self._show(min(share, 1.0))
        return share

    def finish(self) -> None:
        self._show(1.0)

    def _show(self, share: float) -> None:
        if self._progress:
            self._progress(share - self._shown)
        self._shown = share


class WeightSpace:
    """Points [D] of length 1: the weights of the signals that differ at all, in units of their spread."""

    always_judged: Sequence[Floats] = ()

    def __init__(self, spreads: Mapping[str, float]) -> None:
        if spreads["outstanding"] == 0:  # hardly any load: a policy needs some signal all the same
            spreads = {**spreads, "outstanding": 1.0}
        self.names = [name for name in TUNED_SIGNALS if spreads[name] > 0]
        self._spreads = np.array([spreads[name] for name in self.names])

    @property
    def starts(self) -> list[Floats]:
        is_shared = HITS in self.names  # prompts have prefixes in common
        return [self.point(start) for start in (*STARTS, *([PREFIX_START] if is_shared else []))]

    def settle(self, search: EvolutionStrategy) -> None:
        search.rescale()

    def point(self, weights: Mapping[str, float]) -> Floats:
        point = np.array([weights.get(name, 0.0) for name in self.names])
        normed: Floats = point / np.linalg.norm(point)
        return normed

    def policy(self, point: Floats) -> PolicySpec:
        """Rounded to what a person would read: the policy that is judged is the one that is written."""
        weights = [float(f"{weight:.4g}") for weight in point / self._spreads]
        named = {name: weight for name, weight in zip(self.names, weights, strict=True) if weight}
        return PolicySpec(kind="linear-score", weights=named)

    def influence(self, point: Floats) -> dict[str, float]:
        shares = np.abs(point) / np.abs(point).sum()
        return {name: float(share) for name, share in zip(self.names, shares, strict=True)}


class ParameterSpace:
    """Points [D] of the unit cube: where each parameter of a heuristic stands in its range."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._parameters = HEURISTICS[kind].parameters
        usual = [(one.default - one.lowest) / (one.highest - one.lowest) for one in self._parameters]
        self._usual: Floats = np.log1p(np.array(usual) * math.expm1(STRETCH)) / STRETCH
        self.always_judged: Sequence[Floats] = (self._usual,)

    @property
    def starts(self) -> list[Floats]:
        drawn = np.random.default_rng(0).random((NUM_DRAWN_STARTS, len(self._parameters)))
        return [self._usual, *drawn]

    def settle(self, search: EvolutionStrategy) -> None:
        search.mean = search.mean.clip(0.0, 1.0)

    def policy(self, point: Floats) -> PolicySpec:
        """Rounded to what a person would read."""
        shares = np.expm1(STRETCH * point.clip(0.0, 1.0)) / math.expm1(STRETCH)
        values = {
            one.name: float(f"{one.lowest + share * (one.highest - one.lowest):.3g}")
            for one, share in zip(self._parameters, shares.tolist(), strict=True)
        }
        return PolicySpec(kind=self._kind, parameters=values)

    def influence(self, point: Floats) -> dict[str, float]:
        return {}


@dataclass(frozen=True)
class Judged:
    """Policies [P] on the same arrivals."""

    cost: Floats  # [P] logarithm, relative to least-outstanding, mean over situations and seeds
    penalty: Floats  # [P] for breaches of limits, mean over the same
    breaches: Mapping[str, Floats]  # [situations, P] by limit: how far beyond, a logarithm, mean over seeds

    @property
    def score(self) -> Floats:
        score: Floats = self.cost + self.penalty
        return score


class Bench:
    """Runs policies on situations, and counts the decisions that takes."""

    def __init__(self, situations: Sequence[Situation], objective: Objective, workers: Workers) -> None:
        self.num_decisions = 0
        self._situations = situations
        self._objective = objective
        self._workers = workers
        self._num_kept = 0
        self._prepared: dict[tuple[int, int], Prepared] = {}
        self._references: dict[tuple[int, int], dict[str, dict[str, Floats]]] = {}

    @property
    def num_requests(self) -> int:
        """How many requests all situations have, for one seed."""
        return sum(len(self._prepare((index, 0)).workload) for index in range(len(self._situations)))

    def scores(self, policies: Sequence[PolicySpec], seeds: Sequence[int]) -> Floats:
        """[P] what to minimise: the logarithm of the cost, and what breaches of limits add to it."""
        return self.judge(policies, seeds).score

    def judge(self, policies: Sequence[PolicySpec], seeds: Sequence[int]) -> Judged:
        """What policies cost and which limits they break, all on the same arrivals."""
        cost, penalty = np.zeros(len(policies)), np.zeros(len(policies))
        broken = {
            limit.metric: np.zeros((len(self._situations), len(policies))) for limit in self._objective.limits
        }
        keys = [(index, seed) for seed in seeds for index in range(len(self._situations))]
        for key in keys:
            if key not in self._references:
                names = dict.fromkeys((BASELINE.kind, *self._objective.references))
                self._references[key] = {name: self._measure([PolicySpec(kind=name)], key) for name in names}
            references, found = self._references[key], self._measure(policies, key)
            cost += np.log(found["cost"] / references[BASELINE.kind]["cost"])
            breaches = self._objective.breaches(found, references)
            penalty += [
                self._objective.penalty({name: row[p : p + 1] for name, row in breaches.items()})
                for p in range(len(policies))
            ]
            for metric, breach in breaches.items():
                broken[metric][key[0]] += breach / len(seeds)
        return Judged(cost / len(keys), penalty / len(keys), broken)

    def _measure(self, policies: Sequence[PolicySpec], key: tuple[int, int]) -> dict[str, Floats]:
        """[P] the cost and the P99s."""
        prepared = self._prepare(key)
        portion = max(1, BATCH_REQUESTS // len(prepared.workload))
        rows: list[dict[str, float]] = []
        for first in range(0, len(policies), portion):
            some = policies[first : first + portion]
            for outcome in simulate([prepared] * len(some), self._workers, policies=some):
                rows.append(outcome.metrics | {"cost": self._objective.cost(outcome.metrics)})
                self.num_decisions += int(outcome.metrics["decisions"])
        return {name: np.array([row[name] for row in rows]) for name in ("cost", "ttft_p99_s", "e2e_p99_s")}

    def _prepare(self, key: tuple[int, int]) -> Prepared:
        if key in self._prepared:
            return self._prepared[key]
        index, seed = key
        prepared = self._situations[index](seed)
        self._num_kept += len(prepared.workload)
        if self._num_kept <= MAX_KEPT_REQUESTS:
            self._prepared[key] = prepared
        return prepared

    def signal_spreads(self, seeds: Sequence[int]) -> dict[str, float]:
        """How much each tuned signal differs between replicas while least-outstanding routes.

        The geometric mean over the situations in which it differs at all; 0 if there is none.
        """
        rows = [SIGNAL_INDEX[name] for name in TUNED_SIGNALS]
        spreads = []
        for seed in seeds:
            for index in range(len(self._situations)):
                spreads.append(self._spread(self._prepare((index, seed)))[rows])
        table = np.array(spreads)
        is_seen = table > 1e-12
        logs = np.log(table, where=is_seen, out=np.zeros_like(table)).sum(axis=0) / is_seen.sum(axis=0).clip(
            1
        )
        means = np.where(is_seen.any(axis=0), np.exp(logs), 0.0)
        return {name: float(mean) for name, mean in zip(TUNED_SIGNALS, means, strict=True)}

    def _spread(self, prepared: Prepared) -> Floats:
        """[signals] standard deviation over replicas, mean over the run."""
        config = prepared.config
        clusters = Clusters([config.cluster], [prepared.plans], [prepared.workload], [config.seed])
        # The weight of a derived signal, too small to matter, has them all computed.
        watched = PolicySpec(kind="linear-score", weights={"outstanding": 1.0, "work_s": 1e-9})
        seen: list[Floats] = []
        run_to_end(
            clusters,
            PolicyTables([watched], len(prepared.plans)),
            progress=lambda _: None,
            on_pause=lambda: seen.append(clusters.signals[0].std(axis=1)),
        )
        self.num_decisions += int(clusters.sims[0].num_decisions)
        mean: Floats = np.mean(seen, axis=0)
        return mean
