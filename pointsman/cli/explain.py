"""`pointsman explain`: what a trained policy looks at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pointsman.cli.completion import feature_names, trained_names
from pointsman.cli.console import compilation_announced, print_json, progress, stdout
from pointsman.cli.lists import plain_table
from pointsman.cli.options import (
    AsJson,
    ConfigFiles,
    Overrides,
    ScenarioNames,
    Suite,
    chosen_scenarios,
    known_origin,
    refuse_seed,
)
from pointsman.cli.returns import env_section, refuse_routing_options
from pointsman.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table

    from pointsman.evaluation.explain import Dependence, Importance, RecordedDecisions
    from pointsman.inference.checkpoint import Checkpoint

NUM_SHOWN = 12
NUM_CURVES = 6
_BARS = "▁▂▃▄▅▆▇█"


def explain(
    policy: Annotated[
        str,
        typer.Argument(
            metavar="POLICY", help="A run, its checkpoint, or `default`.", autocompletion=trained_names
        ),
    ],
    config_files: ConfigFiles = None,
    scenario: ScenarioNames = None,
    suite: Suite = None,
    feature: Annotated[
        list[str] | None,
        typer.Option(
            "--feature",
            metavar="NAME",
            help="Follow this one; repeat it. Default: the top six.",
            autocompletion=feature_names,
        ),
    ] = None,
    decisions: Annotated[int, typer.Option("--decisions", metavar="N", help="How many to look at.")] = 2048,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Show which features a trained policy's choices depend on, and how.

    A feature, or a group of them, is given the values of other decisions; `changed` is the share of decisions
    that then turn out differently. Features that say nearly the same share the credit, so groups tell more.
    Without CONFIG, --scenario or --suite, the policy decides on what it was trained on, or on steady-chat.

    Example: pointsman explain runs/quick --scenario mixed-hardware --feature backlog --feature prompt
    """
    from pointsman.evaluation import explain as evaluation
    from pointsman.evaluation.audit import ROUTING_SPACE
    from pointsman.experiments.scenarios import short_names

    checkpoint = _load(policy)
    space = checkpoint.space
    if decisions < 2:
        raise InputError("--decisions", decisions, "are too few", "use some thousands")
    curves = list(dict.fromkeys(feature or ()))
    evaluation.require_features(space, curves)
    entity = checkpoint.metadata.get("entity", "replica")
    with compilation_announced(), progress("looking", 2.0) as advance:
        given = {"CONFIG": config_files, "--scenario": scenario, "--suite": suite}
        scenarios, recorded = _record(policy, checkpoint, given, overrides or [], decisions)
        network = evaluation.Network(checkpoint)
        groups = evaluation.importances(network, recorded, evaluation.groups_of(space), advance=advance)
        features = evaluation.importances(network, recorded, evaluation.features_of(space), advance=advance)
        curves = curves or [one.name for one in features[:NUM_CURVES]]
        followed = [evaluation.dependence(network, recorded, space, name, entity=entity) for name in curves]
    lacks = [] if "env" in checkpoint.metadata else checkpoint.lacks(ROUTING_SPACE)
    if as_json:
        print_json(
            {
                "policy": policy,
                "scenarios": scenarios,
                "decisions": len(recorded),
                "lacks": lacks,
                "slo": checkpoint.metadata.get("slo"),
                "detour_s": checkpoint.metadata.get("detour_s"),
                "small_first": checkpoint.metadata.get("hold", {}).get("small_first", 0.0),
                "groups": [one._asdict() for one in groups],
                "features": [one._asdict() for one in features],
                "dependence": [_dependence_json(one) for one in followed],
            }
        )
        return
    console = stdout()
    where = ", ".join(short_names(scenarios))
    console.print(f"[bold]{policy}[/bold]: what {len(recorded):,} decisions on {where} depend on")
    if lacks:
        console.print(f"It is older than {', '.join(lacks)}, and does not see them.", soft_wrap=True)
    for line in (*_service_level(checkpoint), *_detour(checkpoint), *_order(checkpoint)):
        console.print(line, soft_wrap=True)
    console.print(_importance_table("group", groups), "")
    console.print(_importance_table("feature", features[:NUM_SHOWN]), "")
    console.print(
        f"How the probability of picking a {entity} changes along one of its features, all others fixed;\n"
        "for a feature of the context, the probability of the same decision:"
    )
    console.print(_dependence_table(followed))


