"""The admin API: replicas come and go, policies are switched, nonsense is refused."""

from __future__ import annotations

import asyncio
from typing import Any

from pointsman.errors import InputError
from pointsman.router.keys import Keys
from tests.router.harness import SECRET, admin, cluster, post, run, until
from tests.router.mock import gated, mocks, ok


def test_replicas_come_and_go_under_load_without_a_failed_request() -> None:
    async def scenario() -> None:
        async with cluster(ok, ok) as c, admin(c) as ask, mocks(ok) as (third,):
            answers: list[int] = []
            is_over = False

            async def load() -> None:
                async with c.wire() as wire:
                    while not is_over:
                        await wire.send(post(stream=len(answers) % 2 == 0))
                        answers.append((await wire.answer()).status)

            clients = [asyncio.ensure_future(load()) for _ in range(8)]
            assert (await ask("POST", "/admin/replicas", {"url": third.url})).json["state"] == "ready"
            await until(lambda: len(third.heard) > 10)
            await ask("DELETE", f"/admin/replicas?url={c.mocks[0].url}")
            await until(lambda: len(c.router.registry) == 2)
            num_before = len(c.mocks[0].heard)
            assert (await ask("POST", "/admin/drain", {"url": c.mocks[1].url})).json["state"] == "draining"
            assert (await ask("POST", "/admin/policy", {"policy": "another"})).json["policy"] == "another"
            await asyncio.sleep(0.2)
            assert (await ask("POST", "/admin/drain", {"url": c.mocks[1].url, "drain": False})).status == 200
            is_over = True
            await asyncio.gather(*clients)
            assert set(answers) == {200}
            assert len(c.mocks[0].heard) == num_before
            listed = (await ask("GET", "/admin/replicas")).json["replicas"]
            assert [replica["name"] for replica in listed] == [c.mocks[1].url, third.url]
            decided = (await ask("GET", "/admin/decisions?last=3")).json
            assert [decision["by"] for decision in decided["decisions"]] == ["another"] * 3
            assert "why" in decided["last"]

    run(scenario)


def test_a_replica_is_removed_only_after_its_last_answer() -> None:
    async def scenario() -> None:
        async with cluster(gated, ok) as c:
            c.decider.rule = lambda excluded: 1
            task = asyncio.ensure_future(c.ask())
            await until(lambda: c.num_heard == [1, 0])
            c.router.registry.remove(c.mocks[0].url)
            assert 0 in c.books.names
            c.mocks[0].gate.set()
            assert (await task).status == 200
            assert 0 not in c.books.names
            assert c.router.registry.by_slot.keys() == {1}

    run(scenario)


def test_admin_refuses_what_makes_no_sense() -> None:
    async def scenario() -> None:
        async with cluster(ok) as c, admin(c, Keys([SECRET])) as ask:
            key = f"authorization: Bearer {SECRET}\r\n"
            for method, path, body, code in (
                ("POST", "/admin/replicas", {"url": "ftp://x"}, 400),
                ("POST", "/admin/replicas", {"url": c.mocks[0].url}, 400),
                ("POST", "/admin/replicas", {"urll": "x"}, 400),
                ("POST", "/admin/replicas", [1], 400),
                ("DELETE", "/admin/replicas?url=http://nobody", None, 400),
                ("POST", "/admin/drain", {"url": "http://nobody"}, 400),
                ("PUT", "/admin/drain", {}, 405),
                ("GET", "/admin/secrets", None, 404),
                ("GET", "/admin/decisions?last=x", None, 400),
                ("GET", "/admin/decisions?last=-1", None, 400),
                ("POST", "/admin/policy", {"policy": 3}, 400),
                ("POST", "/admin/policy", {}, 400),
            ):
                answered = await ask(method, path, body, key)
                assert answered.status == code, (path, answered.body)
                assert "--" not in answered.json["error"]["message"], "options are of the command line"
            assert (await ask("GET", "/admin/replicas")).status == 401
            assert (
                await ask("GET", "/admin/replicas", headers=key + "origin: http://evil\r\n")
            ).status == 403
            assert (await ask("GET", "/admin/replicas", headers=key)).status == 200

    run(scenario)


def test_a_bad_policy_does_not_replace_a_good_one() -> None:
    async def scenario() -> None:
        async with cluster(ok) as c, admin(c) as ask:

            def refuse(name: str) -> Any:
                raise InputError("policy", name, "unknown", "name another")

            c.router.decisions._source = refuse
            assert (await ask("POST", "/admin/policy", {"policy": "nonsense"})).status == 400
            assert (await ask("GET", "/admin/policy")).json == {"policy": "fake", "shadow": None}
            assert (await c.ask()).status == 200

    run(scenario)


def test_a_server_is_found_by_the_url_it_was_given_by() -> None:
    async def scenario() -> None:
        async with cluster(ok) as c, admin(c) as ask:
            url = c.mocks[0].url
            assert (await ask("POST", "/admin/replicas", {"url": f"{url}/v1"})).status == 400  # there already
            assert (await ask("POST", "/admin/drain", {"url": f"{url}/v1/"})).json["name"] == url

    run(scenario)


def test_a_wrong_command_is_told_the_right_ones() -> None:
    async def scenario() -> None:
        async with cluster(ok) as c, admin(c) as ask:
            for method, path, status, said in (
                ("GET", "/admin/drain", 405, "GET is no command for this path; use POST"),
                ("POST", "/admin/decisions", 405, "use GET"),
                ("GET", "/admin/drains", 404, "no such admin command; there are /admin/replicas, "),
                ("DELETE", "/admin/replicas", 400, "add ?url=http://host:port"),
            ):
                answer = await ask(method, path)
                assert answer.status == status
                assert said in answer.json["error"]["message"]

    run(scenario)
