"""Cached prefixes against brute force: a plain Python simulator that keeps every block and its tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pointsman.spec import parse_spec
from pointsman.workload import WorkloadSpec, build_workload

from .factories import (
    NO_SCRAPES,
    Run,
    assert_same_outcome,
    cost_of,
    load_benchmark,
    make_cluster,
    random_workload,
)
from .test_twin import COSTS as EQUAL_COSTS
from .test_twin import compare, compare_batches

load_benchmark("reference_simulator")
reference = load_benchmark("reference_prefixes")
shared_traffic = load_benchmark("shared_traffic")

# Where steps take no time, who of two replicas comes first at an instant is not what is compared here.
COSTS = EQUAL_COSTS[:5]


def draw_scheduler(rng: np.random.Generator, traffic: Any) -> dict[str, Any]:
    """From no room for a second request to room for all."""
    block_size = int(rng.choice((4, 16, 8, 1, 2, 3, 7)))
    max_seqs = int(rng.choice((40, 12, 6, 3)))
    longest = max(len(tokens) for tokens in traffic.tokens)
    return {
        "block_size": block_size,
        "num_blocks": -(-longest // block_size) + int(rng.choice((0, 1, 2, 4, 8, 16, 32, 64, 2000))),
        "watermark": float(rng.choice((0.0, 0.01, 0.1))),
        "max_num_seqs": max_seqs,
        "max_num_batched_tokens": max_seqs + int(rng.integers(0, rng.choice((10, 400)))),
        "long_prefill_token_threshold": int(rng.choice((0, rng.integers(1, 40)))),
    }


def reference_requests(traffic: Any) -> list[Any]:
    found = []
    for row, tokens in zip(traffic.rows, traffic.tokens, strict=True):
        request = reference.Request(row.at_s, row.num_prompt, row.num_output)
        request.tokens = tokens
        request.think_s = row.at_s
        found.append(request)
    for request, following in zip(found, traffic.next_turn, strict=True):
        request.next_turn = found[following] if following >= 0 else None
    return found


def run_both(
    traffic: Any, scheduler: dict[str, Any], cost: tuple[float, ...], num_replicas: int, num_stages: int
) -> tuple[Run, Any, Any]:
    expected, replicas = reference.simulate(
        reference_requests(traffic), cost, num_replicas, num_stages=num_stages, **scheduler
    )
    settings_ = {"kind": "vllm-v1", "pipeline_stages": num_stages, "prefix_caching": True} | scheduler
    cluster = make_cluster(replicas=num_replicas, scheduler=settings_, cost=cost_of(cost), signals=NO_SCRAPES)
    run = Run(cluster, traffic.workload(), "round-robin", num_logged_batches=expected.num_batches + 1)
    return run.to_end(), expected, replicas


def assert_same(run: Run, expected: Any, replicas: Any) -> None:
    compare_batches(run, expected)
    compare(run.requests, expected)
    for k, replica in enumerate(replicas):
        ours = run.replicas[k]
        assert ours.hit_tokens == sum(replica.num_hit_tokens.values())
        may_hit = queue_of(run, k)
        assert len(may_hit) == len(replica.free_blocks) == ours.num_blocks, "a block is lost"
        # Ours forgets at once what nobody will look for.
        assert all(
            block.content is not None for block, may in zip(replica.free_blocks, may_hit, strict=True) if may
        )
    assert not run.clusters.broken_guards()


def queue_of(run: Run, k: int) -> list[bool]:
    """Whether each free block may still be hit, in the order in which they will be taken."""
    cache = run.clusters.arrays("cache")[k][0]
    stretches = run.clusters.arrays("stretches")[k]
    found: list[bool] = []
    number = cache["oldest"]
    while number:
        stretch = stretches[number]
        assert stretch["num_holders"] == 0
        found += [bool(stretch["key"] != 0)] * int(stretch["stop"] - stretch["start"])
        number = stretch["newer"]
    return found


def run_random(seed: int, num_stages: int = 1) -> tuple[Run, Any, Any]:
    rng = np.random.default_rng(seed)
    traffic = shared_traffic.draw_traffic(
        rng, int(rng.integers(1, 50)), int(rng.choice((12, 40, 100))), float(rng.choice((0.25, 0.125, 0.01)))
    )
    scheduler = draw_scheduler(rng, traffic)
    cost = COSTS[int(rng.integers(len(COSTS)))]
    return run_both(traffic, scheduler, cost, int(rng.choice((1, 2))), num_stages)


@pytest.mark.parametrize("num_stages", [1, 2])
@settings(max_examples=settings.default.max_examples // 2)
@given(seed=st.integers(0, 2**32 - 1))
def test_caching_replicas_behave_as_brute_force(num_stages: int, seed: int) -> None:
    assert_same(*run_random(seed, num_stages))


def two_equal_prompts(num_prompt: int, second_at_s: float) -> Any:
    """Two requests with the same prompt, all of it shared."""
    traffic = shared_traffic.Traffic()
    tokens = traffic.fresh(num_prompt)
    for at_s in (0.0, second_at_s):
        traffic.add(at_s, tokens, [(5, num_prompt)], 0, 4, 0)
    return traffic.workload()


@pytest.mark.parametrize(("num_prompt", "num_hit"), [(64, 48), (65, 64), (79, 64), (80, 64), (16, 0), (9, 0)])
def test_full_blocks_are_found_and_the_last_token_is_computed(num_prompt: int, num_hit: int) -> None:
    run = Run(make_cluster(replicas=1), two_equal_prompts(num_prompt, 5.0)).to_end()
    assert run.requests["hit_tokens"].tolist() == [0, num_hit]
    assert run.replicas["hit_tokens"][0] == num_hit
    assert run.replicas["prompt_tokens"][0] == 2 * num_prompt


def test_a_hit_saves_the_time_of_its_tokens() -> None:
    def second_ttft_s(is_caching: bool) -> float:
        scheduler = {"kind": "vllm-v1", "num_blocks": 1000, "prefix_caching": is_caching}
        cost = cost_of((0.01, 1e-3, 0.0, 0.0, 0.0))
        cluster = make_cluster(replicas=1, scheduler=scheduler, cost=cost)
        requests = Run(cluster, two_equal_prompts(65, 5.0)).to_end().requests
        return float(requests["first_token_at"][1] - requests["arrived_at"][1])

    assert second_ttft_s(False) == pytest.approx(0.075)
    assert second_ttft_s(True) == pytest.approx(0.011)


def test_what_a_replica_cached_dies_with_it() -> None:
    events = [{"at_s": 1.0, "kind": "fail", "replica": 0}, {"at_s": 2.0, "kind": "recover", "replica": 0}]
    run = Run(make_cluster(replicas=1, events=events), two_equal_prompts(100, 5.0)).to_end()
    assert run.requests["hit_tokens"].tolist() == [0, 0]
    alive = Run(make_cluster(replicas=1), two_equal_prompts(100, 5.0)).to_end()
    assert alive.requests["hit_tokens"].tolist() == [0, 96]


def test_replicas_that_die_with_requests_start_again_empty() -> None:
    """Whoever held blocks there holds none afterwards, and every block is free in the end."""
    rng = np.random.default_rng(0)
    traffic = shared_traffic.draw_traffic(rng, 60, 60, 0.125)
    events = [
        {"at_s": at_s, "kind": kind, "replica": replica}
        for at_s, kind, replica in (
            (0.5, "fail", 0),
            (0.6, "recover", 0),
            (1.0, "fail", 1),
            (1.5, "recover", 1),
        )
    ]
    scheduler = {"kind": "vllm-v1", "num_blocks": 80, "block_size": 4}
    run = Run(make_cluster(replicas=2, scheduler=scheduler, events=events), traffic.workload()).to_end()
    assert run.sim.num_completed == 60
    assert run.sim.num_resent > 0
    assert [len(queue_of(run, k)) for k in range(2)] == [80, 80]
    assert run.replicas["used_blocks"].tolist() == [0, 0]
    assert not run.clusters.broken_guards()


def test_caching_changes_nothing_where_nothing_is_shared() -> None:
    workload = random_workload(400, 20.0)
    off, on = (
        Run(make_cluster(scheduler={"kind": "vllm-v1", "num_blocks": 500, "prefix_caching": value}), workload)
        for value in (False, True)
    )
    assert_same_outcome(off.to_end(), on.to_end())
    assert on.sim.num_preemptions == 0
    assert on.replicas["hit_tokens"].sum() == 0


def test_caching_is_on_where_prompts_share_and_not_elsewhere() -> None:
    shared, plain = two_equal_prompts(64, 5.0), random_workload(2, 1.0)
    assert Run(make_cluster(replicas=1), shared).replicas["cache"][0] != 0
    assert Run(make_cluster(replicas=1), plain).replicas["cache"][0] == 0
    for kind in ("vllm", "sarathi", "orca"):
        scheduler = {"kind": kind, "num_blocks": 1000}
        assert Run(make_cluster(replicas=1, scheduler=scheduler), shared).replicas["cache"][0] == 0


def test_mooncakes_conversations_find_what_they_can() -> None:
    """One server that never forgets: the share of the prompt tokens whose block of 512 was there before."""
    workload = build_workload(parse_spec(WorkloadSpec, {"trace": "mooncake-conversation"}, "workload"), 0)
    scheduler = {
        "kind": "vllm-v1",
        "block_size": 512,
        "num_blocks": 400_000,
        "max_num_batched_tokens": 131_072,
    }
    cost = cost_of((1e-6, 0.0, 0.0, 0.0, 0.0))
    run = Run(make_cluster(replicas=1, scheduler=scheduler, cost=cost), workload).to_end()
    replica = run.replicas[0]
    assert replica.prompt_tokens == workload.num_prefill_tokens.sum()
    assert replica.hit_tokens / replica.prompt_tokens == pytest.approx(0.374, abs=0.001)
