"""Servers that answer with the name of their request, and that can be made to fail in every way.

They speak HTTP at protocol level, so that hundreds of requests a second cost this process little.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections import Counter
from typing import cast

FAULTS = ("die", "freeze", "hang", "slow", "reset", "hang up", "cut", "garbage", "500", "503")
SERVICE_S, SLOW_S, NUM_EVENTS = 0.015, 0.5, 3
_MODELS = json.dumps({"object": "list", "data": [{"id": "m", "object": "model"}]}).encode()
_STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_DONE = b"data: [DONE]\n\n"
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


def plain_answer(name: str) -> bytes:
    usage = {"prompt_tokens": 60, "completion_tokens": NUM_EVENTS}
    return json.dumps({"id": name, "object": "chat.completion", "usage": usage}).encode()


def event(name: str) -> bytes:
    return b'data: {"id":"%b","choices":[{"index":0,"delta":{"content":"t"}}]}\n\n' % name.encode()


def stream_answer(name: str) -> bytes:
    """All its events, without the chunks they come in."""
    return event(name) * NUM_EVENTS + _DONE


def _http(body: bytes, status: int = 200) -> bytes:
    head = b"HTTP/1.1 %d Status\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % (status, len(body)) + body


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Server:
    def __init__(self) -> None:
        self.port = 0
        self.fault: str | None = None
        self.connections: set[Connection] = set()
        self.answered: Counter[str] = Counter()  # whole answers, by the name of the request
        self._listener: asyncio.Server

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def listen(self) -> None:
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(lambda: Connection(self), "127.0.0.1", self.port)
        self.port = self._listener.sockets[0].getsockname()[1]

    def break_down(self, fault: str) -> None:
        self.fault = fault
        if fault == "die":
            self.close()

    async def recover(self) -> None:
        """What a frozen server has not read yet, it answers now."""
        fault, self.fault = self.fault, None
        if fault == "die":
            await self.listen()
        for connection in list(self.connections):
            connection.read()

    def close(self) -> None:
        self._listener.close()
        for connection in list(self.connections):
            connection.reset()


class Connection(asyncio.Protocol):
    def __init__(self, server: Server) -> None:
        self._server = server
        self._data = b""
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._server.connections.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._server.connections.discard(self)

    def data_received(self, data: bytes) -> None:
        self._data += data
        self.read()

    def read(self) -> None:
        """Answer the request that has come, if it is whole. The router never sends a second one before."""
        head, separator, rest = self._data.partition(b"\r\n\r\n")
        if not separator or self._server.fault == "freeze":
            return
        headers = dict(line.split(b": ", 1) for line in head.split(b"\r\n")[1:])
        if len(rest) < int(headers.get(b"content-length", 0)):
            return
        if head.startswith(b"GET"):
            self._data = b""
            self._transport.write(_http(_MODELS))
        elif self._server.fault != "hang":
            self._data = b""
            asked = json.loads(rest)
            assert asked["user"] == headers[b"x-request-id"].decode(), "head and body of different requests"
            self._answer(asked["user"], asked["stream"])

    def _answer(self, name: str, is_stream: bool) -> None:
        fault = self._server.fault
        if fault in ("500", "503"):
            self._transport.write(_http(b'{"error":"mock"}', int(fault)))
        elif fault == "reset":
            self.reset()
        elif fault == "hang up":
            self._transport.close()
        elif fault == "garbage":
            self._transport.write(b"garbage\r\n\r\n")
        elif fault == "cut":
            whole = _STREAM_HEAD + _chunk(event(name)) if is_stream else _http(plain_answer(name))[:-9]
            self._transport.write(whole)
            self._transport.close()
        elif is_stream:
            self._transport.write(_STREAM_HEAD)
            self._stream(name, 0)
        else:
            pause_s = SLOW_S if fault == "slow" else SERVICE_S
            asyncio.get_running_loop().call_later(pause_s, self._finish, name, _http(plain_answer(name)))

    def _stream(self, name: str, index: int) -> None:
        if index == NUM_EVENTS:
            self._finish(name, _chunk(_DONE) + b"0\r\n\r\n")
        elif not self._transport.is_closing():
            self._transport.write(_chunk(event(name)))
            pause_s = (SLOW_S if self._server.fault == "slow" else SERVICE_S) / NUM_EVENTS
            asyncio.get_running_loop().call_later(pause_s, self._stream, name, index + 1)

    def _finish(self, name: str, data: bytes) -> None:
        if not self._transport.is_closing():
            self._server.answered[name] += 1
            self._transport.write(data)

    def reset(self) -> None:
        """As when the process is killed: the peer gets an RST."""
        sock = self._transport.get_extra_info("socket")
        if sock is not None and not self._transport.is_closing():
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        self._transport.abort()
