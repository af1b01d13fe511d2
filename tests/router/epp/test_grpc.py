"""Our side of gRPC against the client of grpcio, and against those who do not speak HTTP/2."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("hpack")
pytest.importorskip("grpc")
import grpc

from pointsman.router.epp.grpc import Call, GrpcConnection, Stream
from pointsman.router.http.tls import HTTP_2, client_side_tls
from tests.router.certificates import new_authority
from tests.router.harness import run, until

MANY = 2000
BROKEN = b"broken"


class Echo:
    """Says every message again."""

    num_hung_up = 0

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def hear(self, message: bytes) -> None:
        if message == BROKEN:
            raise ValueError(message)
        self._stream.say(message)

    def hung_up(self) -> None:
        Echo.num_hung_up += 1
        self._stream.end()


@asynccontextmanager
async def server(tls: Any = None) -> AsyncIterator[int]:
    connections: set[GrpcConnection] = set()

    def methods(path: bytes, stream: Stream) -> Call | None:
        return Echo(stream) if path == b"/test/Echo" else None

    listening = await asyncio.get_running_loop().create_server(
        lambda: GrpcConnection(methods, connections), "127.0.0.1", 0, ssl=tls
    )
    try:
        yield listening.sockets[0].getsockname()[1]
    finally:
        listening.close()
        for connection in list(connections):
            connection.close()
        await until(lambda: not connections)


async def echoed(channel: Any, messages: list[bytes], **options: Any) -> list[bytes]:
    call = channel.stream_stream("/test/Echo")(**options)
    for message in messages:
        await call.write(message)
    heard = [await call.read() for _ in messages]
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
    assert await call.code() == grpc.StatusCode.OK
    return heard


def test_messages_of_every_size_come_back_on_many_streams_at_once() -> None:
    """Some need several frames, more than a window of flow control, and headers beyond a frame."""
    messages = [os.urandom(size) for size in (0, 1, 16379, 16384, 70_000, 700_000)]

    async def scenario() -> None:
        async with server() as port, grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            assert await echoed(channel, messages) == messages
            long_header = (("x-long", "y" * 7000), ("x-other", "z" * 7000), ("x-third", "z" * 7000))
            assert await echoed(channel, [b"a"], metadata=long_header) == [b"a"]
            found = await asyncio.gather(*[echoed(channel, [b"%d" % k]) for k in range(MANY)])
            assert found == [[b"%d" % k] for k in range(MANY)]

    run(scenario, timeout_s=60)


def test_unknown_methods_and_clients_that_leave() -> None:
    async def scenario() -> None:
        async with server() as port, grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary("/test/Other")(b"")
            assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
            before = Echo.num_hung_up
            call = channel.stream_stream("/test/Echo")()
            await call.write(b"a")
            assert await call.read() == b"a"
            call.cancel()
            await until(lambda: Echo.num_hung_up == before + 1)
            assert await echoed(channel, [b"b"]) == [b"b"]

    run(scenario)


def test_a_message_that_breaks_its_call_leaves_the_others_alone() -> None:
    async def scenario() -> None:
        told: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, about: told.append(about["exception"]))
        async with server() as port, grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            other = channel.stream_stream("/test/Echo")()
            await other.write(b"a")
            assert await other.read() == b"a"
            broken = channel.stream_stream("/test/Echo")()
            await broken.write(BROKEN)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await broken.read()
            assert caught.value.code() == grpc.StatusCode.INTERNAL
            await other.write(b"b")
            assert await other.read() == b"b"
            await other.done_writing()
            assert await other.code() == grpc.StatusCode.OK
        assert [str(error) for error in told] == [str(ValueError(BROKEN))]

    run(scenario)


def test_tls(tmp_path: Path) -> None:
    authority = new_authority(tmp_path)
    tls = client_side_tls(authority.certificate("DNS:localhost"), None, HTTP_2)
    credentials = grpc.ssl_channel_credentials(authority.ca.read_bytes())

    async def scenario() -> None:
        async with (
            server(tls) as port,
            grpc.aio.secure_channel(f"localhost:{port}", credentials) as channel,
        ):
            assert await echoed(channel, [b"a" * 100_000]) == [b"a" * 100_000]

    run(scenario)


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nhost: x\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff\xff\xff\x00\x00\x00\x00\x00\x01",  # a frame of 16 MB
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x04\x05\x04\x00\x00\x00\x01" + b"\x00" * 4,  # a push
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x04\x01\x04\x00\x00\x00\x01" + b"\xff" * 4,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x01\x09\x04\x00\x00\x00\x01" + b"\x00",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x01\x08\x00\x00\x00\x00\x00" + b"\x00",
    ],
)
def test_who_speaks_something_else_is_hung_up_on(data: bytes) -> None:
    async def scenario() -> None:
        async with server() as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(data)
            said = await asyncio.wait_for(reader.read(), 5)  # to its end
            assert b"\x07\x00" in said  # GOAWAY
            writer.close()

    run(scenario)
