"""Pointsman, vllm-router and smg in front of the same emulated servers, on traffic that shares prefixes.

    python -m venv /tmp/rivals && /tmp/rivals/bin/pip install vllm-router==0.1.16 smg==1.13.0
    python benchmarks/prefix_rivals.py --rivals /tmp/rivals/bin [--unequal] [--chats] [--json FILE]

Four servers (`pointsman emulate`, prefix caching on), a router process for each row of the table, and two
loads: chats of four turns with eight system prompts, and one long system prompt that everybody shares. A
block is a seed's arrivals. Every router serves each block, one after the other and each time in another
order, so that what drifts hits all of them; the prompts have the same lengths and share the same parts, but
every router has words of its own, so nobody finds what another one left in the caches. A run in which 1 % of
the requests were sent over 30 ms late, or some failed, is made again, up to twice. The rivals run
`cache_aware` as they come, and with the best of a few thresholds, found before on half a block of its own (no
second row if the best are those they come with). Prompts go to /v1/completions: vllm-router 0.1.16 reads no
text from chats, and routes them by load alone. `--chats` sends chats.

Times are those of the emulated servers (wall-clock times the time scale). `cached` is what the servers
counted. `work` is prompt tokens that were computed and output tokens, in seconds of the server that had them;
shown is the largest share of one server over its fair quarter.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
import urllib.request
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from router_cost import free_port, running

from pointsman.config import Config, load_config
from pointsman.errors import InputError
from pointsman.evaluation.bootstrap import paired_ratios
from pointsman.experiments.scenarios import REPORT_SEEDS, SELECTION_SEEDS
from pointsman.experiments.simulate import Prepared, prepare
from pointsman.live.load import Load
from pointsman.live.processes import emulator, router, run_to_end
from pointsman.live.servers import ask_servers, scrape
from pointsman.report.tables import change, markdown, number, percent
from pointsman.router.http.address import parse_url
from pointsman.simulator.plan import ReplicaPlan

MODEL = "Llama-3.1-8B"
EQUAL, UNEQUAL = ("L40S",) * 4, ("A100-80", "L40S", "A40", "A10")
POLICY = "default"
OURS = f"pointsman, {POLICY}"
READY_S = 180.0
LATE_S, MAX_ATTEMPTS = 0.03, 3

LOADS: dict[str, dict[str, Any]] = {
    "multi-turn": {
        "arrivals": {"kind": "poisson", "load": 2.5},
        "lengths": {"kind": "lognormal", "prompt_mean": 1500, "output_mean": 40},
        "requests": 350,
        "prefixes": {
            "systems": {"count": 8, "tokens": 1500, "cv": 0.2},
            "turns": 4,
            "think_s": 1.0,
            "context_tokens": 24_576,
        },
    },
    "shared-prompt": {
        "arrivals": {"kind": "poisson", "load": 1.1},
        "lengths": {
            "kind": "lognormal",
            "prompt_mean": 3000,
            "prompt_cv": 0.5,
            "output_mean": 60,
            "output_cv": 0.5,
        },
        "requests": 350,
        "prefixes": {"systems": {"count": 1, "tokens": 2548}},
    },
}


class Thresholds(NamedTuple):
    """Of `cache_aware`."""

    cache: float
    balance_abs: int
    balance_rel: float

    @property
    def options(self) -> list[str]:
        names = ("cache", "balance-abs", "balance-rel")
        return [
            part
            for name, value in zip(names, self, strict=True)
            for part in (f"--{name}-threshold", f"{value}")
        ]


USUAL = Thresholds(0.3, 64, 1.5)
TRIED = (USUAL, Thresholds(0.3, 4, 1.05), Thresholds(0.5, 2, 1.05), Thresholds(0.5, 16, 1.05))


@dataclass(frozen=True)
class Served:
    """One block through one router."""

    ttft_s: NDArray[np.float64]
    hit_share: float
    work_s: NDArray[np.float64]  # [R]
    problems: Counter[str]
    late_p99_s: float  # of the client

    @property
    def figures(self) -> tuple[float, float]:
        return float(self.ttft_s.mean()), float(np.percentile(self.ttft_s, 99))

    @property
    def peak(self) -> float:
        """The largest share of the work over the fair one."""
        return float(self.work_s.max() / self.work_s.mean())


# --- routers ---


@asynccontextmanager
async def rival(program: Path, thresholds: Thresholds, urls: Sequence[str]) -> AsyncIterator[str]:
    port = free_port()
    command = [str(program), *(["launch"] if program.name == "smg" else [])]
    command += ["--worker-urls", *urls, "--port", str(port), "--prometheus-port", str(free_port())]
    command += ["--policy", "cache_aware", *thresholds.options, "--log-level", "error"]
    command += ["--worker-startup-check-interval", "1"]
    with tempfile.TemporaryDirectory() as folder:
        async with running(command, port, Path(folder)):
            url = f"http://127.0.0.1:{port}"
            await until_ready(url)
            yield url


async def until_ready(url: str) -> None:
    """It knows its servers' model."""
    deadline = time.monotonic() + READY_S
    while True:
        try:
            await ask_servers([url])
            return
        except InputError:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.5)


