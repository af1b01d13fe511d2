"""Figures as data: what is drawn, on which axes. svg.py draws them, the same for pages, papers and print."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = Sequence[float] | NDArray[np.float64]

MAX_TICKS = 6
_ROUND = (1.0, 2.0, 2.5, 5.0, 10.0)


@dataclass(frozen=True)
class Axis:
    """From `low` to `high`; `low` may be the larger one, then it runs the other way."""

    title: str  # with the unit
    low: float
    high: float
    ticks: Sequence[tuple[float, str]]
    is_log: bool = False
    unit: str = ""  # of values read from the figure

    def share(self, value: float) -> float:
        """How far from low to high."""
        low, high, value = (self._linear(part) for part in (self.low, self.high, value))
        return (value - low) / (high - low)

    def _linear(self, value: float) -> float:
        return math.log10(max(value, 1e-300)) if self.is_log else value


@dataclass(frozen=True)
class Line:
    name: str
    x: Floats
    y: Floats  # NaN: a gap is bridged
    colour: str
    dash: str = ""
    width: float = 1.8
    has_dots: bool = False


@dataclass(frozen=True)
class Dots:
    """Points that say in words what they are."""

    name: str
    x: Floats
    y: Floats
    texts: Sequence[str]
    colour: str
    size: float = 3.0


@dataclass(frozen=True)
class Band:
    """What lies between two lines."""

    name: str
    x: Floats
    low: Floats
    high: Floats
    colour: str
    opacity: float = 0.75


@dataclass(frozen=True)
class Bar:
    """In a row of the y axis, from `start` to `end`, perhaps with an interval around its end."""

    row: float
    start: float
    end: float
    colour: str
    text: str  # what it says, in words
    interval: tuple[float, float] | None = None
    label: str = ""  # at its end: of a bar that is cut off by the axis, how long it is


@dataclass(frozen=True)
class Ladder:
    """Values on a line in a row of the y axis, such as percentiles."""

    name: str
    row: float
    values: Floats
    texts: Sequence[str]
    colour: str


@dataclass(frozen=True)
class Cell:
    """A rectangle of a map; `strength` from 0 to 1."""

    x: tuple[float, float]
    row: float
    strength: float
    text: str


@dataclass(frozen=True)
class Map:
    """Cells, with what the strongest and the weakest colour stand for."""

    cells: Sequence[Cell]
    colour: str
    weakest: str
    strongest: str


@dataclass(frozen=True)
class Level:
    """A horizontal line with its name in the right margin."""

    y: float
    name: str


@dataclass(frozen=True)
class Flags:
    """Moments on the x axis, as marks on the upper edge."""

    name: str
    x: Floats
    texts: Sequence[str]
    colour: str


Mark = Line | Dots | Band | Bar | Ladder | Map | Level | Flags


@dataclass(frozen=True)
class Figure:
    title: str
    x: Axis
    y: Axis
    marks: Sequence[Mark]
    height: int = 210  # of what lies between the axes
    note: str = field(default="")


def linear_axis(
    title: str, values: Floats, unit: str = "", low: float | None = None, high: float | None = None
) -> Axis:
    """Holds all finite values, and ends at `low` and `high` where they are given."""
    known = [value for value in values if math.isfinite(value)]
    bottom = low if low is not None else min(known, default=0.0)
    top = high if high is not None else max(known, default=1.0)
    if bottom >= top:
        room = 0.5 * abs(top) or 0.5
        bottom, top = (bottom if low is not None else top - room), top + room
    margin = 0.04 * (top - bottom)
    bottom, top = bottom - margin * (low is None), top + margin * (high is None)
    return Axis(title, bottom, top, linear_ticks(bottom, top), unit=unit)


def log_axis(title: str, values: Floats, unit: str = "") -> Axis:
    """Holds all positive values."""
    known = [value for value in values if math.isfinite(value) and value > 0]
    low, high = min(known, default=0.1), max(known, default=10.0)
    margin = max(0.03 * math.log10(high / low), 0.02)
    low, high = low / 10**margin, high * 10**margin
    return Axis(title, low, high, log_ticks(low, high), is_log=True, unit=unit)


def row_axis(names: Sequence[str]) -> Axis:
    """A row for each name, from above."""
    return Axis("", len(names) - 0.5, -0.5, [(row, name) for row, name in enumerate(names)])


def linear_ticks(low: float, high: float) -> list[tuple[float, str]]:
    """Three to seven round values."""
    power = 10.0 ** math.floor(math.log10((high - low) / MAX_TICKS))
    step = next(power * part for part in _ROUND if power * part * MAX_TICKS >= high - low)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    decimals += round(step * 10**decimals, 6) != round(step * 10**decimals)  # steps of 2.5
    return [(index * step, plain(index * step, decimals)) for index in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[tuple[float, str]]:
    """Decades, or 1, 2, 5 of each; round values where even those are too few."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for parts in ((1.0,), (1.0, 3.0), (1.0, 2.0, 5.0)):
        found = [part * 10.0**decade for decade in range(first, last + 1) for part in parts]
        found = [value for value in found if low <= value <= high]
        if len(found) >= 3:
            step = -(-len(found) // (MAX_TICKS + 1))
            return [(value, short(value)) for value in found[::step]]
    return linear_ticks(low, high)


def plain(value: float, decimals: int) -> str:
    text = f"{value:,.{decimals}f}"
    return (text.removeprefix("-") if float(text.replace(",", "")) == 0 else text).replace("-", "−")


def short(value: float) -> str:
    """Three digits, whatever the size."""
    if not math.isfinite(value):
        return "–"
    if value != 0 and not 1e-3 <= abs(value) < 1e5:
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{mantissa.removesuffix('.0')}e{int(exponent)}".replace("-", "−")
    return f"{float(f'{value:.3g}'):,g}".replace("-", "−")
