"""A second copy of a stream that does not start: one answer to the client, no work and no books left over."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from pointsman.router.http.upstream import UpstreamConnection
from tests.router import mock as replies
from tests.router.harness import cluster, post, run, until
from tests.router.mock import Behaviour, Heard, Mock, gated, hang, ok, reset, status
from tests.router.test_reliability import always_first

SOON = {"hedge_after_s": 0.05}


async def late(mock: Mock, request: Heard, writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(0.4)
    await ok(mock, request, writer)


async def whole(mock: Mock, request: Heard, writer: asyncio.StreamWriter) -> None:
    """An answer in one piece, whatever was asked for."""
    await replies.respond(writer, 200, b'{"id": "%d"}' % mock.port)


def test_the_second_replica_serves_what_the_first_does_not_start() -> None:
    async def scenario() -> None:
        async with cluster(hang, ok, reliability=SOON) as c:
            always_first(c)
            answer = await c.ask(post(stream=True))
            assert answer.status == 200 and answer.body.endswith(b"data: [DONE]\n\n")
            assert c.num_heard == [1, 1]
            assert c.mocks[0].heard[0].body == c.mocks[1].heard[0].body
            await until(lambda: c.mocks[0].num_aborted == 1)
            assert c.router.metrics.hedges == Counter(won=1)
            assert [r.num_outstanding for r in c.router.registry] == [0, 0]
            assert c.books.of_kind("failed") == [("failed", 0)]
            assert [event[:2] for event in c.books.of_kind("finished")] == [("finished", 1)]
            request = next(line for line in c.logged() if line["event"] == "request")
            assert request["replica"] == c.mocks[1].url and request["outcome"] == "completed"

    run(scenario)


def test_an_answer_in_one_piece_counts_too_the_first_time_and_the_next() -> None:
    async def scenario() -> None:
        async with cluster(hang, whole, reliability=SOON) as c:
            always_first(c)
            for _ in range(2):
                assert (await c.ask(post(stream=True))).json["id"] == str(c.mocks[1].port)
            assert c.router.metrics.hedges == Counter(won=2)

    run(scenario)


@pytest.mark.parametrize("second", [hang, status(503), reset], ids=["hangs", "refuses", "resets"])
def test_the_first_answer_counts_if_the_second_replica_does_no_better(second: Behaviour) -> None:
    async def scenario() -> None:
        async with cluster(late, second, reliability=SOON) as c:
            always_first(c)
            answer = await c.ask(post(stream=True))
            assert answer.status == 200 and answer.is_whole
            assert c.num_heard == [1, 1]
            assert c.router.metrics.hedges == Counter(lost=1)
            await until(lambda: second is not hang or c.mocks[1].num_aborted == 1)
            assert [r.num_outstanding for r in c.router.registry] == [0, 0]
            assert [event[:2] for event in c.books.of_kind("finished")] == [("finished", 0)]

    run(scenario)


def test_both_copies_end_with_the_client() -> None:
    async def scenario() -> None:
        async with cluster(hang, hang, reliability=SOON) as c:
            always_first(c)
            async with c.wire() as wire:
                await wire.send(post(stream=True))
                await until(lambda: c.num_heard == [1, 1])
            await until(lambda: [mock.num_aborted for mock in c.mocks] == [1, 1])
            await until(lambda: not c.router.proxy.active)
            assert c.router.metrics.cancelled == 1

    run(scenario)


async def fail_later(mock: Mock, request: Heard, writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(0.3)
    writer.transport.abort()


async def refuse_later(mock: Mock, request: Heard, writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(0.3)
    await replies.respond(writer, 503)


@pytest.mark.parametrize("first", [fail_later, refuse_later, hang], ids=["resets", "refuses", "times out"])
@pytest.mark.parametrize("max_retries", [0, 2])
def test_if_the_first_fails_the_second_goes_on(first: Behaviour, max_retries: int) -> None:
    async def scenario() -> None:
        settings = {"hedge_after_s": 0.15, "max_retries": max_retries}
        limits = {"first_byte_timeout_s": 0.45}
        async with cluster(first, late, reliability=settings, limits=limits) as c:
            always_first(c)
            answer = await c.ask(post(stream=True))
            assert answer.status == 200 and answer.body.endswith(b"data: [DONE]\n\n")
            assert c.num_heard == [1, 1]
            assert [r.num_outstanding for r in c.router.registry] == [0, 0]

    run(scenario)


def test_a_second_copy_that_is_still_being_dialled_goes_on() -> None:
    async def scenario() -> None:
        async with cluster(fail_later, ok, reliability=SOON | {"max_retries": 0}) as c:
            always_first(c)
            pool = c.router.registry.find(c.mocks[1].url).pool
            connect, may_connect = pool.connect, asyncio.Event()

            async def slowly() -> UpstreamConnection:
                await may_connect.wait()
                return await connect()

            pool.connect = slowly  # type: ignore[method-assign]
            asking = asyncio.ensure_future(c.ask(post(stream=True)))
            await until(lambda: c.router.metrics.hedges == Counter(won=1))
            may_connect.set()
            answer = await asking
            assert answer.status == 200 and answer.is_whole
            assert c.num_heard == [1, 1]

    run(scenario)


def test_a_replica_that_failed_with_the_second_copy_does_not_get_a_third() -> None:
    async def scenario() -> None:
        async with cluster(refuse_later, status(503), reliability=SOON) as c:
            always_first(c)
            assert (await c.ask(post(stream=True))).status == 503
            assert c.num_heard == [1, 1]

    run(scenario)


def test_if_the_first_fails_and_the_second_is_silent_a_third_is_asked() -> None:
    async def scenario() -> None:
        async with cluster(fail_later, hang, ok, reliability=SOON) as c:
            always_first(c)
            c.router.registry.random.choice = lambda some: some[0]  # type: ignore[method-assign,assignment]
            c.decider.rule = lambda excluded: 1 if 0 not in excluded else 3
            assert (await c.ask(post(stream=True))).status == 200
            assert c.num_heard == [1, 1, 1]
            assert c.router.metrics.hedges == Counter(won=2)

    run(scenario)


@pytest.mark.parametrize(
    ("reliability", "is_stream"), [({}, True), (SOON, False)], ids=["off", "not a stream"]
)
def test_nothing_is_sent_twice_unless_asked_for(reliability: dict[str, float], is_stream: bool) -> None:
    async def scenario() -> None:
        async with cluster(late, ok, reliability=reliability) as c:
            always_first(c)
            assert (await c.ask(post(stream=is_stream))).status == 200
            assert c.num_heard == [1, 0]

    run(scenario)


def test_alone_there_is_nobody_else_to_ask() -> None:
    async def scenario() -> None:
        async with cluster(gated, reliability=SOON) as c, c.wire() as wire:
            await wire.send(post(stream=True))
            await asyncio.sleep(0.3)
            assert c.num_heard == [1]
            c.mocks[0].gate.set()
            assert (await wire.answer()).status == 200

    run(scenario)
