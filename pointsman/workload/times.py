"""Columns of times: which way they are written is recognised from the values, and can be said.

Dates are dates (dates.py). A number between the years 2001 and 2100 is Unix time, in seconds, milli-, micro-
or nanoseconds: these four ranges lie far apart. Other numbers count from a start of their own, in the unit
that the user, the column's name (`arrival_ms`) or the format gives, else in seconds.

One column has one way. Where nearly all of it is Unix time in one unit, a number that is not is an error: a
0, or a time in another unit, would move everything else by decades.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from pointsman.workload.dates import YEARS, looks_like_date, parse_dates
from pointsman.workload.raw import RawTable
from pointsman.workload.spec import TimeUnit

FIX_ROW = "correct or remove the row"
_FIX_TIME = f"{FIX_ROW}, or write all times as numbers, or as 2023-11-16 18:15:46"
_FIX_UNIT = "correct the row, or say in which unit times are: time_unit: ms (or us, ns)"
_NO_COMMAS = "write it without a separator of thousands, and fractions with a point"
UNITS_PER_S: dict[TimeUnit, float] = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}
_UNIT_NAMES: dict[TimeUnit, str] = {
    "s": "seconds",
    "ms": "milliseconds",
    "us": "microseconds",
    "ns": "nanoseconds",
}
_EPOCH_S = (978_307_200.0, 4_102_444_800.0)  # 2001 to 2100
_FEW = 1000  # rows: one of them tells a date
_MOSTLY = 0.8  # of a column: the rest is wrong
_LATEST_S = 253_402_300_800.0  # the year 10,000


@dataclass(frozen=True)
class Times:
    """`ticks` [N] since 1970 (`is_epoch`), or since a start that only the file knows."""

    ticks: NDArray[Any]
    ticks_per_s: float
    is_epoch: bool
    what: str

    def seconds(self, origin: float = 0.0) -> NDArray[np.float64]:
        """[N] since `origin`, in ticks. Division is exact where polars, with its reciprocal, is not."""
        return np.asarray((self.ticks - origin) / self.ticks_per_s, np.float64)

    @property
    def unit(self) -> TimeUnit:
        """The `time_unit` that says what was recognised; dates, which have none, take any."""
        if self.what.startswith("dates"):
            return "s"
        return next(unit for unit, per_s in UNITS_PER_S.items() if per_s == self.ticks_per_s)

    def first_date(self) -> str | None:
        if not self.is_epoch:
            return None
        first = datetime.fromtimestamp(float(self.ticks.min()) / self.ticks_per_s, UTC)
        return first.strftime("%Y-%m-%d %H:%M:%S")


def read_times(
    table: RawTable, column: str, unit: TimeUnit | None = None, usual_unit: TimeUnit = "s"
) -> Times:
    """`unit` is what the user says; `usual_unit` holds for numbers that are no Unix time."""
    if _is_calendar(table, column):
        since_1970_ns, how = _calendar_ns(table, column)
        return Times(since_1970_ns, UNITS_PER_S["ns"], True, how)
    numbers = read_numbers(table, column, _FIX_TIME)
    ticks = numbers.to_numpy()
    epoch_unit = _epoch_unit(ticks, unit)
    if epoch_unit:
        is_other = ~_is_unix_time(ticks, epoch_unit)
        name = f"not Unix time in {_UNIT_NAMES[epoch_unit]} between 2001 and 2100, as the others are"
        table.reject(column, pl.Series(is_other), name, FIX_ROW)
    found = epoch_unit or unit or usual_unit
    per_s = UNITS_PER_S[found]
    table.reject(
        column, numbers > _LATEST_S * per_s, f"in {_UNIT_NAMES[found]} later than any year", _FIX_UNIT
    )
    what = f"Unix time in {_UNIT_NAMES[found]}" if epoch_unit else _UNIT_NAMES[found]
    return Times(ticks, per_s, epoch_unit is not None, what)


def read_numbers(table: RawTable, column: str, remedy: str = FIX_ROW) -> pl.Series:
    """`remedy`: what to do about values that are no numbers at all."""
    values = table.frame[column]
    if values.dtype == pl.String:
        values = values.str.strip_chars()
        if table.has_decimal_commas:
            values = values.str.replace(r"^([+-]?\d+),(\d+)$", "$1.$2")
    is_number = values.dtype == pl.String or values.dtype.is_numeric()
    numbers = values.cast(pl.Float64, strict=False) if is_number else pl.repeat(None, len(values), eager=True)
    if numbers.has_nulls():
        table.reject(column, table.values(column).is_null(), "no value", FIX_ROW)
        if values.dtype == pl.String:
            has_comma = numbers.is_null() & values.str.contains(r"^[+-]?\d[\d.]*,[\d.,]*$")
            table.reject(column, has_comma, "not a number", _NO_COMMAS)
        table.reject(column, numbers.is_null(), "not a number", remedy if is_number else FIX_ROW)
    table.reject(column, ~numbers.is_finite(), "not a finite number", FIX_ROW)
    return numbers


def _is_unix_time(ticks: NDArray[np.float64], unit: TimeUnit) -> NDArray[np.bool_]:
    seconds = ticks / UNITS_PER_S[unit]
    return np.asarray((_EPOCH_S[0] <= seconds) & (seconds < _EPOCH_S[1]))


def _epoch_unit(ticks: NDArray[np.float64], given: TimeUnit | None) -> TimeUnit | None:
    units: list[TimeUnit] = [given] if given else list(UNITS_PER_S)
    return next((unit for unit in units if _is_unix_time(ticks, unit).mean() >= _MOSTLY), None)


def _is_calendar(table: RawTable, column: str) -> bool:
    values = table.head(_FEW).values(column)
    if values.dtype == pl.String:
        first = values.drop_nulls().head(1)
        return len(first) > 0 and looks_like_date(first[0])
    return isinstance(values.dtype, pl.Datetime | pl.Date)


def _calendar_ns(table: RawTable, column: str) -> tuple[NDArray[np.int64], str]:
    """Nanoseconds since 1970, times without a zone as UTC; and in words how they were read."""
    values = table.values(column)
    table.reject(column, values.is_null(), "no value", FIX_ROW)
    if values.dtype == pl.String:
        stamps, how = parse_dates(values)
    else:
        stamps, how = values.cast(pl.Datetime("ns"), strict=False), "dates"
    problem = f"not a date and time between {YEARS[0]} and {YEARS[1]}"
    table.reject(column, stamps.is_null(), problem, "write it as 2023-11-16 18:15:46.6805900")
    return np.asarray(stamps.to_physical().to_numpy()), how
