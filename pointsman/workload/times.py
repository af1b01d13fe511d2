"""Columns of times: which way they are written is recognised from the values, and can be said.

Dates are dates. A number between the years 2001 and 2100 is Unix time, in seconds, milli-, micro- or
nanoseconds: these four ranges lie far apart. Other numbers count from a start of their own, in the unit that
the user, the column's name (`arrival_ms`) or the format gives, else in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from pointsman.workload.files import RawTable
from pointsman.workload.spec import TimeUnit

FIX_ROW = "correct or remove the row"
_FIX_TIME = f"{FIX_ROW}, or write all times as numbers, or as 2023-11-16 18:15:46"
_NO_COMMAS = "write it without a separator of thousands, and fractions with a point"
UNITS_PER_S: dict[TimeUnit, float] = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}
_UNIT_NAMES: dict[TimeUnit, str] = {
    "s": "seconds",
    "ms": "milliseconds",
    "us": "microseconds",
    "ns": "nanoseconds",
}
_EPOCH_S = (978_307_200.0, 4_102_444_800.0)  # 2001 to 2100
_DATE = r"^\d{4}[-/]\d\d[-/]\d\d([ T]|$)"
_DATE_FORMATS = ("%Y-%m-%d %H:%M:%S%.f", "%Y-%m-%d %H:%M:%S%.f%z", "%Y-%m-%d %H:%M", "%Y-%m-%d %H:%M%z")


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

    def first_date(self) -> str | None:
        if not self.is_epoch:
            return None
        first = datetime.fromtimestamp(float(self.ticks.min()) / self.ticks_per_s, UTC)
        return first.strftime("%Y-%m-%d %H:%M:%S")


def read_times(
    table: RawTable, column: str, unit: TimeUnit | None = None, usual_unit: TimeUnit = "s"
) -> Times:
    """`unit` is what the user says; `usual_unit` holds for numbers that are no Unix time."""
    if _is_calendar(table.frame[column]):
        return Times(_calendar_ns(table, column), UNITS_PER_S["ns"], True, "dates")
    ticks = read_numbers(table, column, _FIX_TIME).to_numpy()
    epoch_unit = _epoch_unit(float(ticks.min()), unit)
    found = epoch_unit or unit or usual_unit
    what = f"Unix time in {_UNIT_NAMES[found]}" if epoch_unit else _UNIT_NAMES[found]
    return Times(ticks, UNITS_PER_S[found], epoch_unit is not None, what)


def read_numbers(table: RawTable, column: str, remedy: str = FIX_ROW) -> pl.Series:
    """`remedy`: what to do about values that are no numbers at all."""
    values = table.frame[column]
    is_missing = values.is_null()
    if values.dtype == pl.String:
        values = values.str.strip_chars()
        is_missing |= values == ""
        if table.has_decimal_commas:
            values = values.str.replace(r"^([+-]?\d+),(\d+)$", "$1.$2")
    table.reject(column, is_missing.fill_null(True), "no value", FIX_ROW)
    if values.dtype != pl.String and not values.dtype.is_numeric():
        table.reject(column, values.is_not_null(), "not a number", FIX_ROW)
    numbers = values.cast(pl.Float64, strict=False)
    if values.dtype == pl.String:
        has_comma = numbers.is_null() & values.str.contains(r"^[+-]?\d[\d.]*,[\d.,]*$")
        table.reject(column, has_comma, "not a number", _NO_COMMAS)
    table.reject(column, numbers.is_null(), "not a number", remedy)
    table.reject(column, ~numbers.is_finite(), "not a finite number", FIX_ROW)
    return numbers


def _epoch_unit(earliest: float, given: TimeUnit | None) -> TimeUnit | None:
    for unit, per_s in UNITS_PER_S.items():
        if unit == (given or unit) and _EPOCH_S[0] <= earliest / per_s < _EPOCH_S[1]:
            return unit
    return None


def _is_calendar(values: pl.Series) -> bool:
    if values.dtype == pl.String:
        return values.drop_nulls().head(1).str.strip_chars().str.contains(_DATE).any()
    return isinstance(values.dtype, pl.Datetime | pl.Date)


def _calendar_ns(table: RawTable, column: str) -> NDArray[np.int64]:
    """Nanoseconds since 1970; times without a zone count as UTC."""
    values = table.frame[column]
    if values.dtype == pl.String:
        stamps = _parsed_dates(values)
    else:
        stamps = values.cast(pl.Datetime("ns"), strict=False)
    table.reject(column, stamps.is_null(), "not a date and time", "write it as 2023-11-16 18:15:46.6805900")
    return np.asarray(stamps.to_physical().to_numpy())


def _parsed_dates(values: pl.Series) -> pl.Series:
    text = values.str.strip_chars().str.replace_all("/", "-").str.replace(r"(\d)T", "$1 ")
    text = text.str.replace(r"^(\d{4}-\d\d-\d\d)$", "$1 00:00:00").str.replace(r"(\d),(\d+)", "$1.$2")
    text = text.str.replace(r" ?(Z|UTC|GMT)$", "+00:00").str.replace(r" ([+-]\d\d:?\d\d)$", "$1")
    stamps = pl.Series(values.name, [None] * len(values), dtype=pl.Datetime("ns"))
    for form in _DATE_FORMATS:
        if not stamps.has_nulls():
            break
        parsed = text.str.to_datetime(form, time_unit="ns", strict=False)
        stamps = stamps.fill_null(parsed.dt.replace_time_zone(None))
    return stamps
