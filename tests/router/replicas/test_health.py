from __future__ import annotations

from pointsman.router.config import Backend
from tests.router.harness import Cluster, cluster, get, run, until
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
