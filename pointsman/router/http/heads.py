"""A message that comes whole, with the head of the one before it, needs no parser.

A client sends the same head again and again, and so does a server, but for the length of the body. Once the
parser has found such a message in order, others are compared with it: the same bytes before the length, the
same bytes after it, and a body as long as it says. What differs, or comes in pieces, goes through the parser.
That is sound because the parser is strict: it ends lines at CRLF only, and refuses a second length.
"""

from __future__ import annotations

from typing import Generic, TypeVar

_MAX_HEAD_BYTES = 4096
_MAX_DIGITS = 20
_NAMES = (b"\r\ncontent-length: ", b"\r\nContent-Length: ")

H = TypeVar("H")


class Known(Generic[H]):
    __slots__ = ("_after", "_before", "head")

    def __init__(self, before: bytes, after: bytes, head: H) -> None:
        self._before = before  # the length
        self._after = after
        self.head = head

    def body(self, data: bytes) -> bytes | None:
        """The body, if `data` is one whole message with this head; else None."""
        if not data.startswith(self._before):
            return None
        start = len(self._before)
        end = data.find(b"\r", start, start + _MAX_DIGITS)
        if end < 0 or not data.startswith(self._after, end):
            return None
        body = data[end + len(self._after) :]
        return body if data[start:end] == b"%d" % len(body) else None


def known_head(data: bytes, head: H) -> Known[H] | None:
    """`head` as the parser found it, in `data` that is one message from its first byte to its last."""
    end = data.find(b"\r\n\r\n") + 4
    if end > _MAX_HEAD_BYTES:
        return None
    digits = b"%d" % (len(data) - end)
    for name in _NAMES:
        start = data.find(name + digits + b"\r\n", 0, end) + len(name)
        if start >= len(name):
            return Known(data[:start], data[start + len(digits) : end], head)
    return None
