"""What a proxied request costs in CPU time: Pointsman's router, nginx and vllm-router, in one run.

    python benchmarks/router_cost.py --vllm-router /tmp/vr-venv/bin/vllm-router

Four instant mock servers and the load generator run in this process; every router is a process of its own,
and what counts is the CPU time of that process (with its children and threads), which a busy machine
disturbs far less than wall time. Pointsman runs with everything on: the default policy, a shadow policy, a
log line a request, recorded traffic, scrapes and health checks. All routers are up all the time and get their
load in turn, a second or so each, in random order: the machine's speed changes, but hardly within a round.
The table shows medians over the rounds, and below it the medians of the ratios within a round.

`--other CHECKOUT` runs another checkout of Pointsman beside this one: what a change costs. Each is started in
its own checkout, where Python looks first: PYTHONPATH comes second, so that both could be the same code.

nginx comes from the system (Debian: nginx-light), vllm-router from PyPI into a virtual environment of its
own; what is not there is left out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import uvloop

NUM_SERVERS, NUM_CHUNKS, CHUNK_PAUSE_S, CONCURRENCY = 4, 50, 0.002, 32

# --- mock servers ---

ANSWER = json.dumps(
    {"object": "chat.completion", "text": "x" * 900, "usage": {"prompt_tokens": 250, "completion_tokens": 20}}
).encode()
MODELS = json.dumps({"object": "list", "data": [{"id": "m", "object": "model", "owned_by": "x"}]}).encode()
EVENT = (
    b"data: "
    + json.dumps({"id": "c", "choices": [{"index": 0, "delta": {"content": "token"}}]}).encode()
    + b"\n\n"
)


def http(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
        len(body),
        body,
    )


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


PLAIN, LISTED = http(ANSWER), http(MODELS)
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
STREAM_END = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


class Server(asyncio.Protocol):
    """Answers at once; a stream's chunks come 2 ms apart."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]
        self.data = b""

    def data_received(self, data: bytes) -> None:
        self.data += data
        while (end := self.data.find(b"\r\n\r\n")) >= 0:
            head = self.data[:end].lower()
            start = head.find(b"content-length:")
            length = int(head[start + 15 :].split(b"\r\n", 1)[0]) if start >= 0 else 0
            if b"transfer-encoding: chunked" in head:
                last = self.data.find(b"\r\n0\r\n\r\n", end)
                length = last + 7 - end - 4 if last >= 0 else len(self.data)
            if len(self.data) < end + 4 + length:
                return
            body, self.data = self.data[end + 4 : end + 4 + length], self.data[end + 4 + length :]
            if not head.startswith(b"post"):
                self.transport.write(LISTED)
            elif b'"stream": true' in body or b'"stream":true' in body:
                self.transport.write(STREAM_HEAD)
                self.stream(0)
            else:
                self.transport.write(PLAIN)

    def stream(self, index: int) -> None:
        if self.transport.is_closing():
            return
        if index == NUM_CHUNKS:
            self.transport.write(STREAM_END)
            return
        self.transport.write(chunk(EVENT))
        asyncio.get_running_loop().call_later(CHUNK_PAUSE_S, self.stream, index + 1)


# --- load ---


def request(index: int, *, is_stream: bool) -> bytes:
    """1 KB, 64 different prompts."""
    content = f"prompt {index % 64} " + "word " * 180
    body = {"model": "m", "messages": [{"role": "user", "content": content}], "stream": is_stream}
    data = json.dumps(body).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    return head + b"content-length: %d\r\n\r\n%b" % (len(data), data)


class Client(asyncio.Protocol):
    """Sends one request after the other, as long as there are any."""

    def __init__(
        self, indices: Iterator[int], is_stream: bool, firsts: list[float], errors: list[bytes]
    ) -> None:
        self.indices, self.is_stream, self.firsts, self.errors = indices, is_stream, firsts, errors
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.next()

    def next(self) -> None:
        index = next(self.indices, None)
        if index is None:
            self.done.set_result(None)
            self.transport.close()
            return
        self.data, self.sent_at, self.is_first = b"", time.perf_counter(), True
        self.transport.write(request(index, is_stream=self.is_stream))

    def data_received(self, data: bytes) -> None:
        self.data += data
        if self.is_stream:
            if self.is_first and b"data:" in self.data:
                self.is_first = False
                self.firsts.append(time.perf_counter() - self.sent_at)
            is_whole = self.data.endswith(b"0\r\n\r\n")
        else:
            is_whole = self.data.endswith((ANSWER, ANSWER + b"\r\n0\r\n\r\n"))  # with or without chunks
        if is_whole or b" 200 " not in self.data[:20]:
            if not is_whole or (self.is_stream and self.data.count(EVENT) != NUM_CHUNKS):
                self.errors.append(self.data[:200])
            self.next()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.errors.append(b"connection lost")
            self.done.set_result(None)


