"""What goes wrong behind the router, and what clients notice of it."""

from __future__ import annotations

import asyncio
import errno
import json

import pytest

from pointsman.router.http.upstream import Pool
from pointsman.router.replicas.breaker import CLOSED, OPEN
from pointsman.router.replicas.reports import read_models
from tests.router import mock as replies
from tests.router.harness import always_first, cluster, get, post, run, until
from tests.router.mock import Behaviour, Heard, Mock, gated, hang, ok, raw, reset, status

BROKEN: dict[str, Behaviour] = {
    "500": status(500),
    "502": status(502),
    "503": status(503),
    "504": status(504),
    "reset before the head": reset,
    "closed before the head": raw(b""),
    "half a head": raw(b"HTTP/1.1 200 OK\r\ncontent-le"),
    "not HTTP": raw(b"hello\r\n\r\n"),
    "broken chunk": raw(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\nhalfXX"),
    "hang": hang,
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
def test_a_failure_before_the_first_byte_is_repaired_elsewhere(broken: Behaviour) -> None:
    async def scenario() -> None:
        async with cluster(broken, ok, limits={"first_byte_timeout_s": 0.2}) as c:
            always_first(c)
            answered = await c.ask()
            assert answered.status == 200
            assert answered.json["id"] == f"from-{c.mocks[1].port}"
            assert c.num_heard == [1, 1]
            assert c.mocks[0].heard[0].body == c.mocks[1].heard[0].body
            assert sum(c.router.metrics.retries.values()) == 1
            assert c.books.of_kind("failed") == [("failed", 0)]

    run(scenario)


def test_a_status_that_is_none_is_no_answer() -> None:
    odd = raw(b"HTTP/1.1 099 Odd\r\ncontent-length: 0\r\n\r\n", closes=False)

    async def scenario() -> None:
        async with cluster(odd, ok) as c:
            always_first(c)
            assert (await c.ask()).status == 200

    run(scenario)


def test_a_replica_that_refuses_connections_is_passed_over() -> None:
    async def scenario() -> None:
        async with cluster(ok, ok) as c:
            always_first(c)
            c.router.registry.find(c.mocks[0].url).pool.address = c.router.registry.find(
                c.mocks[0].url
            ).address.model_copy(update={"port": 1})
            assert (await c.ask()).status == 200
            assert c.num_heard == [0, 1]

    run(scenario)


def test_no_replica_gets_the_same_request_twice() -> None:
    async def scenario() -> None:
        async with cluster(reset, reset, reset, reliability={"max_retries": 9}) as c:
            answered = await c.ask()
            assert (answered.status, answered.json["error"]["code"]) == (502, "replica_failed")
            assert c.num_heard == [1, 1, 1]

    run(scenario)


def test_retries_end() -> None:
    async def scenario() -> None:
        async with cluster(reset, reset, reset, reset, reliability={"max_retries": 1}) as c:
            assert (await c.ask()).status == 502
            assert sum(c.num_heard) == 2

    run(scenario)


def test_the_last_error_of_a_server_reaches_the_client() -> None:
    async def scenario() -> None:
        async with cluster(status(503), status(503)) as c:
            answered = await c.ask()
            assert (answered.status, answered.body) == (503, b'{"error": "mock"}')

    run(scenario)


@pytest.mark.parametrize("code", [400, 404, 422, 429])
def test_an_error_of_the_request_is_not_repeated_and_blames_nobody(code: int) -> None:
    async def scenario() -> None:
        async with cluster(status(code), status(code), reliability={"breaker_failures": 1}) as c:
            assert (await c.ask()).status == code
            assert sum(c.num_heard) == 1
            assert {replica.breaker.state for replica in c.router.registry} == {CLOSED}

    run(scenario)


CUT = {
    "reset in the body": b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\nhalf",
    "chunks without end": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\nhalf\r\n",
    "only a head": b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\n",
}


@pytest.mark.parametrize("data", CUT.values(), ids=CUT)
def test_a_failure_after_the_first_byte_cuts_the_client_off(data: bytes) -> None:
    """Nothing is sent twice, and the client can tell that its answer is not whole."""

    async def scenario() -> None:
        async with cluster(raw(data), ok, reliability={"breaker_failures": 1}) as c:
            always_first(c)
            async with c.wire() as wire:
                await wire.send(post())
                answered = await wire.answer()
                assert (answered.status, answered.is_whole) == (200, False)
                assert await wire.is_closed()
            assert c.num_heard == [1, 0]
            assert c.books.of_kind("failed") == [("failed", 0)]
            assert c.router.registry.find(c.mocks[0].url).breaker.state == OPEN

    run(scenario)


def test_a_body_longer_than_announced_does_not_leak_into_the_next_answer() -> None:
    longer = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nokHTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil"

    async def scenario() -> None:
        async with cluster(raw(longer, closes=False)) as c, c.wire() as wire:
            for _ in range(3):
                await wire.send(post())
                assert (await wire.answer()).body == b"ok"

    run(scenario)


def test_data_on_an_idle_connection_makes_it_useless() -> None:
    async def late(mock: Mock, request: Heard, writer: asyncio.StreamWriter) -> None:
        await ok(mock, request, writer)
        await asyncio.sleep(0.02)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil")

    async def scenario() -> None:
        async with cluster(late) as c, c.wire() as wire:
            for _ in range(2):
                await wire.send(post())
                assert (await wire.answer()).json["object"] == "chat.completion"
                await asyncio.sleep(0.06)

    run(scenario)


def test_a_stream_that_stalls_is_cut() -> None:
    async def stall(mock: Mock, request: Heard, writer: asyncio.StreamWriter) -> None:
        replies.begin_stream(writer)
        writer.write(b"6\r\ndata:\n\r\n")
        await hang(mock, request, writer)

    async def scenario() -> None:
        async with cluster(stall, limits={"idle_timeout_s": 0.15}) as c:
            assert not (await c.ask(post(stream=True))).is_whole
            await until(lambda: c.mocks[0].num_aborted == 1)

    run(scenario)


def test_a_server_that_never_answers_is_a_gateway_timeout() -> None:
    async def scenario() -> None:
        async with cluster(hang, limits={"first_byte_timeout_s": 0.15}) as c:
            assert (await c.ask()).status == 504
            await until(lambda: c.mocks[0].num_aborted == 1)

    run(scenario)


async def once_a_connection(mock: Mock, request: Heard, writer: asyncio.StreamWriter) -> None:
    if hasattr(writer, "is_used"):
        writer.transport.abort()
        return
    writer.is_used = True  # type: ignore[attr-defined]
    await ok(mock, request, writer)


def test_a_connection_that_went_stale_is_nobodys_failure() -> None:
    """The server closed an idle connection just as it was used again; there is no other replica."""

    async def scenario() -> None:
        async with cluster(once_a_connection, reliability={"breaker_failures": 1}) as c, c.wire() as wire:
            for _ in range(3):
                await wire.send(post())
                assert (await wire.answer()).status == 200
            assert c.router.metrics.retries["stale connection"] == 2
            assert c.router.registry.find(c.mocks[0].url).breaker.state == CLOSED

    run(scenario)


def test_a_stale_connection_to_the_last_replica_that_is_left_costs_no_request() -> None:
    """One replica fails, and the connection to the other, which is well, has gone stale."""

    async def scenario() -> None:
        async with cluster(ok, once_a_connection) as c, c.wire() as wire:
            for _ in range(2):
                await wire.send(post())
                assert (await wire.answer()).status == 200
            c.mocks[0].behaviour = replies.status(503)
            await wire.send(post())
            assert (await wire.answer()).status == 200

    run(scenario)


def test_a_replica_that_talks_nonsense_is_still_looked_at() -> None:
    async def scenario() -> None:
        async with cluster(ok, reliability={"scrape_interval_s": 0.02}) as c:
            (mock,) = c.mocks
            mock.metrics = "vllm:num_requests_running 1.2.3\nvllm:num_requests_waiting 1e\n"
            await asyncio.sleep(0.2)
            mock.metrics = "vllm:num_requests_running 1\nvllm:num_requests_waiting 1\n"
            await until(lambda: bool(c.books.of_kind("scraped")))

    run(scenario)
    assert read_models(b"[" * 100_000) is None


def test_what_has_become_of_a_replica_that_is_gone_is_not_booked() -> None:
    """Its slot has no row, and the books are written by address."""

    async def scenario() -> None:
        async with cluster(ok, ok, reliability={"health_timeout_s": 0.1}) as c:
            replica = c.router.registry.find(c.mocks[0].url)
            c.mocks[0]._background = silent  # type: ignore[method-assign]
            c.router.watch.suspect(replica)
            await asyncio.sleep(0.05)
            c.books.was_away = lambda slot: c.books.names[slot]  # type: ignore[assignment, return-value]
            c.router.registry.remove(replica.name)
            await asyncio.sleep(0.2)
            assert replica.problem is None

    async def silent(request: Heard, writer: asyncio.StreamWriter) -> bool:
        await asyncio.sleep(10.0)
        return True

    run(scenario)


def test_without_file_descriptors_no_server_is_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        settings = {"breaker_failures": 1, "health_failures": 1}
        async with cluster(ok, ok, reliability=settings) as c, c.wire() as wire:

            async def connect(pool: object) -> None:
                raise OSError(errno.EMFILE, "Too many open files")

            with monkeypatch.context() as patch:
                patch.setattr(Pool, "connect", connect)
                for _ in range(5):
                    await wire.send(post())
                    answered = await wire.answer()
                    assert (answered.status, answered.headers["retry-after"]) == (503, "1")
                for replica in c.router.registry:
                    await c.router.watch._check(replica)
            assert [replica.state for replica in c.router.registry] == ["ready", "ready"]
            said = [line for line in c.logged() if line["event"] == "no file descriptor left"]
            assert len(said) == 1 and said[0]["limit"] > 0
            await wire.send(post())
            assert (await wire.answer()).status == 200

    run(scenario)


def test_without_any_replica_there_is_a_503() -> None:
    async def scenario() -> None:
        async with cluster(reset, reliability={"breaker_failures": 1, "breaker_open_s": 60}) as c:
            assert (await c.ask()).status == 502
            answered = await c.ask()
            assert (answered.status, answered.headers["retry-after"]) == (503, "1")
            assert (await c.ask(get("/health"))).status == 503

    run(scenario)


def test_at_low_load_equal_replicas_get_equal_shares_from_the_fallback() -> None:
    async def scenario() -> None:
        async with cluster(ok, ok, ok, ok) as c:
            c.decider.rule = lambda excluded: 1 / 0
            async with c.wire() as wire:
                for _ in range(400):
                    await wire.send(post())
                    assert (await wire.answer()).status == 200
            assert max(c.num_heard) < 1.5 * 100

    run(scenario)


NAN = float("nan")


FAILING = {
    "exception ZeroDivisionError": lambda excluded: 1 / 0,
    "not a number": lambda excluded: NAN,
    "out of range": lambda excluded: 7,
    "replica not allowed": lambda excluded: 2,
}


@pytest.mark.parametrize(("problem", "rule"), FAILING.items(), ids=FAILING)
def test_a_policy_that_fails_harms_no_request_and_is_reported_once(problem: str, rule: object) -> None:
    async def scenario() -> None:
        async with cluster(ok, ok, reliability={"policy_failures": 2, "policy_suspension_s": 0.2}) as c:
            c.router.registry.drain(c.mocks[1].url, True)
            c.decider.rule = rule  # type: ignore[assignment]
            for _ in range(5):
                assert (await c.ask()).status == 200
            assert c.router.metrics.fallbacks[problem] == 2
            assert c.router.metrics.fallbacks["suspended"] == 3
            said = [line for line in c.logged() if line["event"] == "policy failed"]
            assert [(line["problem"], line["instead"]) for line in said] == [(problem, "least-outstanding")]
            c.decider.rule = lambda excluded: 1
            await asyncio.sleep(0.25)
            assert (await c.ask()).status == 200
            assert "policy works again" in [line["event"] for line in c.logged()]

    run(scenario)


def test_a_slow_policy_is_a_failing_policy() -> None:
    import time

    def slow(excluded: object) -> int:
        time.sleep(0.02)
        return 1

    async def scenario() -> None:
        async with cluster(ok, ok, reliability={"max_decision_s": 0.01, "policy_failures": 1}) as c:
            c.decider.rule = slow
            for _ in range(3):
                assert (await c.ask()).status == 200
            assert c.router.metrics.fallbacks == {"slow": 1, "suspended": 2}

    run(scenario)


def test_draining_finishes_what_has_begun_and_lets_nothing_new_in() -> None:
    async def scenario() -> None:
        async with cluster(gated) as c, c.wire() as busy, c.wire() as idle:
            await idle.send(get("/health"))
            await idle.answer()
            await busy.send(post())
            await until(lambda: c.num_heard == [1])
            stopping = asyncio.ensure_future(c.router.stop())
            assert await idle.is_closed()
            with pytest.raises(OSError):
                await c.ask()
            c.mocks[0].gate.set()
            answered = await busy.answer()
            assert (answered.status, answered.headers["connection"]) == (200, "close")
            await stopping

    run(scenario)


def test_draining_ends() -> None:
    async def scenario() -> None:
        async with cluster(hang, limits={"drain_timeout_s": 0.1}) as c, c.wire() as wire:
            await wire.send(post())
            await until(lambda: c.num_heard == [1])
            await c.router.stop()
            answered = await wire.answer()
            assert (answered.status, json.loads(answered.body)["error"]["type"]) == (
                503,
                "service_unavailable",
            )

    run(scenario)


@pytest.mark.parametrize("coding", [b"gzip", b"identity", b"chunked, gzip", b"gzip, chunked"])
def test_an_encoding_that_was_not_asked_for_is_no_answer(coding: bytes) -> None:
    """Such a body could end elsewhere than its chunks seem to, and clients could not read it."""
    odd = raw(b"HTTP/1.1 200 OK\r\ntransfer-encoding: " + coding + b"\r\n\r\n5\r\nhello\r\n0\r\n\r\n")

    async def scenario() -> None:
        async with cluster(odd) as c:
            assert (await c.ask()).status == 502
        async with cluster(odd, ok) as c:
            assert {(await c.ask()).status for _ in range(4)} == {200}

    run(scenario)
