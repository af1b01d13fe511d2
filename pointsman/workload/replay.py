"""A trace on another time axis: stretched to a rate, cut, or repeated."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pointsman.errors import InputError
from pointsman.workload.prefixes import extend_keys
from pointsman.workload.spec import MAX_REQUESTS, TraceReplay
from pointsman.workload.workload import Workload


def replay(
    trace: Workload,
    spec: TraceReplay,
    rate_rps: float | None,
    num_requests: int | None,
    duration_s: float | None,
) -> Workload:
    """The requests of `trace` as `spec` wants them; `rate_rps` is None where its own times are kept."""
    num_rows = num_rows_of(trace)
    if spec.begin > 0.0:
        trace = part_of(trace, spec.begin, 1.0)
    if num_requests is not None:
        trace = take(trace, slice(num_requests))
    if rate_rps is not None:
        trace = replace(trace, arrived_at=trace.arrived_at * (_own_rate_rps(trace, spec) / rate_rps))
    if spec.part != (0.0, 1.0):  # of what is replayed, at its rate: a busy part of a trace stays a busy one
        if duration_s is not None:
            trace = take(trace, slice(int(np.searchsorted(trace.arrived_at, duration_s, side="right"))))
        trace = part_of(trace, *spec.part)
    num_passes = _num_passes(trace, spec, num_requests, duration_s)
    if num_passes > 1:
        trace = repeated(trace, num_passes, num_rows)
    end = len(trace) if duration_s is None else np.searchsorted(trace.arrived_at, duration_s, side="right")
    if end == 0:
        remedy = f"the first request of {spec.path} arrives at {trace.arrived_at[0]:g} s: make it longer"
        raise InputError("workload.duration_s", duration_s, "no request arrives in this time", remedy)
    return take(trace, slice(min(int(end), num_requests or len(trace))))


def num_rows_of(trace: Workload) -> int:
    return int(trace.request_id.max()) + 1


def part_of(trace: Workload, first: float, last: float) -> Workload:
    """From and to these shares of the requests, the first of them at time 0."""
    begin, end = round(first * len(trace)), round(last * len(trace))
    if begin == end:
        problem = f"holds none of the {len(trace)} requests of the trace"
        raise InputError("workload.trace.part", [first, last], problem, "make it larger")
    part = take(trace, slice(begin, end))
    return replace(part, arrived_at=part.arrived_at - part.arrived_at[0])


def take(trace: Workload, rows: slice | NDArray[np.intp]) -> Workload:
    """Some of its requests; where later turns wait for earlier ones, a slice in whole sessions."""
    names = ["arrived_at", "num_prefill_tokens", "num_decode_tokens", "session", "request_id"]
    if trace.is_shared:
        names += ["chain_start", "chain_length", "answer_key"]
    if len(trace.next_turn):
        assert isinstance(rows, slice)
        return _take_sessions(trace, names, rows)
    return replace(trace, **{name: getattr(trace, name)[rows] for name in names})


def _take_sessions(trace: Workload, names: list[str], rows: slice) -> Workload:
    """The sessions whose requests all fall into the slice, if requests are counted session by session."""
    start, stop, _ = rows.indices(len(trace))
    end = np.cumsum(np.bincount(trace.session))
    is_taken = ((end <= stop) & (np.diff(end, prepend=0) <= end - start))[trace.session]
    row = np.cumsum(is_taken) - 1
    taken = {name: getattr(trace, name)[is_taken] for name in (*names, "think_s")}
    taken["session"] = taken["session"] - taken["session"].min(initial=0)
    next_turn = trace.next_turn[is_taken]
    taken["next_turn"] = np.where(next_turn >= 0, row[next_turn], -1).astype(np.int32)
    first_turns = len(next_turn) - np.count_nonzero(next_turn >= 0)
    taken["arrived_at"][first_turns:] = taken["arrived_at"][first_turns - 1]
    return replace(trace, **taken)


def _own_rate_rps(trace: Workload, spec: TraceReplay) -> float:
    span_s = float(trace.arrived_at[-1] - trace.arrived_at[0])
    if span_s == 0.0:
        them = f"all {len(trace):,} requests arrive at the same time" if len(trace) > 1 else "has one request"
        problem = f"{them}, so there is no rate to change"
        raise InputError(
            "workload.trace", spec.path, problem, "leave out load and rate, or use another trace"
        )
    return (len(trace) - 1) / span_s


def _period_s(trace: Workload) -> float:
    """From one pass to the next: the span and one mean gap, which keeps the rate."""
    span_s = float(trace.arrived_at[-1] - trace.arrived_at[0])
    return span_s * len(trace) / max(len(trace) - 1, 1)


def _num_passes(
    trace: Workload, spec: TraceReplay, num_requests: int | None, duration_s: float | None
) -> int:
    num_passes = spec.repeat or MAX_REQUESTS
    if num_requests is not None:
        num_passes = min(num_passes, math.ceil(num_requests / len(trace)))
    period_s = _period_s(trace)
    if duration_s is not None and period_s > 0.0:
        num_passes = min(
            num_passes, max(math.ceil((duration_s - float(trace.arrived_at[0])) / period_s), 0) + 1
        )
    if num_passes * len(trace) > MAX_REQUESTS:
        problem = f"{num_passes} passes over {len(trace)} requests are more than {MAX_REQUESTS} requests"
        raise InputError(
            "workload.trace.repeat", spec.repeat, problem, "set workload.requests or fewer passes"
        )
    return num_passes


def repeated(trace: Workload, num_passes: int, num_rows: int) -> Workload:
    """Pass after pass, at its rate; `num_rows` of the source tell the requests of two passes apart."""
    pass_of = np.repeat(np.arange(num_passes), len(trace))
    session = np.tile(trace.session, num_passes)
    num_sessions = int(trace.session.max()) + 1
    session += np.where(session >= 0, pass_of * num_sessions, 0).astype(np.int32)
    shared: dict[str, Any] = {}
    if trace.is_shared:  # each pass is about something else
        num_links = len(trace.link_key)
        link_pass = np.repeat(np.arange(num_passes), num_links)
        shared = {
            "chain_start": np.tile(trace.chain_start, num_passes) + pass_of * num_links,
            "chain_length": np.tile(trace.chain_length, num_passes),
            "answer_key": np.tile(trace.answer_key, num_passes),
            "link_key": extend_keys(np.tile(trace.link_key, num_passes), link_pass),
            "link_tokens": np.tile(trace.link_tokens, num_passes),
        }
    return Workload(
        np.tile(trace.arrived_at, num_passes) + pass_of * _period_s(trace),
        np.tile(trace.num_prefill_tokens, num_passes),
        np.tile(trace.num_decode_tokens, num_passes),
        session,
        np.tile(trace.request_id, num_passes) + pass_of * num_rows,
        reading=trace.reading,
        **shared,
    )
