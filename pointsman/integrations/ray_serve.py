"""Any of our policies as a request router of Ray Serve.

    @serve.deployment(
        num_replicas=4,
        request_router_config=RequestRouterConfig(
            request_router_class="pointsman.integrations.ray_serve:PointsmanRequestRouter",
            request_router_kwargs={"policy": "default"},
            request_routing_stats_period_s=1.0,
        ),
    )

Ray Serve tells a request router which replica took a request and when its answer was complete; it does not
show tokens, so every request is booked as one that does not stream, and how fast a replica is cannot be
learnt from the traffic. Replicas can say it, and how busy they are, by `record_routing_stats`: `running`,
`waiting` and `kv_use` are taken as a router takes a server's gauges, and the figures of
`routing.calibration.FIGURES` as what is known of the replica.

A request that the policy holds is asked about again after Ray Serve's backoff (`initial_backoff_s` to
`max_backoff_s` of the configuration). A decision is booked at once, before Ray Serve has sent the request:
many are decided at the same time, and each has to know of the others.

Written against Ray 2.60.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ray.serve.request_router import (
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from pointsman.routing.calibration import FIGURES
from pointsman.routing.core import Core, Request
from pointsman.routing.policy import HoldSpec

CHARACTERS_A_TOKEN = 4  # of English text; the core corrects it where servers say better
GAUGES = ("running", "waiting", "kv_use")


@dataclass
class RoutedRequest:
    """A request between its first decision and its end."""

    asked: Request
    pending: PendingRequest
    ticket: int | None = None
    is_accepted: bool = False


@dataclass
class _Books:
    core: Core
    placed: dict[str, RoutedRequest] = field(default_factory=dict)  # by internal request id
    stats: dict[str, Mapping[str, Any]] = field(default_factory=dict)  # by replica, as last seen
    figures: dict[str, dict[str, float]] = field(default_factory=dict)  # by replica, as the core knows them
    lock: threading.Lock = field(default_factory=threading.Lock)  # ends are told by another thread


class PointsmanRequestRouter(RequestRouter):
    def initialize_state(
        self,
        policy: str = "default",
        max_hold_s: float = HoldSpec().max_hold_s,
        figures: Mapping[str, float] | None = None,
    ) -> None:
        """The `request_router_kwargs`. `figures`: what is known of every replica's speed and memory."""
        self._figures = dict(figures or {})
        self._state = _Books(Core(policy, max_hold_s=max_hold_s))

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is None or not candidate_replicas:
            return [candidate_replicas]
        by_name = {_name(replica.replica_id): replica for replica in candidate_replicas}
        has_room = {
            _name(replica.replica_id) for replica in self.select_available_replicas(candidate_replicas)
        }
        state = self._state
        with state.lock:
            self._follow(by_name)
            self._forget_cancelled()
            placed = self._placed(pending_request)
            if placed.ticket is not None:  # the replica it was meant for did not take it
                state.core.failed(placed.ticket)
                placed.ticket = None
            full = [name for name in by_name if name not in has_room]
            name = state.core.decide(placed.asked, max(1, self.num_pending_requests), full)
            if name is None:
                pending_request.routing_context.should_backoff = True
                return []
            placed.ticket = state.core.sent(placed.asked, name, streams=False)
        return [[by_name[name]]]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        with self._state.lock:
            placed = self._state.placed.get(pending_request.metadata.internal_request_id)
            if placed is not None:
                placed.is_accepted = True

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Its answer is complete; or the replica refused it, and it is chosen for again."""
        state = self._state
        with state.lock:
            placed = state.placed.get(internal_request_id)
            if placed is None or placed.ticket is None:
                return
            if placed.is_accepted:
                state.core.finished(placed.ticket)
                del state.placed[internal_request_id]
            else:
                state.core.failed(placed.ticket)
                placed.ticket = None

    def _follow(self, by_name: Mapping[str, RunningReplica]) -> None:
        """Replicas come and go, and say how busy they are."""
        state = self._state
        for name in state.core.replicas:
            if name not in by_name:
                state.core.remove(name)
                state.stats.pop(name, None)
                state.figures.pop(name, None)
        for name, replica in by_name.items():
            stats = replica.routing_stats or {}
            figures = {**self._figures, **{figure: stats[figure] for figure in FIGURES if figure in stats}}
            is_new = name not in state.core.replicas
            if not is_new and figures != state.figures[name] and state.core.signals(name)["outstanding"] == 0:
                state.core.remove(name)  # it has said by now how fast it is
                is_new = True
            if is_new:
                state.core.add(name, figures)
                state.figures[name] = figures
            if stats != state.stats.get(name) and any(gauge in stats for gauge in GAUGES):
                state.stats[name] = stats
                state.core.scraped(name, *(stats.get(gauge) for gauge in GAUGES))

    def _placed(self, pending: PendingRequest) -> RoutedRequest:
        request_id = pending.metadata.internal_request_id
        if request_id not in self._state.placed:
            length = len(prompt_text((*pending.args, *pending.kwargs.values()))) // CHARACTERS_A_TOKEN
            asked = Request(self._state.core.prompt_length(max(1, length)))
            self._state.placed[request_id] = RoutedRequest(asked, pending)
        return self._state.placed[request_id]

    def _forget_cancelled(self) -> None:
        """Clients that gave up before their request was sent: nobody says that it has ended."""
        state = self._state
        gone = [
            request_id
            for request_id, placed in state.placed.items()
            if not placed.is_accepted and placed.pending.future.cancelled()
        ]
        for request_id in gone:
            ticket = state.placed.pop(request_id).ticket
            if ticket is not None:
                state.core.failed(ticket)


def prompt_text(arguments: Iterable[Any]) -> str:
    """The prompt of a request as Ray Serve's LLM deployments get it, of a plain mapping, or of text."""
    for argument in arguments:
        if isinstance(argument, str):
            return argument
        get = (
            argument.get
            if isinstance(argument, Mapping)
            else lambda name, of=argument: getattr(of, name, None)
        )
        found = get("prompt") or get("messages")
        if found:
            return _text(found)
    return ""


def _text(value: Any) -> str:
    """Text of a prompt, or of messages whose content may have several parts."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return _text(value.get("text") or value.get("content") or "")
    if isinstance(value, Iterable):
        return "".join(_text(item) for item in value)
    return _text(getattr(value, "content", ""))


def _name(replica_id: ReplicaID) -> str:
    return str(replica_id.unique_id)
