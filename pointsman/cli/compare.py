"""`pointsman compare`: several policies on the same arrivals."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pointsman.cli.console import TABLE_WIDTH, compilation_announced, print_json, progress, stdout
from pointsman.cli.lists import plain_table
from pointsman.cli.options import AsJson, ConfigFile, Overrides, base_dir, both_given
from pointsman.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table

    from pointsman.config import Config
    from pointsman.evaluation.compare import Comparison
    from pointsman.report.comparison import ComparisonReport

NUM_SEEDS = 16
_COLOURS = {-1: "green", 0: "dim", 1: "red"}


def compare(
    context: typer.Context,
    config_file: ConfigFile = None,
    scenario: Annotated[
        list[str] | None,
        typer.Option("--scenario", metavar="NAME", help="A named scenario; repeat it, or give `all`."),
    ] = None,
    policies: Annotated[
        str | None,
        typer.Option("--policies", metavar="A,B,C", help="Default: all that need no configuration."),
    ] = None,
    seeds: Annotated[
        int, typer.Option("--seeds", metavar="N", help="Runs of each policy, from seed 1000 on.")
    ] = NUM_SEEDS,
    baseline: Annotated[
        str, typer.Option("--baseline", metavar="POLICY", help="What changes are measured against.")
    ] = "least-outstanding",
    overrides: Overrides = None,
    threads: Annotated[
        int, typer.Option("--threads", metavar="N", help="0 = one for each core; the result is the same.")
    ] = 0,
    as_json: AsJson = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Write results.json, table.md and report.html with plots."),
    ] = None,
) -> None:
    """Compare routing policies on the same arrivals. Without CONFIG: the scenario steady-chat.

    Example: pointsman compare --scenario mixed-hardware --policies round-robin,least-work --out results
    """
    from pointsman.evaluation.compare import compare as run_comparison
    from pointsman.report.comparison import ComparisonReport
    from pointsman.report.files import output_dir

    _check(seeds, threads, overrides or [])
    with ExitStack() as outputs:
        folder = outputs.enter_context(output_dir("--out", out)) if out else None
        outputs.enter_context(compilation_announced())
        situations = _situations(config_file, scenario or [], overrides or [], seeds)
        names = policies.split(",") if policies is not None else None
        started = time.perf_counter()
        comparisons = []
        with progress("simulating", len(situations)) as advance:
            for name, what, configs in situations:
                comparison = run_comparison(
                    name,
                    what,
                    configs,
                    [policy.strip() for policy in names] if names else None,
                    baseline,
                    base_dir(config_file),
                    threads or _num_cores(),
                    advance,
                )
                comparisons.append(comparison)
        wall_s = time.perf_counter() - started
        report = ComparisonReport(comparisons, shlex.join(["pointsman", *context.obj]), wall_s)
        if folder is not None:
            report.write(folder)
    if as_json:
        print_json(report.results())
    else:
        _print_report(report)


def _num_cores() -> int:
    """Those this process may use, where the system tells."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _check(seeds: int, threads: int, overrides: Sequence[str]) -> None:
    from pointsman.evaluation.scenarios import REPORT_SEEDS

    if not 1 <= seeds <= len(REPORT_SEEDS):
        raise InputError("--seeds", seeds, "is out of range", f"use 1 to {len(REPORT_SEEDS)}")
    if threads < 0:
        raise InputError("--threads", threads, "is negative", "use 0 for one thread a core")
    for override in overrides:
        if override.split("=")[0] == "seed":
            raise InputError(
                "--set seed",
                override.partition("=")[2],
                "compare has seeds of its own",
                "leave it out; --seeds says how many",
            )


def _situations(
    file: Path | None, names: Sequence[str], overrides: Sequence[str], num_seeds: int
) -> list[tuple[str, str, list[Config]]]:
    """Name, description, and a configuration for each seed."""
    from pointsman.config import load_config
    from pointsman.evaluation.scenarios import DEFAULT, REPORT_SEEDS, SCENARIOS, find_scenario

    seeds = REPORT_SEEDS[:num_seeds]
    if file is not None:
        if names:
            raise both_given(file)
        config = load_config(file, overrides)
        return [(file.stem, str(file), [config.model_copy(update={"seed": seed}) for seed in seeds])]
    wanted = list(SCENARIOS) if "all" in names else dict.fromkeys(names or [DEFAULT])
    found = [find_scenario(name) for name in wanted]
    return [(one.name, one.what, [one.config(seed, overrides) for seed in seeds]) for one in found]


def _print_report(report: ComparisonReport) -> None:
    console = stdout()
    is_narrow = console.width < TABLE_WIDTH
    for comparison in report.comparisons:
        console.print(f"[bold]{comparison.name}[/bold]: {comparison.what}")
        console.print(_table(comparison, is_narrow), "")
    if len(report.comparisons) > 1:
        console.print(
            f"[bold]All {len(report.comparisons)} scenarios[/bold]: geometric mean of the ratios to "
            f"{report.baseline}"
        )
        console.print(_summary_table(report, is_narrow), "")
    for note in report.notes():
        console.print(note)


def _table(comparison: Comparison, is_narrow: bool) -> Table:
    from pointsman.evaluation.compare import HEADLINES
    from pointsman.report.tables import HEADERS, headline_rows

    headers = [HEADERS[metric] for metric in HEADLINES]
    table = plain_table("policy", *headers, right=headers)
    for row in headline_rows(comparison):
        cells = []
        for cell in row.cells:
            value = f"[bold]{cell.value}[/bold]" if cell.is_best else cell.value
            colour = _COLOURS[cell.direction]
            text = _compact(cell.change, is_narrow) or "baseline"
            cells.append(f"{value}\n[{colour}]{text}[/{colour}]")
        table.add_row(f"{row.label}\n[dim]{row.good_share} within SLO[/dim]", *cells)
    return table


def _summary_table(report: ComparisonReport, is_narrow: bool) -> Table:
    from pointsman.report.comparison import summary_table

    header, rows = summary_table(report)
    table = plain_table(*header, right=header[1:])
    for row in rows:
        table.add_row(*(_compact(text, is_narrow) for text in row))
    return table


def _compact(change: str, is_narrow: bool) -> str:
    """As rich text, without the space before %: so four columns fit beside a policy's name.

    Where they don't, intervals get a line of their own.
    """
    text = change.replace(" %", "%").replace("[", r"\[")
    return text.replace(r" \[", "\n\\[") if is_narrow else text
