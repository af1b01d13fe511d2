"""`evaluate` and `compare` where policies are judged by returns: every problem but routing."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pointsman.cli.console import (
    compilation_announced,
    print_json,
    print_verdict,
    progress,
    say_written,
    stdout,
)
from pointsman.cli.lists import plain_table
from pointsman.cli.options import report_seeds
from pointsman.errors import InputError

if TYPE_CHECKING:
    from pointsman.evaluation.returns import Judge, Policies
    from pointsman.inference.checkpoint import Checkpoint
    from pointsman.report.returns import ReturnsReport

COLOURS = {-1: "green", 0: "dim", 1: "red"}


def env_section(base: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A section `env`, complete, with `key=value` applied."""
    from pointsman.evaluation.problem import complete
    from pointsman.spec import apply_override

    data = dict(base)
    for override in overrides:
        apply_override(data, override, "window=20")
    return complete(data)


def named_env(kind: str, overrides: Sequence[str]) -> dict[str, Any]:
    """The section `env` of the problem that --env names."""
    from pointsman.evaluation.problem import find_problem

    try:
        find_problem(kind)
    except InputError as error:
        field = "--env" if error.field == "env.kind" else error.field
        raise InputError(field, error.value, error.problem, error.remedy) from None
    return env_section({"kind": kind}, overrides)


def refuse_routing_options(given: Mapping[str, Any], kind: str) -> None:
    for option, value in given.items():
        if value:
            shown = value[0] if isinstance(value, list) else str(value)
            raise InputError(option, shown, f"means nothing for {kind}", "leave it out")


def env_of(policy: str) -> Mapping[str, Any] | None:
    """The section `env` that a learned policy was trained on; None for routing."""
    from pointsman.inference.checkpoint import load_checkpoint
    from pointsman.routing.policy import PolicySpec
    from pointsman.spec import parse_spec

    path = parse_spec(PolicySpec, {"kind": policy}, "policy").checkpoint
    section: Mapping[str, Any] | None = None
    if path is not None:
        section = load_checkpoint(path, "policy").metadata.get("env")
    return section


def compare_returns(
    section: Mapping[str, Any],
    policies: Sequence[str] | None,
    baseline: str | None,
    num_seeds: int | None,
    command: str,
    out: Path | None,
    as_json: bool,
) -> None:
    """Several policies, all compared with the baseline."""
    from pointsman.evaluation.problem import make_judge

    judge = make_judge(section)
    baseline = baseline or judge.baseline
    names = list(judge.rivals) if policies is None else list(policies)
    names = names if baseline in names else [baseline, *names]
    wanted = dict(named_policy(judge, name) for name in names)
    label, _ = named_policy(judge, baseline)
    _show(judge, wanted, section, label, None, num_seeds, command, out, as_json)


def evaluate_returns(
    policy: str,
    section: Mapping[str, Any],
    against: Sequence[str] | None,
    num_seeds: int | None,
    command: str,
    out: Path | None,
    as_json: bool,
) -> None:
    """One policy against each of the others, or against all heuristics."""
    from pointsman.evaluation.problem import make_judge

    judge = make_judge(section)
    judged, _ = named_policy(judge, policy)
    others = list(judge.rivals) if against is None else list(against)
    wanted = dict(named_policy(judge, name) for name in [policy, *others])
    if len(wanted) < 2:
        raise InputError("--against", ",".join(others), "is the policy itself", "name others")
    _show(judge, wanted, section, judge.baseline, judged, num_seeds, command, out, as_json)


def _show(
    judge: Judge,
    policies: Policies,
    section: Mapping[str, Any],
    baseline: str,
    judged: str | None,
    num_seeds: int | None,
    command: str,
    out: Path | None,
    as_json: bool,
) -> None:
    """Play the episodes, write the page, print the table."""
    from pointsman.evaluation.returns import play_all
    from pointsman.files import output_dir
    from pointsman.report.returns import ReturnsReport
    from pointsman.report.returns_page import write_returns

    seeds = report_seeds(judge.num_episodes if num_seeds is None else num_seeds)
    with ExitStack() as outputs:
        folder = outputs.enter_context(output_dir("--out", out)) if out else None
        outputs.enter_context(compilation_announced())
        started = time.perf_counter()
        with progress("playing", len(policies)) as advance:
            returns = play_all(judge, policies, baseline, seeds, advance)
        wall_s = time.perf_counter() - started
        report = ReturnsReport(returns, judge.headers, section, command, wall_s, judged)
        if folder is not None:
            write_returns(report, folder)
    if as_json:
        print_json(report.results())
    else:
        _print_report(report)
    if out is not None:
        say_written(out)


def named_policy(judge: Judge, name: str) -> tuple[str, str | Checkpoint]:
    """Return the name that tables show, and the policy: a heuristic, or the checkpoint at a path."""
    from pointsman.inference.checkpoint import load_checkpoint
    from pointsman.routing.sources import look_up

    if name in judge.heuristics:
        return name, name
    found = look_up(name, tuple(judge.heuristics))
    if "checkpoint" not in found:
        raise InputError("policy", name, "is not a trained policy", "name a run of `pointsman train`")
    return found["name"], load_checkpoint(found["checkpoint"])


def _print_report(report: ReturnsReport) -> None:
    from pointsman.report.returns_page import answer_of

    console = stdout()
    print_verdict(console, answer_of(report))
    table = plain_table("policy", *report.columns, right=report.columns)
    for row in report.rows():
        mean = f"[bold]{_escaped(row.mean)}[/bold]" if row.is_best else _escaped(row.mean)
        gain = f"[{COLOURS[row.direction]}]{_escaped(row.gain)}[/{COLOURS[row.direction]}]"
        shown = (text.replace(" %", "%") for text in row.shown)
        table.add_row(row.policy, mean, row.worst_block, gain, *shown)
    console.print(table, "")
    for note in report.notes():
        console.print(note)


def _escaped(text: str) -> str:
    return text.replace("[", r"\[")
