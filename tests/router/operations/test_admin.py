"""The admin API: replicas come and go, policies are switched, nonsense is refused."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pointsman.errors import InputError
from pointsman.router.http.limits import Limits
from pointsman.router.http.listening import listen, port_of
from pointsman.router.keys import Keys
from pointsman.router.operations.admin import Admin
from tests.router.harness import SECRET, Wire, admin, cluster, post, run, until
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
                ("GET", f"/admin/decisions?last={'9' * 4400}", None, 400),
                ("POST", "/admin/replicas", {"url": "http://127.0.0.1:1/a b"}, 400),
                ("POST", "/admin/replicas", {"url": "http://127.0.0.1:1/a\0b"}, 400),
                ("POST", "/admin/replicas", {"url": "http://127.0.0.1:1/\xe9"}, 400),
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


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8081", "127.0.0.1.evil.example", "", "[x"])
def test_a_web_page_whose_name_resolves_to_loopback_learns_nothing(host: str) -> None:
    """A browser takes such a page and the admin port for one server, and sends no Origin with a GET."""

    async def scenario() -> None:
        async with cluster(ok) as c:
            async with admin(c) as ask:
                assert (await ask("GET", "/admin/state", host=host)).status == 403
                for own in ("127.0.0.1:8081", "localhost", "[::1]:8081"):
                    assert (await ask("GET", "/admin/state", host=own)).status == 200
            async with admin(c, Keys([SECRET])) as ask:  # with a key any name will do
                key = f"authorization: Bearer {SECRET}\r\n"
                assert (await ask("GET", "/admin/state", headers=key, host="router.internal")).status == 200

    run(scenario)


def test_an_admin_who_says_nothing_is_not_waited_for_forever() -> None:
    async def scenario() -> None:
        async with cluster(ok) as c:
            service = Admin(c.router, Keys([]))
            server = await listen(service, Limits(request_timeout_s=0.1, keep_alive_s=0.1), "127.0.0.1", 0)
            for begun in (b"", b"GET /admin/state HTTP/1.1\r\n"):
                reader, writer = await asyncio.open_connection("127.0.0.1", port_of(server))
                wire = Wire(reader, writer)
                await wire.send(begun)
                if begun:
                    assert (await wire.answer()).status == 408
                assert await wire.is_closed()
                writer.close()
            server.close()

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
