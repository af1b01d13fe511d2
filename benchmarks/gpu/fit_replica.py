"""Fits the measured replica `H200, Llama-3-8B` from the tables of a real server.

    python benchmarks/gpu/fit_replica.py RESULTS --trace AzureLLMInferenceTrace_conv.csv --out replica.yaml

RESULTS holds steps/decode.csv, steps/prefill.csv, loads/load_0.3.csv, loads/engine_metrics.csv, the requests
of loads/load_0.6.csv (when they came and how long they were, never how long they took) and
loads/gpu_capacity_0.3_0.6.csv (what `nvidia-smi` said during the capacity run and the two load runs).

What counts in the fit: decode steps (by linear least squares inside), idle first tokens, the run at 0.3
request by request, its number of steps and mean prefill time by the engine's own counters, and the clocks
and watts of all three periods. The search is an evolution strategy; the window of the power limit is the
best of three. The loop below is a plain engine without memory limits;
`tests/simulator/test_server_times.py` checks the simulator against another one.
"""

from __future__ import annotations

import argparse
import csv
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numba import njit

BUDGET, IDLE_W, LIMIT_W, FULL_MHZ, GRAPH_TOKENS = 8192, 120.0, 700.0, 1965.0, 512
DECODE_KNOTS = np.array([1, 8, 16, 32, 64, 128, 256.0])
CURVE_KNOTS = np.array([*DECODE_KNOTS, 1024, 8192.0])
WINDOWS_S = (0.12, 0.2, 0.3)
START = {
    "api_s": 4.6e-3, "api_s_per_token": 7e-8, "api_s_per_stream": 7.5e-5, "token_s": 1.76e-5,
    "long_token_s": 1.76e-5, "pair_s": 6e-10, "no_graph_s": 2e-3, "sequence_s": 3e-6, "extra_step_s": 1.7e-4,
    "start_long_s": 1.8e-3, "start_s": 2.5e-4, "step_j": 1.6, "compute_w": 1000.0, "context_j": 1.8e-5,
    "exponent": 1.4, "memory_share": 0.23,
}  # fmt: skip
CLASSES = (0, 120, 200, 300, 400, 512, 1000, 1115, 1300, 3000, 4500)  # of prompts, whose quantiles are fitted
COLUMNS = ("arrived_at", "prompt_tokens", "output_tokens", "first_token_at", "completed_at")


@njit
def clock(power_w, exponent):
    over = (power_w - IDLE_W) / (LIMIT_W - IDLE_W)
    return over ** (-1.0 / exponent) if over > 1.0 else 1.0


