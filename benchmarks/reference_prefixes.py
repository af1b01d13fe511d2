"""Prefix caching for the plain Python simulator, block by block as vLLM does it.

Written from vLLM's block pool: every block is an object, and its content is the tuple of all tokens up to its
end. Slow, and made to share nothing with `pointsman/simulator/prefixes.py`, which tests compare with it.
"""

from __future__ import annotations

import sys
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from reference_replica import Replica, Request
from reference_schedulers import VllmV1Scheduler
from reference_simulator import LinearCost, Result, Simulation, round_robin


@dataclass(eq=False)
class Block:
    content: tuple[int, ...] | None = None
    num_holders: int = 0


class CachingReplica(Replica):
    """A replica whose blocks keep their content until they are given out again."""

    __slots__ = ("blocks_of", "cached", "free_blocks", "num_cached", "num_hit_tokens")

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.free_blocks = deque(Block() for _ in range(self.num_blocks))
        self.cached: dict[tuple[int, ...], list[Block]] = {}
        self.blocks_of: dict[int, list[Block]] = {}
        self.num_cached: dict[int, int] = {}
        self.num_hit_tokens: dict[int, int] = {}  # at the first admission

    def find_hits(self, request: Request) -> list[Block]:
        hits = []
        for end in range(self.block_size, request.num_prefill, self.block_size):  # the last token is computed
            blocks = self.cached.get(tuple(request.tokens[:end]))
            if not blocks:
                break
            hits.append(blocks[0])
        return hits

    def num_idle(self, hits: list[Block]) -> int:
        return sum(block.num_holders == 0 for block in hits)

    def use_hits(self, request: Request, hits: list[Block]) -> None:
        for block in hits:
            if block.num_holders == 0:
                self.free_blocks.remove(block)
                self.num_free_blocks -= 1
            block.num_holders += 1
        self.blocks_of[id(request)] = list(hits)
        self.num_cached[id(request)] = len(hits)
        request.num_blocks = len(hits)
        request.num_processed = len(hits) * self.block_size
        self.num_hit_tokens.setdefault(id(request), request.num_processed)

    def allocate(self, request: Request, num_blocks: int) -> None:
        request.num_blocks += num_blocks
        self.num_free_blocks -= num_blocks
        for _ in range(num_blocks):
            block = self.free_blocks.popleft()
            assert block.num_holders == 0
            if block.content is not None:
                self.cached[block.content].remove(block)
                block.content = None
            block.num_holders = 1
            self.blocks_of[id(request)].append(block)

    def cache(self, request: Request, num_tokens: int) -> None:
        num_full = num_tokens // self.block_size
        for index in range(self.num_cached[id(request)], num_full):
            block = self.blocks_of[id(request)][index]
            block.content = tuple(request.tokens[: (index + 1) * self.block_size])
            self.cached.setdefault(block.content, []).append(block)
        self.num_cached[id(request)] = max(num_full, self.num_cached[id(request)])

    def free(self, request: Request) -> None:
        for block in reversed(self.blocks_of.pop(id(request))):
            block.num_holders -= 1
            if block.num_holders == 0:
                self.num_free_blocks += 1
                if block.content is None:
                    self.free_blocks.appendleft(block)
                else:
                    self.free_blocks.append(block)
        request.num_blocks = 0
        assert self.num_free_blocks == len(self.free_blocks)


def simulate(
    requests: list[Request],
    cost: tuple[float, ...],
    num_replicas: int,
    num_blocks: int,
    block_size: int,
    watermark: float,
    num_stages: int,
    **scheduler: int,
) -> tuple[Result, list[CachingReplica]]:
    """Requests with their tokens and later turns, round-robin on vllm-v1 replicas that cache prefixes."""
    watermark_blocks = int(watermark * (num_blocks + 1))
    replicas = [
        CachingReplica(k, num_blocks, block_size, watermark_blocks, num_stages) for k in range(num_replicas)
    ]
    later = {id(request.next_turn) for request in requests}
    first = [request for request in requests if id(request) not in later]
    simulation = Simulation(
        first, replicas, VllmV1Scheduler(**scheduler), round_robin(replicas), LinearCost(*cost), True
    )
    simulation.run()
    result = Result(
        [request.replica_id for request in requests],
        [request.scheduled_at for request in requests],
        [request.first_token_at for request in requests],
        [request.completed_at for request in requests],
        [request.num_restarts for request in requests],
        simulation.num_batches,
        simulation.batches,
    )
    return result, replicas
