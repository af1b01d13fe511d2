"""Emulated servers on the router's HTTP server: replies sent bit by bit, and ports that can be broken."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from time import monotonic
from typing import Any

from pointsman.router.http.downstream import ClientConnection
from pointsman.router.http.limits import Limits
from pointsman.router.http.listening import listen, port_of
from pointsman.router.http.messages import Answer, HttpRequest, RequestHead
from pointsman.router.http.service import Job

LIMITS = Limits(max_body_bytes=32 << 20, max_header_bytes=64 << 10)
NO_HEADERS: Mapping[str, str] = {}
_TICK_S = 0.5


class Reply:
    """The answer to one request, and the `Job` of its connection.

    `on_gone` is called if the client leaves before the answer is complete.
    """

    def __init__(self, client: ClientConnection) -> None:
        self._client = client
        self.is_over = False
        self.on_gone: Callable[[], None] | None = None

    def whole(
        self, status: int, content_type: str, body: bytes, headers: Mapping[str, str] = NO_HEADERS
    ) -> None:
        if not self.is_over:
            self.is_over = True
            named = tuple((name.encode(), value.encode()) for name, value in headers.items())
            self._client.answer(Answer(status, body, content_type.encode(), named))

    def json(self, status: int, value: Any, headers: Mapping[str, str] = NO_HEADERS) -> None:
        self.whole(status, "application/json", json.dumps(value).encode(), headers)

    def start(self, content_type: str, headers: Mapping[str, str] = NO_HEADERS) -> None:
        named = {"content-type": content_type, **headers}
        lines = "".join(f"{name}: {value}\r\n" for name, value in named.items())
        self._client.begin(200, b"OK", lines.encode(), None)
        self._client.flush()

    def send(self, data: bytes) -> None:
        if not self.is_over:
            self._client.write(data)
            self._client.flush()

    def end(self) -> None:
        if not self.is_over:
            self.is_over = True
            self._client.end()

    def reset(self) -> None:
        """Break the connection."""
        self.is_over = True
        self._client.abort()

    def cancel(self) -> None:
        """The client is gone."""
        if not self.is_over:
            self.is_over = True
            if self.on_gone is not None:
                self.on_gone()

    # What a slow client has not read yet waits in memory: an engine does not stop for it.

    def pause(self) -> None: ...

    def resume(self) -> None: ...


Handler = Callable[[HttpRequest, Reply], None]


class Listener:
    """A port, its open connections, and their handler: a `Service` of client connections."""

    is_draining = False

    def __init__(self, host: str, port: int, handler: Handler) -> None:
        self.host = host
        self.port = port  # 0 = any; the real one once it is open
        self._handler = handler
        self._clients: set[ClientConnection] = set()
        self._server: asyncio.Server | None = None
        self._ticking: asyncio.Task[None] | None = None

    async def open(self) -> None:
        self._server = await listen(self, LIMITS, self.host, self.port)
        self.port = port_of(self._server)
        self._ticking = asyncio.get_running_loop().create_task(self._tick())

    def close(self) -> None:
        """Take no more connections, and break those there are."""
        if self._server is not None and self._ticking is not None:
            self._server.close()
            self._ticking.cancel()
            self._server = self._ticking = None
        self.reset_all()

    def reset_all(self) -> None:
        for client in tuple(self._clients):
            client.disconnect()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            for client in tuple(self._clients):
                client.check(monotonic())

    # --- what client connections say ---

    def screen(self, head: RequestHead, client: ClientConnection) -> Answer | None:
        return None

    def handle(self, request: HttpRequest, client: ClientConnection) -> Job:
        reply = Reply(client)
        self._handler(request, reply)
        return reply

    def opened(self, client: ClientConnection) -> None:
        self._clients.add(client)

    def closed(self, client: ClientConnection) -> None:
        self._clients.discard(client)
