"""Heads that were seen before: the shortcut must never see another request than the parser would."""

from __future__ import annotations

import asyncio
from typing import cast

import httptools
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pointsman.router.http.address import parse_url
from pointsman.router.http.heads import known_head
from pointsman.router.http.limits import Limits
from pointsman.router.http.messages import Headers
from pointsman.router.http.upstream import Pool, Receiver, UpstreamConnection
from tests.router import mock as replies
from tests.router.harness import cluster, post, run
from tests.router.mock import Heard, Mock, ok

LINES = st.sampled_from(
    [
        b"host: a",
        b"Content-Length: %d",
        b"content-length: %d",
        b"content-length: %d",
        b"content-length: 5",
        b"x-content-length: %d",
        b"x: content-length: %d",
        b"content-length:5",
        b"content-length: 05",
        b"content-length: 55",
        b"x-content-length: 5",
        b"x: content-length: 5",
        b"transfer-encoding: chunked",
        b"connection: close",
        b" content-length: 5",
        b"",
    ]
)
BODIES = st.sampled_from(
    [b"", b"12345", b"123\r\n", b"x" * 55, b"\r\n\r\n5", b"5\r\n12345\r\n0\r\n\r\n", b"GET"]
)


class Parsed:
    """What the parser makes of some bytes."""

    def __init__(self, data: bytes) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self.body = b""
        self.num_messages = self.num_complete = 0
        self.is_wrong = False
        self.parser = httptools.HttpRequestParser(self)
        try:
            self.parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self.is_wrong = True

    def on_message_begin(self) -> None:
        self.num_messages += 1

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_body(self, part: bytes) -> None:
        self.body += part

    def on_message_complete(self) -> None:
        self.num_complete += 1

    @property
    def is_one(self) -> bool:
        return not self.is_wrong and self.num_messages == self.num_complete == 1

    @property
    def other_headers(self) -> list[tuple[bytes, bytes]]:
        return [line for line in self.headers if line[0] != b"content-length"]


def message(lines: list[bytes], body: bytes) -> bytes:
    filled = [line % len(body) if b"%d" in line else line for line in lines]
    return b"\r\n".join([b"POST / HTTP/1.1", *filled]) + b"\r\n\r\n" + body


@settings(max_examples=2000, deadline=None)
@given(
    lines=st.lists(LINES, max_size=4),
    others=st.none() | st.lists(LINES, max_size=4),
    first=BODIES,
    second=BODIES,
    cut=st.none() | st.integers(0, 200),
)
def test_what_passes_for_a_known_head_is_read_as_the_parser_would(
    lines: list[bytes], others: list[bytes] | None, first: bytes, second: bytes, cut: int | None
) -> None:
    """What the parser found to be one whole request says how those like it are to be read."""
    learned = Parsed(message(lines, first))
    if not learned.is_one or (known := known_head(message(lines, first), learned)) is None:
        return
    assert known.body(message(lines, first)) == learned.body
    data = message(lines if others is None else others, second)[:cut]
    body = known.body(data)
    if body is not None:
        seen = Parsed(data)
        assert seen.is_one
        assert seen.body == body
        assert seen.other_headers == learned.other_headers


def test_a_message_like_the_one_before_is_known_whatever_its_length() -> None:
    def one(body: bytes, name: bytes = b"content-length", length: bytes | None = None) -> bytes:
        size = length if length is not None else b"%d" % len(body)
        return b"POST / HTTP/1.1\r\n" + name + b": " + size + b"\r\nhost: a\r\n\r\n" + body

    for name in (b"content-length", b"Content-Length"):
        known = known_head(one(b"12345", name), "head")
        assert known is not None and known.head == "head"
        for body in (b"", b"1", b"x" * 12345, b"\r\n\r\n", b"content-length: 5\r\n\r\n"):
            assert known.body(one(body, name)) == body
        for length in (b"4", b"6", b"05", b"+5", b" 5", b"5 ", b"5_", b"", b"55", b"5\r\nx: y"):
            assert known.body(one(b"12345", name, length)) is None
        assert known.body(one(b"12345", name) + b"6") is None, "and the next request"
        assert known.body(one(b"12345", name)[:-1]) is None, "more is to come"


def test_a_length_that_only_looks_like_one_is_none() -> None:
    for line in (b"x-content-length: 5", b"x: content-length: 5", b"content-length: 55"):
        assert known_head(message([line], b"12345"), None) is None


def test_memory_is_bounded() -> None:
    assert known_head(message([b"x: %b" % (b"y" * 3000), b"content-length: 5"], b"12345"), None) is not None
    assert known_head(message([b"x: %b" % (b"y" * 5000), b"content-length: 5"], b"12345"), None) is None


def test_requests_and_answers_like_those_before_are_passed_on_alike() -> None:
    """The first of its kind goes through the parsers, the others do not; nobody can tell."""

    async def echo(mock: Mock, request: Heard, writer: asyncio.StreamWriter) -> None:
        await replies.respond(writer, 200, request.body[::-1])

    async def scenario() -> None:
        async with cluster(echo) as c, c.wire() as wire:
            answers = []
            for n in range(6):
                await wire.send(post({"messages": [], "n": "x" * n}))
                answers.append(await wire.answer())
            heard = c.mocks[0].heard
            client, replica = next(iter(c.router.proxy.clients)), next(iter(c.router.registry))
            assert client._known is not None and replica.pool.known is not None
            for answer, request in zip(answers, heard, strict=True):
                assert answer.body == request.body[::-1]
                assert answer.headers.keys() == answers[0].headers.keys()
                assert [name for name, _ in request.headers] == [name for name, _ in heard[0].headers]
                assert request.header("content-length") == str(len(request.body))
            assert len({answer.headers["x-request-id"] for answer in answers}) == 6

    run(scenario)


