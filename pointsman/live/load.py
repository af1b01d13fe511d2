"""Arrivals as real requests: streamed completions from an OpenAI-compatible server, and how long they took.

Open loop: a request is sent when it is due, whatever became of the others, and its times count from when it
was due. Prompts are common words of three letters, one token and four bytes each with their space, in an
order of their own for each request, so that no server finds one in its prefix cache.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pointsman.router.http.address import Address
from pointsman.router.http.limits import Limits
from pointsman.router.http.messages import Headers
from pointsman.router.http.upstream import Pool, Receiver, UpstreamConnection
from pointsman.router.requests.facts import read_usage
from pointsman.workload import Workload
from pointsman.workload.workload import NO_SESSION

# Named as in the simulator's table of requests, so that the same functions measure both.
REQUEST = np.dtype(
    [
        ("arrived_at", "f8"),  # when it was due, seconds from the start
        ("sent_at", "f8"),
        ("first_token_at", "f8"),
        ("completed_at", "f8"),  # NEVER if it failed
        ("num_prefill", "i4"),
        ("num_decode", "i4"),
    ]
)
NEVER = -1.0
OK = 200
ANSWER_TIMEOUT_S = 600.0  # after the last was sent
WORDS = (
    " the and for are but not you all any can had her was one our out day get has him his how man new now old"
    " see two way who boy did its let put say she too use far few got own run sun ten top try yes yet big end"
)
BYTES_PER_TOKEN = 4
_NUM_POOL_WORDS = 1 << 18

Done = Callable[[int], None]  # gets the number of requests finished since the last call


@dataclass(frozen=True)
class Replay:
    """What the clients saw."""

    requests: Any  # [N] REQUEST
    gaps_s: NDArray[np.float64]  # between two pieces of a stream, of all requests
    problems: Counter[str]  # why requests failed

    @property
    def lateness_s(self) -> NDArray[np.float64]:
        """[N] how long after it was due each request was sent: that of this client."""
        late_s: NDArray[np.float64] = self.requests["sent_at"] - self.requests["arrived_at"]
        return late_s


class Prompts:
    """Texts of any number of tokens, each a piece of a long random one."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng([seed, 0x70AD])
        words = np.array([f" {word}".encode() for word in WORDS.split()])  # all of BYTES_PER_TOKEN
        self._text = self._rng.choice(words, _NUM_POOL_WORDS).tobytes().decode()

    def draw(self, num_tokens: int) -> str:
        start = int(self._rng.integers(_NUM_POOL_WORDS)) * BYTES_PER_TOKEN
        text = self._text[start : start + num_tokens * BYTES_PER_TOKEN]
        while len(text) < num_tokens * BYTES_PER_TOKEN:
            text += self._text[: num_tokens * BYTES_PER_TOKEN - len(text)]
        return text


class _Client(Receiver):
    """One request, from its connection to the end of its answer."""

    __slots__ = ("_before", "_is_retried", "_last", "_last_at", "_load", "_message", "_row", "_status")

    def __init__(self, load: Load, row: int, message: bytes) -> None:
        self._load = load
        self._row = row
        self._message = message
        self._status = 0
        self._last_at = 0.0
        self._before = self._last = b""
        self._is_retried = False

    def start(self) -> None:
        pool = self._load.pool
        if pool.idle:
            self.on_connected(pool.idle.pop())
        else:
            pool.dial(self)

    def on_connected(self, connection: UpstreamConnection) -> None:
        connection.send(self, self._message)

    def on_head(self, status: int, reason: bytes, headers: Headers, length: int | None) -> None:
        self._status = status

    def on_body(self, data: bytes) -> None:
        now = monotonic()
        if self._last_at > 0.0:
            self._load.gaps_s.append(now - self._last_at)
        elif self._status == OK:
            self._load.first_token(self._row, now)
        self._last_at = now
        self._before, self._last = self._last, data

    def on_read(self) -> None:
        pass

    def on_complete(self) -> None:
        tail = self._before + self._last
        if self._status != OK:
            self._load.failed(self._row, f"status {self._status}")
        elif b"[DONE]" not in tail:
            self._load.failed(self._row, "the stream ended early")
        else:
            self._load.finished(self._row, monotonic(), read_usage(tail)[1])

    def on_failure(self, reason: str, *, is_stale: bool) -> None:
        if is_stale and not self._is_retried:  # an idle connection was closed as we used it
            self._is_retried = True
            self._load.pool.dial(self)
        else:
            self._load.failed(self._row, reason)


class Load:
    """Requests to one server (or router), which serves `model`."""

    def __init__(self, address: Address, model: str) -> None:
        self.pool = Pool(address, Limits())
        self._model = model
        self._head = (
            f"POST {address.prefix}/v1/completions HTTP/1.1\r\nhost: {address.netloc}\r\n"
            "content-type: application/json\r\n"
        )

    def close(self) -> None:
        self.pool.close()

    async def replay(self, workload: Workload, seed: int = 0, on_done: Done | None = None) -> Replay:
        """Send every request of an open-loop workload when it is due; returns when all have ended."""
        assert workload.num_users == 0
        self._requests = np.zeros(len(workload), REQUEST)
        self._requests["arrived_at"] = workload.arrived_at
        self._requests["first_token_at"] = self._requests["completed_at"] = NEVER
        self._requests["num_prefill"] = workload.num_prefill_tokens
        self._requests["num_decode"] = workload.num_decode_tokens
        self.gaps_s = array("d")
        self._problems: Counter[str] = Counter()
        self._on_done = on_done
        self._open = set(range(len(workload)))
        self._all_done = asyncio.Event()
        await self._send_all(workload, Prompts(seed))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                await self._all_done.wait()
        if self._open:
            self.pool.close()
            for row in list(self._open):
                self.failed(row, f"no answer within {ANSWER_TIMEOUT_S:g} s")
        return Replay(self._requests, np.array(self.gaps_s), self._problems)

    async def _send_all(self, workload: Workload, prompts: Prompts) -> None:
        due_at = workload.arrived_at.tolist()
        self._started_at = started_at = monotonic()
        for row, at in enumerate(due_at):
            # Written before it is due: with long prompts that takes a while.
            message = self._message(workload, row, prompts)
            await asyncio.sleep(max(0.0, started_at + at - monotonic()))
            self.pool.close_old(monotonic())
            self._requests["sent_at"][row] = monotonic() - started_at
            _Client(self, row, message).start()

    def _message(self, workload: Workload, row: int, prompts: Prompts) -> bytes:
        body = json.dumps(
            {
                "model": self._model,
                "prompt": prompts.draw(int(workload.num_prefill_tokens[row])),
                "max_tokens": int(workload.num_decode_tokens[row]),
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )
        session = int(workload.session[row])
        session_id = f"x-session-id: {session}\r\n" if session != NO_SESSION else ""
        return f"{self._head}{session_id}content-length: {len(body)}\r\n\r\n{body}".encode()

    # --- what clients say ---

    def first_token(self, row: int, now: float) -> None:
        self._requests["first_token_at"][row] = now - self._started_at

    def finished(self, row: int, now: float, num_output: int | None) -> None:
        """`num_output`: tokens by the server's own count, if it told."""
        self._requests["completed_at"][row] = now - self._started_at
        if num_output:
            self._requests["num_decode"][row] = num_output
        self._done(row)

    def failed(self, row: int, why: str) -> None:
        self._problems[why] += 1
        self._done(row)

    def _done(self, row: int) -> None:
        self._open.discard(row)
        if self._on_done is not None:
            self._on_done(1)
        if not self._open:
            self._all_done.set()
