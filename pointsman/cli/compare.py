"""`pointsman compare`: several policies on the same arrivals."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated

import typer

from pointsman.cli.console import TABLE_WIDTH, compilation_announced, print_json, progress, stdout
from pointsman.cli.lists import plain_table
from pointsman.cli.options import (
    AsJson,
    ConfigFile,
    NumSeeds,
    NumThreads,
    ObjectiveName,
    OutDir,
    Overrides,
    ScenarioNames,
    Situation,
    chosen_scenarios,
    num_threads,
    objective_named,
    refuse_seed,
    report_seeds,
    situations,
)
from pointsman.cli.returns import compare_returns, env_section, refuse_routing_options

if TYPE_CHECKING:
    from rich.table import Table

    from pointsman.evaluation.compare import Comparison
    from pointsman.experiments.objective import Objective
    from pointsman.report.comparison import ComparisonReport

ROUTING, BASELINE = "routing", "least-outstanding"
COLOURS = {-1: "green", 0: "dim", 1: "red"}
_COLUMN_WIDTH = 18  # of a change with its interval


def compare(
    context: typer.Context,
    config_file: ConfigFile = None,
    scenario: ScenarioNames = None,
    policies: Annotated[
        str | None,
        typer.Option(
            "--policies",
            metavar="A,B,C",
            help="Names, policy files, checkpoints or runs. Default: all that need no configuration.",
        ),
    ] = None,
    env: Annotated[
        str | None,
        typer.Option("--env", metavar="NAME", help="Another problem than routing: jobs. --set changes it."),
    ] = None,
    seeds: NumSeeds = None,
    baseline: Annotated[
        str | None,
        typer.Option(
            "--baseline",
            metavar="POLICY",
            help="What changes are measured against. Default: least-outstanding; jobs: sjf.",
        ),
    ] = None,
    objective: ObjectiveName = None,
    overrides: Overrides = None,
    threads: NumThreads = 0,
    as_json: AsJson = False,
    out: OutDir = None,
) -> None:
    """Compare routing policies on the same arrivals. Without CONFIG: the scenario steady-chat.

    With --env jobs: schedulers of GPU jobs, by their returns.

    Example: pointsman compare --scenario mixed-hardware --policies round-robin,least-work --out results
    """
    from pointsman.files import output_dir
    from pointsman.report.comparison import ComparisonReport

    command = shlex.join(["pointsman", *context.obj])
    if env is not None and env != ROUTING:
        refuse_routing_options({"CONFIG": config_file, "--scenario": scenario, "--objective": objective}, env)
        section = env_section({"kind": env}, overrides or [])
        compare_returns(section, split_names(policies), baseline, seeds, command, out, as_json)
        return
    baseline = baseline or BASELINE
    refuse_seed(overrides or [], "leave it out; --seeds says how many")
    cost = objective_named(objective)
    with ExitStack() as outputs:
        folder = outputs.enter_context(output_dir("--out", out)) if out else None
        outputs.enter_context(compilation_announced())
        scenarios = chosen_scenarios(config_file, scenario or [])
        wanted = situations(scenarios, overrides or [], report_seeds(seeds))
        started = time.perf_counter()
        comparisons = run_comparisons(wanted, split_names(policies), baseline, num_threads(threads), cost)
        wall_s = time.perf_counter() - started
        report = ComparisonReport(comparisons, command, wall_s, cost)
        if folder is not None:
            report.write(folder)
    if as_json:
        print_json(report.results())
    else:
        _print_report(report)


def split_names(text: str | None) -> list[str] | None:
    return [name.strip() for name in text.split(",")] if text is not None else None


def run_comparisons(
    wanted: Sequence[Situation],
    policies: Sequence[str] | None,
    baseline: str,
    threads: int,
    objective: Objective | None,
) -> list[Comparison]:
    """One after the other, with progress."""
    from pointsman.evaluation.compare import compare as run_comparison

    with progress("simulating", len(wanted)) as advance:
        return [
            run_comparison(
                one.name, one.what, one.configs, policies, baseline, one.folder, threads, advance, objective
            )
            for one in wanted
        ]


def _print_report(report: ComparisonReport) -> None:
    console = stdout()
    is_narrow = console.width < table_width(report.headlines)
    for comparison in report.comparisons:
        console.print(f"[bold]{comparison.name}[/bold]: {comparison.what}")
        console.print(headline_table(comparison, is_narrow), "")
    if len(report.comparisons) > 1:
        console.print(
            f"[bold]All {len(report.comparisons)} scenarios[/bold]: geometric mean of the ratios to "
            f"{report.baseline}"
        )
        console.print(_summary_table(report, is_narrow), "")
    for note in report.notes():
        console.print(note)


def table_width(metrics: Sequence[str]) -> int:
    """In which every change fits on a line: four of them in TABLE_WIDTH."""
    return TABLE_WIDTH + _COLUMN_WIDTH * (len(metrics) - 4)


def headline_table(comparison: Comparison, is_narrow: bool) -> Table:
    from pointsman.report.tables import HEADERS, headline_rows

    headers = [HEADERS[metric] for metric in comparison.headlines]
    table = plain_table("policy", *headers, right=headers)
    for row in headline_rows(comparison):
        cells = []
        for cell in row.cells:
            value = f"[bold]{cell.value}[/bold]" if cell.is_best else cell.value
            colour = COLOURS[cell.direction]
            text = compact(cell.change, is_narrow) or "baseline"
            cells.append(f"{value}\n[{colour}]{text}[/{colour}]")
        shares = f"{row.good_share} within SLO" + (f", {row.hit_share} cached" if row.hit_share else "")
        table.add_row(f"{row.label}\n[dim]{shares}[/dim]", *cells)
    return table


def _summary_table(report: ComparisonReport, is_narrow: bool) -> Table:
    from pointsman.report.comparison import summary_table

    header, rows = summary_table(report)
    table = plain_table(*header, right=header[1:])
    for row in rows:
        table.add_row(*(compact(text, is_narrow) for text in row))
    return table


def compact(change: str, is_narrow: bool) -> str:
    """As rich text, without the space before %: so four columns fit beside a policy's name.

    Where they don't, intervals get a line of their own.
    """
    text = change.replace(" %", "%").replace("[", r"\[")
    return text.replace(r" \[", "\n\\[") if is_narrow else text
