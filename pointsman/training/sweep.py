"""Many trainings, to find the configuration that learns best: each is a trial, and the poor ones stop early.

A worker (workers/, local or on Ray) trains one trial at a time, in a run directory of its own, and says after
each update how it goes; the answer is whether to go on. At a quarter and at half of its length a trial ends
if its best score so far is below the median of what the others had reached there: successive halving without
waiting for each other, as asynchronous workers need it. Trial 0 is the unchanged configuration, and always
trains to its end: what the winner gains is measured against it.

sweep.json        what was asked for, and every trial with its evaluations; written after each of them
trials/<number>/  the run directory of a trial: see runs.py

A sweep that ends early, whatever the reason, is taken up from there: a trial goes on from its last
checkpoint. On a cluster, all nodes must see the directory.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from socket import socket
from statistics import median
from typing import Any, NamedTuple, Protocol

from pointsman.errors import InputError, reason_of
from pointsman.files import replace_file
from pointsman.plain import in_percent, to_json
from pointsman.training import runs
from pointsman.training.config import TrainConfig
from pointsman.training.logs import FINISHED, Row
from pointsman.training.stopping import StopSwitch
from pointsman.workers.peers import LinkedProcess, LostWorkerError, WorkerError
from pointsman.workers.processes import LaunchedWorker, Launcher

WAITING, RUNNING, FINISHED_TRIAL, STOPPED, FAILED = "waiting", "running", "finished", "stopped", "failed"
RUNGS = (0.25, 0.5)  # shares of a trial's length at which it is compared
MIN_OTHERS = 3  # trials that must have come as far before any is stopped
MAX_LOSSES = 3  # of workers by one trial: they are not lost by accident
LOOK_S = 0.5  # how often it is looked whether the sweep is to end
FILE = "sweep.json"


class Evaluation(NamedTuple):
    """What a trial had reached at some point, on selection seeds."""

    update: int
    fraction_done: float
    score: float
    blocks: list[float]  # returns of blocks of seeds, the same of all trials


@dataclass
class Trial:
    number: int
    values: dict[str, Any]  # of the keys that are searched; none: the unchanged configuration
    status: str = WAITING
    fraction_done: float = 0.0
    evaluations: list[Evaluation] = field(default_factory=list)
    why: str = ""  # it was stopped, or failed
    num_losses: int = 0  # of workers

    @property
    def best(self) -> Evaluation | None:
        """The best after training began: the policy before says nothing about a configuration."""
        trained = [one for one in self.evaluations if one.update > 0]
        return max(trained, key=lambda one: one.score, default=None)

    def score_at(self, rung: float) -> float | None:
        """The best score by then; None for a trial that did not come as far."""
        best = -float("inf")
        for one in self.evaluations:
            if one.update > 0:
                best = max(best, one.score)
                if one.fraction_done >= rung:
                    return best
        return None

    def note(self, found: Evaluation) -> None:
        """A trial that goes on from a checkpoint makes some evaluations again."""
        self.evaluations = [one for one in self.evaluations if one.update < found.update] + [found]


def verdict_at_rung(trial: Trial, others: Sequence[Trial]) -> str:
    """Why a trial that was just evaluated is to stop; empty if it goes on."""
    fractions = [one.fraction_done for one in trial.evaluations if one.update > 0]
    before = fractions[-2] if len(fractions) > 1 else 0.0
    reached = [rung for rung in RUNGS if before < rung <= fractions[-1]]
    if not reached or not trial.values:
        return ""
    score = trial.score_at(reached[-1])
    known = [other for one in others if one is not trial and (other := one.score_at(reached[-1])) is not None]
    if score is None or len(known) < MIN_OTHERS or score >= median(known):
        return ""
    return f"below the median of {len(known)} others at {in_percent(fractions[-1])}"


# The file ---------------------------------------------------------------------------------------------------


def read_trials(folder: Path, plan: Mapping[str, Any], values: Sequence[dict[str, Any]]) -> list[Trial]:
    """Trial 0 and one for each of the values, as far as they got before."""
    trials = [Trial(number, one) for number, one in enumerate([{}, *values])]
    path = folder / FILE
    if not path.exists():
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise InputError("--out", str(folder), "exists and is not a sweep", "name another directory")
        return trials
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        earlier, kept = found["plan"], [_read_trial(one) for one in found["trials"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            "--out", str(path), f"cannot be read ({reason_of(error)})", "name another directory"
        ) from None
    differing = [key for key in plan if plan[key] != earlier.get(key)]
    if differing:
        remedy = "name another directory, or give the options it was begun with"
        raise InputError("--out", str(folder), f"holds a sweep with another {differing[0]}", remedy)
    for one in kept:
        one.status = WAITING if one.status == RUNNING else one.status
    return [*kept, *trials[len(kept) :]]


def _read_trial(data: dict[str, Any]) -> Trial:
    evaluations = [Evaluation(*one.values()) for one in data["evaluations"]]
    return Trial(**{**data, "evaluations": evaluations})


def write_trials(folder: Path, plan: Mapping[str, Any], trials: Sequence[Trial]) -> None:
    listed = [asdict(one) | {"evaluations": [each._asdict() for each in one.evaluations]} for one in trials]
    replace_file(folder / FILE, (to_json({"plan": plan, "trials": listed}) + "\n").encode())


def trial_folder(folder: Path, trial: Trial) -> Path:
    return folder / "trials" / f"{trial.number:02d}"


# In the process that was started ----------------------------------------------------------------------------


class SweepView(Protocol):
    """Who is told how it goes. All methods return at once."""

    def advanced(self, share: float) -> None:
        """A trial came so much further, as a share of its length."""
        ...

    def ended(self, trial: Trial) -> None:
        """Finished, stopped or failed."""
        ...


class Sweep:
    """Gives trials to workers, and decides which go on."""

    def __init__(
        self,
        trials: Sequence[Trial],
        config_of: Callable[[Trial], TrainConfig],
        folder: Path,
        plan: Mapping[str, Any],
        stop: StopSwitch,
        show: SweepView,
    ) -> None:
        self.trials, self.folder = trials, folder
        self._config_of, self._plan, self._stop, self._show = config_of, plan, stop, show
        self._busy: dict[socket, tuple[LaunchedWorker, Trial]] = {}

    def run(self, launcher: Launcher, num_workers: int, command: str = "") -> None:
        """Until all trials are over, or the switch is pressed."""
        (self.folder / "trials").mkdir(exist_ok=True)
        self._write()
        waiting = [one for one in self.trials if one.status == WAITING]
        idle = list(launcher.launch(min(num_workers, len(waiting))))
        try:
            while not self._stop.is_pressed or self._busy:
                while idle and waiting and not self._stop.is_pressed:
                    self._give(idle.pop(), waiting.pop(0), command)
                if not self._busy:
                    return
                if self._stop.is_pressed:
                    self._drop_beginners()
                for link in wait(list(self._busy), LOOK_S):
                    assert isinstance(link, socket)
                    worker, trial = self._busy[link]
                    try:
                        if self._hear(worker, trial):
                            continue
                    except LostWorkerError as error:
                        worker.end()
                        (worker,) = launcher.launch(1)
                        trial.num_losses += 1
                        if trial.num_losses < MAX_LOSSES:
                            trial.status = WAITING
                            waiting.insert(0, trial)
                        else:
                            self._end(trial, FAILED, str(error))
                    del self._busy[link]
                    idle.append(worker)
                    self._write()
        finally:
            for worker in (*idle, *(worker for worker, _ in self._busy.values())):
                worker.end()
            for _, trial in self._busy.values():
                trial.status = WAITING
            self._write()

    def _give(self, worker: LaunchedWorker, trial: Trial, command: str) -> None:
        trial.status, trial.why = RUNNING, ""
        self._busy[worker.peer.link] = worker, trial
        arguments = (self._config_of(trial), trial_folder(self.folder, trial), command)
        with suppress(LostWorkerError):  # its link says so again as soon as it is listened to
            worker.peer.send((train_trial, arguments))

    def _hear(self, worker: LaunchedWorker, trial: Trial) -> bool:
        """What a worker says; returns whether it is still busy with its trial."""
        try:
            said = worker.peer.receive()
        except LostWorkerError:
            raise
        except WorkerError as error:
            self._end(trial, FAILED, str(error).partition(" failed: ")[2])
            return False
        if isinstance(said, _Progress):
            worker.peer.send(self._goes_on(trial, said))
            return True
        if said:
            self._end(trial, FINISHED_TRIAL, "")
        elif trial.why:
            self._end(trial, STOPPED, trial.why)
        else:  # the sweep is to end
            trial.status = WAITING
        return False

    def _end(self, trial: Trial, status: str, why: str) -> None:
        trial.status, trial.why = status, why
        self._show.advanced(1.0 - trial.fraction_done)
        self._show.ended(trial)

    def _goes_on(self, trial: Trial, said: _Progress) -> bool:
        self._show.advanced(max(0.0, said.fraction_done - trial.fraction_done))
        trial.fraction_done = said.fraction_done
        if said.score is not None:
            trial.note(Evaluation(said.update, said.fraction_done, said.score, said.blocks))
            if said.update > 0:
                trial.why = verdict_at_rung(trial, self.trials)
            self._write()
        return not trial.why and not self._stop.is_pressed

    def _drop_beginners(self) -> None:
        """Trials that have made no update have nothing to save, and say nothing for a while."""
        for link, (worker, trial) in list(self._busy.items()):
            if trial.fraction_done == 0.0:
                worker.end()
                trial.status = WAITING
                del self._busy[link]

    def _write(self) -> None:
        write_trials(self.folder, self._plan, self.trials)


# In the worker ----------------------------------------------------------------------------------------------


class _Progress(NamedTuple):
    update: int
    fraction_done: float
    score: float | None  # None: not evaluated
    blocks: list[float]


class _Reporter:
    """The `Show` of a trial's run: tells the sweep, and stops the run if that says so."""

    def __init__(self, peer: LinkedProcess, stop: StopSwitch) -> None:
        self._peer, self._stop = peer, stop

    def begin(self, config: TrainConfig, folder: Path, update: int) -> None: ...

    def headroom(self, headroom: object) -> None: ...

    def prepared(self, metrics: dict[str, float]) -> None: ...

    def news(self, news: object) -> None: ...

    def first_evaluation(self, metrics: dict[str, float]) -> None:
        self._goes_on(0, 0.0, metrics)  # nothing can be saved yet: the answer holds at the next update, too

    def row(self, row: Row) -> None:
        if not self._goes_on(int(row["update"]), row["fraction_done"], row):
            self._stop.press()

    def _goes_on(self, update: int, fraction_done: float, metrics: Row) -> bool:
        blocks: list[float] = []
        while (value := metrics.get(f"eval_block{len(blocks)}_return")) is not None:
            blocks.append(value)
        self._peer.send(_Progress(update, fraction_done, metrics.get("eval_score"), blocks))
        return bool(self._peer.receive())


def train_trial(peer: LinkedProcess, config: TrainConfig, folder: Path, command: str) -> bool:
    """Begin, or go on; whether the trial has reached its end."""
    if not folder.parent.is_dir():
        raise FileNotFoundError(f"{folder.parent} is not there; all nodes must see the directory of --out")
    if (folder / FINISHED).exists():
        return True
    stop = StopSwitch()
    show = _Reporter(peer, stop)
    if runs.newest_state(folder) is not None:
        return not runs.resume(folder, show, stop, command).is_stopped
    shutil.rmtree(folder, ignore_errors=True)
    return not runs.start(config, folder, show, stop, command).is_stopped
