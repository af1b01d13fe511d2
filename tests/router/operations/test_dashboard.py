"""The live page: what it shows, who may see it, and what it may load."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import math
import random
import re
import time
from bisect import bisect_left
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pointsman.routing.policy  # noqa: F401  (a router has it long before somebody switches)
from pointsman.inference import checkpoint
from pointsman.router.config import Settings
from pointsman.router.keys import Keys
from pointsman.router.operations import dashboard
from pointsman.router.replicas.registry import Registry
from pointsman.router.telemetry import history
from pointsman.router.telemetry.history import NUM_SAMPLES, SAMPLE_S, History, quantile
from pointsman.router.telemetry.metrics import LATENCY_S, Histogram, Metrics
from tests.report.pages import CHROMIUM, needs_chromium
from tests.router.ended import Over, ended
from tests.router.fakes import HOLD, FakeBooks
from tests.router.harness import SECRET, admin, cluster, post, run, until
from tests.router.mock import gated, ok, reset, status


def test_percentiles_are_in_the_bucket_of_the_true_ones() -> None:
    rng = random.Random(1)
    values = sorted(rng.lognormvariate(-1, 1.5) for _ in range(997))
    histogram = Histogram()
    for value in values:
        histogram.observe(value)
    counts = dict(enumerate(histogram.counts))
    for share in (0.01, 0.5, 0.95, 0.99):
        found = quantile(counts, share)
        true = values[math.ceil(share * len(values)) - 1]
        assert found is not None
        assert bisect_left(LATENCY_S, found) == bisect_left(LATENCY_S, true)
    assert quantile({}, 0.5) is None
    assert quantile({len(LATENCY_S): 3}, 0.5) == LATENCY_S[-1]
    assert quantile({0: 2}, 0.5) == LATENCY_S[0] / 2


def answer(metrics: Metrics, *ones: Over) -> None:
    for kind, totals in ended(*ones).tallies(np.array(LATENCY_S, np.float64)):
        metrics.answered(kind, totals)


def test_history_forgets_what_is_old_and_keeps_the_rest() -> None:
    metrics = Metrics()
    past = History(metrics, Registry(FakeBooks(), Settings()), now=0.0)
    for index in range(3 * NUM_SAMPLES):
        done = Over(e2e_s=2.0 if index < NUM_SAMPLES else 0.4, ttft_s=0.02)
        answer(metrics, done, Over(replica_name="gone", status=500, outcome="error", e2e_s=0.1))
        past.tick((index + 1) * SAMPLE_S - 0.1)  # too early
        past.tick((index + 1) * SAMPLE_S)
    answer(metrics, Over(e2e_s=0.4))
    over_s, lately = past.lately(3 * NUM_SAMPLES * SAMPLE_S + 1.0)
    assert over_s == pytest.approx(NUM_SAMPLES * SAMPLE_S + 1.0)
    assert lately["answers"] == {("a", "p", 200): NUM_SAMPLES + 1, ("gone", "p", 500): NUM_SAMPLES}
    assert sum(history.by_replica(lately["e2e_s"])["a"].values()) == NUM_SAMPLES + 1
    assert 0.3 < (quantile(history.by_replica(lately["e2e_s"])["a"], 0.99) or 0) <= 0.5
    assert len(past.points) == len(past._samples) == NUM_SAMPLES
    assert past.points[-1].answers_per_s == 2 / SAMPLE_S
    assert past.points[-1].errors_per_s == 1 / SAMPLE_S


def test_the_clock_of_the_router_takes_the_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "SAMPLE_S", 0.1)

    async def scenario() -> None:
        async with cluster(ok) as c:
            await c.ask()
            await until(lambda: sum(point.answers_per_s for point in c.router.history.points) > 0)

    run(scenario)


def test_state_tells_what_happened() -> None:
    async def scenario() -> None:
        quick = {"breaker_failures": 3}
        async with cluster(ok, status(500), shadow="other", reliability=quick) as c, admin(c) as ask:
            first, second = (mock.url for mock in c.mocks)
            c.router.decisions._shadow.rule = lambda excluded: 1  # type: ignore[union-attr]
            c.decider.rule = lambda excluded: 2 if 1 not in excluded else 1
            for _ in range(3):
                assert (await c.ask(post(stream=True))).status == 200
            c.decider.rule = lambda excluded: 1 / 0
            await c.ask()
            c.books.signals[0] = {"waiting": 3.0, "scraped_kv_use": 0.25, "step_s": 0.02}
            c.router.registry.by_slot[0].has_gauges = True
            state = (await ask("GET", "/admin/state")).json
            replicas = state["replicas"]
            assert [(r["name"], r["state"], r["breaker"]) for r in replicas] == [
                (first, "ready", "closed"),
                (second, "broken", "open"),
            ]
            assert [(r["waiting"], r["kv_use"], r["step_s"]) for r in replicas] == [
                (3.0, 0.25, 0.02),
                (0.0, None, None),
            ]
            assert [r["share"] for r in replicas] == [pytest.approx(4 / 7), pytest.approx(3 / 7)]
            assert [r["ttft_s"]["count"] for r in replicas] == [3, 0]
            assert state["latencies"]["e2e_s"]["count"] == replicas[0]["e2e_s"]["count"] == 4
            assert replicas[1]["e2e_s"]["p99_s"] is None
            assert 0 < state["latencies"]["ttft_s"]["p50_s"] <= state["latencies"]["e2e_s"]["p99_s"]
            assert state["answers"]["by_status"] == {"200": 4}
            assert state["decisions"] == {
                "by": {"fake": {first: 3, second: 3}, "least-outstanding": {first: 1}},
                "fallbacks": {"exception ZeroDivisionError": 1},
                "retries": {"status 500": 3},
            }
            assert state["shadow"] == {
                "policy": "other",
                "agreed": 4,
                "differed": 3,
                "failures": 0,
                "decisions": {first: 7},
            }
            assert [one["replica"] for one in state["last"]] == [second, first] * 3 + [first]
            assert state["explained"]["by"] == "least-outstanding"

    run(scenario)


def test_state_says_what_is_wrong() -> None:
    """A dead server, gauges unheard of for a while, a policy that fails, a queue that is full."""

    async def scenario() -> None:
        quick = {"breaker_failures": 1, "policy_failures": 1}
        async with cluster(ok, ok, reliability=quick, holding={"max_held": 10}) as c, admin(c) as ask:

            async def problems() -> list[tuple[str, bool]]:
                state = (await ask("GET", "/admin/state")).json
                return [(one["text"], one["is_severe"]) for one in state["problems"]]

            first, second = list(c.router.registry)
            name = second.name.removeprefix("http://")
            assert await problems() == []
            now = time.monotonic()
            second.has_gauges = True
            c.books.signals[1] = {
                "scraped_at": now - 40.0,
                "tokens_at": now - 40.0,
                "scraped_kv_use": 0.9,
                "token_rate": 700.0,
                "step_s": 0.02,
            }
            ((text, is_severe),) = await problems()
            assert re.match(rf"{name} has not said for 40 s how busy it is", text) and not is_severe
            state = (await ask("GET", "/admin/state")).json["replicas"][1]
            assert [state[figure] for figure in ("kv_use", "token_rate", "step_s")] == [None, None, None]
            for _ in range(2):
                c.router.registry.checked(second, "does not answer (refused)")
            assert await problems() == [
                (f"{name} does not answer (refused); no requests go there, for 0 s", True)
            ]
            c.decider.rule = lambda excluded: 1 / 0
            assert (await c.ask()).status == 200
            assert (await problems())[1] == (
                "policy fake fails; least-outstanding decides in its place",
                True,
            )
            c.router.registry.failed(first, now)
            texts = [text for text, _ in await problems()]
            assert texts[0] == "no server gets requests; clients are answered 503"
            assert (await c.ask()).status == 503
            assert ("1 of the last 2 answers were errors (5xx)", False) in await problems()
            c.router.metrics.num_held = 10
            assert any("answered 429" in text for text, _ in await problems())
            c.router.metrics.num_held = 0

    run(scenario)


def test_state_tells_who_is_held() -> None:
    async def scenario() -> None:
        async with cluster(gated) as c, admin(c) as ask:
            c.decider.rule = lambda excluded: HOLD
            tasks = [asyncio.ensure_future(c.ask()) for _ in range(2)]
            await until(lambda: c.router.dispatcher.num_held == 2)
            held = (await ask("GET", "/admin/state")).json["held"]
            assert (held["now"], held["requests"], held["waited"]["count"]) == (2, 2, 0)
            c.decider.rule = lambda excluded: 1
            c.router.dispatcher.wake()
            c.mocks[0].gate.set()
            await asyncio.gather(*tasks)
            held = (await ask("GET", "/admin/state")).json["held"]
            assert (held["now"], held["requests"], held["waited"]["count"]) == (0, 2, 2)

    run(scenario)


def test_state_is_json_for_any_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(constant: str) -> Any:
        raise ValueError(constant)

    async def scenario() -> None:
        async with cluster(ok, reset) as c, admin(c) as ask:
            c.books.signals[0] = {"step_s": math.inf, "token_rate": math.nan}
            monkeypatch.setattr(c.decider, "explain", lambda: {"logit": -math.inf})
            c.decider.rule = lambda excluded: 1
            await c.ask()
            for path in ("/admin/state", "/admin/decisions"):
                json.loads((await ask("GET", path)).body, parse_constant=refuse)

    run(scenario)


def test_a_failure_of_ours_is_answered_and_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with cluster(ok) as c, admin(c) as ask:
            monkeypatch.setattr(c.router.decisions, "explain", lambda: 1 / 0)
            assert (await ask("GET", "/admin/state")).status == 500
            assert any(line["event"] == "command failed" for line in c.logged())

    run(scenario)


def test_the_page_needs_no_key_and_its_data_do() -> None:
    async def scenario() -> None:
        async with cluster(ok) as c, admin(c, Keys([SECRET])) as ask:
            page = await ask("GET", "/dashboard")
            assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
            assert (await ask("GET", "/admin/state")).status == 401
            key = f"authorization: Bearer {SECRET}\r\n"
            assert (await ask("GET", "/admin/state", headers=key)).status == 200
            for path in ("/dashboard", "/admin/state"):
                assert (await ask("GET", path, headers=key + "origin: http://evil\r\n")).status == 403
            assert (await ask("POST", "/dashboard", {}, key)).status == 405
            assert c.mocks[0].url.encode() not in page.body

    run(scenario)


def test_the_page_is_complete_and_may_run_nothing_else() -> None:
    answer = dashboard.page()
    html, headers = answer.body.decode(), dict(answer.headers)
    scripts = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    assert len(scripts) == html.count("<script") == 1
    digest = base64.b64encode(hashlib.sha256(scripts[0].encode()).digest())
    assert b"script-src 'sha256-%b';" % digest in headers[b"content-security-policy"]
    assert b"default-src 'none'" in headers[b"content-security-policy"]
    addresses = set(re.findall(r"https?://[\w./]+", html))
    assert addresses == {"http://www.w3.org/2000/svg"}  # the name of a language, which nobody fetches
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|@import|url\(", html)
    used = set(re.findall(r'\bat\("([\w-]+)"\)', scripts[0])) | set(
        re.findall(r'fill(?:Table|List)\("([\w-]+)"', scripts[0])
    )
    assert used
    assert used <= set(re.findall(r'id="([\w-]+)"', html))


async def shown(url: str, folder: Path) -> str:
    """The page as it stands in a browser after some seconds."""
    assert CHROMIUM is not None
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--virtual-time-budget=4000")
    command = (CHROMIUM, *options, f"--user-data-dir={folder}", "--dump-dom", url)
    pipe, nothing = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    browser = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=nothing)
    out, _ = await asyncio.wait_for(browser.communicate(), 120)
    return out.decode()


@needs_chromium
def test_a_browser_is_shown_what_there_is(tmp_path: Path) -> None:
    """Without a key only where to give one; with a shadow, of how many decisions each column is."""

    async def scenario() -> None:
        async with cluster(ok, ok) as c, admin(c, Keys([SECRET])) as locked, admin(c) as ask:
            page = await shown(f"{locked.url}/dashboard", tmp_path / "locked")
            assert "key needed" in page and re.search(r'<button id="pause"[^>]* hidden', page)
            await c.ask()
            await ask("POST", "/admin/shadow", {"policy": "another"})
            for _ in range(2):
                await c.ask()
            page = await shown(f"{ask.url}/dashboard", tmp_path / "open")
            assert not re.search(r'<button id="pause"[^>]* hidden', page)
            assert "decided, of 3" in page and "another would have, of 2" in page

    run(scenario)


def test_a_policy_is_read_while_requests_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*arguments: Any) -> None:
        time.sleep(0.5)

    monkeypatch.setattr(checkpoint, "load_checkpoint", slow)

    async def scenario() -> None:
        async with cluster(ok) as c, admin(c) as ask:
            switching = asyncio.ensure_future(ask("POST", "/admin/policy", {"policy": "default"}))
            num_answered = 0
            while c.router.decisions.policy == "fake":
                assert (await c.ask()).status == 200
                num_answered += 1
            assert num_answered > 5
            assert (await switching).json["policy"] == "default"

    run(scenario)
