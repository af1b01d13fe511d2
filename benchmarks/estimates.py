"""How well the router knows its servers' speed, and what not knowing it costs.

The router's own books and decider drive emulated servers (the engines of `pointsman emulate`) in simulated
time: no network and no clock, so that the truth is exact and every run repeats. Two clusters: two unequal
shares of an H200, whose steps are linear in what is in them as the router assumes, and four unequal GPUs by
the roofline, whose steps are not.

1. The error of a typical step's time (64 streams and 256 prompt tokens), as the router estimates it, against
   the requests that a server has served. Nothing is told.
2. `default` that was told the speeds against `default` that must learn them from the first request on.

    python benchmarks/estimates.py [--requests 2000] [--seeds 4] [--out docs/results/estimates.svg]
"""

from __future__ import annotations

import argparse
import math
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pointsman.emulator.engine import Engine
from pointsman.experiments.scenarios import find_scenario
from pointsman.experiments.simulate import prepare
from pointsman.report.figure import Figure, Level, Line, linear_axis
from pointsman.report.svg import standalone
from pointsman.report.tables import markdown
from pointsman.routing.books import Books
from pointsman.routing.calibration import FIGURES, typical_step_s
from pointsman.routing.core import Request
from pointsman.routing.decider import Decider
from pointsman.simulator.plan import ReplicaPlan
from pointsman.workload import Workload

Floats = NDArray[np.float64]

SEEDS = range(900, 1000)  # neither trained nor reported on
SCRAPE_S = 1.0
BASELINE = "least-outstanding"
CASES = ((0.3, BASELINE), (0.6, "default"), (0.85, BASELINE), (0.85, "default"))
TOLD_LOADS = (0.6, 0.85)
AFTER = (25, 50, 100, 200)  # requests a server
SHOWN_REQUESTS, SHOWN_ERROR = 400.0, 60.0
MODEL = "Llama-3.1-8B"
SHARES = [(0.0070, 34e-6, 59e-6), (0.0100, 69e-6, 97e-6)]  # s a step, a prompt token, a stream; as measured
CLUSTERS = {
    "two shares of an H200": ",".join(
        f"{{device: A100-80, cost: {{kind: linear, a: {a - c}, b: {b}, c: {c}}}}}" for a, b, c in SHARES
    ),
    "A100-80, L40S, A40, A10": ",".join(f"{{device: {one}}}" for one in ("A100-80", "L40S", "A40", "A10")),
}
COLOURS = ("#1f77d0", "#d9822b", "#18794e", "#8a3ffc")


class Change(NamedTuple):
    """From then on the server's steps take so many times as long as at first."""

    at: float
    server: int
    factor: float
    restarts: bool = False  # what it was doing is lost, and sent again


class Served(NamedTuple):
    ttft_s: Floats  # [N], as the next
    e2e_s: Floats
    server: NDArray[np.int64]
    at: Floats  # when each was over, in that order
    steps_s: Floats  # [N, R] the typical step of each server, as it was estimated then
    num_served: NDArray[np.int64]  # [N, R] requests that each had served then


def figures_of(plan: ReplicaPlan) -> dict[str, float]:
    return {name: float(getattr(plan, name)) for name in FIGURES}


