"""JSON lines about requests and events. Never a prompt, never a key.

Lines are collected and written a few times a second: a system call for each would cost more than the line.
"""

from __future__ import annotations

import json
import os
import select
import stat
import sys
from functools import lru_cache
from time import time
from typing import Any, TextIO

import msgspec

from pointsman.router.telemetry.ended import (
    E2E_S,
    KIND,
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    TTFT_S,
    EndedRequests,
    Kind,
)
from pointsman.router.telemetry.lines import Lines

_MAX_BUFFERED = 1000
_MAX_PIPED = 4096  # bytes at once, so that lines of other processes come between, not into them
_MAX_PATH = 500  # characters: a line fits into a page
_encode = msgspec.json.Encoder(enc_hook=str).encode


class Log:
    def __init__(self, stream: TextIO, *, has_requests: bool = True) -> None:
        self._stream = stream
        self._has_requests = has_requests
        is_file = _is_file(stream)
        self._max_written = sys.maxsize if is_file else _MAX_PIPED  # a file takes all in one piece
        self._room = None if is_file else _poll(stream)
        self._lines = _request_lines()
        self._encoded: list[bytes] = []
        self._num_lines = 0  # in there
        self._num_lost = 0

    def requests(self, ended: EndedRequests) -> None:
        """A line for each: how it ended."""
        if not self._has_requests:
            return
        start = f'{{"time":{microseconds(time())},"event":"request","id":"'
        kinds = ended.kinds
        groups = [start], ended.ids, list(map(_before, kinds)), list(map(_after, kinds))
        self._add(self._lines.write(ended.rows, groups), len(ended))

    def event(self, event: str, **about: Any) -> None:
        """Something that happens seldom."""
        self.note(event, **about)
        self.flush()

    def note(self, event: str, **about: Any) -> None:
        """Something that may happen often: it is written with the next lines."""
        self._add(_event(event, **about), 1)

    def _add(self, encoded: bytes, num_lines: int) -> None:
        self._encoded.append(encoded)
        self._num_lines += num_lines
        if self._num_lines > _MAX_BUFFERED:
            self.flush()

    def flush(self) -> None:
        """Neither a full disk nor a pipe that nobody reads may stop the router: what cannot be written is
        lost, and the next line says so."""
        encoded, self._encoded = self._encoded, []
        self._num_lines = 0
        if self._num_lost:
            encoded.insert(0, _event("log lines lost", count=self._num_lost))
        data = b"".join(encoded)
        num_written = self._write(data)
        num_unwritten = data.count(b"\n", num_written)
        if num_written == 0 and self._num_lost:  # not even the line that counts them
            self._num_lost += num_unwritten - 1
        else:
            self._num_lost = num_unwritten

    def _write(self, data: bytes) -> int:
        """-> how much of it has gone."""
        start = 0
        while start < len(data):
            # Without waiting: a pipe or a socket that can be written to takes a page.
            if self._room is not None and not self._room.poll(0):
                break
            end = data.rfind(b"\n", start, start + self._max_written)
            if end < 0:  # a line that is longer
                end = data.find(b"\n", start)
            try:
                self._stream.write(data[start : end + 1].decode())
                self._stream.flush()
            except OSError:
                break
            start = end + 1
        return start


def _request_lines() -> Lines:
    lines = Lines()
    lines.shared()
    lines.own()
    lines.one_of(KIND)
    lines.seconds(TTFT_S)
    lines.text(',"e2e_s":')
    lines.seconds(E2E_S)
    lines.text(',"prompt_tokens":')
    lines.integer(PROMPT_TOKENS)
    lines.text(',"output_tokens":')
    lines.integer(OUTPUT_TOKENS)
    lines.one_of(KIND)
    return lines


def _is_file(stream: TextIO) -> bool:
    try:
        return stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
    except OSError:  # it has none
        return False


def _poll(stream: TextIO) -> select.poll | None:
    """What tells whether there is room; None: it is no stream of the system's."""
    try:
        number = stream.fileno()
    except OSError:
        return None
    room = select.poll()
    room.register(number, select.POLLOUT)
    return room


def _event(event: str, **about: Any) -> bytes:
    return _encode({"time": microseconds(time()), "event": event, **about}) + b"\n"


@lru_cache
def _before(kind: Kind) -> str:
    """What stands between the id and the numbers."""
    path, status, outcome, replica, policy, *_ = kind
    if len(path) > _MAX_PATH:
        path = path[:_MAX_PATH] + "…"
    about = {"path": path, "status": status, "outcome": outcome, "replica": replica, "policy": policy}
    return f'",{json.dumps(about, separators=(",", ":"))[1:-1]},"ttft_s":'


def _after(kind: Kind) -> str:
    *_, num_retries, _ = kind
    return f',"retries":{num_retries}}}\n'


def microseconds(seconds: float) -> float:
    """Cut to six decimals, for people to read."""
    return int(seconds * 1e6) / 1e6
