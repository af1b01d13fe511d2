"""Just enough of an HTTP/1.1 server: requests come in whole, answers go out whole or in chunks."""

from __future__ import annotations

import asyncio
import json
import socket
from collections import deque
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any, NamedTuple, cast

import httptools

MAX_BODY_BYTES = 32 * 1024 * 1024
MAX_HEADER_BYTES = 64 * 1024
NO_HEADERS: Mapping[str, str] = {}


class Request(NamedTuple):
    method: str
    path: str
    headers: Mapping[bytes, bytes]  # names in lower case
    body: bytes
    keep_alive: bool


class Reply:
    """The answer to one request. `on_gone` is called if the client leaves before it is complete."""

    def __init__(self, connection: Connection, keep_alive: bool) -> None:
        self._connection = connection
        self._keep_alive = keep_alive
        self.is_over = False
        self.on_gone: Callable[[], None] | None = None

    def whole(
        self, status: int, content_type: str, body: bytes, headers: Mapping[str, str] = NO_HEADERS
    ) -> None:
        if self.is_over:
            return
        length = {"content-length": str(len(body))}
        self._connection.write(self._head(status, content_type, {**length, **headers}) + body)
        self._finish()

    def json(self, status: int, value: Any, headers: Mapping[str, str] = NO_HEADERS) -> None:
        self.whole(status, "application/json", json.dumps(value).encode(), headers)

    def start(self, content_type: str, headers: Mapping[str, str] = NO_HEADERS) -> None:
        self._connection.write(self._head(200, content_type, {"transfer-encoding": "chunked", **headers}))

    def send(self, chunk: bytes) -> None:
        if not self.is_over:
            self._connection.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))

    def end(self) -> None:
        if not self.is_over:
            self._connection.write(b"0\r\n\r\n")
            self._finish()

    def reset(self) -> None:
        """Break the connection."""
        self._connection.abort()

    def gone(self) -> None:
        if not self.is_over:
            self.is_over = True
            if self.on_gone is not None:
                self.on_gone()

    def _head(self, status: int, content_type: str, headers: Mapping[str, str]) -> bytes:
        lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", f"content-type: {content_type}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        if not self._keep_alive:
            lines.append("connection: close")
        return ("\r\n".join(lines) + "\r\n\r\n").encode()

    def _finish(self) -> None:
        self.is_over = True
        self._connection.reply_is_over(self._keep_alive)


Handler = Callable[[Request, Reply], None]


class Connection(asyncio.Protocol):
    def __init__(self, handler: Handler, open_connections: set[Connection]) -> None:
        self._handler = handler
        self._open = open_connections
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._reply: Reply | None = None
        self._queue: deque[Request] = deque()
        self._begin()

    def _begin(self) -> None:
        self._url = b""
        self._headers: dict[bytes, bytes] = {}
        self._num_header_bytes = 0
        self._body = bytearray()

    # What the transport calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._open.add(self)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def connection_lost(self, error: Exception | None) -> None:
        self._open.discard(self)
        self._transport = None
        self._queue.clear()
        if self._reply is not None:
            self._reply.gone()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._refuse(HTTPStatus.BAD_REQUEST, "upgrades are not supported")
        except _TooLargeError as error:
            self._refuse(error.status, "the request is too large")
        except httptools.HttpParserError as error:
            cause = error.__context__
            if isinstance(cause, _TooLargeError):
                self._refuse(cause.status, "the request is too large")
            else:
                self._refuse(HTTPStatus.BAD_REQUEST, "not a valid HTTP request")

    # What the parser calls.

    def on_message_begin(self) -> None:
        self._begin()

    def on_url(self, url: bytes) -> None:
        self._url += url
        self._count_header(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_header(len(name) + len(value))
        self._headers[name.lower()] = value
        if name.lower() == b"expect":
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._body += body
        if len(self._body) > MAX_BODY_BYTES:
            raise _TooLargeError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)

    def on_message_complete(self) -> None:
        path = self._url.split(b"?", 1)[0].decode("latin-1")
        method = self._parser.get_method().decode("latin-1")
        keep_alive = self._parser.should_keep_alive()
        self._queue.append(Request(method, path, self._headers, bytes(self._body), keep_alive))
        self._next()

    def _count_header(self, num_bytes: int) -> None:
        self._num_header_bytes += num_bytes
        if self._num_header_bytes > MAX_HEADER_BYTES:
            raise _TooLargeError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)

    # What replies call.

    def write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def reply_is_over(self, keep_alive: bool) -> None:
        self._reply = None
        if not keep_alive:
            self._queue.clear()
            if self._transport is not None:
                self._transport.close()
        self._next()

    def _next(self) -> None:
        """Answers go out in the order of the requests: one at a time."""
        if self._reply is None and self._queue:
            request = self._queue.popleft()
            self._reply = Reply(self, request.keep_alive)
            self._handler(request, self._reply)

    def _refuse(self, status: int, message: str) -> None:
        if self._reply is not None:  # the answer before would be cut in two
            self.abort()
            return
        body = {"error": {"message": message, "type": "BadRequestError", "param": None, "code": int(status)}}
        Reply(self, keep_alive=False).json(status, body)


class _TooLargeError(Exception):
    def __init__(self, status: HTTPStatus) -> None:
        self.status = status


class Listener:
    """A port, its open connections, and their handler."""

    def __init__(self, host: str, port: int, handler: Handler) -> None:
        self.host = host
        self.port = port  # 0 = any; the real one once it is open
        self._handler = handler
        self._connections: set[Connection] = set()
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: Connection(self._handler, self._connections), self.host, self.port, backlog=1024
        )
        self.port = self._server.sockets[0].getsockname()[1]

    def close(self) -> None:
        """Take no more connections, and break those there are."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self.reset_all()

    def reset_all(self) -> None:
        for connection in tuple(self._connections):
            connection.abort()
