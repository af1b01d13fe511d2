"""JSON lines about requests and events. Never a prompt, never a key.

Lines are collected and written a few times a second: a system call for each would cost more than the line.
"""

from __future__ import annotations

import json
from functools import lru_cache
from time import time
from typing import Any, TextIO

_MAX_BUFFERED = 1000
_MAX_WRITTEN = 8  # at once: less than 4 KiB, so that lines of other processes come between, not into them


@lru_cache(maxsize=256)
def _quoted(path: bytes) -> str:
    """A client chose this text."""
    return json.dumps(path.decode("latin-1"))


class Log:
    def __init__(self, stream: TextIO, *, has_requests: bool = True) -> None:
        self._stream = stream
        self._has_requests = has_requests
        self._lines: list[str] = []

    def request(
        self,
        request_id: str,
        path: bytes,
        status: int,
        replica: str,
        ttft_s: float | None,
        e2e_s: float,
        prompt_tokens: int,
        output_tokens: int,
        num_retries: int,
        outcome: str,
    ) -> None:
        """The path comes without its query, which may carry a key."""
        if not self._has_requests:
            return
        ttft = "null" if ttft_s is None else f"{ttft_s:.6f}"
        self._lines.append(
            f'{{"time":{time():.6f},"event":"request","id":"{request_id}","path":{_quoted(path)}'
            f',"status":{status},"outcome":"{outcome}","replica":"{replica}","ttft_s":{ttft},"e2e_s":{e2e_s:.6f}'
            f',"prompt_tokens":{prompt_tokens},"output_tokens":{output_tokens},"retries":{num_retries}}}\n'
        )
        if len(self._lines) > _MAX_BUFFERED:
            self.flush()

    def event(self, event: str, **about: Any) -> None:
        """Something that happens seldom."""
        self._lines.append(
            json.dumps({"time": round(time(), 6), "event": event, **about}, default=str) + "\n"
        )
        self.flush()

    def flush(self) -> None:
        lines, self._lines = self._lines, []
        for first in range(0, len(lines), _MAX_WRITTEN):
            self._stream.write("".join(lines[first : first + _MAX_WRITTEN]))
            self._stream.flush()
