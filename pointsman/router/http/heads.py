"""A message that comes whole, with the head of the one before it, needs no parser.

A client sends the same head again and again, and so does a server, but for the length of the body. Once the
parser has found such a message in order, others are compared with it: the same bytes before the length, the
same bytes after it, and a body as long as it says. What differs, or comes in pieces, goes through the parser.
That is sound because the parser is strict: it ends lines at CRLF only, and refuses a second length.
"""

from __future__ import annotations

from typing import Generic, TypeVar

_MAX_HEAD_BYTES = 4096
_HEAD_END = b"\r\n\r\n"
_NAMES = (b"\r\ncontent-length: ", b"\r\nContent-Length: ")

H = TypeVar("H")


class Known(Generic[H]):
    __slots__ = ("_after", "_before", "head")

    def __init__(self, before: bytes, after: bytes, head: H) -> None:
        self._before = before  # the length
        self._after = after  # up to the empty line
        self.head = head

    def body(self, data: bytes) -> bytes | None:
        """The body, if `data` is one whole message with this head; else None."""
        head, _, body = data.partition(_HEAD_END)
        return body if head == b"%b%d%b" % (self._before, len(body), self._after) else None


def known_head(data: bytes, head: H) -> Known[H] | None:
    """`head` as the parser found it, in `data` that is one message from its first byte to its last."""
    lines, _, body = data.partition(_HEAD_END)
    if len(lines) > _MAX_HEAD_BYTES:
        return None
    lines += b"\r\n"
    length = b"%d\r\n" % len(body)
    for name in _NAMES:
        before, found, after = lines.partition(name + length)
        if found:
            return Known(before + name, (b"\r\n" + after).removesuffix(b"\r\n"), head)
    return None
