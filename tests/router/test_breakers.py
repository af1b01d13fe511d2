"""Who is left out: breakers, health checks, probes, the way back."""

from __future__ import annotations

import asyncio
import json

import pytest

from pointsman.router.config import Backend, Reliability
from pointsman.router.replicas.breaker import CLOSED, HALF_OPEN, OPEN, Breaker
from pointsman.router.replicas.reports import read_load
from tests.router import mock as replies
from tests.router.harness import always_first, cluster, post, run, until
from tests.router.mock import Heard, Mock, gated, hang, ok, raw, reset, status


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
