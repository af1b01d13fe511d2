"""A run directory, and a training run that lives in it.

config.yaml                         resolved: all defaults, all overrides
schema.json                         what every number of an observation means
meta.json                           versions, seed, the commands that made it
progress.csv, tensorboard/          the curves, one row an update
news.txt                            interventions and alerts, a line each, if there were any
evaluation.json                     the evaluations: first, best, last; and how the warm start went
stopped.json                        why the run ended by itself before its end, if it did
finished.json                       after how much, if it reached its end; which policies were averaged
headroom.json                       what heuristics earn of the reward, looked at before training
checkpoints/last.safetensors        the policy at the last checkpoint
checkpoints/best.safetensors        the policy with the highest eval_score; with run.average_best, an average
checkpoints/update-<update>.safetensors  policies on the way, with run.keep
checkpoints/state-<update>.safetensors   the trainer, to resume from; the last two are kept
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import tensorboard  # noqa: F401  `Curves` will need it: whoever lacks it hears so before the run, not in it
import torch

from pointsman.diagnosis.live import LogWatch
from pointsman.errors import InputError
from pointsman.evaluation.problem import Evaluate, make_env, make_evaluate, session, settled, with_start
from pointsman.files import output_dir, replace_file
from pointsman.inference.checkpoint import Checkpoint, save_checkpoint, space_to_json
from pointsman.plain import provenance, to_json
from pointsman.training.averaging import Average, average_of_best
from pointsman.training.config import TrainConfig, load_train_config, to_yaml, with_rollouts
from pointsman.training.curriculum import Curriculum
from pointsman.training.exploration import Event
from pointsman.training.files import read_state, write_state
from pointsman.training.headroom import Headroom, find_headroom
from pointsman.training.logs import FINISHED, Curves, Row
from pointsman.training.ranks import started
from pointsman.training.safety import Alert
from pointsman.training.state import TrainerState
from pointsman.training.stopping import CompileClock, StopSwitch
from pointsman.training.trainer import Outlook, Trainer, train
from pointsman.training.warm_start import policies_in
from pointsman.workers.peers import LostWorkerError
from pointsman.workers.processes import Launcher, LocalProcesses

NUM_HEADROOM_ENVS = 32
MAX_LOSSES = 3  # of workers between two updates: they are not lost by accident
NUM_STATES = 2  # kept: one that can be resumed from, should the newest be damaged


class Show(Protocol):
    """Who is told how it goes. All methods return at once."""

    def begin(self, config: TrainConfig, folder: Path, update: int) -> None: ...

    def headroom(self, headroom: Headroom) -> None: ...

    def prepared(self, metrics: dict[str, float]) -> None:
        """The warm start is done."""
        ...

    def first_evaluation(self, metrics: dict[str, float]) -> None:
        """The policy that learning starts from was evaluated."""
        ...

    def row(self, row: Row) -> None: ...

    def news(self, news: Event | Alert) -> None: ...


class Result(NamedTuple):
    folder: Path
    update: int
    num_decisions: int
    elapsed_s: float
    is_stopped: bool  # asked to, before the end
    best: dict[str, float]  # metrics of the best evaluation
    last: dict[str, float]
    num_learned: int  # updates that changed the policy: the first may be the critic's alone
    average: Average | None  # what was left instead of the best


def start(
    config: TrainConfig,
    folder: Path,
    show: Show,
    stop: StopSwitch,
    command: str = "",
    launcher: Launcher | None = None,
) -> Result:
    """Train in a new directory, with workers from the launcher; by default on this machine."""
    folder = folder.expanduser()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        remedy = "name another directory, or go on with --resume"
        raise InputError("--out", str(folder), "exists", remedy)
    with output_dir("--out", folder):
        with stop.cuttable():
            config = with_rollouts(_settled(config))
        return _run(config, folder, None, show, stop, command, launcher)


def _settled(config: TrainConfig) -> TrainConfig:
    """Nothing left open: which order suits the traffic, and which policy to learn on from."""
    run = config.run
    if run.start_from is None:
        return config.model_copy(update={"env": settled(config.env)})
    policy, env = with_start(config.env, policies_in(run.start_from))
    return config.model_copy(update={"env": env, "run": run.model_copy(update={"start_from": policy})})


def resume(
    folder: Path,
    show: Show,
    stop: StopSwitch,
    command: str = "",
    minutes: float | None = None,
    steps: int | None = None,
    launcher: Launcher | None = None,
) -> Result:
    """Go on from the last checkpoint; the result is that of an uninterrupted run. It may be made longer."""
    folder = folder.expanduser()
    if not (folder / "config.yaml").is_file():
        raise InputError(
            "--resume", str(folder), "is not a run directory", "name one that `train --out` made"
        )
    config = load_train_config(folder / "config.yaml")
    if minutes is not None or steps is not None:
        longer = config.run.model_copy(update={"minutes": minutes, "steps": steps})
        config = config.model_copy(update={"run": longer})
    state = newest_state(folder)
    if state is None:
        raise InputError("--resume", str(folder), "has no checkpoint that can be read", "start the run again")
    _refuse_finished(config, folder, state)
    return _run(config, folder, state, show, stop, command, launcher)


def _refuse_finished(config: TrainConfig, folder: Path, state: TrainerState) -> None:
    run = config.run
    if run.steps is not None:
        is_over = state.values["num_updates"] * run.steps_per_update >= run.steps
        length = f"{run.steps:,} decisions"
    else:
        assert run.minutes is not None
        elapsed_s = state.values["run"]["elapsed_s"]
        length = f"{run.minutes:g} min"
        is_over = elapsed_s >= 60 * run.minutes
        if (folder / FINISHED).exists():
            written = load_train_config(folder / "config.yaml").run.minutes
            is_over = is_over or (written is not None and run.minutes <= written)
    if is_over:
        remedy = "nothing is left to do; --minutes or --steps with more than that makes it longer"
        raise InputError("--resume", str(folder), f"has reached its end ({length})", remedy)


def newest_state(folder: Path) -> TrainerState | None:
    for path in sorted((folder / "checkpoints").glob("state-*.safetensors"), reverse=True):
        found = read_state(path)
        if found is not None:
            return TrainerState(*found)
    return None


def _run(
    config: TrainConfig,
    folder: Path,
    state: TrainerState | None,
    show: Show,
    stop: StopSwitch,
    command: str,
    launcher: Launcher | None,
) -> Result:
    with ExitStack() as stack:
        stack.enter_context(session(config.env))
        run = Run(config, folder, state, show, stop, command)
        stack.callback(run.close)
        if state is None and config.run.headroom_steps > 0:
            with stop.cuttable():
                run.check_headroom()
        trainer = _train(run, state, launcher or LocalProcesses())
        is_stopped = run.is_stopped or trainer.num_updates > run.saved_update  # the last one was cut off
        if not is_stopped:
            run.finished()
    return Result(
        folder,
        run.saved_update,
        run.saved_update * config.run.steps_per_update,
        run.elapsed_s(),
        is_stopped,
        run.best,
        run.last,
        max(0, run.saved_update - config.ppo.critic_first),
        run.average,
    )


def _train(run: Run, state: TrainerState | None, launcher: Launcher) -> Trainer:
    """A worker that is lost is replaced, and the run goes on from its last whole update, to the same end."""
    losses_at: list[int] = []
    while True:
        try:
            with started(launcher, run.config.run.workers, train, (run.config, state)) as ranks:
                return train(ranks, run.config, state, run)
        except LostWorkerError as error:
            state = run.kept_state
            losses_at.append(run.lost_worker(error))
            if losses_at.count(losses_at[-1]) == MAX_LOSSES:
                run.failed({"update": losses_at[-1]}, error)
                raise


class Run:
    """Rank 0's `Host`: keeps the clock, evaluates, logs, writes checkpoints."""

    def __init__(
        self,
        config: TrainConfig,
        folder: Path,
        state: TrainerState | None,
        show: Show,
        stop: StopSwitch,
        command: str,
    ) -> None:
        self.config, self.folder, self.show = config, folder, show
        self._stop = stop
        self._command = command
        self._compiled = CompileClock()
        self._evaluate: Evaluate = make_evaluate(config.env)
        self._digest = hashlib.sha256(to_yaml(config).encode()).hexdigest()[:16]
        values: dict[str, Any] = {} if state is None else state.values["run"]
        self._started = time.monotonic() - values.get("elapsed_s", 0.0)
        self.first: dict[str, float] = values.get("first", {})
        self.best: dict[str, float] = values.get("best", {})
        self.last: dict[str, float] = values.get("last", {})
        self._warm_start: dict[str, float] = values.get("warm_start", {})
        self._first_update = self.saved_update = 0 if state is None else state.values["num_updates"]
        self._evaluation_s = self._least_evaluation_s = getattr(self._evaluate, "expected_s", 0.0)
        self._update_s = 0.0  # how long the last one took
        self.average: Average | None = None
        self._check_minutes()
        self._headroom: Headroom | None = None
        self._curves: Curves | None = None
        self._watch = LogWatch(folder, severities=("bad",))
        self._is_described = False
        self.kept_state = state
        self._kept_policy: Checkpoint | None = None
        self._outlook = Outlook(0.0, False)
        show.begin(config, folder, self._first_update)

    def cuttable(self) -> AbstractContextManager[None]:
        return self._stop.cuttable()

    def elapsed_s(self) -> float:
        """How long the run has taken, earlier parts included, compilation not."""
        elapsed_s: float = time.monotonic() - self._started - self._compiled.elapsed_s
        return elapsed_s

    def _check_minutes(self) -> None:
        """Some problems know how long an update and an evaluation take: in real time, for example."""
        least_s, minutes = getattr(self._evaluate, "least_s", 0.0), self.config.run.minutes
        if minutes is not None and 60 * minutes < least_s:
            problem = f"an update and an evaluation take about {least_s / 60:.2g} min"
            raise InputError("--minutes", minutes, problem, "give more, or shorten env.evaluation")

    def outlook(self, num_decisions: int) -> Outlook:
        """In minutes, the last evaluations are part of the run: there is no time for an update that would end
        much too late for them."""
        run = self.config.run
        if run.steps is not None:
            fraction = num_decisions / run.steps
        else:
            assert run.minutes is not None
            num_evaluations = 1 if run.average_best is None else 2
            for_updates_s = 60 * run.minutes - num_evaluations * self._evaluation_s
            is_over = self.elapsed_s() + 0.5 * self._update_s >= for_updates_s
            fraction = 1.0 if is_over else self.elapsed_s() / for_updates_s
        self._outlook = Outlook(fraction, self._stop.is_pressed)
        return self._outlook

    def finished(self) -> None:
        count, checkpoints = self.config.run.average_best, self.folder / "checkpoints"
        if count is not None and self.first:
            self.average = average_of_best(checkpoints, count, self.first["eval_score"], self._evaluate)
        found = {"update": self.saved_update, "elapsed_s": self.elapsed_s()}
        if self.average is not None:
            self._save_policy("best", self.average.policy, self.average.metrics)
            found["averaged"] = self.average.updates
        self._write(FINISHED, found)

    @property
    def is_stopped(self) -> bool:
        """Asked to, before the end."""
        return self._outlook.fraction_done < 1.0

    def check_headroom(self) -> None:
        """Whether there is anything to gain; shown, and written with the first result.

        It may take a minute: a stage of the curriculum that makes no sense is said before.
        """
        env = make_env(self.config.env, NUM_HEADROOM_ENVS)
        if self.config.curriculum is not None:
            Curriculum(self.config.curriculum).check(env)
        self._headroom = find_headroom(env, self.config.run.headroom_steps, self.config.run.seed)
        self._started = time.monotonic() - self._compiled.elapsed_s
        self.show.headroom(self._headroom)

    def prepared(self, metrics: dict[str, float]) -> None:
        self.show.prepared(metrics)
        self._warm_start = metrics

    def evaluate(self, checkpoint: Checkpoint) -> dict[str, float]:
        self._describe(checkpoint)
        started, started_s = time.perf_counter(), self.elapsed_s()
        metrics = self._evaluate(checkpoint)
        self._evaluation_s = max(self.elapsed_s() - started_s, self._least_evaluation_s)
        self.last = {"update": checkpoint.metadata["update"], **metrics}
        if metrics.get("eval_score", -math.inf) > self.best.get("eval_score", -math.inf):
            self.best = self.last
            self._save_policy("best", checkpoint, metrics)
        update, run = checkpoint.metadata["update"], self.config.run
        if run.keep is not None and update % (run.keep * run.evaluate_every) == 0:
            self._save_policy(f"update-{update:06d}", checkpoint, metrics)
        if checkpoint.metadata["update"] == 0:
            self.first = self.last
            self.show.first_evaluation(metrics)
        self._write("evaluation.json", self._evaluations())
        return {**metrics, "time/eval_s": time.perf_counter() - started}

    def record(self, row: dict[str, float], news: Sequence[Event | Alert]) -> None:
        self._update_s = sum(row.get(f"time/{part}_s", 0.0) for part in ("env", "inference", "update"))
        row = self._append(row, news)
        self.show.row(row)
        for item in news:
            self.show.news(item)
        if "eval_score" in row:
            self._tell_findings(int(row["update"]))

    def failed(self, row: dict[str, float], error: Exception) -> None:
        self._append(row)
        self._write(
            "stopped.json", {"update": row["update"], "error": type(error).__name__, "why": str(error)}
        )
        self._tell_findings(int(row["update"]))

    def _tell_findings(self, update: int) -> None:
        """What the curves so far say is bad; each finding once."""
        assert self._curves is not None
        try:
            found = self._watch.news(self._watch.read())
            alerts = [Alert(update, finding.name, str(finding)) for finding in found]
        except Exception as error:  # who watches a run must not be the one to end it
            alerts = [Alert(update, "diagnosis", f"the diagnosis failed: {error!r}")]
        self._curves.tell(alerts)
        for alert in alerts:
            self.show.news(alert)

    def lost_worker(self, error: LostWorkerError) -> int:
        """Make sure of what there is; returns the number of the update that has to be made again."""
        update = 1
        if self.kept_state is not None and self._kept_policy is not None:
            update += self.kept_state.values["num_updates"]
            self.save()
        alert = Alert(update, "worker", f"{error}; another one takes its place")
        if self._curves is not None:
            self._curves.tell([alert])
        self.show.news(alert)
        return update

    def keep(self, state: TrainerState, checkpoint: Checkpoint) -> None:
        self.kept_state, self._kept_policy = state, checkpoint

    def save(self) -> None:
        state, checkpoint = self.kept_state, self._kept_policy
        assert state is not None and checkpoint is not None
        update = state.values["num_updates"]
        self._describe(checkpoint)
        values = {
            **state.values,
            "run": {"elapsed_s": self.elapsed_s(), **self._evaluations()},
        }
        self._save_policy("last", checkpoint, self.last)
        self.saved_update = update
        checkpoints = self.folder / "checkpoints"
        write_state(checkpoints / f"state-{update:08d}.safetensors", state.arrays, values)
        for path in sorted(checkpoints.glob("state-*.safetensors"))[:-NUM_STATES]:
            path.unlink()

    def close(self) -> None:
        self._compiled.close()
        if self._curves is not None:
            self._curves.close()

    def _append(self, row: dict[str, float], news: Sequence[Event | Alert] = ()) -> dict[str, float]:
        if self._curves is None:
            self._curves = Curves(self.folder, self._first_update)
            self._watch.skip()  # what was found before a resume has been told
        row = {**row, "elapsed_s": self.elapsed_s()}
        self._curves.append(row, news)
        return row

    def _evaluations(self) -> dict[str, dict[str, float]]:
        return {"first": self.first, "best": self.best, "last": self.last, "warm_start": self._warm_start}

    def _save_policy(self, name: str, checkpoint: Checkpoint, metrics: dict[str, float]) -> None:
        metadata = {**checkpoint.metadata, "config_digest": self._digest, "metrics": metrics}
        path = self.folder / "checkpoints" / f"{name}.safetensors"
        save_checkpoint(path, replace(checkpoint, metadata=metadata))

    def _describe(self, checkpoint: Checkpoint) -> None:
        """Once, when the first result is there: a run that fails before leaves nothing behind."""
        if self._is_described:
            return
        self._is_described = True
        (self.folder / "checkpoints").mkdir(exist_ok=True)
        for unfinished in self.folder.rglob(".*.part"):  # of a run that was killed
            unfinished.unlink()
        for ended in ("stopped.json", FINISHED):
            (self.folder / ended).unlink(missing_ok=True)
        text = to_yaml(self.config)
        replace_file(self.folder / "config.yaml", text.encode())
        self._write("schema.json", space_to_json(checkpoint.space))
        if self._headroom is not None:
            self._write("headroom.json", self._headroom.to_dict())
        path = self.folder / "meta.json"
        earlier = json.loads(path.read_text(encoding="utf-8"))["sessions"] if path.exists() else []
        session = {
            "command": self._command,
            "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "from_update": self._first_update,
            **provenance(),
            "python": platform.python_version(),
            "torch": torch.__version__,
        }
        run = self.config.run
        meta = {"seed": run.seed, "workers": run.workers, "sessions": [*earlier, session]}
        if "traffic" in checkpoint.metadata:
            meta["traffic"] = checkpoint.metadata["traffic"]
        self._write("meta.json", meta)

    def _write(self, name: str, value: Any) -> None:
        replace_file(self.folder / name, (to_json(value) + "\n").encode())
