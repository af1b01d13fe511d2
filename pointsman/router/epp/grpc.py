"""gRPC as a picker needs it: the server's side of HTTP/2 on the router's own event loop, calls as objects.

Why not a library: measured in front of the same Envoy (benchmarks/envoy_picker.py --only costs, bodies
BUFFERED and STREAMED), a request costs the picker 0.39 ms of CPU time with grpcio, whose asyncio server hands
every message from thread to thread, and 0.32 ms with h2. What is left out here is what Envoy does not use:
priorities, pushes, compressed messages. Header compression is decoded by `hpack`; our own headers need none.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Callable
from typing import Protocol, cast

from hpack import Decoder
from hpack.exceptions import HPACKError

OK, NOT_FOUND, UNIMPLEMENTED, INTERNAL = 0, 5, 12, 13
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _PRIORITY, _RESET, _SETTINGS, _PUSH, _PING, _GOAWAY, _WINDOW, _CONTINUATION = range(10)
_END_STREAM, _ACK, _END_HEADERS, _PADDED, _HAS_PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20
_INITIAL_WINDOW_SIZE, _MAX_FRAME_SIZE = 4, 5
_MAX_WINDOW = 2**31 - 1
_DEFAULT_WINDOW = 65535
_MAX_FRAME = 16384  # that we accept, and send unless the other side takes more
_MAX_HEADERS = 1 << 18
_MAX_MESSAGE = 1 << 28
_REPLENISH = 1 << 24  # bytes received before the other side may send as many more
_PROTOCOL_ERROR, _NO_ERROR = 1, 0


def _literal(name: bytes, value: bytes) -> bytes:
    """A header field that is not compressed (RFC 7541, 6.2.2)."""
    return b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value


_STATUS_200 = b"\x88"
_HEAD = _STATUS_200 + _literal(b"content-type", b"application/grpc")
_PREFIX = struct.Struct(">?I")


class Call(Protocol):
    """What is done about one call."""

    def hear(self, message: bytes) -> None: ...

    def hung_up(self) -> None:
        """Nothing more comes from the other side."""


class Stream:
    """The other side of a call: what is said there goes out."""

    def __init__(self, connection: GrpcConnection, number: int, window: int) -> None:
        self._connection = connection
        self.number = number
        self.window = window  # bytes that the other side is ready to read
        self.received = bytearray()
        self.unsent: deque[bytes] = deque()
        self.status: int | None = None  # once all is said
        self.has_headers = False
        self.has_ended = False  # the other side
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


class ProtocolError(Exception):
    """The other side does not speak HTTP/2 as we understand it."""


class GrpcConnection(asyncio.Protocol):
    def __init__(self, methods: Methods, connections: set[GrpcConnection]) -> None:
        self._methods = methods
        self._connections = connections
        self._streams: dict[int, Stream] = {}
        self._last_number = 0
        self._decoder = Decoder()
        self._decoder.max_header_list_size = _MAX_HEADERS
        self._data = bytearray()
        self._has_preface = False
        self._headers: tuple[int, int, bytearray] | None = None  # stream, flags and block, until it is whole
        self._num_received = 0
        # What the other side allows.
        self._window = _DEFAULT_WINDOW
        self._stream_window = _DEFAULT_WINDOW
        self._max_frame = _MAX_FRAME
        self._out: list[bytes] = []
        self._is_reading = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._connections.add(self)
        self._send(_SETTINGS, 0, 0, struct.pack(">HI", _INITIAL_WINDOW_SIZE, _MAX_WINDOW))
        self._send(_WINDOW, 0, 0, struct.pack(">I", _MAX_WINDOW - _DEFAULT_WINDOW))
        self._write()

    def connection_lost(self, error: Exception | None) -> None:
        self._connections.discard(self)
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.status = OK  # nobody listens
            if stream.call is not None:
                stream.call.hung_up()

    def close(self) -> None:
        self._say_goodbye(_NO_ERROR)

    def data_received(self, data: bytes) -> None:
        self._data += data
        self._is_reading = True  # what is said meanwhile goes out together
        try:
            self._read()
        except (ProtocolError, HPACKError, struct.error, IndexError):
            self._say_goodbye(_PROTOCOL_ERROR)
        finally:
            self._is_reading = False
        self._write()

    # --- what comes ---

    def _read(self) -> None:
        data, start = self._data, 0
        if not self._has_preface:
            if not _PREFACE.startswith(data[: len(_PREFACE)]):
                raise ProtocolError
            if len(data) < len(_PREFACE):
                return
            self._has_preface, start = True, len(_PREFACE)
        while len(data) >= start + 9:
            length = int.from_bytes(data[start : start + 3], "big")
            if length > _MAX_FRAME:
                raise ProtocolError
            end = start + 9 + length
            if len(data) < end:
                break
            kind, flags = data[start + 3], data[start + 4]
            number = int.from_bytes(data[start + 5 : start + 9], "big") & _MAX_WINDOW
            self._on_frame(kind, flags, number, bytes(data[start + 9 : end]))
            start = end
        del data[:start]

    def _on_frame(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        if self._headers is not None and kind != _CONTINUATION:
            raise ProtocolError
        if kind == _DATA:
            self._on_data(flags, number, payload)
        elif kind == _HEADERS:
            block = _without_padding(flags, payload)
            self._headers = number, flags, bytearray(block[5:] if flags & _HAS_PRIORITY else block)
            self._on_headers(flags)
        elif kind == _CONTINUATION:
            if self._headers is None or self._headers[0] != number:
                raise ProtocolError
            self._headers[2].extend(payload)
            self._on_headers(flags)
        elif kind == _RESET:
            stream = self._streams.pop(number, None)
            if stream is not None:
                stream.status = OK  # nobody listens
                if stream.call is not None:
                    stream.call.hung_up()
        elif kind == _SETTINGS and not flags & _ACK:
            self._on_settings(payload)
        elif kind == _PING and not flags & _ACK:
            self._send(_PING, _ACK, 0, payload)
        elif kind == _WINDOW:
            self._on_window(number, struct.unpack(">I", payload)[0] & _MAX_WINDOW)
        elif kind == _PUSH:
            raise ProtocolError

    def _on_data(self, flags: int, number: int, payload: bytes) -> None:
        self._num_received += len(payload)
        if self._num_received >= _REPLENISH:
            self._send(_WINDOW, 0, 0, struct.pack(">I", self._num_received))
            self._num_received = 0
        stream = self._streams.get(number)
        if stream is not None:
            stream.received += _without_padding(flags, payload)
            self._hear(stream)
            if flags & _END_STREAM:
                self._on_end(stream)

    def _on_headers(self, flags: int) -> None:
        assert self._headers is not None
        number, first_flags, block = self._headers
        if len(block) > _MAX_HEADERS:
            raise ProtocolError
        if not flags & _END_HEADERS:
            return
        self._headers = None
        headers = self._decoder.decode(bytes(block), raw=True)
        stream = self._streams.get(number)
        if stream is None and number > self._last_number:
            self._last_number = number
            stream = self._streams[number] = Stream(self, number, self._stream_window)
            path = next((value for name, value in headers if name == b":path"), b"")
            stream.call = self._methods(bytes(path), stream)
            if stream.call is None:
                stream.end(UNIMPLEMENTED)
        if stream is not None and first_flags & _END_STREAM:
            self._on_end(stream)

    def _on_end(self, stream: Stream) -> None:
        stream.has_ended = True
        if stream.call is not None:
            stream.call.hung_up()

    def _on_settings(self, payload: bytes) -> None:
        for name, value in struct.iter_unpack(">HI", payload):
            if name == _INITIAL_WINDOW_SIZE:
                change, self._stream_window = value - self._stream_window, value
                for stream in self._streams.values():
                    stream.window += change
            elif name == _MAX_FRAME_SIZE:
                self._max_frame = value
        self._send(_SETTINGS, _ACK, 0)
        self._flush_all()

    def _on_window(self, number: int, more: int) -> None:
        if number == 0:
            self._window += more
            self._flush_all()
        elif (stream := self._streams.get(number)) is not None:
            stream.window += more
            self.flush(stream)

    def _hear(self, stream: Stream) -> None:
        received = stream.received
        while len(received) >= _PREFIX.size and stream.status is None:
            is_compressed, length = _PREFIX.unpack_from(received)
            if is_compressed or length > _MAX_MESSAGE:
                stream.end(UNIMPLEMENTED)
                return
            end = _PREFIX.size + length
            if len(received) < end:
                return
            message = bytes(received[_PREFIX.size : end])
            del received[:end]
            if stream.call is not None:
                try:
                    stream.call.hear(message)
                except Exception as error:  # the other calls of this connection have nothing to do with it
                    about = {"message": "cannot handle a message", "exception": error}
                    asyncio.get_running_loop().call_exception_handler(about)
                    stream.end(INTERNAL)
                    stream.call.hung_up()

    # --- what goes ---

    def _flush_all(self) -> None:
        for stream in list(self._streams.values()):
            if stream.unsent:
                self.flush(stream)

    def flush(self, stream: Stream) -> None:
        """Send as much as the other side is ready to read."""
        number = stream.number
        if number not in self._streams:
            return
        if not stream.has_headers:
            stream.has_headers = True
            self._send(_HEADERS, _END_HEADERS, number, _HEAD)
        while stream.unsent:
            most = min(stream.window, self._window, self._max_frame)
            message = stream.unsent.popleft()
            piece = message[: max(0, most)]
            if len(piece) < len(message):
                stream.unsent.appendleft(message[len(piece) :])
            if not piece:
                break
            stream.window -= len(piece)
            self._window -= len(piece)
            self._send(_DATA, 0, number, piece)
        if stream.status is not None and not stream.unsent:
            trailers = _literal(b"grpc-status", b"%d" % stream.status)
            self._send(_HEADERS, _END_HEADERS | _END_STREAM, number, trailers)
            if not stream.has_ended:  # it need not say more
                self._send(_RESET, 0, number, struct.pack(">I", _NO_ERROR))
            del self._streams[number]
        if not self._is_reading:
            self._write()

    def _send(self, kind: int, flags: int, number: int, payload: bytes = b"") -> None:
        head = len(payload).to_bytes(3, "big") + bytes((kind, flags)) + number.to_bytes(4, "big")
        self._out.append(head + payload)

    def _write(self) -> None:
        out, self._out = self._out, []
        if out and not self._transport.is_closing():
            self._transport.write(b"".join(out))

    def _say_goodbye(self, error: int) -> None:
        self._send(_GOAWAY, 0, 0, struct.pack(">II", self._last_number, error))
        self._write()
        self._transport.close()


def _without_padding(flags: int, payload: bytes) -> bytes:
    return payload[1 : len(payload) - payload[0]] if flags & _PADDED else payload
