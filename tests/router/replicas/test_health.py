from __future__ import annotations

import asyncio

from pointsman.router.config import Backend
from tests.router.harness import Cluster, admin, cluster, get, post, run, until
from tests.router.mock import ok


async def listed_models(c: Cluster) -> set[str]:
    return {model["id"] for model in (await c.ask(get("/v1/models"))).json["data"]}


def test_models_of_a_server_are_read_when_it_becomes_healthy() -> None:
    """Not only after `models_interval_s`, which is an hour here."""

    async def scenario() -> None:
        often = {"health_interval_s": 0.02, "health_failures": 1}
        async with cluster(ok, ok, reliability=often) as c:
            c.mocks[0].is_healthy = False
            await until(lambda: c.books.accepting[0] is False)
            c.mocks[0].models = ("another",)
            c.mocks[0].is_healthy = True
            replica = c.router.registry.by_slot[0]
            await until(lambda: replica.models is not None and "another" in replica.models)
            assert await listed_models(c) == {"m", "another"}

    run(scenario)


def test_a_server_that_is_added_gets_nothing_before_its_first_look() -> None:
    async def scenario() -> None:
        async with cluster(ok, ok) as c:
            other = c.mocks[1]
            c.router.registry.remove(other.url)
            other.models = ("another",)
            added = c.router.registry.add(Backend(url=other.url), is_returning=True)
            assert added.state == "new"
            for _ in range(20):
                assert (await c.ask()).status == 200
            assert added.state == "ready" and c.num_heard == [20, 0]
            body = {"model": "another", "messages": [{"role": "user", "content": "hi"}]}
            assert (await c.ask(post(body))).status == 200

            # The same holds for one that was away: it may have been started anew with other models.
            c.router.registry.remove(c.mocks[0].url)
            other.is_healthy = False
            await c.router.watch._check(added, is_first=True)
            assert added.state == "unhealthy"
            other.is_healthy, other.models = True, ("m",)
            looking = asyncio.ensure_future(c.router.watch._check(added))
            await until(lambda: added.is_accepting)
            assert added.models is not None and set(added.models) == {"m"}
            await looking

    run(scenario)


def test_a_server_that_is_added_and_down_gets_nothing() -> None:
    async def scenario() -> None:
        async with cluster(ok) as c, admin(c) as ask:
            answered = await ask("POST", "/admin/replicas", {"url": "http://127.0.0.1:1"})
            assert answered.json["state"] == "unhealthy"
            assert [(await c.ask()).status for _ in range(4)] == [200] * 4

    run(scenario)


def test_a_server_is_looked_at_when_it_is_added_even_if_there_was_none() -> None:
    async def scenario() -> None:
        async with cluster(ok, ok, reliability={"health_interval_s": 0.02, "health_failures": 1}) as c:
            registry = c.router.registry
            for mock in c.mocks:
                registry.remove(mock.url)
            assert await listed_models(c) == set()
            added = registry.add(Backend(url=c.mocks[0].url))
            await until(lambda: added.models is not None)
            assert await listed_models(c) == {"m"}
            c.mocks[0].is_healthy = False
            await until(lambda: not added.is_accepting)

    run(scenario)


def test_the_only_server_is_not_waited_for() -> None:
    """All servers may come anew at once: better one that nobody has looked at than none."""

    async def scenario() -> None:
        async with cluster(ok) as c:
            (url,) = c.router.registry.names()
            c.router.registry.remove(url)
            c.router.registry.add(Backend(url=url), is_returning=True)
            assert (await c.ask()).status == 200

    run(scenario)
