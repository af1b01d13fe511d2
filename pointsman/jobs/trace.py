"""Job traces: who submitted when, for how long, on how many GPUs.

Any CSV, JSON or Parquet file with one row a job. Columns are known by their usual names, or `columns` says
which holds what; a duration is given as such, or as a start and an end. Times may be dates, Unix times in any
unit, or seconds. A job that the column of deadlines says nothing of has none. docs/jobs.md maps the public
Philly, Helios and Alibaba traces.

Left out, with a warning: jobs without GPUs, jobs that never ran (no duration, or none above 0), and jobs that
need more GPUs than the cluster has. Longer jobs than `max_duration_s` are cut to that.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Self

import numpy as np
import polars as pl
from numpy.typing import NDArray
from pydantic import Field, model_validator

from pointsman.errors import InputError, PointsmanWarning
from pointsman.jobs.table import MAX_PRIORITY, Floats, Jobs
from pointsman.spec import Spec
from pointsman.workload.columns import Names, choose_columns, unit_of
from pointsman.workload.files import RawTable, TraceSource, open_source
from pointsman.workload.reading import TraceReading
from pointsman.workload.times import FIX_ROW, UNITS_PER_S, Times, read_numbers, read_times

DEFAULT_PRIORITY = 5

_NAMES: dict[str, Names] = {
    "submitted_at": (
        *("submitted_at", "submit_time", "submitted_time", "submission_time", "submit", "creation_time"),
        *("created_at", "created", "arrival_time", "arrived_at", "timestamp"),
    ),
    "gpus": ("gpus", "num_gpus", "num_gpu", "gpu_num", "gpu_count", "n_gpus", "req_gpus", "gpu_request"),
    "priority": ("priority",),
    "deadline_at": ("deadline_at", "deadline", "due_at", "due", "due_time", "due_date"),
}
_DURATION_NAMES: dict[str, Names] = {
    "duration_s": ("duration", "run_time", "runtime", "elapsed", "elapsed_time", "execution_time"),
}
_SPAN_NAMES: dict[str, Names] = {
    "started_at": ("started_at", "start_time", "start", "started", "begin_time", "scheduled_time"),
    "ended_at": ("ended_at", "end_time", "end", "ended", "finish_time", "completed_at", "deletion_time"),
}
_REQUIRED = {"submitted_at": "times of submission", "gpus": "numbers of GPUs"}


class JobColumns(Spec):
    """Which column holds what; what is absent is found by the usual names."""

    submitted_at: str | None = Field(default=None, description="s, Unix time, or date and time")
    duration_s: str | None = Field(default=None, description="s; or give started_at and ended_at")
    started_at: str | None = Field(default=None, description="as submitted_at; with ended_at")
    ended_at: str | None = Field(default=None, description="as submitted_at")
    gpus: str | None = Field(default=None, description="GPUs that the job needs at once")
    priority: str | None = Field(
        default=None, description="1 to 10, 10 most urgent; absent: `priority`, or 5 for all"
    )
    deadline_at: str | None = Field(
        default=None, description="as submitted_at; absent: `deadline`, or none. Jobs may be without"
    )

    @model_validator(mode="after")
    def _one_duration(self) -> Self:
        if (self.started_at is None) != (self.ended_at is None):
            missing = "started_at" if self.started_at is None else "ended_at"
            raise InputError(f"columns.{missing}", None, "missing", "give both times, or duration_s")
        if self.duration_s is not None and self.started_at is not None:
            remedy = "give one of the two"
            raise InputError("columns.duration_s", self.duration_s, "given beside started_at", remedy)
        return self


class JobTrace(Spec):
    path: str = Field(min_length=1, description="CSV, JSONL or Parquet file, plain or gzip")
    columns: JobColumns = JobColumns()
    gpu_unit: float = Field(
        default=1.0, gt=0, description="GPUs that 1 in the column stands for: 0.01 for percent; rounded up"
    )


def read_jobs(trace: JobTrace, max_duration_s: float, num_gpus: int) -> Jobs:
    """The jobs that a cluster of `num_gpus` can run."""
    source = open_source(Path(trace.path).expanduser())
    columns = _choose_columns(source, trace.columns)
    table = source.load(list(dict.fromkeys(columns.values())))
    num_rows = len(table.frame)
    table = _that_ran(
        table, [columns[field] for field in (*_DURATION_NAMES, *_SPAN_NAMES) if field in columns]
    )
    submitted, duration_s = _times(table, columns["submitted_at"]), _durations(table, columns)
    gpus = read_numbers(table, columns["gpus"])
    table.reject(columns["gpus"], gpus < 0, "fewer than 0 GPUs", FIX_ROW)
    num_needed = np.ceil(gpus.to_numpy() * trace.gpu_unit - 1e-9).astype(np.int64)
    jobs = Jobs(
        submitted.seconds(),
        duration_s,
        num_needed,
        _priorities(table, columns.get("priority")),
        _deadlines(table, columns.get("deadline_at"), submitted),
    )
    left_out = {"never ran": num_rows - len(jobs)}
    for what, is_kept in (
        ("never ran", jobs.duration_s > 0),
        ("need no GPU", jobs.gpus > 0),
        (f"need more than {num_gpus} GPUs", jobs.gpus <= num_gpus),
    ):
        left_out[what] = left_out.get(what, 0) + int((~is_kept).sum())
    jobs = jobs.rows((jobs.duration_s > 0) & (jobs.gpus > 0) & (jobs.gpus <= num_gpus))
    _tell(trace.path, num_rows, left_out, int((jobs.duration_s > max_duration_s).sum()))
    if len(jobs) == 0:
        raise InputError("trace file", trace.path, "no job that this cluster can run", "give another file")
    num_out_of_order = int(np.count_nonzero(np.diff(jobs.arrived_at) < 0))
    jobs = jobs.rows(np.argsort(jobs.arrived_at, kind="stable"))
    TraceReading(
        path=trace.path,
        content="job",
        num_rows=len(jobs),
        span_s=float(jobs.arrived_at[-1] - jobs.arrived_at[0]),
        columns=columns,
        time_column=columns["submitted_at"],
        time_format=submitted.what,
        first_date=submitted.first_date(),
        shifted_by_s=0.0,
        num_out_of_order=num_out_of_order,
    ).say()
    return replace(jobs, duration_s=np.minimum(jobs.duration_s, max_duration_s))


def _tell(path: str, num_rows: int, left_out: dict[str, int], num_cut: int) -> None:
    parts = [f"{count} {what}" for what, count in left_out.items() if count]
    if parts:
        text = f"{path}: of {num_rows} jobs, {', '.join(parts)}, and are left out"
        warnings.warn(PointsmanWarning(text), stacklevel=3)
    if num_cut:
        text = f"{path}: {num_cut} jobs are longer than max_duration_s, and are cut to it"
        warnings.warn(PointsmanWarning(text), stacklevel=3)


def _choose_columns(source: TraceSource, given: JobColumns) -> dict[str, str]:
    """A duration, where the file has one and no other times are given; else start and end."""
    named = given.model_dump()
    if given.started_at is None:
        columns = choose_columns(source, named, _NAMES | _DURATION_NAMES, _REQUIRED)
        if "duration_s" in columns:
            return columns
    times = {"started_at": "starts", "ended_at": "ends (or one for durations)"}
    return choose_columns(source, named, _NAMES | _SPAN_NAMES, _REQUIRED | times)


def _that_ran(table: RawTable, times: list[str]) -> RawTable:
    """Leave out jobs whose duration is not known: they were cancelled, or still ran."""
    is_known = pl.all_horizontal(_is_given(table.frame[name]) for name in times)
    frame = table.frame.filter(is_known)
    if frame.is_empty():
        raise InputError("trace file", str(table.path), "no job has a duration", "map the right columns")
    return replace(table, frame=frame)


def _is_given(values: pl.Series) -> pl.Series:
    if values.dtype != pl.String:
        return values.is_not_null()
    return values.is_not_null() & ~values.str.strip_chars().str.to_lowercase().is_in(
        ["", "nan", "none", "null"]
    )


def _durations(table: RawTable, columns: dict[str, str]) -> Floats:
    if "duration_s" in columns:
        column = columns["duration_s"]
        values = read_numbers(table, column)
        table.reject(column, values < 0, "a negative duration", FIX_ROW)
        return np.asarray(values.to_numpy() / UNITS_PER_S[unit_of(column) or "s"])
    started, ended = _times(table, columns["started_at"]), _times(table, columns["ended_at"])
    duration_s = ended.seconds() - started.seconds()
    table.reject(columns["ended_at"], pl.Series(duration_s < 0), "ends before it starts", FIX_ROW)
    return duration_s


def _times(table: RawTable, column: str) -> Times:
    """Since 1970, or since any origin that is the same for all columns."""
    return read_times(table, column, usual_unit=unit_of(column) or "s")


def _priorities(table: RawTable, column: str | None) -> NDArray[np.int64]:
    if column is None:
        return np.full(len(table.frame), DEFAULT_PRIORITY)
    values = read_numbers(table, column)
    problem = f"not from 1 to {MAX_PRIORITY}"
    table.reject(column, ~values.is_between(1, MAX_PRIORITY), problem, FIX_ROW)
    return values.round().to_numpy().astype(np.int64)


def _deadlines(table: RawTable, column: str | None, submitted: Times) -> Floats:
    """Deadlines by the clock of `submitted`; infinite where the file says nothing."""
    deadline_at = np.full(len(table.frame), np.inf)
    if column is None:
        return deadline_at
    is_given = _is_given(table.frame[column])
    some = replace(table, frame=table.frame.filter(is_given))
    if some.frame.is_empty():
        return deadline_at
    times = _times(some, column)
    if times.is_epoch != submitted.is_epoch:
        problem = f"{times.what}, but jobs are submitted in {submitted.what}: not the same clock"
        raise InputError(f"{table.path}, column {column}", some.frame[column][0], problem, "write both alike")
    seconds = times.seconds()
    is_before = seconds < submitted.seconds()[is_given.to_numpy()]
    some.reject(column, pl.Series(is_before), "a deadline before the job is submitted", FIX_ROW)
    deadline_at[is_given.to_numpy()] = seconds
    return deadline_at
