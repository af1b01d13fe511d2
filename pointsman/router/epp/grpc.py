"""gRPC as a picker needs it, on the router's own event loop: HTTP/2 by the library `h2`, calls as objects.

grpcio would do, but its asyncio server hands every message from thread to thread: in front of the same Envoy
(benchmarks/envoy_picker.py, first version) it added 1.1 to 1.4 ms to a request and took 0.39 ms of CPU time.
"""

from __future__ import annotations

import asyncio
import ssl
import struct
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, cast

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    RequestReceived,
    StreamEnded,
    StreamReset,
    WindowUpdated,
)
from h2.exceptions import ProtocolError
from h2.settings import SettingCodes

OK, NOT_FOUND, UNIMPLEMENTED, INTERNAL = 0, 5, 12, 13
_MAX_WINDOW = 2**31 - 1
_STREAM_WINDOW = 2**24  # bytes of a request that may be under way
_MAX_STREAMS = 2**20
_HEADERS = [(b":status", b"200"), (b"content-type", b"application/grpc")]
_PREFIX = struct.Struct(">?I")


class Call(Protocol):
    """What is done about one call."""

    def hear(self, message: bytes) -> None: ...

    def hung_up(self) -> None:
        """Nothing more comes from the other side."""


class Stream:
    """The other side of a call: what is said there goes out."""

    def __init__(self, connection: GrpcConnection, number: int) -> None:
        self._connection = connection
        self.number = number
        self.received = bytearray()
        self.unsent: deque[bytes] = deque()
        self.status: int | None = None  # once all is said
        self.has_headers = False
        self.call: Call | None = None

    def say(self, message: bytes) -> None:
        if self.status is None:
            self.unsent.append(_PREFIX.pack(False, len(message)) + message)
            self._connection.flush(self)

    def end(self, status: int = OK) -> None:
        if self.status is None:
            self.status = status
            self._connection.flush(self)


# From the path of a call; None: there is none of that name.
Methods = Callable[[bytes, Stream], Call | None]


class GrpcConnection(asyncio.Protocol):
    def __init__(self, methods: Methods, connections: set[GrpcConnection]) -> None:
        self._methods = methods
        self._connections = connections
        self._streams: dict[int, Stream] = {}
        self._h2 = H2Connection(
            H2Configuration(client_side=False, header_encoding=None, validate_outbound_headers=False)
        )

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._connections.add(self)
        self._is_reading = False
        self._h2.update_settings(
            {
                SettingCodes.INITIAL_WINDOW_SIZE: _STREAM_WINDOW,
                SettingCodes.MAX_CONCURRENT_STREAMS: _MAX_STREAMS,
            }
        )
        self._h2.initiate_connection()
        self._h2.increment_flow_control_window(_MAX_WINDOW - 65535)
        self._write()

    def connection_lost(self, error: Exception | None) -> None:
        self._connections.discard(self)
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.status = OK
            if stream.call is not None:
                stream.call.hung_up()

    def data_received(self, data: bytes) -> None:
        self._is_reading = True  # what is said meanwhile goes out at once
        try:
            for event in self._h2.receive_data(data):
                self._on(event)
        except ProtocolError:  # h2 has written the farewell
            self._write()
            self._transport.close()
        finally:
            self._is_reading = False
        self._write()

    def close(self) -> None:
        self._h2.close_connection()
        self._write()
        self._transport.close()

    def _on(self, event: Event) -> None:
        if isinstance(event, DataReceived):
            number = event.stream_id
            self._h2.acknowledge_received_data(event.flow_controlled_length, number)
            stream = self._streams.get(number)
            if stream is not None:
                stream.received += event.data
                self._hear(stream)
        elif isinstance(event, RequestReceived):
            stream = self._streams[event.stream_id] = Stream(self, event.stream_id)
            path = next((value for name, value in event.headers if name == b":path"), b"")
            stream.call = self._methods(bytes(path), stream)
            if stream.call is None:
                stream.end(UNIMPLEMENTED)
        elif isinstance(event, StreamEnded | StreamReset):
            stream = self._streams.get(event.stream_id)
            if stream is not None:
                if isinstance(event, StreamReset):
                    del self._streams[event.stream_id]
                    stream.status = OK  # nobody listens
                if stream.call is not None:
                    stream.call.hung_up()
        elif isinstance(event, WindowUpdated):
            for stream in list(self._streams.values()):
                self.flush(stream)
        elif isinstance(event, ConnectionTerminated):
            self._transport.close()

    def _hear(self, stream: Stream) -> None:
        received = stream.received
        while len(received) >= _PREFIX.size:
            is_compressed, length = _PREFIX.unpack_from(received)
            if is_compressed:
                stream.end(UNIMPLEMENTED)
                return
            end = _PREFIX.size + length
            if len(received) < end:
                return
            message = bytes(received[_PREFIX.size : end])
            del received[:end]
            if stream.call is not None:
                stream.call.hear(message)

    def flush(self, stream: Stream) -> None:
        """Send as much as the other side wants to read now."""
        number = stream.number
        if number not in self._streams:
            return
        if not stream.has_headers and (stream.unsent or stream.status is not None):
            stream.has_headers = True
            self._h2.send_headers(number, _HEADERS)
        while stream.unsent:
            most = min(self._h2.local_flow_control_window(number), self._h2.max_outbound_frame_size)
            message = stream.unsent.popleft()
            if most < len(message):
                stream.unsent.appendleft(message[most:])
                if most <= 0:
                    break
            self._h2.send_data(number, message[:most])
        if stream.status is not None and not stream.unsent:
            self._h2.send_headers(number, [(b"grpc-status", b"%d" % stream.status)], end_stream=True)
            if self._h2.streams[number].open:  # the other side has not ended it, and need not
                self._h2.reset_stream(number, ErrorCodes.NO_ERROR)
            del self._streams[number]
        if not self._is_reading:
            self._write()

    def _write(self) -> None:
        data = self._h2.data_to_send()
        if data and not self._transport.is_closing():
            self._transport.write(data)


def grpc_tls(cert: Path, key: Path | None) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["h2"])
    context.load_cert_chain(cert, key)
    return context
