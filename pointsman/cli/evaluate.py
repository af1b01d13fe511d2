"""`pointsman evaluate`: is this policy better, where, by how much, and how sure is that?"""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pointsman.cli.compare import (
    COLOURS,
    compact,
    headline_table,
    run_comparisons,
    split_names,
    table_width,
)
from pointsman.cli.completion import policy_names
from pointsman.cli.console import (
    TABLE_WIDTH,
    compilation_announced,
    print_json,
    print_verdict,
    say_written,
    stdout,
    warnings_noted,
)
from pointsman.cli.lists import plain_table
from pointsman.cli.live import LIVE_AGAINST, LIVE_SEEDS, measure, refuse_with_live
from pointsman.cli.options import (
    AsJson,
    ConfigFiles,
    Keep,
    NumSeeds,
    NumThreads,
    ObjectiveName,
    OutDir,
    Overrides,
    RayAddress,
    ScenarioNames,
    Suite,
    chosen_scenarios,
    kept_situations,
    known_origin,
    objective_named,
    policies_of,
    policies_option,
    refuse_seed,
    report_seeds,
    simulators,
)
from pointsman.cli.returns import env_of, env_section, evaluate_returns, refuse_routing_options
from pointsman.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table

    from pointsman.evaluation.compare import Comparison
    from pointsman.report.evaluation import Change, EvaluationReport

AGAINST = "least-outstanding,random,round-robin,least-delay,late-binding,default"


def evaluate(
    context: typer.Context,
    policy: Annotated[
        str,
        typer.Argument(
            metavar="POLICY",
            help="A run directory, checkpoint, policy file, or name.",
            autocompletion=policy_names,
        ),
    ],
    config_files: ConfigFiles = None,
    scenario: ScenarioNames = None,
    suite: Suite = None,
    against: Annotated[
        str | None,
        policies_option(
            "--against", "A,B,C", "Policies to beat, the main one first. Default: the usual ones."
        ),
    ] = None,
    seeds: NumSeeds = None,
    objective: ObjectiveName = None,
    keep: Keep = None,
    overrides: Overrides = None,
    threads: NumThreads = 0,
    ray: RayAddress = None,
    live: Annotated[
        list[str] | None,
        typer.Option(
            "--live", metavar="URL", help="A real server to measure on, through our router; repeat it."
        ),
    ] = None,
    as_json: AsJson = False,
    out: OutDir = None,
) -> None:
    """Judge a policy against several others, on report seeds, which nothing is tuned or trained on.

    Every policy serves the same arrivals until the last request is done, and all requests count. Changes
    compare the means of the two policies, with 95 % intervals. Without CONFIG, --scenario or --suite, a
    policy is judged on what it was trained or tuned on (of a trace, the last fifth), else on steady-chat.

    A policy for GPU jobs is judged by its returns, on what it was trained on; --set changes that.

    With --live, the arrivals of one scenario or configuration are sent to real servers in real time, once for
    each policy and seed; by default 6 seeds, against least-outstanding.

    Example: pointsman evaluate policy.yaml --suite all --objective balanced --out results
    """
    from pointsman.files import output_dir
    from pointsman.report.comparison import ComparisonReport
    from pointsman.report.evaluation import EvaluationReport
    from pointsman.report.evaluation_page import write_evaluation

    command = shlex.join(["pointsman", *context.obj])
    _refuse_configuration(policy)
    env = env_of(policy)
    if env is not None:
        given = {"--scenario": scenario, "--suite": suite, "CONFIG": config_files, "--objective": objective}
        given |= {"--live": live, "--keep": keep, "--ray": ray}
        refuse_routing_options(given, env["kind"])
        section = env_section(env, overrides or [])
        with policies_of("--against", split_names(against)):
            evaluate_returns(policy, section, split_names(against), seeds, command, out, as_json)
        return
    refuse_seed(overrides or [], "leave it out; --seeds says how many")
    cost = objective_named(objective, keep)
    against = against or (LIVE_AGAINST if live else AGAINST)
    others = split_names(against) or []
    if live:
        refuse_with_live([*map(str, config_files or []), *(scenario or [])], suite, threads, ray)
        seeds = LIVE_SEEDS if seeds is None else seeds
    with ExitStack() as outputs:
        folder = outputs.enter_context(output_dir("--out", out)) if out else None
        outputs.enter_context(policies_of("--against", others))
        outputs.enter_context(compilation_announced())
        warned = outputs.enter_context(warnings_noted())
        is_told = config_files or scenario or suite
        sources, changes = ([], []) if is_told else known_origin(policy)
        scenarios = chosen_scenarios(
            config_files or [], scenario or [], suite, sources[:1] if live else sources, changes
        )
        wanted = kept_situations(scenarios, overrides or [], report_seeds(seeds))
        started = time.perf_counter()
        policies = [policy, *others]
        if live:
            comparisons = [measure(wanted[0], policies, others[0], live, cost)]
        else:
            with simulators(threads, ray) as workers:
                comparisons = run_comparisons(wanted, policies, others[0], workers, cost)
        wall_s = time.perf_counter() - started
        report = EvaluationReport(ComparisonReport(comparisons, command, wall_s, cost, warned))
        if not report.against:
            raise InputError("--against", against, "is the policy itself", "name others")
        if folder is not None:
            write_evaluation(report, folder)
    if as_json:
        print_json(report.results())
    else:
        print_report(report)
    if out is not None:
        say_written(out)


