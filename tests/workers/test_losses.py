"""Workers of this machine that are lost in the middle of a run."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from pointsman.training import runs
from pointsman.workers.peers import LostWorkerError
from pointsman.workers.processes import LocalProcesses, LocalWorker

from .runs import NUM_UPDATES, Disturbed, assert_same, train


def kill_worker() -> None:
    (process,) = multiprocessing.active_children()
    process.kill()


def test_a_killed_worker_is_replaced_and_the_run_ends_the_same(tmp_path: Path) -> None:
    train(tmp_path / "whole", LocalProcesses())
    show = Disturbed(3, kill_worker)
    result = train(tmp_path / "killed", LocalProcesses(), show)
    assert (result.update, result.is_stopped) == (NUM_UPDATES, False)
    assert_same(tmp_path / "killed", tmp_path / "whole")
    text = "update 4: worker 1 ended unexpectedly (killed, or out of memory); another one takes its place"
    assert show.said == [text]
    assert text in (tmp_path / "killed" / "news.txt").read_text()


class Doomed(LocalProcesses):
    """From the second time on, workers die at once."""

    num_launched = 0

    def launch(self, count: int) -> list[LocalWorker]:
        workers = super().launch(count)
        self.num_launched += 1
        if self.num_launched > 1:
            workers[0].end()
        return workers


def test_workers_that_always_die_end_the_run_which_can_be_resumed(tmp_path: Path) -> None:
    folder, launcher = tmp_path / "run", Doomed()
    with pytest.raises(LostWorkerError):
        train(folder, launcher, Disturbed(3, kill_worker))
    assert launcher.num_launched == runs.MAX_LOSSES
    state = runs.newest_state(folder)
    assert state is not None and state.values["num_updates"] == 3
    assert "LostWorkerError" in (folder / "stopped.json").read_text()
