"""Connections to one replica: kept alive, reused, one request at a time on each.

How far the response to a request has come:

    SILENT ──first byte──► IN_HEAD ──end of head──► IN_BODY ──end of message──► COMPLETE
      ▲                                                                            │
      └──────────────── the connection is back in its pool ◄──────────────────────┘

A message whose head is known (heads.py) goes from SILENT back to the pool at once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from pathlib import Path
from time import monotonic
from typing import Protocol, cast

import httptools

from pointsman.errors import reason_of
from pointsman.router.http.address import Address
from pointsman.router.http.heads import Known, known_head
from pointsman.router.http.inbox import Inbox, running_inbox
from pointsman.router.http.limits import Limits
from pointsman.router.http.messages import EVENT_STREAM, LOAD_REPORT, AnswerHead, Headers, passed_to_client
from pointsman.router.http.sockets import is_out_of_files, no_delay
from pointsman.router.http.tls import server_side_tls

OUT_OF_FILES = "the router has no file descriptor left"
_TIMED_OUT = "timed out"
SILENT, IN_HEAD, IN_BODY, COMPLETE = range(4)
# How one whole chunk begins, by its length with everything.
_CHUNK_STARTS = {len(b"%x\r\n\r\n" % size) + size: b"%x\r\n" % size for size in range(1, 1 << 13)}


class _NoAnswerError(Exception):
    """Stops the parser: what comes cannot be passed on."""


class Receiver(Protocol):
    """Who sent the request; learns of the response as it comes."""

    def on_connected(self, connection: UpstreamConnection) -> None: ...

    def on_head(self, status: int, reason: bytes, headers: Headers, length: int | None) -> None: ...

    def on_body(self, data: bytes) -> None: ...

    def on_chunk(self, raw: bytes, data: bytes) -> None:
        """One chunk; `raw` is how it came over the wire."""
        self.on_body(data)
        self.on_read()

    def on_whole(self, head: AnswerHead, data: bytes) -> None:
        """A good response in one piece."""
        self.on_head(head.status, head.reason, head.headers, len(data))
        self.on_body(data)
        self.on_complete()

    def on_read(self) -> None:
        """All that has come so far has been handed on."""

    def on_complete(self) -> None: ...

    def on_failure(self, reason: str, *, is_stale: bool) -> None:
        """There will be no complete response.

        `is_stale`: the server closed an idle connection just as we used it again.
        """


class UpstreamConnection(asyncio.Protocol):
    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._transport: asyncio.Transport
        self._inbox: Inbox
        self._parser = httptools.HttpResponseParser(self)
        self._receiver: Receiver | None = None
        self._num_sent = 0
        self._is_for_head = False
        self._is_last = False
        self._is_paused = False
        self.idle_since = 0.0
        self._reset()

    @property
    def is_reused(self) -> bool:
        return self._num_sent > 1

    def _reset(self) -> None:
        self._status = 0
        self._reason = b""
        self._headers: Headers = []
        self._keeps_alive = False
        self._chunks: list[bytes] = []
        self._length: int | None = None
        self._progress = SILENT
        self._is_head_told = False
        self._is_between_chunks = False
        self._is_until_close = False
        self._is_excessive = False

    # --- what asyncio says ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._inbox = running_inbox()
        no_delay(transport)

    def data_received(self, data: bytes) -> None:
        if self._receiver is None:  # nobody asked; the next request must not take it for its answer
            self.abort()
            return
        inbox = self._inbox
        if not inbox.arrived:
            inbox.plan()
        inbox.arrived.append((self, data))

    def read(self, data: bytes) -> None:
        receiver = self._receiver
        if receiver is None:  # nobody wants it any more, and the next request must not take it for its answer
            self.abort()
            return
        if self._is_between_chunks:
            start = _CHUNK_STARTS.get(len(data))
            if start is not None and data[: len(start)] == start and data[-2:] == b"\r\n":
                receiver.on_chunk(data, data[len(start) : -2])
                return
        is_first = self._progress == SILENT
        if is_first:
            known = self._pool.known
            if known is not None and not self._is_for_head and (body := known.body(data)) is not None:
                self._release()
                receiver.on_whole(known.head, body)
                return
            self._progress = IN_HEAD
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if self._progress != COMPLETE:
                self._fail(f"malformed response: {error}")
                return
            self._is_excessive = True
        self._is_between_chunks = self._is_between_chunks and data.endswith(b"\r\n")
        if is_first and self._progress == COMPLETE:
            self._remember(data)
        if self._progress >= IN_BODY and not self._is_head_told:
            self._is_head_told = True
            receiver.on_head(self._status, self._reason, self._headers, self._length)
            receiver = self._receiver
        if self._chunks and receiver is not None:
            chunks, self._chunks = self._chunks, []
            receiver.on_body(chunks[0] if len(chunks) == 1 else b"".join(chunks))
        if receiver is not None and self._receiver is receiver:
            if self._progress == COMPLETE:
                self._release()
                receiver.on_complete()
            else:
                receiver.on_read()

    def eof_received(self) -> bool:
        self._inbox.empty()
        if self._receiver is None:
            self._pool.forget(self)
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self._inbox.empty()
        self._pool.forget(self)
        receiver, self._receiver = self._receiver, None
        if receiver is None:
            return
        if self._is_until_close and self._progress >= IN_BODY and error is None:
            receiver.on_complete()
        elif self._progress != SILENT:
            receiver.on_failure("response cut short", is_stale=False)
        else:
            receiver.on_failure("connection lost before an answer", is_stale=self.is_reused)

    # --- what the parser says ---

    def on_message_begin(self) -> None:
        if self._progress == COMPLETE:
            self._is_excessive = True

    def on_status(self, part: bytes) -> None:
        self._reason += part

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._progress == IN_HEAD:  # else it is a trailer
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self._progress == COMPLETE:
            return
        self._status = self._parser.get_status_code()
        if self._status < 100:
            raise _NoAnswerError
        if self._status < 200:
            return
        self._progress = IN_BODY
        self._keeps_alive = self._parser.should_keep_alive()  # later it has forgotten
        length, is_chunked = None, False
        for name, value in self._headers:
            if name == b"content-length":
                length = int(value)
            elif name == b"transfer-encoding":
                if value.lower() != b"chunked":  # we asked for nothing else, and cannot undo it
                    raise _NoAnswerError
                is_chunked = True
        self._is_between_chunks = is_chunked
        is_bodiless = self._is_for_head or self._status in (204, 304)
        self._length = None if is_chunked else length
        self._is_until_close = length is None and not is_chunked and not is_bodiless
        if self._is_for_head:  # the parser waits for a body that will not come: it cannot be used again
            self._progress = COMPLETE
            self._is_excessive = True

    def on_body(self, part: bytes) -> None:
        if self._progress != COMPLETE:
            self._chunks.append(part)

    def on_chunk_header(self) -> None:
        self._is_between_chunks = False

    def on_chunk_complete(self) -> None:
        self._is_between_chunks = True

    def on_message_complete(self) -> None:
        if self._status < 200:  # an interim response; the real one follows
            self._reason, self._headers = b"", []
        else:
            self._progress = COMPLETE

    # --- what the receiver says ---

    def send(
        self,
        receiver: Receiver,
        message: bytes,
        *,
        is_for_head: bool = False,
        is_last: bool = False,
    ) -> None:
        """`is_for_head`: of a HEAD request; `is_last`: the connection is not used again."""
        self._is_last = is_last
        self._receiver = receiver
        self._num_sent += 1
        self._is_for_head = is_for_head
        self._transport.write(message)

    def hand_over(self, receiver: Receiver) -> None:
        """Hand what is still to come to another receiver."""
        self._receiver = receiver

    def abort(self) -> None:
        """Nobody waits for this response any more. The server sees it and stops its work."""
        self._receiver = None
        self._pool.forget(self)
        self._transport.abort()

    def close(self) -> None:
        self._transport.close()

    def pause(self) -> None:
        self._is_paused = True
        self._transport.pause_reading()

    def resume(self) -> None:
        self._is_paused = False
        self._transport.resume_reading()

    def _remember(self, data: bytes) -> None:
        """Keep the head, so that the next response like this one needs no parser."""
        is_good = 200 <= self._status < 300 and self._status != 204
        if not is_good or not self._keeps_alive or self._is_excessive:
            return
        names = dict(self._headers)
        if LOAD_REPORT not in names and not names.get(b"content-type", b"").startswith(EVENT_STREAM):
            lines = b"".join(passed_to_client(self._headers))
            head = AnswerHead(self._status, self._reason, self._headers, lines)
            self._pool.known = known_head(data, head)

    def _release(self) -> None:
        """The response is complete: back to the pool, if the connection can be used again."""
        self._receiver = None
        has_parsed = (
            self._progress != SILENT
        )  # else the head was known, of a server that keeps connections open
        is_wanted = not has_parsed or (self._keeps_alive and not self._is_excessive)
        # A paused one would not notice that the server closes it.
        if is_wanted and not self._is_last and not self._is_paused:
            if has_parsed:
                self._reset()
            self.idle_since = monotonic()
            self._pool.idle.append(self)
        else:
            self._pool.forget(self)
            self._transport.abort()

    def _fail(self, reason: str) -> None:
        receiver, self._receiver = self._receiver, None
        self._pool.forget(self)
        self._transport.abort()
        if receiver is not None:
            receiver.on_failure(reason, is_stale=False)


class Pool:
    """The connections to one server."""

    def __init__(
        self, address: Address, limits: Limits, ca: Path | None = None, tls_name: str | None = None
    ) -> None:
        """`ca` and `tls_name`, for https: as in `Backend`."""
        self.address = address
        self.known: Known[AnswerHead] | None = None  # of the last whole answer; the next may have the same
        self._limits = limits
        is_secure = address.scheme == "https"
        self._tls = server_side_tls(ca) if is_secure else None
        self._tls_name = tls_name or address.host if is_secure else None
        self.idle: deque[UpstreamConnection] = deque()  # use the last: the others may grow old
        self._open: set[UpstreamConnection] = set()
        self._dialling: set[asyncio.Task[None]] = set()

    @property
    def num_open(self) -> int:
        return len(self._open)

    def dial(self, receiver: Receiver) -> asyncio.Task[None]:
        """Open a new connection; the receiver is told. Cancel the task when it is no longer wanted."""
        task = asyncio.get_running_loop().create_task(self._dial(receiver))
        self._dialling.add(task)
        task.add_done_callback(self._dialling.discard)
        return task

    async def _dial(self, receiver: Receiver) -> None:
        try:
            connection = await self.connect()
        except OSError as error:
            reason = OUT_OF_FILES if is_out_of_files(error) else f"cannot connect: {_why(error)}"
            receiver.on_failure(reason, is_stale=False)
        else:
            receiver.on_connected(connection)

    async def connect(self) -> UpstreamConnection:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self._limits.connect_timeout_s):
            _, connection = await loop.create_connection(
                lambda: UpstreamConnection(self),
                self.address.host,
                self.address.port,
                ssl=self._tls,
                server_hostname=self._tls_name,
            )
        self._open.add(connection)
        return connection

    def forget(self, connection: UpstreamConnection) -> None:
        self._open.discard(connection)
        if connection in self.idle:
            self.idle.remove(connection)

    def close_old(self, now: float) -> None:
        while self.idle and now - self.idle[0].idle_since > self._limits.upstream_keep_alive_s:
            self.idle.popleft().close()

    def close(self) -> None:
        for task in list(self._dialling):
            task.cancel()
        for connection in list(self._open):
            connection.abort()


def _why(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return _TIMED_OUT
    return reason_of(error)
