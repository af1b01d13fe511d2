"""JSON lines about requests and events. Never a prompt, never a key.

Lines are collected and written a few times a second: a system call for each would cost more than the line.
They are encoded before that, a few at once, while they are in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import time
from typing import Any, Literal, TextIO

import msgspec

_MAX_BUFFERED = 1000
_MAX_WRITTEN = 4096  # bytes at once, so that lines of other processes come between, not into them
_encode_lines = msgspec.json.Encoder(enc_hook=str).encode_lines


class RequestLine(msgspec.Struct, gc=False):
    """How a request ended. The path comes without its query, which may carry a key."""

    time: float
    event: Literal["request"]
    id: str
    path: str
    status: int
    outcome: str
    replica: str
    policy: str
    ttft_s: float | None
    e2e_s: float
    prompt_tokens: int
    output_tokens: int
    retries: int


class Log:
    def __init__(self, stream: TextIO, *, has_requests: bool = True) -> None:
        self._stream = stream
        self._has_requests = has_requests
        self._encoded: list[bytes] = []
        self._num_lines = 0  # in there
        self._num_lost = 0

    def requests(self, lines: list[RequestLine]) -> None:
        if self._has_requests:
            self._add(lines)

    def event(self, event: str, **about: Any) -> None:
        """Something that happens seldom."""
        self.note(event, **about)
        self.flush()

    def note(self, event: str, **about: Any) -> None:
        """Something that may happen often: it is written with the next lines."""
        self._add([_event(event, **about)])

    def _add(self, lines: Sequence[RequestLine | dict[str, Any]]) -> None:
        self._encoded.append(_encode_lines(lines))
        self._num_lines += len(lines)
        if self._num_lines > _MAX_BUFFERED:
            self.flush()

    def flush(self) -> None:
        """A full disk must not stop the router: what cannot be written is lost, and the next line says so."""
        encoded, self._encoded = self._encoded, []
        num_lost = self._num_lost + self._num_lines
        self._num_lines = 0
        if self._num_lost:
            encoded.insert(0, _encode_lines([_event("log lines lost", count=self._num_lost)]))
        try:
            self._write(b"".join(encoded))
            self._num_lost = 0
        except OSError:
            self._num_lost = num_lost

    def _write(self, data: bytes) -> None:
        start = 0
        while start < len(data):
            end = data.rfind(b"\n", start, start + _MAX_WRITTEN)
            if end < 0:  # a line that is longer
                end = data.find(b"\n", start)
            self._stream.write(data[start : end + 1].decode())
            self._stream.flush()
            start = end + 1


def _event(event: str, **about: Any) -> dict[str, Any]:
    return {"time": microseconds(time()), "event": event, **about}


def microseconds(seconds: float) -> float:
    """Cut to six decimals, for people to read."""
    return int(seconds * 1e6) / 1e6
