"""How fast a live replica is: by what was said of it, corrected by what the router sees; else a usual value.

The policies were trained on replicas whose speed they know (`signals.py`, source `static`). Figures start at
what the router was told, else at those of Llama-3-8B on one A100, and are estimated as traffic flows:

- Speed: a window of some dozen steps (streams.py) takes a floor for each step, a decode time for each stream
  in each step and a prefill time for each prompt token; times to first token of requests that found nobody
  waiting say the same where few streams decode. The three are fitted by least squares, which forget what is
  more than a minute old, and keep the proportions they began with where the traffic does not tell them apart.
  What was told counts as much as PRIOR_WEIGHT windows. If the last windows all took much longer or shorter
  than predicted, the server has changed, or is not what it was said to be: the fit starts anew from these
  windows, and what was told counts no more.
- KV memory: what the server says of it, if nothing was told. Else the tokens the router has booked over the
  share the server says is in use: the median, unless that is about what was told.

Replicas that cannot be told apart get the same figures: a difference of a few per cent is noise, and would
send all traffic of a quiet hour to one of two equal servers. Those that were said to be different stay so.

What was learned of a replica stays until traffic corrects it. While nothing new is seen of it and the others
serve, its standard error grows, up to MAX_STALE_ERROR: two equal servers stay equal, and a slow one stays
slow. A replica that was started anew is probably what it was, but a few new windows outweigh what was learned
before.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np

from pointsman.routing.streams import NUM_WINDOWS

KV = "kv_capacity_tokens"
FIGURES = ("prefill_s_per_token", "decode_s_per_token", "step_floor_s", KV)
Figures = dict[str, float]
Source = Literal["assumed", "told", "measured"]

# Llama-3-8B on one A100.
USUAL: Figures = {
    "prefill_s_per_token": 8.6e-5,
    "decode_s_per_token": 8.2e-5,
    "step_floor_s": 9.8e-3,
    "kv_capacity_tokens": 449_504.0,
}

# Hardly anything real is faster or smaller. A mock server that answers at once is; all such are then alike.
LOWEST: Figures = {
    "prefill_s_per_token": 1e-5,
    "decode_s_per_token": 1e-5,
    "step_floor_s": 2e-3,
    "kv_capacity_tokens": 1024.0,
}
NO_FIGURES: Mapping[str, float] = MappingProxyType({})
SPEEDS = ("step_floor_s", "decode_s_per_token", "prefill_s_per_token")  # the first three of the fit
USUAL_OVERHEAD_S = 0.005  # of a first token beside the steps: the way there and back, the API server
# Replicas that differ by less are taken to be the same, or by fewer standard errors, in a typical step and in
# each speed. A slow step may be sure long before anybody knows what 64 streams cost. Memory that is half as
# large again is other hardware, or a tenth by what the servers themselves say.
ALIKE = math.log(1.1)
DOUBT, SPEED_DOUBT = 2.0, 3.0
KV_ALIKE, REPORTED_KV_ALIKE = 1.5, 1.1
FADE = 0.99  # what a window leaves of the weight of those before
SHAPE_WEIGHT = 0.005  # of the usual proportions, beside 1 for a window
FIRST_TOKEN_WEIGHT = 0.25  # of a window
FULL_WINDOW = 16  # steps
MIN_WEIGHT = 2.0  # windows that an estimate needs
NUM_RESIDUALS, MAX_RESIDUAL = 8, 0.25  # the last windows, and by how much they may all be off
NUM_FIRST_TOKENS = 16  # the latest, between two looks at what is new
PRIOR_WEIGHT, PRIOR_ERROR = 4.0, 0.2  # of what was told, in windows, each so far off
RESTART_WEIGHT = 10.0  # of what was seen before the server was started anew, at most
FIRST_ERROR = 0.1  # of a window, until some were seen
STALE_ERROR, MAX_STALE_ERROR = 1e-4, 0.1  # more for each request that others finished since the last news
KV_DOUBT = math.log(1.25)  # a KV memory that is found to be nearer than this to what was told is that
NUM_SAMPLES = 64  # of the KV memory, the latest
MIN_SAMPLES = 8
MIN_PROMPT_TOKENS = 64  # of shorter ones the first token comes as soon as any step ends
MIN_KV_USE = 0.02


def typical_step_s(figures: Mapping[str, float]) -> float:
    """The step by which capacities compare: 256 prompt tokens beside 64 streams, the mix of a chat."""
    return figures["step_floor_s"] + 63 * figures["decode_s_per_token"] + 256 * figures["prefill_s_per_token"]


class SpeedFit:
    """Least squares, in units of what was told or is usual, of rows that each say `figures · row = 1`."""

    def __init__(self, told: Mapping[str, float]) -> None:
        known = [told[name] / USUAL[name] for name in SPEEDS if name in told]
        scale = math.prod(known) ** (1.0 / len(known)) if known else 1.0
        speeds = [told.get(name, scale * USUAL[name]) for name in SPEEDS]
        self._units = np.array([*speeds, USUAL_OVERHEAD_S])
        is_told = np.array([*(float(name in told) for name in SPEEDS), 0.0])
        self._prior = PRIOR_WEIGHT * is_told
        self._is_known = all(name in told for name in SPEEDS)
        self._error = FIRST_ERROR  # of a window, relative
        self._last: deque[tuple[Any, float, float]] = deque(maxlen=NUM_RESIDUALS)  # row, weight, residual
        self._forget()

    def _forget(self) -> None:
        self._matrix = np.diag(self._prior)
        self._vector = self._prior.copy()
        self.weight = 0.0

    @property
    def is_sure(self) -> bool:
        """Whether enough was seen, or told."""
        return self.weight >= MIN_WEIGHT or self._is_known

    def add(self, counts: Sequence[float], elapsed_s: float, weight: float) -> None:
        """`counts`: steps, streams beside the first summed over them, prompt tokens, first tokens."""
        row = np.asarray(counts) * self._units / max(elapsed_s, 1e-9)
        if self.is_sure:
            residual = math.log(max(float(row @ self.solution()), 1e-3))
            self._last.append((row, weight, residual))
            self._error += 0.05 * (abs(residual) - self._error)
            if self._has_changed():
                self._start_anew()
                return
        self._take(row, weight)

    def _take(self, row: Any, weight: float) -> None:
        self._matrix = FADE * self._matrix + weight * np.outer(row, row)
        self._vector = FADE * self._vector + weight * row
        diagonal = np.einsum("ii->i", self._matrix)
        diagonal += (1.0 - FADE) * self._prior  # what was told does not fade
        self._vector += (1.0 - FADE) * self._prior
        self.weight = FADE * self.weight + weight

    def _has_changed(self) -> bool:
        residuals = [residual for _, _, residual in self._last]
        is_full = len(residuals) == NUM_RESIDUALS
        return is_full and (min(residuals) > MAX_RESIDUAL or max(residuals) < -MAX_RESIDUAL)

    def _start_anew(self) -> None:
        """From the rows that showed the change, which all came after it."""
        self._prior *= 0.0
        self._is_known = False
        self._error = FIRST_ERROR
        self._forget()
        for row, weight, _ in self._last:
            self._take(row, weight)
        self._last.clear()

    def doubt(self) -> None:
        """What was seen counts no more than RESTART_WEIGHT windows."""
        share = min(1.0, RESTART_WEIGHT / max(self.weight, 1e-9))
        self._matrix -= (1.0 - share) * (self._matrix - np.diag(self._prior))
        self._vector -= (1.0 - share) * (self._vector - self._prior)
        self.weight *= share
        self._last.clear()

    def _scale(self) -> float:
        """How much slower than the units say, if all three are so alike."""
        return float(self._vector[:3].sum() / max(self._matrix[:3, :3].sum(), 1e-30))

    def _regular(self) -> Any:
        """[4, 4] with the proportions of the units: the speeds near their mean, and the usual overhead."""
        regular = self._matrix.copy()
        regular[:3, :3] += SHAPE_WEIGHT / max(self._scale(), 1e-9) ** 2 * (np.eye(3) - 1.0 / 3.0)
        regular[3, 3] += SHAPE_WEIGHT
        return regular

    def solution(self) -> Any:
        """[4] the three speeds and the overhead of a first token, in units of the first ones."""
        target = self._vector.copy()
        target[3] += SHAPE_WEIGHT
        return np.maximum(np.linalg.solve(self._regular(), target), 1e-3 * self._scale())

    def _covariance(self) -> Any:
        """[4, 4] of the solution. What was told is less sure than as many windows."""
        inverse = np.linalg.inv(self._regular())
        more = max(0.0, PRIOR_ERROR**2 - self._error**2)
        return self._error**2 * inverse + more * (inverse * self._prior) @ inverse

    def error(self) -> float:
        """Relative standard error of the typical step."""
        step = np.array([1.0, 63.0, 256.0, 0.0]) * self._units
        return math.sqrt(step @ self._covariance() @ step) / float(step @ self.solution())

    def errors(self) -> Figures:
        """Relative standard error of each speed."""
        relative = np.sqrt(np.diag(self._covariance())) / self.solution()
        return dict(zip(SPEEDS, relative[:3].tolist(), strict=True))

    def figures(self) -> Figures:
        return dict(zip(SPEEDS, (self.solution() * self._units)[:3].tolist(), strict=True))


class Estimate(NamedTuple):
    """What was found out about a replica, and how sure that is."""

    figures: Figures  # those of which enough was seen, or told
    error: float  # relative standard error of its typical step
    source: Source = "assumed"  # of the speeds
    told: Mapping[str, float] = NO_FIGURES
    errors: Mapping[str, float] = NO_FIGURES  # relative standard error of each speed
    has_reported_kv: bool = False  # its KV memory is what the server says


class Estimator:
    """The latest observations of one replica. `told`: what is said of it, of FIGURES."""

    def __init__(self, told: Mapping[str, float] | None = None) -> None:
        self._told = dict(told or {})
        self._fit = SpeedFit(self._told)
        self._reported_kv: float | None = None
        self._capacities: deque[float] = deque(maxlen=NUM_SAMPLES)
        self._first_tokens: deque[tuple[int, float, float]] = deque(maxlen=NUM_FIRST_TOKENS)
        self.windows = np.zeros((NUM_WINDOWS, 4))  # written by the books
        self._num_windows = 0  # read of those
        self._num_finished = self._num_seen = 0  # requests of all replicas: now, and at the last news

    def take_news(self, num_written: int, num_finished: int) -> None:
        """Fit what is new: first tokens, and `windows`, where `num_written` were written in turn.

        `num_finished`: requests of all replicas so far.
        """
        self._num_finished = num_finished
        if self._first_tokens or num_written > self._num_windows:
            self._num_seen = num_finished
        for num_prompt, ttft_s, num_decoding in self._first_tokens:
            self._fit.add((1.5, 1.5 * num_decoding, num_prompt, 1.0), ttft_s, FIRST_TOKEN_WEIGHT)
        self._first_tokens.clear()
        for number in range(max(self._num_windows, num_written - NUM_WINDOWS), num_written):
            self.saw_window(*self.windows[number % NUM_WINDOWS].tolist())
        self._num_windows = num_written

    def saw_window(self, num_steps: float, elapsed_s: float, streams: float, prompt_tokens: float) -> None:
        """`streams`: those that decoded, summed over the steps."""
        others = max(0.0, streams - num_steps)
        self._fit.add((num_steps, others, prompt_tokens, 0.0), elapsed_s, min(2.0, num_steps / FULL_WINDOW))

    def saw_first_token(self, num_prompt: int, ttft_s: float, num_decoding: float) -> None:
        """A request that found nobody waiting took half a step until it began, on average, and its own.

        Its client waits for the token that was just seen: it is fitted later.
        """
        if num_prompt >= MIN_PROMPT_TOKENS:
            self._first_tokens.append((num_prompt, ttft_s, num_decoding))

    def saw_gauges(self, num_booked_tokens: float, kv_use: float) -> None:
        if kv_use >= MIN_KV_USE and num_booked_tokens > 0:
            self._capacities.append(num_booked_tokens / min(kv_use, 1.0))

    def has_capacity(self, kv_capacity_tokens: float) -> bool:
        """The server says how large its KV memory is; -> whether that is news."""
        if KV in self._told or kv_capacity_tokens == self._reported_kv:
            return False
        self._reported_kv = kv_capacity_tokens
        return True

    def estimate(self) -> Estimate:
        told, fit, reported = self._told, self._fit, self._reported_kv
        found = dict(told)
        if fit.is_sure and fit.weight > 0.0:
            found |= fit.figures()
        if reported is None and len(self._capacities) >= MIN_SAMPLES:
            capacity = float(np.median(self._capacities))
            if not abs(math.log(capacity / found.get(KV, math.nan))) < KV_DOUBT:
                found[KV] = capacity
        lowest = {name: min(value, told.get(name, value)) for name, value in LOWEST.items()}
        bounded = {name: max(lowest[name], value) for name, value in found.items()}
        if reported is not None:
            bounded[KV] = reported
        source: Source = "measured" if fit.weight >= MIN_WEIGHT else "told" if fit.is_sure else "assumed"
        if not fit.is_sure:
            return Estimate(bounded, math.inf, source, told, NO_FIGURES, reported is not None)
        stale = min(MAX_STALE_ERROR, STALE_ERROR * (self._num_finished - self._num_seen))
        errors = {name: math.hypot(error, stale) for name, error in fit.errors().items()}
        return Estimate(bounded, math.hypot(fit.error(), stale), source, told, errors, reported is not None)

    def was_restarted(self) -> None:
        """The server may have other settings now, or another neighbour on its GPU."""
        self._fit.doubt()
        self._capacities.clear()
        self._first_tokens.clear()


def pooled(estimates: Sequence[Estimate]) -> list[Figures]:
    """Every figure of each replica: those of all that cannot be told apart from it, to the last bit.

    Those that nothing was seen of are taken for what is usual among the others.
    """
    common = dict(USUAL)
    for name in FIGURES:
        values = [one.figures[name] for one in estimates if name in one.figures]
        if values:
            common[name] = float(np.median(values))
    known = [index for index, one in enumerate(estimates) if math.isfinite(one.error)]
    known.sort(key=lambda index: typical_step_s(common | estimates[index].figures))
    figures = [common | one.figures for one in estimates]
    groups: list[list[int]] = []
    for index in known:
        for group in reversed(groups):
            if _is_alike(common, [estimates[one] for one in group], estimates[index]):
                group.append(index)
                break
        else:
            groups.append([index])
    for group in groups:
        together = _mean(common, [estimates[one] for one in group])
        for one in group:
            figures[one] = together
    if known:
        usual = figures[known[len(known) // 2]]
        for index in set(range(len(estimates))) - set(known):
            figures[index] = usual | estimates[index].figures
    return figures


def _is_alike(common: Figures, group: Sequence[Estimate], other: Estimate) -> bool:
    """Whether the same was told of them, and neither memory, typical step nor one of the speeds differs."""
    first = group[0]
    sizes = [one.figures[KV] for one in (first, other) if KV in one.figures]
    limit = REPORTED_KV_ALIKE if first.has_reported_kv and other.has_reported_kv else KV_ALIKE
    if other.told != first.told or max(sizes, default=1.0) >= limit * min(sizes, default=1.0):
        return False
    mean, found = _mean(common, group), common | other.figures
    error = math.hypot(min(one.error for one in group), other.error)
    if abs(math.log(typical_step_s(found) / typical_step_s(mean))) >= max(ALIKE, DOUBT * error):
        return False
    for name in SPEEDS:
        error = math.hypot(
            min(one.errors.get(name, math.inf) for one in group), other.errors.get(name, math.inf)
        )
        if abs(math.log(found[name] / mean[name])) >= max(ALIKE, SPEED_DOUBT * error):
            return False
    return True


def _mean(common: Figures, group: Sequence[Estimate]) -> Figures:
    """The geometric mean, the surer the heavier; what all have in common to the last bit."""
    if all(one.figures == group[0].figures for one in group):
        return common | group[0].figures
    weights = np.array([1.0 / max(one.error, 0.01) ** 2 for one in group])
    return {
        name: float(
            np.exp(
                np.average([math.log(one.figures.get(name, common[name])) for one in group], weights=weights)
            )
        )
        for name in FIGURES
    }
