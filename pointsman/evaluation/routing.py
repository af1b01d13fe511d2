"""How good a routing policy is while it trains: arg-max decisions on fixed selection seeds, beside baselines.

A block is one seed of every scenario. Its return is the cost saved against least-outstanding, as a share:
0 means as good as today's router, 0.2 a fifth less cost (geometric mean over scenarios). `eval_score`, which
chooses the best checkpoint, is that less what the breaches of the objective's limits take; `eval_breach/…`
says how far beyond each limit the policy is in each scenario, which the prices in training follow. With
`evaluation.select: worst-block`, it is the return of the worst block that counts instead of the mean.

Columns named as metrics are their values, means over scenarios and blocks; of a baseline behind a slash.
`eval_change/<metric>` is the change against least-outstanding, geometric mean over scenarios. There is no
share of illegal actions: compiled decisions take the best of the legal ones, so it would always be 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pointsman.envs.episodes import RANDOM
from pointsman.envs.routing import RoutingSpec, slo_of
from pointsman.errors import InputError
from pointsman.evaluation.compare import HEADLINES, warn_short_runs
from pointsman.experiments.objective import REFERENCE, TOLERANCE, find_objective
from pointsman.experiments.own import (
    BEFORE_REPORT,
    PARTS,
    SELECTION,
    Part,
    replayed,
    selection_episodes,
)
from pointsman.experiments.scenarios import DEFAULT, find_scenario, short_names
from pointsman.experiments.simulate import AnyPolicy, Prepared, simulate
from pointsman.inference.checkpoint import Checkpoint, load_checkpoint
from pointsman.inference.space import EntitySpace
from pointsman.routing.features import CONTEXT_FEATURES, ENTITY_FEATURES
from pointsman.routing.ordering import SMALL_FIRST
from pointsman.routing.policy import PolicySpec
from pointsman.spec import parse_spec

BASELINE = "least-outstanding"
ORDERS = (0.0, 0.2, SMALL_FIRST, 0.6, 0.8, 1.0)  # that `settle` chooses from
WORTH_IT = 0.003  # of the score: less is luck
UNCERTAIN = 0.05  # beyond a limit: replays of one part of a trace do not tell its P99 better than that
CURABLE = 0.1  # beyond a limit: training brings a tail back that is so much too long
RIVALS = ("random", "round-robin")
NUM_THREADS = 2
# What a log shows of the policy and of the baselines, under the names of experiments/metrics.py.
SHOWN = (
    *(f"{latency}_{part}_s" for latency in ("ttft", "e2e") for part in ("mean", "p50", "p90", "p95", "p99")),
    "tbt_p99_s",
    "requests_per_s",
    "goodput_per_s",
    "imbalance_cv",
    "preemptions",
)
COUNTS = ("decisions", "num_requests", "resent")


class RoutingSelection:
    """An `Evaluate` for the trainer: a checkpoint in, metrics named eval_* out."""

    def __init__(
        self, spec: RoutingSpec, part: Part = PARTS[SELECTION], tolerance: float | None = None
    ) -> None:
        """`part` of a trace is judged on; less than `tolerance` beyond a limit is no breach.

        By default that is 1 %, and of traces 5 %.
        """
        self.part = part
        self._given_tolerance = tolerance
        self.objective = find_objective(spec.objective, spec.keep)
        trained_on = dict.fromkeys(name for name in spec.scenarios if name != RANDOM)
        self.sources = spec.evaluation.scenarios or tuple(trained_on) or (DEFAULT,)
        self.changes = spec.changes
        self.scenarios = short_names(self.sources)
        self.num_seeds = spec.evaluation.seeds
        self.slo = slo_of(spec)
        self.by_worst_block = spec.evaluation.select == "worst-block"

    @cached_property
    def _prepared(self) -> list[Prepared]:
        """Scenario by scenario, block by block."""
        prepared: list[Prepared] = []
        for name in self.sources:
            prepared += selection_episodes(find_scenario(name, self.changes), self.num_seeds, part=self.part)
        return [replace(one, config=one.config.model_copy(update={"slo": self.slo})) for one in prepared]

    @cached_property
    def tolerance(self) -> float:
        if self._given_tolerance is not None:
            return self._given_tolerance
        replays = any(replayed(one.config) is not None for one in self._prepared)
        return UNCERTAIN if replays else TOLERANCE

    def measure(self, policy: AnyPolicy) -> dict[str, NDArray[np.float64]]:
        """[scenarios, seeds] of every headline, of the cost, and of requests/s."""
        outcomes = simulate(self._prepared, NUM_THREADS, policies=[policy] * len(self._prepared))
        shape = (len(self.scenarios), self.num_seeds)
        table = {
            name: np.array([one.metrics[name] for one in outcomes]).reshape(shape)
            for name in (*SHOWN, *COUNTS)
        }
        cost = [self.objective.cost(one.metrics) for one in outcomes]
        return table | {"cost": np.array(cost).reshape(shape)}

    @cached_property
    def baselines(self) -> dict[str, dict[str, NDArray[np.float64]]]:
        names = dict.fromkeys((BASELINE, *RIVALS, *self.objective.references))
        tables = {name: self.measure(PolicySpec(kind=name)) for name in names}
        for row, scenario in enumerate(self.scenarios):
            runs = self._prepared[row * self.num_seeds : (row + 1) * self.num_seeds]
            if replayed(runs[0].config) is not None:
                spans_s = [float(np.ptp(one.workload.arrived_at)) for one in runs]
                e2e = {"e2e_mean_s": tables[BASELINE]["e2e_mean_s"][row]}
                warn_short_runs(f"{scenario}, selection", spans_s, e2e)
        return tables

    def breaches(self, table: dict[str, NDArray[np.float64]]) -> dict[str, NDArray[np.float64]]:
        """[scenarios] by limit: how far beyond it, as a logarithm. A P99 is the mean of the seeds'."""

        def means(one: dict[str, NDArray[np.float64]]) -> dict[str, NDArray[np.float64]]:
            return {name: one[name].mean(axis=1) for name in HEADLINES}

        references = {name: means(self.baselines[name]) for name in self.objective.references}
        return self.objective.breaches(means(table), references)

    def block_returns(self, table: dict[str, NDArray[np.float64]]) -> NDArray[np.float64]:
        """[seeds] cost saved against the baseline, as a share."""
        ratios = table["cost"] / self.baselines[BASELINE]["cost"]
        returns: NDArray[np.float64] = 1.0 - np.exp(np.log(ratios).mean(axis=0))
        return returns

    def __call__(self, checkpoint: Checkpoint) -> dict[str, float]:
        table = self.measure(checkpoint)
        baseline = self.baselines[BASELINE]
        blocks = self.block_returns(table)
        metrics = {
            "eval_mean_return": float(blocks.mean()),
            "eval_min_block_return": float(blocks.min()),
            "eval_max_block_return": float(blocks.max()),
        }
        metrics |= {f"eval_block{k}_return": float(value) for k, value in enumerate(blocks)}
        for name in SHOWN:
            metrics[f"eval_{name}"] = float(table[name].mean())
            metrics |= {f"eval_{name}/{one}": float(its[name].mean()) for one, its in self.baselines.items()}
        for name in HEADLINES:
            logs = np.log(table[name].mean(axis=1) / baseline[name].mean(axis=1))  # by scenario
            metrics[f"eval_change/{name}"] = float(np.expm1(logs.mean()))
        for scenario, row, before in zip(self.scenarios, table["cost"], baseline["cost"], strict=True):
            metrics[f"eval_cost/{scenario}"] = float(row.mean() / before.mean() - 1.0)
        for rival in RIVALS:
            metrics[f"eval_{rival}_return"] = float(self.block_returns(self.baselines[rival]).mean())
        num_sent = table["num_requests"] + table["resent"]
        metrics["eval_noop_frac"] = float((1.0 - num_sent / table["decisions"]).mean())
        metrics["eval_baseline_score"] = 0.0
        breaches = self.breaches(table)
        for limit, by_scenario in breaches.items():
            metrics[f"eval_breach/{limit}"] = float(by_scenario.mean())
            for scenario, breach in zip(self.scenarios, by_scenario.tolist(), strict=True):
                metrics[f"eval_breach/{limit}/{scenario}"] = breach
        metrics["eval_score"] = self.score(blocks, breaches)
        return metrics

    def score(self, blocks: NDArray[np.float64], breaches: dict[str, NDArray[np.float64]]) -> float:
        """What chooses, from the returns of blocks and the breaches of limits."""
        saved = float(blocks.min() if self.by_worst_block else blocks.mean())
        return saved - self.objective.penalty(breaches, self.tolerance)


