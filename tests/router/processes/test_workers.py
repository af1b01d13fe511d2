"""`pointsman serve --workers 2`: real processes, one port, one set of books."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pointsman.errors import InputError
from pointsman.router.processes import workers
from tests.router.harness import Answered, Wire, get, post, run
from tests.router.mock import Mock, gated, mocks, ok

START_S = 120.0  # kernels may have to be compiled first


@dataclass
class Served:
    process: subprocess.Popen[bytes]
    log: Path
    port: int
    admin_port: int

    async def ask(self, request: bytes | None = None, port: int | None = None) -> Answered:
        reader, writer = await asyncio.open_connection("127.0.0.1", port or self.port)
        try:
            wire = Wire(reader, writer)
            await wire.send(request or post())
            return await wire.answer("GET" if (request or b"").startswith(b"GET") else "POST")
        finally:
            writer.close()

    async def command(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = json.dumps(body).encode() if body is not None else b""
        head = f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(data)}\r\n\r\n"
        answered = await self.ask(head.encode() + data, self.admin_port)
        assert answered.status == 200, answered.body
        return json.loads(answered.body)

    def processes(self) -> set[str]:
        """By the prefix of the ids they give to requests: who has answered any."""
        lines = self.log.read_text().splitlines()
        requests = [json.loads(line) for line in lines if '"event":"request"' in line]
        return {request["id"].partition("-")[0] for request in requests}

    def workers(self) -> list[int]:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(pid) for pid in children.split()]


@asynccontextmanager
async def served(tmp_path: Path, *servers: Mock, more: tuple[str, ...] = ()) -> AsyncIterator[Served]:
    log = tmp_path / "log"
    backends = [option for server in servers for option in ("--backend", server.url)]
    command = ["serve", "--workers", "2", "--port", "0", "--admin-port", "0", *backends, *more]
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "pointsman", *command, "--policy", "least-outstanding"],
            stderr=file,
        )
    try:
        await eventually(lambda: "share the port" in log.read_text() or process.poll() is not None, START_S)
        ports = re.findall(r"http://127\.0\.0\.1:(\d+)/(?:v1|admin/)", log.read_text())
        yield Served(process, log, int(ports[0]), int(ports[1]))
    finally:
        process.terminate()
        await eventually(lambda: process.poll() is not None, 20.0)
        assert process.returncode == 0


async def eventually(condition: Callable[[], bool | Awaitable[bool]], within_s: float = 10.0) -> None:
    async with asyncio.timeout(within_s):
        while True:
            result = condition()
            if result if isinstance(result, bool) else await result:
                return
            await asyncio.sleep(0.05)


def test_processes_share_port_books_counters_and_commands(tmp_path: Path) -> None:
    traffic = tmp_path / "traffic.jsonl"

    async def scenario() -> None:
        async with (
            mocks(ok, ok, ok) as (a, b, c),
            served(tmp_path, a, b, more=("--record", str(traffic))) as s,
        ):
            answers = await asyncio.gather(*(s.ask() for _ in range(200)))
            assert all(answer.status == 200 for answer in answers)
            await eventually(lambda: len(s.processes()) == 2)

            # Whoever is asked counts for all; so does the list of replicas.
            for _ in range(6):
                await eventually(lambda: is_counted(s, 200))
            sent = [one["sent"] for one in (await s.command("GET", "/admin/replicas"))["replicas"]]
            assert sum(sent) == 200

            # What one is told, all do.
            await s.command("POST", "/admin/replicas", {"url": c.url})
            await s.command("DELETE", f"/admin/replicas?url={a.url}")
            await asyncio.sleep(1.5)
            before = len(a.heard)
            await asyncio.gather(*(s.ask() for _ in range(100)))
            assert len(a.heard) == before and len(c.heard) > 0

            # Both write to one file, whole lines.
            await eventually(lambda: len(recorded(traffic)) == 300)

            # One dies: the other goes on, and it is started again.
            victim = s.workers()[1]
            os.kill(victim, signal.SIGKILL)
            await eventually(lambda: victim not in s.workers())
            answers = await asyncio.gather(*(s.ask() for _ in range(20)))
            assert all(answer.status == 200 for answer in answers)
            await eventually(lambda: len(s.workers()) == 2, 20.0)

            # So does the one that leads, and what was changed meanwhile stays.
            await s.command("POST", "/admin/policy", {"policy": "round-robin"})
            await s.command("POST", "/admin/drain", {"url": b.url})
            before = await s.command("GET", "/admin/replicas")
            os.kill(s.workers()[0], signal.SIGKILL)
            await eventually(lambda: s.log.read_text().count("admin on") == 2, START_S)
            s.admin_port = int(re.findall(r"http://127\.0\.0\.1:(\d+)/admin/", s.log.read_text())[-1])
            after = await s.command("GET", "/admin/replicas")
            assert states_of(after) == states_of(before) == {b.url: "draining", c.url: "ready"}
            assert (await s.command("GET", "/admin/policy"))["policy"] == "round-robin"

    run(scenario, timeout_s=2 * START_S + 60)


def states_of(listed: Any) -> dict[str, str]:
    return {one["name"]: one["state"] for one in listed["replicas"]}


def recorded(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def is_counted(s: Served, count: int) -> bool:
    text = (await s.ask(get("/metrics"))).body.decode()
    return sum(map(int, re.findall(r"pointsman_requests_total\{[^}]*\} (\d+)", text))) == count


def test_sigterm_lets_all_processes_finish_what_has_begun(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with mocks(gated) as (server,), served(tmp_path, server) as s:
            asked = [asyncio.ensure_future(s.ask()) for _ in range(10)]
            await eventually(lambda: len(server.heard) == 10)
            s.process.terminate()
            await asyncio.sleep(0.3)
            assert s.process.poll() is None
            server.gate.set()
            assert [one.status for one in await asyncio.gather(*asked)] == [200] * 10

    run(scenario, timeout_s=START_S + 30)


def test_two_routers_do_not_share_a_port() -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(InputError, match="address already in use"):
            workers._reserve("127.0.0.1", other.getsockname()[1])
    with workers._reserve("127.0.0.1", other_port := free_port()) as reserved:
        assert reserved.getsockname()[1] == other_port


def free_port() -> int:
    with socket.socket() as some:
        some.bind(("127.0.0.1", 0))
        return int(some.getsockname()[1])


def test_what_is_wrong_at_the_start_is_said_once(tmp_path: Path) -> None:
    command = [
        "serve",
        "--workers",
        "3",
        "--port",
        "0",
        "--backend",
        "http://127.0.0.1:1",
        "--policy",
        "nonsense",
    ]
    ended = subprocess.run(
        [sys.executable, "-m", "pointsman", *command], capture_output=True, text=True, timeout=START_S
    )
    assert ended.returncode == 2 and ended.stderr.count("error:") == 1 and "nonsense" in ended.stderr