def test_a_known_head_does_not_let_a_large_body_pass() -> None:
    async def scenario() -> None:
        async with cluster(ok, limits={"max_body_bytes": 60}) as c, c.wire() as wire:
            for _ in range(2):
                await wire.send(post({"messages": []}))
                assert (await wire.answer()).status == 200
            await wire.send(post({"messages": [], "n": "x" * 60}))
            assert (await wire.answer()).status == 413

    run(scenario)


def test_a_known_head_with_part_of_a_body_or_more_than_it_goes_through_the_parser() -> None:
    async def scenario() -> None:
        async with cluster(ok) as c, c.wire() as wire:
            message = post({"messages": []})
            for _ in range(2):
                await wire.send(message)
                assert (await wire.answer()).status == 200
            await wire.send(message[:-3])
            await asyncio.sleep(0.02)
            await wire.send(message[-3:] + message + message[:-1])
            assert [(await wire.answer()).status for _ in range(2)] == [200, 200]
            await wire.send(message[-1:])
            assert (await wire.answer()).status == 200
            assert len(c.mocks[0].heard) == 5

    run(scenario)


def test_a_key_is_asked_for_again_where_it_is_another() -> None:
    """A head is remembered with its key; a head without it, or with a wrong one, is another head."""
    from pointsman.router.keys import Keys

    async def scenario() -> None:
        async with cluster(ok, keys=Keys(["right"])) as c:
            plain = post({"messages": []})
            good = plain.replace(b"host:", b"authorization: Bearer right\r\nhost:", 1)
            bad = plain.replace(b"host:", b"authorization: Bearer wrong\r\nhost:", 1)
            assert good != plain != bad
            for wrong in (bad, plain):
                async with c.wire() as wire:
                    for message, status in ((good, 200), (good, 200), (wrong, 401)):
                        await wire.send(message)
                        assert (await wire.answer()).status == status

    run(scenario)


class Chunks(Receiver):
    """Remembers which chunks came raw, and what they were."""

    def __init__(self) -> None:
        self.raw: list[bytes] = []
        self.body = b""

    def on_connected(self, connection: UpstreamConnection) -> None: ...

    def on_head(self, status: int, reason: bytes, headers: Headers, length: int | None) -> None: ...

    def on_chunk(self, raw: bytes, data: bytes) -> None:
        self.raw.append(raw)
        self.body += data

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_read(self) -> None: ...

    def on_complete(self) -> None: ...

    def on_failure(self, reason: str, *, is_stale: bool) -> None:
        self.body += b"failed"


class Transport:
    def get_extra_info(self, name: str) -> None: ...

    def write(self, data: bytes) -> None: ...

    def is_reading(self) -> bool:
        return True

    def abort(self) -> None: ...


@pytest.mark.parametrize(
    ("data", "is_raw", "body"),
    [
        (b"5\r\n12345\r\n", True, b"12345"),
        (b"1a\r\n" + b"x" * 26 + b"\r\n", True, b"x" * 26),
        (b"05\r\n12345\r\n", False, b"12345"),
        (b"5;a=b\r\n12345\r\n", False, b"12345"),
        (b"5\r\n12345\r\n0\r\n\r\n", False, b"12345"),
        (b"5\r\n12345\r\n3\r\n678\r\n", False, b"12345678"),
        (b"5\r\n12345", False, b"12345"),
        (b"0\r\n\r\n", False, b""),
        (b"5\r\n123456\r\n", False, b"failed"),
        (b"x\r\n12345\r\n", False, b"failed"),
        (b"+5\r\n12345\r\n", False, b"failed"),
        (b"0x5\r\n12345\r\n", False, b"failed"),
    ],
)
def test_a_chunk_is_passed_on_as_it_is_only_if_it_is_one(data: bytes, is_raw: bool, body: bytes) -> None:
    async def scenario() -> None:
        connection, chunks = UpstreamConnection(Pool(parse_url("http://a:1"), Limits())), Chunks()
        connection.connection_made(cast(asyncio.Transport, Transport()))
        connection.send(chunks, b"")
        connection.read(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        connection.read(data)
        assert chunks.raw == [data] * is_raw
        assert chunks.body.removeprefix(b"12345") == body.removeprefix(b"12345")

    run(scenario)


def test_chunks_arrive_whole_however_they_were_cut() -> None:
    async def scenario() -> None:
        payload = [b"data: %d\n\n" % n for n in range(30)]
        wire_bytes = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in payload) + b"0\r\n\r\n"
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        for size in (1, 2, 3, 5, 13, 14, 15, 28, 200):

            async def cut(mock: Mock, request: Heard, writer: asyncio.StreamWriter, size: int = size) -> None:
                data = head + wire_bytes
                for start in range(0, len(data), size):
                    writer.write(data[start : start + size])
                    await writer.drain()
                    await asyncio.sleep(0)

            async with cluster(cut) as c:
                answer = await c.ask(post({"messages": [], "stream": True}))
                assert answer.is_whole and answer.body == b"".join(payload), size

    run(scenario)
