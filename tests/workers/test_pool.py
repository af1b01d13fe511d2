"""Simulations on workers instead of threads."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pointsman.evaluation.compare import compare
from pointsman.experiments.metrics import hits_over_time
from pointsman.experiments.scenarios import find_scenario
from pointsman.experiments.simulate import Prepared, prepare, simulate
from pointsman.routing.policy import PolicySpec
from pointsman.workers.peers import LinkedProcess, LostWorkerError, WorkerError
from pointsman.workers.pool import MAX_TRIES, WorkerPool, pool
from pointsman.workers.processes import LocalProcesses


def die_once(peer: LinkedProcess, marker: Path) -> str:
    if not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return "done"


def die(peer: LinkedProcess, marker: Path) -> None:
    with marker.open("a") as file:
        file.write("x")
    os.kill(os.getpid(), signal.SIGKILL)


def fail(peer: LinkedProcess) -> None:
    raise ValueError("no such luck")


def runs() -> list[Prepared]:
    scenario = find_scenario("steady-chat")
    return [prepare(scenario.config(seed, ["workload.requests=40"])) for seed in range(2)]


@pytest.fixture(scope="module")
def two() -> Iterator[WorkerPool]:
    with pool(LocalProcesses(), 2) as opened:
        yield opened


def test_simulations_are_the_same_as_on_threads(two: WorkerPool) -> None:
    prepared, advanced = runs(), []
    policies = [PolicySpec(kind="default"), PolicySpec(kind="least-work")]
    here = simulate(prepared, 1, policies=policies)
    elsewhere = simulate(prepared, two, advanced.append, policies=policies)
    for one, other in zip(here, elsewhere, strict=True):
        assert one.metrics == other.metrics
        assert np.asarray(one.requests).tobytes() == np.asarray(other.requests).tobytes()
        for name in ("busy_s", "kv_area", "num_sent"):  # addresses differ
            np.testing.assert_array_equal(one.replicas[name], other.replicas[name])
    assert sum(advanced) == 80


def test_a_comparison_is_the_same_as_on_threads(two: WorkerPool) -> None:
    """Workers elsewhere send what is kept of a run, not the run."""
    scenario = find_scenario("multi-turn")
    configs = [scenario.config(seed, ["workload.requests=60"]) for seed in range(2)]
    policies = ["least-outstanding", "cache-aware"]
    here, elsewhere = (compare("one", "", configs, policies, workers=workers) for workers in (1, two))
    for policy in policies:
        assert set(here.metrics[policy]) == set(elsewhere.metrics[policy])
        for name, values in here.metrics[policy].items():
            np.testing.assert_array_equal(values, elsewhere.metrics[policy][name])
        for curve, histogram in here.curves[policy].items():
            assert histogram.counts.sum() == 120
            np.testing.assert_array_equal(histogram.counts, elsewhere.curves[policy][curve].counts)
        # Of the first seed, in both.
        (first,) = simulate([prepare(configs[0])], policies=[PolicySpec(kind=policy)])
        expected = hits_over_time(first.requests, len(first.replicas))
        for hits in (here.hits[policy], elsewhere.hits[policy]):
            np.testing.assert_array_equal(hits.shares, expected.shares)


def test_a_lost_worker_is_replaced_and_its_call_made_again(two: WorkerPool, tmp_path: Path) -> None:
    assert two.call(die_once, tmp_path / "marker") == "done"


def test_a_call_that_takes_its_worker_down_is_given_up(two: WorkerPool, tmp_path: Path) -> None:
    with pytest.raises(LostWorkerError):
        two.call(die, tmp_path / "marker")
    assert (tmp_path / "marker").read_text() == MAX_TRIES * "x"


def test_what_a_worker_raises_is_said_here_and_it_works_on(two: WorkerPool) -> None:
    for _ in range(3):
        with pytest.raises(WorkerError, match="failed: ValueError: no such luck"):
            two.call(fail)
