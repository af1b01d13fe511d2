"""`pointsman audit-features`: what a learned policy gets to see, and what of it says nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pointsman.cli.completion import problem_names
from pointsman.cli.console import compilation_announced, print_json, progress, stdout
from pointsman.cli.lists import plain_table
from pointsman.cli.options import (
    AsJson,
    ConfigFiles,
    Overrides,
    ScenarioNames,
    Suite,
    chosen_scenarios,
    policies_of,
    policies_option,
    refuse_seed,
)
from pointsman.cli.returns import named_env, refuse_routing_options

if TYPE_CHECKING:
    from pointsman.evaluation.audit import Audited


def audit_features(
    config_files: ConfigFiles = None,
    scenario: ScenarioNames = None,
    suite: Suite = None,
    policies: Annotated[
        str | None,
        policies_option("--policies", "A,B,C", "Who decides: heuristics, or paths of policies."),
    ] = None,
    decisions: Annotated[
        int, typer.Option("--decisions", metavar="N", help="Over all scenarios and policies.")
    ] = 20_000,
    env: Annotated[
        str | None,
        typer.Option(
            "--env",
            metavar="NAME",
            help="Another problem than routing: jobs. --set changes it.",
            autocompletion=problem_names,
        ),
    ] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Show range, variance and oddities of every feature that a learned policy sees.

    Without CONFIG, --scenario or --suite: in the seven scenarios that differ most.

    dead: it never varies. saturated: 95 % of its values are the lowest, or the highest. out of range: beyond
    ±10. Features of the critic are seen in training only.

    Example: pointsman audit-features --scenario tight-memory --policies random,hold-until-room
    """
    from pointsman.evaluation import audit
    from pointsman.evaluation.problem import make_env, make_judge

    asked = [name.strip() for name in policies.split(",")] if policies is not None else None
    scenarios: Sequence[str]
    names: Sequence[str]
    if env is not None and env != "routing":
        given = {"CONFIG": config_files, "--scenario": scenario, "--suite": suite}
        refuse_routing_options(given, env)
        scenarios = [env]
        section = named_env(env, overrides or [])
        names = asked or list(make_judge(section).rivals)
        with policies_of("--policies", asked, "env.teachers"):
            envs = make_env(section | {"teachers": names}, len(names))
        with compilation_announced(), progress("simulating", 1.0) as advance:
            features = audit.audit_env(envs, envs.metadata["entity"], names, decisions, advance=advance)
    else:
        refuse_seed(overrides or [], "leave it out; the seeds are those of training")
        chosen = chosen_scenarios(config_files or [], scenario or [], suite, audit.SCENARIOS)
        scenarios = [str(one.path or one.name) for one in chosen]
        names = asked or audit.POLICIES
        named = policies_of("--policies", asked)
        with named, compilation_announced(), progress("simulating", 1.0) as advance:
            features = audit.audit(scenarios, names, decisions, advance=advance, changes=overrides or [])
    if as_json:
        print_json(
            {
                "scenarios": list(scenarios),
                "policies": list(names),
                "decisions": decisions,
                "features": [_as_json(one) for one in features],
            }
        )
    else:
        _print_table(features, len(set(scenarios)))


def _as_json(one: Audited) -> dict[str, Any]:
    return {
        **one.feature._asdict(),
        "part": one.part,
        "min": one.low,
        "max": one.high,
        "mean": one.mean,
        "std": one.std,
        "share_at_min": one.at_low,
        "share_at_max": one.at_high,
        "flat_in": one.flat_in,
        "flags": one.flags,
    }


def _print_table(features: list[Audited], num_scenarios: int) -> None:
    from pointsman.report.tables import number, percent

    columns = ("min", "max", "mean", "std", "at min", "at max")
    table = plain_table("feature", "of", *columns, "flat in", "flags", right=(*columns, "flat in"))
    for one in features:
        flags = ", ".join(one.flags)
        figures = [number(figure) for figure in (one.low, one.high, one.mean, one.std)]
        shares = [percent(share) for share in (one.at_low, one.at_high)]
        flat = f"{len(one.flat_in)} of {num_scenarios}" if one.flat_in else ""
        table.add_row(one.feature.name, one.part, *figures, *shares, flat, f"[yellow]{flags}[/yellow]")
    console = stdout()
    console.print(table, "")
    num_flagged = sum(bool(one.flags) for one in features)
    console.print(
        f"{num_flagged} of {len(features)} features are flagged; flat in: scenarios without variance."
    )
