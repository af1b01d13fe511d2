"""The other routers, as far as they have told: what they have outstanding, and who waits there.

By our clock alone: a router that has not been heard of for `STALE_S` is gone, and what it had outstanding
with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pointsman.router.requests.holding import FirstInLine, Waiting
from pointsman.router.store.messages import Message, from_wire
from pointsman.routing.ordering import Order
from pointsman.routing.sharing import Book, combined
from pointsman.routing.signals import NUM_SIGNALS

STALE_S = 0.75  # routers speak every `link.WHOLE_S` at least


@dataclass
class Peer:
    heard_at: float
    columns: dict[int, NDArray[np.float64]] = field(default_factory=dict)  # by key of the replica
    num_held: int = 0
    fronts: list[FirstInLine] = field(default_factory=list)


class Peers:
    def __init__(self, share_a_line: Callable[[str | None, str | None], bool]) -> None:
        """`share_a_line`: whether requests for these two models wait for the same replicas."""
        self._share_a_line = share_a_line
        self._peers: dict[str, Peer] = {}
        self.num_held = 0

    def __len__(self) -> int:
        return len(self._peers)

    def heard(self, message: Message, now: float) -> bool:
        """-> whether its router is new, or leaves."""
        if message.is_leaving:
            has_left = self._peers.pop(message.router, None) is not None
            self._count()
            return has_left
        columns = from_wire(message, now)
        is_new = message.router not in self._peers
        peer = self._peers.setdefault(message.router, Peer(now))
        peer.heard_at = now
        peer.columns = columns if message.is_whole else peer.columns | columns
        peer.num_held = message.num_held
        peer.fronts = [
            FirstInLine(front.priority, now - front.age_s, front.model, front.size)
            for front in message.fronts
        ]
        self._count()
        return is_new

    def forget_silent(self, now: float) -> int:
        """-> how many were forgotten."""
        silent = [name for name, peer in self._peers.items() if now - peer.heard_at > STALE_S]
        for name in silent:
            del self._peers[name]
        self._count()
        return len(silent)

    def forget_all(self) -> None:
        self._peers.clear()
        self._count()

    def book(self, keys: NDArray[np.int64]) -> Book:
        """All that they have outstanding on these replicas."""
        books = []
        for peer in self._peers.values():
            if peer.columns:
                signals = np.array(list(peer.columns.values())).reshape(-1, NUM_SIGNALS).T
                books.append(Book(np.array(list(peer.columns), np.int64), signals))
        return combined(books, keys)

    def goes_before(self, request: Waiting, order: Order, now: float) -> bool:
        """Whether one at another router, no less urgent and for the same replicas, has its turn before."""
        turn_at = order.turn_at
        ours = request.priority, turn_at(request.arrived_at, request.size, now)
        return any(
            (front.priority, turn_at(front.arrived_at, front.size, now)) < ours
            and self._share_a_line(front.model, request.model)
            for peer in self._peers.values()
            for front in peer.fronts
        )

    def _count(self) -> None:
        self.num_held = sum(peer.num_held for peer in self._peers.values())
