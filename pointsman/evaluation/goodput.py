"""How much traffic a cluster takes within its service level, by policy, and how many servers a target takes.

Goodput is the highest rate of arrivals at which a share of the requests (99 %) still meets the service level:
first token and time per token both in time. It is found by bisection over the load, on the same seeds for all
policies, or on the trace replayed faster or slower. Its interval comes from resampling seeds, or blocks of
the trace, at the loads that were tried. A run is drained. A trace too short to fill the cluster is repeated,
and its last pass counts: what piles up must show.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pointsman.config import Config
from pointsman.errors import InputError, PointsmanWarning
from pointsman.evaluation.bootstrap import Ratio, resamples, with_intervals
from pointsman.experiments.capacity import capacity_rps
from pointsman.experiments.checks import MIN_REQUESTS
from pointsman.experiments.metrics import measure_blocks
from pointsman.experiments.own import num_blocks_of, replayed
from pointsman.experiments.simulate import Prepared, simulate
from pointsman.routing.policy import PolicySpec
from pointsman.simulator.plan import ReplicaPlan, plan_replicas
from pointsman.simulator.spec import ReplicaGroup
from pointsman.workload import Workload, build_workload
from pointsman.workload.spec import ClosedArrivals

HIGHEST_LOAD = 1.0  # more lasts only as long as a run is short
NUM_STEPS = 7  # of bisection: the load to a hundredth
MAX_BLOCKS = 16
REQUESTS_A_REPLICA, FEWEST_REQUESTS, MOST_REQUESTS = 1000, 3000, 16_000  # of a run
MAX_ADDED = 512  # servers of a kind: more are no answer
MAX_TRIES = 12

Floats = NDArray[np.float64]
Advance = Callable[[float], None]  # gets the share of the work done since its last call


@dataclass(frozen=True)
class Goodput:
    """Requests/s within the service level, with its interval, and what was tried to find it."""

    rate_rps: float
    low: float
    high: float
    capacity_rps: float
    tried_rps: Floats  # [L], ascending
    good_shares: Floats  # [L] of the requests, at each rate
    resampled_rps: Floats  # [NUM_RESAMPLES]
    num_samples: int  # seeds or blocks

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
        found = capacity_rps(config.workload, self._plans_of(config), self._base_dir)
        if found <= 0:
            problem, remedy = "no server holds any of these requests", "see `pointsman hardware`"
            raise InputError("cluster.model", config.cluster.model, problem, remedy)
        return found

    def own_rate_rps(self) -> float:
        """How fast its traffic arrives as it is."""
        times = self._traffic.arrived_at
        trace = replayed(self.config)
        if trace is not None and len(times) < MIN_REQUESTS:
            text = f"{trace.path}: {len(times)} requests are a burst, not a rate; use a longer trace"
            warnings.warn(PointsmanWarning(text), stacklevel=2)
        return (len(times) - 1) / max(float(times[-1] - times[0]), 1e-9)

    def goodputs(self, cases: Sequence[Case], advance: Advance | None = None) -> list[Goodput]:
        """All cases step by step together, so that they share the threads."""
        capacities = [self.capacity(case.config) for case in cases]
        low, high = np.zeros(len(cases)), np.full(len(cases), HIGHEST_LOAD)
        tried: list[dict[float, Floats]] = [{} for _ in cases]
        for _ in range(NUM_STEPS):
            loads = (low + high) / 2
            rates = [load * capacity for load, capacity in zip(loads.tolist(), capacities, strict=True)]
            for index, good in enumerate(self.good_shares(cases, rates)):
                tried[index][rates[index]] = good
                is_good = good.mean() >= self.share
                low[index], high[index] = (
                    (loads[index], high[index]) if is_good else (low[index], loads[index])
                )
            if advance:
                advance(1 / NUM_STEPS)
        return [self._goodput(one, capacity) for one, capacity in zip(tried, capacities, strict=True)]

    def good_shares(self, cases: Sequence[Case], rates_rps: Sequence[float]) -> list[Floats]:
        """[S] of each case at its rate: the share of requests within the service level, sample by sample."""
        runs = [
            self._prepared(case, rate, seed)
            for case, rate in zip(cases, rates_rps, strict=True)
            for seed in self.seeds
        ]
        outcomes = simulate(runs, self._num_threads)
        if replayed(self.config) is None:
            shares = np.array([outcome.metrics["good_share"] for outcome in outcomes])
            return list(shares.reshape(len(cases), -1))
        length, slo = len(self._traffic), self.config.slo
        num_blocks = num_blocks_of(length, MAX_BLOCKS)
        return [
            measure_blocks(outcome.requests[-length:], slo, num_blocks)["good_share"] for outcome in outcomes
        ]

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
        gain_rps = one_more.rate_rps - now.rate_rps
        if gain_rps <= 0.01 * one_more.capacity_rps / max(self.config.cluster.num_replicas, 1):
            return None
        groups = self.config.cluster.groups
        fewest = -groups[group].count + (len(groups) == 1)

        def is_met(num_more: int) -> bool:
            case = Case(self.with_more(group, num_more), policy)
            return bool(self.good_shares([case], [target_rps])[0].mean() >= self.share)

        guess = max(math.ceil((target_rps - now.rate_rps) / gain_rps), fewest)
        for _ in range(MAX_TRIES):
            if guess > MAX_ADDED:
                return None
            if not is_met(guess):
                guess += 1
            elif guess == fewest or not is_met(guess - 1):
                return guess
            else:
                guess -= 1
        return None

    @cached_property
    def _traffic(self) -> Workload:
        """The traffic as the file has it."""
        find_capacity = partial(self.capacity, self.config)
        return build_workload(self.config.workload, self.seeds[0], find_capacity, self._base_dir)

    def _plans_of(self, config: Config) -> list[ReplicaPlan]:
        key = config.cluster.model_dump_json()
        if key not in self._plans:
            self._plans[key] = plan_replicas(config.cluster, self._base_dir)
        return self._plans[key]

    def _prepared(self, case: Case, rate_rps: float, seed: int) -> Prepared:
        config = case.config.model_copy(update={"policy": case.policy, "seed": seed})
        count = REQUESTS_A_REPLICA * config.cluster.num_replicas
        count = min(max(count, FEWEST_REQUESTS), MOST_REQUESTS)
        spec = config.workload
        key = "arrivals" if spec.trace is None else "trace"
        changes: dict[str, Any] = {"rate": rate_rps, "load": None}
        if replayed(config) is None:
            spec = spec.model_copy(update={"requests": count, "duration_s": None})
        elif spec.requests is None and spec.duration_s is None:
            changes["repeat"] = math.ceil(count / len(self._traffic))
        spec = spec.model_copy(update={key: getattr(spec, key).model_copy(update=changes)})
        workload = build_workload(spec, seed, None, self._base_dir)
        return Prepared(config, self._plans_of(config), workload)

    def _goodput(self, tried: Mapping[float, Floats], capacity: float) -> Goodput:
        rates = np.array(sorted(tried))
        shares = np.stack([tried[rate] for rate in rates.tolist()], axis=1)  # [S, L]
        num_samples = len(shares)
        weights = resamples(num_samples) / num_samples
        rate = _crossings(rates, shares.mean(axis=0)[None], self.share)
        spread = _crossings(rates, np.einsum("bs,sl->bl", weights, shares), self.share)
        found: Ratio = with_intervals(rate, spread[:, None], num_samples)[0]
        return Goodput(
            found.ratio, found.low, found.high, capacity, rates, shares.mean(axis=0), spread, num_samples
        )


def _crossings(rates: Floats, shares: Floats, wanted: float) -> Floats:
    """[B] rates at which shares [B, L] first fall below what is wanted, between the rates [L] tried."""
    count = len(shares)
    rates = np.concatenate(([0.0], rates))
    shares = np.concatenate((np.ones((count, 1)), shares), axis=1)
    is_below = shares < wanted
    first = np.where(is_below.any(axis=1), is_below.argmax(axis=1), 0)
    rows = np.arange(count)
    before, after = shares[rows, first - 1], shares[rows, first]
    part = (before - wanted) / np.maximum(before - after, 1e-12)
    crossed = rates[first - 1] + part * (rates[first] - rates[first - 1])
    found: Floats = np.where(is_below.any(axis=1), crossed, rates[-1])
    return found
