"""Requests that turn out longer than the memory of their replica: they come back and go where there is more.

How long an answer will be is known to nobody but the simulated server, so nothing that the router does may
depend on it before a request ends or comes back.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from routing.learned import make_checkpoint

from pointsman.errors import InputError
from pointsman.inference.checkpoint import Checkpoint
from pointsman.routing.heuristics import HEURISTICS
from pointsman.routing.policy import PolicySpec
from pointsman.simulator.spec import ClusterSpec
from pointsman.workload import Workload

from . import chaos
from .factories import AdvisedRun, Run, assert_all_served, make_cluster, make_policy, make_workload
from .test_laws import assert_littles_law, assert_nothing_is_left

LEARNED = "learned"


def any_policy(kind: str, seed: int = 0) -> PolicySpec | Checkpoint:
    if kind != LEARNED:
        return make_policy(kind)
    checkpoint = make_checkpoint(seed)
    checkpoint.metadata["hold"] = {"allowed": True, "recheck_s": 0.1, "kv_limit": 0.6}
    return checkpoint


def small_and_large(kind: str, num_stages: int, **cluster: Any) -> ClusterSpec:
    """A replica with memory for 64 tokens that is so fast that all like it, and one with memory for more."""
    scheduler: dict[str, Any] = {"kind": kind, "block_size": 4, "pipeline_stages": num_stages}
    small, large = scheduler | {"num_blocks": 16}, scheduler | {"num_blocks": 400}
    if kind in ("vllm", "sarathi"):
        small |= {"num_blocks": 17, "watermark": 0.06}  # a block that stays free
    if kind == "orca":
        small["max_sequence_tokens"], large["max_sequence_tokens"] = 64, 400
    groups = [{"scheduler": small, "slowdown": 0.1}, {"scheduler": large, "slowdown": 4.0}]
    return make_cluster(replicas=groups, **cluster)


def first_to_the_small(run: Run) -> int:
    takers = run.takers(int(run.sim.queue_head))
    return takers[0] + 1 if takers else 0


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("kind", chaos.KINDS)
def test_it_comes_back_once_and_finishes_where_there_is_more(kind: str, num_stages: int) -> None:
    """Prompts of every length up to all of the memory; every third answer is long."""
    prompts = np.arange(1, 65)
    outputs = np.where(prompts % 3 == 0, 90, 5)
    workload = make_workload(0.02 * np.arange(64), prompts, outputs)
    run = Run(small_and_large(kind, num_stages), workload, None).decide(first_to_the_small)
    assert_all_served(run)
    assert_littles_law(run)
    assert_nothing_is_left(run)
    is_too_long = prompts + outputs > 64
    assert run.sim.num_outgrown == run.sim.num_resent == is_too_long.sum()
    assert run.requests["replica"].tolist() == is_too_long.astype(int).tolist()
    assert run.requests["seen"].tolist() == np.where(is_too_long, np.maximum(64, prompts + 1), 0).tolist()
    # A client's clock goes on when its request starts again.
    streams_s = (run.requests["completed_at"] - run.requests["first_token_at"]).sum()
    assert run.intervals_s() == pytest.approx(streams_s, rel=0.01)
    assert run.sim.num_decode_left == run.sim.num_unstarted == 0


def test_it_waits_for_the_replica_that_is_large_enough() -> None:
    """The only one with enough memory is gone for a while: the request is not sent in circles."""
    events = [{"at_s": 0.0, "kind": "fail", "replica": 1}, {"at_s": 50.0, "kind": "recover", "replica": 1}]
    workload = make_workload([0.0, 1.0], 20, [90, 5])
    run = Run(small_and_large("vllm-v1", 1, events=events), workload, "least-outstanding").to_end()
    assert_all_served(run)
    assert run.sim.num_outgrown == 1
    assert run.requests["dispatched_at"][0] == 50.0
    assert run.replicas["num_sent"].tolist() == [2, 1] or run.replicas["num_sent"].tolist() == [1, 2]


@pytest.mark.parametrize("kind", ["vllm", "sarathi"])
def test_vidurs_schedulers_do_not_sleep_on_a_request_that_is_too_long(kind: str) -> None:
    """They do on one that fills the memory alone, and has an end within it: Vidur's quirk."""
    groups = [
        {"scheduler": {"kind": kind, "block_size": 4, "num_blocks": count, "watermark": 0.0}}
        for count in (16, 100)
    ]
    prompts = np.arange(1, 65)
    workload = make_workload(np.arange(64), prompts, 90)
    run = Run(make_cluster(replicas=groups), workload, None).decide(first_to_the_small)
    assert_all_served(run)
    assert_nothing_is_left(run)
    assert run.sim.num_outgrown == 64
    assert run.replicas["num_sent"].tolist() == [64, 64]