def _record(
    policy: str, checkpoint: Checkpoint, given: Mapping[str, Any], overrides: list[str], num_decisions: int
) -> tuple[list[str], RecordedDecisions]:
    """Let the policy decide on what is given, or else on what it was trained on; -> on what, and how."""
    from pointsman.evaluation import explain as evaluation
    from pointsman.evaluation.problem import make_env

    env = checkpoint.metadata.get("env")
    if env is not None:
        refuse_routing_options(given, env["kind"])
        envs = make_env(env_section(env, overrides), evaluation.NUM_ENVS)
        return [env["kind"]], evaluation.record_in(envs, checkpoint, num_decisions, where=policy)
    refuse_seed(overrides, "leave it out; the seeds are those of training")
    files, names, suite = given.values()
    sources, learned_with = ([], []) if files or names or suite else known_origin(policy)
    chosen = chosen_scenarios(files or [], names or [], suite, sources)
    scenarios = [str(one.path or one.name) for one in chosen]
    changes = [*learned_with, *overrides]
    return scenarios, evaluation.record(checkpoint, scenarios, num_decisions, where=policy, changes=changes)


def _service_level(checkpoint: Checkpoint) -> list[str]:
    """What it was trained for: times in its features are shares of that."""
    slo = checkpoint.metadata.get("slo")
    if slo is None:
        return []
    ttft_s, tpot_s = f"{slo['ttft_s']:g}", f"{slo['tpot_s']:g}"
    line = f"Trained for a first token within {ttft_s} s and {tpot_s} s a token, with which it compares times"
    is_usual = (ttft_s, tpot_s) == ("2", "0.1")
    return [f"{line}." if is_usual else f"{line}: for s/2 read s/{ttft_s}, and for s/0.1 s/{tpot_s}."]


def _detour(checkpoint: Checkpoint) -> list[str]:
    detour_s = checkpoint.metadata.get("detour_s")
    if detour_s is None:
        return []
    return [f"It sends a request only where the first token is due at most {detour_s:g} s after the soonest."]


def _order(checkpoint: Checkpoint) -> list[str]:
    small_first = checkpoint.metadata.get("hold", {}).get("small_first", 0.0)
    if not small_first:
        return []
    slower = f"2^-{small_first:.2g} as much with each doubling of its size"
    return [f"Of the requests it holds, small ones go first: the wait of a larger one counts {slower}."]


def _load(policy: str) -> Checkpoint:
    from pointsman.inference.checkpoint import load_checkpoint
    from pointsman.routing.policy import PolicySpec
    from pointsman.spec import parse_spec

    path = parse_spec(PolicySpec, {"kind": policy}, "policy").checkpoint
    if path is None:
        raise InputError("POLICY", policy, "is not a trained policy", "name a run of `pointsman train`")
    return load_checkpoint(path, "POLICY")


def _importance_table(what: str, rows: Sequence[Importance]) -> Table:
    from pointsman.report.tables import percent

    columns = ("changed", "probability lost", "KL, nats")
    counted = ("features",) if what == "group" else ()
    table = plain_table(what, *counted, *columns, "", right=(*counted, *columns))
    for row in rows:
        count = (str(row.num_features),) if counted else ()
        figures = (percent(row.changed), f"{100 * row.lost:.1f} %", f"{row.kl:.3f}")
        table.add_row(row.name, *count, *figures, "█" * round(30 * row.changed))
    return table


def _dependence_table(curves: Sequence[Dependence]) -> Table:
    from pointsman.report.tables import number, percent

    right = ("from", "to")
    table = plain_table("feature", "unit", *right, "probability", "", right=right)
    for curve in curves:
        if not len(curve.values):
            table.add_row(curve.feature.name, curve.feature.unit, "", "", "does not vary here", "")
            continue
        ends = f"{percent(curve.probability[0])} → {percent(curve.probability[-1])}"
        low, high = (number(float(value)) for value in curve.values[[0, -1]])
        name = curve.feature.name if curve.part != "context" else f"{curve.feature.name} (context)"
        table.add_row(name, curve.feature.unit, low, high, ends, sparkline(curve.probability.tolist()))
    return table


def sparkline(values: Sequence[float]) -> str:
    """A bar for each value, from 0 to the highest of them."""
    scale = (len(_BARS) - 1) / max(values)
    return "".join(_BARS[round(value * scale)] for value in values)


def _dependence_json(curve: Dependence) -> dict[str, Any]:
    return {
        **curve.feature._asdict(),
        "part": curve.part,
        "values": curve.values,
        "probability": curve.probability,
    }
