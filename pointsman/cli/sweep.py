"""`pointsman sweep`: which training configuration learns best."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pointsman.cli.completion import preset_names, problem_names
from pointsman.cli.console import Advance, print_json, print_verdict, progress, say, stdout
from pointsman.cli.lists import plain_table
from pointsman.cli.options import (
    AsJson,
    Minutes,
    ObjectiveName,
    RayAddress,
    Steps,
    Suite,
    TrainingScenarios,
    launcher,
    num_threads,
    refuse_seed,
)
from pointsman.cli.train import stop_requests
from pointsman.cli.training_source import config_of, own_options, say_parts, source_of, told_apart
from pointsman.errors import InputError

if TYPE_CHECKING:
    from pointsman.report.sweep import SweepReport
    from pointsman.training.config import TrainConfig
    from pointsman.training.search_space import SearchKey
    from pointsman.training.sweep import Trial
    from pointsman.workers.processes import Launcher

NUM_TRIALS = 12
OUT = Path("runs/sweep")


def sweep(
    context: typer.Context,
    config_files: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="CONFIG.yaml",
            help="What `train` takes: your cluster and traffic, or a training configuration.",
        ),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            "--preset",
            metavar="NAME",
            help="quick (default), generalist or jobs.",
            autocompletion=preset_names,
        ),
    ] = None,
    env: Annotated[
        str | None,
        typer.Option(
            "--env",
            metavar="NAME",
            help="The preset of a problem: routing (default) or jobs.",
            autocompletion=problem_names,
        ),
    ] = None,
    search: Annotated[
        list[str] | None,
        typer.Option(
            "--search",
            metavar="KEY=VALUES",
            help="What to vary, a range (ppo.learning_rate=3e-4..3e-3) or a list (network.width=32,64,128); "
            "repeat it.",
        ),
    ] = None,
    trials: Annotated[
        int,
        typer.Option(
            "--trials", metavar="N", min=1, help="Number of trainings, besides the unchanged configuration."
        ),
    ] = NUM_TRIALS,
    minutes: Minutes = None,
    steps: Steps = None,
    seed: Annotated[int, typer.Option("--seed", metavar="S", help="Seed of everything random.", min=0)] = 0,
    workers: Annotated[
        int, typer.Option("--workers", metavar="W", help="Trials at once. 0 = one for each core.")
    ] = 0,
    ray: RayAddress = None,
    scenario: TrainingScenarios = None,
    suite: Suite = None,
    objective: ObjectiveName = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change all trials, as in `train`."),
    ] = None,
    out: Annotated[
        Path,
        typer.Option("--out", metavar="DIR", help="Runs, results.json, table.md and report.html."),
    ] = OUT,
    as_json: AsJson = False,
) -> None:
    """Train with many configurations, stop the poor ones early, and say which is best and what mattered.

    A trial ends at a quarter or at half of its length if its score is below the median of the others. The
    configuration without any --search is trained as well, and the best trial is compared with it. Scores are
    on selection seeds: `pointsman evaluate` judges the best on others.

    Ctrl-C keeps what there is, and the same command continues; with a higher --trials, it adds some. With
    --ray, all nodes must see --out.

    Example: pointsman sweep --preset quick --search ppo.learning_rate=3e-4..3e-3 --search network.width=32,64
    """
    from pointsman.files import output_dir
    from pointsman.report.sweep import SweepReport, write_sweep
    from pointsman.training.config import to_yaml
    from pointsman.training.search_space import as_overrides, draw_values
    from pointsman.training.sweep import WAITING, Sweep, read_trials

    if minutes is not None and steps is not None:
        raise InputError("--steps", steps, "given beside --minutes", "give one of the two")
    if workers < 0:
        raise InputError("--workers", workers, "is negative", "use 0 for one trial a core")
    refuse_seed(overrides or [], "leave it out; --seed is that of everything random")
    keys = _keys(search or [])
    config_file, own = told_apart(config_files or [], scenario or [], suite)
    source = source_of(config_file, preset, env)
    changes = [*own_options(own), *(overrides or [])]
    given = {"seed": seed, "workers": 1, "minutes": minutes, "steps": steps, "objective": objective}

    def config_with(trial: Trial) -> TrainConfig:
        return config_of(source, changes, given, as_overrides(trial.values))

    config = config_of(source, changes, given)
    say_parts(config)
    drawn = draw_values(keys, trials, seed)
    folder = out.expanduser().resolve()
    plan = {"search": search, "seed": seed, "configuration": config.model_dump(mode="json")}
    all_trials = read_trials(folder, plan, drawn)
    _refuse_environments([config, *map(config_with, all_trials)])
    if len(drawn) < trials:
        say(f"note: the lists have {len(drawn)} combinations, so there are as many trials")
    command = shlex.join(["pointsman", *context.obj])
    num_waiting = sum(trial.status == WAITING for trial in all_trials)
    with output_dir("--out", folder), stop_requests() as stop:
        if num_waiting:
            where, num_workers = _workers(ray, workers)
            say(_opening(config, num_waiting, num_workers))
            with progress("trials", num_waiting) as advance:
                show = _View(advance)
                Sweep(all_trials, config_with, folder, plan, stop, show).run(where, num_workers, command)
        report = SweepReport(all_trials, keys, out, command, to_yaml(config))
        write_sweep(report)
    if as_json:
        print_json(report.results())
    else:
        _print_report(report)
    if report.num_left:
        say(f"stopped with {report.num_left} of {len(all_trials)} trials left; to go on: {command}")
        raise typer.Exit(130)
    if not report.ranked:
        raise typer.Exit(1)


def _keys(texts: Sequence[str]) -> list[SearchKey]:
    from pointsman.training.search_space import EXAMPLES, parse_search

    keys = [parse_search(text) for text in texts]
    if not keys:
        raise InputError("--search", "", "nothing to vary", EXAMPLES)
    names = [key.key for key in keys]
    for name in names:
        if names.count(name) > 1:
            raise InputError("--search", name, "given twice", "give all values in one list or range")
    fixed = {"run.minutes": "--minutes", "run.steps": "--steps", "run.workers": "--workers"}
    for name, option in fixed.items():
        if name in names:
            raise InputError("--search", name, "must be the same for all trials", f"give {option}")
    return keys


def _refuse_environments(configs: Sequence[TrainConfig]) -> None:
    """What cannot be trained on is an error before anything is, not a table of trials that failed."""
    from pointsman.evaluation.problem import make_env

    for env in {json.dumps(config.env): config.env for config in configs}.values():
        make_env(env, 1)


def _workers(ray: str | None, asked: int) -> tuple[Launcher, int]:
    """Where trials run, and how many at once."""
    found = launcher(ray)
    if ray is None:
        return found, num_threads(asked)
    from pointsman.workers.ray_actors import RayActors

    assert isinstance(found, RayActors)
    return found, asked or found.num_free_cores()


def _opening(config: TrainConfig, num_trials: int, num_workers: int) -> str:
    run, at_once = config.run, min(num_workers, num_trials)
    length = f"{run.steps:,} decisions" if run.minutes is None else f"{run.minutes:g} min"
    in_all = ""
    if run.minutes is not None:
        in_all = f": at most {run.minutes * math.ceil(num_trials / at_once):.3g} min, and compilation"
    return f"{num_trials} trials of {length}, {at_once} at once{in_all}"


class _View:
    """A bar on a terminal, and a line when a trial ends."""

    def __init__(self, advance: Advance) -> None:
        self._advance = advance

    def advanced(self, share: float) -> None:
        self._advance(share)

    def ended(self, trial: Trial) -> None:
        from pointsman.report.sweep import name_of, values_text

        score = "" if trial.best is None else f", score {trial.best.score:.4g}"
        why = f" ({trial.why})" if trial.why else ""
        say(f"{name_of(trial)} {trial.status}{score}{why}: {values_text(trial)}")


def _print_report(report: SweepReport) -> None:
    console = stdout()
    print_verdict(console, report.verdict)
    table = plain_table(*report.header, right=("score", "trained"))
    for row in report.rows():
        table.add_row(*(cell.replace("[", r"\[") for cell in row))
    console.print(table, "")
    console.print(report.mattered(), markup=False)
    console.print(f"Page: {report.folder / 'report.html'}", markup=False, soft_wrap=True)
