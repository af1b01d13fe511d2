"""Requests that wait at the router."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from tests.router.fakes import HOLD
from tests.router.harness import Answered, Cluster, cluster, post, run, until
from tests.router.mock import gated, ok


def one_at_a_time(c: Cluster) -> None:
    """The policy holds while the first replica has a request."""

    def rule(excluded: Collection[int]) -> int:
        return HOLD if c.books.open else 1

    c.decider.rule = rule


def named(name: str, priority: str = "normal") -> bytes:
    return post(
        {"messages": [], "n": name}, headers=f"x-pointsman-priority: {priority}\r\nx-request-id: {name}\r\n"
    )


def order(c: Cluster) -> list[str | None]:
    return [heard.header("x-request-id") for heard in c.mocks[0].heard]


async def submit(c: Cluster, request: bytes) -> asyncio.Future[Answered]:
    """Sent, and seen by the router."""
    num_active, num_holds = len(c.router.proxy.active), c.router.metrics.holds
    task = asyncio.ensure_future(c.ask(request))
    await until(lambda: len(c.router.proxy.active) > num_active or c.router.metrics.holds > num_holds)
    return task


def test_held_requests_go_one_by_one_by_priority_and_age() -> None:
    async def scenario() -> None:
        async with cluster(gated) as c:
            one_at_a_time(c)
            names = [("a", "normal"), ("b", "low"), ("c", "normal"), ("d", "high"), ("e", "normal")]
            tasks = [await submit(c, named(*name)) for name in names]
            await until(lambda: c.router.dispatcher.num_held == 4)
            c.mocks[0].gate.set()
            assert [(await task).status for task in tasks] == [200] * 5
            assert order(c) == ["a", "d", "c", "e", "b"]
            assert c.router.metrics.holds == 4

    run(scenario)


def test_the_policy_learns_how_long_and_how_many_wait() -> None:
    async def scenario() -> None:
        async with cluster(gated) as c:
            one_at_a_time(c)
            tasks = [await submit(c, named(name)) for name in "abc"]
            await asyncio.sleep(0.05)
            c.decider.asked.clear()
            c.mocks[0].gate.set()
            await asyncio.gather(*tasks)
            (_, waited_s, queue_size), *_ = c.decider.asked
            assert waited_s >= 0.05
            assert queue_size == 2

    run(scenario)


def test_a_full_queue_refuses_with_retry_after() -> None:
    async def scenario() -> None:
        async with cluster(gated, holding={"max_held": 2, "max_hold_s": 8}) as c:
            one_at_a_time(c)
            tasks = [await submit(c, named(name)) for name in "abc"]
            refused = await c.ask(named("d"))
            assert (refused.status, refused.headers["retry-after"]) == (429, "4")
            assert refused.json["error"]["code"] == "queue_full"
            # A more urgent one takes the place of the last of the least urgent.
            tasks.append(await submit(c, named("e", "high")))
            assert (await tasks[2]).status == 429
            c.mocks[0].gate.set()
            assert [(await task).status for task in tasks] == [200, 200, 429, 200]
            assert order(c) == ["a", "e", "b"]

    run(scenario)


def test_nobody_is_held_forever() -> None:
    async def scenario() -> None:
        async with cluster(ok, holding={"max_hold_s": 0.1, "recheck_s": 60}) as c:
            c.decider.rule = lambda excluded: HOLD
            assert (await c.ask(named("a", "low"))).status == 200
            assert c.router.metrics.fallbacks["held too long"] == 1

    run(scenario)


def test_held_requests_are_decided_anew_after_a_while() -> None:
    async def scenario() -> None:
        async with cluster(ok, holding={"recheck_s": 0.05}) as c:
            answers = iter([HOLD, HOLD, 1])
            c.decider.rule = lambda excluded: next(answers)
            assert (await c.ask()).status == 200
            assert len(c.decider.asked) == 3

    run(scenario)


def test_a_first_token_wakes_the_queue() -> None:
    async def slow_stream(mock, request, writer) -> None:  # type: ignore[no-untyped-def]
        from tests.router.mock import stream

        await stream(mock, request, writer, num_chunks=3, pause_s=0.2)

    async def scenario() -> None:
        async with cluster(slow_stream, holding={"recheck_s": 60}) as c:
            c.decider.rule = lambda excluded: (
                1 if not c.books.open or c.ledger.of_kind("first_token") else HOLD
            )
            first = await submit(c, post(stream=True))
            second = await submit(c, post(stream=True))
            await until(lambda: c.num_heard == [2], within_s=0.7)
            assert len(c.books.of_kind("finished")) == 0
            await asyncio.gather(first, second)

    run(scenario)


def test_a_held_request_whose_client_leaves_is_forgotten() -> None:
    async def scenario() -> None:
        async with cluster(gated) as c:
            one_at_a_time(c)
            first = await submit(c, named("a"))
            async with c.wire() as wire:
                await wire.send(named("b"))
                await until(lambda: c.router.dispatcher.num_held == 1)
            await until(lambda: c.router.dispatcher.num_held == 0)
            c.mocks[0].gate.set()
            await first
            assert order(c) == ["a"]

    run(scenario)


def test_a_request_behind_a_held_one_waits_with_it() -> None:
    async def scenario() -> None:
        async with cluster(gated) as c:
            one_at_a_time(c)
            tasks = [await submit(c, named(name)) for name in "ab"]
            asked = len(c.decider.asked)
            tasks.append(await submit(c, named("c")))
            assert len(c.decider.asked) == asked
            c.mocks[0].gate.set()
            await asyncio.gather(*tasks)
            assert order(c) == ["a", "b", "c"]

    run(scenario)
