"""What /metrics says is what happened."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from pointsman.router.config import Backend
from pointsman.router.telemetry.metrics import MAX_DEPARTED
from pointsman.router.telemetry.recording import Recorder, new_recording
from pointsman.routing.calibration import Estimate
from tests.router.harness import admin, cluster, get, metric_values, post, run, until
from tests.router.mock import gated, ok, status


def test_metrics_count_what_happened() -> None:
    async def scenario() -> None:
        async with cluster(ok, status(500), shadow="other", reliability={"breaker_failures": 3}) as c:
            first, second = (mock.url for mock in c.mocks)
            for _ in range(3):
                c.decider.rule = lambda excluded: 2 if 1 not in excluded else 1
                assert (await c.ask(post(stream=True))).status == 200
            c.decider.rule = lambda excluded: 1 / 0
            assert (await c.ask()).status == 200
            await c.ask(post(b"{"))
            found = metric_values((await c.ask(get("/metrics"))).body)
            assert found["pointsman_requests_total", "200", "fake", first] == 3
            assert found["pointsman_requests_total", "200", "least-outstanding", first] == 1
            assert found["pointsman_requests_total", "400", "", ""] == 1
            assert found["pointsman_ttft_seconds_count", "fake", first] == 3
            assert found["pointsman_request_seconds_count", "fake", first] == 3
            assert found["pointsman_request_seconds_count", "least-outstanding", first] == 1
            sums = [found[f"pointsman_{kind}_seconds_sum", "fake", first] for kind in ("ttft", "request")]
            assert 0 < sums[0] < sums[1]
            assert found["pointsman_retries_total", "status 500"] == 3
            assert found["pointsman_fallbacks_total", "exception ZeroDivisionError"] == 1
            assert found["pointsman_decisions_total", "fake", second] == 3
            assert found["pointsman_decisions_total", "fake", first] == 3
            assert found["pointsman_decisions_total", "least-outstanding", first] == 1
            assert found["pointsman_decision_seconds_count", "fake"] == 7
            assert found["pointsman_policy", "fake", "deciding"] == 1
            assert found["pointsman_policy", "other", "shadow"] == 1
            assert found["pointsman_replica_breaker_state", first] == 0
            assert found["pointsman_replica_breaker_state", second] == 2
            assert found["pointsman_replica_share", first] == pytest.approx(4 / 7)
            assert found["pointsman_replica_outstanding", first] == 0
            assert found["pointsman_tokens_total", "output", "fake", first] == 15
            shadowed = [
                found.get(("pointsman_shadow_decisions_total", "other", url), 0) for url in (first, second)
            ]
            assert sum(shadowed) == 7
            agreed = found.get(("pointsman_shadow_agreement_total", "true", "other"), 0)
            assert agreed + found.get(("pointsman_shadow_agreement_total", "false", "other"), 0) == 7
            assert found[("pointsman_clients",)] == 1

    run(scenario)


def test_before_and_after_a_switch_can_be_compared() -> None:
    """Latencies and answers are counted by policy, also those of a request under way at the switch."""

    async def scenario() -> None:
        async with cluster(gated) as c, admin(c) as ask:
            under_way = asyncio.ensure_future(c.ask(post(stream=True)))
            await until(lambda: c.num_heard == [1])
            assert (await ask("POST", "/admin/policy", {"policy": "new"})).json["policy"] == "new"
            c.mocks[0].gate.set()
            await under_way
            await asyncio.gather(*(c.ask(post(stream=True)) for _ in range(2)))
            found = metric_values((await c.ask(get("/metrics"))).body)
            url = c.mocks[0].url
            for policy, count in (("fake", 1), ("new", 2)):
                for kind in ("ttft", "request"):
                    assert found[f"pointsman_{kind}_seconds_count", policy, url] == count
                assert found["pointsman_requests_total", "200", policy, url] == count
                assert found["pointsman_decision_seconds_count", policy] == count
            assert found["pointsman_policy", "new", "deciding"] == 1
            state = (await ask("GET", "/admin/state")).json
            assert {policy: of["e2e_s"]["count"] for policy, of in state["by_policy"].items()} == {
                "fake": 1,
                "new": 2,
            }
            assert [line["policy"] for line in c.logged() if line["event"] == "request"] == [
                "fake",
                "new",
                "new",
            ]

    run(scenario)


def test_estimates_and_their_errors_are_on_metrics_and_in_the_record(tmp_path: Path) -> None:
    path = tmp_path / "traffic.jsonl"

    async def scenario() -> None:
        recorder = Recorder(new_recording(path))
        async with cluster(ok, ok, recorder=recorder) as c:
            url = c.mocks[0].url
            figures = {"step_floor_s": 0.007, "decode_s_per_token": 6e-5, "prefill_s_per_token": 3e-5}
            errors = {"step_floor_s": 0.01, "decode_s_per_token": 0.2, "prefill_s_per_token": 0.05}
            c.books.signals[0] = figures
            c.books.estimates[0] = Estimate(figures, 0.02, "measured", errors=errors)
            c.decider.rule = lambda excluded: 1
            await c.ask(post(stream=True))
            await c.ask()
            found = metric_values((await c.ask(get("/metrics"))).body)
            assert found["pointsman_replica_step_floor_seconds", url] == 0.007
            assert found["pointsman_replica_decode_seconds_per_token", url] == 6e-5
            assert found["pointsman_replica_prefill_seconds_per_token", url] == 3e-5
            assert found["pointsman_replica_estimate_error", "step_floor_s", url] == 0.01
            assert ("pointsman_replica_estimate_error", "step_floor_s", c.mocks[1].url) not in found
            streamed, whole = (recorder.flush(), *map(json.loads, path.read_text().splitlines()))[1:]
            assert streamed["server"] == whole["server"] == url
            assert 0 < streamed["ttft_s"] <= streamed["e2e_s"] < 5 and whole["ttft_s"] is None
            recorded = (*figures, "speed_error", "policy")
            assert [streamed[name] for name in recorded] == [*figures.values(), 0.02, "fake"]
        recorder.close()

    run(scenario)


def test_servers_that_left_long_ago_are_forgotten() -> None:
    async def scenario() -> None:
        async with cluster(ok) as c:
            (url,) = (mock.url for mock in c.mocks)
            requests, registry = c.router.metrics.requests, c.router.registry
            assert (await c.ask()).status == 200
            for number in range(MAX_DEPARTED - 1):
                registry.add(Backend(url=f"http://127.0.0.1:{number + 1}"))
                registry.remove(f"http://127.0.0.1:{number + 1}")
            registry.remove(url)
            registry.add(Backend(url=url))
            assert (await c.ask()).status == 200  # it is back, and counts on
            assert c.router.metrics.requests[url, "fake", 200] == 2
            registry.remove(url)
            for number in range(MAX_DEPARTED):
                assert requests[url, "fake", 200] == 2
                assert url.encode() in (await c.ask(get("/metrics"))).body
                registry.add(Backend(url=f"http://127.0.0.1:{number + 1}"))
                registry.remove(f"http://127.0.0.1:{number + 1}")
            assert url.encode() not in (await c.ask(get("/metrics"))).body

    run(scenario)
