"""Several policies in front of the same live servers, on the same arrivals: `pointsman evaluate --live`.

Each policy has a router of its own, a process like that of `pointsman serve`, for as long as the comparison
takes. A block is a seed's arrivals (or a part of a trace), served once by each policy, one after the other
and each time in another order, so that what drifts hits all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import warnings
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from itertools import count, pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pointsman.config import Config, SloSpec
from pointsman.errors import InputError, PointsmanWarning
from pointsman.evaluation.compare import COST, CURVES, Comparison, LatencyHistogram, Shares
from pointsman.experiments.metrics import latency, measure_requests, summary
from pointsman.experiments.objective import Objective
from pointsman.experiments.simulate import prepare
from pointsman.live.load import Load, Replay
from pointsman.live.processes import RouterProcess, router
from pointsman.live.servers import OPTION, Served, ask_servers, imbalance, key_header, scrape
from pointsman.router.http.address import Address, parse_url
from pointsman.routing.policy import PolicySpec
from pointsman.spec import parse_spec
from pointsman.workload import Workload
from pointsman.workload.replay import take
from pointsman.workload.workload import clip_tokens

SAMPLE_EVERY_S = 1.0
LATE_S = 0.05  # beyond it, what clients measure says more about this machine than about the servers

OnReady = Callable[[Mapping[str, RouterProcess]], None]
Metrics = dict[str, float]


@dataclass(frozen=True)
class Plan:
    """All that is known before the first request is sent."""

    name: str
    configs: Sequence[Config]  # [S]
    workloads: Sequence[Workload]  # [S]
    policies: Mapping[str, PolicySpec]  # by label; the keys of `sources`
    sources: Mapping[str, str]  # what `pointsman serve --policy` is told
    baseline: str
    urls: Sequence[str]
    servers: Sequence[str]  # the same, as options of `pointsman serve`
    served: Served

    @property
    def num_requests(self) -> int:
        return len(self.policies) * sum(map(len, self.workloads))

    @property
    def duration_s(self) -> float:
        """How many seconds the comparison takes at least."""
        return len(self.policies) * sum(float(one.arrived_at[-1]) for one in self.workloads)

    @property
    def what(self) -> str:
        first = self.workloads[0]
        rate_rps = len(first) / max(float(first.arrived_at[-1]), 1e-9)
        servers = "1 live server" if len(self.urls) == 1 else f"{len(self.urls)} live servers"
        return f"{servers} of {self.served.model}, {len(first):,} requests a block at {rate_rps:.3g}/s"


async def plan_live(
    name: str,
    configs: Sequence[Config],
    policies: Sequence[str],
    baseline: str,
    urls: Sequence[str],
    base_dir: Path | None = None,
    servers: Sequence[str] | None = None,
) -> Plan:
    """Refuses what cannot be served. `servers`: options of `pointsman serve` that say more than `urls`."""
    specs = {text: _live_policy(text) for text in dict.fromkeys([*policies, baseline])}
    sources: dict[str, str] = {}
    for text, spec in specs.items():
        if spec.label in sources:
            raise InputError(
                "policy", text, f"has the name of {sources[spec.label]}", "copy it to another name"
            )
        sources[spec.label] = text
    served = await ask_servers(urls, key_header())
    workloads = open_workloads(configs, base_dir)
    if served.max_tokens is not None:
        workloads = clipped_to(workloads, served.max_tokens)
    if servers is None:
        servers = [part for url in urls for part in ("--backend", url)]
    by_label = {spec.label: spec for spec in specs.values()}
    return Plan(
        name, configs, workloads, by_label, sources, specs[baseline].label, list(urls), servers, served
    )


def _live_policy(text: str) -> PolicySpec:
    spec = parse_spec(PolicySpec, {"kind": text}, "policy")
    if spec.kind == "vidur-lor":
        problem = "sees the servers' queues as they are, which no router can"
        raise InputError("policy", text, problem, "leave it out with --live")
    return spec


def open_workloads(configs: Sequence[Config], base_dir: Path | None) -> list[Workload]:
    """One for each configuration; parts of one where it is a trace, which every seed would repeat."""
    trace = configs[0].workload.trace
    if trace is None or any(config.workload.trace != trace for config in configs):
        workloads = [prepare(config, base_dir).workload for config in configs]
    else:
        workloads = parts_of(prepare(configs[0], base_dir).workload, len(configs))
    if workloads[0].num_users > 0:
        raise InputError(
            "workload.arrivals.kind", "closed", f"{OPTION} sends requests at set times", "use another"
        )
    return workloads


def parts_of(workload: Workload, num_parts: int) -> list[Workload]:
    """Cut a trace into parts of equal length, each of which begins at time 0."""
    if len(workload) < num_parts:
        raise InputError("--seeds", num_parts, f"the trace has {len(workload)} requests", "use fewer")
    bounds = np.linspace(0, len(workload), num_parts + 1).astype(int).tolist()
    parts = [take(workload, slice(first, last)) for first, last in pairwise(bounds)]
    return [replace(part, arrived_at=part.arrived_at - part.arrived_at[0]) for part in parts]


def clipped_to(workloads: Sequence[Workload], max_tokens: int) -> list[Workload]:
    clipped, num_longer = [], 0
    for one in workloads:
        prefill, decode = one.num_prefill_tokens.copy(), one.num_decode_tokens.copy()
        num_longer += int(np.count_nonzero(prefill + decode > max_tokens - 1))
        clip_tokens(prefill, decode, max_tokens - 1)
        clipped.append(replace(one, num_prefill_tokens=prefill, num_decode_tokens=decode))
    if num_longer > 0:
        total = sum(map(len, workloads))
        text = f"{num_longer} of {total} requests are cut to the servers' {max_tokens} tokens"
        warnings.warn(PointsmanWarning(text), stacklevel=3)
    return clipped


async def compare_live(
    plan: Plan,
    objective: Objective | None = None,
    progress: Shares | None = None,
    on_ready: OnReady | None = None,
) -> Comparison:
    """Takes as long as the arrivals do, for each policy. Within `run_to_end`: it starts routers."""
    rows: dict[str, list[Metrics]] = {policy: [] for policy in plan.policies}
    curves = {policy: {curve: LatencyHistogram() for curve in CURVES} for policy in plan.policies}
    words = count(secrets.randbits(32))  # of each run its own: nobody finds what another left in the caches
    async with AsyncExitStack() as stack:
        routers = {
            policy: await stack.enter_async_context(router(source, plan.servers))
            for policy, source in plan.sources.items()
        }
        if on_ready is not None:
            on_ready(routers)
        for block in range(len(plan.workloads)):
            for policy in _order(list(plan.policies), block):
                replay, metrics = await _serve(plan, block, next(words), routers[policy], progress)
                _check(policy, replay)
                rows[policy].append(metrics)
                for curve, histogram in curves[policy].items():
                    histogram.add(latency(replay.requests, curve))
    tables = {
        policy: {name: np.array([one[name] for one in of_policy]) for name in of_policy[0]}
        for policy, of_policy in rows.items()
    }
    if objective is not None:
        tables = {policy: table | {COST: objective.cost(table)} for policy, table in tables.items()}
    seeds = tuple(config.seed for config in plan.configs)
    specs = tuple(plan.policies.values())
    return Comparison(plan.name, plan.what, seeds, tuple(plan.configs), specs, plan.baseline, tables, curves)


def _order(policies: Sequence[str], block: int) -> Sequence[str]:
    turn = block % len(policies)
    return [*policies[turn:], *policies[:turn]]


async def _serve(
    plan: Plan, block: int, words: int, process: RouterProcess, progress: Shares | None
) -> tuple[Replay, Metrics]:
    address = parse_url(process.url)
    share = 1.0 / plan.num_requests
    load = Load(address, plan.served.model)
    before = await _counts(address, plan.urls)
    try:
        async with _sampled_imbalance(address) as samples:
            replay = await load.replay(
                plan.workloads[block], words, (lambda done: progress(share * done)) if progress else None
            )
    finally:
        load.close()
    counted = Counts(*np.subtract(await _counts(address, plan.urls), before))
    metrics = measure_live(replay, plan.configs[block].slo) | {
        "imbalance_cv": float(np.mean(samples)) if samples else 0.0,
        "held_share": counted.held / len(replay.requests),
        "preemptions": counted.preempted,
    }
    if plan.workloads[block].is_shared:
        metrics["hit_share"] = counted.cached_tokens / max(1.0, counted.prompt_tokens)
    return replay, metrics


def measure_live(replay: Replay, slo: SloSpec) -> Metrics:
    """What the clients saw, in the simulator's words."""
    return (
        measure_requests(replay.requests, slo)
        | summary("tbt", replay.gaps_s)
        | {"client_late_p99_s": float(np.percentile(replay.lateness_s, 99))}
    )


