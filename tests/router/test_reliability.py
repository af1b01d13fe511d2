"""What goes wrong behind the router, and what clients notice of it."""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import Collection

import pytest

from pointsman.router.config import Backend, Reliability
from pointsman.router.http.upstream import Pool
from pointsman.router.replicas.breaker import CLOSED, HALF_OPEN, OPEN, Breaker
from pointsman.router.replicas.reports import read_load, read_models
from tests.router import mock as replies
from tests.router.harness import Cluster, cluster, get, post, run, until
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


def always_first(c: Cluster) -> None:
    """The policy prefers the first replica that may get the request."""

    def rule(excluded: Collection[int]) -> int:
        is_open = c.books.accepting
        return min(slot for slot in c.books.names if slot not in excluded and is_open[slot]) + 1

    c.decider.rule = rule


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


def test_breaker() -> None:
    breaker = Breaker(Reliability(breaker_failures=2, breaker_open_s=1, breaker_max_open_s=3))
    breaker.failed(0.0)
    breaker.succeeded()
    breaker.failed(0.0)
    assert breaker.state == CLOSED  # not two in a row
    breaker.failed(0.0)
    assert breaker.state == OPEN
    breaker.succeeded()  # of a request that was under way
    breaker.tick(0.9)
    assert breaker.state == OPEN
    breaker.tick(1.0)
    assert breaker.state == HALF_OPEN
    breaker.failed(1.0)
    breaker.tick(2.9)
    assert breaker.state == OPEN  # twice as long
    breaker.tick(3.0)
    breaker.failed(3.0)
    breaker.tick(5.9)
    assert breaker.state == OPEN
    breaker.tick(6.0)  # 3 s, not 4
    assert breaker.state == HALF_OPEN
    breaker.succeeded()  # of a request that was under way
    assert breaker.state == HALF_OPEN
    breaker.answered()
    assert breaker.state == CLOSED
    breaker.failed(6.0)
    breaker.failed(6.0)
    breaker.tick(8.9)
    assert breaker.state == OPEN  # no whole answer has come: 3 s again
    breaker.tick(9.0)
    breaker.answered()
    breaker.succeeded()
    breaker.failed(9.0)
    breaker.failed(9.0)
    breaker.tick(10.0)
    assert breaker.state == HALF_OPEN  # the doubling was forgotten


async def endless(mock: Mock, request: Heard, writer: asyncio.StreamWriter) -> None:
    await replies.stream(mock, request, writer, num_chunks=10_000)


async def as_asked(mock: Mock, request: Heard, writer: asyncio.StreamWriter) -> None:
    """A stream without an end, or the status that a header names."""
    answer = endless if json.loads(request.body).get("stream") else status(int(request.header("x-do") or 200))
    await answer(mock, request, writer)


def test_streams_under_way_do_not_keep_a_broken_replica_out() -> None:
    """One replica: it breaks while a stream runs, is probed by another stream, and serves meanwhile."""

    async def scenario() -> None:
        settings = {"breaker_failures": 3, "breaker_open_s": 0.1}
        async with cluster(as_asked, reliability=settings) as c:
            replica = c.router.registry.find(c.mocks[0].url)
            async with c.wire() as old, c.wire() as probe:
                await old.send(post(stream=True))
                await until(lambda: c.num_heard == [1])
                for _ in range(3):
                    assert (await c.ask(post(headers="x-do: 503\r\n"))).status == 503
                assert replica.breaker.state == OPEN
                await until(lambda: replica.breaker.state == HALF_OPEN)
                await probe.send(post(stream=True))
                await until(lambda: replica.breaker.state == CLOSED)
                assert [(await c.ask()).status for _ in range(3)] == [200] * 3
            await until(lambda: not c.router.proxy.active)

    run(scenario)


