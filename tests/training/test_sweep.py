"""Sweeps: which trials stop early, and what happens when anything stops or fails."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from workers.threads import Threads

from pointsman.errors import InputError
from pointsman.training import sweep
from pointsman.training.config import TrainConfig
from pointsman.training.stopping import StopSwitch
from pointsman.training.sweep import FAILED, FINISHED_TRIAL, STOPPED, WAITING, Sweep, Trial, read_trials
from pointsman.workers.peers import LinkedProcess

from .fakes import fake_config
from .test_runs import Silent, policy, start

PLAN = {"search": ["level=0..9"]}
NUM_UPDATES = 8
Scripted = Callable[[LinkedProcess, Any, Path, str], bool]


class Recorder:
    """A `SweepView`."""

    def __init__(self) -> None:
        self.order: list[tuple[int, str]] = []
        self.share = 0.0

    def advanced(self, share: float) -> None:
        self.share += share

    def ended(self, trial: Trial) -> None:
        self.order.append((trial.number, trial.status))


def climb(peer: LinkedProcess, level: float, folder: Path, command: str = "") -> bool:
    """What a training would say whose score rises to `level`."""
    for update in range(1, NUM_UPDATES + 1):
        done = update / NUM_UPDATES
        peer.send(sweep._Progress(update, done, level * done, []))
        if not peer.receive():
            return False
    return True


SCRIPT: Scripted = climb  # what threads do, which are sent the name of a function


def play(peer: LinkedProcess, level: float, folder: Path, command: str) -> bool:
    return SCRIPT(peer, level, folder, command)


def run(
    folder: Path,
    levels: list[float],
    work: Scripted = climb,
    stop: StopSwitch | None = None,
    base: float = 5.0,
    show: Recorder | None = None,
    launcher: Threads | None = None,
) -> list[Trial]:
    """One trial after the other, each towards its level; trial 0 towards `base`."""
    trials = read_trials(folder, PLAN, [{"level": level} for level in levels])
    folder.mkdir(exist_ok=True)

    def level_of(trial: Trial) -> Any:
        return trial.values.get("level", base)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep, "train_trial", play)
        patch.setattr(sys.modules[__name__], "SCRIPT", work)
        made = Sweep(trials, level_of, folder, PLAN, stop or StopSwitch(), show or Recorder())
        made.run(launcher or Threads(), num_workers=1)
    return trials


def test_the_worse_half_stops_early(tmp_path: Path) -> None:
    show = Recorder()
    trials = run(tmp_path / "sweep", [6.0, 7.0, 1.0, 8.0, 2.0, 6.5], show=show)
    assert [one.status for one in trials] == [
        *[FINISHED_TRIAL] * 3,
        STOPPED,  # 1 at a quarter, where the median is 6
        FINISHED_TRIAL,
        STOPPED,
        FINISHED_TRIAL,
    ]
    assert trials[3].why == "below the median of 3 others at 25 %"
    assert [one.fraction_done for one in trials if one.status == STOPPED] == [0.25, 0.25]
    assert show.share == pytest.approx(7.0)
    assert max(trials, key=lambda one: one.best.score if one.best else -1.0).number == 4


def test_a_trial_that_falls_behind_later_stops_at_half(tmp_path: Path) -> None:
    def late(peer: LinkedProcess, level: float, folder: Path, command: str) -> bool:
        """Whoever has level 4 has a good start, and gains nothing after."""
        for update in range(1, NUM_UPDATES + 1):
            done = update / NUM_UPDATES
            peer.send(sweep._Progress(update, done, 3.0 if level == 4.0 else level * done, []))
            if not peer.receive():
                return False
        return True

    trials = run(tmp_path / "sweep", [7.0, 7.0, 7.0, 4.0], late)
    assert (trials[4].status, trials[4].fraction_done) == (STOPPED, 0.5)


def test_the_configuration_as_it_is_trains_to_its_end(tmp_path: Path) -> None:
    first = run(tmp_path / "sweep", [7.0, 7.0, 7.0, 7.0], base=-5.0)
    assert first[0].status == FINISHED_TRIAL
    assert first[0].best is not None and first[0].best.score == -0.625


def test_an_interrupted_sweep_goes_on(tmp_path: Path) -> None:
    stop, begun = StopSwitch(), []

    def stopping(peer: LinkedProcess, level: float, folder: Path, command: str) -> bool:
        begun.append(level)
        if level == 7.0 and begun.count(7.0) == 1:
            peer.send(sweep._Progress(1, 0.1, 0.5, []))
            peer.receive()
            stop.press()
        return climb(peer, level, folder)

    trials = run(tmp_path / "sweep", [6.0, 7.0, 8.0], stopping, stop)
    assert [one.status for one in trials] == [FINISHED_TRIAL, FINISHED_TRIAL, WAITING, WAITING]
    trials = run(tmp_path / "sweep", [6.0, 7.0, 8.0, 9.0], stopping)  # and one more
    assert [one.status for one in trials] == [FINISHED_TRIAL] * 5
    assert begun == [5.0, 6.0, 7.0, 7.0, 8.0, 9.0]
    assert [one.update for one in trials[2].evaluations] == list(range(1, NUM_UPDATES + 1))  # none twice


def test_a_trial_that_fails_does_not_take_the_others_along(tmp_path: Path) -> None:
    def fragile(peer: LinkedProcess, level: float, folder: Path, command: str) -> bool:
        if level == 6.0:
            raise ArithmeticError("the loss is not a number")
        return climb(peer, level, folder)

    trials = run(tmp_path / "sweep", [6.0, 7.0], fragile)
    assert [one.status for one in trials] == [FINISHED_TRIAL, FAILED, FINISHED_TRIAL]
    assert trials[1].why.startswith("ArithmeticError: the loss is not a number")


@pytest.mark.parametrize(("num_deaths", "wanted"), [(1, FINISHED_TRIAL), (sweep.MAX_LOSSES, FAILED)])
def test_a_lost_worker_is_replaced(tmp_path: Path, num_deaths: int, wanted: str) -> None:
    deaths: list[float] = []

    def mortal(peer: LinkedProcess, level: float, folder: Path, command: str) -> bool:
        if level == 6.0 and len(deaths) < num_deaths:
            deaths.append(level)
            peer.link.close()
        return climb(peer, level, folder)

    launcher = Threads()
    trials = run(tmp_path / "sweep", [6.0, 7.0], mortal, launcher=launcher)
    assert [one.status for one in trials] == [FINISHED_TRIAL, wanted, FINISHED_TRIAL]
    assert launcher.num_launched == 1 + num_deaths


def test_another_sweep_in_the_same_directory_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    run(folder, [6.0])
    with pytest.raises(InputError, match="holds a sweep with another search"):
        read_trials(folder, {"search": ["level=0..8"]}, [])
    (tmp_path / "else").mkdir()
    (tmp_path / "else" / "letter.txt").touch()
    with pytest.raises(InputError, match="is not a sweep"):
        read_trials(tmp_path / "else", PLAN, [])


# Real trainings ---------------------------------------------------------------------------------------------

CONFIG = fake_config(run={"steps": 16 * 32 * 4, "evaluate_every": 1, "checkpoint_every": 2})


class Answers:
    """The sweep's end of the link: says to stop after some update."""

    def __init__(self, stop_after: int | None) -> None:
        self.stop_after = stop_after
        self.heard: list[sweep._Progress] = []

    def send(self, said: sweep._Progress) -> None:
        self.heard.append(said)

    def receive(self) -> bool:
        return self.stop_after is None or self.heard[-1].update < self.stop_after