class Counts(NamedTuple):
    """What one router and all servers have counted."""

    held: float
    preempted: float
    prompt_tokens: float  # looked up in prefix caches
    cached_tokens: float  # and found there


async def _counts(address: Address, urls: Sequence[str]) -> Counts:
    held = (await scrape(address)).total("pointsman_holds_total")
    pages = [await scrape(parse_url(url), key_header()) for url in urls]
    names = ("num_preemptions", "prefix_cache_queries", "prefix_cache_hits")
    return Counts(held, *(sum(page.total(f"vllm:{name}_total") for page in pages) for name in names))


@asynccontextmanager
async def _sampled_imbalance(address: Address) -> AsyncIterator[list[float]]:
    samples: list[float] = []

    async def sample() -> None:
        while True:
            await asyncio.sleep(SAMPLE_EVERY_S)
            page = await scrape(address)
            value = imbalance(page.values("pointsman_replica_outstanding"))
            if value is not None:
                samples.append(value)

    task = asyncio.get_running_loop().create_task(sample())
    try:
        yield samples
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def _check(policy: str, replay: Replay) -> None:
    num_requests = len(replay.requests)
    num_failed = replay.problems.total()
    reasons = ", ".join(f"{reason}: {number}" for reason, number in replay.problems.most_common(3))
    if num_failed == num_requests:
        raise InputError(OPTION, policy, f"every request failed ({reasons})", "see what the servers say")
    if num_failed > 0:
        text = f"{policy}: {num_failed} of {num_requests} requests failed ({reasons}) and count in no latency"
        warnings.warn(PointsmanWarning(text), stacklevel=2)
    late_s = float(np.percentile(replay.lateness_s, 99))
    if late_s > LATE_S:
        text = f"{policy}: 1 % of requests were sent over {1000 * late_s:.0f} ms late: this machine is busy"
        warnings.warn(PointsmanWarning(text), stacklevel=2)
