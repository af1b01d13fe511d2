"""The other routers, as far as they have told: what they have outstanding, and who waits there.

By our clock alone: a router that has not been heard of for `STALE_S` is gone, and what it had outstanding
with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pointsman.router.requests.holding import Waiting
from pointsman.router.store.messages import Message, from_wire
from pointsman.routing.sharing import Book, combined
from pointsman.routing.signals import NUM_SIGNALS

STALE_S = 0.75  # routers speak every `link.WHOLE_S` at least


@dataclass
class Peer:
    heard_at: float
    columns: dict[int, NDArray[np.float64]] = field(default_factory=dict)  # by key of the replica
    num_held: int = 0
    fronts: list[tuple[int, float, str | None]] = field(default_factory=list)  # priority, arrival, model


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
        peer.fronts = [(front.priority, now - front.age_s, front.model) for front in message.fronts]
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

    def has_older(self, request: Waiting) -> bool:
        """Whether a request that is no less urgent waits longer at another router, for the same replicas."""
        ours = request.priority, request.arrived_at
        return any(
            (priority, arrived_at) < ours and self._share_a_line(model, request.model)
            for peer in self._peers.values()
            for priority, arrived_at, model in peer.fronts
        )

    def _count(self) -> None:
        self.num_held = sum(peer.num_held for peer in self._peers.values())
