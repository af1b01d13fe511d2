"""One replica of the simulator as an engine that serves requests as they come, in simulated time."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pointsman.compiled.memory import address_of
from pointsman.emulator import kernels
from pointsman.routing.records import LINK
from pointsman.simulator.cluster import Clusters
from pointsman.simulator.plan import ReplicaPlan
from pointsman.simulator.spec import ClusterSpec, VllmV1Scheduler
from pointsman.workload import Workload

CAPACITY = 16_384  # requests at once, queued and running
NO_LINKS: NDArray[Any] = np.zeros(0, LINK)


class TokenProgress(NamedTuple):
    """What the last steps brought a request."""

    request: Any  # as it was given to `admit`
    num_tokens: int  # so far
    is_finished: bool
    num_cached: int  # tokens of its prompt that were in the cache


class Gauges(NamedTuple):
    """What the server itself would report: gauges move when a step ends."""

    running: int
    waiting: int
    kv_use: float


class CacheCounts(NamedTuple):
    """Prompt tokens looked up in the prefix cache, and found there, since the engine was started."""

    queries: int
    hits: int


class Engine:
    def __init__(self, plan: ReplicaPlan) -> None:
        self.plan = plan = _with_cache(plan)
        ones = np.ones(CAPACITY, np.int32)
        nobody = Workload(np.zeros(CAPACITY), ones, ones, -ones, np.arange(CAPACITY))
        self._clusters = Clusters([ClusterSpec(replicas=1)], [[plan]], [nobody], [0])
        self._sim = self._clusters.sims[0]
        # Its own arrivals and scrapes are not wanted.
        self._sim.num_requests = self._sim.next_arrival = self._sim.heap_size = self._sim.num_live = 0
        self._sim.is_shared = 1  # prompts that come may have prefixes in common
        self._sims_at = address_of(self._clusters.sims)
        self._replica = self._clusters.replicas[0][0]
        self._hit_tokens = np.asarray(self._clusters.requests[0]["hit_tokens"])
        self._links: dict[int, NDArray[Any]] = {}  # by row
        self._free = list(range(CAPACITY - 1, -1, -1))
        # Requests in the engine; those given up stay until the engine has let go of them.
        self._requests: list[Any] = []
        self._lengths: list[int] = []
        self._rows = np.zeros(CAPACITY, np.int32)
        self._counts = np.zeros(CAPACITY, np.int32)
        self._changed = np.zeros(CAPACITY, np.int32)
        self._addresses = tuple(address_of(one) for one in (self._rows, self._counts, self._changed))
        self.next_event_at = math.inf

    @property
    def is_full(self) -> bool:
        return not self._free

    def admit(
        self,
        request: Any,
        num_prompt: int,
        num_output: int,
        now: float,
        links: NDArray[Any] = NO_LINKS,
        answer_key: int = 0,
    ) -> None:
        """Tokens that older requests got until now are reported by the next `advance`.

        `links` [n] LINK and `answer_key`: what the prompt, and prompt and answer, may share with others.
        """
        row = self._free.pop()
        self._links[row] = links
        kernels.advance_to(self._sims_at, now)
        kernels.admit(
            self._sims_at, row, num_prompt, num_output, address_of(links), len(links), answer_key, now
        )
        position = len(self._requests)
        self._requests.append(request)
        self._lengths.append(num_output)
        self._rows[position] = row
        self._counts[position] = 0
        self.next_event_at = float(kernels.advance_to(self._sims_at, now))

    def advance(self, now: float) -> list[TokenProgress]:
        """Run until now, and say who has got tokens."""
        self.next_event_at = float(kernels.advance_to(self._sims_at, now))
        num_changed = kernels.collect(self._sims_at, *self._addresses, len(self._requests))
        progress = []
        finished = []
        for position in self._changed[:num_changed].tolist():
            request, count = self._requests[position], int(self._counts[position])
            is_finished = count >= self._lengths[position]
            if is_finished:
                finished.append(position)
            if request is not None:
                num_cached = int(self._hit_tokens[self._rows[position]])
                progress.append(TokenProgress(request, count, is_finished, num_cached))
        for position in reversed(finished):
            self._let_go(position)
        return progress

    def abort(self, request: Any, now: float) -> None:
        """Nothing more is reported of the request."""
        position = self._requests.index(request)
        row = int(self._rows[position])
        kernels.advance_to(self._sims_at, now)
        is_gone = kernels.abort(self._sims_at, row)
        if is_gone:
            self._let_go(position)
        else:
            self._requests[position] = None
            self._lengths[position] = int(self._clusters.requests[0]["num_decode"][row])
        self.next_event_at = float(kernels.advance_to(self._sims_at, now))

    def _let_go(self, position: int) -> None:
        self._free.append(int(self._rows[position]))
        last = len(self._requests) - 1
        for of_requests in (self._requests, self._lengths):
            of_requests[position] = of_requests[last]
            of_requests.pop()
        self._rows[position] = self._rows[last]
        self._counts[position] = self._counts[last]

    @property
    def num_requests(self) -> int:
        return sum(request is not None for request in self._requests)

    def set_slowdown(self, factor: float) -> None:
        """From the next step on, steps take this many times as long as the plan says."""
        self._replica.slowdown = self.plan.slowdown * factor

    @property
    def gauges(self) -> Gauges:
        replica = self._replica
        return Gauges(
            int(replica.gauge_running),
            int(replica.gauge_waiting),
            float(replica.gauge_used_blocks) / int(replica.num_blocks),
        )

    @property
    def cache_counts(self) -> CacheCounts:
        return CacheCounts(int(self._replica.prompt_tokens), int(self._replica.hit_tokens))

    @property
    def num_preemptions(self) -> int:
        return int(self._sim.num_preemptions)


def _with_cache(plan: ReplicaPlan) -> ReplicaPlan:
    """vLLM caches prefixes unless it is told not to."""
    scheduler = plan.scheduler
    if isinstance(scheduler, VllmV1Scheduler) and scheduler.prefix_caching is None:
        return replace(plan, scheduler=scheduler.model_copy(update={"prefix_caching": True}))
    return plan


def load_engine() -> None:
    """Compile the engine, or load it from the cache on disk."""
    from pointsman.simulator.plan import plan_replicas

    engine = Engine(plan_replicas(ClusterSpec(replicas=1))[0])
    for request in ("finished", "given up"):
        engine.admit(request, 1, 1, 0.0)
    engine.abort("given up", 0.0)
    engine.advance(1e9)
