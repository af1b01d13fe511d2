"""One request that Envoy carries: it asks, we answer where to, and it tells how that went.

    asked ──whole request──► waiting ──replica──► sent ──head of the answer──► answered ──its end──► over
      │                         │                                                                     ▲
      └──────────refused────────┴──────────────── the stream ends ────────────────────────────────────┘

Which parts of a request Envoy sends, and how, is for its configuration to say (`processing_mode`); every mode
of bodies works. Without the body of a request its length is all that is known of it; without that of the
answer nobody sees tokens, and the end of the stream is the end of the answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator
from time import monotonic
from typing import Any

from pointsman.router.epp.answers import CONTINUE, NAMESPACE, destination, refused, streamed
from pointsman.router.epp.endpoints import Endpoints
from pointsman.router.epp.wire import BUFFERED, BUFFERED_PARTIAL, FULL_DUPLEX_STREAMED, NONE, STREAMED
from pointsman.router.http.framing import BODY_TOO_LARGE
from pointsman.router.http.messages import (
    EVENT_STREAM,
    LOAD_REPORT,
    RETRIED_STATUSES,
    Answer,
    HttpRequest,
    RequestHead,
    refusal,
)
from pointsman.router.replicas.registry import Replica
from pointsman.router.replicas.reports import read_load
from pointsman.router.requests.booked import BookedRequest
from pointsman.router.requests.facts import NORMAL, RequestFacts, read_facts, read_wish, unread_facts
from pointsman.router.server import Router
from pointsman.router.telemetry.metrics import NO_POLICY, NO_REPLICA
from pointsman.routing.records import NEVER, NOBODY, UNKNOWN

SERVED = "x-gateway-destination-endpoint-served"
SUBSET_NAMESPACE, SUBSET = "envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset"
_WHOLE = (BUFFERED, BUFFERED_PARTIAL)
_PIECEWISE = (STREAMED, FULL_DUPLEX_STREAMED)
ASKED, WAITING, SENT, ANSWERED, OVER = range(5)


class Pick(BookedRequest):
    """What the dispatcher places and the proxy counts, in place of an exchange of the router's own."""

    # What is known of the request, once it is whole.
    model: str | None = None
    priority = NORMAL
    prompt_tokens = 1
    max_tokens = UNKNOWN
    session = NOBODY
    session_name: str | None = None
    generates = False
    hold_until = NEVER
    size = 0
    tried: Collection[int] = ()
    request_id = ""
    links = b""
    cached_tokens: int | None = None
    # How it goes.
    num_retries = 0
    held_s = -1.0
    replica_name = NO_REPLICA
    decided_by = NO_POLICY
    first_byte_at: float | None = None

    def __init__(self, router: Router, endpoints: Endpoints) -> None:
        self._router = router
        self._proxy = router.proxy
        self._endpoints = endpoints
        self.arrived_at = monotonic()
        self.state = ASKED
        self.decided: asyncio.Future[None] | None = None  # while it waits
        self._request_mode = self._response_mode = FULL_DUPLEX_STREAMED  # the protocol's, if Envoy is silent
        self.request = HttpRequest(RequestHead(b"", b"", [], False, True))  # until its headers are there
        self._body: bytearray | None = None  # what has come of it
        self._outside: frozenset[int] = frozenset()
        self._has_trailers = False
        self._refusal: Answer | None = None
        self._replica: Replica | None = None
        self._listed: list[str] = []
        self._ticket = 0
        self._streams = False
        self._status = 0
        self._is_sse = False
        self._num_tokens = 0
        self._last = self._last_but_one = b""

    # --- what Envoy says ---

    def hear(self, message: Any) -> Iterator[bytes]:
        """-> the answers to a message of Envoy, without the verdict on a request that waits (`decided`)."""
        is_silent = message.observability_mode
        if self.state == ASKED and message.HasField("protocol_config"):
            self._request_mode = message.protocol_config.request_body_mode
            self._response_mode = message.protocol_config.response_body_mode
        if message.HasField("response_body"):
            answers = self._on_response_body(message.response_body)
        elif message.HasField("request_headers"):
            answers = self._on_request_headers(message)
        elif message.HasField("request_body"):
            answers = self._on_request_body(message.request_body)
        elif message.HasField("response_headers"):
            answers = self._on_response_headers(message)
        elif message.HasField("response_trailers"):
            answers = self._on_response_trailers()
        else:
            answers = self._on_request_trailers()
        for answer in answers:
            if not is_silent:
                yield answer

    def _on_request_headers(self, message: Any) -> Iterator[bytes]:
        headers = _headers(message.request_headers)
        special = dict(headers)
        method, path = special.get(b":method", b""), special.get(b":path", b"")
        self.request = HttpRequest(RequestHead(method, path, headers, False, True))
        hint = _metadata(message, SUBSET_NAMESPACE, SUBSET)
        if hint is not None:
            self._outside = self._endpoints.outside([one.string_value for one in hint.list_value.values])
        if message.request_headers.end_of_stream or self._request_mode in (NONE, STREAMED):
            self._decide()
            yield from self.verdict()
        elif self._request_mode in _WHOLE:
            yield CONTINUE["request_headers"]

    def _on_request_body(self, part: Any) -> Iterator[bytes]:
        if self._request_mode == STREAMED:
            yield CONTINUE["request_body"]
            return
        if self._body is None:
            self._body = bytearray()
        self._body += part.body
        if part.end_of_stream or self._request_mode in _WHOLE or self._is_too_large():
            self._decide()
            yield from self.verdict()

    def _on_request_trailers(self) -> Iterator[bytes]:
        self._has_trailers = True
        if self.state == ASKED and self._request_mode == FULL_DUPLEX_STREAMED:
            self._decide()
            yield from self.verdict()
        else:
            yield CONTINUE["request_trailers"]

    def verdict(self) -> Iterator[bytes]:
        """-> the answers that say where the request goes, or why it is refused; none while it waits."""
        if self._refusal is not None:
            yield refused(self._refusal)
            return
        if self.state == WAITING:
            return
        endpoints, body = ",".join(self._listed), self._body
        self._body = None  # it is needed no more
        if body is None:
            yield destination("request_headers", endpoints)
        elif self._request_mode != FULL_DUPLEX_STREAMED:
            yield destination("request_body", endpoints)
        else:
            yield destination("request_headers", endpoints)
            yield from streamed("request_body", bytes(body), not self._has_trailers)
        if self._has_trailers:
            yield CONTINUE["request_trailers"]

    def _on_response_headers(self, message: Any) -> Iterator[bytes]:
        now = monotonic()
        served = _metadata(message, NAMESPACE, SERVED)
        if served is not None and self.state == SENT:
            self._was_served_by(served.string_value, now)
        for name, value in _headers(message.response_headers):
            if name == b":status":
                self._status = int(value)
            elif name == b"content-type":
                self._is_sse = value.startswith(EVENT_STREAM)
            elif name == LOAD_REPORT and self._replica is not None:
                self._replica.has_gauges = True
                self._proxy.books.scraped(self._replica.slot, None, *read_load(value), now)
        if self.state == SENT:
            self.state = ANSWERED
        if self._replica is not None:
            if self._status in RETRIED_STATUSES:
                self._failed(self._replica, now)
            else:
                self._router.registry.answered(self._replica, self._ticket)
        if message.response_headers.end_of_stream:
            self._at_its_end()
        yield CONTINUE["response_headers"]

    def _on_response_body(self, part: Any) -> Iterator[bytes]:
        data, is_end = part.body, part.end_of_stream
        if data:
            self._last_but_one, self._last = self._last, data
            if self._is_sse and self._streams:
                self._count(data, monotonic())
        if is_end:
            self._at_its_end()
        if self._response_mode == FULL_DUPLEX_STREAMED:
            yield from streamed("response_body", data, is_end)
        else:
            yield CONTINUE["response_body"]

    def _on_response_trailers(self) -> Iterator[bytes]:
        self._at_its_end()
        yield CONTINUE["response_trailers"]

    def hung_up(self) -> None:
        """Nothing more comes: the client is gone, or Envoy has no more to tell."""
        now = monotonic()
        if self.state == WAITING:
            self._router.dispatcher.withdraw(self)
        elif self.state == ANSWERED and self._response_mode == NONE:
            self._at_its_end()
        elif self.state == ANSWERED and self._replica and self._endpoints.broke_off(self._replica):
            self._failed(self._replica, now)
        if self.state in (WAITING, SENT, ANSWERED):
            self._proxy.metrics.cancelled += 1
            self._close(self._status or 499, "cancelled")

    # --- what the dispatcher says ---

    def send(self, replica: Replica) -> None:
        self.state = SENT
        self.decided_by = self._proxy.decisions.decided_by
        self._book(replica, monotonic())
        count = self._router.settings.reliability.max_retries
        self._listed = self._endpoints.listed(replica, self.model, self._outside, count).split(",")
        self._settle()

    def refuse(self, answer: Answer) -> None:
        self._refusal = answer
        self._close(answer.status, "refused")
        self._settle()

    # --- what the clock of the router says ---

    def check(self, now: float) -> None:
        """Do nothing: timeouts are Envoy's business."""

    def give_up(self) -> None:
        """The router stops, and this request ends with it."""
        if self.state == WAITING:
            self._router.dispatcher.withdraw(self)
            self.refuse(refusal(503, "the router is shutting down", "service_unavailable"))
        else:
            self._close(self._status or 503, "given up")

    # --- within ---

    def _decide(self) -> None:
        head = self.request.head
        wish = head.wish = read_wish(head, b"")
        self.state = WAITING
        self.request_id = self._proxy.id_of(wish)
        facts: RequestFacts | Answer
        if self._is_too_large():
            facts = BODY_TOO_LARGE
        elif self._body is not None:
            facts = read_facts(wish, bytes(self._body))
        else:
            length = head.special.get(b"content-length", b"0")
            facts = unread_facts(wish, int(length) if length.isdigit() else 0)
        self._proxy.active.add(self)
        if isinstance(facts, Answer):
            self.refuse(facts)
            return
        self._take(facts)
        self._streams &= self._response_mode in _PIECEWISE  # tokens are seen only in pieces of the answer
        self.tried = self._outside
        self._router.dispatcher.submit(self)
        if self.state == WAITING:
            self.decided = asyncio.get_running_loop().create_future()

    def _is_too_large(self) -> bool:
        return len(self._body or b"") > self._proxy.settings.limits.max_body_bytes

    def _settle(self) -> None:
        if self.decided is not None and not self.decided.done():
            self.decided.set_result(None)

    def _was_served_by(self, endpoint: str, now: float) -> None:
        """Envoy went down the list: those before this one did not answer."""
        if endpoint not in self._listed or endpoint == self._listed[0]:
            return
        for failed in self._listed[: self._listed.index(endpoint)]:
            replica = self._endpoints.find(failed)
            if replica is not None:
                self._failed(replica, now)
            self.num_retries += 1
            self._proxy.metrics.retries["by the gateway"] += 1
        self._let_go(now)
        replica = self._endpoints.find(endpoint)
        if replica is not None:
            self._book(replica, now)

    def _failed(self, replica: Replica, now: float) -> None:
        ticket = self._ticket if replica is self._replica else NOBODY
        self._router.registry.failed(replica, now, ticket)
        self._router.watch.suspect(replica)

    def _at_its_end(self) -> None:
        """The whole answer has passed."""
        if self.state != ANSWERED:
            return
        self.state = OVER
        self._completed(self._tail())
        if self._replica is not None:
            self._endpoints.came_to_its_end(self._replica)
            self._replica = None

    def _close(self, status: int, outcome: str) -> None:
        """There will be no complete answer."""
        now = monotonic()
        self.state = OVER
        self._let_go(now)
        self._ended(status, outcome, now)


def _headers(part: Any) -> list[tuple[bytes, bytes]]:
    """Envoy fills `raw_value`, others may fill `value`."""
    return [
        (header.key.encode(), header.raw_value or header.value.encode()) for header in part.headers.headers
    ]


def _metadata(message: Any, namespace: str, key: str) -> Any | None:
    for entry in message.metadata_context.filter_metadata:
        if entry.key == namespace and key in entry.value.fields:
            return entry.value.fields[key]
    return None
