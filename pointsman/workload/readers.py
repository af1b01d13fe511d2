"""Trace files in the formats people publish and log, read into a `Workload`.

| format   | time                | prompt             | output            |
|----------|---------------------|--------------------|-------------------|
| azure    | TIMESTAMP, dates    | ContextTokens      | GeneratedTokens   |
| vidur    | arrived_at, s       | num_prefill_tokens | num_decode_tokens |
| mooncake | timestamp, ms       | input_length       | output_length     |
| burstgpt | Timestamp, s        | Request tokens     | Response tokens   |
| generic  | by name (columns.py) or `columns`; times as times.py recognises them |

Times start at 0 unless `start_at_zero` is false, and rows are sorted by them; how a file was understood is
said (reading.py). Times are parsed exactly: the shortest decimal of a double gives that double.

A length of 0 is an error in formats that have none: Azure 2023 has no prompt below 2 and no output below 6
tokens, Mooncake none below 891 and 1. BurstGPT and logs record failed requests with 0: these are left out,
with a warning. Vidur's clipping (`max_tokens`) lifts 0 to 1.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from pointsman.errors import InputError, PointsmanWarning
from pointsman.workload.columns import REQUEST_NAMES, choose_columns, unit_of
from pointsman.workload.files import RawTable, TraceSource, open_source
from pointsman.workload.reading import TraceReading
from pointsman.workload.replay import take
from pointsman.workload.spec import TimeUnit, TraceColumns, TraceFile
from pointsman.workload.times import FIX_ROW, Times, read_numbers, read_times
from pointsman.workload.workload import NO_SESSION, Workload

_MAX_TOKENS = np.iinfo(np.int32).max
_FIX_LENGTH = "correct or remove the row, or set workload.max_tokens to lift 0 to 1 as Vidur does"
_TIMES = {"arrived_at": "arrival times"}
_LENGTHS = {"num_prefill_tokens": "prompt lengths", "num_decode_tokens": "output lengths"}


@dataclass(frozen=True)
class _Format:
    name: str
    columns: TraceColumns
    time_unit: TimeUnit = "s"
    zero_is_failure: bool = False


def _columns(arrived_at: str, num_prefill_tokens: str, num_decode_tokens: str) -> TraceColumns:
    return TraceColumns(
        arrived_at=arrived_at, num_prefill_tokens=num_prefill_tokens, num_decode_tokens=num_decode_tokens
    )


_FORMATS = (
    _Format("azure", _columns("TIMESTAMP", "ContextTokens", "GeneratedTokens")),
    _Format("vidur", _columns("arrived_at", "num_prefill_tokens", "num_decode_tokens")),
    _Format("mooncake", _columns("timestamp", "input_length", "output_length"), time_unit="ms"),
    _Format("burstgpt", _columns("Timestamp", "Request tokens", "Response tokens"), zero_is_failure=True),
)


def read_trace(
    file: TraceFile, base_dir: Path | None = None, *, needs_times: bool = True, lifts_zeros: bool = False
) -> Workload:
    """The requests of a file, sorted by arrival (stable). Relative paths start at `base_dir`.

    `needs_times=False` reads a file of lengths alone; `lifts_zeros` keeps lengths of 0, to be clipped later.
    """
    source = open_source((base_dir or Path()) / Path(file.path).expanduser())
    form = _choose_format(source, file, needs_times)
    required = (_TIMES if needs_times else {}) | _LENGTHS
    names = {field: REQUEST_NAMES[field] for field in [*required, "session"]}
    columns = choose_columns(source, form.columns.model_dump(), names, required)
    table = source.load(list(dict.fromkeys(columns.values())))

    min_tokens = 0 if lifts_zeros or form.zero_is_failure else 1
    num_rows = len(table.frame)
    times = _times(table, columns["arrived_at"], file, form) if needs_times else None
    trace = Workload(
        arrived_at=_seconds(times, file.start_at_zero) if times else np.zeros(num_rows),
        num_prefill_tokens=_token_counts(table, columns["num_prefill_tokens"], min_tokens),
        num_decode_tokens=_token_counts(table, columns["num_decode_tokens"], min_tokens),
        session=_sessions(table, columns.get("session")),
        request_id=np.arange(num_rows),
    )
    if form.zero_is_failure:
        trace = _without_failures(trace, source.path)
    return _in_order(trace, file, columns, times) if times else trace


def _choose_format(source: TraceSource, file: TraceFile, needs_times: bool) -> _Format:
    fields = [*_LENGTHS, *(_TIMES if needs_times else {})]
    if file.columns is None:
        for form in _FORMATS:
            named = form.columns.model_dump()
            is_there = all(named[field] in source.columns for field in fields)
            if form.name == file.format or (is_there and file.format == "auto"):
                return form
    return _Format("generic", file.columns or TraceColumns(), zero_is_failure=file.columns is None)


def _times(table: RawTable, column: str, file: TraceFile, form: _Format) -> Times:
    times = read_times(table, column, file.time_unit, unit_of(column) or form.time_unit)
    table.reject(column, pl.Series(times.ticks < 0), "a negative time", FIX_ROW)
    return times


def _seconds(times: Times, start_at_zero: bool) -> NDArray[np.float64]:
    """Dates have no 0 of their own."""
    return times.seconds(times.ticks.min() if start_at_zero or times.what == "dates" else 0)


def _in_order(trace: Workload, file: TraceFile, columns: dict[str, str], times: Times) -> Workload:
    num_out_of_order = int(np.count_nonzero(trace.arrived_at[1:] < trace.arrived_at[:-1]))
    if num_out_of_order:
        trace = take(trace, np.argsort(trace.arrived_at, kind="stable"))
    if file.start_at_zero:  # also where the first row was left out
        trace = replace(trace, arrived_at=trace.arrived_at - trace.arrived_at[0])
    first_s, last_s = float(trace.arrived_at[0]), float(trace.arrived_at[-1])
    reading = TraceReading(
        path=file.path,
        content="requests",
        num_rows=len(trace),
        span_s=last_s - first_s,
        columns=columns,
        time_column=columns["arrived_at"],
        time_format=times.what,
        first_date=times.first_date(),
        shifted_by_s=float(times.seconds().min()) - first_s,
        num_out_of_order=num_out_of_order,
    )
    reading.say()
    return replace(trace, reading=reading)


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
