"""Requests, answers and headers: what goes over the wire, and what must not.

Header names are lower-case bytes throughout.
"""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Any, NamedTuple

import msgspec

Headers = list[tuple[bytes, bytes]]

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"
REASONS = {status.value: status.phrase.encode() for status in HTTPStatus}
JSON = b"application/json"

# RFC 9110 section 7.6.1: they belong to one connection, not to the message.
HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"http2-settings",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)


# A request that gets one of them may be tried elsewhere; 500 too: a replica whose engine has died answers it.
RETRIED_STATUSES = frozenset((500, 502, 503, 504))
LOAD_REPORT = b"endpoint-load-metrics"
EVENT_STREAM = b"text/event-stream"
_KEPT_FROM_CLIENTS = HOP_BY_HOP | {b"content-length", b"x-request-id", b"x-pointsman-decision"}


class Answer(NamedTuple):
    """A whole response made by the router itself."""

    status: int
    body: bytes = b""
    content_type: bytes = JSON
    headers: tuple[tuple[bytes, bytes], ...] = ()
    closes: bool = False  # nothing more is read from this connection

    def with_header(self, name: bytes, value: bytes) -> Answer:
        return self._replace(headers=(*self.headers, (name, value)))


class RequestHead:
    """What a request says before its body. Several requests may have the same."""

    __slots__ = ("headers", "is_http_10", "keep_alive", "method", "path", "special", "target", "wish")

    def __init__(
        self, method: bytes, target: bytes, headers: Headers, is_http_10: bool, keep_alive: bool
    ) -> None:
        self.method = method
        self.target = target
        self.path = target.partition(b"?")[0]
        self.headers = headers
        self.special = dict(headers)  # the last of each name; those that matter are checked to be single
        self.is_http_10 = is_http_10
        self.keep_alive = keep_alive
        self.wish: Any = None  # what the service made of it, for the next request with this head


class HttpRequest(msgspec.Struct, eq=False, gc=False):
    """One request of a client, complete with its body."""

    head: RequestHead
    body: bytes = b""
    keep_alive: bool = True  # as things stand; the head says what the client wished
    refusal: Answer | None = None


class AnswerHead:
    """What a replica says before the body of its answer. Several may be the same."""

    __slots__ = ("headers", "lines", "reason", "start", "status")

    def __init__(self, status: int, reason: bytes, headers: Headers, lines: bytes) -> None:
        self.status = status
        self.reason = reason
        self.headers = headers
        self.lines = lines  # the headers that clients get
        self.start = b"HTTP/1.1 %d %b\r\n%b" % (status, reason, lines)


def json_answer(value: Any, status: int = 200) -> Answer:
    return Answer(status, json.dumps(value).encode())


def refusal(
    status: int,
    message: str,
    kind: str = "invalid_request_error",
    *,
    code: str | None = None,
    retry_after_s: int | None = None,
    closes: bool = False,
) -> Answer:
    """An error as OpenAI writes it, so that clients raise what they would raise there."""
    body = {"error": {"message": message, "type": kind, "param": None, "code": code}}
    headers = ((b"retry-after", b"%d" % retry_after_s),) if retry_after_s is not None else ()
    return Answer(status, json.dumps(body).encode(), headers=headers, closes=closes)


def overloaded(message: str, retry_after_s: int) -> Answer:
    return refusal(429, message, "rate_limit_error", code="queue_full", retry_after_s=retry_after_s)


def unavailable(message: str) -> Answer:
    return refusal(503, message, "service_unavailable", code="no_replica", retry_after_s=1)


def forwarded_headers(headers: Headers, dropped: frozenset[bytes]) -> list[bytes]:
    """Header lines that may pass through a proxy; those named by `Connection` may not."""
    for name, value in headers:
        if name == b"connection":
            named = frozenset(option.strip().lower() for option in value.split(b","))
            dropped |= named - {b"close", b"keep-alive"}
    return [b"%b: %b\r\n" % header for header in headers if header[0] not in dropped]


def passed_to_client(headers: Headers) -> list[bytes]:
    """The header lines of a replica's answer that clients get."""
    return forwarded_headers(headers, _KEPT_FROM_CLIENTS)
