"""Cached prefixes, against brute force: a plain Python simulator that keeps every block and all its tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pointsman.workload import Workload

from .factories import NO_SCRAPES, Run, cost_of, load_benchmark, make_cluster
from .test_twin import COSTS, compare, compare_batches

simulator = load_benchmark("reference_simulator")
reference = load_benchmark("reference_prefixes")

Chain = list[tuple[int, int]]  # (key, tokens of the whole prefix)


class Traffic:
    """Requests as a workload of links and, for brute force, as lists of tokens."""

    def __init__(self) -> None:
        self.rows: list[tuple[float, int, int, Chain, int]] = []  # arrival or pause, prompt, output, links, answer
        self.tokens: list[list[int]] = []  # of prompt and output
        self.next_turn: list[int] = []
        self._num_tokens = 0

    def fresh(self, count: int) -> list[int]:
        self._num_tokens += count
        return list(range(self._num_tokens - count, self._num_tokens))

    def add(self, at: float, shared: list[int], links: Chain, num_own: int, num_output: int, answer: int) -> int:
        """`shared` are the tokens of the links; -> its row."""
        tokens = shared + self.fresh(num_own) + self.fresh(num_output)
        self.rows.append((at, len(shared) + num_own, num_output, links, answer))
        self.tokens.append(tokens)
        self.next_turn.append(-1)
        return len(self.rows) - 1

    def workload(self) -> Workload:
        times, prompts, outputs, links, answers = zip(*self.rows, strict=True)
        is_later = np.isin(np.arange(len(times)), self.next_turn)
        lengths = np.array([len(chain) for chain in links])
        flat = [link for chain in links for link in chain]
        return Workload(
            np.where(is_later, 0.0, times),
            np.array(prompts, np.int32),
            np.array(outputs, np.int32),
            np.full(len(times), -1, np.int32),
            np.arange(len(times)),
            think_s=np.array(times, np.float64),
            next_turn=np.array(self.next_turn, np.int32),
            chain_start=np.cumsum(lengths) - lengths,
            chain_length=lengths.astype(np.int32),
            answer_key=np.array(answers, np.int64),
            link_key=np.array([key for key, _ in flat], np.int64),
            link_tokens=np.array([tokens for _, tokens in flat], np.int32),
        )

    def requests(self) -> list[Any]:
        """For brute force."""
        found = []
        for (at, prompt, output, _, _), tokens in zip(self.rows, self.tokens, strict=True):
            request = simulator.Request(at, prompt, output)
            request.tokens = tokens
            request.think_s = at
            found.append(request)
        for request, following in zip(found, self.next_turn, strict=True):
            request.next_turn = found[following] if following >= 0 else None
        return found


def draw_traffic(rng: np.random.Generator) -> Traffic:
    """A random tree of prefixes, requests along its paths, and sessions that continue their answers."""
    longest = int(rng.choice((12, 40, 100)))
    unit_s = float(rng.choice((0.25, 0.125, 0.01)))
    share_later = rng.choice((0.0, 0.3, 0.7))
    traffic = Traffic()
    nodes: list[tuple[list[int], Chain]] = [([], [])]
    for key in range(int(rng.choice((1, 3, 11)))):
        tokens, chain = nodes[int(rng.integers(len(nodes)))]
        tokens = tokens + traffic.fresh(int(rng.integers(1, longest)))
        nodes.append((tokens, [*chain, (1000 + key, len(tokens))]))
    count = int(rng.integers(1, 50))
    is_later = rng.random(count) < share_later
    is_later[0] = False
    now = 0.0
    for row in range(count - int(is_later.sum())):
        tokens, chain = nodes[int(rng.integers(len(nodes)))]
        now += unit_s * float(rng.choice((0, 0, 0, 1, 1, 2, 7, 40)))
        num_own = int(rng.choice((0, 1, 5, 20))) or (0 if tokens else 1)
        answer = 10_000 + row if rng.random() < 0.7 else 0
        traffic.add(now, tokens, chain, num_own, int(rng.integers(1, longest)), answer)
    for _ in range(int(is_later.sum())):
        open_rows = [row for row, one in enumerate(traffic.rows) if one[4] and traffic.next_turn[row] < 0]
        if open_rows:
            row = int(rng.choice(open_rows))
            _, prompt, output, chain, answer = traffic.rows[row]
            links = [*chain, (answer, prompt + output)]
            think_s = unit_s * float(rng.choice((0, 1, 5)))
            num_own, num_output = int(rng.integers(0, 12)), int(rng.integers(1, longest))
            key = 20_000 + len(traffic.rows)
            following = traffic.add(think_s, traffic.tokens[row], links, num_own, num_output, key)
            traffic.next_turn[row] = following
    return traffic


def draw_scheduler(rng: np.random.Generator, traffic: Traffic) -> dict[str, Any]:
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


def run_both(
    traffic: Traffic, scheduler: dict[str, Any], cost: tuple[float, ...], num_replicas: int, num_stages: int
) -> tuple[Run, Any, Any]:
    expected, replicas = reference.simulate(traffic.requests(), cost, num_replicas, num_stages=num_stages, **scheduler)
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
        assert all(block.content is not None for block, may in zip(replica.free_blocks, may_hit, strict=True) if may)
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
    traffic = draw_traffic(rng)
    scheduler = draw_scheduler(rng, traffic)
    cost = COSTS[int(rng.integers(len(COSTS)))]
    return run_both(traffic, scheduler, cost, int(rng.choice((1, 2))), num_stages)


@pytest.mark.parametrize("num_stages", [1, 2])
@settings(max_examples=settings.default.max_examples // 2)
@given(seed=st.integers(0, 2**32 - 1))
def test_caching_replicas_behave_as_brute_force(num_stages: int, seed: int) -> None:
    assert_same(*run_random(seed, num_stages))