def train(folder: Path, config: TrainConfig, stop_after: int | None = None) -> tuple[bool, Answers]:
    answers = Answers(stop_after)
    return sweep.train_trial(answers, config, folder, "pointsman sweep"), answers  # type: ignore[arg-type]


def test_a_stopped_trial_is_taken_up_to_the_same_end(tmp_path: Path) -> None:
    is_over, first = train(tmp_path / "trial", CONFIG, stop_after=2)
    assert not is_over
    assert [one.update for one in first.heard] == [0, 1, 2]
    assert [one.fraction_done for one in first.heard] == [0.0, 0.0, 0.25]
    is_over, second = train(tmp_path / "trial", CONFIG)
    assert is_over
    assert [one.update for one in second.heard] == [3, 4]
    start(CONFIG, tmp_path / "whole")
    assert policy(tmp_path / "trial") == policy(tmp_path / "whole")
    assert train(tmp_path / "trial", CONFIG)[1].heard == []  # there is nothing left to do


def test_a_directory_that_a_node_does_not_see_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="all nodes must see"):
        train(tmp_path / "elsewhere" / "00", CONFIG)


def test_the_shows_have_the_same_methods() -> None:
    names = [name for name in dir(Silent) if not name.startswith("_")]
    assert [name for name in dir(sweep._Reporter) if not name.startswith("_")] == names
