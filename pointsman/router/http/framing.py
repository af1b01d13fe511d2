"""Where a request ends, and which requests are refused before anybody looks at them.

Where two servers could disagree about the end of a request, the second could be made to see a request that
the first did not: such requests are refused.
"""

from __future__ import annotations

import httptools

from pointsman.router.http.limits import Limits
from pointsman.router.http.messages import Answer, Headers, RequestHead, refusal

HEAD_TOO_LARGE = refusal(431, "the request headers are too large", closes=True)
BODY_TOO_LARGE = refusal(413, "the request body is too large", code="body_too_large", closes=True)
_SINGLE = (b"host", b"content-length", b"transfer-encoding", b"authorization", b"expect")
_OFFER = (b"upgrade", b"http2-settings")
_MAX_DIGITS = 18  # of a length that can be true


def announces_body(head: RequestHead) -> bool:
    headers = head.special
    return b"transfer-encoding" in headers or headers.get(b"content-length", b"0") != b"0"


def framing_problem(head: RequestHead, version: str, is_upgrade: bool, limits: Limits) -> Answer | None:
    if version not in ("1.0", "1.1"):
        return refusal(505, f"HTTP/{version} is not supported", closes=True)
    if is_upgrade:  # the parser would not read the body of such a request
        return refusal(400, "protocol upgrades are not supported", closes=True)
    headers = head.special
    if len(headers) != len(head.headers):
        names = [name for name, _ in head.headers]
        for name in _SINGLE:
            if names.count(name) > 1:
                return refusal(400, f"more than one header {name.decode()}", closes=True)
    if version == "1.1" and b"host" not in headers:
        return refusal(400, "no Host header", closes=True)
    length = headers.get(b"content-length")
    encoding = headers.get(b"transfer-encoding")
    if encoding is not None:
        if length is not None or head.is_http_10:
            problem = "Transfer-Encoding in conflict with Content-Length or HTTP/1.0"
            return refusal(400, problem, closes=True)
        if encoding.lower() != b"chunked":
            return refusal(501, "no Transfer-Encoding but chunked is supported", closes=True)
    elif length is not None:
        if not length.isdigit():
            return refusal(400, "Content-Length is not a number", closes=True)
        if len(length) > _MAX_DIGITS or int(length) > limits.max_body_bytes:
            return BODY_TOO_LARGE
    return None


def is_offer(method: bytes, headers: Headers) -> bool:
    """Whether the upgrade that a request asks for need not be: some clients (Java's, `curl --http2`) offer
    HTTP/2 with their first request, and go on with HTTP/1.1 where nobody takes it up."""
    offered = [value.lower() for name, value in headers if name == b"upgrade"]
    return offered == [b"h2c"] and method != b"CONNECT"


def without_offer(method: bytes, target: bytes, version: str, headers: Headers) -> bytes:
    """The head of such a request, to be parsed once more: the parser reads the body of no upgrade."""
    lines = [b"%b %b HTTP/%b\r\n" % (method, target, version.encode())]
    for name, value in headers:
        if name == b"connection":
            options = [option.strip() for option in value.split(b",")]
            value = b", ".join(option for option in options if option.lower() not in _OFFER)
        if name not in _OFFER:
            lines.append(b"%b: %b\r\n" % (name, value))
    return b"".join(lines) + b"\r\n"


def malformed(error: httptools.HttpParserError) -> Answer:
    if isinstance(error, httptools.HttpParserCallbackError):
        return refusal(500, "internal error", "server_error", closes=True)
    return refusal(400, f"malformed HTTP request: {error}", closes=True)