async def load(port: int, count: int, *, is_stream: bool, concurrency: int = CONCURRENCY) -> list[float]:
    """Runs `count` requests; seconds to the first chunk of each stream."""
    indices, firsts, errors = iter(range(count)), [], []
    loop = asyncio.get_running_loop()
    clients = [
        (await loop.create_connection(lambda: Client(indices, is_stream, firsts, errors), "127.0.0.1", port))[
            1
        ]
        for _ in range(min(concurrency, count))
    ]
    await asyncio.gather(*(client.done for client in clients))
    if errors:
        raise SystemExit(f"{len(errors)} of {count} requests failed, the first with {errors[0]!r}")
    return firsts


# --- routers ---


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def nginx_command(port: int, servers: list[int], folder: Path, program: str) -> list[str]:
    upstream = "".join(f"server 127.0.0.1:{server};" for server in servers)
    (folder / "nginx.conf").write_text(
        f"""daemon off; worker_processes 1; pid {folder}/nginx.pid; error_log {folder}/error.log;
        events {{ worker_connections 4096; }}
        http {{
          access_log {folder}/access.log;
          client_body_temp_path {folder}; proxy_temp_path {folder}; fastcgi_temp_path {folder};
          uwsgi_temp_path {folder}; scgi_temp_path {folder};
          upstream servers {{ least_conn; {upstream} keepalive 256; }}
          server {{
            listen 127.0.0.1:{port}; keepalive_requests 1000000000; client_max_body_size 16m;
            location / {{
              proxy_pass http://servers; proxy_http_version 1.1; proxy_set_header Connection "";
              proxy_buffering off;
            }}
          }}
        }}"""
    )
    return [program, "-c", str(folder / "nginx.conf"), "-p", str(folder)]


def pointsman_command(port: int, servers: list[int], folder: Path, program: str) -> list[str]:
    backends = [part for server in servers for part in ("--backend", f"http://127.0.0.1:{server}")]
    options = ["--port", str(port), "--admin-port", "0", "--shadow", "least-outstanding"]
    return [
        program,
        "-m",
        "pointsman",
        "serve",
        *backends,
        *options,
        "--record",
        str(folder / "traffic.jsonl"),
    ]


def started_in(checkout: Path, program: str) -> Any:
    """What starts the Pointsman of a checkout, wherever this one is run and whatever is installed."""
    inside = ["env", "-C", str(checkout.resolve())]
    where = "import pointsman; print(pointsman.__file__)"
    found = subprocess.run([*inside, program, "-c", where], check=True, capture_output=True, text=True).stdout
    if Path(found.strip()).resolve() != checkout.resolve() / "pointsman" / "__init__.py":
        raise SystemExit(f"in {checkout} Python finds Pointsman in {found.strip()}: unset PYTHONSAFEPATH")
    return lambda *about: [*inside, *pointsman_command(*about)]


def vllm_router_command(port: int, servers: list[int], folder: Path, program: str) -> list[str]:
    urls = [f"http://127.0.0.1:{server}" for server in servers]
    metrics = ["--prometheus-port", str(free_port())]
    return [program, "--worker-urls", *urls, "--port", str(port), "--policy", "round_robin", *metrics]


def with_children(pid: int) -> list[int]:
    found = [pid]
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(path.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(path.parent.name))
    return found


def cpu_ms(pids: list[int]) -> float:
    """Of some processes with their threads."""
    total_ns = 0
    for pid in pids:
        for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            with suppress(OSError):  # a thread that has ended meanwhile
                total_ns += int(path.read_text().split()[0])
    return total_ns / 1e6


