"""Requests that wait at the router."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.router.fakes import HOLD
from tests.router.harness import Answered, Cluster, cluster, post, run, until
from tests.router.mock import gated, ok


def one_at_a_time(c: Cluster) -> None:
    """The policy holds while the first replica has a request."""

    def rule(excluded: Collection[int]) -> int:
        return HOLD if c.books.open else 1

    c.decider.rule = rule


def named(name: str, priority: str = "normal", model: str | None = None) -> bytes:
    return post(
        {"messages": [], "n": name, "model": model},
        headers=f"x-pointsman-priority: {priority}\r\nx-request-id: {name}\r\n",
    )


def order(c: Cluster, number: int = 0) -> list[str | None]:
    return [heard.header("x-request-id") for heard in c.mocks[number].heard]


@asynccontextmanager
async def serving(*models: tuple[str, ...], **options: Any) -> AsyncIterator[Cluster]:
    """Gated servers of these models, each of which takes one request at a time."""
    async with cluster(*[gated] * len(models), **options) as c:
        for replica, names in zip(c.router.registry, models, strict=True):
            c.router.registry.set_models(replica, dict.fromkeys(names))

        def rule(excluded: Collection[int]) -> int:
            busy = {*excluded, *c.books.open.values()}
            return next((slot + 1 for slot in range(len(models)) if slot not in busy), HOLD)

        c.decider.rule = rule
        yield c


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


def sized(name: str, num_bytes: int) -> bytes:
    message = {"role": "user", "content": "x" * num_bytes}
    return post({"messages": [message], "n": name}, headers=f"x-request-id: {name}\r\n")


@pytest.mark.parametrize(
    ("overtake_s", "expected"),
    [(60.0, ["first", "small", "small-too", "large"]), (0.0, ["first", "large", "small", "small-too"])],
)
def test_small_requests_go_first_where_they_may(overtake_s: float, expected: list[str]) -> None:
    async def scenario() -> None:
        async with cluster(gated, holding={"overtake_s": overtake_s}) as c:
            one_at_a_time(c)
            names = [("first", 100), ("large", 40_000), ("small", 100), ("small-too", 100)]
            tasks = [await submit(c, sized(*name)) for name in names]
            await until(lambda: c.router.dispatcher.num_held == 3)
            c.mocks[0].gate.set()
            assert [(await task).status for task in tasks] == [200] * 4
            assert order(c) == expected
            assert c.router.dispatcher.num_held == 0

    run(scenario)


def test_the_policy_in_charge_says_in_which_order() -> None:
    """By the first policy large ones age slowly; the one that it is switched to goes by arrival."""

    async def scenario() -> None:
        async with cluster(gated) as c:
            one_at_a_time(c)
            c.decider.small_first = 0.4
            c.router.decisions.switch("fake")  # the same again, as it is now
            tasks = [await submit(c, sized("first", 100)), await submit(c, sized("large", 40_000))]
            await asyncio.sleep(0.2)
            tasks.append(await submit(c, sized("small", 100)))
            large = c.router.dispatcher.fronts()[0]  # the other has not waited at all
            await asyncio.sleep(0.2)
            assert c.router.dispatcher.fronts()[0].arrived_at > large.arrived_at
            c.decider.small_first = 0.0
            c.router.decisions.switch("fake")
            assert c.router.dispatcher.fronts() == [large]
            c.mocks[0].gate.set()
            await asyncio.gather(*tasks)
            assert order(c) == ["first", "large", "small"]

    run(scenario)


@pytest.mark.parametrize("limits", [{"overtake_s": 0.3}, {"overtake_s": 60, "max_hold_s": 0.4}], ids=str)
def test_a_large_request_is_overtaken_for_a_while_only(limits: dict[str, float]) -> None:
    """Small ones come without end; the large one goes all the same."""

    async def scenario() -> None:
        async with cluster(gated, holding=limits | {"recheck_s": 60}) as c:
            one_at_a_time(c)
            tasks = [await submit(c, sized("first", 100)), await submit(c, sized("large", 40_000))]
            for number in range(40):
                tasks.append(await submit(c, sized(f"small {number}", 100)))
                tasks.append(await submit(c, sized(f"small-too {number}", 100)))
                c.mocks[0].gate.set()
                await asyncio.sleep(0.02)
                c.mocks[0].gate.clear()
            c.mocks[0].gate.set()
            await asyncio.gather(*tasks)
            assert 2 < order(c).index("large") < len(tasks) - 2

    run(scenario)


def test_a_large_request_whose_client_leaves_is_forgotten() -> None:
    async def scenario() -> None:
        async with cluster(gated, holding={"overtake_s": 60}) as c:
            one_at_a_time(c)
            tasks = [await submit(c, sized(name, 100)) for name in ("a", "b")]
            async with c.wire() as wire:
                await wire.send(sized("c", 40_000))
                await until(lambda: c.router.dispatcher.num_held == 2)
                assert [front.size for front in c.router.dispatcher.fronts()] == [0]
            await until(lambda: c.router.dispatcher.num_held == 1)
            c.mocks[0].gate.set()
            await asyncio.gather(*tasks)
            assert order(c) == ["a", "b"]

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
                1 if not c.books.open or c.books.of_kind("first_token") else HOLD
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


@pytest.mark.parametrize("urgency", ["normal", "high"])
def test_a_held_request_does_not_stop_those_of_other_models(urgency: str) -> None:
    async def scenario() -> None:
        async with serving(("a",), ("b",)) as c:
            tasks = [await submit(c, named(name, urgency, "a")) for name in ("a1", "a2", "a3")]
            await until(lambda: c.router.dispatcher.num_held == 2)
            tasks.append(await submit(c, named("b1", model="b")))
            await until(lambda: order(c, 1) == ["b1"])
            # And held themselves, they go as soon as their own server can take them.
            tasks += [await submit(c, named(name, model="b")) for name in ("b2", "b3")]
            assert c.router.dispatcher.num_held == 4
            c.mocks[1].gate.set()
            await asyncio.gather(*tasks[3:])
            assert order(c, 1) == ["b1", "b2", "b3"] and order(c) == ["a1"]
            c.mocks[0].gate.set()
            await asyncio.gather(*tasks)
            assert order(c) == ["a1", "a2", "a3"]

    run(scenario)


def test_requests_of_two_models_on_the_same_servers_keep_their_order() -> None:
    async def scenario() -> None:
        async with serving(("a", "b")) as c:
            names = [("a1", "a"), ("b1", "b"), ("a2", "a"), ("b2", "b"), ("any", None)]
            tasks = [await submit(c, named(name, model=model)) for name, model in names]
            asked = len(c.decider.asked)
            tasks.append(await submit(c, named("b3", model="b")))
            assert len(c.decider.asked) == asked  # it waits behind the others
            c.mocks[0].gate.set()
            await asyncio.gather(*tasks)
            assert order(c) == ["a1", "b1", "a2", "b2", "any", "b3"]

    run(scenario)


def test_the_policy_sees_how_many_wait_for_the_same_servers() -> None:
    async def scenario() -> None:
        async with serving(("a",), ("b", "c"), ("c",)) as c:
            # Each server has one; then two wait for a, one for b and one for c, which shares a server with b.
            models = ["a", "b", "c", "a", "a", "b", "c"]
            tasks = [await submit(c, named(str(i), model=model)) for i, model in enumerate(models)]
            await until(lambda: c.router.dispatcher.num_held == 4)
            assert [queue_size for _, _, queue_size in c.decider.asked] == [1, 1, 1, 1, 1, 2]
            c.decider.asked.clear()
            c.router.dispatcher.wake()
            await until(lambda: len(c.decider.asked) == 3)
            assert [queue_size for _, _, queue_size in c.decider.asked] == [2, 2, 2]
            for mock in c.mocks:
                mock.gate.set()
            await asyncio.gather(*tasks)

    run(scenario)


def test_a_full_queue_of_several_models_refuses_the_last_of_the_least_urgent() -> None:
    async def scenario() -> None:
        async with serving(("a",), ("b",), holding={"max_held": 2}) as c:
            tasks = [await submit(c, named(name, model=name[0])) for name in ("a1", "b1", "b2", "a2")]
            tasks.append(await submit(c, named("b3", "high", "b")))
            assert (await tasks[3]).status == 429
            for mock in c.mocks:
                mock.gate.set()
            assert [(await task).status for task in tasks] == [200, 200, 200, 429, 200]
            assert (order(c), order(c, 1)) == (["a1"], ["b1", "b3", "b2"])

    run(scenario)


class _Elsewhere:
    """Another router holds one that has waited longer."""

    num_held = 3
    is_older = True

    def goes_before(self, request: object, order: object, now: float) -> bool:
        return self.is_older


def test_a_request_gives_way_to_one_that_waits_longer_at_another_router_but_not_for_long() -> None:
    async def scenario() -> None:
        async with cluster(ok) as c:
            elsewhere = c.router.dispatcher.elsewhere = _Elsewhere()
            started = asyncio.get_running_loop().time()
            answer = await submit(c, named("a"))
            assert c.num_heard == [0]
            assert c.decider.asked[0][2] == 4  # with those that other routers hold
            assert (await answer).status == 200  # nobody has taken the place
            assert asyncio.get_running_loop().time() - started >= 0.04
            again = await submit(c, named("b"))
            elsewhere.is_older = False
            c.router.dispatcher.wake()
            assert (await again).status == 200

    run(scenario)


def test_fronts_are_the_first_of_every_line() -> None:
    async def scenario() -> None:
        async with serving(("m",), ("n",)) as c:
            tasks = [await submit(c, named(f"m{k}", model="m")) for k in range(3)]
            tasks += [await submit(c, named(f"n{k}", "high", model="n")) for k in range(2)]
            fronts = c.router.dispatcher.fronts()
            assert [(front.priority, front.model) for front in fronts] == [(0, "n"), (1, "m")]
            for mock in c.mocks:
                mock.gate.set()
            assert [answer.status for answer in await asyncio.gather(*tasks)] == [200] * 5

    run(scenario)
