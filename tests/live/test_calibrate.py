"""`pointsman calibrate` against emulated servers, whose truth is known."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from pointsman.emulator.replica import EmulatedReplica
from pointsman.errors import InputError
from pointsman.live import probing
from pointsman.live.fitting import description, fit_probes
from pointsman.live.probing import (
    Facts,
    Mixed,
    Prober,
    Server,
)
from pointsman.live.under_load import timed_answers
from pointsman.router.replicas.discovery import FileSource
from pointsman.simulator.plan import plan_replicas
from tests.simulator.factories import make_cluster

from .known_times import FACTS, SCHEDULER, decode_s, step_s, truth, with_server


def test_a_live_server_is_calibrated_within_seconds(tmp_path: Path) -> None:
    found: dict[str, Any] = {}

    async def probe(replica: EmulatedReplica) -> None:
        server = Server(replica.url)
        prober = Prober(server, await server.facts(), max_streams=16)
        probes = await prober.run(11.0)
        fit = fit_probes(probes, prober.facts, prober.limit_seqs)
        found["file"] = description(server.url, prober.facts, fit, prober.limit_seqs, prober.num_together)

    with_server(truth(is_async=True), probe)
    path = tmp_path / "server.yaml"
    path.write_text(yaml.safe_dump(found["file"]))
    plan = plan_replicas(make_cluster(replicas=[{"description": "server.yaml"}]), tmp_path)[0]
    # The emulator shares this machine with the prober: generous, but far from another device.
    assert decode_s(plan, 8, 100) == pytest.approx(step_s(0, 8, 100), rel=0.2)
    assert plan.costs.stage_s(1024, pairs=1024**2 / 2) == pytest.approx(step_s(1024, 0), rel=0.2)
    assert plan.num_blocks == SCHEDULER["num_blocks"]
    assert plan.max_seqs == SCHEDULER["max_num_seqs"]
    # How steps are planned shows in half a step's wait, which a stalled machine hides: see the tests above.
    backend = FileSource(path).read()[0]
    assert backend.calibration is not None
    assert backend.calibration["step_floor_s"] == pytest.approx(step_s(0, 1, 1024), rel=0.2)


def test_a_live_server_is_probed_with_answers_that_come_and_go() -> None:
    async def probe(replica: EmulatedReplica) -> None:
        server = Server(replica.url)
        prober = Prober(server, await server.facts(), max_streams=8)
        assert "mixed" in {kind for kind, _, _ in prober._plan()[:20]}
        prober.limit_seqs = 6
        found = [one for one in await prober.mixed(8, 1000) if isinstance(one, Mixed)]
        assert len(found) >= 6  # every client at least once, more if the machine lets them
        assert {one.num_clients for one in found} == {6}
        together = timed_answers(found, step_s(0, 1))
        assert 1.5 < np.mean([one.num_seqs for one in together]) < 6  # they think for half of the time
        said_s = sum(
            one.num_steps * step_s(0, round(one.num_seqs), one.mean_context)
            + sum(step_s(prompt, 0) - step_s(0, 0) for prompts in one.joined for prompt in prompts)
            for one in together
        )
        seconds = sum(one.seconds for one in together)
        assert seconds == pytest.approx(said_s, rel=0.25)  # the emulator shares this machine with the prober

    with_server(truth(is_async=False), probe)


def test_a_second_calibration_finds_nothing_cached() -> None:
    async def ask_twice(replica: EmulatedReplica) -> None:
        ttfts_s = []
        for _ in range(2):
            server = Server(replica.url)
            ttfts_s.append((await server.ask((await server.facts()).model, 1400, 1)).ttft_s)
        assert ttfts_s[1] > 0.5 * step_s(1400, 0)

    with_server(truth(is_async=False), ask_twice)


def test_what_others_do_meanwhile_is_thrown_away() -> None:
    async def probe(replica: EmulatedReplica) -> None:
        server = Server(replica.url)
        prober = Prober(server, await server.facts(), max_streams=2)
        busy = asyncio.create_task(server.ask("m", 16, 1400))
        await asyncio.sleep(0.1)
        assert not await prober._is_quiet()
        busy.cancel()
        await asyncio.gather(busy, return_exceptions=True)
        assert await prober._is_quiet()

    with_server(truth(is_async=False), probe)


def test_a_server_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be reached"):
        asyncio.run(Server("http://127.0.0.1:9").facts())


@contextlib.asynccontextmanager
async def answering(answers: Mapping[str, str]) -> AsyncIterator[tuple[str, list[str]]]:
    """A server by the paths it answers, silent on others -> its address, and the heads of requests so far."""
    heads: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append((await reader.readuntil(b"\r\n\r\n")).decode())
        if (answer := answers.get(heads[-1].split()[1])) is not None:
            status, _, body = answer.partition(" ")
            writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode())
            await writer.drain()
        await reader.read()
        writer.close()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}", heads
    finally:
        listener.close()
        await asyncio.sleep(0.01)  # until all have seen that their clients are gone


MODELS = '200 {"data": [{"id": "m", "max_model_len": 2048}]}'


def test_the_servers_get_their_key(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with answering({"/v1/models": MODELS, "/metrics": "200 ", "/v1/completions": "401 no"}) as (
            url,
            heads,
        ):
            server = Server(url)
            assert await server.facts() == Facts("m", 2048, None, None)
            with pytest.raises(InputError, match=r"fails \(401: no\); set \$POINTSMAN_BACKEND_KEY"):
                await server.ask("m", 16, 4)
            assert len(heads) == 3
            assert all("\r\nauthorization: Bearer secret\r\n" in head for head in heads)
        async with answering({"/v1/models": "401 no"}) as (url, _):
            with pytest.raises(InputError, match=r"/v1/models answers 401; set \$POINTSMAN_BACKEND_KEY"):
                await Server(url).facts()

    monkeypatch.setenv("POINTSMAN_BACKEND_KEY", "secret")
    asyncio.run(run())


def test_a_server_that_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with answering({}) as (url, _):
            with pytest.raises(InputError, match=rf"--url = '{url}': cannot be reached \(timed out\)"):
                await Server(url).facts()
            with pytest.raises(InputError, match=rf"--url = '{url}': says nothing for 0.3 s of a completion"):
                await Server(url).ask("m", 20, 4)
        async with answering({"/v1/models": "200 {}"}) as (url, _):
            with pytest.raises(InputError, match="names no model"):
                await Server(url).facts()

    monkeypatch.setattr(probing, "GET_TIMEOUT_S", 0.1)
    monkeypatch.setattr(probing, "SILENT_S", 0.1)
    asyncio.run(asyncio.wait_for(run(), 20))


@pytest.mark.parametrize("labels", ["", '{engine="0"}'])
def test_a_busy_server_is_not_quiet(labels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        gauges = f"vllm:num_requests_running{labels} 1.0\nvllm:num_requests_waiting{labels} 2.0\n"
        async with answering({"/metrics": f"200 {gauges}"}) as (url, _):
            prober = Prober(Server(url), FACTS)
            assert (await prober.server.gauges())[:2] == (1, 2)
            assert not await prober._is_quiet()

    monkeypatch.setattr(probing, "QUIET_S", 0.2)
    asyncio.run(run())