def make_evaluate(spec: RoutingSpec) -> RoutingSelection:
    return RoutingSelection(spec)


def settle(spec: RoutingSpec) -> RoutingSpec:
    """The order of held requests, if the configuration leaves it open: what serves late-binding best.

    Where prompts are alike or few requests are held, all orders are; then it is the usual one.
    """
    if spec.hold.small_first is not None:
        return spec
    return _best_order(spec, lambda order: PolicySpec(kind=REFERENCE, small_first=order))


def choose_start(spec: RoutingSpec, policies: Sequence[str]) -> tuple[str, RoutingSpec]:
    """The policy that is best to learn on from, how late a first token may come, and the order best for it.

    All are judged as the run would run them: with its order and its service level.
    """
    is_open = spec.hold.small_first is None
    usual = _in_order(spec, SMALL_FIRST) if is_open else spec
    starts = [(policy, *_start(usual, policy)) for policy in policies]
    if len(starts) == 1:
        ((best, _, as_it_runs),) = starts
    else:
        evaluate = _first_judge(spec)
        best, _, as_it_runs = max(starts, key=lambda start: evaluate(start[1])["eval_score"])
    if is_open:
        as_it_runs = _best_order(as_it_runs, lambda order: _start(_in_order(spec, order), best)[0])
    return best, as_it_runs


