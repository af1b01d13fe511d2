"""`pointsman tune`: the best weights of a linear score, or parameters of a heuristic, as a policy file."""

from __future__ import annotations

import math
import shlex
import time
from contextlib import ExitStack
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from pointsman.cli.completion import objective_names, tunable_names
from pointsman.cli.console import compilation_announced, print_json, progress, say, stdout, warnings_noted
from pointsman.cli.lists import plain_table
from pointsman.cli.options import (
    AsJson,
    ConfigFiles,
    Keep,
    NumThreads,
    Overrides,
    RayAddress,
    ScenarioNames,
    Suite,
    chosen_scenarios,
    refuse_seed,
    simulators,
)
from pointsman.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table

    from pointsman.evaluation.tune import Budget, Situation, Tuned
    from pointsman.experiments.objective import Limit, Objective

NUM_DECISIONS = 20_000_000


def tune(
    context: typer.Context,
    config_files: ConfigFiles = None,
    scenario: ScenarioNames = None,
    suite: Suite = None,
    policy: Annotated[
        str,
        typer.Option(
            "--policy",
            metavar="NAME",
            help="What to tune: a heuristic with parameters.",
            autocompletion=tunable_names,
        ),
    ] = "linear-score",
    objective: Annotated[
        str,
        typer.Option(
            "--objective",
            metavar="NAME",
            help="What to minimise: balanced, mean, tail or slo.",
            autocompletion=objective_names,
        ),
    ] = "balanced",
    keep: Keep = None,
    decisions: Annotated[
        int | None,
        typer.Option(
            "--decisions", metavar="N", help=f"Simulated decisions to spend; default {NUM_DECISIONS:,}."
        ),
    ] = None,
    minutes: Annotated[
        float | None, typer.Option("--minutes", metavar="M", help="Time to spend, instead of --decisions.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="S", help="Seed of the search.", min=0)] = 0,
    overrides: Overrides = None,
    threads: NumThreads = 2,
    ray: RayAddress = None,
    as_json: AsJson = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE.yaml", help="Write the policy, to use like any other."),
    ] = None,
) -> None:
    """Find the weights of the policy linear-score that serve a cluster best, or a heuristic's parameters.

    It tunes on CONFIG, named scenarios or a suite (default: steady-chat), and only on selection seeds or the
    first four fifths of a trace; `pointsman evaluate` then judges the policy on other seeds or the rest. With
    --decisions, the same seed gives the same policy. Ctrl-C ends the search and keeps the best so far.

    Example: pointsman tune --scenario mixed-hardware --objective tail --out policy.yaml
    """
    from pointsman.evaluation import tune as evaluation
    from pointsman.experiments.objective import find_objective, parse_keep
    from pointsman.files import output_file

    refuse_seed(overrides or [], "leave it out; --seed is that of the search")
    aim = find_objective(objective, parse_keep(keep or []))
    budget = _budget(decisions, minutes)
    _check_tunable(policy)
    with ExitStack() as outputs:
        file = outputs.enter_context(output_file("--out", out)) if out else None
        outputs.enter_context(compilation_announced())
        warned = outputs.enter_context(warnings_noted())
        situations = _situations(config_files or [], scenario or [], suite, overrides or [])
        started = time.perf_counter()
        with simulators(threads, ray) as workers, progress("tuning", 1.0) as advance:
            tuned = evaluation.tune(
                [one.search for one in situations],
                aim,
                budget,
                seed,
                workers,
                advance,
                [one.check for one in situations],
                policy,
            )
        wall_s = time.perf_counter() - started
        command = shlex.join(["pointsman", *context.obj])
        result = _result(tuned, aim, situations, overrides or [], command)
        if file is not None:
            _write(file, result)
    if as_json:
        print_json(result | {"warnings": warned, "timings": {"wall_s": wall_s}})
    else:
        _print_tuned(tuned, aim, situations, wall_s)
    if out is not None:
        say(f"wrote {out}; judge it on {_kept(situations)}: pointsman evaluate {shlex.quote(str(out))}")
    if tuned.is_stopped:
        say("interrupted: the best so far, which has not been checked yet")
        raise typer.Exit(130)


def _check_tunable(policy: str) -> None:
    from pointsman.evaluation.tune import tunable_kinds
    from pointsman.routing.heuristics import HEURISTICS

    tunable = tunable_kinds()
    if policy not in tunable:
        problem = "has no parameters" if policy in HEURISTICS else "is not a heuristic"
        raise InputError("--policy", policy, problem, f"name one of {', '.join(tunable)}")


def _budget(decisions: int | None, minutes: float | None) -> Budget:
    from pointsman.evaluation.tune import Budget

    if decisions is not None and minutes is not None:
        raise InputError("--minutes", minutes, "given beside --decisions", "give one of the two")
    if decisions is not None and decisions < 1:
        raise InputError("--decisions", decisions, "is not positive", f"for example {NUM_DECISIONS}")
    if minutes is not None and not 0 < minutes < float("inf"):
        raise InputError("--minutes", minutes, "is not positive", "for example 2")
    return Budget(minutes=minutes) if minutes is not None else Budget(decisions=decisions or NUM_DECISIONS)


class Tuning(NamedTuple):
    """A situation: what is searched on, what has the last word, and which part of a trace each is, if any."""

    name: str
    source: str  # where `evaluate` finds it again
    search: Situation
    check: Situation
    parts: dict[str, str | None]
    trace: str | None = None  # its digest


def _situations(files: list[Path], names: list[str], suite: str | None, overrides: list[str]) -> list[Tuning]:
    from pointsman.evaluation.tune import search_and_check
    from pointsman.experiments.own import PARTS, part_text, parts_text, trace_digest
    from pointsman.experiments.scenarios import UNSEEN, short_names

    scenarios = chosen_scenarios(files, names, suite)
    for one in scenarios:
        if one.path is None and one.name in UNSEEN:
            problem = "is kept for judging what was never tuned on it"
            raise InputError("--scenario", one.name, problem, "name others; see `pointsman scenarios`")
        if one.path is not None:
            say(f"{one.name}: {parts_text(one, overrides)}")
    called = short_names([str(one.path or one.name) for one in scenarios])
    return [
        Tuning(
            name,
            str(one.path.resolve()) if one.path is not None else one.name,
            *search_and_check(one, overrides),
            {part: part_text(one, part, overrides) for part in PARTS},
            trace_digest(one, overrides),
        )
        for name, one in zip(called, scenarios, strict=True)
    ]


def _used(situations: list[Tuning], part: str, seeds: range) -> str:
    """Seeds, or the parts of traces that stand for them."""
    parts = [one.parts[part] for one in situations]
    texts = [text for text in parts if text is not None]
    if None in parts:
        texts.insert(0, f"seeds {seeds[0]}–{seeds[-1]}")
    return ", ".join(texts)


def _kept(situations: list[Tuning]) -> str:
    from pointsman.experiments.own import REPORT

    parts = [text for one in situations if (text := one.parts[REPORT]) is not None]
    return "other seeds" if len(parts) < len(situations) else ", ".join(parts)


def _result(
    tuned: Tuned, objective: Objective, situations: list[Tuning], changes: list[str], command: str
) -> dict[str, Any]:
    from pointsman.experiments.own import SELECTION, TRAINING
    from pointsman.plain import provenance

    ratio = None if tuned.is_stopped else round(tuned.cost_ratio, 4)
    return {
        "policy": tuned.policy.model_dump(mode="json", exclude_defaults=True),
        "made": {
            "command": command,
            **provenance(),
            "objective": objective.model_dump(mode="json"),
            "situations": [one.name for one in situations],
            "sources": [one.source for one in situations],
            "changes": changes,
            "traces": [one.trace for one in situations if one.trace is not None],
            "cost_ratio_to_least_outstanding": ratio,
            "limits_exceeded_by": None if tuned.is_stopped else _exceeded_by(tuned, situations, objective),
            "searched": _used(situations, TRAINING, tuned.search_seeds),
            "checked": None if tuned.is_stopped else _used(situations, SELECTION, tuned.check_seeds),
            "generations": tuned.num_generations,
            "decisions": tuned.num_decisions,
        },
    }


def _write(file: IO[str], result: dict[str, Any]) -> None:
    import yaml

    file.write(
        "# A policy of `pointsman tune`. Wherever a policy is asked for, give the path of this file.\n"
    )
    yaml.safe_dump(result, file, sort_keys=False, allow_unicode=True, width=100)


def _found_table(tuned: Tuned) -> Table:
    from pointsman.report.tables import number, percent
    from pointsman.routing.heuristics import HEURISTICS

    if tuned.policy.parameters:
        table = plain_table("parameter", "value", "usual", right=("value", "usual"))
        for one in HEURISTICS[tuned.policy.kind].parameters:
            table.add_row(one.name, number(tuned.policy.parameters[one.name]), number(one.default))
        return table
    table = plain_table("signal", "weight", "influence", right=("weight", "influence"))
    weights = tuned.policy.weights
    for name in sorted(weights, key=lambda name: -tuned.influence[name]):
        table.add_row(name, number(weights[name]), percent(tuned.influence[name]))
    return table


def _broken(tuned: Tuned, situations: list[Tuning], metric: str) -> dict[str, float]:
    """Where the check found a limit not kept, and by what share the time is longer than that; worst first."""
    from pointsman.experiments.objective import TOLERANCE

    found = zip((one.name for one in situations), tuned.breaches[metric], strict=True)
    worst_first = sorted(found, key=lambda pair: -pair[1])
    return {name: math.expm1(breach) for name, breach in worst_first if breach > TOLERANCE}


def _exceeded_by(tuned: Tuned, situations: list[Tuning], objective: Objective) -> dict[str, float]:
    """The limits that the check found not kept, each with the largest share beyond it."""
    broken = {limit.metric: _broken(tuned, situations, limit.metric) for limit in objective.limits}
    return {metric: round(max(shares.values()), 4) for metric, shares in broken.items() if shares}


def _kept_or_not(limit: Limit, tuned: Tuned, situations: list[Tuning]) -> str:
    """A limit counts as a cost in the search, and so it may be broken where that pays."""
    from pointsman.report.tables import percent

    if tuned.is_stopped:
        return f"Not checked: {limit.text}."
    broken = _broken(tuned, situations, limit.metric)
    if not broken:
        return f"Kept: {limit.text}."
    worst, share = next(iter(broken.items()))
    if len(situations) == 1:
        return f"[bold]Not kept[/bold]: {limit.text}; it is {percent(share)} longer than that."
    where = f"on {len(broken)} of {len(situations)} scenarios"
    return f"[bold]Not kept[/bold] {where}: {limit.text}; on {worst} it is {percent(share)} longer than that."


def _print_tuned(tuned: Tuned, objective: Objective, situations: list[Tuning], wall_s: float) -> None:
    from pointsman.evaluation.bootstrap import Ratio
    from pointsman.experiments.own import SELECTION
    from pointsman.plain import counted
    from pointsman.report.tables import change, number

    console = stdout()
    console.print(_found_table(tuned), "")
    where = situations[0].name if len(situations) == 1 else f"{len(situations)} scenarios (geometric mean)"
    if not tuned.is_stopped:
        ratio = change(Ratio(tuned.cost_ratio, float("nan"), float("nan")))
        console.print(
            f"Cost against least-outstanding: [bold]{ratio}[/bold] on {where}, "
            f"{_used(situations, SELECTION, tuned.check_seeds)}, which the search did not see."
        )
    console.print(f"Cost of a request: {objective.formula}.")
    for limit in objective.limits:
        console.print(_kept_or_not(limit, tuned, situations))
    generations = counted(tuned.num_generations, "generation")
    console.print(f"{generations}, {tuned.num_decisions:,} decisions in {number(wall_s)} s.")
