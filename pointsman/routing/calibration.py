"""How fast a live replica is: by what was said of it, else by what the router sees, else a usual value.

The policies were trained on replicas whose speed they know (`signals.py`, source `static`). A figure that is
known is taken as it is. The others start at those of Llama-3-8B on one A100, and are estimated as traffic
flows:

- steps: the time between two tokens against the number of streams that decode, by powers of two. The lower
  quartile of each class, since steps with a prompt in them are longer; a line through the classes.
- prefill: time to first token, less one step, over the prompt's length, of requests sent to a replica where
  nobody waited. The median.
- KV memory: the tokens the router has booked over the share the server says is in use. The median.

Replicas whose estimates are close get the same figure: a difference of a few per cent is noise, and would
send all traffic of a quiet hour to one of two equal servers. A replica that nothing new was seen of, while
the others served some hundreds of requests, gets what is usual among them: a wrong estimate must not be the
reason why it is never corrected.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np

from pointsman.routing.streams import NUM_STEPS

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
ALIKE = math.log(1.25)  # estimates that differ by less are taken to be the same
NUM_SAMPLES = 64  # of each kind, the latest
MIN_SAMPLES = 8
NUM_BATCH_CLASSES = 10  # streams that decode, by powers of two
MIN_PROMPT_TOKENS = 64  # of shorter ones the first token comes as soon as any step ends
MIN_KV_USE = 0.02


def typical_step_s(figures: Mapping[str, float]) -> float:
    """By which capacities compare: 256 prompt tokens beside 64 streams, the mix of a chat."""
    return figures["step_floor_s"] + 63 * figures["decode_s_per_token"] + 256 * figures["prefill_s_per_token"]


class Estimator:
    """The latest observations of one replica."""

    def __init__(self) -> None:
        self._steps: list[deque[float]] = [deque(maxlen=NUM_SAMPLES) for _ in range(NUM_BATCH_CLASSES)]
        self._prefills: deque[float] = deque(maxlen=NUM_SAMPLES)
        self._capacities: deque[float] = deque(maxlen=NUM_SAMPLES)
        self._is_news = False
        self.latest_steps = np.zeros((2, NUM_STEPS))  # written by the books
        self._num_steps = 0  # read of those

    def read_steps(self, num_written: int) -> None:
        """Take what is new in `latest_steps`, where `num_written` were written in turn."""
        for number in range(max(self._num_steps, num_written - NUM_STEPS), num_written):
            num_decoding, step_s = self.latest_steps[:, number % NUM_STEPS].tolist()
            self.saw_step(int(num_decoding), step_s)
        self._num_steps = num_written

    def saw_step(self, num_decoding: int, step_s: float) -> None:
        batch_class = min(NUM_BATCH_CLASSES - 1, max(1, num_decoding).bit_length() - 1)
        self._steps[batch_class].append(step_s)
        self._is_news = True

    def saw_first_token(self, num_prompt: int, ttft_s: float, step_s: float) -> None:
        """Learn from a request that found nobody waiting."""
        if num_prompt >= MIN_PROMPT_TOKENS:
            self._prefills.append(max(0.0, ttft_s - step_s) / num_prompt)

    def saw_gauges(self, num_booked_tokens: float, kv_use: float) -> None:
        if kv_use >= MIN_KV_USE and num_booked_tokens > 0:
            self._capacities.append(num_booked_tokens / min(kv_use, 1.0))

    def figures(self) -> Figures:
        """The figures of which enough was seen."""
        return {name: max(LOWEST[name], value) for name, value in self._found().items()}

    def forget_if_old(self) -> None:
        """Start anew if no step was seen since this was last called."""
        if not self._is_news:
            for samples in (*self._steps, self._prefills, self._capacities):
                samples.clear()
        self._is_news = False

    def _found(self) -> Figures:
        found = self._step_figures()
        if len(self._prefills) >= MIN_SAMPLES:
            found["prefill_s_per_token"] = float(np.median(self._prefills))
        if len(self._capacities) >= MIN_SAMPLES:
            found["kv_capacity_tokens"] = float(np.median(self._capacities))
        return found

    def _step_figures(self) -> Figures:
        classes = [index for index, steps in enumerate(self._steps) if len(steps) >= MIN_SAMPLES]
        if not classes:
            return {}
        others = np.array([1.5 * 2.0**index - 1.0 if index else 0.0 for index in classes])
        step_s = np.array([np.quantile(self._steps[index], 0.25) for index in classes])
        usual = USUAL
        if len(classes) == 1:  # as usual, only faster or slower
            predicted = usual["step_floor_s"] + others[0] * usual["decode_s_per_token"]
            factor = float(step_s[0]) / predicted
            return {name: factor * usual[name] for name in ("step_floor_s", "decode_s_per_token")}
        first, second = np.triu_indices(len(classes), 1)
        slope = np.median((step_s[second] - step_s[first]) / (others[second] - others[first]))
        slope = max(LOWEST["decode_s_per_token"], float(slope))
        return {"decode_s_per_token": slope, "step_floor_s": float(np.median(step_s - slope * others))}


def pooled(estimates: Sequence[Figures]) -> list[Figures]:
    """Every figure of each replica: its own estimate where that stands out, else the one of them all."""
    common = dict(USUAL)
    for name in FIGURES:
        values = [one[name] for one in estimates if name in one]
        if values:
            common[name] = float(np.median(values))

    def stands_out(name: str, value: float) -> bool:
        return abs(math.log(value / common[name])) > ALIKE

    return [
        common | {name: value for name, value in one.items() if stands_out(name, value)} for one in estimates
    ]