def test_a_probe_that_stays_silent_does_not_keep_a_replica_out() -> None:
    async def scenario() -> None:
        settings = {"breaker_failures": 1, "breaker_open_s": 0.1}
        async with cluster(reset, reliability=settings) as c:
            replica = c.router.registry.find(c.mocks[0].url)
            assert (await c.ask()).status == 502
            await until(lambda: replica.breaker.state == HALF_OPEN)
            c.mocks[0].behaviour = hang
            async with c.wire() as probe:
                await probe.send(post())
                await until(lambda: len(c.mocks[0].heard) == 2)
                assert (await c.ask()).json["error"]["code"] == "no_replica"
                c.mocks[0].behaviour = ok
                await asyncio.sleep(0.12)
                assert (await c.ask()).status == 200
                assert replica.breaker.state == CLOSED
            await until(lambda: not c.router.proxy.active)

    run(scenario)


def test_a_failure_of_a_request_under_way_is_no_verdict_of_a_probe() -> None:
    async def scenario() -> None:
        settings = {"breaker_failures": 1, "breaker_open_s": 0.1}
        async with cluster(as_asked, reliability=settings) as c, c.wire() as old:
            replica = c.router.registry.find(c.mocks[0].url)
            await old.send(post(stream=True))
            await until(lambda: c.num_heard == [1])
            assert (await c.ask(post(headers="x-do: 503\r\n"))).status == 503
            await until(lambda: replica.breaker.state == HALF_OPEN)
            for writer in list(c.mocks[0].writers):
                writer.transport.abort()
            assert not (await old.answer()).is_whole
            assert replica.breaker.state == HALF_OPEN
            assert (await c.ask()).status == 200

    run(scenario)


@pytest.mark.parametrize("num_servers", [1, 2, 3])
def test_requests_that_every_server_answers_with_500_take_none_out(num_servers: int) -> None:
    async def scenario() -> None:
        async with cluster(*[as_asked] * num_servers, reliability={"max_retries": 1}) as c:
            for _ in range(20):
                assert (await c.ask(post(headers="x-do: 500\r\n"))).status == 500
            assert {replica.breaker.state for replica in c.router.registry} == {CLOSED}
            assert (await c.ask()).status == 200

    run(scenario)


def test_without_retries_a_server_that_answers_500_breaks_unless_it_is_the_last() -> None:
    async def scenario() -> None:
        async with cluster(status(500), status(500), reliability={"max_retries": 0}) as c:
            for _ in range(10):
                assert (await c.ask()).status == 500
            assert sorted(replica.breaker.state for replica in c.router.registry) == [CLOSED, OPEN]

    run(scenario)


def test_a_broken_replica_rests_and_is_tried_by_one_request() -> None:
    async def scenario() -> None:
        settings = {"breaker_failures": 2, "breaker_open_s": 0.15}
        async with cluster(status(500), ok, reliability=settings) as c:
            always_first(c)
            for _ in range(5):
                assert (await c.ask()).status == 200
            assert c.num_heard == [2, 5]
            assert c.books.accepting[0] is False
            c.mocks[0].behaviour = gated
            first = c.router.registry.find(c.mocks[0].url)
            await until(lambda: first.breaker.state == HALF_OPEN)
            # The first request is the probe, whatever the policy says; others go elsewhere meanwhile.
            c.decider.rule = lambda excluded: 2
            probe = asyncio.ensure_future(c.ask())
            await until(lambda: c.num_heard[0] == 3)
            always_first(c)
            assert (await c.ask()).json["id"] == f"from-{c.mocks[1].port}"
            c.mocks[0].gate.set()
            assert (await probe).json["id"] == f"from-{c.mocks[0].port}"
            assert first.breaker.state == CLOSED
            assert (await c.ask()).json["id"] == f"from-{c.mocks[0].port}"

    run(scenario)


def test_without_any_replica_there_is_a_503() -> None:
    async def scenario() -> None:
        async with cluster(reset, reliability={"breaker_failures": 1, "breaker_open_s": 60}) as c:
            assert (await c.ask()).status == 502
            answered = await c.ask()
            assert (answered.status, answered.headers["retry-after"]) == (503, "1")
            assert (await c.ask(get("/health"))).status == 503

    run(scenario)


def test_health_checks_take_a_replica_out_and_bring_it_back() -> None:
    async def scenario() -> None:
        async with cluster(ok, ok, reliability={"health_interval_s": 0.02, "health_failures": 2}) as c:
            always_first(c)
            c.mocks[0].is_healthy = False
            await until(lambda: c.books.accepting[0] is False)
            assert (await c.ask()).json["id"] == f"from-{c.mocks[1].port}"
            c.mocks[0].is_healthy = True
            await until(lambda: c.books.accepting[0] is True)
            assert (await c.ask()).json["id"] == f"from-{c.mocks[0].port}"

    run(scenario)