@njit
def serve(arrived, prompts, outputs, knots, curve, p, num_users, pause_s, until):
    """-> first tokens, last tokens, times of scheduling, steps [n, 3] of start, duration, clock; mean watts.

    With `num_users` a closed loop, which fills `arrived`: each sends `pause_s` after its last answer.
    p: context_s, sequence_s, pair_s, no_graph_s, start_s, start_long_s, api_s, api_s_per_token,
    api_s_per_stream, window_s, step_j, compute_w, context_j, exponent, memory_share, token_s
    """
    count = len(prompts)
    first, last, planned = np.zeros(count), np.zeros(count), np.zeros(count)
    reached, done, produced = np.zeros(count), np.zeros(count, np.int64), np.zeros(count, np.int64)
    running, entries, sizes = np.zeros(count, np.int64), np.zeros(count, np.int64), np.zeros(count, np.int64)
    steps = np.zeros((60000, 3))
    num_known = count if num_users == 0 else num_users
    latest = 0.0
    for i in range(num_known):
        latest = max(latest, arrived[i] + p[6] + p[7] * prompts[i])
        reached[i] = latest
    num_running = following = num_done = num_steps = 0
    now, began_at, power_w, energy_j, busy_s = 0.0, 0.0, IDLE_W, 0.0, 0.0
    while num_done < count and now < until and num_steps < len(steps):
        is_idle = num_running == 0
        if is_idle:
            if following >= num_known:
                break
            if reached[following] > now:
                power_w = IDLE_W + (power_w - IDLE_W) * math.exp(-(reached[following] - now) / p[9])
                now = reached[following]
        planned_at = now if is_idle else began_at
        budget, num_entries, num_prompt, num_decodes, context, pairs = BUDGET, 0, 0, 0, 0, 0.0
        for position in range(num_running):
            i = running[position]
            size = 1 if done[i] >= prompts[i] else min(budget, prompts[i] - done[i])
            if size <= 0:
                continue
            if done[i] >= prompts[i]:
                num_decodes += 1
                context += prompts[i] + produced[i] - 1
            else:
                num_prompt += size
                pairs += size * (done[i] + size / 2.0)
            entries[num_entries], sizes[num_entries] = i, size
            num_entries += 1
            budget -= size
        while following < num_known and reached[following] <= planned_at and budget > 0:
            size = min(budget, prompts[following])
            num_prompt += size
            pairs += size * size / 2.0
            entries[num_entries], sizes[num_entries] = following, size
            num_entries += 1
            running[num_running] = following
            num_running += 1
            planned[following] = planned_at
            budget -= size
            following += 1
        tokens = num_prompt + num_decodes
        at = min(max(np.searchsorted(knots, tokens), 1), len(knots) - 1)
        slope = (curve[at] - curve[at - 1]) / (knots[at] - knots[at - 1])
        token_s = curve[at - 1] + slope * (tokens - knots[at - 1]) + (p[3] if tokens > GRAPH_TOKENS else 0.0)
        full_s = token_s + p[0] * context + p[1] * num_entries + p[2] * pairs
        products_s = min(token_s, p[15] * tokens)
        clocked_s = products_s + p[14] * (token_s - products_s) + p[2] * pairs
        drawn_w = IDLE_W + (p[10] + p[11] * (p[15] * tokens + p[2] * pairs) + p[12] * context) / full_s
        share = clock(power_w, p[13])
        step_s = full_s + clocked_s * (1 / share - 1)
        after_w = drawn_w + (power_w - drawn_w) * math.exp(-step_s / p[9])
        share = 0.5 * (share + clock(after_w, p[13]))
        step_s = full_s + clocked_s * (1 / share - 1)
        power_w = drawn_w + (power_w - drawn_w) * math.exp(-step_s / p[9])
        energy_j += (IDLE_W + (drawn_w - IDLE_W) * share ** p[13]) * step_s
        if is_idle:
            step_s += p[5] if tokens > GRAPH_TOKENS else p[4]
        busy_s += step_s
        steps[num_steps] = now, step_s, share
        num_steps += 1
        began_at = now
        now += step_s
        for entry in range(num_entries):
            i = entries[entry]
            if done[i] < prompts[i]:
                done[i] += sizes[entry]
            if done[i] >= prompts[i]:
                produced[i] += 1
                if produced[i] == 1:
                    first[i] = now + p[8] * num_entries
                if produced[i] == outputs[i]:
                    last[i] = now + p[8] * num_entries
                    num_done += 1
                    if num_users > 0 and num_known < count:
                        arrived[num_known] = now + pause_s
                        latest = max(latest, now + pause_s + p[6] + p[7] * prompts[num_known])
                        reached[num_known] = latest
                        num_known += 1
        kept = 0
        for position in range(num_running):
            if produced[running[position]] < outputs[running[position]]:
                running[kept] = running[position]
                kept += 1
        num_running = kept
    return first, last, planned, steps[:num_steps], energy_j / max(busy_s, 1e-9)


class Measured:
    """Everything that the fit may look at."""

    def __init__(self, results: Path, trace: Path) -> None:
        self.decode = _columns(results / "steps/decode.csv", ("batch", "mean_context", "step_ms"))
        self.idle = _columns(results / "steps/prefill.csv", ("prompt", "ttft_ms"))
        self.low = _columns(results / "loads/load_0.3.csv", COLUMNS)
        self.middle = _columns(results / "loads/load_0.6.csv", COLUMNS[:3])
        engine = _columns(results / "loads/engine_metrics.csv", ("share", "prefill_ms", "iterations"))
        self.prefill_s, self.num_steps = engine["prefill_ms"][0] * 1e-3, engine["iterations"][0]
        lines = (results / "loads/gpu_capacity_0.3_0.6.csv").read_text().splitlines()[1:]
        watched = np.array([[float(part.split()[0]) for part in line.split(", ")[1:3]] for line in lines])
        periods = {"full": slice(13, 27), "low": slice(34, 78), "middle": slice(80, 124)}
        self.clocks = {name: watched[period].mean(axis=0) for name, period in periods.items()}
        asked = _columns(trace, ("ContextTokens", "GeneratedTokens"))
        outputs = np.minimum(asked["GeneratedTokens"][:4000], 4096).astype(np.int64)
        prompts = np.clip(asked["ContextTokens"][:4000].astype(np.int64), 1, 8192 - outputs)
        self.full_load = (prompts, outputs)


def _columns(path: Path, names: tuple[str, ...]) -> dict[str, np.ndarray]:
    with path.open() as file:
        rows = list(csv.DictReader(file))
    return {name: np.array([float(row[name]) for row in rows]) for name in names}