def serve(
    plans: Sequence[ReplicaPlan],
    workload: Workload,
    policy: str,
    told: Sequence[Mapping[str, float] | None] | None = None,
    changes: Sequence[Change] = (),
    seed: int = 0,
) -> Served:
    """What a router in front of these servers does; it has no delays of its own."""
    books = Books(now=0.0)
    slots = [books.add(f"server {k}", told and told[k]) for k in range(len(plans))]
    decider = Decider(books, policy, seed)
    engines = [Engine(plan) for plan in plans]
    count = len(workload)
    requests = [
        Request(int(prompt), arrived_at=float(at))
        for prompt, at in zip(workload.num_prefill_tokens, workload.arrived_at, strict=True)
    ]
    tickets, seen, is_open = [0] * count, [0] * count, [False] * count
    ttft_s, e2e_s = np.zeros(count), np.zeros(count)
    server = np.zeros(count, np.int64)
    num_served = np.zeros(len(plans), np.int64)
    history: list[tuple[float, list[float], NDArray[np.int64]]] = []
    held: deque[int] = deque()
    to_change = deque(sorted(changes))
    num_arrived, scrape_at = 0, SCRAPE_S

    def place(i: int, now: float) -> bool:
        action = decider.decide(requests[i], 1 + len(held), now)
        if action == 0:
            return False
        server[i] = k = slots.index(action - 1)
        tickets[i] = books.sent(slots[k], requests[i].prompt_tokens, now)
        is_open[i] = True
        engines[k].admit(i, requests[i].prompt_tokens, int(workload.num_decode_tokens[i]), now)
        return True

    while len(history) < count:
        arrival = float(workload.arrived_at[num_arrived]) if num_arrived < count else math.inf
        change_at = to_change[0].at if to_change else math.inf
        now = min(arrival, scrape_at, change_at, *(engine.next_event_at for engine in engines))
        for k, engine in enumerate(engines):
            if engine.next_event_at > now:
                continue
            for i, num_tokens, is_finished, _ in engine.advance(now):
                if seen[i] == 0:
                    books.first_token(tickets[i], now)
                    ttft_s[i] = now - requests[i].arrived_at
                    seen[i] = 1
                books.tokens(tickets[i], num_tokens - seen[i], now)
                seen[i] = num_tokens
                if is_finished:
                    is_open[i] = False
                    books.finished(tickets[i], now, requests[i].prompt_tokens, num_tokens)
                    e2e_s[i] = now - requests[i].arrived_at
                    num_served[k] += 1
                    steps_s = [typical_step_s(books.replica_signals(slot)) for slot in slots]
                    history.append((now, steps_s, num_served.copy()))
        if scrape_at == now:
            scrape_at += SCRAPE_S
            for slot, engine in zip(slots, engines, strict=True):
                books.scraped(slot, *engine.gauges, now)
        if change_at == now:
            _, k, factor, restarts = to_change.popleft()
            if restarts:
                engines[k] = Engine(plans[k])
                lost = np.flatnonzero(np.array(is_open) & (server == k)).tolist()
                for i in lost:
                    books.failed(tickets[i], now)
                    is_open[i], seen[i] = False, 0
                held.extendleft(reversed(lost))
            engines[k].set_slowdown(factor)
        while held and place(held[0], now):
            held.popleft()
        if arrival == now:
            if held or not place(num_arrived, now):
                held.append(num_arrived)
            num_arrived += 1
    at, steps, served = zip(*history, strict=True)
    return Served(ttft_s, e2e_s, server, np.array(at), np.array(steps), np.array(served))


def prepared(cluster: str, load: float, num_requests: int, seed: int) -> tuple[list[ReplicaPlan], Workload]:
    overrides = [
        f"cluster.replicas=[{CLUSTERS[cluster]}]",
        f"cluster.model={MODEL}",
        f"workload.requests={num_requests}",
        f"workload.arrivals.load={load}",
    ]
    made = prepare(find_scenario("mixed-hardware").config(seed, overrides))
    return made.plans, made.workload


def errors_of(served: Served, plans: Sequence[ReplicaPlan]) -> Floats:
    """[N, R] of the estimated typical step, as a share."""
    truth = np.array([typical_step_s(figures_of(plan)) for plan in plans])
    return np.abs(served.steps_s / truth - 1.0)


