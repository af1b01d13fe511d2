"""Arrivals as real requests: streamed completions from an OpenAI-compatible server, and how long they took.

Open loop: a request is sent when it is due, whatever became of the others, and its times count from when it
was due. The next turn of a chat is due a think time after the answer before it has ended. Where requests
share prefixes they are chats with the same texts (prompts.py), or plain completions of all that was said;
otherwise no server finds any prompt in its prefix cache.
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

from pointsman.live.prompts import Chats, Message, Prompts, plain_text, streamed_text
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
ANSWER_TIMEOUT_S = 600.0  # without any, once the last session has begun
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


class _Client(Receiver):
    """One request, from its connection to the end of its answer."""

    __slots__ = (
        "_before",
        "_body",
        "_is_retried",
        "_last",
        "_last_at",
        "_load",
        "_message",
        "_row",
        "_status",
    )

    def __init__(self, load: Load, row: int, message: bytes, *, keeps_body: bool) -> None:
        self._load = load
        self._row = row
        self._message = message
        self._status = 0
        self._last_at = 0.0
        self._before = self._last = b""
        self._body: list[bytes] | None = [] if keeps_body else None
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
        if self._body is not None:
            self._body.append(data)

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
            if self._body is not None:
                self._load.answered(self._row, b"".join(self._body))

    def on_failure(self, reason: str, *, is_stale: bool) -> None:
        if is_stale and not self._is_retried:  # an idle connection was closed as we used it
            self._is_retried = True
            self._load.pool.dial(self)
        else:
            self._load.failed(self._row, reason)


class Load:
    """Requests to one server (or router), which serves `model`; `is_plain`: chats are asked as one text."""

    def __init__(self, address: Address, model: str, *, is_plain: bool = False) -> None:
        self.pool = Pool(address, Limits())
        self._model = model
        self._is_plain = is_plain
        self._address = address

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
        self._workload = workload
        prompts = Prompts(seed)
        self._chats = Chats(workload, prompts) if workload.is_shared else None
        await self._send_first_turns(prompts)
        await self._until_nothing_comes()
        if self._open:
            self.pool.close()
            for row in list(self._open):
                self.failed(row, f"no answer within {ANSWER_TIMEOUT_S:g} s")
        return Replay(self._requests, np.array(self.gaps_s), self._problems)

    async def _until_nothing_comes(self) -> None:
        num_open = 0
        while len(self._open) != num_open:
            num_open = len(self._open)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ANSWER_TIMEOUT_S):
                    await self._all_done.wait()

    async def _send_first_turns(self, prompts: Prompts) -> None:
        later = self._workload.next_turn
        first = np.setdiff1d(np.arange(len(self._workload)), later[later >= 0])
        self._started_at = started_at = monotonic()
        for row in first.tolist():
            # Written before it is due: with long prompts that takes a while.
            message = self._first_message(row, prompts)
            due_at = started_at + self._workload.arrived_at[row]
            await asyncio.sleep(max(0.0, due_at - monotonic()))
            while monotonic() < due_at:  # the loop's timers are up to a millisecond early
                await asyncio.sleep(0.0)
            self.pool.close_old(monotonic())
            self._send(row, message)

    def _send(self, row: int, message: bytes) -> None:
        self._requests["sent_at"][row] = monotonic() - self._started_at
        keeps_body = self._chats is not None and self._chats.is_continued(row)
        _Client(self, row, message, keeps_body=keeps_body).start()

    def _first_message(self, row: int, prompts: Prompts) -> bytes:
        if self._chats is not None:
            return self._chat_message(row, self._chats.first_turn(row))
        prompt = prompts.draw(int(self._workload.num_prefill_tokens[row]))
        return self._message("completions", row, {"prompt": prompt})

    def _chat_message(self, row: int, messages: list[Message]) -> bytes:
        if self._is_plain:
            return self._message("completions", row, {"prompt": plain_text(messages)})
        return self._message("chat/completions", row, {"messages": messages})

    def _message(self, path: str, row: int, prompt: dict[str, Any]) -> bytes:
        body = json.dumps(
            {
                "model": self._model,
                **prompt,
                "max_tokens": int(self._workload.num_decode_tokens[row]),
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )
        session = int(self._workload.session[row])
        session_id = f"x-session-id: {session}\r\n" if session != NO_SESSION else ""
        return (
            f"POST {self._address.prefix}/v1/{path} HTTP/1.1\r\nhost: {self._address.netloc}\r\n"
            f"content-type: application/json\r\n{session_id}content-length: {len(body)}\r\n\r\n{body}"
        ).encode()

    # --- what clients say ---

    def first_token(self, row: int, now: float) -> None:
        self._requests["first_token_at"][row] = now - self._started_at

    def finished(self, row: int, now: float, num_output: int | None) -> None:
        """`num_output`: tokens by the server's own count, if it told."""
        self._requests["completed_at"][row] = now - self._started_at
        if num_output:
            self._requests["num_decode"][row] = num_output
        self._done(row)

    def answered(self, row: int, body: bytes) -> None:
        """Somebody reads the answer, thinks, and goes on."""
        assert self._chats is not None
        later, messages = self._chats.next_turn(row, streamed_text(body))
        due_at = self._requests["completed_at"][row] + self._workload.think_s[later]
        self._requests["arrived_at"][later] = due_at
        message = self._chat_message(later, messages)
        wait_s = max(0.0, self._started_at + due_at - monotonic())
        asyncio.get_running_loop().call_later(wait_s, self._send, later, message)

    def failed(self, row: int, why: str) -> None:
        """Nobody asks the turns that would have followed."""
        while row in self._open:
            self._problems[why] += 1
            self._done(row)
            if self._chats is not None and self._chats.is_continued(row):
                row, why = int(self._workload.next_turn[row]), "the turn before it failed"

    def _done(self, row: int) -> None:
        self._open.discard(row)
        if self._on_done is not None:
            self._on_done(1)
        if not self._open:
            self._all_done.set()
