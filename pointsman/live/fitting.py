"""From probes of a server to its cost model: non-negative least squares, and how sure that is.

A step takes a time that rises piecewise linearly with its tokens, plus what sequences, context tokens and
pairs of prompt tokens add; a first token also waits for the API server and for the step that runs. All of it
is linear in the unknowns. The uncertainty is that of fits to resampled probes.

Answers among others that came and went (`under_load.py`) are part of the fit, and as many as they are, they
decide what they tell of: a server under load is what is to be described.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pointsman.errors import InputError
from pointsman.live.least_squares import nonnegative
from pointsman.live.probing import Decode, Facts, Idle, Joined, Mixed, Probe
from pointsman.live.under_load import MIN_MIXED, ClientLoad, TimedAnswer, timed_answers
from pointsman.simulator.cost import cost_tables
from pointsman.simulator.measured import ServerTimes
from pointsman.simulator.steps import StepsCost

Floats = NDArray[np.float64]
Timed = Idle | Decode | Joined | TimedAnswer

KNOTS = (16, 64, 128, 256, 512, 1024, 2048, 4096)
BUDGETS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
NUM_RESAMPLED = 40
MIN_PROBES = 12
ENDLESS_BLOCKS = 1_000_000
NUM_ROUNDS = 4  # in which weights settle
WILD = 4.0  # an error of so many typical ones counts less
# From so many tokens on, a stretch of the curve is at least this steep, as a share of the one before it.
# Single prompts cannot tell tokens from pairs of them; steps of several have tokens without the pairs.
STEADY_TOKENS, STEADY_SHARE = 256, 0.8


@dataclass(frozen=True)
class Fit:
    cost: StepsCost
    server: ServerTimes
    max_num_batched_tokens: int
    errors: dict[str, float]  # one standard deviation, as a share of the figure
    residual: float  # typical error of the fit on its own probes, as a share
    num_probes: int
    under_load: float | None  # how many times as long as by single probes the answers took that came and went
    simulated: dict[str, float]  # how far off means are when these are simulated, as a share


def fit_probes(probes: Sequence[Probe], facts: Facts, limit_seqs: int | None) -> Fit:
    """`limit_seqs`: so many sequences run at once, where more were asked for."""
    single: list[Timed] = [one for one in probes if not isinstance(one, Mixed)]
    kinds = {kind: [one for one in single if isinstance(one, kind)] for kind in (Idle, Decode, Joined)}
    if len(single) < MIN_PROBES or not all(kinds.values()):
        problem = "are too few to fit a cost model: " + ", ".join(
            f"{len(found)} {kind.__name__.lower()}" for kind, found in kinds.items()
        )
        raise InputError("--minutes", f"{len(single)} probes", problem, "allow more time")
    mixed = [one for one in probes if isinstance(one, Mixed)]
    least_step_s = min(one.step_s for one in single if isinstance(one, Decode))
    among_others: list[Timed] = list(timed_answers(mixed, least_step_s)) if len(mixed) >= MIN_MIXED else []
    budget = _budget([one for one in single if isinstance(one, Joined)])
    rows = _Rows([*single, *among_others], budget)
    is_single = np.arange(len(rows)) < len(single)
    found = rows.fit(np.arange(len(rows)))
    cost, times, is_async = rows.cost(found), rows.times(found), rows.is_async(found)
    server, under_load, simulated = times[is_async], None, {}
    if among_others:
        under_load = rows.slowdown(rows.fit(np.flatnonzero(is_single)))
        load = ClientLoad(mixed, {"num_blocks": ENDLESS_BLOCKS} | _scheduler(facts, budget, limit_seqs))
        best = min((load.waits(cost, one) for one in times), key=lambda one: one.miss)
        server, simulated = best.times, best.errors
    figures = _figures(cost)
    rng = np.random.default_rng(0)
    again = [_figures(rows.cost(rows.fit(rows.drawn(rng)))) for _ in range(NUM_RESAMPLED)]
    spread = {
        name: float(np.std([one[name] for one in again]) / max(value, 1e-12))
        for name, value in figures.items()
    }
    return Fit(cost, server, budget, spread, rows.residual(found), len(single), under_load, simulated)


def _figures(cost: StepsCost) -> dict[str, float]:
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
        """How many pieces this budget is off, over all probes."""
        total = 0.0
        for one in joined:
            num_pieces = len(_pieces(one.num_prompt, one.num_seqs, budget))
            total += abs(num_pieces - 1 - float(one.num_tokens_meanwhile - usual))
        return total

    possible = [budget for budget in BUDGETS if budget <= 2 * longest] or [BUDGETS[0]]
    return min(possible, key=lambda budget: (round(misses(budget)), -budget))


def _pieces(num_prompt: int, num_decodes: float, budget: int) -> list[tuple[float, float]]:
    """Tokens of each step that carries the prompt, and its pairs."""
    pieces: list[tuple[float, float]] = []
    before = 0
    while before < num_prompt:
        size = min(num_prompt - before, max(1, budget - math.ceil(num_decodes)))
        pieces.append((size + num_decodes, size * (before + size / 2)))
        before += size
    return pieces


class _Rows:
    """What every probe says, as an equation: unknown times, how often each is in it, and seconds.

    The unknowns: a step, a token in each stretch between knots, a sequence, a context token, a pair of prompt
    tokens, the API server's time for a request and for a token of its prompt.
    """

    def __init__(self, probes: Sequence[Timed], budget: int) -> None:
        self._probes, self._budget = probes, budget
        most = max(
            one.num_seqs
            if isinstance(one, Decode | TimedAnswer)
            else max(tokens for tokens, _ in _pieces(one.num_prompt, 0, budget))
            for one in probes
        )
        self._knots = np.array([1, *(knot for knot in KNOTS if knot < most), max(2, math.ceil(most))], float)
        num = self._num_curve = len(self._knots)
        self._sequence, self._context, self._pair, self._api, self._api_token = range(num, num + 5)
        self._basis = np.eye(num + 5)
        for stretch in range(2, num):
            if self._knots[stretch - 1] >= STEADY_TOKENS:
                self._basis[stretch] += STEADY_SHARE * self._basis[stretch - 1]
        self._table = np.array([self._row(one) for one in probes])
        self._seconds = np.array([_seconds(one) for one in probes])
        # A difference of two times is as uncertain as these.
        self._beside_s = np.array([2 * one.plain_step_s if isinstance(one, Joined) else 0 for one in probes])
        self._kind = np.array([type(one).__name__ for one in probes])

    def __len__(self) -> int:
        return len(self._probes)

    def _curve(self, tokens: float) -> Floats:
        """The row of a step of so many tokens: 1, then what it covers of each stretch between knots."""
        stretches = np.clip(tokens - self._knots[:-1], 0, np.diff(self._knots))
        stretches[-1] = max(0.0, tokens - self._knots[-2])
        return np.concatenate([[1.0], stretches, np.zeros(5)])

    def _decode_row(self, num_seqs: float, mean_context: float) -> Floats:
        row = self._curve(num_seqs)
        row[self._sequence], row[self._context] = num_seqs, num_seqs * mean_context
        return row

    def _prompt_row(self, num_prompt: int, num_decodes: float, mean_context: float = 0.0) -> Floats:
        """The steps that carry a prompt, beside sequences that decode."""
        row = np.zeros(self._num_curve + 5)
        for tokens, pairs in _pieces(num_prompt, num_decodes, self._budget):
            row += self._curve(tokens)
            row[self._pair] += pairs
            row[self._sequence] += num_decodes + 1
            row[self._context] += num_decodes * mean_context
        return row

    def _held_up_row(self, prompts: tuple[int, ...], num_seqs: float, mean_context: float) -> Floats:
        """How much longer steps are that carry prompts, taken in together, than those without them."""
        num_tokens = sum(prompts)
        num_steps = len(_pieces(num_tokens, num_seqs, self._budget))
        with_prompts = self._prompt_row(num_tokens, num_seqs, mean_context)
        # Tokens of one prompt make no pairs with those of another.
        with_prompts[self._pair] += (sum(num**2 for num in prompts) - num_tokens**2) / 2
        with_prompts[self._sequence] += len(prompts) - 1
        return with_prompts - num_steps * self._decode_row(num_seqs, mean_context)

    def _first_token_row(self, num_prompt: int, num_decodes: float, mean_context: float = 0.0) -> Floats:
        row = self._prompt_row(num_prompt, num_decodes, mean_context)
        row[self._api], row[self._api_token] = 1.0, num_prompt
        return row

    def _row(self, one: Timed) -> Floats:
        if isinstance(one, Decode):
            return self._decode_row(one.num_seqs, one.mean_context)
        if isinstance(one, Idle):
            return self._first_token_row(one.num_prompt, 0)
        if isinstance(one, Joined):
            return self._held_up_row((one.num_prompt,), one.num_seqs, one.mean_context)
        row = one.num_steps * self._decode_row(one.num_seqs, one.mean_context)
        for prompts in one.joined:
            row += self._held_up_row(prompts, one.num_seqs, one.mean_context)
        return row

    def fit(self, chosen: NDArray[np.int64]) -> Floats:
        """Least squares of relative errors, with nothing below 0, and a curve that does not flatten out.

        Errors are relative to what the fit says, not to what was measured: that would make every slow moment
        count less than a fast one, and all times too short. Single wild values count less (Huber); where
        there are answers among others, all steps are then scaled to what these took in all.
        """
        table, seconds = self._table[chosen], self._seconds[chosen]
        said_s, is_wild = seconds, np.ones(len(seconds))
        for _ in range(NUM_ROUNDS):
            scale_s = np.maximum(np.abs(said_s), np.abs(seconds) / 5) + self._beside_s[chosen]
            weight = is_wild / np.maximum(scale_s, 1e-5)
            found = self._basis @ nonnegative(table @ self._basis * weight[:, None], seconds * weight)
            said_s = table @ found
            errors = np.abs(said_s - seconds) / np.maximum(scale_s, 1e-5)
            limit = WILD * max(float(np.median(errors)), 1e-6)
            is_wild = np.sqrt(np.minimum(1.0, limit / np.maximum(errors, 1e-12)))
        found[: self._api] *= self.slowdown(found, chosen)
        return found

    def slowdown(self, found: Floats, chosen: NDArray[np.int64] | None = None) -> float:
        """How many times as long as `found` says the answers among others took; 1 without any."""
        among = np.arange(len(self)) if chosen is None else chosen
        among = among[self._kind[among] == TimedAnswer.__name__]
        return float(self._seconds[among].sum() / (self._table[among] @ found).sum()) if among.size else 1.0

    def drawn(self, rng: np.random.Generator) -> NDArray[np.int64]:
        """As many of each kind, with replacement."""
        kinds = [np.flatnonzero(self._kind == kind) for kind in np.unique(self._kind)]
        return np.concatenate([rng.choice(kind, len(kind)) for kind in kinds])

    def residual(self, found: Floats) -> float:
        scale_s = np.maximum(np.abs(self._seconds) + self._beside_s, 1e-5)
        return float(np.median(np.abs(self._table @ found - self._seconds) / scale_s))

    def cost(self, found: Floats) -> StepsCost:
        return StepsCost(
            kind="steps",
            step_s=tuple((int(knot), float(self._curve(knot) @ found)) for knot in self._knots),
            sequence_s=float(found[self._sequence]),
            context_s=float(found[self._context]),
            pair_s=float(found[self._pair]),
        )

    def times(self, found: Floats) -> tuple[ServerTimes, ServerTimes]:
        """If scheduling is synchronous, and if it is not."""
        joined, waited_s, plain_s = self._waited(found)
        sync, after_next = (
            ServerTimes(
                async_scheduling=is_async,
                api_s=float(found[self._api]),
                api_s_per_token=float(found[self._api_token]),
                api_s_per_stream=_delay_by_streams(joined, waited_s - (1.5 if is_async else 0.5) * plain_s),
            )
            for is_async in (False, True)
        )
        return sync, after_next

    def is_async(self, found: Floats) -> bool:
        """Whether a prompt that joins a batch seems to wait for one step more than the one that runs."""
        _, waited_s, plain_s = self._waited(found)
        return bool(np.median(waited_s - plain_s) > 0)  # half a step, or one and a half

    def _waited(self, found: Floats) -> tuple[list[Joined], Floats, Floats]:
        """How long prompts that joined a batch waited before their steps, and its steps without them."""
        joined = [one for one in self._probes if isinstance(one, Joined)]
        rows = [self._first_token_row(one.num_prompt, one.num_seqs, one.mean_context) for one in joined]
        waited_s = np.array([one.ttft_s for one in joined]) - np.array(rows) @ found
        return joined, waited_s, np.array([one.plain_step_s for one in joined])


def _seconds(one: Timed) -> float:
    if isinstance(one, Decode):
        return one.step_s
    if isinstance(one, Idle):
        return one.ttft_s
    return one.held_up_s if isinstance(one, Joined) else one.seconds


def _delay_by_streams(joined: Sequence[Joined], delays_s: Floats) -> float:
    """How much later a first token comes for each answer that streams meanwhile; 0 if that is not clear."""
    num_seqs = np.array([one.num_seqs for one in joined], float)
    spread = num_seqs - np.median(num_seqs)
    slope = float(spread @ (delays_s - np.median(delays_s)) / max(spread @ spread, 1e-9))
    error = float(np.std(delays_s) / max(math.sqrt(spread @ spread), 1e-9))
    return slope if slope > 2 * error else 0.0


def description(
    url: str, facts: Facts, fit: Fit, limit_seqs: int | None, num_together: int
) -> dict[str, Any]:
    """What goes into the file: for `cluster.replicas`, for `serve --backends`, and where it comes from."""
    figures = _figures(fit.cost)
    undetermined = ["clocks under sustained load", "preemption, prefix caching"]
    scheduler = _scheduler(facts, fit.max_num_batched_tokens, limit_seqs)
    if limit_seqs is None:
        undetermined.insert(0, f"max_num_seqs: at least {num_together}; vLLM's default assumed")
    calibration: dict[str, Any] = {
        name: float(f"{value:.4g}") for name, value in figures.items() if value > 0
    }
    if facts.block_size is not None and facts.num_blocks is not None:
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
            **({} if fit.under_load is None else _under_load(fit.under_load, fit.simulated)),
            "undetermined": undetermined,
        },
    }


def _under_load(slowdown: float, off: dict[str, float]) -> dict[str, Any]:
    return {"under_load": _short(slowdown), "off_under_load": {name: _short(off[name]) for name in off}}


def _scheduler(facts: Facts, budget: int, limit_seqs: int | None) -> dict[str, Any]:
    """The scheduler's settings, without the times beside the steps."""
    known = {
        "kind": "vllm-v1",
        "max_num_batched_tokens": budget,
        "max_num_seqs": limit_seqs or min(256, budget),
    }
    if facts.block_size is None or facts.num_blocks is None:
        return known
    return known | {"block_size": facts.block_size, "num_blocks": facts.num_blocks}


def _cost(cost: StepsCost) -> dict[str, Any]:
    curve = [[tokens, _short(seconds)] for tokens, seconds in cost.step_s]
    others = {name: _short(getattr(cost, name)) for name in ("sequence_s", "context_s", "pair_s")}
    return {"kind": "steps", "step_s": curve, **others}


def _short(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value
