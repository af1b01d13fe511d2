"""How short can mean and tail be at once? Planning one step ahead with the true future.

    python benchmarks/planning_bound.py --jobs 2        # 12 minutes
    python benchmarks/planning_bound.py --scenario mine.yaml --set 'workload.trace.part=[0.8, 1]' --seeds 1

At each decision, every legal action is tried on a copy of the cluster, with the arrivals and output lengths
that will really come; after it a base policy goes on for about as long as the slowest requests live
(--horizon), and the action whose future costs least is taken. No router can know this much. The cost is that
of the objective `balanced`, and prices on the seconds that first tokens and last tokens come after 97 of 100
do under late-binding: the higher they are, the more of the mean is given up for the tails, so that the rows
follow the frontier.

It bounds what one step of improvement over a base policy can find, not what any policy can: one that plans
several steps ahead, or improves on itself again and again, may be beyond it.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pointsman.envs.routing import HoldRule
from pointsman.envs.totals import FIELDS, RewardTotals, read_totals
from pointsman.experiments.metrics import measure
from pointsman.experiments.objective import OBJECTIVES
from pointsman.experiments.scenarios import REPORT_SEEDS, SELECTION_SEEDS, find_scenario
from pointsman.experiments.simulate import Prepared, prepare, simulate
from pointsman.report.tables import markdown
from pointsman.routing.features import NUM_CONTEXT_FEATURES, NUM_ENTITY_FEATURES
from pointsman.routing.policy import PolicySpec, PolicyTables
from pointsman.simulator.cluster import Clusters
from pointsman.simulator.privileged import PRIVILEGED_FEATURES
from pointsman.simulator.run import look, run
from pointsman.simulator.state import DONE

TAIL_BEGINS = 0.97
REFERENCE = "late-binding"
PRICES = ((0.0, 0.0), (10.0, 1.0), (30.0, 3.0), (100.0, 10.0))  # of TTFT and e2e
OBJECTIVE = OBJECTIVES["balanced"]
# Its cost as integrals over time.
WEIGHTS = {
    "in_system_area": OBJECTIVE.outstanding,
    "unstarted_area": OBJECTIVE.waiting,
    "age_area": OBJECTIVE.age,
}
ENDS = ("first_token_at", "completed_at")
BASES = ["gathering", "default", "default-mean:0.2s"]
SHIFTED = ("default-mean:0.2s", "default-mean:0.3s", "default-mean")
METRICS = {
    "TTFT mean": "ttft_mean_s",
    "TTFT P99": "ttft_p99_s",
    "e2e mean": "e2e_mean_s",
    "e2e P99": "e2e_p99_s",
}
Floats = NDArray[np.float64]


class Task(NamedTuple):
    scenario: str
    changes: tuple[str, ...]
    seed: int
    horizon_s: float
    base: str
    prices: tuple[float, float] = (0.0, 0.0)


class Planner:
    """A cluster, and a copy of it on which its future is tried."""

    def __init__(self, prepared: Prepared, task: Task, tails_s: tuple[float, float]) -> None:
        self.task, self.tails_s = task, tails_s
        self.slo = prepared.config.slo
        self.live, self.trial = (
            Clusters([prepared.config.cluster], [prepared.plans], [prepared.workload], [task.seed])
            for _ in range(2)
        )
        # Twins differ in the addresses of their arrays and in nothing else: those bytes are not copied.
        self._copied = []
        for live, trial in zip(bytes_of(self.live.sims), bytes_of(self.trial.sims), strict=True):
            places = np.flatnonzero(live != trial)
            self._copied.append((live, trial, places, trial[places].copy()))
        num_replicas = len(prepared.plans)
        self.base = PolicyTables([policy(task.base)], num_replicas)
        self.own = PolicyTables([None], num_replicas)
        hold = HoldRule()
        self.own.rows.may_hold, self.own.rows.hold_s = hold.allowed, hold.recheck_s
        self.own.rows.kv_limit, self.own.rows.prefill_limit = hold.kv_limit, hold.prefill_limit_tokens
        self.own.rows.small_first = self.base.rows.small_first
        self._seen = (
            np.zeros((1, num_replicas, NUM_ENTITY_FEATURES), np.float32),
            np.zeros((1, NUM_CONTEXT_FEATURES), np.float32),
            np.zeros((1, num_replicas + 1), bool),
            np.zeros((1, len(PRIVILEGED_FEATURES)), np.float32),
        )
        self._first_in_system = 0

    def play(self) -> dict[str, float]:
        sims, action = self.live.sims, np.zeros(1, np.int64)
        run(sims, self.own.rows, action, 0, 1)
        while sims[0].status != DONE:
            action[0] = self._best_action()
            run(sims, self.own.rows, action, 0, 1)
        return measure(self.live, 0, self.slo)

    def _best_action(self) -> int:
        look(self.live.sims, self.own.rows, self.trial.sims, *self._seen, 0, 1)
        legal = np.flatnonzero(self._seen[2][0])
        if len(legal) == 1:
            return int(legal[0])
        is_over = self.live.requests[0]["completed_at"][self._first_in_system :] >= 0
        self._first_in_system += int(np.argmin(is_over))
        return min(legal.tolist(), key=self._cost_after)

    def _cost_after(self, action: int) -> float:
        """Of all that is in the system until the horizon, if the base policy goes on after the action."""
        for live, trial, places, addresses in self._copied:
            trial[:] = live
            trial[places] = addresses
        sims = self.trial.sims
        stop_at = float(sims[0].now) + self.task.horizon_s
        before, after = np.empty((2, len(FIELDS), 1))
        read_totals(sims, before)
        sims.stop_at = stop_at
        run(sims, self.base.rows, np.array([action]), 0, 1)
        read_totals(sims, after)
        gained = RewardTotals(*(after - before))
        costs = (getattr(gained, field) * weight for field, weight in WEIGHTS.items())
        seen = self.trial.requests[0][self._first_in_system : int(sims[0].next_arrival)]
        excess = (
            price * beyond(seen, end, stop_at, tail_s)
            for price, end, tail_s in zip(self.task.prices, ENDS, self.tails_s, strict=True)
            if price
        )
        return float(sum(costs)[0] + sum(excess))


def bytes_of(array: NDArray[Any]) -> list[NDArray[np.uint8]]:
    """Of an array of records and of all arrays that these point to."""
    own = [np.asarray(array).reshape(-1).view(np.uint8)] if array.size else []
    return own + [one for held in getattr(array, "_held", ()) for one in bytes_of(held)]


def beyond(requests: Any, end: str, now: float, tail_s: float) -> float:
    """Seconds beyond the tail's beginning, of requests that are still waited for as well."""
    ended_at = np.where(requests[end] >= 0, requests[end], now)
    return float(np.maximum(0.0, ended_at - requests["arrived_at"] - tail_s).sum())


