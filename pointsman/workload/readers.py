"""Trace files in the formats people publish and log, read into a `Workload`.

| format   | time                | prompt             | output            |
|----------|---------------------|--------------------|-------------------|
| azure    | TIMESTAMP, dates    | ContextTokens      | GeneratedTokens   |
| vidur    | arrived_at, s       | num_prefill_tokens | num_decode_tokens |
| mooncake | timestamp, ms       | input_length       | output_length     |
| burstgpt | Timestamp, s        | Request tokens     | Response tokens   |
| generic  | by name (columns.py) or `columns`; times as times.py recognises them |

Where a file has hashes of the blocks of each prompt (Mooncake's `hash_ids`), requests share prefixes as far
as those are equal; `block_tokens` says how long a block is.

Times start at 0 unless `start_at_zero` is false, and rows are sorted by them; how a file was understood is
said (reading.py). Times are parsed exactly: the shortest decimal of a double gives that double. Only where a
log counts whole seconds or minutes are the requests of each spread over it: together they would be bursts
that never were.

Requests that failed are left out (tokens.py), but for a file that is said to be Vidur's (`format: vidur`), of
which Vidur's clipping (`max_tokens`) lifts 0 to 1. Two recordings one after the other, each with a clock of
its own, are an error. Mooncake's whole milliseconds in batches of 3 s are as they were published; whoever
writes fractions into its columns means seconds.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import get_args

import numpy as np
import polars as pl
from numpy.typing import NDArray

from pointsman.errors import InputError, PointsmanWarning
from pointsman.plain import in_percent
from pointsman.workload.columns import REQUEST_NAMES, choose_columns, unit_of
from pointsman.workload.files import RawTable, TraceSource, open_source
from pointsman.workload.prefixes import Chains, chains_of_blocks
from pointsman.workload.reading import TraceReading
from pointsman.workload.replay import take
from pointsman.workload.spec import ShippedTrace, TimeUnit, TraceColumns, TraceFile
from pointsman.workload.times import FIX_ROW, Times, read_times
from pointsman.workload.tokens import is_nothing, prompt_parts, served_rows, token_counts, with_zeros
from pointsman.workload.workload import NO_SESSION, Workload

_LONGEST_GAP = 0.5  # of the time from the first to the last request
_FEWEST_WITH_A_RATE = 30  # requests
_CLOCKS_S = (60.0, 1.0)  # whole minutes, whole seconds
_FEWEST_CLOCK_READINGS = 10  # fewer may well be batches
_FEWEST_IN_A_RECORDING = 10  # rows on average: where time goes back more often, rows are out of order
_MOST_OF_A_RECORDING = 0.5  # is how far time goes back at its end
_DOWN_IN_DISORDER = 0.4  # of the steps from row to row: half of them in any order
_SHARED = 0.2  # of the requests must have come at the same reading as another
_TIMES = {"arrived_at": "arrival times"}
_LENGTHS = {"num_prefill_tokens": "prompt lengths", "num_decode_tokens": "output lengths"}


@dataclass(frozen=True)
class _Format:
    name: str
    columns: TraceColumns
    time_unit: TimeUnit = "s"
    block_tokens: int | None = None  # of block hashes
    has_batches: bool = False  # what has the same time came together: no clock was too coarse


def _columns(arrived_at: str, num_prefill_tokens: str, num_decode_tokens: str) -> TraceColumns:
    return TraceColumns(
        arrived_at=arrived_at, num_prefill_tokens=num_prefill_tokens, num_decode_tokens=num_decode_tokens
    )


_FORMATS = (
    _Format("azure", _columns("TIMESTAMP", "ContextTokens", "GeneratedTokens")),
    # `pointsman serve --record` writes Vidur's columns, and hashes of blocks of about so many tokens.
    _Format("vidur", _columns("arrived_at", "num_prefill_tokens", "num_decode_tokens"), block_tokens=128),
    _Format(
        "mooncake",
        _columns("timestamp", "input_length", "output_length"),
        time_unit="ms",
        block_tokens=512,
        has_batches=True,
    ),
    _Format("burstgpt", _columns("Timestamp", "Request tokens", "Response tokens")),
)


def read_trace(
    file: TraceFile, base_dir: Path | None = None, *, needs_times: bool = True, lifts_zeros: bool = False
) -> Workload:
    """The requests of a file, sorted by arrival (stable). Relative paths start at `base_dir`.

    `needs_times=False` reads a file of lengths alone; `lifts_zeros` keeps lengths of 0 in a file that is said
    to be Vidur's, to be clipped later.
    """
    source = open_source(trace_path(file, base_dir))
    form = _choose_format(source, file, needs_times)
    required = (_TIMES if needs_times else {}) | _LENGTHS
    names = {field: REQUEST_NAMES[field] for field in [*required, "session", "block_hashes"]}
    columns = choose_columns(source, form.columns.model_dump(), names, required)
    prompts, outputs = columns["num_prefill_tokens"], columns["num_decode_tokens"]
    parts = prompt_parts(source.columns, prompts) if form.columns.num_prefill_tokens is None else []
    table = source.load(list(dict.fromkeys([*columns.values(), *parts])))

    num_rows = len(table.frame)
    has_blocks = "block_hashes" in columns
    times = _times(table, columns["arrived_at"], file, form, has_blocks) if needs_times else None
    has_none = is_nothing(table, outputs)
    table = with_zeros(table, prompts, outputs, parts)
    trace = Workload(
        arrived_at=_seconds(times, file.start_at_zero) if times else np.zeros(num_rows),
        num_prefill_tokens=token_counts(table, prompts, parts),
        num_decode_tokens=token_counts(table, outputs),
        session=_sessions(table, columns.get("session")),
        request_id=np.arange(num_rows),
    )
    lifts_zeros &= file.format == "vidur"
    served = served_rows(
        trace.num_prefill_tokens, trace.num_decode_tokens, has_none, lifts_zeros, source.path
    )
    if len(served) < num_rows:
        trace, table = take(trace, served), replace(table, frame=table.frame[served])
    if has_blocks:
        block_tokens = file.block_tokens or form.block_tokens
        trace = replace(trace, **vars(_chains(table, columns["block_hashes"], trace, block_tokens)))
    columns["num_prefill_tokens"] = " + ".join([prompts, *parts])
    return _in_order(trace, file, form, columns, times) if times else trace


def trace_path(file: TraceFile, base_dir: Path | None) -> Path:
    if file.path in get_args(ShippedTrace):
        return Path(str(resources.files("pointsman.workload").joinpath("data", f"{file.path}.parquet")))
    return (base_dir or Path()) / Path(file.path).expanduser()


def _choose_format(source: TraceSource, file: TraceFile, needs_times: bool) -> _Format:
    fields = [*_LENGTHS, *(_TIMES if needs_times else {})]
    if file.columns is None:
        for form in _FORMATS:
            named = form.columns.model_dump()
            is_there = all(named[field] in source.columns for field in fields)
            if form.name == file.format or (is_there and file.format == "auto"):
                return form
    return _Format("generic", file.columns or TraceColumns())


def _times(table: RawTable, column: str, file: TraceFile, form: _Format, has_blocks: bool) -> Times:
    """Where there are hashes of blocks it is Mooncake's form, of which some write fractions of a ms."""
    usual_unit = unit_of(column) or form.time_unit
    times = read_times(table, column, file.time_unit, usual_unit)
    table.reject(column, pl.Series(times.ticks < 0), "a negative time", FIX_ROW)
    if times.is_epoch:
        return times
    _reject_two_recordings(table, column, times.ticks)
    _warn_of_durations(times.ticks, column, file.path)
    is_told = file.time_unit is not None or file.format != "auto" or unit_of(column) is not None or has_blocks
    if usual_unit != "s" and not is_told and np.any(times.ticks % 1.0):
        return replace(times, ticks_per_s=1.0, what="seconds, as they have fractions")
    return times


