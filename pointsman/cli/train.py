"""`pointsman train`: learn a policy, watch it learn, stop and go on."""

from __future__ import annotations

import math
import shlex
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pointsman.cli.completion import preset_names, problem_names, trained_names
from pointsman.cli.console import compilation_announced, print_json, say, stdout
from pointsman.cli.live import live_options
from pointsman.cli.options import (
    AsJson,
    Keep,
    Minutes,
    ObjectiveName,
    RayAddress,
    Steps,
    Suite,
    TrainingScenarios,
    launcher,
    refuse_seed,
)
from pointsman.cli.training_source import (
    config_of,
    own_options,
    own_preset,
    say_parts,
    source_of,
    told_apart,
)
from pointsman.errors import InputError

if TYPE_CHECKING:
    from pointsman.training.runs import Result
    from pointsman.training.stopping import StopSwitch

RUNS = Path("runs")


def train(
    context: typer.Context,
    config_files: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="CONFIG.yaml",
            help="Your cluster and traffic, as `compare` reads them; several are a mix. Or a training "
            "configuration.",
        ),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            "--preset",
            metavar="NAME",
            help="quick (default), generalist, jobs, live or vidur.",
            autocompletion=preset_names,
        ),
    ] = None,
    env: Annotated[
        str | None,
        typer.Option(
            "--env",
            metavar="NAME",
            help="The preset of a problem: routing (default), jobs or vidur.",
            autocompletion=problem_names,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Run directory, a new one. Default: runs/NAME-1, -2, …"),
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", metavar="S", help="Seed of everything random.")
    ] = None,
    minutes: Minutes = None,
    steps: Steps = None,
    resume: Annotated[
        Path | None,
        typer.Option("--resume", metavar="DIR", help="Go on with a run, exactly as if it had not stopped."),
    ] = None,
    workers: Annotated[
        int | None, typer.Option("--workers", metavar="W", help="Processes that train together.")
    ] = None,
    ray: RayAddress = None,
    objective: ObjectiveName = None,
    keep: Keep = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Change what is trained on, as everywhere (workload.arrivals.load=0.9), or the training "
            "(ppo.num_epochs=2).",
        ),
    ] = None,
    start_from: Annotated[
        str | None,
        typer.Option(
            "--start-from",
            metavar="POLICY",
            help="Learn on from `default`, a run, a checkpoint, or the best of several: A,B.",
            autocompletion=trained_names,
        ),
    ] = None,
    live: Annotated[
        list[str] | None,
        typer.Option(
            "--live", metavar="URL", help="A real server to fine-tune on, through our router; repeat it."
        ),
    ] = None,
    scenario: TrainingScenarios = None,
    suite: Suite = None,
    as_json: AsJson = False,
) -> None:
    """Train a policy by PPO. The best one by evaluation is kept, and the last one.

    CONFIG describes your cluster, traffic and service level; it is the file that `compare` reads. A trace in
    it is cut into three parts: one to train on, one to choose the best policy, one kept for `evaluate`.

    Ctrl-C saves the run as it was after its last whole update and prints how to go on; with --steps, the
    result is the same to the last bit. A run that diverges ends with status 1 and keeps its last good
    checkpoint; a run that was too short to change the policy ends with status 1, too.

    Several workers share environments and gradients; their number, not where they run, determines the result.
    A worker that is lost is replaced, and its update is repeated.

    With --live, a policy (`default`, or --start-from) continues to learn on a scenario's arrivals, sent to
    real servers in real time. The policy it started from decides half of them, and takes over if better.

    Example: pointsman train my-cluster.yaml --out runs/mine
    """
    from pointsman.cli.training_view import view
    from pointsman.experiments.objective import parse_keep
    from pointsman.training import runs
    from pointsman.training.warm_start import find_policy, policies_in

    if minutes is not None and steps is not None:
        raise InputError("--steps", steps, "given beside --minutes", "give one of the two")
    command = shlex.join(["pointsman", *context.obj])
    if resume is not None:
        fixed: dict[str, object] = {"CONFIG": config_files[0] if config_files else None}
        fixed |= {"--preset": preset, "--env": env, "--out": out, "--seed": seed}
        fixed |= {
            "--workers": workers,
            "--objective": objective,
            "--keep": keep[0] if keep else None,
            "--set": overrides[0] if overrides else None,
            "--start-from": start_from,
            "--live": live[0] if live else None,
            "--scenario": scenario[0] if scenario else None,
            "--suite": suite,
        }
        for option, value in fixed.items():
            if value is not None:
                remedy = "a run goes on as it was begun; only --minutes, --steps and --ray may be given"
                raise InputError(option, str(value), "given beside --resume", remedy)
    else:
        given = {"seed": seed, "workers": workers, "minutes": minutes, "steps": steps, "objective": objective}
        given |= {"start_from": start_from}
        if start_from is not None:
            for policy in policies_in(start_from):
                find_policy(policy, "--start-from")
        refuse_seed(overrides or [], "leave it out; --seed is that of everything random")
        config_file, own = told_apart(config_files or [], scenario or [], suite)
        if live:
            others = {"--preset": preset, "--env": env, "--workers": workers, "--ray": ray}
            first, last = [], live_options(live, others, own, start_from)
            preset = None if config_file is not None else "live"
        else:
            first, last = own_options(own), []
            if config_file is None and env is None:
                preset = own_preset(preset, own, overrides or [])
        last += [f"env.keep.{metric}={limit}" for metric, limit in parse_keep(keep or []).items()]
        source = source_of(config_file, preset, env)
        config = config_of(source, [*first, *(overrides or []), *last], given)
        folder = out or _free_folder(_run_name(source, own))
        say_parts(config)
    with (
        _failures_as_lines(resume or folder),
        stop_requests() as stop,
        compilation_announced(),
        view() as show,
    ):
        if resume is not None:
            result = runs.resume(resume, show, stop, command, minutes, steps, launcher(ray))
        else:
            result = runs.start(config, folder, show, stop, command, launcher(ray))
    if result.is_stopped:
        say(f"stopped after update {result.update}; to go on: {_resume_command(result.folder)}")
        raise typer.Exit(130)
    if as_json:
        print_json(result._asdict())
    else:
        _print_result(result)
    _refuse_untrained(result)