def test_a_replica_that_is_down_at_the_start_gets_nothing() -> None:
    async def scenario() -> None:
        async with cluster(ok, ok) as c:
            c.router.registry.add(Backend(url="http://127.0.0.1:1"))
            await c.router.watch.check_all()
            assert [replica.is_healthy for replica in c.router.registry] == [True, True, False]

    run(scenario)


def test_metrics_of_a_replica_are_scraped_by_todays_and_by_old_names() -> None:
    text = (
        '# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{{engine="0",model_name="m"}} 3.0\n'
        'vllm:num_requests_running{{engine="1",model_name="m"}} 1.0\n'
        'vllm:num_requests_waiting{{engine="0"}} 2.0\n'
        "vllm:num_requests_waiting_by_reason 77\nvllm:{name} 0.25\n"
    )

    async def scenario() -> None:
        async with cluster(ok, ok, reliability={"scrape_interval_s": 0.02}) as c:
            c.mocks[0].metrics = text.format(name="kv_cache_usage_perc")
            c.mocks[1].metrics = text.format(name="gpu_cache_usage_perc")
            for slot in (0, 1):
                await until(lambda slot=slot: ("scraped", slot, 4.0, 2.0, 0.25) in c.books.events)

    run(scenario)


@pytest.mark.parametrize(
    "report",
    [
        b"TEXT named_metrics.kv_cache_usage_perc=0.25, named_metrics.num_requests_waiting=2.0",
        b'JSON {"named_metrics": {"kv_cache_usage_perc": 0.25, "num_requests_waiting": 2.0}}',
    ],
)
def test_load_reported_with_an_answer_is_booked(report: bytes) -> None:
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nendpoint-load-metrics: %b\r\n\r\n{}" % report

    async def scenario() -> None:
        async with cluster(raw(answer), reliability={"asks_for_load": True}) as c:
            assert (await c.ask()).status == 200
            assert c.mocks[0].heard[0].header("endpoint-load-metrics-format") == "TEXT"
            assert ("scraped", 0, None, 2.0, 0.25) in c.books.events

    run(scenario)


def test_a_load_report_that_makes_no_sense_is_no_load() -> None:
    assert read_load(b"TEXT named_metrics.kv_cache_usage_perc=1e, x=") == (None, None)


def test_questions_in_the_background_do_not_disturb_requests() -> None:
    """A server that ignores `Connection: close` lends the connection of a scrape to a request."""

    async def scenario() -> None:
        often = {"health_interval_s": 0.001, "scrape_interval_s": 0.001, "models_interval_s": 0.001}
        async with cluster(ok, reliability=often) as c:

            async def load() -> None:
                async with c.wire() as wire:
                    for _ in range(25):
                        await wire.send(post(stream=True))
                        assert (await wire.answer()).is_whole

            await asyncio.gather(*(load() for _ in range(8)))
            assert not c.router.metrics.retries

    run(scenario)


def test_a_returning_replica_gets_its_share_gradually() -> None:
    async def scenario() -> None:
        async with cluster(ok, ok, reliability={"slow_start_s": 10}) as c:
            registry = c.router.registry
            registry.drain(c.mocks[0].url, True)
            registry.drain(c.mocks[0].url, False)
            started = registry.find(c.mocks[0].url).returned_at
            assert started is not None

            def share(after_s: float) -> float:
                return sum(0 not in registry.excluded("m", (), started + after_s) for _ in range(2000)) / 2000

            assert share(0.0) == pytest.approx(0.05, abs=0.03)
            assert share(5.0) == pytest.approx(0.5, abs=0.06)
            registry.tick(started + 10.0)
            assert share(10.0) == 1.0
            # It is still better than nothing.
            registry.drain(c.mocks[1].url, True)
            registry.find(c.mocks[0].url).returned_at = started
            assert all(0 not in registry.excluded("m", (), started) for _ in range(100))

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
