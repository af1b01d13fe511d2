"""A message that comes whole, and whose head has come before, needs no parser.

Clients and servers send the same head again and again, but for the length of the body. A head that the parser
has found in order once is remembered by its bytes without that length: those who send the same bytes mean the
same. What is not remembered, or comes in pieces, goes through the parser.
"""

from __future__ import annotations

from typing import TypeVar

_MAX_HEADS = 1024
_MAX_HEAD_BYTES = 4096

H = TypeVar("H")


class Heads(dict[bytes, H]):
    """By what `split` returns."""

    def remember(self, key: bytes, head: H) -> None:
        """The parser found one message with this head, and nothing else."""
        if len(key) > _MAX_HEAD_BYTES:
            return
        if len(self) >= _MAX_HEADS:  # others can make up as many as they like
            self.clear()
        self[key] = head


def split(data: bytes) -> tuple[bytes, bytes] | None:
    """A head without the line of its length, and the body, if it is as long as that line says."""
    end = data.find(b"\r\n\r\n")
    body = data[end + 4 :]
    line = b"\r\ncontent-length: %d\r\n" % len(body)
    start = data.find(line, 0, end + 2)
    if start < 0:
        start = data.find(b"\r\nContent-Length: %d\r\n" % len(body), 0, end + 2)
        if start < 0:
            return None
    return data[:start] + data[start + len(line) - 2 : end], body
