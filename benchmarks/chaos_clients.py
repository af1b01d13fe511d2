"""Clients that check every byte of their answers, for benchmarks/router_chaos.py."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import cast

import httptools
from chaos_servers import plain_answer, stream_answer

LEAVING_SHARE, LEAVES_WITHIN_S = 0.03, 0.03
FILLER = "word " * 40


@dataclass
class Load:
    port: int
    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    left: set[str] = field(default_factory=set)
    sent_at: list[float] = field(default_factory=list)  # of the requests that were answered with 200
    latency_s: list[float] = field(default_factory=list)
    num_sent: int = 0
    idle: deque[Client] = field(default_factory=deque)
    clients: set[Client] = field(default_factory=set)

    @property
    def num_open(self) -> int:
        return self.num_sent - self.outcomes.total()

    async def ask(self, dice: random.Random) -> None:
        self.num_sent += 1
        name, is_stream = f"r{self.num_sent}", dice.random() < 0.5
        leaves_after_s = dice.uniform(0, LEAVES_WITHIN_S) if dice.random() < LEAVING_SHARE else None
        client = self.idle.popleft() if self.idle else None  # the oldest: none is idle for long
        if client is None or client.is_closing:
            loop = asyncio.get_running_loop()
            try:
                _, client = await loop.create_connection(lambda: Client(self), "127.0.0.1", self.port)
            except OSError as error:
                self.wrong.append(f"{name}: cannot connect, {error}")
                self.outcomes["no connection"] += 1
                return
        client.ask(name, is_stream, leaves_after_s)


class Client(asyncio.Protocol):
    """A connection: one request after the other. It sees every byte of the answers."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._transport: asyncio.Transport
        self._name: str | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._load.clients.add(self)

    def ask(self, name: str, is_stream: bool, leaves_after_s: float | None) -> None:
        body = {"model": "m", "messages": [{"role": "user", "content": FILLER}], "user": name}
        data = json.dumps(body | {"stream": is_stream}).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        names = b"x-request-id: %b\r\ncontent-length: %d\r\n\r\n" % (name.encode(), len(data))
        self._name, self._expected = name, (stream_answer if is_stream else plain_answer)(name)
        self._body, self._has_head, self._is_whole = b"", False, False
        self._parser = httptools.HttpResponseParser(self)
        self._asked_at = time.monotonic()
        self._transport.write(head + names + data)
        if leaves_after_s is not None:
            asyncio.get_running_loop().call_later(leaves_after_s, self._leave, name)

    def data_received(self, data: bytes) -> None:
        if self._name is None:
            self._load.wrong.append("an answer nobody asked for")
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._load.wrong.append(f"{self._name}: malformed answer, {error}")
            self._end("malformed")
            self._transport.abort()
            return
        if self._is_whole:
            self._check()

    def on_headers_complete(self) -> None:
        self._has_head = True

    def on_body(self, part: bytes) -> None:
        self._body += part

    def on_message_complete(self) -> None:
        self._is_whole = True

    def connection_lost(self, error: Exception | None) -> None:
        self._load.clients.discard(self)
        if self._name is not None:
            self._end("cut" if self._has_head else "no answer")
        elif self in self._load.idle:
            self._load.idle.remove(self)

    @property
    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def close(self) -> None:
        self._transport.close()

    def _check(self) -> None:
        load, status = self._load, self._parser.get_status_code()
        if status == 200:
            load.sent_at.append(self._asked_at)
            load.latency_s.append(time.monotonic() - self._asked_at)
            if self._body != self._expected:
                load.wrong.append(f"{self._name}: got {self._body[:80]!r}")
        self._end(str(status))
        if self._parser.should_keep_alive():
            load.idle.append(self)
        else:
            self._transport.close()

    def _leave(self, name: str) -> None:
        if self._name == name:
            self._load.left.add(name)
            self._end("left")
            self._transport.abort()

    def _end(self, outcome: str) -> None:
        self._load.outcomes[outcome] += 1
        self._name = None