def policy(kind: str) -> PolicySpec:
    return PolicySpec.model_validate({"kind": kind})


def prepared_for(task: Task) -> Prepared:
    scenario = find_scenario(task.scenario)
    return prepare(scenario.config(task.seed, task.changes), scenario.folder)


def planned(task: Task) -> dict[str, float]:
    prepared = prepared_for(task)
    (reference,) = simulate([prepared], policies=[policy(REFERENCE)])
    arrived_at = reference.requests["arrived_at"]
    ttft_s, e2e_s = (np.quantile(reference.requests[end] - arrived_at, TAIL_BEGINS) for end in ENDS)
    return Planner(prepared, task, (float(ttft_s), float(e2e_s))).play()


def played(task: Task) -> dict[str, float]:
    """By the base policy itself."""
    (outcome,) = simulate([prepared_for(task)], policies=[policy(task.base)])
    return outcome.metrics


def means(runs: list[dict[str, float]]) -> Floats:
    """[metrics + 1] over runs; the last is the cost."""
    values = [*METRICS.values()]
    found = [[*(metrics[name] for name in values), float(OBJECTIVE.cost(metrics))] for metrics in runs]
    mean: Floats = np.asarray(found).mean(axis=0)
    return mean


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scenario", default="steady-chat")
    parser.add_argument(
        "--set", action="append", metavar="KEY=VALUE", help="change the scenario (4,000 requests)"
    )
    parser.add_argument("--horizon", type=float, default=25.0, metavar="S", help="seconds ahead")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--base", action="append", help="policy that goes on; repeat it")
    parser.add_argument("--selection", action="store_true", help="selection seeds, to try things out")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    options = parser.parse_args()
    seeds = (SELECTION_SEEDS if options.selection else REPORT_SEEDS)[: options.seeds]
    bases = options.base or BASES

    changes = tuple(options.set or ["workload.requests=4000"])

    def tasks(*how: Any) -> list[Task]:
        return [Task(options.scenario, changes, seed, options.horizon, *how) for seed in seeds]

    baseline = means([played(task) for task in tasks("least-outstanding")])
    others = ("late-binding", "gathering", "default", *SHIFTED)
    rows = [(f"*{kind}*", means([played(task) for task in tasks(kind)])) for kind in others]
    settings = [(base, prices) for base in bases for prices in PRICES]
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        runs = list(pool.map(planned, [task for setting in settings for task in tasks(*setting)]))
    for number, (base, prices) in enumerate(settings):
        some = runs[number * len(seeds) : (number + 1) * len(seeds)]
        rows.append((f"planning over {base}, prices {prices[0]:g} and {prices[1]:g}", means(some)))
    cells = [
        [name, *(f"{100.0 * change:+.1f} %".replace("-", "\u2212") for change in found / baseline - 1.0)]
        for name, found in rows
    ]
    print(markdown(["", *METRICS, "cost"], cells))


if __name__ == "__main__":
    main()