def _refuse_configuration(policy: str) -> None:
    """The most natural slip: a cluster where a policy is asked for."""
    from pointsman.spec import read_yaml

    path = Path(policy).expanduser()
    if path.suffix in (".yaml", ".yml") and path.is_file() and "workload" in read_yaml(path, "policy"):
        problem = "is a cluster with its traffic, not a policy"
        remedy = (
            f"`pointsman compare {policy}` compares policies on it, `pointsman evaluate POLICY {policy}` one"
        )
        raise InputError("POLICY", policy, problem, remedy)


def print_report(report: EvaluationReport) -> None:
    console = stdout()
    print_verdict(console, report.verdict)
    is_narrow = console.width < table_width(report.base.headlines)
    if len(report.comparisons) == 1:
        (one,) = report.comparisons
        console.print(f"[bold]{one.name}[/bold]: {one.what}")
        console.print(headline_table(one, is_narrow), "")
        console.print(f"[bold]{report.policy}[/bold] on {one.name}, and how it differs from the others")
        console.print(_metric_table(report, one), "")
    else:
        console.print(f"[bold]{report.policy}[/bold] against {report.against[0]}")
        console.print(_change_table("scenario", report, report.scenario_rows(), is_narrow), "")
        count = len(report.comparisons)
        console.print(f"[bold]{report.policy}[/bold] on all {count} scenarios: geometric mean of the ratios")
        console.print(_change_table("against", report, report.summary_rows(), is_narrow), "")
    for note in report.base.notes("the policy named"):
        console.print(note)


def _metric_table(report: EvaluationReport, one: Comparison) -> Table:
    is_narrow = len(report.against) > 3 or stdout().width < TABLE_WIDTH
    names = [name.replace("-", "-\n") if is_narrow else name for name in report.against]
    table = plain_table("", report.policy, *names, right=[report.policy, *names])
    table.columns[0].no_wrap = True
    for header, value, changes in report.metric_rows(one):
        table.add_row(header, value, *_cells(changes, is_narrow))
    return table


def _change_table(
    first: str, report: EvaluationReport, rows: Sequence[tuple[str, Sequence[Change]]], is_narrow: bool
) -> Table:
    from pointsman.report.tables import HEADERS

    headers = [HEADERS[metric] for metric in report.base.headlines]
    table = plain_table(first, *headers, right=headers)
    for name, changes in rows:
        table.add_row(name, *_cells(changes, is_narrow))
    return table


def _cells(changes: Sequence[Change], is_narrow: bool) -> list[str]:
    return [
        f"[{COLOURS[one.direction]}]{compact(one.text, is_narrow)}[/{COLOURS[one.direction]}]"
        for one in changes
    ]
