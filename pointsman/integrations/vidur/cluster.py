"""A run of Vidur that stops at every decision: whoever steps it says where the request goes.

    cluster = VidurCluster(arrivals, "default", VllmSchedulerConfig())
    while cluster.advance():                    # plays events until a request can be placed
        name = cluster.decide()                 # or whatever else decides, from cluster.observe()
        cluster.send(name) if name else cluster.hold()

Vidur asks a global scheduler in the middle of an event. Ours keeps the books, as that of scheduler.py, and
leaves every request in its queue, so the event ends; the request is placed between two events, and its
replica woken up as Vidur does it. Several clusters can be stepped in turn: Vidur numbers its entities in
class attributes, which each cluster puts back before it plays on.

Vidur makes options of the fields, by their types: annotations are not postponed here.
"""

import atexit
import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vidur.config.config import BaseReplicaSchedulerConfig
from vidur.entities.base_entity import BaseEntity
from vidur.events.base_event import BaseEvent
from vidur.events.batch_end_event import BatchEndEvent
from vidur.events.global_schedule_event import GlobalScheduleEvent
from vidur.events.replica_schedule_event import ReplicaScheduleEvent
from vidur.scheduler.global_scheduler.global_scheduler_registry import GlobalSchedulerRegistry

from pointsman.errors import InputError
from pointsman.integrations.vidur.running import Arrival, simulator
from pointsman.integrations.vidur.scheduler import (
    PointsmanGlobalScheduler,
    PointsmanGlobalSchedulerConfig,
    SchedulerType,
)
from pointsman.routing.core import Core, Request

ASKED_AFTER = (GlobalScheduleEvent, BatchEndEvent)  # an arrival, or room for who is held
Observed = tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.bool_]]


@dataclass
class SteppedGlobalSchedulerConfig(PointsmanGlobalSchedulerConfig):
    @staticmethod
    def get_type() -> Any:
        return SchedulerType.STEPPED


class SteppedGlobalScheduler(PointsmanGlobalScheduler):
    """Keeps the books, and places nothing by itself."""

    @property
    def core(self) -> Core:
        return self._core

    @property
    def num_queued(self) -> int:
        return len(self._request_queue)

    def _place(self, now: float, excluded: list[str]) -> list[tuple[Any, Any]]:
        return []

    def first(self) -> Request:
        """The request whose turn it is, as the router knows it."""
        request = self._request_queue[0]
        return self._asked.setdefault(
            request.id, Request(int(request.num_prefill_tokens), arrived_at=request.arrived_at)
        )

    def send_first(self, name: str, now: float) -> Any:
        """-> the number of the replica, which does not know of it yet"""
        asked, request, replica_id = self.first(), self._request_queue.pop(0), self._by_name[name]
        del self._asked[request.id]
        self._tickets[request.id] = self._core.sent(asked, name, now=now)
        self._replica_schedulers[replica_id].add_request(request)
        return replica_id


class VidurCluster:
    def __init__(
        self,
        arrivals: Sequence[Arrival],
        policy: str,
        engine: BaseReplicaSchedulerConfig,
        *,
        num_replicas: int = 4,
        num_blocks: int | None = None,
    ) -> None:
        """`policy`: who decides, or how a learned one sees the requests."""
        GlobalSchedulerRegistry.register(SchedulerType.STEPPED, SteppedGlobalScheduler)
        chosen = SteppedGlobalSchedulerConfig(policy=policy)
        simulation = simulator(arrivals, chosen, engine, num_replicas=num_replicas, num_blocks=num_blocks)
        atexit.unregister(
            simulation._write_output
        )  # the repository's Vidur would keep all of them until then
        self._simulation = simulation
        self._scheduler: SteppedGlobalScheduler = simulation.scheduler
        self._requests = [event._request for _, event in sorted(simulation._event_queue)]
        self._counters = _counters()
        self.is_holding = False  # the first in the queue
        self.now = 0.0

    def advance(self) -> bool:
        """Play on until a request can be placed; False: all are done."""
        if self._scheduler.num_queued and not self.is_holding:
            return True
        self.is_holding = False
        _set_counters(self._counters)
        events = self._simulation._event_queue
        while events:
            _, event = heapq.heappop(events)
            self.now = event._time
            try:
                made = event.handle_event(self._scheduler, self._simulation.metric_store)
            except AssertionError as error:
                problem = (
                    f"Vidur broke off ({error or 'an assertion'}); PyPI's does when it preempts a request"
                )
                raise InputError("env", "vidur", problem, "raise num_blocks, or lower rate_rps") from error
            self._simulation._add_events(made)
            if isinstance(event, ASKED_AFTER) and self._scheduler.num_queued:
                break
        self._counters = _counters()
        return self._scheduler.num_queued > 0

    @property
    def must_send(self) -> bool:
        """Nothing runs that a request could be held for."""
        return not self._simulation._event_queue

    @property
    def request(self) -> Request:
        """The one to place."""
        return self._scheduler.first()

    def observe(self) -> Observed:
        """Entities [R, F], context [C] and legal actions [R + 1], as the policy sees them."""
        return self._scheduler.core.observe(self.request, self._scheduler.num_queued, self.now)

    def decide(self) -> str | None:
        """What the policy says: a replica, or None to hold."""
        core = self._scheduler.core
        name = core.decide(self.request, self._scheduler.num_queued, now=self.now)
        return core.replicas[0] if name is None and self.must_send else name

    @property
    def replicas(self) -> tuple[str, ...]:
        """Replicas in the order of observations."""
        return self._scheduler.core.replicas

    def send(self, name: str) -> None:
        replica_id = self._scheduler.send_first(name, self.now)
        _set_counters(self._counters)
        self._simulation._add_events([ReplicaScheduleEvent(self.now, replica_id)])
        self._counters = _counters()

    def hold(self) -> None:
        """The request waits, and those behind it, until a batch ends or another one comes."""
        self.is_holding = True

    def times(self) -> NDArray[np.float64]:
        """[requests, 3] arrival, first token, end; infinite where that has not happened yet."""
        found = np.array([(r._arrived_at, r._prefill_completed_at, r._completed_at) for r in self._requests])
        found[:, 1:][found[:, 1:] == 0.0] = np.inf
        return found

    def play(self) -> NDArray[np.float64]:
        """Play to the end by the policy; -> the times."""
        while self.advance():
            name = self.decide()
            if name is None:
                self.hold()
            else:
                self.send(name)
        return self.times()


def _counted() -> tuple[Any, ...]:
    return (BaseEvent, *BaseEntity.__subclasses__())


def _counters() -> list[int]:
    return [kind._id for kind in _counted()]


def _set_counters(counters: list[int]) -> None:
    for kind, count in zip(_counted(), counters, strict=True):
        kind._id = count