def _refuse_untrained(result: Result) -> None:
    """A run that has not changed the policy is no success, whatever the policy it started from is worth."""
    if result.num_learned > 0:
        return
    made = (
        f"only the critic learns in the first updates, of which {result.update} were made"
        if result.update
        else "no update was made: preparing and evaluating took all the time"
    )
    minutes = max(4, math.ceil(3 * result.elapsed_s / 60))
    longer = f"{_resume_command(result.folder)} --minutes {minutes}"
    say(f"error: nothing was learned: {made}; give it more time, for example: {longer}")
    raise typer.Exit(1)


def _run_name(source: Path | str, own: list[str]) -> str:
    if own:
        return Path(own[0]).stem
    return source if isinstance(source, str) else source.stem


def _free_folder(name: str) -> Path:
    number = 1
    while (RUNS / f"{name}-{number}").exists():
        number += 1
    return RUNS / f"{name}-{number}"


@contextmanager
def stop_requests() -> Iterator[StopSwitch]:
    """The first Ctrl-C or SIGTERM stops the run, saved; the second Ctrl-C ends it whatever it is doing."""
    from pointsman.training.stopping import StopSwitch

    stop = StopSwitch()

    def ask(number: int, frame: object) -> None:
        if stop.is_pressed and number == signal.SIGINT:
            raise KeyboardInterrupt
        say("stopping…")
        stop.press()

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _failures_as_lines(folder: Path) -> Iterator[None]:
    """A run that went wrong by itself: one line, status 1, and what is left to go on from."""
    from pointsman.training.ppo import DivergedError, RatioError
    from pointsman.training.runs import newest_state
    from pointsman.training.safety import SafetyError
    from pointsman.workers.peers import WorkerError

    try:
        yield
    except (DivergedError, RatioError, WorkerError, SafetyError) as error:
        state = newest_state(folder)
        kept = "nothing was saved yet"
        if state is not None:
            kept = (
                f"kept: update {state.values['num_updates']}, {folder / 'checkpoints' / 'last.safetensors'}"
            )
        say(f"error: training stopped: {error}; {kept}")
        raise typer.Exit(1) from None


def _resume_command(folder: Path) -> str:
    return shlex.join(["pointsman", "train", "--resume", str(folder)])


def _print_result(result: Result) -> None:
    from pointsman.plain import counted

    console = stdout()

    def line(name: str, text: str) -> None:
        console.print(f"{name:<12}{text}", soft_wrap=True, markup=False)

    updates = counted(result.update, "update")
    line("trained", f"{result.num_decisions:,} decisions, {updates} in {result.elapsed_s:,.0f} s")
    if result.best:
        is_start = result.best["update"] == 0
        gained = " (the policy it started from: training has gained nothing so far)" if is_start else ""
        line("best", f"update {result.best['update']:.0f}: score {result.best['eval_score']:.4g}{gained}")
        if result.average is not None:
            updates = ", ".join(str(update) for update in result.average.updates)
            score = result.average.metrics["eval_score"]
            line("kept", f"the average of updates {updates}: score {score:.4g}")
        line("last", f"update {result.last['update']:.0f}: score {result.last['eval_score']:.4g}")
    line("run", str(result.folder))
    line("next", shlex.join(["pointsman", "report", str(result.folder)]))
