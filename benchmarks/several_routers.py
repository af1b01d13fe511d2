"""Three routers in front of the same unequal servers: what is it worth that they share their books?

The same arrivals are served four times by the same emulated servers (two A100, two A40):

- one router that sees everything;
- three routers that share their books through a Redis of this script (`apt-get install redis-server`), each
  with every third request, also of one chat;
- three that do not;
- three that share, with the store killed half-way: no request may be lost, and every router must say within a
  second that it goes by its own books.

    python benchmarks/several_routers.py [--requests 2000] [--seeds 1] [--policy default] [--time-scale 1]
        [--scenario mixed-hardware]

Prompts are new ones every time, of the same lengths. With a scenario of chats (multi-turn) the servers' own
counters say how much of the prompts they found in their caches. Times are of the emulated servers, whatever
--time-scale. How late the clients were is printed: all share this machine, and what is late there is nobody's
decision.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import socket
import subprocess
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, replace
from time import monotonic

import numpy as np
import redis
from numpy.typing import NDArray

from pointsman.experiments.scenarios import REPORT_SEEDS, find_scenario
from pointsman.experiments.simulate import prepare
from pointsman.live.load import Load, Replay
from pointsman.live.processes import RouterProcess, emulator, router, run_to_end
from pointsman.report.tables import markdown, number
from pointsman.router.http.address import parse_url
from pointsman.router.http.limits import Limits
from pointsman.router.http.upstream import Pool
from pointsman.workload import Workload

MODEL = "Llama-3.1-8B"  # Llama-3-8B with room for the longest conversations
DEVICES = ("A100-80", "A100-80", "A40", "A40")
NUM_ROUTERS = 3
ONE, SHARED, ALONE, KILLED = "one router", "three, shared", "three, alone", "three, store killed half-way"
_LOOKED_UP = "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"
_UP = re.compile(r"^pointsman_sharing_up (\d)", re.MULTILINE)


@dataclass(frozen=True)
class Served:
    ttft_s: NDArray[np.float64]
    e2e_s: NDArray[np.float64]
    problems: Counter[str]
    late_p99_s: float
    hit_share: float  # of the prompt tokens, by the servers
    store_bytes: float | None = None  # that routers sent to the store, a request
    noticed_s: float | None = None  # that the store was gone, by the last router


class Spread(Load):
    """Requests that go to several routers in turn."""

    def __init__(self, routers: Sequence[RouterProcess]) -> None:
        super().__init__(parse_url(routers[0].url), MODEL)
        self._pools = [self.pool, *(Pool(parse_url(one.url), Limits()) for one in routers[1:])]

    def _send(self, row: int, message: bytes) -> None:
        self.pool = self._pools[row % len(self._pools)]
        super()._send(row, message)

    def close(self) -> None:
        for pool in self._pools:
            pool.close()


@contextmanager
def store() -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            yield f"redis://127.0.0.1:{port}/benchmark", process
        finally:
            process.kill()


def store_bytes(process: subprocess.Popen[bytes] | None, url: str) -> int:
    """What was sent to the store so far; 0 if it is gone."""
    if process is None or process.poll() is not None:
        return 0
    with redis.Redis.from_url(url.rpartition("/")[0]) as client:
        return int(client.info("stats")["total_net_input_bytes"])


def looked_up(urls: Sequence[str]) -> NDArray[np.float64]:
    """[2] prompt tokens that all servers looked up in their caches so far, and found there."""
    total = np.zeros(2)
    for url in urls:
        with urllib.request.urlopen(f"{url}/metrics") as page:
            text = page.read().decode()
        total += [
            sum(map(float, re.findall(rf"^{name}\S* (\S+)", text, re.MULTILINE))) for name in _LOOKED_UP
        ]
    return total


def sharing_up(one: RouterProcess) -> bool:
    with urllib.request.urlopen(f"{one.url}/metrics") as page:
        found = _UP.search(page.read().decode())
    return found is not None and found[1] == "1"


async def until(routers: Sequence[RouterProcess], is_up: bool, within_s: float = 10.0) -> float:
    """-> seconds until all routers say so."""
    started = monotonic()
    while monotonic() - started < within_s:
        states = [await asyncio.to_thread(sharing_up, one) for one in routers]
        if all(state == is_up for state in states):
            return monotonic() - started
        await asyncio.sleep(0.02)
    raise TimeoutError(f"not all routers said within {within_s} s that sharing is {is_up}")


async def serve(
    kind: str, workload: Workload, urls: Sequence[str], policy: str, time_scale: float, seed: int
) -> Served:
    servers = [option for url in urls for option in ("--backend", url)]
    num_routers = 1 if kind == ONE else NUM_ROUTERS
    async with AsyncExitStack() as stack:
        process, share = None, ""
        if kind in (SHARED, KILLED):
            share, process = stack.enter_context(store())
            servers += ["--share", share]
        routers = [await stack.enter_async_context(router(policy, servers)) for _ in range(num_routers)]
        if process is not None:
            await until(routers, True)
        noticing = None
        if kind == KILLED and process is not None:
            half_s = float(workload.arrived_at[-1]) / 2
            noticing = asyncio.create_task(kill(process, routers, half_s))
        load = Spread(routers)
        before = looked_up(urls), store_bytes(process, share)
        replay = await load.replay(workload, seed)
        load.close()
        queries, hits = looked_up(urls) - before[0]
        sent_bytes = store_bytes(process, share) - before[1]
        served = judged(replay, time_scale)
        return replace(
            served,
            hit_share=hits / max(1.0, queries),
            store_bytes=sent_bytes / len(workload) if kind == SHARED else None,
            noticed_s=await noticing if noticing is not None else None,
        )


async def kill(process: subprocess.Popen[bytes], routers: Sequence[RouterProcess], after_s: float) -> float:
    await asyncio.sleep(after_s)
    process.kill()
    return await until(routers, False)


def judged(replay: Replay, time_scale: float) -> Served:
    done = replay.requests[replay.requests["completed_at"] >= 0]
    return Served(
        time_scale * (done["first_token_at"] - done["arrived_at"]),
        time_scale * (done["completed_at"] - done["arrived_at"]),
        replay.problems,
        float(np.percentile(replay.lateness_s, 99)),
        hit_share=0.0,
    )


async def measured(asked: argparse.Namespace) -> dict[str, list[Served]]:
    kinds = (ONE, SHARED, ALONE, KILLED)
    groups = ",".join(f"{{device: {device}}}" for device in DEVICES)
    overrides = [
        f"cluster.replicas=[{groups}]",
        f"cluster.model={MODEL}",
        f"workload.requests={NUM_ROUTERS * asked.requests}",
    ]
    scale = ["--time-scale", str(asked.time_scale)]
    found: dict[str, list[Served]] = {kind: [] for kind in kinds}
    async with emulator(["--model", MODEL, "--devices", ",".join(DEVICES), *scale]) as servers:
        for block, seed in enumerate(REPORT_SEEDS[: asked.seeds]):
            workload = prepare(find_scenario(asked.scenario).config(seed, overrides)).workload
            workload = replace(
                workload,
                arrived_at=workload.arrived_at / asked.time_scale,
                think_s=workload.think_s / asked.time_scale,
            )
            for kind in (*kinds[block % 4 :], *kinds[: block % 4]):  # what drifts hits all of them
                texts = 1000 * seed + kinds.index(kind)
                one = await serve(kind, workload, servers.urls, asked.policy, asked.time_scale, texts)
                found[kind].append(one)
                print(f"seed {seed}, {kind}: P99 TTFT {np.percentile(one.ttft_s, 99):.3f} s", flush=True)
    return found


def report(found: dict[str, list[Served]]) -> str:
    def ttft_p99_s(kind: str) -> float:
        return float(np.mean([np.percentile(one.ttft_s, 99) for one in found[kind]]))

    rows = []
    for kind, served in found.items():
        problems = sum((one.problems for one in served), Counter())
        noticed = [one.noticed_s for one in served if one.noticed_s is not None]
        rows.append(
            [
                kind,
                number(ttft_p99_s(kind)),
                f"{ttft_p99_s(kind) / ttft_p99_s(ONE) - 1:+.1%}",
                number(float(np.mean([one.ttft_s.mean() for one in served]))),
                number(float(np.mean([one.e2e_s.mean() for one in served]))),
                f"{problems.total()} {dict(problems) or ''}".strip(),
                number(max(noticed)) if noticed else "–",
                f"{np.mean([one.hit_share for one in served]):.1%}",
                number(float(np.mean([one.store_bytes for one in served]))) if kind == SHARED else "–",
                number(1000 * max(one.late_p99_s for one in served)),
            ]
        )
    header = ["", "TTFT P99 (s)", "against one router", "TTFT mean (s)", "e2e mean (s)", "lost"]
    header += ["noticed after (s)", "cached", "bytes a request to the store"]
    return markdown([*header, "clients late, P99 (ms)"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=2000, help="of each router")
    parser.add_argument("--seeds", type=int, default=1, help="blocks")
    parser.add_argument("--policy", default="default")
    parser.add_argument("--scenario", default="mixed-hardware", help="its arrivals and prompts")
    parser.add_argument("--time-scale", type=float, default=1.0, help="how much faster than real time")
    print(report(run_to_end(measured(parser.parse_args()))))
    print(f"load average: {os.getloadavg()}")


if __name__ == "__main__":
    main()