@asynccontextmanager
async def ours(urls: Sequence[str]) -> AsyncIterator[str]:
    async with router(POLICY, [part for url in urls for part in ("--backend", url)]) as process:
        yield process.url


# --- one block ---


def block_config(load: str, devices: Sequence[str], seed: int, num_requests: int | None = None) -> Config:
    workload = LOADS[load] if num_requests is None else LOADS[load] | {"requests": num_requests}
    cluster = {"replicas": [{"device": device} for device in devices], "model": MODEL}
    return load_config(None, (), {"workload": workload, "cluster": cluster, "seed": seed})


class Servers(NamedTuple):
    urls: Sequence[str]
    time_scale: float
    is_asked_plainly: bool


async def serve(servers: Servers, url: str, block: Prepared, words: str) -> Served:
    """Again, if the machine was busy or requests failed; `words` make the texts of the prompts."""
    for attempt in range(MAX_ATTEMPTS):
        served = await serve_once(servers, url, block, f"{words} {attempt}")
        if served.late_p99_s <= LATE_S and not served.problems:
            break
        print(
            f"    again: client {1000 * served.late_p99_s:.0f} ms late, failed {served.problems}", flush=True
        )
    return served


async def serve_once(servers: Servers, url: str, block: Prepared, words: str) -> Served:
    scale = servers.time_scale
    workload = block.workload
    thinks = {"think_s": workload.think_s / scale} if len(workload.think_s) else {}
    before = await counted(servers.urls)
    load = Load(parse_url(url), MODEL, is_plain=servers.is_asked_plainly)
    try:
        played = replace(workload, arrived_at=workload.arrived_at / scale, **thinks)
        replay = await load.replay(played, zlib.crc32(words.encode()))
    finally:
        load.close()
    found = await counted(servers.urls) - before
    done = replay.requests[replay.requests["completed_at"] >= 0]
    return Served(
        scale * (done["first_token_at"] - done["arrived_at"]),
        float(found[:, 1].sum() / max(1.0, found[:, 0].sum())),
        work_s(found, block.plans),
        replay.problems,
        float(np.percentile(replay.lateness_s[replay.requests["sent_at"] > 0], 99)),
    )


async def counted(urls: Sequence[str]) -> NDArray[np.float64]:
    """[R, 3] prompt tokens looked up and found in the cache, output tokens."""
    names = ("prefix_cache_queries", "prefix_cache_hits", "generation_tokens")
    pages = [await scrape(parse_url(url)) for url in urls]
    return np.array([[page.total(f"vllm:{name}_total") for name in names] for page in pages])


def work_s(found: NDArray[np.float64], plans: Sequence[ReplicaPlan]) -> NDArray[np.float64]:
    speeds = np.array([(plan.prefill_s_per_token, plan.decode_s_per_token) for plan in plans])
    work: NDArray[np.float64] = (found[:, 0] - found[:, 1]) * speeds[:, 0] + found[:, 2] * speeds[:, 1]
    return work


# --- all blocks ---