@asynccontextmanager
async def running(command: list[str], port: int, folder: Path) -> AsyncIterator[int]:
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            deadline = time.monotonic() + 90
            while True:
                with socket.socket() as sock:
                    if sock.connect_ex(("127.0.0.1", port)) == 0:
                        break
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"{command[0]} did not start: {(folder / 'log').read_text()[-2000:]}")
                await asyncio.sleep(0.1)
            await asyncio.sleep(2)  # vllm-router looks for its workers
            yield process.pid
        finally:
            with suppress(ProcessLookupError):  # it ended by itself
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


async def measure(
    name: str, port: int, pids: list[int], num_requests: int, num_streams: int
) -> dict[str, float]:
    found = {}
    await load(port, num_requests // 5, is_stream=False)
    before = cpu_ms(pids)
    await load(port, num_requests, is_stream=False)
    found["ms a request"] = (cpu_ms(pids) - before) / num_requests
    before = cpu_ms(pids)
    await load(port, num_streams, is_stream=True)
    found["ms a stream"] = (cpu_ms(pids) - before) / num_streams
    found["first chunk ms"] = statistics.median(await load(port, 5, is_stream=True, concurrency=1)) * 1e3
    print(f"  {name:12}" + "".join(f"  {key} {value:.3f}" for key, value in found.items()), flush=True)
    return found


async def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=4_000, help="to each router, each round")
    parser.add_argument("--streams", type=int, default=96, help="to each router, each round")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--nginx", default=shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin"))
    parser.add_argument("--vllm-router", default=shutil.which("vllm-router"))
    parser.add_argument("--other", type=Path, metavar="CHECKOUT", help="of Pointsman, to compare with")
    options = parser.parse_args()
    if not Path("/proc/self/schedstat").exists():
        raise SystemExit("needs Linux with /proc/PID/schedstat")
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(Server, "127.0.0.1", 0) for _ in range(NUM_SERVERS)]
    ports = [server.sockets[0].getsockname()[1] for server in servers]
    routers = {"pointsman": (started_in(Path(__file__).parents[1], sys.executable), sys.executable)}
    if options.other:
        routers["other"] = (started_in(options.other, sys.executable), sys.executable)
    if options.nginx:
        routers["nginx"] = (nginx_command, options.nginx)
    if options.vllm_router:
        routers["vllm-router"] = (vllm_router_command, options.vllm_router)
    async with AsyncExitStack() as stack:
        up: dict[str, tuple[int, list[int]]] = {"direct": (ports[0], [])}
        for name, (command, program) in routers.items():
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            port = free_port()
            pid = await stack.enter_async_context(
                running(command(port, ports, folder, program), port, folder)
            )
            up[name] = (port, with_children(pid))
            await load(port, options.requests, is_stream=False)
            await load(port, CONCURRENCY, is_stream=True)
        results: dict[str, list[dict[str, float]]] = {name: [] for name in up}
        for round_number in range(options.rounds):
            print(f"round {round_number + 1}", flush=True)
            for name in random.sample(list(up), len(up)):
                results[name].append(await measure(name, *up[name], options.requests, options.streams))
    print_table(results)
    print_ratios(results)


def print_ratios(results: dict[str, list[dict[str, float]]]) -> None:
    """Of what ran seconds apart: the machine's speed changes from round to round, the ratio hardly."""
    for name, rounds in results.items():
        if name not in ("direct", "pointsman"):
            for measure in ("ms a request", "ms a stream"):
                ratios = [
                    ours[measure] / theirs[measure]
                    for ours, theirs in zip(results["pointsman"], rounds, strict=True)
                ]
                print(f"pointsman / {name}, {measure}: {statistics.median(ratios):.2f}")


def print_table(results: dict[str, list[dict[str, float]]]) -> None:
    measures = list(results["direct"][0])
    print("\n| router | " + " | ".join(measures) + " |\n|---|" + "---|" * len(measures))
    for name, rounds in results.items():
        cells = [statistics.median(found[measure] for found in rounds) for measure in measures]
        print(f"| {name} | " + " | ".join(f"{cell:.3f}" for cell in cells) + " |")


if __name__ == "__main__":
    uvloop.run(main())