class Candidate:
    """One set of parameters, made whole by the decode table, and what it predicts."""

    def __init__(self, q: dict[str, float], data: Measured) -> None:
        self.q = q
        self._fit_decode_steps(data)

    def _fit_decode_steps(self, data: Measured) -> None:
        """The curve up to 256 tokens and a context token, such that limited clocks give the table."""
        q, batch = self.q, data.decode["batch"]
        context, measured_s = batch * data.decode["mean_context"], data.decode["step_ms"] * 1e-3
        eye = np.eye(len(DECODE_KNOTS))
        table = np.column_stack([*(np.interp(batch, DECODE_KNOTS, row) for row in eye), context])
        slowed = np.ones(len(batch))
        for _ in range(4):
            full_s = measured_s / slowed
            found = np.linalg.lstsq(table / full_s[:, None], np.ones(len(batch)), rcond=None)[0]
            fitted_s = table @ found
            token_s = table[:, :-1] @ found[:-1] - q["sequence_s"] * batch
            products_s = np.minimum(token_s, q["token_s"] * batch)
            clocked_s = products_s + q["memory_share"] * (token_s - products_s)
            energy_j = q["step_j"] + q["compute_w"] * q["token_s"] * batch + q["context_j"] * context
            shares = np.array([clock(IDLE_W + watts, q["exponent"]) for watts in energy_j / fitted_s])
            slowed = 1 + clocked_s * (1 / shares - 1) / fitted_s
        base = found[:-1] - q["sequence_s"] * DECODE_KNOTS + q["extra_step_s"]
        middle = base[-1] + q["token_s"] * (1024 - 256)
        self.curve = np.array([*base, middle, middle + q["long_token_s"] * (8192 - 1024)])
        self.context_s = found[-1]
        names = (
            "pair_s",
            "no_graph_s",
            "start_s",
            "start_long_s",
            "api_s",
            "api_s_per_token",
            "api_s_per_stream",
        )
        power = ("window_s", "step_j", "compute_w", "context_j", "exponent", "memory_share", "token_s")
        parts = [self.context_s, q["sequence_s"], *(q[name] for name in (*names, *power))]
        self._p = np.array(parts)

    def serve(
        self, run: dict[str, np.ndarray], num_users: int = 0, pause_s: float = 0.0, until: float = 1e9
    ) -> Any:
        prompts, outputs = (run[name].astype(np.int64) for name in COLUMNS[1:3])
        return serve(
            run["arrived_at"], prompts, outputs, CURVE_KNOTS, self.curve, self._p, num_users, pause_s, until
        )

    def residuals(self, data: Measured) -> np.ndarray:
        low = data.low
        first, last, planned, steps, watts = self.serve(low)
        ttft, measured_ttft = first - low["arrived_at"], low["first_token_at"] - low["arrived_at"]
        out = []
        for lowest, highest in pairwise(CLASSES):
            chosen = (low["prompt_tokens"] >= lowest) & (low["prompt_tokens"] < highest)
            quantiles = (15, 35, 50, 65, 80)
            found, wanted = (np.percentile(x[chosen], quantiles) for x in (ttft, measured_ttft))
            out += list(math.sqrt(chosen.sum() / 60) * np.log(found / wanted))
        quantiles = (90, 95, 97.5, 99)
        out += list(3 * np.log(np.percentile(ttft, quantiles) / np.percentile(measured_ttft, quantiles)))
        out += [28 * math.log(ttft.mean() / measured_ttft.mean())]
        long = low["output_tokens"] > 20
        streamed = np.log((last - first)[long] / (low["completed_at"] - low["first_token_at"])[long])
        out += [3 * part.mean() for part in np.array_split(streamed, 20)]
        e2e, measured_e2e = last - low["arrived_at"], low["completed_at"] - low["arrived_at"]
        out += [52 * math.log(e2e.mean() / measured_e2e.mean()), 15 * math.log(len(steps) / data.num_steps)]
        out += [10 * math.log((first - planned).mean() / data.prefill_s)]
        out += [
            20 * math.log(_mhz(steps) / data.clocks["low"][0]),
            2 * math.log(watts / data.clocks["low"][1]),
        ]
        *_, steps, watts = self.serve(data.middle)
        out += [
            20 * math.log(_mhz(steps) / data.clocks["middle"][0]),
            2 * math.log(watts / data.clocks["middle"][1]),
        ]
        out += [15 * math.log(_mhz(self.full_load(data)[1], 25.0) / data.clocks["full"][0])]
        for weight, prompt, seconds in zip(
            (2, 3, 3, 4, 4, 6, 6), data.idle["prompt"][1:], data.idle["ttft_ms"][1:] * 1e-3, strict=True
        ):
            out.append(weight * math.log(self.idle_ttft_s(int(prompt)) / seconds))
        return np.where(np.isfinite(out), out, 10.0)

    def idle_ttft_s(self, prompt: int) -> float:
        """As it was measured: a dozen times in a row with a pause of 20 ms, and the clocks of that."""
        run = {
            name: np.full(12, value, float) for name, value in zip(COLUMNS, (0.0, prompt, 2), strict=False)
        }
        first = self.serve(run, num_users=1, pause_s=0.02)[0]
        return float(np.median((first - run["arrived_at"])[2:]))

    def full_load(self, data: Measured) -> tuple[float, np.ndarray]:
        """Requests finished a second with 512 at once, and the steps: never fitted to, but for the clocks."""
        prompts, outputs = data.full_load
        run = {"arrived_at": np.zeros(len(prompts)), "prompt_tokens": prompts, "output_tokens": outputs}
        _, last, _, steps, _ = self.serve(run, num_users=512, pause_s=0.003, until=55.0)
        return float(((last >= 25) & (last < 55)).sum() / 30), steps

    def description(self, source: str) -> dict[str, Any]:
        q = self.q
        tokens = (*DECODE_KNOTS, GRAPH_TOKENS, GRAPH_TOKENS + 1, 1024, 8192)
        late = [q["no_graph_s"] if token > GRAPH_TOKENS else 0.0 for token in tokens]
        curve = np.interp(tokens, CURVE_KNOTS, self.curve) + late
        power = ("window_s", "exponent", "step_j", "compute_w", "context_j")
        limits = {"limit_w": LIMIT_W, "idle_w": IDLE_W, **{name: _short(q[name]) for name in power}}
        limits |= {"compute_s_per_token": _short(q["token_s"]), "memory_share": _short(q["memory_share"])}
        api = ("api_s", "api_s_per_token", "api_s_per_stream")
        start, late_start = _short(q["start_s"]), _short(q["start_long_s"])
        cost = {
            "kind": "steps",
            "step_s": [
                [int(token), float(f"{seconds:.7f}")] for token, seconds in zip(tokens, curve, strict=True)
            ],
            "start_s": [[1, start], [GRAPH_TOKENS, start], [GRAPH_TOKENS + 1, late_start]],
            "sequence_s": _short(q["sequence_s"]),
            "context_s": _short(self.context_s),
            "pair_s": _short(q["pair_s"]),
            "power": limits,
        }
        server = {"async_scheduling": True, **{name: _short(q[name]) for name in api}}
        return {"device": "H200", "model": "Llama-3-8B", "source": source, "cost": cost, "server": server}


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def _mhz(steps: np.ndarray, since: float = 0.0) -> float:
    chosen = steps[steps[:, 0] >= since]
    return FULL_MHZ * float(np.average(chosen[:, 2], weights=chosen[:, 1]))


