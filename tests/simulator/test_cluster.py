"""What `cluster.py` refuses, and that what it accepts can be served."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pointsman.errors import InputError
from pointsman.simulator.plan import plan_replicas

from .factories import Run, assert_all_served, make_cluster, make_workload, random_workload


@pytest.mark.parametrize(
    ("scheduler", "prompt", "output", "words"),
    [
        ({"kind": "vllm-v1", "num_blocks": 10}, 161, 1, ["num_prefill_tokens", "161", "160", "num_blocks"]),
        ({"kind": "vllm-v1", "num_blocks": 10}, 150, 11, ["num_decode_tokens", "161", "160"]),
        (
            {"kind": "vllm", "num_blocks": 100, "max_tokens_in_batch": 50},
            51,
            1,
            ["num_prefill_tokens", "51", "50", "max_tokens_in_batch"],
        ),
        ({"kind": "orca", "num_blocks": 100, "max_sequence_tokens": 64}, 60, 5, ["65", "64"]),
        ({"kind": "sarathi", "num_blocks": 100, "watermark": 0.5}, 700, 200, ["900", "800"]),
    ],
)
def test_request_that_fits_nowhere_is_refused(
    scheduler: dict[str, Any], prompt: int, output: int, words: list[str]
) -> None:
    workload = make_workload([0.0, 1.0], [1, prompt], [1, output])
    with pytest.raises(InputError) as caught:
        Run(make_cluster(scheduler=scheduler), workload)
    for word in ["request 1", *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize("kind", ["vllm-v1", "vllm", "sarathi", "orca"])
def test_largest_request_that_is_accepted_is_served(kind: str) -> None:
    """Except by Vidur's vllm: it wants a free block at the end, evicts the request and goes to sleep."""
    scheduler: dict[str, Any] = {"kind": kind, "num_blocks": 10}
    scheduler |= {"max_sequence_tokens": 160} if kind == "orca" else {}
    run = Run(make_cluster(replicas=1, scheduler=scheduler), make_workload([0.0, 0.1], 60, 100)).to_end()
    if kind == "vllm":
        assert run.requests["completed_at"].tolist() == [-1.0, -1.0]
        assert run.sim.num_in_system == 2
    else:
        assert_all_served(run)


def test_more_stages_than_sequences_are_refused() -> None:
    scheduler = {"kind": "vllm", "num_blocks": 10, "max_batch_size": 2, "pipeline_stages": 3}
    with pytest.raises(InputError, match="pipeline_stages"):
        plan_replicas(make_cluster(scheduler=scheduler))


def test_run_with_a_stuck_request_ends() -> None:
    """With scrapes and timers under way; a second replica serves on."""
    scheduler = {"kind": "vllm", "num_blocks": 2, "block_size": 4}
    run = Run(
        make_cluster(scheduler=scheduler), make_workload([0.0, 0.0, 0.1, 0.2], 3, [5, 2, 2, 2])
    ).to_end()
    assert run.requests["completed_at"][0] < 0
    assert np.all(run.requests["completed_at"][1::2] > 0)
    assert run.sim.num_completed < run.sim.num_requests


def test_run_ends_when_nobody_is_left_to_take_a_request() -> None:
    """The large request waits at the router for a replica that never comes back; the small ones behind it."""
    groups = [{"scheduler": {"kind": "vllm-v1", "num_blocks": blocks}} for blocks in (100, 10)]
    cluster = make_cluster(replicas=groups, events=[{"at_s": 0.5, "kind": "fail", "replica": 0}])
    run = Run(cluster, make_workload([0.0, 1.0, 2.0], [20, 300, 20], 5), "least-outstanding").to_end()
    assert run.requests["completed_at"][0] > 0
    assert run.requests["dispatched_at"].tolist()[1:] == [-1.0, -1.0]


@pytest.mark.parametrize("policy", ["round-robin", "least-outstanding", "random"])
def test_request_goes_only_where_it_fits(policy: str) -> None:
    groups = [{"scheduler": {"kind": "vllm-v1", "num_blocks": blocks}} for blocks in (10, 100)]
    workload = random_workload(200, 10.0, mean_tokens=80)
    run = Run(make_cluster(replicas=groups), workload, policy).to_end()
    assert_all_served(run)
    sizes = workload.num_prefill_tokens + workload.num_decode_tokens
    assert np.all(run.requests["replica"][sizes > 160] == 1)
    assert np.any(run.requests["replica"][sizes <= 160] == 0)


@pytest.mark.parametrize("policy", ["round-robin", "least-outstanding"])
def test_prompt_goes_only_where_it_is_admitted(policy: str) -> None:
    groups = [
        {"scheduler": {"kind": "vllm", "num_blocks": 1000, "max_tokens_in_batch": 100}},
        {"scheduler": {"kind": "vllm-v1", "num_blocks": 1000}},
    ]
    run = Run(make_cluster(replicas=groups), make_workload(np.arange(6.0), 200, 5), policy).to_end()
    assert_all_served(run)


def test_orca_without_memory_for_one_sequence_is_refused() -> None:
    scheduler = {"kind": "orca", "num_blocks": 10, "block_size": 16, "max_sequence_tokens": 4096}
    with pytest.raises(InputError):
        Run(make_cluster(scheduler=scheduler), make_workload([0.0]))


def test_cost_of_nothing_is_refused() -> None:
    with pytest.raises(InputError):
        Run(make_cluster(cost={"kind": "linear", "a": 0.0}), make_workload([0.0]))


def test_closed_loop_keeps_its_users_busy() -> None:
    """Each user sends the next request when the last is answered and thought about."""
    think_s = np.full(12, 0.5)
    workload = make_workload(np.zeros(12), 10, 4, num_users=3, think_s=think_s)
    run = Run(make_cluster(replicas=3, cost={"kind": "linear", "a": 0.25}), workload, "round-robin").to_end()
    assert_all_served(run)
    assert run.requests["arrived_at"].tolist() == [0.5] * 3 + [2.0] * 3 + [3.5] * 3 + [5.0] * 3
    assert run.requests["completed_at"].tolist() == [1.5] * 3 + [3.0] * 3 + [4.5] * 3 + [6.0] * 3
    in_system = [
        np.sum((run.requests["arrived_at"] <= t) & (run.requests["completed_at"] > t)) for t in (1, 5.5)
    ]
    assert in_system == [3, 3]
