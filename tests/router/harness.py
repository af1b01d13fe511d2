"""A router in this process, and a client that sees every byte."""

from __future__ import annotations

import asyncio
import io
import json
import socket
import ssl
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import uvloop
from prometheus_client.parser import text_string_to_metric_families

from pointsman.router.config import Backend, Settings
from pointsman.router.http.downstream import ClientConnection
from pointsman.router.http.limits import Limits
from pointsman.router.keys import Keys
from pointsman.router.operations.admin import Admin
from pointsman.router.server import Parts, Router, port_of
from tests.router.fakes import FakeBooks, FakeDecider
from tests.router.mock import Behaviour, Mock, mocks, ok

Scenario = Callable[[], Awaitable[None]]
CHAT = "/v1/chat/completions"
SECRET = "sk-very-secret"
# Checks in the background would change what a test counts: only tests that need them speed them up.
QUIET = {"health_interval_s": 3600, "scrape_interval_s": 3600, "models_interval_s": 3600, "slow_start_s": 0}


def run(scenario: Scenario, timeout_s: float = 15.0) -> None:
    async def limited() -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await scenario()
        except BaseException:
            # Where warnings are errors, uvloop never closes what a failed scenario has left open.
            warnings.simplefilter("ignore", ResourceWarning)
            raise

    with warnings.catch_warnings():
        uvloop.run(limited())


@dataclass
class Answered:
    status: int
    headers: dict[str, str]
    body: bytes
    is_whole: bool = True

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Wire:
    """One connection of a client."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self, method: str = "POST") -> Answered:
        """The next response; raises IncompleteReadError where the connection ends before its head."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head.strip().split("\r\n")
        code = int(first.split(" ")[1])
        pairs = [(line.partition(": ")[0], line.partition(": ")[2]) for line in lines]
        headers = dict(pairs)
        assert len(headers) == len(pairs), "a header came twice"
        answered = Answered(code, headers, b"")
        if method == "HEAD" or code in (100, 204, 304):
            return answered
        try:
            if "content-length" in headers:
                answered.body = await self.reader.readexactly(int(headers["content-length"]))
            elif headers.get("transfer-encoding") == "chunked":
                while size := int(await self.reader.readline(), 16):
                    answered.body += await self.reader.readexactly(size)
                    await self.reader.readexactly(2)
                await self.reader.readexactly(2)
            else:
                answered.body = await self.reader.read()
        except (asyncio.IncompleteReadError, ConnectionError, ValueError):
            answered.is_whole = False
        return answered

    async def is_closed(self, within_s: float = 3.0) -> bool:
        """Nothing more comes."""
        try:
            async with asyncio.timeout(within_s):
                return await self.reader.read() == b""
        except TimeoutError:
            return False
        except ConnectionError:
            return True


def post(
    body: Any = None, path: str = CHAT, headers: str = "", *, stream: bool = False, version: str = "1.1"
) -> bytes:
    if body is None:
        body = {"model": "m", "messages": [{"role": "user", "content": "hello there"}], "stream": stream}
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/{version}\r\nhost: router\r\ncontent-type: application/json\r\n{headers}"
    return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data


def get(path: str, headers: str = "", method: str = "GET") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nhost: router\r\n{headers}\r\n".encode()


@dataclass
class Cluster:
    router: Router
    books: FakeBooks
    decider: FakeDecider
    mocks: list[Mock]
    port: int
    log: io.StringIO

    @asynccontextmanager
    async def wire(self) -> AsyncIterator[Wire]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 26)
        try:
            yield Wire(reader, writer)
        finally:
            writer.close()

    async def ask(self, request: bytes | None = None, method: str = "POST") -> Answered:
        async with self.wire() as wire:
            await wire.send(request or post())
            return await wire.answer(method)

    def logged(self) -> list[dict[str, Any]]:
        self.router.proxy.count()
        self.router.log.flush()
        return [json.loads(line) for line in self.log.getvalue().splitlines()]

    @property
    def num_heard(self) -> list[int]:
        return [len(mock.heard) for mock in self.mocks]


@asynccontextmanager
async def cluster(
    *behaviours: Behaviour,
    limits: dict[str, Any] | None = None,
    holding: dict[str, Any] | None = None,
    reliability: dict[str, Any] | None = None,
    tls: ssl.SSLContext | None = None,
    **parts: Any,
) -> AsyncIterator[Cluster]:
    settings = Settings.model_validate(
        {"limits": limits or {}, "holding": holding or {}, "reliability": QUIET | (reliability or {})}
    )
    books, log = FakeBooks(), io.StringIO()
    deciders: dict[str, FakeDecider] = {}

    def decider_named(name: str) -> FakeDecider:
        return deciders.setdefault(name, FakeDecider(books))

    async with mocks(*behaviours or (ok, ok)) as servers:
        made = Parts(**{"books": books, "deciders": decider_named, "log_to": log, "policy": "fake"} | parts)
        router = Router(made, settings, [Backend(url=mock.url) for mock in servers])
        port = await router.start("127.0.0.1", 0, tls=tls)
        try:
            yield Cluster(router, books, deciders["fake"], servers, port, log)
            assert not router.proxy.active, "requests left behind"
            assert not books.open, "books left open"
        finally:
            await router.stop()


@asynccontextmanager
async def small_wire(c: Cluster, tls: ssl.SSLContext | None = None) -> AsyncIterator[Wire]:
    """A client that takes little before it reads; what the router says stays in the router."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", c.port))
    name = "localhost" if tls is not None else None
    reader, writer = await asyncio.open_connection(sock=sock, ssl=tls, server_hostname=name, limit=2048)
    await until(lambda: bool(c.router.proxy.clients))
    (client,) = c.router.proxy.clients
    client._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    try:
        yield Wire(reader, writer)
    finally:
        writer.close()


async def until(condition: Callable[[], bool], within_s: float = 3.0) -> None:
    """Wait for something that happens in the background."""
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.005)


def metric_values(text: bytes) -> dict[tuple[str, ...], float]:
    """Name and label values, in the order of the labels' names -> value."""
    return {
        (sample.name, *(sample.labels[label] for label in sorted(sample.labels))): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


@asynccontextmanager
async def admin(c: Cluster, keys: Keys | None = None) -> AsyncIterator[Any]:
    """A function that asks the admin API."""
    service = Admin(c.router, keys or Keys([]))
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: ClientConnection(service, Limits()), "127.0.0.1", 0)

    async def ask(
        method: str, path: str, body: Any = None, headers: str = "", host: str = "127.0.0.1:8081"
    ) -> Answered:
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(server))
        wire = Wire(reader, writer)
        data = json.dumps(body).encode() if body is not None else b""
        head = f"{method} {path} HTTP/1.1\r\nhost: {host}\r\n{headers}content-length: {len(data)}\r\n\r\n"
        await wire.send(head.encode() + data)
        try:
            return await wire.answer()
        finally:
            writer.close()

    ask.url = f"http://127.0.0.1:{port_of(server)}"  # type: ignore[attr-defined]
    try:
        yield ask
    finally:
        server.close()
        await until(lambda: not service.clients)


def always_first(c: Cluster) -> None:
    """The policy prefers the first replica that may get the request."""

    def rule(excluded: Collection[int]) -> int:
        is_open = c.books.accepting
        return min(slot for slot in c.books.names if slot not in excluded and is_open[slot]) + 1

    c.decider.rule = rule
