"""A number that changes over a run: learning rate, temperature, weights of losses.

Written short as a number (constant), or as `{kind: linear, start: 1.5, end: 1.0, until: 0.5}`. Time is the
fraction of the run that is done, whether the run is limited in minutes or in steps.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from pointsman.spec import Spec


class Schedule(Spec):
    kind: Literal["constant", "linear", "exponential", "cosine", "piecewise"] = "linear"
    start: float | None = Field(default=None, description="value at first")
    end: float | None = Field(default=None, description="value from `until` on; not for constant")
    until: float = Field(default=1.0, gt=0, le=1, description="fraction of the run at which `end` is reached")
    points: tuple[tuple[float, float], ...] | None = Field(
        default=None, description="piecewise: (fraction of the run, value), straight lines between"
    )

    @model_validator(mode="before")
    @classmethod
    def _short(cls, value: Any) -> Any:
        if isinstance(value, (Mapping, Schedule)):
            return value
        try:  # YAML reads 3e-4 as text
            return {"kind": "constant", "start": float(value)}
        except (TypeError, ValueError):
            raise ValueError("is neither a number nor a mapping with kind, start, end") from None

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.kind == "piecewise":
            fractions = [fraction for fraction, _ in self.points or ()]
            if not fractions or any(a >= b for a, b in itertools.pairwise(fractions)):
                raise ValueError("piecewise needs points, their fractions growing")
            if self.start is not None or self.end is not None:
                raise ValueError("piecewise takes points, not start and end")
            return self
        if self.points is not None:
            raise ValueError(f"points are for piecewise, not for {self.kind}")
        if self.start is None or (self.end is None) != (self.kind == "constant"):
            needs = "start and no end" if self.kind == "constant" else "start and end"
            raise ValueError(f"{self.kind} needs {needs}")
        if self.kind == "exponential" and not (self.start > 0 and self.end is not None and self.end > 0):
            raise ValueError("exponential needs start and end above 0")
        return self

    def value(self, fraction_done: float) -> float:
        """The value when this fraction of the run is done; beyond 0..1 it stays at the ends."""
        if self.points is not None:
            fractions, values = zip(*self.points, strict=True)
            return float(np.interp(fraction_done, fractions, values))
        assert self.start is not None
        if self.end is None:
            return self.start
        x = min(max(fraction_done / self.until, 0.0), 1.0)
        if self.kind == "exponential":
            return self.start * math.pow(self.end / self.start, x)
        if self.kind == "cosine":
            return self.end + (self.start - self.end) * 0.5 * (1.0 + math.cos(math.pi * x))
        return self.start + (self.end - self.start) * x

    @property
    def lowest(self) -> float:
        """The smallest value it takes; every kind is monotonic between its points."""
        if self.points is not None:
            return min(value for _, value in self.points)
        return min(value for value in (self.start, self.end) if value is not None)

    @property
    def highest(self) -> float:
        if self.points is not None:
            return max(value for _, value in self.points)
        return max(value for value in (self.start, self.end) if value is not None)


def constant(value: float) -> Schedule:
    return Schedule(kind="constant", start=value)


def linear(start: float, end: float, until: float = 1.0) -> Schedule:
    return Schedule(kind="linear", start=start, end=end, until=until)


def check_range(name: str, schedule: Schedule, lowest: float, highest: float = math.inf) -> None:
    """Refuse a schedule that leaves [lowest, highest] at any time."""
    if schedule.lowest < lowest or schedule.highest > highest:
        bounds = f"at least {lowest:g}" if highest == math.inf else f"within {lowest:g} and {highest:g}"
        raise ValueError(f"{name} must stay {bounds}")
