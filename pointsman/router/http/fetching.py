"""Small questions to a server: health, metrics, models, the Kubernetes API."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from pointsman.errors import reason_of
from pointsman.router.http.messages import Headers
from pointsman.router.http.sockets import is_out_of_files
from pointsman.router.http.upstream import Pool, Receiver, UpstreamConnection


class Fetched(NamedTuple):
    status: int
    body: bytes


class FetchError(Exception):
    """There was no complete answer."""


class OutOfFilesError(FetchError):
    """Nobody was asked: the router has no file descriptor left."""


class _Fetch(Receiver):
    def __init__(self, head: bytes) -> None:
        self._head = head
        self._status = 0
        self._parts: list[bytes] = []
        self._connection: UpstreamConnection | None = None
        self.result: asyncio.Future[Fetched] = asyncio.get_running_loop().create_future()

    def on_connected(self, connection: UpstreamConnection) -> None:
        self._connection = connection
        connection.send(self, self._head, is_last=True)

    def on_head(self, status: int, reason: bytes, headers: Headers, length: int | None) -> None:
        self._status = status

    def on_body(self, data: bytes) -> None:
        self._parts.append(data)

    def on_read(self) -> None:
        pass

    def on_complete(self) -> None:
        self._connection = None
        if not self.result.done():
            self.result.set_result(Fetched(self._status, b"".join(self._parts)))

    def on_failure(self, reason: str, *, is_stale: bool) -> None:
        self._connection = None
        if not self.result.done():
            self.result.set_exception(FetchError(reason))

    def stop(self) -> None:
        if self._connection is not None:
            self._connection.abort()


async def fetch(pool: Pool, path: str, timeout_s: float, headers: bytes = b"") -> Fetched:
    """GET; raises FetchError if there is no answer in time."""
    address = pool.address
    target = f"{address.prefix}{path}".encode()
    # A connection of its own: that the server still accepts them is half of the answer.
    head = b"GET %b HTTP/1.1\r\nhost: %b\r\nconnection: close\r\n%b\r\n"
    receiver = _Fetch(head % (target, address.netloc.encode(), headers))
    try:
        async with asyncio.timeout(timeout_s):
            receiver.on_connected(await pool.connect())
            return await receiver.result
    except TimeoutError:
        raise FetchError("timed out") from None
    except OSError as error:
        kind = OutOfFilesError if is_out_of_files(error) else FetchError
        raise kind(reason_of(error)) from None
    finally:
        receiver.stop()
