"""How a routing run is judged for its report: `evaluate` on report seeds, and the load of every replica."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pointsman.envs.routing import RoutingSpec
from pointsman.evaluation.compare import Comparison, compare
from pointsman.evaluation.problem import env_spec
from pointsman.evaluation.routing import BASELINE, RIVALS, RoutingSelection
from pointsman.experiments.own import kept_text, replayed, report_configs
from pointsman.experiments.scenarios import REPORT_SEEDS, find_scenario
from pointsman.experiments.simulate import Outcome, prepare, simulate
from pointsman.report.appraisal import Appraisal
from pointsman.report.comparison import ComparisonReport
from pointsman.report.evaluation import EvaluationReport
from pointsman.report.evaluation_page import ANY_OTHER, evaluation_sections
from pointsman.report.figure import Cell, Figure, Map, linear_axis, row_axis, short
from pointsman.report.page import Section, paragraphs
from pointsman.report.tables import replica_names
from pointsman.routing.sources import DEFAULT

AGAINST = (BASELINE, *RIVALS, "least-delay", "late-binding", DEFAULT)
NUM_SEEDS = 8
LOAD_SHARE = 0.05  # of the work: the runs whose load is shown
NUM_MOMENTS = 120
ROUTER = "router"
COLOUR = "#3f6fd0"  # the same for both policies: strengths can be compared

Counts = NDArray[np.int64]


def appraise(
    section: Mapping[str, Any],
    run: Path,
    num_seeds: int | None,
    num_threads: int,
    advance: Callable[[float], None],
) -> Appraisal:
    """An `Appraise`. On the scenarios that the run was evaluated on while it trained."""
    spec = env_spec(section)
    assert isinstance(spec, RoutingSpec)
    selection = RoutingSelection(spec)
    seeds = REPORT_SEEDS[: num_seeds or NUM_SEEDS]
    started = time.perf_counter()
    comparisons = []
    for name, source in zip(selection.scenarios, selection.sources, strict=True):
        scenario = find_scenario(source, selection.changes)
        kept = report_configs(scenario, seeds)
        configs = [config.model_copy(update={"slo": selection.slo}) for config in kept]
        comparisons.append(
            compare(
                name,
                kept_text(scenario, configs[0]),
                configs,
                [str(run), *AGAINST],
                BASELINE,
                scenario.folder,
                workers=num_threads,
                progress=lambda share: advance((1 - LOAD_SHARE) * share / len(selection.scenarios)),
                objective=selection.objective,
            )
        )
    command = f"pointsman evaluate {run} --objective {selection.objective.name} --seeds {len(seeds)} "
    command += shlex.join(
        [
            *(part for name in selection.sources for part in ("--scenario", name)),
            *(part for change in selection.changes for part in ("--set", change)),
        ]
    )
    report = EvaluationReport(
        ComparisonReport(comparisons, command, time.perf_counter() - started, selection.objective)
    )
    folders = {
        name: find_scenario(source).folder
        for name, source in zip(selection.scenarios, selection.sources, strict=True)
    }
    load = _load_section(report, folders)
    advance(LOAD_SHARE)
    return Appraisal(
        report.verdict,
        [*evaluation_sections(report), load],
        report.results(),
        [*report.base.notes(ANY_OTHER)],
        command,
    )


def _load_section(report: EvaluationReport, folders: Mapping[str, Path | None]) -> Section:
    """Policy and baseline on the same arrivals: the first scenario, and where most and least was gained."""
    metric = report.base.headlines[-1]
    gains = {
        one.name: one.ratios_between(report.policy, BASELINE)[metric].ratio for one in report.comparisons
    }
    shown = dict.fromkeys(
        (report.comparisons[0].name, min(gains, key=gains.__getitem__), max(gains, key=gains.__getitem__))
    )
    figures = [
        figure
        for one in report.comparisons
        if one.name in shown
        for figure in _load_figures(one, report.policy, folders[one.name])
    ]
    is_traced = replayed(report.comparisons[0].configs[0]) is not None
    which = "those kept for the report" if is_traced else f"those of seed {report.base.seeds[0]}"
    lines = [
        f"Requests sent to each replica and not finished, over time; {report.policy} and {BASELINE} serve "
        f"the same arrivals, {which}. The row “{ROUTER}” counts requests held back."
    ]
    if len(shown) > 1:
        lines.append("Shown: the first scenario, and those in which the policy gains most and least.")
    return Section("Load of the replicas", paragraphs(lines), figures, is_paired=True)


def _load_figures(one: Comparison, policy: str, folder: Path | None) -> list[Figure]:
    prepared = prepare(one.configs[0], folder)
    specs = {spec.label: spec for spec in one.policies}
    names = (policy, BASELINE)
    clusters = [
        replace(prepared, config=prepared.config.model_copy(update={"policy": specs[name]})) for name in names
    ]
    outcomes = simulate(clusters)
    end_s = max(float(outcome.requests["completed_at"].max()) for outcome in outcomes)
    times = np.linspace(0.0, end_s, NUM_MOMENTS + 1)
    counts = [outstanding(outcome, len(prepared.plans), times[:-1]) for outcome in outcomes]
    highest = max(int(count.max()) for count in counts)
    rows = [ROUTER, *replica_names(one.configs[0].cluster)]
    return [
        _map(f"{one.name}, {name}", rows, times, count, highest)
        for name, count in zip(names, counts, strict=True)
    ]


def outstanding(outcome: Outcome, num_replicas: int, times: NDArray[np.float64]) -> Counts:
    """[1 + R, T] requests at the router, and on each replica, at each time."""
    requests = outcome.requests
    counts: Counts = np.zeros((num_replicas + 1, len(times)), np.int64)
    counts[0] = _between(requests["arrived_at"], requests["dispatched_at"], times)
    for replica in range(num_replicas):
        mine = requests[requests["replica"] == replica]
        counts[replica + 1] = _between(mine["dispatched_at"], mine["completed_at"], times)
    return counts


def _between(starts: NDArray[np.float64], ends: NDArray[np.float64], times: NDArray[np.float64]) -> Counts:
    """[T] how many have started and not ended; those that never ended go on."""
    known = np.where(ends < 0, np.inf, ends)
    begun, done = (np.searchsorted(np.sort(part), times, side="right") for part in (starts, known))
    return np.asarray(begun - done, np.int64)


def _map(title: str, rows: Sequence[str], times: NDArray[np.float64], counts: Counts, highest: int) -> Figure:
    cells = []
    for row, name in enumerate(rows):
        for column, count in enumerate(counts[row].tolist()):
            start, end = float(times[column]), float(times[column + 1])
            text = f"{name}, {short(start)} s: {count}"
            cells.append(Cell((start, end), row, count / max(highest, 1), text))
    marks = [Map(cells, COLOUR, "0", f"{highest} requests")]
    x = linear_axis("time, s", times.tolist(), " s", low=0.0, high=float(times[-1]))
    height = min(16 * len(rows) + 4, 420)
    return Figure(title, x, row_axis(_thinned(rows)), marks, height=height)


def _thinned(rows: Sequence[str]) -> list[str]:
    """Names as far as there is room for them."""
    step = -(-len(rows) // 28)
    return [name if index % step == 0 else "" for index, name in enumerate(rows)]
