"""A server that behaves like vLLM, or as badly as a test wants, in this process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

NUM_CHUNKS = 5


@dataclass
class Heard:
    """A request as it came over the wire."""

    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes

    def header(self, name: str) -> str | None:
        values = [value for key, value in self.headers if key.lower() == name]
        assert len(values) < 2, f"{name} came twice"
        return values[0] if values else None

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]


Behaviour = Callable[["Mock", Heard, asyncio.StreamWriter], Awaitable[None]]


@dataclass
class Mock:
    behaviour: Behaviour
    models: tuple[str, ...] = ("m",)
    port: int = 0
    heard: list[Heard] = field(default_factory=list)
    num_connections: int = 0
    num_aborted: int = 0
    is_healthy: bool = True
    metrics: str = ""
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    writers: set[asyncio.StreamWriter] = field(default_factory=set)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self.writers.add(writer)
        try:
            while (request := await read_request(reader)) is not None:
                if request.method == "GET" and await self._background(request, writer):
                    continue
                self.heard.append(request)
                answering = asyncio.ensure_future(self.behaviour(self, request, writer))
                watching = asyncio.ensure_future(reader.read(1))
                await asyncio.wait((answering, watching), return_when=asyncio.FIRST_COMPLETED)
                if not answering.done():  # the router hung up
                    self.num_aborted += 1
                    answering.cancel()
                if writer.is_closing() or not answering.done():
                    watching.cancel()
                _, first = await asyncio.gather(answering, watching, return_exceptions=True)
                if not isinstance(first, bytes) or not first:
                    return
                answering.result()  # raises what a test did wrong
                reader._buffer[:0] = first  # type: ignore[attr-defined]
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.writers.discard(writer)
            writer.close()

    async def _background(self, request: Heard, writer: asyncio.StreamWriter) -> bool:
        """Health checks and scrapes of the router."""
        if request.path == "/health":
            await respond(writer, 200 if self.is_healthy else 503)
        elif request.path == "/metrics":
            await respond(writer, 200, self.metrics.encode(), "text/plain")
        elif request.path == "/v1/models":
            data = [{"id": name, "object": "model"} for name in self.models]
            await respond(writer, 200, json.dumps({"object": "list", "data": data}).encode())
        else:
            return False
        return True


async def read_request(reader: asyncio.StreamReader) -> Heard | None:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.strip().split("\r\n")
    method, target, _ = first.split(" ")
    headers = [(line.partition(": ")[0], line.partition(": ")[2]) for line in lines]
    request = Heard(method, target, headers, b"")
    assert request.header("transfer-encoding") is None  # the router always knows the length
    request.body = await reader.readexactly(int(request.header("content-length") or 0))
    return request


async def respond(
    writer: asyncio.StreamWriter,
    status: int,
    body: bytes = b"{}",
    content_type: str = "application/json",
    headers: str = "",
) -> None:
    head = f"HTTP/1.1 {status} Status\r\ncontent-type: {content_type}\r\n{headers}"
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    await writer.drain()


def usage(prompt_tokens: int = 7, completion_tokens: int = NUM_CHUNKS) -> dict[str, int]:
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": 12}


async def ok(mock: Mock, request: Heard, writer: asyncio.StreamWriter) -> None:
    """As vLLM answers, streaming or not."""
    asked = json.loads(request.body) if request.body else {}
    if asked.get("stream"):
        await stream(mock, request, writer)
        return
    message = {"role": "assistant", "content": "hello"}
    body = {
        "id": f"from-{mock.port}",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "message": message, "text": "hello", "finish_reason": "stop"}],
        "usage": usage(),
    }
    await respond(writer, 200, json.dumps(body).encode())


def event(delta: dict[str, str], **more: object) -> bytes:
    chunk = {
        "id": "c",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "delta": delta, "finish_reason": None}],
    }
    return b"data: " + json.dumps(chunk | more).encode() + b"\n\n"


async def stream(
    mock: Mock,
    request: Heard,
    writer: asyncio.StreamWriter,
    num_chunks: int = NUM_CHUNKS,
    pause_s: float = 0.005,
) -> None:
    begin_stream(writer)
    events = [event({"role": "assistant", "content": ""})]
    events += [event({"content": f"t{i}"}) for i in range(num_chunks)]
    options = json.loads(request.body).get("stream_options") or {}
    if options.get("include_usage"):
        events.append(event({}, choices=[], usage=usage(completion_tokens=num_chunks)))
    for one in [*events, b"data: [DONE]\n\n"]:
        writer.write(b"%x\r\n%b\r\n" % (len(one), one))
        await writer.drain()
        await asyncio.sleep(pause_s)
    writer.write(b"0\r\n\r\n")
    await writer.drain()


def begin_stream(writer: asyncio.StreamWriter) -> None:
    writer.write(
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
        b"transfer-encoding: chunked\r\n\r\n"
    )


def status(code: int) -> Behaviour:
    async def answer(mock: Mock, request: Heard, writer: asyncio.StreamWriter) -> None:
        await respond(writer, code, b'{"error": "mock"}')

    return answer


def raw(data: bytes, *, closes: bool = True) -> Behaviour:
    async def answer(mock: Mock, request: Heard, writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await writer.drain()
        if closes:
            writer.close()

    return answer


@dataclass
class Flood:
    """An answer of `count` MiB, larger than what the kernel's buffers on the way hold."""

    count: int
    sent: int = 0  # bytes

    @property
    def size(self) -> int:
        return self.count << 20

    async def __call__(self, mock: Mock, request: Heard, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % self.size)
        for _ in range(self.count):
            writer.write(b"x" * (1 << 20))
            await writer.drain()
            self.sent += 1 << 20

    async def until_it_stops(self) -> None:
        """Until nobody takes any more of it."""
        before = -1
        while self.sent == 0 or before != self.sent:
            before = self.sent
            await asyncio.sleep(0.2)


async def reset(mock: Mock, request: Heard, writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


async def hang(mock: Mock, request: Heard, writer: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


async def gated(mock: Mock, request: Heard, writer: asyncio.StreamWriter) -> None:
    """Answers once the test opens the gate."""
    await mock.gate.wait()
    await ok(mock, request, writer)


@asynccontextmanager
async def mocks(*behaviours: Behaviour) -> AsyncIterator[list[Mock]]:
    started: list[tuple[Mock, asyncio.Server]] = []
    for behaviour in behaviours:
        mock = Mock(behaviour)
        server = await asyncio.start_server(mock.serve, "127.0.0.1", 0, limit=1 << 26)
        mock.port = server.sockets[0].getsockname()[1]
        started.append((mock, server))
    try:
        yield [mock for mock, _ in started]
    finally:
        for mock, server in started:
            server.close()
            for writer in list(mock.writers):
                writer.transport.abort()
        await asyncio.sleep(0.01)
