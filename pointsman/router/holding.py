"""The queue at the router: who is asked about next, and who is refused when it is full.

As in the simulator, the policy decides about the request in front; those behind it wait with it. In front is
the highest priority, and within it the oldest. Held requests are decided anew when something the policy can
see has changed (a first token, an end, a scrape, a replica that comes or goes), and at least every second.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection
from time import monotonic
from typing import Protocol

from pointsman.router.config import Holding
from pointsman.router.decisions import Decisions, Placed
from pointsman.router.messages import Answer, overloaded, refusal, unavailable
from pointsman.router.metrics import Metrics
from pointsman.router.replicas import Registry, Replica

PRIORITIES = {b"high": 0, b"normal": 1, b"low": 2}
NORMAL, UNKNOWN = PRIORITIES[b"normal"], -1


class Waiting(Placed, Protocol):
    """A request that needs a replica."""

    model: str | None
    priority: int
    tried: Collection[int]

    def send(self, replica: Replica) -> None: ...

    def refuse(self, answer: Answer) -> None: ...


class Dispatcher:
    def __init__(self, registry: Registry, decisions: Decisions, settings: Holding, metrics: Metrics) -> None:
        self._registry = registry
        self._decisions = decisions
        self._settings = settings
        self._max_hold_s = settings.max_hold_s  # a field of a Spec takes long to read
        self._metrics = metrics
        self._queues: tuple[deque[Waiting], ...] = tuple(deque() for _ in PRIORITIES)
        self._is_wake_planned = False
        self._decided_at = 0.0
        self.num_held = 0
        registry.on_change.append(lambda replica, what: self.wake())

    def submit(self, request: Waiting) -> None:
        """Send it, hold it, or refuse it."""
        is_behind = self.num_held > 0 and any(self._queues[: request.priority + 1])
        if is_behind or not self._place(request, request.arrived_at):
            self._hold(request, is_first=False)

    def resubmit(self, request: Waiting) -> None:
        """A request that failed on a replica has waited already: it goes to the front."""
        if not self._place(request, monotonic()):
            self._hold(request, is_first=True)

    def withdraw(self, request: Waiting) -> None:
        queue = self._queues[request.priority]
        if request in queue:
            queue.remove(request)
            self._count(-1)

    def wake(self) -> None:
        """Something changed. Decisions are made once for all that changes at the same time."""
        if self.num_held and not self._is_wake_planned:
            self._is_wake_planned = True
            asyncio.get_running_loop().call_soon(self._decide_again)

    def tick(self, now: float) -> None:
        if not self.num_held:
            return
        for queue in self._queues:
            while queue and now - queue[0].arrived_at >= self._settings.max_hold_s:
                self._release(queue, now)
        if now - self._decided_at >= self._settings.recheck_s:
            self._decide_again()

    def _decide_again(self) -> None:
        self._is_wake_planned = False
        self._decided_at = now = monotonic()
        while (queue := next(filter(None, self._queues), None)) is not None:
            if not self._release(queue, now):
                return

    def _release(self, queue: deque[Waiting], now: float) -> bool:
        """Take the first of the queue out if it can go; whether it went."""
        request = queue.popleft()
        self._count(-1)
        if self._place(request, now):
            self._metrics.hold_s.observe(now - request.arrived_at)
            return True
        queue.appendleft(request)
        self._count(1)
        return False

    def _place(self, request: Waiting, now: float) -> bool:
        """Send or refuse the request; False: the policy holds it."""
        registry = self._registry
        excluded = registry.usually_excluded.get(request.model) if not request.tried else None
        if excluded is None:
            excluded = registry.excluded(request.model, request.tried, now)
        if not registry.accepting or (excluded and not registry.any_outside(excluded)):
            if request.model is not None and not registry.serves(request.model):
                request.refuse(
                    refusal(404, f"the model {request.model!r} does not exist", code="model_not_found")
                )
            else:
                request.refuse(unavailable("no replica is available"))
            return True
        waited_s = now - request.arrived_at
        queue_size = self.num_held + 1
        if registry.probing and (probed := registry.to_probe(excluded)) is not None:
            self._decisions.probed(request, now, queue_size, probed)
            request.send(probed)
            return True
        must_send = waited_s >= self._max_hold_s
        replica = self._decisions.decide(request, queue_size, excluded, must_send)
        if replica is None:
            return False
        request.send(replica)
        return True

    def _hold(self, request: Waiting, *, is_first: bool) -> None:
        if self.num_held >= self._settings.max_held:
            last = next(filter(None, reversed(self._queues)), None)
            if last is None or last[-1].priority <= request.priority:
                request.refuse(self._full())
                return
            evicted = last.pop()
            self._count(-1)
            evicted.refuse(self._full())
        if not self.num_held:
            self._decided_at = monotonic()
        queue = self._queues[request.priority]
        queue.appendleft(request) if is_first else queue.append(request)
        self._count(1)
        self._metrics.holds += 1

    def _full(self) -> Answer:
        return overloaded(
            "too many requests are waiting at the router", round(self._settings.max_hold_s / 2) or 1
        )

    def _count(self, change: int) -> None:
        self.num_held += change
        self._metrics.num_held = self.num_held
