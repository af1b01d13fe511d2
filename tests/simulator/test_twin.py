"""The compiled simulator against the plain Python one in `benchmarks/`, on whatever hypothesis comes up with.

The two share no code. Every request and every batch must be equal bit for bit, also of requests that are
never served (Vidur's vllm puts a request to sleep for ever when it fills the memory alone).

    pytest tests/simulator/test_twin.py --hypothesis-profile=thorough      # thousands of new examples
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pointsman.routing.records import NEVER

from .factories import NO_SCRAPES, Run, cost_of, load_benchmark, make_cluster, make_workload, scheduler_of

reference = load_benchmark("reference_simulator")

SCHEDULERS = ("vllm-v1", "vllm", "sarathi", "orca")
# Dyadic numbers add up exactly, so that events of different replicas fall on the same instant.
COSTS = (
    (0.25, 0.0, 0.0, 0.0, 0.0),
    (0.25, 0.125, 0.0, 0.0, 0.0),
    (0.5, 0.25, 0.125, 0.0, 0.0),
    (0.01, 1e-3, 1e-3, 1e-4, 1e-5),
    (0.0085, 8.0e-5, 3.0e-5, 8.0e-8, 3.4e-9),
    (0.0, 0.25, 0.0, 0.0, 0.0),  # decoding takes no time
    (1e-300, 0.0, 0.0, 0.0, 0.0),  # nothing does
)
Requests = tuple[list[float], list[int], list[int]]


@st.composite
def request_lists(draw: st.DrawFn) -> Requests:
    """Bursts, ties, and lengths of any mix."""
    count = draw(st.integers(1, 60))
    max_prompt = draw(st.sampled_from((40, 8, 80, 1)))
    max_output = draw(st.sampled_from((40, 20, 80, 2)))
    unit_s = draw(st.sampled_from((0.25, 0.125, 0.01)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    arrived_at = unit_s * np.cumsum(rng.choice((0, 0, 0, 1, 1, 2, 3, 7, 40), count))
    prompts, outputs = rng.integers(1, max_prompt + 1, count), rng.integers(1, max_output + 1, count)
    return arrived_at.tolist(), prompts.tolist(), outputs.tolist()


@st.composite
def schedulers(draw: st.DrawFn, requests: Requests, kind: str, num_stages: int) -> dict[str, Any]:
    """A replica that can take every request, as settings of `reference_simulator.simulate`."""
    max_seqs = draw(st.sampled_from((40, 12, 6, 3, 1)).map(lambda count: max(count, num_stages)))
    block_size = draw(st.sampled_from((4, 16, 8, 32, 1, 2, 3, 7, 31)))
    watermark = draw(st.sampled_from((0.0, 0.01, 0.1, 0.3)))
    _, prompts, outputs = requests
    longest = max(prompt + output for prompt, output in zip(prompts, outputs, strict=True))
    # From no room for a second request to room for all.
    num_blocks = -(-longest // block_size) + draw(st.sampled_from((0, 1, 2, 4, 8, 16, 32, 2000)))
    while kind != "vllm-v1" and (num_blocks - int(watermark * num_blocks)) * block_size < longest:
        num_blocks += 1
    replica = {
        "scheduler": kind,
        "block_size": block_size,
        "num_blocks": num_blocks,
        "watermark": watermark,
        "pipeline_stages": num_stages,
    }
    if kind == "vllm-v1":
        return replica | {
            "max_num_seqs": max_seqs,
            "max_num_batched_tokens": max_seqs + draw(st.integers(0, 10) | st.integers(0, 400)),
            "long_prefill_token_threshold": draw(st.just(0) | st.integers(1, 40)),
        }
    replica["max_batch_size"] = max_seqs
    if kind == "vllm":
        # A recomputed prompt may be longer than this: then nothing comes after it.
        replica["max_tokens_in_batch"] = max(prompts) + draw(st.integers(0, 200) | st.just(4000))
    elif kind == "sarathi":
        replica["chunk_size"] = draw(st.integers(1, 16) | st.integers(1, 300))
    else:
        # Less memory than one sequence reserves is refused.
        most = (num_blocks + 1) * block_size - 1
        replica["max_sequence_tokens"] = draw(st.integers(longest, most) | st.just(longest))
    return replica


def compare(found: Any, expected: Any) -> None:
    """Our table of requests, and a result of the reference."""

    def times(values: list[float | None]) -> list[float]:
        return [NEVER if value is None else value for value in values]

    assert found["replica"].tolist() == expected.replica_id
    assert found["restarts"].tolist() == expected.num_restarts
    assert found["scheduled_at"].tolist() == times(expected.scheduled_at)
    assert found["first_token_at"].tolist() == times(expected.first_token_at)
    assert found["completed_at"].tolist() == times(expected.completed_at)


def compare_batches(run: Run, expected: Any) -> None:
    """One by one: the first difference says most."""
    log = run.batch_log[: run.sim.num_logged_batches]
    names = ("replica", "formed_at", "ended_at", "num_seqs", "prefill_tokens", "num_decodes", "used_blocks")
    columns = [log[name].tolist() for name in names]
    for row, record in zip(zip(*columns, strict=True), expected.batches, strict=False):
        assert reference.BatchRecord(*row) == record
    assert len(log) == run.sim.num_batches == expected.num_batches


@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("kind", SCHEDULERS)
@settings(max_examples=settings.default.max_examples // 8)
@given(data=st.data())
def test_clusters_behave_as_their_twin(kind: str, num_stages: int, data: st.DataObject) -> None:
    requests = data.draw(request_lists())
    replica = data.draw(schedulers(requests, kind, num_stages))
    cost = data.draw(st.sampled_from(COSTS))
    num_replicas = data.draw(st.sampled_from((1, 2, 3, 4)))
    router = data.draw(st.sampled_from(("round-robin", "vidur-lor")))

    expected = reference.simulate(
        *requests, replicas=num_replicas, router=router, cost=cost, log_batches=True, **replica
    )
    cluster = make_cluster(
        replicas=num_replicas, scheduler=scheduler_of(replica), cost=cost_of(cost), signals=NO_SCRAPES
    )
    run = Run(cluster, make_workload(*requests), router, num_logged_batches=expected.num_batches + 1)
    run.to_end()

    compare(run.requests, expected)
    compare_batches(run, expected)


@settings(max_examples=settings.default.max_examples // 4)
@given(data=st.data())
def test_replicas_of_a_mixed_cluster_are_independent(data: st.DataObject) -> None:
    """A replica does what it would do alone with the requests it got, whatever the others are."""
    requests = data.draw(request_lists())
    kinds = data.draw(st.lists(st.sampled_from(SCHEDULERS), min_size=2, max_size=4))
    replicas = [data.draw(schedulers(requests, kind, data.draw(st.integers(1, 3)))) for kind in kinds]
    costs = [data.draw(st.sampled_from(COSTS)) for _ in replicas]
    slowdowns = [data.draw(st.sampled_from((1, 1, 2, 4))) for _ in replicas]  # exact in floating point
    num_batches = 0
    alone = []
    for k, replica in enumerate(replicas):
        expected = reference.simulate(
            *(column[k :: len(replicas)] for column in requests),
            replicas=1,
            cost=tuple(slowdowns[k] * coefficient for coefficient in costs[k]),
            **replica,
        )
        expected.replica_id = [k] * len(expected.replica_id)
        num_batches += expected.num_batches
        alone.append(expected)

    groups = [
        {"scheduler": scheduler_of(replica), "cost": cost_of(cost), "slowdown": slowdown}
        for replica, cost, slowdown in zip(replicas, costs, slowdowns, strict=True)
    ]
    cluster = make_cluster(replicas=groups, signals=NO_SCRAPES)
    run = Run(cluster, make_workload(*requests), None)
    run.decide(lambda run: int(run.sim.queue_head) % len(replicas) + 1)
    for k, expected in enumerate(alone):
        compare(run.requests[k :: len(replicas)], expected)
    assert run.sim.num_batches == num_batches


def test_memory_pressure_is_covered() -> None:
    """The examples above are worth something only if such settings lead to preemptions."""
    replica = {"block_size": 4, "num_blocks": 12, "watermark": 0.0, "pipeline_stages": 1}
    for kind in ("vllm-v1", "vllm", "sarathi"):
        result = reference.simulate([0.0] * 12, [6] * 12, [20] * 12, replicas=1, scheduler=kind, **replica)
        assert sum(result.num_restarts) > 0