def _warn_of_durations(ticks: NDArray[np.float64], column: str, path: str) -> None:
    """Sorted, they would pass for arrivals: durations of requests in a row go down as often as up."""
    steps = np.diff(ticks)
    num_steps, num_down = np.count_nonzero(steps), np.count_nonzero(steps < 0)
    if num_steps >= _FEWEST_WITH_A_RATE and num_down > _DOWN_IN_DISORDER * num_steps:
        text = f"{path}: times in {column!r} go down in {num_down:,} of {num_steps:,} rows, as durations do"
        text += "; if that is what they are, name the column of arrivals: columns: {arrived_at: NAME}"
        warnings.warn(PointsmanWarning(text), stacklevel=2)


def _reject_two_recordings(table: RawTable, column: str, ticks: NDArray[np.float64]) -> None:
    """Each has a start of its own: sorted by time, one would run on top of the other, at twice the rate."""
    falls = np.flatnonzero(np.diff(ticks) < 0) + 1
    lengths = np.diff(np.concatenate(([0], falls, [len(ticks)])))
    if not len(falls) or lengths.mean() < _FEWEST_IN_A_RECORDING:
        return
    since_start = ticks[falls - 1] - np.minimum.accumulate(ticks)[falls - 1]
    is_start = (ticks[falls - 1] - ticks[falls]) > _MOST_OF_A_RECORDING * since_start
    is_start &= falls >= _FEWEST_IN_A_RECORDING
    begins = np.zeros(len(ticks), bool)
    begins[falls[is_start]] = True
    problem = f"time goes back from {ticks[int(np.argmax(begins)) - 1]:g}, as where another recording begins"
    remedy = "give one file for each, or sort the rows by time if all are by one clock"
    table.reject(column, pl.Series(begins), problem, remedy)


