"""Job traces: who submitted when, for how long, on how many GPUs.

Any CSV, JSONL or Parquet file with one row a job; `columns` says which column holds what. A duration is given
as such, or as a start and an end. docs/jobs.md maps the public Philly, Helios and Alibaba traces.

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
from pointsman.workload.files import RawTable, TraceSource, open_source
from pointsman.workload.readers import FIX_ROW, is_calendar, read_calendar_ns, read_numbers

DEFAULT_PRIORITY = 5


class JobColumns(Spec):
    """Which column holds what."""

    submitted_at: str = Field(default="submitted_at", description="s, or date and time")
    duration_s: str | None = Field(
        default=None, description="s; absent: `duration_s`, or give started_at and ended_at"
    )
    started_at: str | None = Field(default=None, description="s, or date and time; with ended_at")
    ended_at: str | None = Field(default=None, description="s, or date and time")
    gpus: str = Field(default="gpus", description="GPUs that the job needs at once")
    priority: str | None = Field(
        default=None, description="1 to 10, 10 most urgent; absent: `priority`, or 5 for all"
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
    columns = _present(trace.columns, source)
    wanted = (columns.submitted_at, columns.gpus, columns.priority, *_times(columns))
    table = source.load(list(dict.fromkeys(name for name in wanted if name)))
    num_rows = len(table.frame)
    table = _that_ran(table, _times(columns))
    submitted_at, duration_s = _seconds(table, columns.submitted_at), _durations(table, columns)
    gpus = read_numbers(table, columns.gpus)
    table.reject(columns.gpus, gpus < 0, "fewer than 0 GPUs", FIX_ROW)
    num_needed = np.ceil(gpus.to_numpy() * trace.gpu_unit - 1e-9).astype(np.int64)
    jobs = Jobs(submitted_at, duration_s, num_needed, _priorities(table, columns.priority))
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
    jobs = jobs.rows(np.argsort(jobs.arrived_at, kind="stable"))
    return replace(jobs, duration_s=np.minimum(jobs.duration_s, max_duration_s))


def _tell(path: str, num_rows: int, left_out: dict[str, int], num_cut: int) -> None:
    parts = [f"{count} {what}" for what, count in left_out.items() if count]
    if parts:
        text = f"{path}: of {num_rows} jobs, {', '.join(parts)}, and are left out"
        warnings.warn(PointsmanWarning(text), stacklevel=3)
    if num_cut:
        text = f"{path}: {num_cut} jobs are longer than max_duration_s, and are cut to it"
        warnings.warn(PointsmanWarning(text), stacklevel=3)


def _present(columns: JobColumns, source: TraceSource) -> JobColumns:
    """With the defaults of what was not named; all of them are in the file."""
    found = {}
    if columns.duration_s is None and columns.started_at is None:
        found["duration_s"] = "duration_s"
    if columns.priority is None and "priority" in source.columns:
        found["priority"] = "priority"
    columns = columns.model_copy(update=found)
    for field, name in columns.model_dump().items():
        if name is not None and name not in source.columns:
            problem = f"column {name!r} for {field} is missing from {', '.join(source.columns)}"
            remedy = "map the columns with columns: {submitted_at: …, duration_s: …, gpus: …}"
            raise InputError("trace file", str(source.path), problem, remedy)
    return columns


def _times(columns: JobColumns) -> list[str]:
    """The columns that give the duration."""
    return [name for name in (columns.duration_s, columns.started_at, columns.ended_at) if name]


def _that_ran(table: RawTable, times: list[str]) -> RawTable:
    """Without the jobs whose duration is not known: they were cancelled, or still ran."""
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


def _durations(table: RawTable, columns: JobColumns) -> Floats:
    if columns.duration_s is not None:
        values = read_numbers(table, columns.duration_s)
        table.reject(columns.duration_s, values < 0, "a negative duration", FIX_ROW)
        return values.to_numpy()
    assert columns.started_at is not None and columns.ended_at is not None
    duration_s = _seconds(table, columns.ended_at) - _seconds(table, columns.started_at)
    table.reject(columns.ended_at, pl.Series(duration_s < 0), "ends before it starts", FIX_ROW)
    return duration_s


def _seconds(table: RawTable, column: str) -> Floats:
    """Since any origin, the same for all columns."""
    if is_calendar(table.frame[column]):
        return read_calendar_ns(table, column) / 1e9
    return read_numbers(table, column).to_numpy()


def _priorities(table: RawTable, column: str | None) -> NDArray[np.int64]:
    if column is None:
        return np.full(len(table.frame), DEFAULT_PRIORITY)
    values = read_numbers(table, column)
    problem = f"not from 1 to {MAX_PRIORITY}"
    table.reject(column, ~values.is_between(1, MAX_PRIORITY), problem, FIX_ROW)
    return values.round().to_numpy().astype(np.int64)
