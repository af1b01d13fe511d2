"""From probes of a server to its cost model: non-negative least squares, and how sure that is.

A step takes a time that rises piecewise linearly with its tokens, plus what sequences, context tokens and
pairs of prompt tokens add; a first token also waits for the API server and for the step that runs. All of it
is linear in the unknowns. The uncertainty is that of fits to resampled probes.

Where requests come and go (`Mixed`), steps may take longer than single probes say: API server and engine
share cores, or clocks fall. That is what a server does under load, so all steps are scaled by it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pointsman.errors import InputError
from pointsman.live.probing import Decode, Facts, Idle, Joined, Mixed, Probe
from pointsman.simulator.cost import cost_tables
from pointsman.simulator.measured import ServerTimes
from pointsman.simulator.steps import StepsCost

Floats = NDArray[np.float64]
Single = Idle | Decode | Joined

KNOTS = (16, 64, 128, 256, 512, 1024, 2048, 4096)
BUDGETS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
NUM_RESAMPLED = 40
MIN_PROBES = 12
MIN_MIXED = 20
SCALED = ("sequence_s", "context_s", "pair_s")


@dataclass(frozen=True)
class Fit:
    cost: StepsCost
    server: ServerTimes
    max_num_batched_tokens: int
    errors: dict[str, float]  # one standard deviation, as a share of the figure
    residual: float  # typical error of the fit on its own probes, as a share
    num_probes: int
    under_load: float | None  # by which all steps were scaled; None: too few answers that came and went


def fit_probes(probes: Sequence[Probe]) -> Fit:
    single: list[Single] = [one for one in probes if not isinstance(one, Mixed)]
    mixed = [one for one in probes if isinstance(one, Mixed)]
    kinds = {kind: [one for one in single if isinstance(one, kind)] for kind in (Idle, Decode, Joined)}
    if len(single) < MIN_PROBES or not all(kinds.values()):
        problem = "are too few to fit a cost model: " + ", ".join(
            f"{len(found)} {kind.__name__.lower()}" for kind, found in kinds.items()
        )
        raise InputError("--minutes", f"{len(single)} probes", problem, "allow more time")
    budget = _budget([one for one in single if isinstance(one, Joined)])
    (cost, server), residual = _fit_once(single, budget)
    factor = _under_load(cost, mixed)
    best = _slower(cost, factor), server
    rng = np.random.default_rng(0)
    figures = [_figures(*best)]
    for _ in range(NUM_RESAMPLED):
        again = [
            probe for found in kinds.values() for probe in rng.choice(np.array(found, object), len(found))
        ]
        (cost, server), _ = _fit_once(again, budget)
        beside = [mixed[k] for k in rng.integers(0, max(len(mixed), 1), len(mixed))]
        figures.append(_figures(_slower(cost, _under_load(cost, beside)), server))
    spread = {
        name: float(np.std([one[name] for one in figures[1:]]) / max(figures[0][name], 1e-12))
        for name in figures[0]
    }
    return Fit(*best, budget, spread, residual, len(single), factor)


def _under_load(cost: StepsCost, mixed: Sequence[Mixed]) -> float | None:
    """How many times as long as by `cost` the answers took that came and went; the median of them."""
    if len(mixed) < MIN_MIXED:
        return None
    tables = cost_tables(cost, None)

    def step_s(one: Mixed, *prompts: int) -> float:
        num_decodes = round(one.num_seqs)
        return tables.stage_s(
            sum(prompts),
            num_decodes=num_decodes,
            context_tokens=round(one.num_seqs * one.mean_context),
            pairs=sum(prompt**2 / 2 for prompt in prompts),
            num_seqs=num_decodes + len(prompts),
        )

    said_s = [
        one.num_steps * step_s(one) + sum(step_s(one, prompt) - step_s(one) for prompt in one.joined)
        for one in mixed
    ]
    return float(np.median([one.seconds / said for one, said in zip(mixed, said_s, strict=True)]))


def _slower(cost: StepsCost, factor: float | None) -> StepsCost:
    if factor is None:
        return cost
    changed: dict[str, Any] = {name: factor * getattr(cost, name) for name in SCALED}
    changed["step_s"] = tuple((tokens, factor * seconds) for tokens, seconds in cost.step_s)
    return cost.model_copy(update=changed)


def _figures(cost: StepsCost, _: ServerTimes) -> dict[str, float]:
    tables = cost_tables(cost, None)
    decode = [tables.stage_s(num_decodes=n, context_tokens=n * 1024, num_seqs=n) for n in (1, 32)]
    prompt = [tables.stage_s(n, pairs=n * n / 2) for n in (512, 2048)]
    return {
        "step_floor_s": decode[0],
        "decode_s_per_token": (decode[1] - decode[0]) / 31,
        "prefill_s_per_token": (prompt[1] - prompt[0]) / 1536,
    }


def _budget(joined: Sequence[Joined]) -> int:
    """Tokens a step: a longer prompt is cut, and the running streams get a token with each piece."""
    least = min(one.num_prompt for one in joined)
    usual = np.median([one.num_tokens_meanwhile for one in joined if one.num_prompt == least])
    longest = max(one.num_prompt for one in joined)

    def misses(budget: int) -> float:
        """By how many pieces this budget is wrong, over all probes."""
        total = 0.0
        for one in joined:
            num_pieces = len(_pieces(one.num_prompt, one.num_seqs, budget))
            total += abs(num_pieces - 1 - float(one.num_tokens_meanwhile - usual))
        return total

    possible = [budget for budget in BUDGETS if budget <= 2 * longest] or [BUDGETS[0]]
    return min(possible, key=lambda budget: (round(misses(budget)), -budget))


def _pieces(num_prompt: int, num_decodes: int, budget: int) -> list[tuple[int, float]]:
    """Tokens of each step that carries the prompt, and its pairs."""
    pieces, before = [], 0
    while before < num_prompt:
        size = min(num_prompt - before, max(1, budget - num_decodes))
        pieces.append((size + num_decodes, size * (before + size / 2)))
        before += size
    return pieces


def _fit_once(probes: Sequence[Single], budget: int) -> tuple[tuple[StepsCost, ServerTimes], float]:
    most = max(
        max(tokens for tokens, _ in _pieces(one.num_prompt, 0, budget))
        if not isinstance(one, Decode)
        else one.num_seqs
        for one in probes
    )
    knots = np.array([1, *(knot for knot in KNOTS if knot < most), max(2, most)], float)

    def curve(tokens: float) -> Floats:
        """The row of a step of so many tokens: 1, then what it covers of each stretch between knots."""
        stretches = np.clip(tokens - knots[:-1], 0, np.diff(knots))
        stretches[-1] = max(0.0, tokens - knots[-2])
        return np.concatenate([[1.0], stretches])

    num_curve = len(knots)
    sequence, context, pair, api, api_token = range(num_curve, num_curve + 5)
    rows: list[Floats] = []
    seconds: list[float] = []
    weights: list[float] = []

    def add(row: Floats, value: float, scale: float) -> None:
        rows.append(row)
        seconds.append(value)
        weights.append(1.0 / max(scale, 1e-5))

    def prompt_row(num_prompt: int, num_decodes: int) -> Floats:
        row = np.zeros(num_curve + 5)
        for tokens, pairs in _pieces(num_prompt, num_decodes, budget):
            row[:num_curve] += curve(tokens)
            row[pair] += pairs
            row[sequence] += num_decodes + 1
        return row

    for one in probes:
        row = np.zeros(num_curve + 5)
        if isinstance(one, Decode):
            row[:num_curve] = curve(one.num_seqs)
            row[sequence] = one.num_seqs
            row[context] = one.num_seqs * one.mean_context
            add(row, one.step_s, one.step_s)
        elif isinstance(one, Idle):
            row = prompt_row(one.num_prompt, 0)
            row[api], row[api_token] = 1.0, one.num_prompt
            add(row, one.ttft_s, one.ttft_s)
        else:
            row = prompt_row(one.num_prompt, one.num_seqs)
            num_steps = len(_pieces(one.num_prompt, one.num_seqs, budget))
            row[:num_curve] -= num_steps * curve(one.num_seqs)
            row[sequence] -= num_steps * one.num_seqs
            add(row, one.held_up_s, abs(one.held_up_s) + 2 * one.plain_step_s)
    table, values, weight = np.array(rows), np.array(seconds), np.array(weights)
    found = robust_nonnegative(table * weight[:, None], values * weight)
    errors = np.abs(table @ found - values) * weight

    is_async, api_stream = _waits(
        [one for one in probes if isinstance(one, Joined)],
        lambda one: float(
            prompt_row(one.num_prompt, one.num_seqs) @ found
            + found[context]
            * one.num_seqs
            * one.mean_context
            * len(_pieces(one.num_prompt, one.num_seqs, budget))
            + found[api]
            + found[api_token] * one.num_prompt
        ),
    )
    steps = [(int(knot), float(curve(knot) @ found[:num_curve])) for knot in knots]
    cost = StepsCost(
        kind="steps",
        step_s=tuple(steps),
        sequence_s=float(found[sequence]),
        context_s=float(found[context]),
        pair_s=float(found[pair]),
    )
    server = ServerTimes(
        async_scheduling=is_async,
        api_s=float(found[api]),
        api_s_per_token=float(found[api_token]),
        api_s_per_stream=api_stream,
    )
    return (cost, server), float(np.median(errors))


def _waits(joined: Sequence[Joined], without_wait: Callable[[Joined], float]) -> tuple[bool, float]:
    """Whether a new prompt waits for one step more than the one that runs, and how streams delay it."""
    waited = np.array([one.ttft_s - without_wait(one) for one in joined])
    plain = np.array([one.plain_step_s for one in joined])
    num_seqs = np.array([one.num_seqs for one in joined], float)
    is_async = bool(np.median(waited / plain) > 1.0)  # half a step, or one and a half
    rest = waited - (1.5 if is_async else 0.5) * plain
    spread = num_seqs - np.median(num_seqs)
    slope = float(spread @ (rest - np.median(rest)) / max(spread @ spread, 1e-9))
    error = float(np.std(rest) / max(math.sqrt(spread @ spread), 1e-9))
    return is_async, slope if slope > 2 * error else 0.0


def robust_nonnegative(table: Floats, values: Floats) -> Floats:
    """Least squares with x >= 0, in which single wild values count less (Huber, three rounds)."""
    weight = np.ones(len(values))
    for _ in range(3):
        found = nonnegative(table * weight[:, None], values * weight)
        errors = np.abs(table @ found - values)
        limit = 2.0 * max(float(np.median(errors)), 1e-6)
        weight = np.sqrt(np.minimum(1.0, limit / np.maximum(errors, 1e-12)))
    return found


def nonnegative(table: Floats, values: Floats) -> Floats:
    """The x >= 0 with the least |table @ x - values| (Lawson and Hanson's active sets)."""
    scale = np.maximum(np.linalg.norm(table, axis=0), 1e-300)
    scaled = table / scale
    num_columns = table.shape[1]
    found, is_free = np.zeros(num_columns), np.zeros(num_columns, bool)
    for _ in range(3 * num_columns):
        gradient = scaled.T @ (values - scaled @ found)
        gradient[is_free] = -math.inf
        if gradient.max() <= 1e-10:
            break
        is_free[int(gradient.argmax())] = True
        while True:
            trial = np.zeros(num_columns)
            trial[is_free] = np.linalg.lstsq(scaled[:, is_free], values, rcond=None)[0]
            if trial[is_free].min() > 0:
                break
            falls = is_free & (trial <= 0)
            step = np.min(found[falls] / np.maximum(found[falls] - trial[falls], 1e-300))
            found = found + step * (trial - found)
            is_free &= found > 1e-14
            if not is_free.any():
                trial = found
                break
        found = trial
    unscaled: Floats = found / scale
    return unscaled


def description(
    url: str, facts: Facts, fit: Fit, limit_seqs: int | None, num_together: int
) -> dict[str, Any]:
    """What goes into the file: for `cluster.replicas`, for `serve --backends`, and where it comes from."""
    figures = _figures(fit.cost, fit.server)
    undetermined = ["clocks under sustained load", "preemption, prefix caching"]
    scheduler: dict[str, Any] = {"kind": "vllm-v1", "max_num_batched_tokens": fit.max_num_batched_tokens}
    scheduler["max_num_seqs"] = limit_seqs or min(256, fit.max_num_batched_tokens)
    if limit_seqs is None:
        undetermined.insert(0, f"max_num_seqs: at least {num_together}; vLLM's default assumed")
    calibration: dict[str, Any] = {
        name: float(f"{value:.4g}") for name, value in figures.items() if value > 0
    }
    if facts.block_size is not None and facts.num_blocks is not None:
        scheduler |= {"block_size": facts.block_size, "num_blocks": facts.num_blocks}
        calibration["kv_capacity_tokens"] = facts.block_size * facts.num_blocks
    else:
        undetermined.insert(0, "KV memory: /metrics does not tell")
    scheduler |= {name: _short(value) for name, value in fit.server}
    return {
        "backends": [{"url": url, "calibration": calibration}],
        "replica": {"scheduler": scheduler, "cost": _cost(fit.cost)},
        "measured": {
            "url": url,
            "model": facts.model,
            "probes": fit.num_probes,
            "error_of_the_fit": _short(fit.residual),
            "uncertainty": {name: _short(value) for name, value in fit.errors.items()},
            **({} if fit.under_load is None else {"under_load": _short(fit.under_load)}),
            "undetermined": undetermined,
        },
    }


def _cost(cost: StepsCost) -> dict[str, Any]:
    curve = [[tokens, _short(seconds)] for tokens, seconds in cost.step_s]
    others = {name: _short(getattr(cost, name)) for name in SCALED}
    return {"kind": "steps", "step_s": curve, **others}


def _short(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value
