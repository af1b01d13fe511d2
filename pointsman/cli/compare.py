"""`pointsman compare`: several policies on the same arrivals."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated

import typer

from pointsman.cli.completion import problem_names
from pointsman.cli.console import (
    TABLE_WIDTH,
    compilation_announced,
    print_json,
    print_verdict,
    progress,
    say_written,
    stdout,
    warnings_noted,
)
from pointsman.cli.lists import plain_table
from pointsman.cli.options import (
    AsJson,
    ConfigFiles,
    NumSeeds,
    NumThreads,
    ObjectiveName,
    OutDir,
    Overrides,
    RayAddress,
    ScenarioNames,
    Situation,
    Suite,
    chosen_scenarios,
    objective_named,
    policies_of,
    policies_option,
    refuse_seed,
    report_seeds,
    simulators,
    situations,
)
from pointsman.cli.returns import compare_returns, named_env, refuse_routing_options

if TYPE_CHECKING:
    from rich.table import Table

    from pointsman.evaluation.compare import Comparison
    from pointsman.experiments.objective import Objective
    from pointsman.experiments.scenarios import Scenario
    from pointsman.experiments.simulate import Workers
    from pointsman.report.comparison import ComparisonReport

ROUTING, BASELINE = "routing", "least-outstanding"
COLOURS = {-1: "green", 0: "dim", 1: "red"}
_COLUMN_WIDTH = 18  # of a change with its interval


def compare(
    context: typer.Context,
    config_files: ConfigFiles = None,
    scenario: ScenarioNames = None,
    suite: Suite = None,
    policies: Annotated[
        str | None,
        policies_option(
            "--policies",
            "A,B,C",
            "Names, policy files, checkpoints or runs. Default: `default`, and all heuristics.",
        ),
    ] = None,
    env: Annotated[
        str | None,
        typer.Option(
            "--env",
            metavar="NAME",
            help="Another problem than routing: jobs or vidur. --set changes it.",
            autocompletion=problem_names,
        ),
    ] = None,
    seeds: NumSeeds = None,
    baseline: Annotated[
        str | None,
        policies_option(
            "--baseline",
            "POLICY",
            "What changes are measured against. Default: least-outstanding; jobs: sjf.",
        ),
    ] = None,
    objective: ObjectiveName = None,
    overrides: Overrides = None,
    threads: NumThreads = 0,
    ray: RayAddress = None,
    as_json: AsJson = False,
    out: OutDir = None,
) -> None:
    """Compare routing policies on the same arrivals, and say which to use. Without CONFIG: steady-chat.

    A trace is replayed several times for each policy, with neighbours in other places; intervals come from
    blocks of its requests. If a policy was trained or tuned on it, only the last fifth counts, which was kept
    back for that.

    With --env jobs, schedulers of GPU jobs are compared by their returns; with --env vidur, routing in Vidur.

    Example: pointsman compare --scenario mixed-hardware --policies round-robin,least-work --out results
    """
    from pointsman.files import output_dir
    from pointsman.report.comparison import ComparisonReport

    command = shlex.join(["pointsman", *context.obj])
    if env is not None and env != ROUTING:
        given = {"CONFIG": config_files, "--scenario": scenario, "--suite": suite, "--objective": objective}
        given |= {"--ray": ray}
        refuse_routing_options(given, env)
        section = named_env(env, overrides or [])
        named = split_names(policies)
        with policies_of("--baseline", [baseline] if baseline else None), policies_of("--policies", named):
            compare_returns(section, named, baseline, seeds, command, out, as_json)
        return
    baseline = baseline or BASELINE
    refuse_seed(overrides or [], "leave it out; --seeds says how many")
    cost = objective_named(objective)
    with ExitStack() as outputs:
        folder = outputs.enter_context(output_dir("--out", out)) if out else None
        outputs.enter_context(compilation_announced())
        warned = outputs.enter_context(warnings_noted())
        scenarios = chosen_scenarios(config_files or [], scenario or [], suite)
        named = split_names(policies)
        outputs.enter_context(policies_of("--baseline", [baseline]))
        outputs.enter_context(policies_of("--policies", named))
        wanted = situations(scenarios, overrides or [], report_seeds(seeds), [baseline, *(named or [])])
        started = time.perf_counter()
        with simulators(threads, ray) as workers:
            comparisons = run_comparisons(wanted, named, baseline, workers, cost)
        wall_s = time.perf_counter() - started
        report = ComparisonReport(comparisons, command, wall_s, cost, warned)
        if folder is not None:
            report.write(folder)
    if as_json:
        print_json(report.results())
    else:
        _print_report(report, _next_steps(report, scenarios, overrides or []))
    if out is not None:
        say_written(out)


def _next_steps(report: ComparisonReport, scenarios: Sequence[Scenario], overrides: Sequence[str]) -> str:
    """What to do with the answer."""
    best, _ = report.choice
    serve = f"pointsman serve --policy {best} --backend URL … routes by it"
    if len(scenarios) > 1:
        return f"Next: {serve}."
    (one,) = scenarios
    where = shlex.quote(str(one.path)) if one.path is not None else f"--scenario {one.name}"
    where += "".join(f" --set {shlex.quote(override)}" for override in overrides)
    return f"Next: pointsman plan {where} says how much traffic it can take; {serve}."


def split_names(text: str | None) -> list[str] | None:
    return [name.strip() for name in text.split(",")] if text is not None else None


def run_comparisons(
    wanted: Sequence[Situation],
    policies: Sequence[str] | None,
    baseline: str,
    workers: Workers,
    objective: Objective | None,
) -> list[Comparison]:
    """One after the other, with progress."""
    from pointsman.evaluation.compare import compare as run_comparison

    with progress("simulating", len(wanted)) as advance:
        return [
            run_comparison(
                one.name, one.what, one.configs, policies, baseline, one.folder, workers, advance, objective
            )
            for one in wanted
        ]


def _print_report(report: ComparisonReport, next_steps: str) -> None:
    console = stdout()
    _, verdict = report.choice
    print_verdict(console, verdict)
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
    console.print(f"\n{next_steps}")


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
        table.add_row(f"{row.label}\n[dim]{compact(shares, is_narrow=False)}[/dim]", *cells)
    return table


def _summary_table(report: ComparisonReport, is_narrow: bool) -> Table:
    from pointsman.report.comparison import summary_table

    header, rows = summary_table(report)
    table = plain_table(*header, right=header[1:])
    for row in rows:
        table.add_row(*(compact(text, is_narrow) for text in row))
    return table


def compact(change: str, is_narrow: bool) -> str:
    """A change as rich text, without the space before %: so four columns fit beside a policy's name.

    Where they don't, intervals get a line of their own.
    """
    text = change.replace(" %", "%").replace("[", r"\[")
    return text.replace(r" \[", "\n\\[") if is_narrow else text
