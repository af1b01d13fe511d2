"""How much traffic a cluster takes within its service level, by policy, and how many servers a target takes.

Goodput is the highest rate of arrivals at which a share of the requests (99 %) still meets the service level:
first token and time per token both in time. It is found by bisection over the load, on the same seeds for all
policies, or on the trace replayed faster or slower. Its interval comes from resampling seeds, or blocks of
the trace, at the loads that were tried. What counts of a run is its steady part (steady.py).

Capacity bounds the rate, as what is above it lasts only as long as a run is short; but not where prompts
share prefixes, as it is what the servers do with nothing cached. A rate at which ever more requests wait is
not served, however wide the limits are.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pointsman.config import Config
from pointsman.errors import InputError, PointsmanWarning
from pointsman.evaluation.bootstrap import Ratio, expanded_tail, resamples, with_intervals
from pointsman.evaluation.steady import GROWING, WARM_UP, growth, num_needed, stretch_of
from pointsman.experiments.capacity import capacity_rps
from pointsman.experiments.checks import MIN_REQUESTS
from pointsman.experiments.metrics import in_time
from pointsman.experiments.own import num_blocks_of, replayed
from pointsman.experiments.simulate import Outcome, Prepared, simulate
from pointsman.routing.policy import PolicySpec
from pointsman.simulator.plan import ReplicaPlan, plan_replicas
from pointsman.simulator.spec import ReplicaGroup
from pointsman.workload import Workload, build_workload
from pointsman.workload.replay import num_rows_of, repeated, take
from pointsman.workload.spec import ClosedArrivals, Rated

FIRST_LOAD = 0.9  # most clusters serve about that
HIGHEST_LOAD = 0.99  # of capacity: what is nearer to it needs runs of hours to tell
HIGHEST_SHARED_LOAD = 64.0  # where prompts share prefixes
RESOLUTION = 0.01  # of the load
NUM_STEPS = 6  # that a search takes, or so
MAX_BLOCKS = 16
BATCH_REQUESTS = 2_000_000  # simulated at once, to bound the memory
ENOUGH_REQUESTS = 240_000  # to tell whether so many servers suffice: six of the shortest runs
MAX_ADDED = 512  # servers of a kind: more are no answer

Floats = NDArray[np.float64]
Advance = Callable[[float], None]  # gets the share of the work done since its last call


@dataclass(frozen=True)
class Goodput:
    """Requests/s within the service level, with its interval, and what was tried to find it."""

    rate_rps: float  # 0: none of those tried
    low: float
    high: float
    capacity_rps: float
    tried_rps: Floats  # [L], ascending
    good_shares: Floats  # [L] of the requests, at each rate; 0 where the queue grows
    resampled_rps: Floats  # [NUM_RESAMPLES], NaN where samples do not tell
    num_samples: int  # seeds or blocks
    is_highest_tried: bool  # all that was tried is served in time

    @property
    def serves_none(self) -> bool:
        """Too many requests are late at any rate."""
        return self.rate_rps == 0

    @property
    def load(self) -> float:
        return self.rate_rps / self.capacity_rps


def best_of(goodputs: Mapping[str, Goodput], baseline: str) -> str:
    """The policy with the highest goodput; the baseline, if none has a higher one."""
    return max(goodputs, key=lambda name: (goodputs[name].rate_rps, name == baseline))


class Case(NamedTuple):
    """A cluster under a policy."""

    config: Config
    policy: PolicySpec


class Planner:
    """Runs cases at any rate; `seeds` are those of made-up traffic."""

    def __init__(
        self, config: Config, share: float, seeds: Sequence[int], base_dir: Path | None, num_threads: int
    ) -> None:
        if isinstance(config.workload.arrivals, ClosedArrivals):
            remedy = "use poisson arrivals at the rate that the users reach"
            raise InputError("workload.arrivals.kind", "closed", "has no rate to change", remedy)
        self.config = config.model_copy(
            update={"cluster": config.cluster.model_copy(update={"events": ()})}
        )  # what happens at some second of a run says nothing of other rates
        self.share = share
        self.seeds = seeds if replayed(config) is None else seeds[:1]
        self._base_dir, self._num_threads = base_dir, num_threads
        self._plans: dict[str, list[ReplicaPlan]] = {}

    def capacity(self, config: Config) -> float:
        found = self._capacity(config)
        if found <= 0:
            problem, remedy = "no server holds any of these requests", "see `pointsman hardware`"
            raise InputError("cluster.model", config.cluster.model, problem, remedy)
        return found

    @cached_property
    def own_rate_rps(self) -> float:
        """How fast its traffic arrives as it is."""
        times = self._traffic.arrived_at
        span_s = float(times[-1] - times[0])
        trace = replayed(self.config)
        if span_s <= 0:
            them = "all its requests arrive at the same time" if len(times) > 1 else "it has one request"
            where, value = ("workload.trace", trace.path) if trace else ("workload.requests", len(times))
            remedy = "use a longer trace" if trace else "give more"
            raise InputError(where, value, f"{them}, so there is no rate to change", remedy)
        if trace is not None and len(times) < MIN_REQUESTS:
            text = f"{trace.path}: {len(times)} requests are a burst, not a rate; use a longer trace"
            warnings.warn(PointsmanWarning(text), stacklevel=2)
        return (len(times) - 1) / span_s

    @property
    def is_shared(self) -> bool:
        """Prompts have prefixes in common, so that servers may do more than their capacity."""
        return self._traffic.is_shared

    def goodputs(self, cases: Sequence[Case], advance: Advance | None = None) -> list[Goodput]:
        """All cases step by step together, so that they share the threads."""
        capacities = [self.capacity(case.config) for case in cases]
        highest = math.inf if self.is_shared else HIGHEST_LOAD
        searches = [_Search(self.share, highest) for _ in cases]
        num_steps = 0
        while loads := {i: load for i, one in enumerate(searches) if (load := one.next_load()) is not None}:
            rates = [load * capacities[i] for i, load in loads.items()]
            found = self.good_shares([cases[i] for i in loads], rates)
            for (i, load), shares in zip(loads.items(), found, strict=True):
                searches[i].note(load, shares)
            num_steps += 1
            if advance and num_steps <= NUM_STEPS:
                advance(1 / NUM_STEPS)
        if advance:
            advance(max(0.0, 1 - num_steps / NUM_STEPS))
        return [
            self._goodput({load * capacity: shares for load, shares in search.tried.items()}, capacity)
            for search, capacity in zip(searches, capacities, strict=True)
        ]

    def good_shares(
        self, cases: Sequence[Case], rates_rps: Sequence[float], num_seeds: int | None = None
    ) -> list[Floats]:
        """[S] of each case at its rate: the share of requests within the service level, sample by sample.

        All 0 if more and more requests wait.
        """
        runs = (
            self._run(case, rate, seed)
            for case, rate in zip(cases, rates_rps, strict=True)
            for seed in self.seeds[:num_seeds]
        )
        shares: list[Floats] = []
        grown: list[float] = []
        for batch in _batches(runs, self._num_threads):
            outcomes = simulate([run.prepared for run in batch], self._num_threads)
            for run, outcome in zip(batch, outcomes, strict=True):
                shares.append(self._judged(run, outcome))
                grown.append(growth(outcome.requests, run.from_s, run.to_s) if run.is_steady else 0.0)
        is_growing = np.reshape(grown, (len(cases), -1)).mean(axis=1) > GROWING
        found = np.reshape(shares, (len(cases), -1))
        return list(np.where(is_growing[:, None], 0.0, found))

    def with_more(self, group: int, num_more: int) -> Config:
        """The cluster with more servers of one of its kinds, or with fewer."""
        groups: list[ReplicaGroup] = list(self.config.cluster.groups)
        count = groups[group].count + num_more
        groups[group : group + 1] = [groups[group].model_copy(update={"count": count})] if count else []
        cluster = self.config.cluster.model_copy(update={"replicas": tuple(groups)})
        return self.config.model_copy(update={"cluster": cluster})

    def servers_for(
        self, target_rps: float, group: int, policy: PolicySpec, now: Goodput, one_more: Goodput
    ) -> int | None:
        """How many more servers of a kind the target takes, fewer if negative; None if they cannot do it."""
        groups = self.config.cluster.groups
        fewest = -groups[group].count + (len(groups) == 1)
        num_seeds = math.ceil(ENOUGH_REQUESTS / num_needed(target_rps, 0.0))

        def is_met(num_more: int) -> bool:
            config = self.with_more(group, num_more)
            if not self.is_shared and target_rps > HIGHEST_LOAD * self._capacity(config):
                return False
            (shares,) = self.good_shares([Case(config, policy)], [target_rps], num_seeds)
            return bool(shares.mean() >= self.share)

        if is_met(fewest):
            return fewest
        gain_rps = one_more.rate_rps - now.rate_rps
        if gain_rps <= 0.01 * one_more.capacity_rps / max(self.config.cluster.num_replicas, 1):
            return first_met(is_met, fewest, 0, 0)
        served_rps = now.rate_rps
        if not self.is_shared:  # from what they could do at best, as the first to try are the fewest
            gain_rps = HIGHEST_LOAD * (one_more.capacity_rps - now.capacity_rps)
            served_rps = HIGHEST_LOAD * now.capacity_rps
        guess = math.ceil((target_rps - served_rps) / max(gain_rps, 1e-9))
        return first_met(is_met, fewest, guess, MAX_ADDED)

    @cached_property
    def _traffic(self) -> Workload:
        """The traffic as the file has it."""
        find_capacity = partial(self.capacity, self.config)
        return build_workload(self.config.workload, self.seeds[0], find_capacity, self._base_dir)

    def _capacity(self, config: Config) -> float:
        return capacity_rps(config.workload, self._plans_of(config), self._base_dir)

    def _plans_of(self, config: Config) -> list[ReplicaPlan]:
        key = config.cluster.model_dump_json()
        if key not in self._plans:
            self._plans[key] = plan_replicas(config.cluster, self._base_dir)
        return self._plans[key]

    def _run(self, case: Case, rate_rps: float, seed: int) -> _Run:
        config = case.config.model_copy(update={"policy": case.policy, "seed": seed})
        load = 0.0 if self.is_shared else rate_rps / self._capacity(config)
        plans = self._plans_of(config)
        if replayed(config) is not None:
            return self._replay(config, plans, rate_rps, load)
        spec = config.workload
        assert isinstance(spec.arrivals, Rated)
        stretch = stretch_of(spec, rate_rps, load, self.own_rate_rps)
        faster = {"rate": rate_rps / spec.arrivals.mean_share, "load": None}
        changes = {
            "arrivals": spec.arrivals.model_copy(update=faster),
            "requests": max(1, round(rate_rps * stretch.end_s)),
            "duration_s": None,
        }
        workload = build_workload(spec.model_copy(update=changes), seed, None, self._base_dir)
        to_s = min(stretch.end_s, float(workload.arrived_at.max()))
        return _Run(Prepared(config, plans, workload), stretch.warm_up_s, to_s, stretch.is_steady)

    def _replay(self, config: Config, plans: list[ReplicaPlan], rate_rps: float, load: float) -> _Run:
        """The trace at another speed, again and again; its last pass need not begin where the file does."""
        traffic = self._traffic
        arrived_at = (traffic.arrived_at - traffic.arrived_at[0]) * (self.own_rate_rps / rate_rps)
        needed = num_needed(rate_rps, load)
        warm_up = math.ceil(WARM_UP * needed)
        count = max(len(traffic) + warm_up, math.ceil(needed))
        passes = repeated(
            replace(traffic, arrived_at=arrived_at), math.ceil(count / len(traffic)), num_rows_of(traffic)
        )
        workload = take(passes, slice(count))
        first = count - (count - warm_up) // len(traffic) * len(traffic)
        from_s, to_s = workload.arrived_at[[first, -1]].tolist()
        return _Run(Prepared(config, plans, workload), from_s, to_s, is_steady=True)

    def _judged(self, run: _Run, outcome: Outcome) -> Floats:
        """[1] the share in time of what arrives in the steady part; of a trace [blocks] of its last pass."""
        is_good = in_time(outcome.requests, self.config.slo)
        if replayed(self.config) is None:
            arrived_at = outcome.requests["arrived_at"]
            counts = (arrived_at >= run.from_s) & (arrived_at <= run.to_s)
            return np.array([is_good[counts].mean()])
        length = len(self._traffic)
        blocks = np.array_split(is_good[-length:], num_blocks_of(length, MAX_BLOCKS))
        return np.array([block.mean() for block in blocks])

    def _goodput(self, tried: Mapping[float, Floats], capacity: float) -> Goodput:
        rates = np.array(sorted(tried))
        shares = np.stack([tried[rate] for rate in rates.tolist()], axis=1)  # [S, L]
        num_samples = len(shares)
        weights = resamples(num_samples) / num_samples
        rate = _crossings(rates, shares.mean(axis=0)[None], self.share)
        spread = _crossings(rates, np.einsum("bs,sl->bl", weights, shares), self.share)
        if np.ptp(spread) == 0:  # a step between two rates, or none at all: samples say nothing about it
            spread = np.full_like(spread, math.nan)
        found: Ratio = with_intervals(rate, spread[:, None], num_samples)[0]
        means = shares.mean(axis=0)
        return Goodput(
            found.ratio,
            found.low,
            found.high,
            capacity,
            rates,
            means,
            spread,
            num_samples,
            is_highest_tried=bool((means >= self.share).all()),
        )


class _Run(NamedTuple):
    """What is simulated, and from when to when it is judged whether the queue grows."""

    prepared: Prepared
    from_s: float
    to_s: float
    is_steady: bool


def _batches(runs: Iterable[_Run], num_threads: int) -> Iterator[list[_Run]]:
    """In portions of bounded size, but as many runs as threads."""
    batch: list[_Run] = []
    for run in runs:
        batch.append(run)
        if len(batch) >= num_threads and sum(len(one.prepared.workload) for one in batch) >= BATCH_REQUESTS:
            yield batch
            batch = []
    if batch:
        yield batch


@dataclass
class _Search:
    """The load at which a case begins to fail, between one that is served and one that is not."""

    wanted: float  # share in time
    high: float
    low: float = 0.0
    tried: dict[float, Floats] = field(default_factory=dict)  # [S] shares in time by load

    def next_load(self) -> float | None:
        """None if it is found, to a hundredth."""
        if not self.tried:
            return FIRST_LOAD
        if self.low == 0:  # down by steps that double, and then by halves
            return max(2 * self.high - 1, self.high / 2) if self.high > RESOLUTION else None
        if math.isinf(self.high):
            return 2 * self.low if self.low < HIGHEST_SHARED_LOAD else None
        if self.high - self.low > RESOLUTION * max(1.0, self.low):
            return (self.low + self.high) / 2
        lowest = min(self.tried)
        if lowest <= RESOLUTION or self._is_sure(lowest):
            return None
        return max(2 * lowest - 1, lowest / 2)

    def note(self, load: float, shares: Floats) -> None:
        self.tried[load] = shares
        if shares.mean() >= self.wanted:
            self.low = max(self.low, load)
        else:
            self.high = load
            self.low = self.low if self.low < load else 0.0

    def _is_sure(self, load: float) -> bool:
        """What other samples might say of it is known, so that intervals have a lower end."""
        shares = self.tried[load]
        count = len(shares)
        if count == 1:
            return True
        drawn = np.einsum("bs,s->b", resamples(count) / count, shares)
        return bool(np.quantile(drawn, expanded_tail(count)) >= self.wanted)


def first_met(is_met: Callable[[int], bool], unmet: int, guess: int, most: int) -> int | None:
    """The lowest number up to `most` that will do, if `unmet` will not and more are never worse.

    From the guess on by steps that double, up or else down, and then by bisection.
    """
    first = met = max(guess, unmet + 1)
    step = 1
    while most >= met > unmet and not is_met(met):
        unmet, met, step = met, min(met + step, most), 2 * step
    if not unmet < met <= most:
        return None
    step = 1 if met == first else 0  # 0: there is something near below that will not do
    while met - unmet > 1:
        number = max(met - step, unmet + 1) if step else (met + unmet) // 2
        if is_met(number):
            met, step = number, 2 * step
        else:
            unmet, step = number, 0
    return met


def _crossings(rates: Floats, shares: Floats, wanted: float) -> Floats:
    """[B] rates at which shares [B, L] first fall below what is wanted, between the rates [L] tried.

    The highest if none does, and 0 if even the lowest does.
    """
    is_below = shares < wanted
    first = np.where(is_below.any(axis=1), is_below.argmax(axis=1), len(rates))
    rows = np.arange(len(shares))
    left, right = np.maximum(first - 1, 0), np.minimum(first, len(rates) - 1)
    before, after = shares[rows, left], shares[rows, right]
    part = (before - wanted) / np.maximum(before - after, 1e-12)
    crossed = rates[left] + part * (rates[right] - rates[left])
    found: Floats = np.select([first == 0, first == len(rates)], [0.0, rates[-1]], crossed)
    return found
