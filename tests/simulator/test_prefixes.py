"""Cached prefixes against brute force: a plain Python simulator that keeps every block and its tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from .factories import NO_SCRAPES, Run, cost_of, load_benchmark, make_cluster
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