def error_table(num_requests: int) -> tuple[list[list[str]], list[Figure]]:
    rows, figures = [], []
    for cluster in CLUSTERS:
        for load, policy in CASES:
            plans, workload = prepared(cluster, load, num_requests, SEEDS[0])
            served = serve(plans, workload, policy)
            errors = errors_of(served, plans)
            columns: list[list[str]] = []  # of each server
            for k in range(len(plans)):
                after = served.num_served[:, k]
                found = [errors[after >= number, k][:1] for number in AFTER]
                found.append(np.max(errors[after >= AFTER[-1], k], keepdims=True, initial=0.0))
                is_reached = [after[-1] >= number for number in (*AFTER, AFTER[-1])]
                cells = [
                    f"{100 * one[0]:.1f}" if is_there else "–"
                    for one, is_there in zip(found, is_reached, strict=True)
                ]
                columns.append([str(after[-1]), *cells])
            rows.append([cluster, f"{load:g}", policy, *map(", ".join, zip(*columns, strict=True))])
            if (load, policy) == CASES[-1]:
                figures.append(error_figure(cluster, served, errors))
    return rows, figures


def error_figure(cluster: str, served: Served, errors: Floats) -> Figure:
    lines = []
    for k in range(errors.shape[1]):
        count, last = np.unique(served.num_served[::-1, k], return_index=True)
        shown = np.minimum(100 * errors[::-1][last, k], SHOWN_ERROR)
        is_shown = count <= SHOWN_REQUESTS
        lines.append(Line(f"server {k}", count[is_shown], shown[is_shown], COLOURS[k]))
    x = linear_axis("requests that the server has served", [], low=0.0, high=SHOWN_REQUESTS)
    y = linear_axis("error of a typical step, %", [], "%", low=0.0, high=SHOWN_ERROR)
    load, policy = CASES[-1]
    return Figure(f"{cluster}: {policy} at load {load:g}", x, y, [*lines, Level(10.0, "10 %")])


def told_table(num_requests: int, num_seeds: int) -> list[list[str]]:
    rows = []
    for cluster in CLUSTERS:
        for load in TOLD_LOADS:
            logs: dict[str, list[list[float]]] = {"told": [], "learned": []}
            for seed in SEEDS[:num_seeds]:
                plans, workload = prepared(cluster, load, num_requests, seed)
                told = [figures_of(plan) for plan in plans]
                base = measures(serve(plans, workload, BASELINE, seed=seed))
                for name, figures in (("told", told), ("learned", None)):
                    found = measures(serve(plans, workload, "default", figures, seed=seed))
                    logs[name].append(np.log(np.array(found) / base).tolist())
            ratios = {name: np.exp(np.mean(logs[name], axis=0)) - 1.0 for name in logs}
            for name, values in ratios.items():
                rows.append([cluster, f"{load:g}", name, *(f"{signed(100 * one)} %" for one in values)])
            points = 100 * (ratios["learned"] - ratios["told"])
            rows.append([cluster, f"{load:g}", "**points**", *(f"**{signed(one)}**" for one in points)])
    return rows


def signed(value: float) -> str:
    return f"{value:+.1f}".replace("-", "−")


def measures(served: Served) -> list[float]:
    return [
        float(value)
        for times in (served.ttft_s, served.e2e_s)
        for value in (times.mean(), np.quantile(times, 0.99))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--requests",
        type=int,
        default=2000,
        help="of a run of the first table, twice as many as of the second",
    )
    parser.add_argument("--seeds", type=int, default=4, help="runs of the second table")
    parser.add_argument("--out", type=Path, default=None, help="write the figures as SVG, numbered")
    asked = parser.parse_args()
    rows, figures = error_table(asked.requests)
    header = ["servers", "load", "policy", "requests served by each", f"error after {AFTER[0]}"]
    header += [*map(str, AFTER[1:]), "largest from then on"]
    print(markdown(header, rows, num_names=3))
    if asked.out is not None:
        for number, figure in enumerate(figures, start=1):
            asked.out.with_stem(f"{asked.out.stem}-{number}").write_text(standalone(figure))
    print()
    header = ["servers", "load", "default", "TTFT mean", "TTFT P99", "e2e mean", "e2e P99"]
    print(markdown(header, told_table(asked.requests // 2, asked.seeds), num_names=3))


if __name__ == "__main__":
    main()
