"""Why a request went where it did, and what a shadow policy would have done."""

from __future__ import annotations

import pytest

from tests.router.fakes import HOLD
from tests.router.harness import admin, cluster, get, metric_values, post, run
from tests.router.mock import ok, status


def test_a_decision_is_explained_on_request_only() -> None:
    async def scenario() -> None:
        async with cluster(ok) as c:
            assert "x-pointsman-decision" not in (await c.ask()).headers
            answered = await c.ask(post(headers="x-pointsman-decision: 1\r\nx-request-id: me\r\n"))
            url = c.mocks[0].url.removeprefix("http://")
            assert (
                answered.headers["x-pointsman-decision"]
                == f"fake sent the request to {url}, without saying why."
            )
            assert c.mocks[0].heard[1].header("x-pointsman-decision") is None

    run(scenario)


def test_the_shadow_changes_while_requests_go_on() -> None:
    async def scenario() -> None:
        async with cluster(ok) as c, admin(c) as ask:
            await c.ask()
            assert (await ask("GET", "/admin/state")).json["shadow"] is None
            for shadow in ("one", "two"):
                told = await ask("POST", "/admin/shadow", {"policy": shadow})
                assert told.json == {"policy": "fake", "shadow": shadow}
                await c.ask()
                await c.ask()
                state = (await ask("GET", "/admin/state")).json["shadow"]
                assert (state["policy"], state["agreed"] + state["differed"]) == (shadow, 2)
            assert (await ask("POST", "/admin/shadow", {"policy": None})).json["shadow"] is None
            await c.ask()
            found = metric_values((await c.ask(get("/metrics"))).body)
            url = c.mocks[0].url
            for shadow in ("one", "two"):
                assert found["pointsman_shadow_decisions_total", shadow, url] == 2
            assert (await ask("POST", "/admin/shadow", {})).status == 400

    run(scenario)


def test_reasons_are_kept_and_found_by_request() -> None:
    async def scenario() -> None:
        async with cluster(ok, status(500)) as c, admin(c) as ask:
            first, second = (mock.url.removeprefix("http://") for mock in c.mocks)
            c.decider.rule = lambda excluded: 2 if 1 not in excluded else 1
            await c.ask(post(headers="x-request-id: me\r\n"))
            c.decider.rule = lambda excluded: 1 / 0
            await c.ask(post(headers="x-request-id: you\r\n"))
            mine = (await ask("GET", "/admin/decisions?request=me")).json["decisions"]
            assert [one["why"] for one in mine] == [
                f"fake sent the request to {url}, without saying why." for url in (second, first)
            ]
            last = (await ask("GET", "/admin/decisions?last=1")).json
            (yours,) = last["decisions"]
            assert yours["request_id"] == last["last"]["request_id"] == "you"
            assert yours["why"] == (
                f"least-outstanding sent the request to {yours['replica'].removeprefix('http://')}, "
                "because fake could not: exception ZeroDivisionError."
            )
            assert (await ask("GET", "/admin/decisions?request=nobody")).json == {"decisions": []}
            assert (await ask("GET", "/admin/state")).json["last"][0]["why"] == mine[0]["why"]

    run(scenario)


def test_a_reason_that_cannot_be_given_costs_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with cluster(ok) as c:
            monkeypatch.setattr(c.decider, "kept_reason", lambda: 1 / 0)
            answered = await c.ask(post(headers="x-pointsman-decision: 1\r\n"))
            assert (
                answered.status == 200 and "fake sent the request" in answered.headers["x-pointsman-decision"]
            )

    run(scenario)


def test_a_shadow_that_fails_harms_nobody() -> None:
    async def scenario() -> None:
        async with cluster(ok, shadow="other") as c:
            shadow = c.router.decisions._shadow
            shadow.rule = lambda excluded: 1 / 0  # type: ignore[union-attr]
            assert (await c.ask()).status == 200
            assert c.router.metrics.shadow_failures == {"other": 1}
            shadow.rule = lambda excluded: HOLD  # type: ignore[union-attr]
            assert (await c.ask()).status == 200
            assert c.router.metrics.shadow_decisions == {("other", "hold"): 1}

    run(scenario)
