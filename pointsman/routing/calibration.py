"""How fast a live replica is: by what was said of it, else by what the router sees, else a usual value.

The policies were trained on replicas whose speed they know (`signals.py`, source `static`). A figure that is
known is taken as it is. The others start at those of Llama-3-8B on one A100, and are estimated as traffic
flows:

- Speed: a window of some dozen steps (streams.py) takes a floor for each step, a decode time for each stream
  in each step and a prefill time for each prompt token; times to first token of requests that found nobody
  waiting say the same where few streams decode. The three are fitted by least squares, which forget what is
  more than a minute old, and keep the usual proportions where the traffic does not tell them apart. If
  the last windows all took much longer or shorter than predicted, the server has changed, and the fit starts
  anew.
- KV memory: the tokens the router has booked over the share the server says is in use. The median.

Replicas that cannot be told apart get the same figures: a difference of a few per cent is noise, and would
send all traffic of a quiet hour to one of two equal servers. A replica that nothing new was seen of, while
the others served some hundreds of requests, gets what is usual among them: a wrong estimate must not be the
reason why it is never corrected.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from pointsman.routing.streams import NUM_WINDOWS

FIGURES = ("prefill_s_per_token", "decode_s_per_token", "step_floor_s", "kv_capacity_tokens")
Figures = dict[str, float]

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
SPEEDS = ("step_floor_s", "decode_s_per_token", "prefill_s_per_token")  # the first three of the fit
USUAL_OVERHEAD_S = 0.005  # of a first token beside the steps: the way there and back, the API server
ALIKE = math.log(
    1.1
)  # replicas that differ by less are taken to be the same, or within DOUBT standard errors
DOUBT = 2.0
FADE = 0.99  # what a window leaves of the weight of those before
SHAPE_WEIGHT = 0.005  # of the usual proportions, beside 1 for a window
FIRST_TOKEN_WEIGHT = 0.25  # of a window
FULL_WINDOW = 16  # steps
MIN_WEIGHT = 2.0  # windows that an estimate needs
NUM_RESIDUALS, MAX_RESIDUAL = 8, 0.25  # the last windows, and by how much they may all be off
NUM_FIRST_TOKENS = 16  # the latest, between two looks at what is new
NUM_SAMPLES = 64  # of the KV memory, the latest
MIN_SAMPLES = 8
MIN_PROMPT_TOKENS = 64  # of shorter ones the first token comes as soon as any step ends
MIN_KV_USE = 0.02


def typical_step_s(figures: Mapping[str, float]) -> float:
    """By which capacities compare: 256 prompt tokens beside 64 streams, the mix of a chat."""
    return figures["step_floor_s"] + 63 * figures["decode_s_per_token"] + 256 * figures["prefill_s_per_token"]


class SpeedFit:
    """Least squares, in units of USUAL, of rows that each say `figures · row = 1`."""

    def __init__(self) -> None:
        self._matrix = np.zeros((4, 4))
        self._vector = np.zeros(4)
        self.weight = 0.0
        self._error = 0.1  # of a window, relative
        self._residuals: deque[float] = deque(maxlen=NUM_RESIDUALS)
        self._units = np.array([*(USUAL[name] for name in SPEEDS), USUAL_OVERHEAD_S])

    def add(self, counts: Sequence[float], elapsed_s: float, weight: float) -> None:
        """`counts`: steps, streams beside the first summed over them, prompt tokens, first tokens."""
        row = np.asarray(counts) * self._units / max(elapsed_s, 1e-9)
        if self.weight >= MIN_WEIGHT:
            self._residuals.append(math.log(max(float(row @ self.solution()), 1e-3)))
            self._error += 0.05 * (abs(self._residuals[-1]) - self._error)
            self._notice_change()
        self._matrix = FADE * self._matrix + weight * np.outer(row, row)
        self._vector = FADE * self._vector + weight * row
        self.weight = FADE * self.weight + weight

    def _notice_change(self) -> None:
        low, high = min(self._residuals), max(self._residuals)
        if len(self._residuals) == NUM_RESIDUALS and (low > MAX_RESIDUAL or high < -MAX_RESIDUAL):
            self._matrix *= 0.0
            self._vector *= 0.0
            self.weight = 0.0
            self._residuals.clear()

    def _scale(self) -> float:
        """How much slower than usual, if all three are so alike."""
        return float(self._vector[:3].sum() / max(self._matrix[:3, :3].sum(), 1e-30))

    def _regular(self) -> Any:
        """[4, 4] with the usual proportions: the three speeds near their mean, and the usual overhead."""
        regular = self._matrix.copy()
        regular[:3, :3] += SHAPE_WEIGHT / max(self._scale(), 1e-9) ** 2 * (np.eye(3) - 1.0 / 3.0)
        regular[3, 3] += SHAPE_WEIGHT
        return regular

    def solution(self) -> Any:
        """[4] the three speeds and the overhead of a first token, in units of the usual ones."""
        target = self._vector.copy()
        target[3] += SHAPE_WEIGHT
        return np.maximum(np.linalg.solve(self._regular(), target), 1e-3 * self._scale())

    def error(self) -> float:
        """Relative standard error of the typical step."""
        step = np.array([1.0, 63.0, 256.0, 0.0]) * self._units
        spread = float(step @ np.linalg.solve(self._regular(), step)) ** 0.5
        return float(self._error * spread / (step @ self.solution()))

    def figures(self) -> Figures:
        return dict(zip(SPEEDS, (self.solution() * self._units)[:3].tolist(), strict=True))


class Estimate(NamedTuple):
    """What was found out about a replica, and how sure that is."""

    figures: Figures  # those of which enough was seen
    error: float  # relative standard error of its typical step


NOTHING_SEEN = Estimate({}, math.inf)


class Estimator:
    """The latest observations of one replica."""

    def __init__(self) -> None:
        self._fit = SpeedFit()
        self._capacities: deque[float] = deque(maxlen=NUM_SAMPLES)
        self._first_tokens: deque[tuple[int, float, float]] = deque(maxlen=NUM_FIRST_TOKENS)
        self._is_news = False
        self.windows = np.zeros((NUM_WINDOWS, 4))  # written by the books
        self._num_windows = 0  # read of those

    def take_news(self, num_written: int) -> None:
        """Fit what is new: first tokens, and `windows`, where `num_written` were written in turn."""
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
        self._is_news = True

    def saw_first_token(self, num_prompt: int, ttft_s: float, num_decoding: float) -> None:
        """A request that found nobody waiting took half a step until it began, on average, and its own.

        Its client waits for the token that was just seen: it is fitted later.
        """
        if num_prompt >= MIN_PROMPT_TOKENS:
            self._first_tokens.append((num_prompt, ttft_s, num_decoding))
            self._is_news = True

    def saw_gauges(self, num_booked_tokens: float, kv_use: float) -> None:
        if kv_use >= MIN_KV_USE and num_booked_tokens > 0:
            self._capacities.append(num_booked_tokens / min(kv_use, 1.0))

    def estimate(self) -> Estimate:
        found: Figures = {}
        if self._fit.weight >= MIN_WEIGHT:
            found |= self._fit.figures()
        if len(self._capacities) >= MIN_SAMPLES:
            found["kv_capacity_tokens"] = float(np.median(self._capacities))
        bounded = {name: max(LOWEST[name], value) for name, value in found.items()}
        return Estimate(bounded, self._fit.error() if self._fit.weight >= MIN_WEIGHT else math.inf)

    def forget_if_old(self) -> None:
        """Start anew if nothing was seen since this was last called."""
        if not self._is_news:
            self._fit = SpeedFit()
            self._capacities.clear()
        self._is_news = False


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
    group: list[int] = []
    for index in known:
        if group and not _is_alike(common, [estimates[one] for one in group], estimates[index]):
            group = []
        group.append(index)
        together = _mean(common, [estimates[one] for one in group])
        for one in group:
            figures[one] = together
    if known:
        usual = figures[known[len(known) // 2]]
        figures = [found if one.figures else usual for found, one in zip(figures, estimates, strict=True)]
    return figures


def _is_alike(common: Figures, group: Sequence[Estimate], other: Estimate) -> bool:
    ratio = typical_step_s(common | other.figures) / typical_step_s(_mean(common, group))
    error = math.hypot(min(one.error for one in group), other.error)
    return abs(math.log(ratio)) < max(ALIKE, DOUBT * error)


def _mean(common: Figures, group: Sequence[Estimate]) -> Figures:
    """The geometric mean, the surer the heavier."""
    weights = np.array([1.0 / max(one.error, 0.01) ** 2 for one in group])
    return {
        name: float(
            np.exp(
                np.average([math.log(one.figures.get(name, common[name])) for one in group], weights=weights)
            )
        )
        for name in FIGURES
    }
