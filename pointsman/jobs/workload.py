"""The jobs of an episode: drawn at random, or a window of a trace.

`heavy_tail` durations are many short jobs and a few long ones; long jobs tend to be wide and of low priority.
`bursty` arrivals are six bursts over a span as long as the longest job. Deadlines are drawn last: with and
without, the jobs are the same.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator

from pointsman.errors import InputError
from pointsman.jobs.table import MAX_PRIORITY, Floats, Jobs
from pointsman.jobs.trace import JobTrace, read_jobs
from pointsman.spec import Spec

WIDEST_DRAWN = 8  # GPUs: a drawn job needs no more, however large the cluster

SHORT_SHARE = 0.85
SHORT_DURATIONS = (0.01, 0.08)  # of the longest
UNIFORM_DURATIONS = (0.05, 0.2)
NUM_BURSTS = 6
BURST_SHARE = 0.8
BURST_STD = 0.03  # of the span


class JobsWorkloadSpec(Spec):
    """What an episode is made of."""

    num_jobs: int = Field(default=400, ge=1, le=100_000, description="jobs of an episode")
    max_duration_s: float = Field(
        default=10_000.0, gt=0, description="longest job [s]; times are seen as shares of it"
    )
    durations: Literal["heavy_tail", "uniform"] = Field(
        default="heavy_tail", description="many short jobs and a few long ones, or all of a kind"
    )
    arrivals: Literal["bursty", "all_at_zero"] = Field(
        default="bursty", description="in six bursts, or all at the start"
    )
    deadline_slack: tuple[float, float] | None = Field(
        default=None,
        description="draw deadlines: a job should end so many of its durations after it arrives, evenly "
        "between the two; jobs of a trace that have a deadline keep it",
    )
    trace: JobTrace | None = Field(
        default=None, description="jobs of a file instead of drawn ones: num_jobs in a row, anywhere in it"
    )

    @field_validator("deadline_slack")
    @classmethod
    def _in_order(cls, slack: tuple[float, float] | None) -> tuple[float, float] | None:
        if slack is not None and not 1 <= slack[0] <= slack[1]:
            remedy = "the lowest first, and at least 1: a job takes its own duration"
            raise InputError("workload.deadline_slack", list(slack), "is not a range from 1 up", remedy)
        return slack

    @field_validator("trace", mode="before")
    @classmethod
    def _path_alone(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value


def draw_jobs(spec: JobsWorkloadSpec, num_gpus: int, seed: int) -> Jobs:
    """The jobs of one episode; they follow from the seed."""
    rng = np.random.default_rng(seed)
    if spec.trace is not None:
        jobs = _window(_trace_jobs(spec.trace, spec.max_duration_s, num_gpus), spec.num_jobs, rng)
    else:
        jobs = _drawn(spec, num_gpus, rng)
    if spec.deadline_slack is None:
        return jobs
    drawn = jobs.arrived_at + rng.uniform(*spec.deadline_slack, len(jobs)) * jobs.duration_s
    return replace(jobs, deadline_at=np.where(np.isfinite(jobs.deadline_at), jobs.deadline_at, drawn))


def has_deadlines(spec: JobsWorkloadSpec, num_gpus: int) -> bool:
    """Whether some job of some episode has one."""
    if spec.deadline_slack is not None:
        return True
    return spec.trace is not None and _trace_jobs(spec.trace, spec.max_duration_s, num_gpus).has_deadlines


def _drawn(spec: JobsWorkloadSpec, num_gpus: int, rng: np.random.Generator) -> Jobs:
    share = _duration_shares(spec, rng)
    arrived_at = _arrivals(spec, rng)
    order = np.argsort(arrived_at, kind="stable")
    return Jobs(
        arrived_at[order],
        (share * spec.max_duration_s)[order],
        _gpus(share, min(num_gpus, WIDEST_DRAWN), rng)[order],
        _priorities(share, rng)[order],
        np.full(spec.num_jobs, np.inf),
    )


def _duration_shares(spec: JobsWorkloadSpec, rng: np.random.Generator) -> Floats:
    """[J] of the longest duration."""
    if spec.durations == "uniform":
        return rng.uniform(*UNIFORM_DURATIONS, spec.num_jobs)
    shortest, limit = SHORT_DURATIONS
    is_short = rng.random(spec.num_jobs) < SHORT_SHARE
    long = np.exp(rng.uniform(np.log(limit), 0.0, spec.num_jobs))
    return np.where(is_short, rng.uniform(shortest, limit, spec.num_jobs), long)


def _gpus(share: Floats, widest: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Long jobs tend to be wide."""
    correlated = 1 + np.floor(share**0.6 * (widest - 1))
    mixed = 0.7 * correlated + 0.3 * rng.integers(1, widest + 1, len(share))
    return np.clip(np.round(mixed), 1, widest).astype(np.int64)


def _priorities(share: Floats, rng: np.random.Generator) -> NDArray[np.int64]:
    """Short jobs tend to be urgent."""
    correlated = 1 + np.floor((1 - share) ** 0.8 * (MAX_PRIORITY - 1))
    mixed = 0.6 * correlated + 0.4 * rng.integers(1, MAX_PRIORITY + 1, len(share))
    return np.clip(np.round(mixed), 1, MAX_PRIORITY).astype(np.int64)


def _arrivals(spec: JobsWorkloadSpec, rng: np.random.Generator) -> Floats:
    if spec.arrivals == "all_at_zero":
        return np.zeros(spec.num_jobs)
    span_s = spec.max_duration_s
    centres = rng.uniform(0.0, span_s, NUM_BURSTS)
    in_burst = centres[rng.integers(NUM_BURSTS, size=spec.num_jobs)]
    in_burst += rng.normal(0.0, BURST_STD * span_s, spec.num_jobs)
    is_burst = rng.random(spec.num_jobs) < BURST_SHARE
    return np.clip(np.where(is_burst, in_burst, rng.uniform(0.0, span_s, spec.num_jobs)), 0.0, span_s)


@lru_cache(maxsize=4)
def _trace_jobs(trace: JobTrace, max_duration_s: float, num_gpus: int) -> Jobs:
    return read_jobs(trace, max_duration_s, num_gpus)


def _window(trace: Jobs, num_jobs: int, rng: np.random.Generator) -> Jobs:
    """`num_jobs` in a row, or all there are; the first arrives at 0."""
    num_jobs = min(num_jobs, len(trace))
    first = int(rng.integers(len(trace) - num_jobs + 1))
    some = trace.rows(slice(first, first + num_jobs))
    begin = some.arrived_at[0]
    return replace(some, arrived_at=some.arrived_at - begin, deadline_at=some.deadline_at - begin)
