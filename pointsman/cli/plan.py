"""`pointsman plan`: how much traffic a cluster takes in time, and how many servers a target takes."""

from __future__ import annotations

import shlex
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from pointsman.cli.compare import split_names
from pointsman.cli.console import (
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
    ConfigFile,
    NumThreads,
    OutDir,
    Overrides,
    ScenarioName,
    base_dir,
    num_threads,
    policies_of,
    policies_option,
    refuse_seed,
    report_seeds,
    resolve,
    trace_set,
)
from pointsman.errors import InputError

if TYPE_CHECKING:
    from pointsman.evaluation.goodput import Planner
    from pointsman.report.plan import PlanReport

POLICIES = ("round-robin", "least-outstanding", "late-binding", "default")
BASELINE = "least-outstanding"
NUM_SEEDS = 6
GROWTH = 2.0  # of the traffic, if no target is given


def plan(
    context: typer.Context,
    config_file: ConfigFile = None,
    scenario: ScenarioName = None,
    target: Annotated[
        float | None,
        typer.Option(
            "--target", metavar="RPS", help="Requests/s to serve in time. Default: twice the traffic."
        ),
    ] = None,
    share: Annotated[
        float, typer.Option("--share", metavar="S", help="Share of the requests that must be in time.")
    ] = 0.99,
    policies: Annotated[
        str | None,
        policies_option(
            "--policies",
            "A,B,C",
            f"Names, policy files, checkpoints or runs. Default: {', '.join(POLICIES)} and CONFIG's.",
        ),
    ] = None,
    seeds: Annotated[
        int, typer.Option("--seeds", metavar="N", help="Runs at each rate, from seed 1000 on.")
    ] = NUM_SEEDS,
    overrides: Overrides = None,
    threads: NumThreads = 0,
    as_json: AsJson = False,
    out: OutDir = None,
) -> None:
    """Find how much traffic a cluster can take within its service level, and what more servers would buy.

    It finds for each policy the highest rate at which 99 % of the requests meet `slo`, and for the best
    policy what one more server of each kind adds and how many servers a target takes. CONFIG's traffic is
    made faster and slower for that; a trace is replayed as a whole. Events of the cluster are left out.

    Example: pointsman plan my-cluster.yaml --target 40 --set slo.ttft_s=1
    """
    from pointsman.evaluation.goodput import Planner
    from pointsman.experiments.scenarios import DEFAULT
    from pointsman.files import output_dir
    from pointsman.report.plan import PlanReport

    if not 0 < share < 1:
        raise InputError("--share", share, "is not a share of the requests", "for example 0.99")
    if target is not None and not 0 < target < float("inf"):
        raise InputError("--target", target, "is not a rate", "give requests/s, for example 40")
    refuse_seed(overrides or [], "leave it out; --seeds says how many")
    command = shlex.join(["pointsman", *context.obj])
    with ExitStack() as outputs:
        folder = outputs.enter_context(output_dir("--out", out)) if out else None
        outputs.enter_context(compilation_announced())
        warned = outputs.enter_context(warnings_noted())
        config = resolve(config_file, scenario, overrides or [])
        planner = Planner(
            config, share, report_seeds(seeds), base_dir(config_file, scenario), num_threads(threads)
        )
        name = config_file.stem if config_file is not None else scenario or DEFAULT
        name = trace_set(config, overrides or []) or name
        with policies_of("--policies", split_names(policies)):
            found = _found(planner, split_names(policies), target)
        report = PlanReport(command=command, warnings=warned, name=name, **found)
        if folder is not None:
            report.write(folder)
    if as_json:
        print_json(report.results())
    else:
        _print_plan(report)
    if out is not None:
        say_written(out)


def _found(planner: Planner, policies: list[str] | None, target_rps: float | None) -> dict[str, Any]:
    """All searches, with progress: what a `PlanReport` shows."""
    from pointsman.evaluation.compare import policy_named
    from pointsman.evaluation.goodput import Case, best_of
    from pointsman.experiments.setting import kind_names

    config = planner.config
    names = dict.fromkeys([*(policies or [*POLICIES, config.policy.label]), BASELINE])
    specs = {spec.label: spec for spec in (policy_named(name, config.policy) for name in names)}
    kinds = kind_names(config.cluster)
    with progress("planning", 3.0) as advance:
        found = planner.goodputs([Case(config, spec) for spec in specs.values()], advance)
        goodputs = dict(zip(specs, found, strict=True))
        best = best_of(goodputs, BASELINE)
        larger = [Case(planner.with_more(group, 1), specs[best]) for group in range(len(kinds))]
        one_more = dict(zip(kinds, planner.goodputs(larger, advance), strict=True))
        traffic_rps = planner.own_rate_rps
        target_rps = GROWTH * traffic_rps if target_rps is None else target_rps
        servers = {}
        for group, kind in enumerate(kinds):
            now, then = goodputs[best], one_more[kind]
            servers[kind] = planner.servers_for(target_rps, group, specs[best], now, then)
            advance(1 / len(kinds))
    return {
        "config": config,
        "seeds": planner.seeds,
        "share": planner.share,
        "traffic_rps": traffic_rps,
        "target_rps": target_rps,
        "baseline": BASELINE,
        "policies": goodputs,
        "one_more": one_more,
        "servers": servers,
        "is_shared": planner.is_shared,
        "counts": dict(zip(kinds, (group.count for group in config.cluster.groups), strict=True)),
    }


def _print_plan(report: PlanReport) -> None:
    from pointsman.report.plan import POLICY_COLUMNS

    console = stdout()
    print_verdict(console, report.verdict)
    rows = report.policy_rows()
    highest = max(one.rate_rps for one in report.policies.values())
    widths = [max(map(len, column)) for column in zip(("policy", *POLICY_COLUMNS), *rows, strict=True)]
    room = min(20, console.width - sum(widths) - 2 * len(widths))
    has_bars = room >= 5 and not report.is_hopeless
    table = plain_table("policy", *POLICY_COLUMNS, *[""] * has_bars, right=POLICY_COLUMNS)
    for row, one in zip(rows, report.policies.values(), strict=True):
        bars = ["█" * round(room * one.rate_rps / highest)] if has_bars else []
        table.add_row(*map(escape, row), *bars)
    console.print(table, "")
    columns = report.kind_columns()
    table = plain_table("servers", *columns, right=columns)
    for cells in report.kind_rows():
        table.add_row(*map(escape, cells))
    console.print(table, "")
    for note in report.notes():
        console.print(escape(note))
