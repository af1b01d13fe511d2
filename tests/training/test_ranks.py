"""Processes that train together. What runs in them is at the top, where a new process can import it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from typing import Any

import numpy as np
import pytest

from pointsman.training.ranks import Ranks, started
from pointsman.workers.peers import LostWorkerError, WorkerError
from pointsman.workers.processes import LocalProcesses

LONG = 100_000  # more than a pipe holds


def own_values(rank: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(rank).normal(size=LONG).astype(np.float32)


def average_and_gather(ranks: Ranks) -> None:
    for _ in range(3):
        array = own_values(ranks.rank)
        ranks.average_(array)
        time.sleep(0.02 * ranks.rank)  # some are slower
    ranks.gather((ranks.rank, array.tobytes()))
    ranks.from_first("from elsewhere")


def die(ranks: Ranks, how: str) -> None:
    ranks.gather(None)
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "failed":
        raise ValueError("no such luck")
    else:
        time.sleep(60)


def wait_for_rank_0(ranks: Ranks, path: str) -> None:
    with open(path, "w") as file:  # noqa: PTH123
        file.write(str(os.getpid()))
    ranks.gather(None)
    ranks.gather(None)


def test_alone_everything_is_the_identity() -> None:
    ranks = Ranks()
    array = np.arange(3, dtype=np.float32)
    ranks.average_(array)
    assert array.tolist() == [0, 1, 2]
    assert ranks.gather("x") == ["x"]


def test_averages_are_the_mean_and_the_same_bits_everywhere() -> None:
    expected = np.mean([own_values(rank).astype(np.float64) for rank in range(3)], axis=0)
    with started(LocalProcesses(), 3, average_and_gather) as ranks:
        for _ in range(3):
            array = own_values(0)
            ranks.average_(array)
        gathered = ranks.gather((0, array.tobytes()))
        assert ranks.from_first("here") == "here"
    assert np.abs(array - expected).max() < 1e-6
    assert np.abs(own_values(0) - expected).max() > 1  # what not averaging would give
    assert [rank for rank, _ in gathered] == [0, 1, 2]
    assert len({data for _, data in gathered}) == 1


@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        ("killed", LostWorkerError, "worker 1 ended unexpectedly"),
        ("failed", WorkerError, r"worker 1 failed: ValueError: no such luck \(.*test_ranks.py:\d+\)"),
        ("hangs", LostWorkerError, r"worker 1 did not answer for 0\.5 s"),
    ],
)
def test_a_lost_rank_is_noticed_at_once_with_its_reason(
    how: str, kind: type[Exception], message: str
) -> None:
    with (
        pytest.raises(WorkerError, match=message) as caught,
        started(LocalProcesses(), 2, die, (how,)) as ranks,
    ):
        ranks.gather(None)  # starting takes longer than the patience of this test
        ranks.peers[0].patience_s = 0.5
        started_at = time.monotonic()
        try:
            ranks.average_(np.zeros(3, np.float32))
        finally:
            assert time.monotonic() - started_at < 5
    assert caught.type is kind


def test_ranks_end_when_rank_0_is_gone(tmp_path: Any) -> None:
    """A closed link is what the death of rank 0 leaves: nobody stays behind."""
    path = tmp_path / "pid"
    with started(LocalProcesses(), 2, wait_for_rank_0, (str(path),)) as ranks:
        ranks.gather(None)
        ranks.peers[0].link.close()
        (process,) = multiprocessing.active_children()
        process.join(5)
        assert process.exitcode == 0
