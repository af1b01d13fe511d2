"""Servers that fail in every way under load, for as long as it takes: is anything lost, or does it leak?

    python benchmarks/router_chaos.py --requests 100000

The long version of tests/router/test_chaos.py. `pointsman serve` with the default policy is a process of its
own; four mock servers and the clients run in this one. Requests come at random times, at a steady mean rate:
half of them are streams, and some clients leave before they are answered. Every few seconds one or two
servers fail, each in another way, and recover again.

Every request has a name, which its answer must carry. Checked are: each request ends in exactly one way for
its client, in the router's log, its counters and its recorded traffic; the router's memory and file
descriptors stay as they were after the warm-up; 10 s after a fault latencies are normal.

On a busy machine run it with `chrt -r 1` (as root), else latencies tell of the machine, not of the router.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import urlopen

import numpy as np
import uvloop
from chaos_clients import Load
from chaos_servers import FAULTS, Server
from router_cost import free_port, running

NUM_SERVERS = 4
QUIET_FIRST_S, FAULT_S, RECOVERY_S, WATCHED_S = 20.0, (2.0, 6.0), 10.0, 5.0
SETTINGS = ("limits.first_byte_timeout_s=2", "limits.idle_timeout_s=3")  # else a hang lasts for minutes
WARM_UP_SHARE = 0.2  # of the requests; then every table of the router has reached its size
MAX_GROWTH_MB = 4.0
MAX_SLOWDOWN, STALL_MS = 2.0, 100.0  # a shared machine stalls by itself now and then
END_WITHIN_S = 30.0
PAGE_MB = os.sysconf("SC_PAGE_SIZE") / 2**20

# --- faults ---


class Fault(NamedTuple):
    kinds: Sequence[str]
    began_at: float
    ended_at: float


async def break_servers(servers: Sequence[Server], dice: random.Random, faults: list[Fault]) -> None:
    """Until cancelled. Every kind comes as often as every other."""
    kinds: list[str] = []
    await asyncio.sleep(QUIET_FIRST_S)
    while True:
        ill = dice.sample(servers, dice.choice((1, 1, 2)))
        if len(kinds) < len(ill):
            kinds += dice.sample(FAULTS, len(FAULTS))
        chosen = [kinds.pop() for _ in ill]
        began_at = time.monotonic()
        for server, kind in zip(ill, chosen, strict=True):
            server.break_down(kind)
        await asyncio.sleep(dice.uniform(*FAULT_S))
        for server in ill:
            await server.recover()
        faults.append(Fault(chosen, began_at, time.monotonic()))
        await asyncio.sleep(RECOVERY_S + WATCHED_S)


# --- the router's process ---


class Sample(NamedTuple):
    num_sent: int
    memory_mb: float
    num_files: int


async def watch(pid: int, load: Load, samples: list[Sample], faults: list[Fault]) -> None:
    while True:
        samples.append(sample(pid, load.num_sent))
        if len(samples) % 20 == 0:
            last = samples[-1]
            print(
                f"  {load.num_sent:7,} requests, {len(faults)} faults, {dict(load.outcomes)}, "
                f"{last.memory_mb:.1f} MB, {last.num_files} files",
                file=sys.stderr,
                flush=True,
            )
        await asyncio.sleep(1.0)


def sample(pid: int, num_sent: int) -> Sample:
    resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return Sample(num_sent, resident * PAGE_MB, len(list(Path(f"/proc/{pid}/fd").iterdir())))


async def num_files_idle(pid: int) -> int:
    """The fewest of some looks: health checks open connections of their own now and then."""
    looks = []
    for _ in range(20):
        looks.append(sample(pid, 0).num_files)
        await asyncio.sleep(0.1)
    return min(looks)


def counters(port: int) -> dict[str, float]:
    """The router's own, added up over their labels."""
    with urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        text = answer.read().decode()
    totals: Counter[str] = Counter()
    for name, value in re.findall(r"^(pointsman_\w+)(?:\{.*\})? ([0-9.e+-]+)$", text, re.MULTILINE):
        totals[name] += float(value)  # type: ignore[assignment]
    return dict(totals)


# --- a run ---


@dataclass
class Run:
    load: Load
    faults: list[Fault]
    servers: list[Server]
    samples: list[Sample]
    num_files_before: int
    num_files_after: int
    counters: dict[str, float]
    logged: Counter[str]
    num_recorded: int
    wall_s: float


