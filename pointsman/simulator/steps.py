"""Execution times measured step by step on a real server, and the power limit of its device.

What `linear` cannot say: the time by tokens is a curve (weights are read once, arithmetic grows, CUDA graphs
end at some size), a step that starts on an idle engine is prepared while nothing runs, and clocks fall when
the device reaches its power limit.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from pointsman.errors import InputError
from pointsman.spec import Spec

Floats = NDArray[np.float64]
Curve = tuple[tuple[int, float], ...]


class PowerLimit(Spec):
    """Steps take longer when the power averaged over `window_s` would exceed `limit_w`."""

    limit_w: float = Field(gt=0, description="power limit of the device, watts")
    idle_w: float = Field(ge=0, description="drawn by an idle device, watts")
    window_s: float = Field(gt=0, description="the limit holds on average over about this long, seconds")
    exponent: float = Field(gt=0, description="power beyond idle grows with this power of the clock")
    step_j: float = Field(ge=0, description="energy a step, for reading the weights, joules")
    compute_w: float = Field(ge=0, description="power of arithmetic at full clocks, beyond idle, watts")
    context_j: float = Field(ge=0, description="energy a context token of a decoding sequence, joules")
    compute_s_per_token: float = Field(gt=0, description="arithmetic a token at full clocks, seconds")
    memory_share: float = Field(ge=0, le=1, description="share of the memory time that scales with the clock")

    @model_validator(mode="after")
    def _limit_above_idle(self) -> PowerLimit:
        if self.limit_w <= self.idle_w:
            problem = f"is not above idle_w ({self.idle_w:g})"
            raise InputError("cluster.cost.power.limit_w", self.limit_w, problem, "raise it")
        return self


class StepsCost(Spec):
    """Step times measured on a server: a curve by tokens, what sequences and contexts add, a power limit."""

    kind: Literal["steps"]
    step_s: Curve = Field(
        min_length=1, description="[tokens in the step, seconds at full clocks], linear in between"
    )
    start_s: Curve = Field(
        default=((1, 0.0),),
        min_length=1,
        description="[tokens, seconds] that a step takes longer if no other ran before it",
    )
    sequence_s: float = Field(default=0.0, ge=0, description="seconds a sequence in the step")
    context_s: float = Field(default=0.0, ge=0, description="seconds a context token of a decoding sequence")
    pair_s: float = Field(default=0.0, ge=0, description="seconds a pair of tokens in prefill attention")
    power: PowerLimit | None = Field(default=None, description="absent = clocks never fall")

    @model_validator(mode="after")
    def _curves_rise_in_tokens(self) -> StepsCost:
        for name in ("step_s", "start_s"):
            curve: Curve = getattr(self, name)
            tokens = [point[0] for point in curve]
            if tokens[0] < 1 or any(second <= first for first, second in pairwise(tokens)):
                remedy = "list each number of tokens once, in order, from 1 on"
                raise InputError(f"cluster.cost.{name}", tokens, "numbers of tokens do not rise", remedy)
            if any(seconds < 0 for _, seconds in curve):
                raise InputError(f"cluster.cost.{name}", curve, "holds a negative time", "correct it")
        return self


def curve_table(curve: Curve) -> Floats:
    """[last tokens + 1] by tokens; the first point holds below it. Read beyond its end by extrapolation.

    A curve that falls at its end gets one entry more, from which it goes on level: continued, it would become
    negative.
    """
    tokens, seconds = zip(*curve, strict=True)
    table: Floats = np.interp(np.arange(tokens[-1] + 1), tokens, seconds)
    return np.append(table, table[-1]) if table[-1] < table[-2] else table
