"""One request on its way: to a replica, to another one if that fails, and its answer back to the client.

Until the first byte of an answer has gone to the client, a failure is repaired by sending the request to a
replica that has not had it yet. After that the connection is cut, which is how HTTP says "incomplete".
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from time import monotonic
from typing import TYPE_CHECKING

from pointsman.router.http.downstream import ClientConnection
from pointsman.router.http.messages import (
    EVENT_STREAM,
    LOAD_REPORT,
    RETRIED_STATUSES,
    Answer,
    AnswerHead,
    Headers,
    HttpRequest,
    passed_to_client,
    refusal,
)
from pointsman.router.http.upstream import OUT_OF_FILES, UpstreamConnection
from pointsman.router.replicas.breaker import CLOSED
from pointsman.router.replicas.registry import Replica
from pointsman.router.replicas.reports import read_load
from pointsman.router.requests.booked import EVENT_END, BookedRequest
from pointsman.router.requests.facts import RequestFacts
from pointsman.router.requests.hedging import WON, Hedge
from pointsman.router.telemetry.metrics import NO_POLICY, NO_REPLICA
from pointsman.routing.records import NEVER

if TYPE_CHECKING:
    from pointsman.router.requests.proxy import Proxy

_SERVER_ERROR = 500
_OBJECT_END = b"}\n\n"
_WITH_LENGTH = (b"POST", b"PUT", b"PATCH")  # even if there is no body


class Exchange(BookedRequest):
    """A job of a client connection, a receiver of an upstream connection, and what the dispatcher places."""

    __slots__ = (
        "_client",
        "_connection",
        "_dialling",
        "_doubted",
        "_has_head",
        "_id_line",
        "_is_paused",
        "_is_sse",
        "_moved_at",
        "_own_lines",
        "_was_hedged",
        "_write_raw",
        "hedge",
        "hold_until",
        "size",
        "tried",
    )

    def __init__(
        self,
        proxy: Proxy,
        client: ClientConnection,
        request: HttpRequest,
        facts: RequestFacts,
    ) -> None:
        self._proxy = proxy
        self._client = client
        self.request = request
        self.request_id = proxy.id_of(request.head.wish)
        self._id_line = self._own_lines = f"x-request-id: {self.request_id}\r\n".encode()
        self._take(facts)
        self.tried: Collection[int] = ()
        self.hold_until = NEVER
        self.size = 0
        self.num_retries = 0
        self.arrived_at = self._moved_at = monotonic()
        # Where it went.
        self.held_s = -1.0
        self.replica_name = NO_REPLICA
        self.decided_by = NO_POLICY
        self._replica: Replica | None = None
        self._ticket = 0
        self._dialling: asyncio.Task[None] | None = None
        self._connection: UpstreamConnection | None = None
        self.hedge: Hedge | None = None
        self._was_hedged = False
        self._doubted: tuple[Replica, ...] = ()  # that have answered 500
        self._is_paused = False
        # The answer.
        self.first_byte_at: float | None = None
        self.cached_tokens: int | None = None  # of the prompt, if the server told
        self._status = 0
        self._has_head = False
        self._is_sse = False
        self._write_raw: Callable[[bytes], None] | None = None
        self._num_tokens = 0
        self._last = self._last_but_one = b""

    # --- what the dispatcher says ---

    def send(self, replica: Replica) -> None:
        proxy = self._proxy
        self._moved_at = now = monotonic()
        self.decided_by = proxy.decisions.decided_by
        if self.request.head.wish.is_explained:
            sentence = proxy.decisions.sentence().encode("ascii", "replace")
            self._own_lines = b"%bx-pointsman-decision: %b\r\n" % (self._id_line, sentence)
        self._book(replica, now)
        if replica.pool.idle:
            self.on_connected(replica.pool.idle.pop())
        else:
            self._dialling = replica.pool.dial(self)

    def refuse(self, answer: Answer) -> None:
        """No replica will get this request."""
        self._ended(answer.status, "refused", monotonic())
        self._answer(answer)

    # --- what the upstream connection says ---

    def on_connected(self, connection: UpstreamConnection) -> None:
        self._dialling = None
        self._connection = connection
        assert self._replica is not None
        is_for_head = self.request.head.method == b"HEAD"
        connection.send(self, self.message(self._replica), is_for_head=is_for_head)

    def message(self, replica: Replica) -> bytes:
        """The request as this replica gets it."""
        body, head = self.request.body, self.request.head
        length = b"content-length: %d\r\n" % len(body) if body or head.method in _WITH_LENGTH else b""
        parts = (
            head.method,
            replica.before_target,
            head.target,
            replica.after_target,
            head.wish.passed_on,
            length,
            self._id_line,
            b"\r\n",
            body,
        )
        return b"".join(parts)

    def on_head(self, status: int, reason: bytes, headers: Headers, length: int | None) -> None:
        replica = self._replica
        assert replica is not None
        self._moved_at = now = monotonic()
        self._status = status
        if status in RETRIED_STATUSES:
            self.blame(replica, self._ticket, status, now)
            if self.hedge is not None:
                self._go_on_with(self.hedge)
                return
            if self._can_retry():
                assert self._connection is not None
                self._connection.abort()
                self._retry(f"status {status}")
                return
        else:
            if self.hedge is not None:
                self.hedge.cancel()
            if self._doubted:
                self._others_are_to_blame(now)
            if not replica.breaker.is_calm:
                self._proxy.registry.answered(replica, self._ticket)
        self._has_head = True
        for name, value in headers:
            if name == b"content-type":
                self._is_sse = value.startswith(EVENT_STREAM)
            elif name == LOAD_REPORT:
                replica.has_gauges = True
                self._proxy.books.scraped(replica.slot, None, *read_load(value), now)
        lines = passed_to_client(headers)
        lines.append(self._own_lines)
        self._client.begin(status, reason, b"".join(lines), length)
        self._write_raw = self._client.write_raw

    def on_body(self, data: bytes) -> None:
        self._client.write(data)
        self._moved_at = now = monotonic()
        self._last_but_one, self._last = self._last, data
        if self._is_sse:
            self._count(data, now)

    def on_chunk(self, raw: bytes, data: bytes) -> None:
        write_raw = self._write_raw
        if write_raw is not None:
            write_raw(raw)
        else:
            self._client.write(data)
            self._client.flush()
        self._moved_at = now = monotonic()
        self._last_but_one = self._last
        self._last = data
        if self._num_tokens > 0 and data[-3:] == _OBJECT_END and data.count(EVENT_END) == 1:
            self._num_tokens += 1  # one event, as nearly all chunks are: what `_count` would do
            self._proxy.books.tokens(self._ticket, 1, now)
        elif self._is_sse:
            self._count(data, now)

    def on_read(self) -> None:
        self._client.flush()

    def on_complete(self) -> None:
        self._connection = None
        self._completed(self._tail())
        self._client.end()

    def on_whole(self, head: AnswerHead, data: bytes) -> None:
        self._status = head.status
        if self.hedge is not None:
            self.hedge.cancel()
        self._connection = None
        if self._doubted:
            self._others_are_to_blame(monotonic())
        self._completed(data[-8192:])
        self._client.pass_on(head, self._own_lines, data)

    def on_failure(self, reason: str, *, is_stale: bool) -> None:
        replica = self._replica
        assert replica is not None
        now = monotonic()
        self._dialling = self._connection = None
        if reason == OUT_OF_FILES:
            self._proxy.is_out_of_files(now)
        elif not is_stale:
            self._proxy.registry.failed(replica, now, self._ticket)
        if self.hedge is not None:
            self._go_on_with(self.hedge)
        elif self._has_head:
            self._let_go(now)
            self._ended(self._status, "cut", now)
            self._client.abort()
        elif self._can_retry():
            self._retry("stale connection" if is_stale else "failed")
        elif is_stale:  # nobody else is there, and this replica has done nothing wrong
            self._proxy.metrics.retries["stale connection"] += 1
            self._dialling = replica.pool.dial(self)
        else:
            self._let_go(now)
            answer = self._refusal(reason)
            self._ended(answer.status, "failed", now)
            self._answer(answer)

    # --- what the client connection says ---

    def cancel(self) -> None:
        proxy = self._proxy
        proxy.metrics.cancelled += 1
        if self._replica is None:
            proxy.dispatcher.withdraw(self)
        else:
            self._stop()
            self._let_go(monotonic())
        self._ended(self._status or 499, "cancelled", monotonic())

    def pause(self) -> None:
        self._is_paused = True
        if self._connection is not None:
            self._connection.pause()

    def resume(self) -> None:
        self._is_paused = False
        self._moved_at = monotonic()
        if self._connection is not None:
            self._connection.resume()

    def check(self, now: float) -> None:
        """Called a few times a second."""
        if self._connection is None or self._is_paused:
            return
        settings, waited_s = self._proxy.settings, now - self._moved_at
        limits, hedge_after_s = settings.limits, settings.reliability.hedge_after_s
        if waited_s > (limits.idle_timeout_s if self._has_head else limits.first_byte_timeout_s):
            self._abort()
            self.on_failure(self._proxy.TOO_LATE, is_stale=False)
        elif hedge_after_s is not None and waited_s > hedge_after_s:
            self._send_to_another(now)

    def give_up(self) -> None:
        """The router stops before the answer has come."""
        if self._replica is None:
            self._proxy.dispatcher.withdraw(self)
        else:
            self._stop()
            self._let_go(monotonic())
        self._ended(self._status or 503, "given up", monotonic())
        if self._has_head:
            self._client.abort()
        else:
            self._answer(refusal(503, "the router is shutting down", "service_unavailable", closes=True))

    # --- within ---

    def blame(self, replica: Replica, ticket: int, status: int, now: float) -> None:
        """Count a refusal against the replica.

        A 500 may be the fault of the request: some requests get it everywhere, and must not take one replica
        after the other out of service. It counts once another replica has answered the request well; or at
        once, where no other is asked although there is one, and of a replica that is tried out.
        """
        registry = self._proxy.registry
        is_clear = status != _SERVER_ERROR or replica.breaker.state != CLOSED
        others = registry.has_candidate(self.model, (replica.slot,))
        is_last_word = self.hedge is None and not self._doubted and not self._can_retry()
        if is_clear or (others and is_last_word):
            registry.failed(replica, now, ticket)
        else:
            self._doubted = (*self._doubted, replica)

    def _others_are_to_blame(self, now: float) -> None:
        """Somebody answers it well."""
        for replica in self._doubted:
            self._proxy.registry.failed(replica, now)
        self._doubted = ()

    def _answer(self, answer: Answer) -> None:
        self._client.answer(answer.with_header(b"x-request-id", self.request_id.encode()))

    def _refusal(self, reason: str) -> Answer:
        if reason == OUT_OF_FILES:
            return refusal(503, reason, "service_unavailable", retry_after_s=1)
        code = 504 if reason == self._proxy.TOO_LATE else 502
        return refusal(code, f"replica failed: {reason}", "bad_gateway", code="replica_failed")

    def _can_retry(self) -> bool:
        assert self._replica is not None
        proxy = self._proxy
        if self.num_retries >= proxy.settings.reliability.max_retries:
            return False
        tried = (*self.tried, self._replica.slot)
        return proxy.registry.has_candidate(self.model, tried)

    def _retry(self, reason: str) -> None:
        replica = self._replica
        assert replica is not None
        self._let_go(monotonic())
        self._connection = None
        self._status, self._has_head = 0, False
        self.num_retries += 1
        self.tried = (*self.tried, replica.slot)
        self._proxy.metrics.retries[reason] += 1
        self._proxy.dispatcher.resubmit(self)

    def _send_to_another(self, now: float) -> None:
        """A second copy, if this is a stream without its first token, and there is another replica."""
        if self._has_head or self._was_hedged or not self._streams or self._replica is None:
            return
        registry, books = self._proxy.registry, self._proxy.books
        excluded = registry.excluded(self.model, (*self.tried, self._replica.slot), now)
        replica = registry.least_outstanding(excluded)
        if replica is None:
            return
        self._was_hedged = True
        self.tried = (*self.tried, replica.slot)
        ticket = books.sent(replica.slot, self.prompt_tokens, now, self._streams, self.links)
        registry.booked(replica, ticket, now)
        self.hedge = Hedge(self._proxy, self, replica, ticket, now)

    def take_over(self, hedge: Hedge) -> None:
        """The second copy is the one that counts."""
        self.hedge = None
        self._stop()
        self._let_go(monotonic())
        self._proxy.metrics.hedges[WON] += 1
        self._replica, self.replica_name, self._ticket = hedge.replica, hedge.replica.name, hedge.ticket
        self._connection = hedge.connection
        if self._is_paused and self._connection is not None:
            self._connection.pause()

    def _go_on_with(self, hedge: Hedge) -> None:
        """The first copy has failed before the second one did: wait for that, and no longer than for any."""
        assert self._replica is not None
        self.tried = (*self.tried, self._replica.slot)
        self.take_over(hedge)
        self.num_retries += 1
        self._was_hedged = self.num_retries >= self._proxy.settings.reliability.max_retries
        self._status, self._moved_at = 0, hedge.sent_at
        if hedge.connection is not None:
            hedge.connection.hand_over(self)
        else:
            hedge.stop_dialling()
            self._dialling = hedge.replica.pool.dial(self)

    def _stop(self) -> None:
        if self.hedge is not None:
            self.hedge.cancel()
        self._abort()

    def _abort(self) -> None:
        if self._dialling is not None:
            self._dialling.cancel()
            self._dialling = None
        if self._connection is not None:
            self._connection.abort()
            self._connection = None
