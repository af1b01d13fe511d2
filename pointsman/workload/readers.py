"""Trace files in the formats people publish, read into a `Workload`.

| format   | time                  | prompt             | output            | times start       |
|----------|-----------------------|--------------------|-------------------|-------------------|
| azure    | TIMESTAMP, calendar   | ContextTokens      | GeneratedTokens   | at 0              |
| vidur    | arrived_at, s         | num_prefill_tokens | num_decode_tokens | as given          |
| mooncake | timestamp, ms         | input_length       | output_length     | as given          |
| burstgpt | Timestamp, s          | Request tokens     | Response tokens   | at 0              |
| generic  | `columns`, any unit   | `columns`          | `columns`         | as given, calendar at 0 |

Times are parsed exactly: the shortest decimal of a double gives that double. A length of 0 is an error: Azure
2023 has no prompt below 2 and no output below 6 tokens, Mooncake none below 891 and 1. Two exceptions:
BurstGPT records failed requests with 0, which are left out with a warning; and Vidur's clipping
(`max_tokens`) lifts 0 to 1.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from pointsman.errors import InputError, PointsmanWarning
from pointsman.workload.files import RawTable, TraceSource, open_source
from pointsman.workload.replay import take
from pointsman.workload.spec import TimeUnit, TraceColumns, TraceFile
from pointsman.workload.workload import NO_SESSION, Workload

_UNITS_PER_S: dict[TimeUnit, float] = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}
_SESSION_COLUMNS = ("session_id", "session", "Session ID")
_MAX_TOKENS = np.iinfo(np.int32).max
FIX_ROW = "correct or remove the row"
_FIX_LENGTH = "correct or remove the row, or set workload.max_tokens to lift 0 to 1 as Vidur does"
_MAP_COLUMNS = "map the columns with columns: {arrived_at: …, num_prefill_tokens: …, num_decode_tokens: …}"


@dataclass(frozen=True)
class _Format:
    name: str
    columns: TraceColumns
    time_unit: TimeUnit = "s"
    start_at_zero: bool = False
    zero_is_failure: bool = False


def _columns(arrived_at: str, num_prefill_tokens: str, num_decode_tokens: str) -> TraceColumns:
    return TraceColumns(
        arrived_at=arrived_at, num_prefill_tokens=num_prefill_tokens, num_decode_tokens=num_decode_tokens
    )


_FORMATS = (
    _Format("azure", _columns("TIMESTAMP", "ContextTokens", "GeneratedTokens")),
    _Format("vidur", _columns("arrived_at", "num_prefill_tokens", "num_decode_tokens")),
    _Format("mooncake", _columns("timestamp", "input_length", "output_length"), time_unit="ms"),
    _Format(
        "burstgpt",
        _columns("Timestamp", "Request tokens", "Response tokens"),
        start_at_zero=True,
        zero_is_failure=True,
    ),
)


def read_trace(
    file: TraceFile, base_dir: Path | None = None, *, needs_times: bool = True, lifts_zeros: bool = False
) -> Workload:
    """The requests of a file, sorted by arrival (stable). Relative paths start at `base_dir`.

    `needs_times=False` reads a file of lengths alone; `lifts_zeros` keeps lengths of 0, to be clipped later.
    """
    source = open_source((base_dir or Path()) / Path(file.path).expanduser())
    form = _choose_format(source, file, needs_times)
    session_column = _session_column(source, form)
    lengths = [form.columns.num_prefill_tokens, form.columns.num_decode_tokens]
    times = [form.columns.arrived_at] if needs_times else []
    table = source.load([*times, *lengths, *([session_column] if session_column else [])])

    min_tokens = 0 if lifts_zeros or form.zero_is_failure else 1
    num_rows = len(table.frame)
    trace = Workload(
        arrived_at=_seconds(table, form) if needs_times else np.zeros(num_rows),
        num_prefill_tokens=_token_counts(table, lengths[0], min_tokens),
        num_decode_tokens=_token_counts(table, lengths[1], min_tokens),
        session=_sessions(table, session_column),
        request_id=np.arange(num_rows),
    )
    if form.zero_is_failure:
        trace = _without_failures(trace, source.path)
    return _sorted(trace, form.start_at_zero)


def _choose_format(source: TraceSource, file: TraceFile, needs_times: bool) -> _Format:
    if file.format == "generic" or file.columns is not None:
        form = _Format("generic", file.columns or TraceColumns())
    elif file.format != "auto":
        form = next(form for form in _FORMATS if form.name == file.format)
    else:
        form = min(_FORMATS, key=lambda form: len(_missing(source, form, needs_times)))
    missing = _missing(source, form, needs_times)
    if len(missing) > 1 and file.format == "auto" and file.columns is None:
        problem = f"columns {', '.join(source.columns)} are of no known format"
        raise InputError("trace file", str(source.path), problem, _MAP_COLUMNS)
    if missing:
        problem = f"column {missing[0]!r} of format {form.name} is missing from {', '.join(source.columns)}"
        raise InputError("trace file", str(source.path), problem, f"add it, or {_MAP_COLUMNS}")
    return replace(
        form,
        time_unit=file.time_unit or form.time_unit,
        start_at_zero=form.start_at_zero if file.start_at_zero is None else file.start_at_zero,
    )


def _missing(source: TraceSource, form: _Format, needs_times: bool) -> list[str]:
    columns = form.columns
    wanted = [columns.num_prefill_tokens, columns.num_decode_tokens, columns.session]
    wanted += [columns.arrived_at] if needs_times else []
    return [column for column in wanted if column is not None and column not in source.columns]


def _session_column(source: TraceSource, form: _Format) -> str | None:
    names = (form.columns.session,) if form.columns.session else _SESSION_COLUMNS
    return next((name for name in names if name in source.columns), None)


def _seconds(table: RawTable, form: _Format) -> NDArray[np.float64]:
    column = form.columns.arrived_at
    values = table.frame[column]
    if is_calendar(values):
        return _calendar_seconds(table, column)
    numbers = read_numbers(table, column)
    table.reject(column, numbers < 0, "a negative time", FIX_ROW)
    # Polars multiplies by the reciprocal, which is not exact.
    return numbers.to_numpy() / _UNITS_PER_S[form.time_unit]


def is_calendar(values: pl.Series) -> bool:
    if values.dtype == pl.String:
        first = values.drop_nulls().head(1).str.strip_chars()
        return first.str.contains(r"^\d{4}-\d\d-\d\d[ T]").any()
    return isinstance(values.dtype, pl.Datetime | pl.Date)


def _calendar_seconds(table: RawTable, column: str) -> NDArray[np.float64]:
    """Seconds since the first of the calendar times, exact to the nanosecond."""
    nanoseconds = read_calendar_ns(table, column)
    return np.asarray((nanoseconds - nanoseconds.min()) / _UNITS_PER_S["ns"])


def read_calendar_ns(table: RawTable, column: str) -> NDArray[np.int64]:
    """Nanoseconds since 1970."""
    values = table.frame[column]
    if values.dtype == pl.String:
        text = values.str.strip_chars().str.replace("T", " ").str.replace("Z$", "+00:00")
        local = text.str.to_datetime("%Y-%m-%d %H:%M:%S%.f", time_unit="ns", strict=False)
        zoned = text.str.to_datetime("%Y-%m-%d %H:%M:%S%.f%z", time_unit="ns", strict=False)
        stamps = local.fill_null(zoned.dt.replace_time_zone(None))
    else:
        stamps = values.cast(pl.Datetime("ns"), strict=False)
    table.reject(column, stamps.is_null(), "not a date and time", "write it as 2023-11-16 18:15:46.6805900")
    return np.asarray(stamps.to_physical().to_numpy())


def read_numbers(table: RawTable, column: str) -> pl.Series:
    values = table.frame[column]
    is_missing = values.is_null()
    if values.dtype == pl.String:
        values = values.str.strip_chars()
        is_missing |= values == ""
    table.reject(column, is_missing.fill_null(True), "no value", FIX_ROW)
    if values.dtype != pl.String and not values.dtype.is_numeric():
        table.reject(column, values.is_not_null(), "not a number", FIX_ROW)
    numbers = values.cast(pl.Float64, strict=False)
    table.reject(column, numbers.is_null(), "not a number", FIX_ROW)
    table.reject(column, ~numbers.is_finite(), "not a finite number", FIX_ROW)
    return numbers


def _token_counts(table: RawTable, column: str, min_tokens: int) -> NDArray[np.int32]:
    numbers = read_numbers(table, column)
    table.reject(column, numbers < min_tokens, f"fewer than {min_tokens} tokens", _FIX_LENGTH)
    table.reject(column, numbers > _MAX_TOKENS, "more tokens than any model takes", FIX_ROW)
    table.reject(column, numbers != numbers.floor(), "not a whole number of tokens", FIX_ROW)
    return numbers.to_numpy().astype(np.int32)


def _sessions(table: RawTable, column: str | None) -> NDArray[np.int32]:
    if column is None:
        return np.full(len(table.frame), NO_SESSION, dtype=np.int32)
    names = table.frame[column]
    if names.dtype == pl.String:
        names = names.replace("", None)
    dense = names.rank("dense").cast(pl.Int64) - 1
    return dense.fill_null(NO_SESSION).to_numpy().astype(np.int32)


def _without_failures(trace: Workload, path: Path) -> Workload:
    is_served = (trace.num_prefill_tokens > 0) & (trace.num_decode_tokens > 0)
    num_failures = len(trace) - int(is_served.sum())
    if num_failures == 0:
        return trace
    if num_failures == len(trace):
        raise InputError("trace file", str(path), "every request failed (0 tokens)", "give another file")
    text = f"{path}: {num_failures} of {len(trace)} requests failed (0 tokens) and are left out"
    warnings.warn(PointsmanWarning(text), stacklevel=2)
    return take(trace, np.flatnonzero(is_served))


def _sorted(trace: Workload, start_at_zero: bool) -> Workload:
    if np.any(trace.arrived_at[1:] < trace.arrived_at[:-1]):
        trace = take(trace, np.argsort(trace.arrived_at, kind="stable"))
    if start_at_zero:
        trace = replace(trace, arrived_at=trace.arrived_at - trace.arrived_at[0])
    return trace
