"""One line a request, written whole; a full disk harms nobody."""

from __future__ import annotations

import asyncio
import io
import json
import os
from pathlib import Path
from typing import Any

from pointsman.router.logs import Log
from pointsman.router.telemetry.recording import Recorder, new_recording
from tests.router.ended import Over, ended
from tests.router.harness import CHAT, cluster, post, run, until
from tests.router.mock import hang, ok


def test_every_request_has_an_id_and_a_log_line() -> None:
    async def scenario() -> None:
        async with cluster(ok) as c:
            answered = await c.ask(post(headers="x-request-id: my-id.1\r\n"))
            assert answered.headers["x-request-id"] == c.mocks[0].heard[0].header("x-request-id") == "my-id.1"
            for bad in ("a b", "x" * 200, 'quote"'):
                answered = await c.ask(post(stream=True, headers=f"x-request-id: {bad}\r\n"))
                assert answered.headers["x-request-id"] != bad
                assert answered.headers["x-request-id"] == c.mocks[0].heard[-1].header("x-request-id")
            lines = [line for line in c.logged() if line["event"] == "request"]
            assert len({line["id"] for line in lines}) == 4
            assert lines[0]["id"] == "my-id.1"
            assert lines[0] | {"time": 0, "e2e_s": 0} == {
                "time": 0,
                "event": "request",
                "id": "my-id.1",
                "path": CHAT,
                "status": 200,
                "outcome": "completed",
                "replica": c.mocks[0].url,
                "policy": "fake",
                "ttft_s": None,
                "e2e_s": 0,
                "prompt_tokens": 7,
                "output_tokens": 5,
                "retries": 0,
            }
            assert 0 < lines[1]["ttft_s"] < lines[1]["e2e_s"]
            assert lines[1]["output_tokens"] == 5

    run(scenario)


def test_answers_of_the_router_itself_have_an_id_too() -> None:
    async def scenario() -> None:
        async with cluster(ok) as c:
            unknown = {"model": "no-such", "messages": []}
            for body, code in ((b"{", 400), (unknown, 404)):
                answered = await c.ask(post(body, headers="x-request-id: mine\r\n"))
                assert (answered.status, answered.headers["x-request-id"]) == (code, "mine")
                assert (await c.ask(post(body))).headers["x-request-id"]
            c.router.registry.drain(c.mocks[0].url, True)
            assert (await c.ask(post(headers="x-request-id: mine\r\n"))).headers["x-request-id"] == "mine"

    run(scenario)


def test_log_lines_are_written_whole_a_page_at_a_time() -> None:
    """Several processes may write to one pipe: up to 4 KiB arrive in one piece."""

    class Pages(io.StringIO):
        def __init__(self) -> None:
            super().__init__()
            self.pages: list[str] = []

        def write(self, text: str) -> int:
            self.pages.append(text)
            return len(text)

    stream = Pages()
    log = Log(stream)
    log.requests(ended(*[Over()] * 100))
    log.requests(ended(Over(path="/" + "\xff" * 5000)))
    log.note("long", about="x" * 5000)
    log.requests(ended(*[Over()] * 3))
    log.flush()
    assert all(page.endswith("\n") for page in stream.pages)
    long = [page for page in stream.pages if len(page) > 4096]
    assert len(long) == 1 and "xxx" in long[0] and long[0].count("\n") == 1
    lines = [json.loads(text) for text in "".join(stream.pages).splitlines()]
    assert [line["id"] for line in lines if line["event"] == "request"] == ["id"] * 104
    assert len(stream.pages) < 104 / 4


def test_a_pipe_that_nobody_reads_costs_lines_and_nothing_else() -> None:
    reading, writing = os.pipe()
    with os.fdopen(writing, "w", encoding="utf-8") as stream, os.fdopen(reading, "rb", buffering=0) as pipe:
        log = Log(stream)
        num_noted = 2000
        for number in range(num_noted):
            log.note("note", number=number, about="x" * 500)
            if number % 100 == 0:
                log.flush()  # which would wait for ever
        log.flush()
        heard = b""
        os.set_blocking(reading, False)
        while (more := pipe.read(1 << 20)) is not None:
            heard += more
            log.flush()
        lines = [json.loads(line) for line in heard.splitlines()]
        numbers = [line["number"] for line in lines if line["event"] == "note"]
        lost = [line["count"] for line in lines if line["event"] == "log lines lost"]
        assert numbers == sorted(numbers) and 0 < len(numbers) < num_noted
        assert len(numbers) + sum(lost) == num_noted
        log.event("the end")
        assert json.loads(pipe.read(1 << 20))["event"] == "the end"


def test_a_full_disk_costs_lines_and_nothing_else(tmp_path: Path) -> None:
    class Disk(io.StringIO):
        is_full = False

        def write(self, text: str) -> int:
            if self.is_full:
                raise OSError(28, "No space left on device")
            return super().write(text)

    class Full(io.RawIOBase):
        def write(self, data: Any) -> int:
            raise OSError(28, "No space left on device")

    async def scenario() -> None:
        disk = Disk()
        recorder = Recorder(new_recording(tmp_path / "traffic.jsonl"))
        async with cluster(ok, limits={"first_byte_timeout_s": 0.2}, log_to=disk, recorder=recorder) as c:
            file, recorder._file = recorder._file, Full()  # type: ignore[assignment]
            disk.is_full = True
            assert (await c.ask()).status == 200
            await asyncio.sleep(0.3)  # the clock has ticked
            disk.is_full = False
            recorder._file = file
            c.mocks[0].behaviour = hang
            assert (await c.ask()).status == 504, "the clock ticks on"
            await until(lambda: "log lines lost" in disk.getvalue())
            events = {line["event"]: line for line in map(json.loads, disk.getvalue().splitlines())}
            assert events["log lines lost"]["count"] >= 2, "of the request, and of what was not recorded"
            await until(lambda: file.tell() > 0)
        recorder.close()
        recorded = (tmp_path / "traffic.jsonl").read_text().splitlines()
        assert [json.loads(line)["outcome"] for line in recorded] == ["failed"]

    run(scenario)