def _seconds(times: Times, start_at_zero: bool) -> NDArray[np.float64]:
    """Dates have no 0 of their own."""
    return times.seconds(times.ticks.min() if start_at_zero or times.what.startswith("dates") else 0)


def _in_order(
    trace: Workload, file: TraceFile, form: _Format, columns: dict[str, str], times: Times
) -> Workload:
    num_out_of_order = int(np.count_nonzero(trace.arrived_at[1:] < trace.arrived_at[:-1]))
    if num_out_of_order:
        trace = take(trace, np.argsort(trace.arrived_at, kind="stable"))
    if file.start_at_zero:  # also where the first row was left out
        trace = replace(trace, arrived_at=trace.arrived_at - trace.arrived_at[0])
    may_be_coarse = file.time_unit is None and (times.is_epoch or not form.has_batches)
    clock_s = _coarse_clock_s(trace.arrived_at) if may_be_coarse else None
    if clock_s is not None:
        trace = replace(trace, arrived_at=_spread(trace.arrived_at, clock_s))
    first_s, last_s = float(trace.arrived_at[0]), float(trace.arrived_at[-1])
    _warn_of_a_gap(trace, file.path)
    reading = TraceReading(
        path=file.path,
        content="request",
        num_rows=len(trace),
        span_s=last_s - first_s,
        columns=columns,
        time_column=columns["arrived_at"],
        time_format=times.what,
        first_date=times.first_date(),
        shifted_by_s=float(times.seconds().min()) - first_s,
        num_out_of_order=num_out_of_order,
        spread_over_s=clock_s,
        time_unit=times.unit,
    )
    reading.say()
    return replace(trace, reading=reading)


def _coarse_clock_s(arrived_at: NDArray[np.float64]) -> float | None:
    """The clock by which so many requests seem to come together; None if they do not."""
    readings, counts = np.unique(arrived_at, return_counts=True)
    num_shared = int(counts[counts > 1].sum())
    if len(readings) < _FEWEST_CLOCK_READINGS or num_shared < _SHARED * len(arrived_at):
        return None
    return next((clock_s for clock_s in _CLOCKS_S if not np.any(readings % clock_s)), None)


def _spread(arrived_at: NDArray[np.float64], clock_s: float) -> NDArray[np.float64]:
    """Evenly over the second or minute that they share, in their order."""
    _, firsts, counts = np.unique(arrived_at, return_index=True, return_counts=True)
    place = np.arange(len(arrived_at)) - np.repeat(firsts, counts)
    return arrived_at + clock_s * place / np.repeat(counts, counts)


def _warn_of_a_gap(trace: Workload, path: str) -> None:
    """A wrong time, or two recordings in one file, makes its mean rate mean nothing."""
    if len(trace) < _FEWEST_WITH_A_RATE:
        return
    gaps, span_s = np.diff(trace.arrived_at), float(np.ptp(trace.arrived_at))
    longest = int(gaps.argmax())
    if gaps[longest] > _LONGEST_GAP * span_s:
        share = in_percent(gaps[longest] / span_s, 1)
        what = f"{path}: nothing arrives in {share} of its time, after request {longest + 1:,} of "
        what += (
            f"{len(trace):,}, so its mean rate says little, and load or rate would press the rest together; "
        )
        what += "correct a wrong time, or cut the file there"
        warnings.warn(what, PointsmanWarning, stacklevel=2)


def _sessions(table: RawTable, column: str | None) -> NDArray[np.int32]:
    if column is None:
        return np.full(len(table.frame), NO_SESSION, dtype=np.int32)
    names = table.values(column)
    dense = names.rank("dense").cast(pl.Int64) - 1
    return dense.fill_null(NO_SESSION).to_numpy().astype(np.int32)


def _chains(table: RawTable, column: str, trace: Workload, block_tokens: int | None) -> Chains:
    """From lists, or from text with commas, spaces or brackets between the hashes."""
    if block_tokens is None:
        remedy = "set block_tokens to the length of a block that was hashed"
        raise InputError("workload.trace.block_tokens", None, f"needed for the column {column}", remedy)
    values = table.frame[column]
    if values.dtype == pl.String:
        values = values.fill_null("").str.extract_all(r"[^\s,;\[\]\"']+")
    elif not isinstance(values.dtype, pl.List):
        table.reject(column, values.is_not_null(), "not a list of block hashes", FIX_ROW)
    counts = values.list.len().fill_null(0).cast(pl.Int64)
    most = -(-trace.num_prefill_tokens.astype(np.int64) // block_tokens)
    table.reject(column, counts > pl.Series(most), "more blocks than the prompt has", FIX_ROW)
    hashes = values.filter(counts > 0).explode().rank("dense").cast(pl.Int64).to_numpy()
    return chains_of_blocks(hashes, counts.to_numpy(), trace.num_prefill_tokens, block_tokens)