def _first_judge(spec: RoutingSpec) -> RoutingSelection:
    """What is decided before a run is decided on all that is not kept for the report.

    The limits hardly count yet: a P99 of one part of a trace says more of chance than of an order or a
    policy, and to keep them is what training is for.
    """
    return RoutingSelection(spec, BEFORE_REPORT, CURABLE)


def _best_order(spec: RoutingSpec, policy: Callable[[float], AnyPolicy]) -> RoutingSpec:
    """`policy` of an order: who is judged in it."""
    judge = _first_judge(spec)

    def score(order: float) -> float:
        table = judge.measure(policy(order))
        return judge.score(judge.block_returns(table), judge.breaches(table))

    scores = {order: score(order) for order in ORDERS}
    best = max(ORDERS, key=scores.__getitem__)
    return _in_order(spec, best if scores[best] - scores[SMALL_FIRST] >= WORTH_IT else SMALL_FIRST)


def _in_order(spec: RoutingSpec, order: float) -> RoutingSpec:
    return spec.model_copy(update={"hold": spec.hold.model_copy(update={"small_first": order})})


def _start(spec: RoutingSpec, policy: str) -> tuple[Checkpoint, RoutingSpec]:
    named = parse_spec(PolicySpec, {"kind": policy}, "run.start_from")
    if named.checkpoint is None:
        raise InputError("run.start_from", policy, "was not trained", "name `default`, a run or a checkpoint")
    if named.detour_s is not None:
        spec = spec.model_copy(update={"detours_s": (named.detour_s,)})
    rules = {
        "hold": spec.hold.model_dump(),
        "detour_s": spec.detours_s[0],
        "slo": slo_of(spec).model_dump(),
    }
    checkpoint = load_checkpoint(named.checkpoint, "run.start_from")
    space = EntitySpace(checkpoint.space.num_entities, ENTITY_FEATURES, CONTEXT_FEATURES, ())
    checkpoint.require_space(space, "run.start_from")
    return replace(checkpoint, metadata={**checkpoint.metadata, **rules}), spec
