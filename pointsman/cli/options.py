"""Options that several commands share, and the configurations they stand for."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from pointsman.cli.completion import objective_names, policy_names, scenario_names, suite_names
from pointsman.errors import InputError, PointsmanWarning

if TYPE_CHECKING:
    from pointsman.config import Config
    from pointsman.experiments.objective import Objective
    from pointsman.experiments.scenarios import Scenario
    from pointsman.experiments.simulate import Workers
    from pointsman.workers.processes import Launcher

NUM_SEEDS = 16


def policies_option(name: str, metavar: str, what: str) -> Any:
    """An option that takes names of policies, which a shell knows how to complete."""
    return typer.Option(name, metavar=metavar, help=what, autocompletion=policy_names)


ConfigFile = Annotated[
    Path | None,
    typer.Argument(metavar="CONFIG.yaml", help="Configuration; paths in it start at its folder."),
]
ConfigFiles = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="CONFIG.yaml", help="Configurations, each with the same weight; paths start at its folder."
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change the configuration, e.g. workload.requests=5000."),
]
ScenarioName = Annotated[
    str | None,
    typer.Option(
        "--scenario",
        metavar="NAME",
        help="A named scenario instead of a file.",
        autocompletion=scenario_names,
    ),
]
ScenarioNames = Annotated[
    list[str] | None,
    typer.Option(
        "--scenario",
        metavar="NAME",
        help="A scenario or a file; repeat it, or give `all`.",
        autocompletion=scenario_names,
    ),
]
TrainingScenarios = Annotated[
    list[str] | None,
    typer.Option(
        "--scenario",
        metavar="NAME",
        help="What to train on: a scenario, a file, or `random` for anything; repeat it.",
        autocompletion=scenario_names,
    ),
]
Minutes = Annotated[
    float | None,
    typer.Option("--minutes", metavar="M", help="Length of a training, evaluations included."),
]
Steps = Annotated[
    int | None,
    typer.Option("--steps", metavar="N", help="Length in decisions instead: the same on any machine."),
]
Suite = Annotated[
    str | None,
    typer.Option(
        "--suite",
        metavar="NAME",
        help="Several scenarios: all, prefixes, saturated or generalisation.",
        autocompletion=suite_names,
    ),
]
NumSeeds = Annotated[
    int | None,
    typer.Option(
        "--seeds",
        metavar="N",
        help=f"Runs of each policy, from seed 1000 on. Default: {NUM_SEEDS}; jobs: 300.",
    ),
]
NumThreads = Annotated[
    int,
    typer.Option(
        "--threads",
        metavar="N",
        help="Threads to use (with --ray: workers). 0 = one for each core; the result is the same.",
    ),
]
RayAddress = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="[ADDRESS]",
        help="Work on a Ray cluster. Without an address: on this machine's, started if there is none.",
    ),
]
ObjectiveName = Annotated[
    str | None,
    typer.Option(
        "--objective",
        metavar="NAME",
        help="balanced, mean, tail or slo: what a second of waiting costs.",
        autocompletion=objective_names,
    ),
]
Keep = Annotated[
    list[str] | None,
    typer.Option(
        "--keep",
        metavar="P99=LIMIT",
        help="An upper limit on ttft_p99 or e2e_p99: a policy's (late-binding), a factor on late-binding's "
        "(1.05), or seconds (20s); repeat it. Default: the objective's.",
    ),
]
OutDir = Annotated[
    Path | None,
    typer.Option("--out", metavar="DIR", help="Write results.json, table.md and report.html with plots."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def resolve(file: Path | None, scenario: str | None, overrides: list[str]) -> Config:
    """Read the file or the named scenario; the default scenario if neither is given."""
    from pointsman.config import load_config
    from pointsman.experiments.scenarios import DEFAULT, find_scenario

    if file is not None:
        if scenario is not None:
            raise both_given(file)
        return load_config(file, overrides)
    found = find_scenario(scenario or DEFAULT)
    if found.path is not None:
        return load_config(found.path, overrides)
    config = found.config(0, overrides)
    # Some scenarios depend on their seed.
    return config if config.seed == 0 else found.config(config.seed, overrides)


def both_given(file: Path) -> InputError:
    return InputError("CONFIG", str(file), "given beside --scenario", "name one of the two")


def base_dir(file: Path | None, scenario: str | None) -> Path | None:
    """Where relative paths of the configuration start; None = here."""
    from pointsman.experiments.scenarios import is_file

    if file is None and scenario is not None and is_file(scenario):
        file = Path(scenario).expanduser()
    return file.parent if file is not None else None


class Situation(NamedTuple):
    """What policies are judged on: `configs` are the same but for their seed, or their part of a trace."""

    name: str
    what: str
    configs: list[Config]
    folder: Path | None = None  # where relative paths start


def situations(
    scenarios: Sequence[Scenario],
    overrides: Sequence[str],
    seeds: Sequence[int],
    policies: Sequence[str] | None,
    baseline: str,
) -> list[Situation]:
    """Each scenario as it is; of a trace that one of the policies learned on, what was kept of it.

    It is the same trace in whichever file it is named, and on whichever cluster it is replayed.
    """
    from pointsman.experiments.own import kept_text, report_configs, trace_digest
    from pointsman.experiments.setting import cluster_text

    found = []
    for one in scenarios:
        configs, what = [one.config(seed, overrides) for seed in seeds], one.what
        if replaced := trace_set(configs[0], overrides):
            what = f"{replaced} in place of its own traffic, on {cluster_text(configs[0].cluster)}"
        trace = trace_digest(one, overrides)
        compared = [baseline, *(policies if policies is not None else [configs[0].policy.label])]
        if trace is not None and any(trace in _learned_traces(one, configs[0], name) for name in compared):
            configs = report_configs(one, seeds, overrides)
            what = kept_text(one, configs[0])
        found.append(Situation(one.name, what, configs, one.folder))
    return found


def _learned_traces(scenario: Scenario, config: Config, policy: str) -> set[str | None]:
    """Digests of what a policy was trained or tuned on: as it was then, and as its files are now."""
    from pointsman.experiments.own import trace_digest
    from pointsman.experiments.scenarios import find_scenario, is_file

    is_own = policy in (config.policy.label, config.policy.kind)
    found: set[str | None] = set()
    for name in own_policy(scenario, config) if is_own else [policy]:
        origin = origin_of(name)
        found |= set(origin.traces)
        for source in filter(is_file, origin.sources):
            with suppress(InputError):  # gone, or changed so that it is no configuration any more
                found.add(trace_digest(find_scenario(source, origin.changes)))
    return found


def own_policy(scenario: Scenario, config: Config) -> list[str]:
    """Names that the policy of a configuration has elsewhere: none where it has its weights there."""
    from pointsman.routing.sources import is_path

    section = scenario.data(0).get("policy")
    named = section.get("kind") if isinstance(section, Mapping) else section
    checkpoint = config.policy.checkpoint
    found = [named] if isinstance(named, str) and is_path(named) else []
    return [*found, *([str(checkpoint)] if checkpoint is not None else [])]


def trace_set(config: Config, overrides: Sequence[str]) -> str | None:
    """The file that is replayed instead of what a scenario or a file says; None if nobody set one."""
    from pointsman.experiments.own import replayed

    trace = replayed(config)
    keys = {override.partition("=")[0].removesuffix(".path") for override in overrides}
    is_set = not keys.isdisjoint(("workload", "workload.arrivals", "workload.trace"))
    return Path(trace.path).name if trace is not None and is_set else None


def kept_situations(
    scenarios: Sequence[Scenario], overrides: Sequence[str], seeds: Sequence[int]
) -> list[Situation]:
    """Return what nothing was trained or selected on: other seeds, or the last part of a trace."""
    from pointsman.experiments.own import kept_text, report_configs

    return [
        Situation(one.name, kept_text(one, configs[0]), configs, one.folder)
        for one in scenarios
        for configs in [report_configs(one, seeds, overrides)]
    ]


def chosen_scenarios(
    files: Sequence[Path],
    names: Sequence[str],
    suite: str | None = None,
    default: Sequence[str] = (),
    changes: Sequence[str] = (),
) -> list[Scenario]:
    """Return the scenarios of the files, names or suite given; without any, `default` with its `changes`."""
    from pointsman.experiments.scenarios import DEFAULT, find_scenario, find_suite, scenario_of_file

    if files:
        if names or suite:
            raise both_given(files[0])
        return [scenario_of_file(file) for file in dict.fromkeys(files)]
    if suite is not None:
        if names:
            raise InputError("--suite", suite, "given beside --scenario", "name one of the two")
        return find_suite(suite)
    if "all" in names:
        return find_suite("all")
    if names or not default:
        return [find_scenario(name) for name in dict.fromkeys(names or [DEFAULT])]
    return [find_scenario(name, changes) for name in dict.fromkeys(default)]


@contextmanager
def policies_of(option: str, names: Sequence[str] | None, field: str = "policy") -> Iterator[None]:
    """Errors about a policy name the option that gave it, not the field that it was parsed into."""
    try:
        yield
    except InputError as error:
        given = {form for name in names or () for form in (name, str(Path(name).expanduser()))}
        if error.field != field or str(error.value) not in given:
            raise
        raise InputError(option, error.value, error.problem, error.remedy) from None


class Origin(NamedTuple):
    """What a policy was trained or tuned on, as far as it says so."""

    sources: list[str]  # scenarios and configuration files
    changes: list[str]  # by --set, to each of them
    traces: list[str]  # digests of the files' traces


def origin_of(policy: str) -> Origin:
    from pointsman.inference.checkpoint import load_checkpoint
    from pointsman.routing.policy import PolicySpec
    from pointsman.spec import parse_spec, read_yaml

    path = parse_spec(PolicySpec, {"kind": policy}, "policy").checkpoint
    if path is not None:
        metadata = load_checkpoint(path, "policy").metadata
        sources = metadata.get("scenarios", metadata.get("traffic", ()))
        return Origin(list(sources), *(list(metadata.get(key, ())) for key in ("changes", "traces")))
    file = Path(policy).expanduser()
    made = read_yaml(file, "policy").get("made") if file.is_file() else None
    return Origin(*(_texts(made, key) for key in Origin._fields))


def _texts(made: object, key: str) -> list[str]:
    values = made.get(key) if isinstance(made, dict) else None
    return [str(value) for value in values] if isinstance(values, list) else []


def known_origin(policy: str) -> tuple[list[str], list[str]]:
    """Where to judge a policy if nobody says: on what it was made for, as far as that is still there.

    Sources, and what was changed in them.
    """
    from pointsman.experiments.scenarios import DEFAULT, is_file

    names, changes, _ = origin_of(policy)
    found = [name for name in names if not is_file(name) or Path(name).is_file()]
    for name in names:
        if name not in found:
            instead = "" if found else f"; judged on {DEFAULT} instead"
            text = f"{policy} was made for {name}, which is not there{instead}"
            warnings.warn(PointsmanWarning(text), stacklevel=2)
    return found, changes


def report_seeds(num_seeds: int | None) -> range:
    from pointsman.experiments.scenarios import REPORT_SEEDS

    num_seeds = NUM_SEEDS if num_seeds is None else num_seeds
    if not 1 <= num_seeds <= len(REPORT_SEEDS):
        raise InputError("--seeds", num_seeds, "is out of range", f"use 1 to {len(REPORT_SEEDS)}")
    return REPORT_SEEDS[:num_seeds]


def refuse_seed(overrides: Sequence[str], remedy: str) -> None:
    for override in overrides:
        if override.split("=")[0] == "seed":
            value = override.partition("=")[2]
            raise InputError("--set seed", value, "this command has seeds of its own", remedy)


def num_threads(asked: int) -> int:
    """Return the number asked for; for 0, as many as this process may use."""
    if asked < 0:
        raise InputError("--threads", asked, "is negative", "use 0 for one thread a core")
    has_affinity = hasattr(os, "sched_getaffinity")
    return asked or (len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1)


def launcher(ray: str | None) -> Launcher:
    """Where workers run: on this machine, or on the Ray cluster of `--ray`."""
    from pointsman.workers.processes import LocalProcesses

    if ray is None:
        return LocalProcesses()
    from pointsman.workers.ray_actors import RayActors

    return RayActors(ray)


@contextmanager
def simulators(threads: int, ray: str | None) -> Iterator[Workers]:
    """What simulations run on: as many threads, or workers of the Ray cluster."""
    threads = num_threads(threads) if ray is None or threads < 0 else threads
    if ray is None:
        yield threads
        return
    from pointsman.workers.pool import pool
    from pointsman.workers.ray_actors import RayActors

    actors = RayActors(ray)
    with pool(actors, threads or actors.num_free_cores()) as opened:
        yield opened


def objective_named(name: str | None, keep: Sequence[str] | None = None) -> Objective | None:
    from pointsman.experiments.objective import DEFAULT_OBJECTIVE, find_objective, parse_keep

    if name is None and not keep:
        return None
    return find_objective(name or DEFAULT_OBJECTIVE, parse_keep(keep or []))


def check_port(option: str, port: int) -> None:
    """Refuse what is no port; 0 means any free one. Some event loops take higher numbers for other ports."""
    if not 0 <= port <= 65535:
        raise InputError(option, port, "is not a port", "use 0 (any free one) to 65535")
