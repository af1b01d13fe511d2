"""One seed, one result: whatever the threads, the batching, the pauses, and with or without compilation."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pointsman.config import Config
from pointsman.experiments.running import run_to_end
from pointsman.experiments.simulate import Prepared, simulate
from pointsman.routing.heuristics import HEURISTICS
from pointsman.routing.policy import PolicyTables
from pointsman.simulator.cluster import Clusters
from pointsman.simulator.plan import plan_replicas
from pointsman.simulator.run import run as run_kernel
from pointsman.simulator.state import DONE, PAUSED
from pointsman.spec import parse_spec
from pointsman.workload import Workload

from . import interpreted
from .factories import Run, assert_all_served, assert_same_outcome, make_cluster, make_policy, random_workload

SCHEDULERS: dict[str, dict[str, Any]] = {
    "vllm-v1": {"kind": "vllm-v1", "num_blocks": 60, "max_num_seqs": 32},
    "vllm": {"kind": "vllm", "num_blocks": 60},
    "sarathi": {"kind": "sarathi", "num_blocks": 60, "chunk_size": 64},
    "orca": {"kind": "orca", "num_blocks": 60, "max_sequence_tokens": 640},
}
EVENTS = (
    {"at_s": 2.0, "kind": "fail", "replica": 1},
    {"at_s": 3.0, "kind": "slow", "replica": 2, "factor": 2.0},
    {"at_s": 4.0, "kind": "recover", "replica": 1},
    {"at_s": 5.0, "kind": "drain", "replica": 0},
)


def mixed_cluster() -> Any:
    return make_cluster(
        replicas=[{"scheduler": scheduler} for scheduler in SCHEDULERS.values()], events=EVENTS
    )


def is_same_to_the_byte(first: Run, second: Run) -> bool:
    return everything(first) == everything(second)


def everything(run: Run) -> list[Any]:
    """All that a run is; of addresses, which differ from run to run, only that they are there."""
    addresses = {array.ctypes.data for array in run.clusters.sims._held}
    state = [None if number in addresses else number for number in flat(run.sim.item())]
    tables = (run.requests, run.tickets, run.table, run.clusters.tbt_histograms[0])
    return [*state, *(table.tobytes() for table in tables)]


def flat(record: tuple[Any, ...]) -> Iterator[Any]:
    for value in record:
        if isinstance(value, tuple):
            yield from flat(value)
        else:
            yield value


@pytest.mark.parametrize("policy", HEURISTICS)
def test_same_seed_same_bytes(policy: str) -> None:
    workload = random_workload(150, 12.0)
    first, second = (Run(mixed_cluster(), workload, policy, seed=5).to_end() for _ in range(2))
    assert is_same_to_the_byte(first, second)


@pytest.mark.parametrize("policy", ["random", "least-outstanding", "power-of-two"])
def test_another_seed_breaks_ties_differently(policy: str) -> None:
    workload = random_workload(150, 12.0)
    first, second = (Run(mixed_cluster(), workload, policy, seed=seed).to_end() for seed in (0, 1))
    assert np.any(first.requests["replica"] != second.requests["replica"])


def many_runs() -> list[Prepared]:
    """Clusters of different size, policy, load and seed."""
    prepared = []
    for number, kind in enumerate(HEURISTICS):
        policy = make_policy(kind)
        cluster = mixed_cluster() if number % 3 else make_cluster(replicas=1 + number)
        config = make_config(cluster, policy, seed=number)
        workload = random_workload(100 + 10 * number, 12.0, seed=number)
        prepared.append(Prepared(config, plan_replicas(cluster), workload))
    return prepared


def make_config(cluster: Any, policy: Any, seed: int) -> Any:
    workload = {"arrivals": {"kind": "poisson", "rate": 1.0}, "lengths": "azure-conv", "requests": 1}
    return parse_spec(Config, {"workload": workload, "cluster": cluster, "policy": policy, "seed": seed})


def test_threads_and_company_change_nothing() -> None:
    """N clusters on one thread, on two, and each by itself."""
    together = simulate(many_runs(), workers=1)
    on_two_threads = simulate(many_runs(), workers=2)
    alone = [simulate([one])[0] for one in many_runs()]
    for first, second, third in zip(together, on_two_threads, alone, strict=True):
        assert first.requests.tobytes() == second.requests.tobytes() == third.requests.tobytes()
        assert repr(first.metrics) == repr(second.metrics) == repr(third.metrics)  # repr: NaN equals NaN


def test_one_call_advances_many_clusters() -> None:
    cluster, workloads = make_cluster(), [random_workload(60, 12.0, seed) for seed in range(5)]
    plans = plan_replicas(cluster)
    clusters = Clusters([cluster] * 5, [plans] * 5, workloads, list(range(5)))
    policies = PolicyTables([make_policy("random")] * 5, len(plans))
    run_kernel(clusters.sims, policies.rows, np.zeros(5, np.int64), 1, 4)
    assert clusters.sims["status"].tolist() == [0, DONE, DONE, DONE, 0]
    run_kernel(clusters.sims, policies.rows, np.zeros(5, np.int64), 0, 5)
    for seed in range(5):
        expected = Run(cluster, workloads[seed], "random", seed).to_end()
        assert clusters.requests[seed].tobytes() == expected.requests.tobytes()


@pytest.mark.parametrize("stride", [1, 7])
def test_pauses_to_show_progress_change_nothing(stride: int) -> None:
    workload = random_workload(150, 12.0)
    plain = Run(mixed_cluster(), workload, "least-outstanding").to_end()
    paused = Run(mixed_cluster(), workload, "least-outstanding")
    num_pauses = 0
    paused.sim.pause_at = stride
    while paused.step():
        assert paused.sim.status == PAUSED
        num_pauses += 1
        paused.sim.pause_at = paused.sim.num_completed + stride
    assert num_pauses > 100 // stride
    paused.sim.pause_at = plain.sim.pause_at
    assert is_same_to_the_byte(paused, plain)


def test_progress_is_reported_in_full() -> None:
    workload = random_workload(250, 12.0)
    run = Run(make_cluster(), workload)
    reported: list[int] = []
    run_to_end(run.clusters, run.policies, progress=reported.append)
    assert sum(reported) == 250 and len(reported) > 50


@pytest.mark.parametrize("capacity", [1, 10])
def test_batch_log_that_fills_up_changes_nothing(capacity: int) -> None:
    workload = random_workload(100, 12.0)
    plain = Run(mixed_cluster(), workload, "least-work", num_logged_batches=100_000).to_end()
    logged = Run(mixed_cluster(), workload, "least-work", num_logged_batches=capacity)
    parts = []
    is_running = True
    while is_running:
        is_running = logged.step()
        parts.append(logged.batch_log[: logged.sim.num_logged_batches].copy())
        logged.sim.num_logged_batches = 0
    assert_same_outcome(plain, logged)
    whole = plain.batch_log[: plain.sim.num_logged_batches]
    assert len(whole) == plain.sim.num_batches
    assert np.concatenate(parts).tobytes() == whole.tobytes()


def test_policy_outside_the_kernel_does_what_the_same_one_does_inside() -> None:
    workload = random_workload(200, 12.0)
    events = EVENTS[1:2]  # no failure: round robin is counted from the last replica that was chosen
    cluster = make_cluster(replicas=4, events=events)
    inside = Run(cluster, workload, "round-robin").to_end()
    outside = Run(cluster, workload, None)
    for number, _ in enumerate(outside.decisions()):
        outside.action = number % 4 + 1
    assert_same_outcome(inside, outside)
    assert outside.sim.num_decisions == len(workload)


def test_workload_is_not_written_to() -> None:
    workload: Workload = random_workload(50, 12.0)
    before = [getattr(workload, name).copy() for name in ("arrived_at", "num_prefill_tokens")]
    assert_all_served(Run(mixed_cluster(), workload, "random").to_end())
    np.testing.assert_array_equal(workload.arrived_at, before[0])
    np.testing.assert_array_equal(workload.num_prefill_tokens, before[1])


def test_without_compilation_everything_is_the_same() -> None:
    environment = os.environ | {"NUMBA_DISABLE_JIT": "1"}
    script = Path(interpreted.__file__)
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        env=environment,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found = dict(line.split() for line in done.stdout.splitlines())
    assert found == interpreted.digests()
