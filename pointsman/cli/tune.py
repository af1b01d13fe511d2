"""`pointsman tune`: the best weights of a linear score, as a policy file."""

from __future__ import annotations

import shlex
import time
from contextlib import ExitStack
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

from pointsman.cli.console import compilation_announced, print_json, progress, say, stdout
from pointsman.cli.lists import plain_table
from pointsman.cli.options import (
    AsJson,
    ConfigFiles,
    Keep,
    NumThreads,
    Overrides,
    ScenarioNames,
    Suite,
    both_given,
    chosen_scenarios,
    num_threads,
    refuse_seed,
)
from pointsman.errors import InputError

if TYPE_CHECKING:
    from pointsman.evaluation.tune import Budget, Situation, Tuned
    from pointsman.experiments.objective import Objective

NUM_DECISIONS = 20_000_000


def tune(
    context: typer.Context,
    config_files: ConfigFiles = None,
    scenario: ScenarioNames = None,
    suite: Suite = None,
    objective: Annotated[
        str,
        typer.Option("--objective", metavar="NAME", help="What to minimise: balanced, mean, tail or slo."),
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
    seed: Annotated[int, typer.Option("--seed", metavar="S", help="Of the search.", min=0)] = 0,
    overrides: Overrides = None,
    threads: NumThreads = 2,
    as_json: AsJson = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE.yaml", help="Write the policy, to use like any other."),
    ] = None,
) -> None:
    """Find the weights of the policy linear-score that serve a cluster best.

    Situations are CONFIG, named scenarios or a suite (default: steady-chat). Only selection seeds are used;
    `pointsman evaluate` then judges the policy on others. With --decisions, a seed gives one policy.

    Example: pointsman tune --scenario mixed-hardware --objective tail --out policy.yaml
    """
    from pointsman.evaluation import tune as evaluation
    from pointsman.experiments.objective import find_objective, parse_keep
    from pointsman.files import output_file

    refuse_seed(overrides or [], "leave it out; --seed is that of the search")
    aim = find_objective(objective, parse_keep(keep or []))
    budget = _budget(decisions, minutes)
    with ExitStack() as outputs:
        file = outputs.enter_context(output_file("--out", out)) if out else None
        outputs.enter_context(compilation_announced())
        situations = _situations(config_files or [], scenario or [], suite, overrides or [])
        started = time.perf_counter()
        with progress("tuning", 1.0) as advance:
            tuned = evaluation.tune(
                [search for search, _ in situations.values()],
                aim,
                budget,
                seed,
                num_threads(threads),
                advance,
                [check for _, check in situations.values()],
            )
        wall_s = time.perf_counter() - started
        command = shlex.join(["pointsman", *context.obj])
        result = _result(tuned, aim, list(situations), command)
        if file is not None:
            _write(file, result)
    if as_json:
        print_json(result | {"timings": {"wall_s": wall_s}})
    else:
        _print_tuned(tuned, aim, list(situations), wall_s)
    if out is not None:
        say(f"wrote {out}; judge it on other seeds: pointsman evaluate {shlex.quote(str(out))}")


def _budget(decisions: int | None, minutes: float | None) -> Budget:
    from pointsman.evaluation.tune import Budget

    if decisions is not None and minutes is not None:
        raise InputError("--minutes", minutes, "given beside --decisions", "give one of the two")
    if decisions is not None and decisions < 1:
        raise InputError("--decisions", decisions, "is not positive", f"for example {NUM_DECISIONS}")
    if minutes is not None and not 0 < minutes < float("inf"):
        raise InputError("--minutes", minutes, "is not positive", "for example 2")
    return Budget(minutes=minutes) if minutes is not None else Budget(decisions=decisions or NUM_DECISIONS)


def _situations(
    files: list[Path], names: list[str], suite: str | None, overrides: list[str]
) -> dict[str, tuple[Situation, Situation]]:
    """What is searched on and what has the last word, by name."""
    from pointsman.evaluation.tune import search_and_check
    from pointsman.experiments.own import parts_text
    from pointsman.experiments.scenarios import UNSEEN, scenario_of_file, short_names

    if files and (names or suite):
        raise both_given(files[0])
    scenarios = [scenario_of_file(file) for file in files] or chosen_scenarios(None, names, suite)
    for one in scenarios:
        if one.path is None and one.name in UNSEEN:
            problem = "is kept for judging what was never tuned on it"
            raise InputError("--scenario", one.name, problem, "name others; see `pointsman scenarios`")
        if one.path is not None:
            say(f"{one.name}: {parts_text(one)}")
    called = short_names([str(one.path or one.name) for one in scenarios])
    return {name: search_and_check(one, overrides) for name, one in zip(called, scenarios, strict=True)}


def _result(tuned: Tuned, objective: Objective, situations: list[str], command: str) -> dict[str, Any]:
    from pointsman.plain import provenance

    return {
        "policy": tuned.policy.model_dump(mode="json", exclude_defaults=True),
        "made": {
            "command": command,
            **provenance(),
            "objective": objective.model_dump(mode="json"),
            "situations": situations,
            "cost_ratio_to_least_outstanding": round(tuned.cost_ratio, 4),
            "seeds_searched": f"{tuned.search_seeds[0]}-{tuned.search_seeds[-1]}",
            "seeds_checked": f"{tuned.check_seeds[0]}-{tuned.check_seeds[-1]}",
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


def _print_tuned(tuned: Tuned, objective: Objective, situations: list[str], wall_s: float) -> None:
    from pointsman.evaluation.bootstrap import Ratio
    from pointsman.report.tables import change, number, percent

    console = stdout()
    table = plain_table("signal", "weight", "influence", right=("weight", "influence"))
    weights = tuned.policy.weights
    for name in sorted(weights, key=lambda name: -tuned.influence[name]):
        table.add_row(name, number(weights[name]), percent(tuned.influence[name]))
    console.print(table, "")
    where = situations[0] if len(situations) == 1 else f"{len(situations)} scenarios (geometric mean)"
    ratio = change(Ratio(tuned.cost_ratio, float("nan"), float("nan")))
    console.print(
        f"Cost against least-outstanding: [bold]{ratio}[/bold] on {where}, seeds "
        f"{tuned.check_seeds[0]}–{tuned.check_seeds[-1]}, which the search did not see."
    )
    console.print(f"Cost of a request: {objective.formula}.")
    for limit in objective.limits:
        console.print(f"Kept: {limit.text}.")
    console.print(
        f"{tuned.num_generations} generations, {tuned.num_decisions:,} decisions in {number(wall_s)} s."
    )
