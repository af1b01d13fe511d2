"""Faults on demand, through the admin port, and back to normal."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from pointsman.emulator.cluster import Emulator

from .serving import Answer, ask, completion, connected, request_bytes, with_emulator


async def fault(emulator: Emulator, replica: int, **fields: Any) -> Answer:
    return await ask(emulator.admin_url, "POST", f"/replicas/{replica}/fault", fields)


async def serves(emulator: Emulator, replica: int) -> bool:
    answer = await ask(emulator.replicas[replica].url, "POST", "/v1/completions", completion())
    return (
        answer.status == 200 and (await ask(emulator.replicas[replica].url, "GET", "/health")).status == 200
    )


async def breaks(emulator: Emulator, replica: int) -> bool:
    try:
        await ask(emulator.replicas[replica].url, "POST", "/v1/completions", completion())
    except (ConnectionError, asyncio.IncompleteReadError):
        return True
    return False


def test_slow() -> None:
    async def test(emulator: Emulator) -> None:
        async def took_s() -> float:
            started = time.monotonic()
            await ask(emulator.replicas[0].url, "POST", "/v1/completions", completion(10, 100))
            return time.monotonic() - started

        usual = await took_s()
        assert (await fault(emulator, 0, kind="slow", factor=10)).json()["slowdown"] == 10
        assert await took_s() > 4 * usual
        await fault(emulator, 0, kind="none")
        assert await took_s() < 3 * usual

    with_emulator(test)


def test_errors_are_answered_and_health_stays() -> None:
    async def test(emulator: Emulator) -> None:
        await fault(emulator, 0, kind="error")
        answer = await ask(emulator.replicas[0].url, "POST", "/v1/completions", completion())
        assert answer.status == 500 and answer.json()["error"]["code"] == 500
        assert (await ask(emulator.replicas[0].url, "GET", "/health")).status == 200
        assert await serves(emulator, 1), "the other one is well"
        await fault(emulator, 0, kind="none")
        assert await serves(emulator, 0)

    with_emulator(test, devices=["A100-80", "H100"])


def test_a_server_that_hangs_goes_on_where_it_stopped() -> None:
    async def test(emulator: Emulator) -> None:
        url = emulator.replicas[0].url
        running = asyncio.create_task(ask(url, "POST", "/v1/completions", completion(10, 600)))
        await asyncio.sleep(0.1)
        await fault(emulator, 0, kind="hang", for_s=0.8)
        waiting = asyncio.create_task(ask(url, "GET", "/health"))
        await asyncio.sleep(0.6)
        assert not running.done() and not waiting.done()
        assert (await running).json()["usage"]["completion_tokens"] == 600
        assert (await waiting).status == 200

    with_emulator(test)


def test_resets_break_what_runs_and_what_comes() -> None:
    async def test(emulator: Emulator) -> None:
        async with connected(emulator.replicas[0].url) as (reader, writer):
            body = completion(10, 4000, stream=True)
            writer.write(request_bytes("POST", "/v1/completions", body))
            await reader.readuntil(b"data: ")
            await fault(emulator, 0, kind="reset")
            try:
                await reader.read()
                assert reader.at_eof()
            except ConnectionError:
                pass
        assert await breaks(emulator, 0)
        await fault(emulator, 0, kind="none")
        assert await serves(emulator, 0)
        assert emulator.replicas[0].state()["outstanding"] == 0

    with_emulator(test)


def test_a_server_that_died_comes_back_empty_on_its_port() -> None:
    async def test(emulator: Emulator) -> None:
        url = emulator.replicas[0].url
        running = asyncio.create_task(ask(url, "POST", "/v1/completions", completion(10, 4000)))
        await asyncio.sleep(0.1)
        await fault(emulator, 0, kind="die")
        try:
            await running
            raise AssertionError("answered by a dead server")
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        assert await breaks(emulator, 0)
        await fault(emulator, 0, kind="none")
        assert emulator.replicas[0].url == url and await serves(emulator, 0)
        assert emulator.replicas[0].state()["outstanding"] == 0

    with_emulator(test)


def test_faults_that_make_no_sense_are_refused() -> None:
    async def test(emulator: Emulator) -> None:
        assert (await fault(emulator, 7, kind="hang")).status == 404
        for fields in ({"kind": "explode"}, {}, {"kind": "slow", "factor": -1}, {"kind": "hang", "for": 3}):
            assert (await fault(emulator, 0, **fields)).status == 400
        assert (await ask(emulator.admin_url, "POST", "/replicas/0/fault", b"no json")).status == 400
        assert (await ask(emulator.admin_url, "GET", "/elsewhere")).status == 404
        states = (await ask(emulator.admin_url, "GET", "/replicas")).json()
        assert [state["fault"] for state in states] == ["none"]

    with_emulator(test)