async def best_thresholds(program: Path, load: str, devices: Sequence[str], servers: Servers) -> Thresholds:
    half = LOADS[load]["requests"] // 2
    block = prepare(block_config(load, devices, SELECTION_SEEDS[0], half))
    mean_s = {}
    for thresholds in TRIED:
        async with rival(program, thresholds, servers.urls) as url:
            served = await serve(servers, url, block, f"{program} {thresholds}")
        mean_s[thresholds] = served.figures[0]
        print(f"  {program.name} {tuple(thresholds)}: TTFT mean {number(mean_s[thresholds])} s", flush=True)
    return min(mean_s, key=lambda one: mean_s[one])


async def measured(
    load: str, programs: Sequence[Path], devices: Sequence[str], servers: Servers, num_blocks: int
) -> dict[str, list[Served]]:
    async with AsyncExitStack() as stack:
        urls = {}
        for program in programs:
            best = await best_thresholds(program, load, devices, servers)
            rows = {USUAL: "as it comes"} | ({best: f"tuned {tuple(best)}"} if best != USUAL else {})
            for thresholds, name in rows.items():
                one = rival(program, thresholds, servers.urls)
                urls[f"{program.name}, {name}"] = await stack.enter_async_context(one)
        urls[OURS] = await stack.enter_async_context(ours(servers.urls))
        found: dict[str, list[Served]] = {name: [] for name in urls}
        for number_, seed in enumerate(REPORT_SEEDS[:num_blocks]):
            block = prepare(block_config(load, devices, seed))
            names = list(urls)
            turn = number_ % len(names)
            for name in (*names[turn:], *names[:turn]):
                found[name].append(await serve(servers, urls[name], block, f"{name} {seed}"))
                mean_s, p99_s = found[name][-1].figures
                text = f"TTFT mean {number(mean_s)} s, P99 {number(p99_s)} s"
                print(f"  {load}, block {number_}, {name}: {text}", flush=True)
        return found


# --- the tables ---


def report(found: Mapping[str, Sequence[Served]]) -> str:
    """A row for each router; how ours changes what a rival has, with intervals over the blocks."""
    rows = []
    figures = {name: np.array([one.figures for one in served]) for name, served in found.items()}
    for name, served in found.items():
        changes = [change(one) for one in paired_ratios(figures[OURS], figures[name])]
        rows.append(
            [
                name,
                *map(number, figures[name].mean(axis=0)),
                *(changes if name != OURS else ["", ""]),
                percent(float(np.mean([one.hit_share for one in served]))),
                f"{np.mean([one.peak for one in served]):.2f} ×",
                f"{sum(one.problems.total() for one in served)}",
                number(1000 * max(one.late_p99_s for one in served)),
            ]
        )
    header = ["", "TTFT mean (s)", "TTFT P99 (s)", "ours: mean", "ours: P99", "cached", "most work"]
    return markdown([*header, "failed", "client late, P99 (ms)"], rows)


async def main(asked: argparse.Namespace) -> None:
    devices = UNEQUAL if asked.unequal else EQUAL
    programs = [asked.rivals / name for name in ("vllm-router", "smg")]
    options = ["--model", MODEL, "--devices", ",".join(devices), "--time-scale", str(asked.time_scale)]
    kept = {}
    async with emulator(options) as process:
        servers = Servers(process.urls, asked.time_scale, not asked.chats)
        for load in asked.loads.split(","):
            found = await measured(load, programs, devices, servers, asked.blocks)
            print(f"\n### {load} on {', '.join(devices)}\n\n{report(found)}\n", flush=True)
            kept[load] = {name: [one.ttft_s.tolist() for one in served] for name, served in found.items()}
        with urllib.request.urlopen(f"{process.admin_url}/replicas") as page:
            print(f"servers late (ms): {[replica['late_ms'] for replica in json.load(page)]}")
    print(f"load average: {os.getloadavg()}")
    if asked.json:
        asked.json.write_text(json.dumps(kept))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rivals", type=Path, required=True, help="folder with vllm-router and smg")
    parser.add_argument("--unequal", action="store_true", help=f"servers on {', '.join(UNEQUAL)}")
    parser.add_argument("--chats", action="store_true", help="ask for chat completions")
    parser.add_argument("--loads", default=",".join(LOADS))
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--time-scale", type=float, default=5.0, help="how much faster than real time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every TTFT")
    run_to_end(main(parser.parse_args()))