async def run(num_requests: int, rate: float, seed: int) -> Run:
    dice = random.Random(seed)
    servers = [Server() for _ in range(NUM_SERVERS)]
    for server in servers:
        await server.listen()
    port = free_port()
    backends = [part for server in servers for part in ("--backend", server.url)]
    settings = [part for setting in SETTINGS for part in ("--set", setting)]
    command = [sys.executable, "-m", "pointsman", "serve", *backends, *settings, "--port", str(port)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recorded = folder / "traffic.jsonl"
        command += ["--admin-port", "0", "--record", str(recorded)]
        async with running(command, port, folder) as pid:
            load = Load(port)
            faults: list[Fault] = []
            samples: list[Sample] = []
            num_files_before = await num_files_idle(pid)
            began_at = time.monotonic()
            tasks = [
                asyncio.create_task(break_servers(servers, random.Random(seed + 1), faults)),
                asyncio.create_task(watch(pid, load, samples, faults)),
            ]
            await send(load, num_requests, rate, dice)
            for task in tasks:
                task.cancel()
            for server in servers:
                await server.recover()
            await until_all_ended(load)
            wall_s = time.monotonic() - began_at
            for client in list(load.clients):
                client.close()
            await asyncio.sleep(6.0)  # connections to servers are kept for 4 s
            num_files_after = await num_files_idle(pid)
            counted = await asyncio.to_thread(counters, port)
        # What was buffered is written by now.
        lines = (folder / "log").read_text().splitlines()
        requests = [json.loads(line) for line in lines if line.startswith('{"time"')]
        logged = Counter(str(line["id"]) for line in requests if line["event"] == "request")
        num_recorded = len(recorded.read_text().splitlines())
    for server in servers:
        server.close()
    return Run(
        load,
        faults,
        servers,
        samples,
        num_files_before,
        num_files_after,
        counted,
        logged,
        num_recorded,
        wall_s,
    )


async def send(load: Load, num_requests: int, rate: float, dice: random.Random) -> None:
    """At random times; a busy machine does not make them fewer."""
    asking: set[asyncio.Task[None]] = set()
    due_at = time.monotonic()
    for _ in range(num_requests):
        due_at += dice.expovariate(rate)
        if (pause_s := due_at - time.monotonic()) > 0:
            await asyncio.sleep(pause_s)
        task = asyncio.create_task(load.ask(dice))
        asking.add(task)
        task.add_done_callback(asking.discard)
    await asyncio.gather(*asking)


async def until_all_ended(load: Load) -> None:
    deadline = time.monotonic() + END_WITHIN_S
    while load.num_open and time.monotonic() < deadline:
        await asyncio.sleep(0.05)


# --- what came out of it ---


class Check(NamedTuple):
    what: str
    found: str
    is_good: bool


def p99_ms(load: Load, since: float, until: float) -> float:
    """Of the requests sent in that time."""
    sent_at = np.array(load.sent_at)
    latency_s = np.array(load.latency_s)[(sent_at >= since) & (sent_at < until)]
    return float(np.percentile(latency_s, 99)) * 1e3 if len(latency_s) else float("nan")


def limit_ms(normal_ms: float) -> float:
    """What still counts as normal."""
    return max(MAX_SLOWDOWN * normal_ms, STALL_MS)


def fault_rows(run: Run) -> tuple[float, list[dict[str, Any]]]:
    """P99 in ms before the first fault; during and after each."""
    first = run.faults[0].began_at
    normal_ms = p99_ms(run.load, first - QUIET_FIRST_S / 2, first)
    rows = []
    for fault in run.faults:
        watched_from = fault.ended_at + RECOVERY_S
        if watched_from + WATCHED_S > run.load.sent_at[-1]:  # the load ended before
            continue
        rows.append(
            {
                "fault": " + ".join(fault.kinds),
                "lasted_s": fault.ended_at - fault.began_at,
                "p99_ms_during": p99_ms(run.load, fault.began_at, fault.ended_at),
                "back_after_s": back_after_s(run.load, fault, limit_ms(normal_ms)),
                "p99_ms_10s_after": p99_ms(run.load, watched_from, watched_from + WATCHED_S),
            }
        )
    return normal_ms, rows


def back_after_s(load: Load, fault: Fault, most_ms: float) -> float | None:
    """Seconds from the end of the fault to the first whole second with a normal P99."""
    for second in range(int(RECOVERY_S + WATCHED_S)):
        since = fault.ended_at + second
        if p99_ms(load, since, since + 1) <= most_ms:
            return second
    return None


def growth_mb(run: Run) -> float:
    num_sent = run.load.num_sent
    warm = [s.memory_mb for s in run.samples if WARM_UP_SHARE <= s.num_sent / num_sent < WARM_UP_SHARE + 0.1]
    last = [s.memory_mb for s in run.samples if s.num_sent / num_sent >= 0.9]
    return float(np.median(last) - np.median(warm))


def checks(run: Run, normal_ms: float, rows: Sequence[dict[str, Any]]) -> list[Check]:
    load, logged = run.load, run.logged
    answered_by: Counter[str] = Counter()
    for server in run.servers:
        answered_by.update(server.answered)
    num_twice = sum(count > 1 for count in answered_by.values())
    num_lost = load.num_open + load.outcomes["no answer"] + load.outcomes["no connection"]
    # Of a client that leaves at once, the router may have seen nothing.
    names = {f"r{number}" for number in range(1, load.num_sent + 1)}
    is_logged = logged.keys() <= names and names - load.left <= logged.keys()
    num_counted = int(run.counters["pointsman_requests_total"])
    books = {
        name: int(run.counters[f"pointsman_{name}"]) for name in ("replica_outstanding", "held", "clients")
    }
    num_retries = int(run.counters.get("pointsman_retries_total", 0))
    worst_ms = float(np.max([row["p99_ms_10s_after"] for row in rows]))  # no answers at all: NaN, a failure
    growth = growth_mb(run)
    errors = sorted(outcome for outcome in load.outcomes if outcome.isdecimal() and outcome != "200")
    found = ", ".join(f"{outcome}: {load.outcomes[outcome]}" for outcome in errors)
    return [
        Check("requests lost (no answer)", str(num_lost), num_lost == 0),
        Check("wrong, mixed up or second answers", str(load.wrong[:3] or 0), not load.wrong),
        Check("answered whole by two servers", str(num_twice), num_twice == 0),
        Check("answers of 5xx", found or "0", not errors),
        Check("retries, so that faults were felt", f"{num_retries:,}", num_retries > len(rows)),
        Check("lines of the log", f"{logged.total():,}", is_logged and logged.total() == len(logged)),
        Check("counted by the router", f"{num_counted:,}", num_counted == len(logged)),
        Check("recorded", f"{run.num_recorded:,}", run.num_recorded == len(logged)),
        Check("books at the end", str(books), books == {"replica_outstanding": 0, "held": 0, "clients": 1}),
        Check("memory growth after the warm-up", f"{growth:+.1f} MB", growth <= MAX_GROWTH_MB),
        Check(
            "open files before, highest, after",
            f"{run.num_files_before}, {max(s.num_files for s in run.samples)}, {run.num_files_after}",
            run.num_files_after <= run.num_files_before,
        ),
        Check(
            f"worst P99 10 s after a fault (normal: {normal_ms:.0f} ms)",
            f"{worst_ms:.0f} ms",
            worst_ms <= limit_ms(normal_ms),
        ),
    ]


def print_tables(run: Run, rows: Sequence[dict[str, Any]], checked: Sequence[Check]) -> None:
    print(f"{run.load.num_sent:,} requests in {run.wall_s:.0f} s: {dict(run.load.outcomes.most_common())}\n")
    print("| fault | lasted s | P99 ms during | normal again after s | P99 ms 10 s after |")
    print("|---|--:|--:|--:|--:|")
    for row in rows:
        back = "never" if row["back_after_s"] is None else row["back_after_s"]
        cells = f"{row['lasted_s']:.1f} | {row['p99_ms_during']:.0f} | {back}"
        print(f"| {row['fault']} | {cells} | {row['p99_ms_10s_after']:.0f} |")
    print("\n| check | found | |\n|---|---|---|")
    for check in checked:
        print(f"| {check.what} | {check.found} | {'ok' if check.is_good else 'FAILED'} |")


async def main() -> bool:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--rate", type=float, default=300.0, help="requests a second")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    shortest_s = 1.1 * (QUIET_FIRST_S + FAULT_S[1] + RECOVERY_S + WATCHED_S)  # arrivals are random
    if options.requests < shortest_s * options.rate:
        parser.error(f"--requests is too few for one fault: {shortest_s * options.rate:.0f} or more")
    done = await run(options.requests, options.rate, options.seed)
    normal_ms, rows = fault_rows(done)
    checked = checks(done, normal_ms, rows)
    if options.json:
        outcomes, found = dict(done.load.outcomes), [check._asdict() for check in checked]
        print(json.dumps({"outcomes": outcomes, "normal_p99_ms": normal_ms, "faults": rows, "checks": found}))
    else:
        print_tables(done, rows, checked)
    return all(check.is_good for check in checked)


if __name__ == "__main__":
    sys.exit(not uvloop.run(main()))