def test_a_request_must_fit_on_one_replica() -> None:
    """Not its prompt on one and its length on another, or it would wait for ever.

    The second one's expected length fits on the first replica alone, which does not take its prompt.
    """
    vllm = {"kind": "vllm", "block_size": 4, "num_blocks": 400, "max_tokens_in_batch": 50}
    small = {"kind": "vllm-v1", "block_size": 4, "num_blocks": 25}
    cluster = make_cluster(replicas=[{"scheduler": vllm}, {"scheduler": small}])
    assert_all_served(Run(cluster, make_workload([0.0, 0.0], [50, 90], [200, 10])).to_end())
    with pytest.raises(InputError, match="that takes its prompt"):
        Run(cluster, make_workload([0.0], 60, 60))


class Decision(NamedTuple):
    at: float
    request: int
    action: int
    signals: bytes


def decisions_before_an_end(
    cluster: ClusterSpec, workload: Workload, policy: PolicySpec | Checkpoint
) -> list[Decision]:
    """All that the router decided and knew until a request ended or came back."""
    run = AdvisedRun(cluster, workload, policy)
    decisions = []
    for request in run.decisions():
        if run.sim.num_completed + run.sim.num_outgrown > 0:
            break
        run.action = run.advice()
        decisions.append(Decision(float(run.sim.now), request, run.action, run.table.tobytes()))
    return decisions


def with_outputs(workload: Workload, outputs: np.ndarray) -> Workload:
    return replace(workload, num_decode_tokens=outputs.astype(np.int32))


@settings(max_examples=settings.default.max_examples // 2)
@given(
    cluster=chaos.clusters(),
    workload=chaos.workloads(),
    kind=st.sampled_from([*HEURISTICS, LEARNED]),
    seed=st.integers(0, 2**32 - 1),
)
def test_no_decision_depends_on_how_long_an_answer_will_be(
    cluster: ClusterSpec, workload: Workload, kind: str, seed: int
) -> None:
    outputs = np.random.default_rng(seed).integers(1, chaos.MAX_OUTPUT + 1, len(workload))
    policy = any_policy(kind, seed % 3)
    one, other = (
        decisions_before_an_end(cluster, workload, policy)
        for workload in (workload, with_outputs(workload, outputs))
    )
    num_same = min(len(one), len(other))
    assert one[:num_same] == other[:num_same]


@pytest.mark.parametrize("kind", [*HEURISTICS, LEARNED])
def test_a_short_and_a_long_answer_are_sent_alike(kind: str) -> None:
    """Four replicas of four sizes; half of the answers would fit on the largest only."""
    groups = [
        {"scheduler": {"kind": "vllm-v1", "block_size": 4, "num_blocks": num_blocks}}
        for num_blocks in (150, 80, 500, 100)
    ]
    cluster = make_cluster(replicas=groups)
    rng = np.random.default_rng(0)
    workload = make_workload(0.001 * np.arange(200), rng.integers(1, 300, 200), 200, np.arange(200) % 7)
    long = with_outputs(workload, np.where(np.arange(200) % 2, 1500, 200))
    one, other = (decisions_before_an_end(cluster, some, any_policy(kind)) for some in (workload, long))
    num_same = min(len(one), len(other))
    assert one[:num_same] == other[:num_same]
    assert num_same > 20
    assert len({decision.action for decision in one[:num_same]} - {0}) > 1
