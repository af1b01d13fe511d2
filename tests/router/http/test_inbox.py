"""Data that is worked on in a row: in order, and nobody pays for another's failure."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from pointsman.router.http.address import parse_url
from pointsman.router.http.inbox import running_inbox
from pointsman.router.http.limits import Limits
from pointsman.router.http.messages import Headers
from pointsman.router.http.upstream import Pool, Receiver, UpstreamConnection
from tests.router.harness import run


class Reader:
    def __init__(self, heard: list[tuple[str, bytes]], name: str, *, fails: bool = False) -> None:
        self.heard, self.name, self.fails = heard, name, fails
        self.is_aborted = False

    def read(self, data: bytes) -> None:
        self.heard.append((self.name, data))
        if self.fails:
            raise ValueError("broken")

    def abort(self) -> None:
        self.is_aborted = True


def test_all_that_came_is_worked_on_in_order_in_the_same_turn() -> None:
    async def scenario() -> None:
        heard: list[tuple[str, bytes]] = []
        a, b = Reader(heard, "a"), Reader(heard, "b")
        running_inbox().plan()
        running_inbox().arrived.extend(((a, b"1"), (b, b"2"), (a, b"3")))
        assert not heard
        await asyncio.sleep(0)
        assert heard == [("a", b"1"), ("b", b"2"), ("a", b"3")]
        running_inbox().arrived.append((a, b"4"))
        running_inbox().empty()
        assert heard[-1] == ("a", b"4")
        await asyncio.sleep(0)
        assert len(heard) == 4

    run(scenario)


def test_a_failure_ends_one_connection_and_is_reported() -> None:
    async def scenario() -> None:
        heard: list[tuple[str, bytes]] = []
        errors: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, about: errors.append(about))
        broken, sound = Reader(heard, "broken", fails=True), Reader(heard, "sound")
        running_inbox().plan()
        running_inbox().arrived.extend(((broken, b"1"), (sound, b"2")))
        await asyncio.sleep(0)
        assert heard == [("broken", b"1"), ("sound", b"2")]
        assert broken.is_aborted and not sound.is_aborted
        assert [type(error["exception"]) for error in errors] == [ValueError]

    run(scenario)


class Answered(Receiver):
    def on_connected(self, connection: UpstreamConnection) -> None: ...

    def on_head(self, status: int, reason: bytes, headers: Headers, length: int | None) -> None: ...

    def on_body(self, data: bytes) -> None: ...

    def on_complete(self) -> None: ...

    def on_failure(self, reason: str, *, is_stale: bool) -> None:
        raise AssertionError(reason)


class Transport:
    is_aborted = False

    def get_extra_info(self, name: str) -> None: ...

    def write(self, data: bytes) -> None: ...

    def is_reading(self) -> bool:
        return True

    def abort(self) -> None:
        self.is_aborted = True


def test_what_nobody_asked_for_is_no_answer_to_the_next_request() -> None:
    """A server that gives up an idle connection says so; a request that comes in the same turn must not take
    that for its answer."""

    async def scenario() -> None:
        pool = Pool(parse_url("http://127.0.0.1:1"), Limits())
        connection, transport = UpstreamConnection(pool), Transport()
        connection.connection_made(cast(asyncio.Transport, transport))
        pool.idle.append(connection)
        connection.data_received(b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\n\r\n")
        assert not pool.idle and transport.is_aborted

    run(scenario)


def test_what_follows_an_answer_in_the_same_turn_is_no_answer_to_the_next_request() -> None:
    async def scenario() -> None:
        pool = Pool(parse_url("http://127.0.0.1:1"), Limits())
        connection, transport = UpstreamConnection(pool), Transport()
        connection.connection_made(cast(asyncio.Transport, transport))
        connection.send(Answered(), b"")
        connection.data_received(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\n1")
        connection.data_received(b"HTTP/1.1 200 OK\r\ncontent-le")
        running_inbox().empty()
        assert not pool.idle and transport.is_aborted

    run(scenario)