def search(window_s: float, data: Measured, rounds: int, seed: int = 0) -> tuple[float, Candidate]:
    """An evolution strategy with a step size of its own for each logarithm of a parameter."""
    rng, names = np.random.default_rng(seed), list(START)
    begin = np.array(list(START.values()))

    def candidate(x: np.ndarray) -> Candidate:
        return Candidate(dict(zip(names, begin * np.exp(x), strict=True)) | {"window_s": window_s}, data)

    def badness(x: np.ndarray) -> float:
        return float(np.sum(candidate(x).residuals(data) ** 2) + 0.1 * np.sum(x**2))

    num_tried, num_kept = 14, 5
    weights = math.log(num_kept + 0.5) - np.log(np.arange(1, num_kept + 1))
    weights /= weights.sum()
    mean, spread = np.zeros(len(names)), np.full(len(names), 0.08)
    best = (badness(mean), mean)
    for _ in range(rounds):
        noise = rng.standard_normal((num_tried, len(names)))
        tried = mean + spread * noise
        scores = np.array([badness(x) for x in tried])
        order = np.argsort(scores)[:num_kept]
        best = min(best, (float(scores[order[0]]), tried[order[0]]), key=lambda one: one[0])
        mean = weights @ tried[order]
        spread = np.clip(spread * np.exp(0.12 * (np.sqrt(weights @ noise[order] ** 2) - 1)), 0.004, 0.15)
    best = min(best, (badness(mean), mean), key=lambda one: one[0])
    return best[0], candidate(best[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("--trace", type=Path, required=True, help="the Azure conversation trace")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=120)
    arguments = parser.parse_args()
    data = Measured(arguments.results, arguments.trace)
    found = []
    for window_s in WINDOWS_S:
        found.append(search(window_s, data, arguments.rounds))
        print(f"window {window_s} s: sum of squares {found[-1][0]:.3f}", flush=True)
    best = min(found, key=lambda one: one[0])[1]
    print(f"closed loop, 512 at once: {best.full_load(data)[0]:.2f} requests/s")
    text = yaml.safe_dump(best.description(arguments.results.name), sort_keys=False, default_flow_style=None)
    arguments.out.write_text(text)


if __name__ == "__main__":
    main()
