"""A second copy of a request that has no answer yet, on another replica: the first good answer counts.

one copy ──silence──► two copies ──the second answers well, or the first fails──► the second alone
                          └───────the first answers well, or the second fails──► the first alone
"""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import TYPE_CHECKING

from pointsman.router.http.messages import RETRIED_STATUSES, AnswerHead, Headers
from pointsman.router.http.upstream import OUT_OF_FILES, Receiver, UpstreamConnection
from pointsman.router.replicas.registry import Replica

if TYPE_CHECKING:
    from pointsman.router.requests.exchange import Exchange
    from pointsman.router.requests.proxy import Proxy

WON, LOST = "won", "lost"


class Hedge(Receiver):
    """Receives the second answer until its head has come; a good one then belongs to the exchange."""

    def __init__(self, proxy: Proxy, exchange: Exchange, replica: Replica, ticket: int, now: float) -> None:
        self._proxy = proxy
        self._exchange = exchange
        self.replica = replica
        self.ticket = ticket  # in the books
        self.sent_at = now
        self.connection: UpstreamConnection | None = None
        self._dialling: asyncio.Task[None] | None = None
        if replica.pool.idle:
            self.on_connected(replica.pool.idle.pop())
        else:
            self._dialling = replica.pool.dial(self)

    def on_connected(self, connection: UpstreamConnection) -> None:
        self._dialling = None
        self.connection = connection
        connection.send(self, self._exchange.message(self.replica))

    def on_head(self, status: int, reason: bytes, headers: Headers, length: int | None) -> None:
        assert self.connection is not None
        if status in RETRIED_STATUSES:
            self._exchange.blame(self.replica, self.ticket, status, monotonic())
            self.cancel()
        else:
            self._exchange.take_over(self)
            self.connection.hand_over(self._exchange)
            self._exchange.on_head(status, reason, headers, length)

    def on_whole(self, head: AnswerHead, data: bytes) -> None:
        self.connection = None  # it is back in its pool
        self._exchange.take_over(self)
        self._exchange.on_whole(head, data)

    def on_failure(self, reason: str, *, is_stale: bool) -> None:
        if not is_stale and reason != OUT_OF_FILES:
            self._proxy.registry.failed(self.replica, monotonic(), self.ticket)
        self.connection = self._dialling = None
        self.cancel()

    def stop_dialling(self) -> None:
        if self._dialling is not None:
            self._dialling.cancel()

    def cancel(self) -> None:
        """The other answer came first, or nobody wants one any more."""
        self.stop_dialling()
        if self.connection is not None:
            self.connection.abort()
        self._exchange.hedge = None
        self._proxy.books.failed(self.ticket, monotonic())
        self._proxy.registry.released(self.replica, self.ticket, has_succeeded=False)
        self._proxy.metrics.hedges[LOST] += 1
        self._proxy.dispatcher.wake()

    # Before the head nothing else can come.

    def on_body(self, data: bytes) -> None: ...

    def on_read(self) -> None: ...

    def on_complete(self) -> None: ...
