"""The one entry: from the `workload:` section and a seed to the requests of a run.

Arrivals, bursts, lengths and sessions draw from streams of their own, so that another rate keeps the lengths.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.random import SeedSequence
from numpy.typing import NDArray

from pointsman.errors import InputError, PointsmanWarning
from pointsman.workload.arrivals import ArrivalSeeds, arrival_times, think_times
from pointsman.workload.lengths import draw_lengths
from pointsman.workload.prefixes import Sessions, without_long_links
from pointsman.workload.prefixes import draw_sessions as draw_sessions_with_prefixes
from pointsman.workload.replay import replay
from pointsman.workload.sessions import draw_sessions
from pointsman.workload.spec import (
    ClosedArrivals,
    Rated,
    TraceArrivals,
    TraceFile,
    TraceLengths,
    TraceReplay,
    WorkloadSpec,
)
from pointsman.workload.workload import NO_SESSION, Workload, clip_tokens

DEFAULT_NUM_REQUESTS = 20_000
HIGHEST_LOAD = 5.0  # beyond it, percent were meant
MAX_TIME_S = 1e10  # about 300 years: beyond, a clock in doubles cannot tell microseconds apart
Capacity = Callable[[], float]


def build_workload(
    spec: WorkloadSpec, seed: int, capacity_rps: Capacity | None = None, base_dir: Path | None = None
) -> Workload:
    """Same spec, seed and capacity: same bytes.

    `capacity_rps` gives the requests/s the cluster can serve; it is called only where the workload is given
    as a load. Relative trace paths start at `base_dir`.
    """
    if spec.trace is not None:
        workload = _replayed(spec, spec.trace, capacity_rps, base_dir)
        if spec.max_tokens is not None:
            clip_tokens(workload.num_prefill_tokens, workload.num_decode_tokens, spec.max_tokens)
            if workload.is_shared:
                workload = replace(workload, chain_length=without_long_links(workload))
        _check_times("workload.trace", workload.arrived_at)
        return workload
    seeds = _Seeds(seed)
    if spec.prefixes is not None:
        return _with_prefixes(spec, capacity_rps, base_dir, seeds)
    times, think_s = _times(spec, capacity_rps, base_dir, seeds)
    _check_times("workload.arrivals", np.concatenate((times, think_s)))
    num_requests = len(times)
    prefill, decode = _lengths(spec, num_requests, seeds, base_dir)
    return Workload(
        arrived_at=times,
        num_prefill_tokens=prefill,
        num_decode_tokens=decode,
        session=_sessions(spec, times, seeds),
        request_id=np.arange(num_requests),
        num_users=spec.arrivals.users if isinstance(spec.arrivals, ClosedArrivals) else 0,
        think_s=think_s,
    )


def sample_lengths(
    spec: WorkloadSpec, num_requests: int, seed: int, base_dir: Path | None = None
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Prompt and output lengths [N] alone, as a search for the capacity needs them.

    For a synthetic workload they are those of `build_workload`; rows of a trace are drawn with replacement.
    """
    return _lengths(spec, num_requests, _Seeds(seed), base_dir)


def _check_times(where: str, times_s: NDArray[np.float64]) -> None:
    last_s = float(times_s.max())
    if last_s > MAX_TIME_S:
        remedy = "check the unit of times and rates" if where != "workload.trace" else "set its time_unit"
        raise InputError(where, f"{last_s:.3g} s", "a request arrives after more than 300 years", remedy)


def _with_prefixes(
    spec: WorkloadSpec, capacity_rps: Capacity | None, base_dir: Path | None, seeds: _Seeds
) -> Workload:
    """Sessions arrive, and bring their requests. Without sessions every request is one."""
    assert spec.prefixes is not None
    if spec.prefixes.turns > 1.0:
        sessions = _draw_sessions(spec, spec.requests or DEFAULT_NUM_REQUESTS, seeds, base_dir)
        num_requests, num_sessions = len(sessions.session), sessions.num_sessions
        assert isinstance(spec.arrivals, Rated)
        rate_rps = _rate_rps(spec.arrivals, spec.arrivals.peak_share, True, True, capacity_rps)
        rate_rps *= num_sessions / num_requests
        times = arrival_times(spec.arrivals, rate_rps, num_sessions, None, seeds.arrivals)
        times = np.concatenate((times, np.full(num_requests - num_sessions, times[-1])))
        users: dict[str, Any] = {"think_s": sessions.think_s, "next_turn": sessions.next_turn}
    else:
        times, think_s = _times(spec, capacity_rps, base_dir, seeds)
        sessions = _draw_sessions(spec, len(times), seeds, base_dir)
        users = {"num_users": spec.arrivals.users if isinstance(spec.arrivals, ClosedArrivals) else 0}
        users["think_s"] = think_s
    _check_times("workload.arrivals", times)
    return Workload(
        arrived_at=times,
        num_prefill_tokens=sessions.num_prefill_tokens,
        num_decode_tokens=sessions.num_decode_tokens,
        session=sessions.session,
        request_id=np.arange(len(times)),
        **users,
        **vars(sessions.chains),
    )


def _draw_sessions(spec: WorkloadSpec, num_requests: int, seeds: _Seeds, base_dir: Path | None) -> Sessions:
    assert spec.prefixes is not None
    rng = np.random.default_rng(seeds.prefixes)
    return draw_sessions_with_prefixes(
        spec.prefixes, num_requests, lambda num: _added(spec, num, seeds, base_dir), rng
    )


class _Seeds:
    def __init__(self, seed: int) -> None:
        gaps, states, self.lengths, self.sessions, self.prefixes = SeedSequence(seed).spawn(5)
        self.arrivals = ArrivalSeeds(gaps, states)


def _replayed(
    spec: WorkloadSpec, trace: TraceReplay, capacity_rps: Capacity | None, base_dir: Path | None
) -> Workload:
    from pointsman.workload.readers import read_trace  # loads polars

    requests = read_trace(trace, base_dir, lifts_zeros=spec.max_tokens is not None)
    rate_rps = None
    if trace.load is not None or trace.rate is not None:
        rate_rps = _rate_rps(trace, 1.0, True, requests.is_shared, capacity_rps)
    workload = replay(requests, trace, rate_rps, spec.requests, spec.duration_s)
    is_whole = trace.part == (0.0, 1.0) and spec.duration_s is None
    if is_whole and spec.requests is not None and len(workload) < spec.requests:
        text = f"workload.requests = {spec.requests}: {trace.path} gives {len(workload)}; repeat: 0 loops it"
        warnings.warn(PointsmanWarning(text), stacklevel=3)
    return workload


def _times(
    spec: WorkloadSpec, capacity_rps: Capacity | None, base_dir: Path | None, seeds: _Seeds
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Arrival times, and the pauses of a closed loop (else empty)."""
    num_requests = spec.requests
    if num_requests is None and spec.duration_s is None:
        num_requests = DEFAULT_NUM_REQUESTS
    match spec.arrivals:
        case ClosedArrivals() as closed:
            assert num_requests is not None
            return np.zeros(num_requests), think_times(closed.think_s, num_requests, seeds.arrivals)
        case TraceArrivals() as trace:
            return _replayed(spec, trace, capacity_rps, base_dir).arrived_at, np.empty(0)
        case Rated() as rated:
            is_bounded = spec.requests is not None or spec.duration_s is not None
            is_shared = spec.prefixes is not None
            rate_rps = _rate_rps(rated, rated.peak_share, is_bounded, is_shared, capacity_rps)
            times = arrival_times(rated, rate_rps, num_requests, spec.duration_s, seeds.arrivals)
            return times, np.empty(0)
        case None:
            raise AssertionError("the spec has a trace or arrivals")


def _rate_rps(
    spec: Rated | TraceReplay,
    peak_share: float,
    is_bounded: bool,
    is_shared: bool,
    capacity_rps: Capacity | None,
) -> float:
    """`is_shared`: prompts have prefixes in common, and capacity is what there is with nothing cached."""
    if spec.rate is not None:
        return spec.rate
    assert spec.load is not None
    where = "workload.trace.load" if isinstance(spec, TraceReplay) else "workload.arrivals.load"
    if spec.load * peak_share > 1.0:
        if not is_bounded:
            remedy = "set workload.requests or workload.duration_s"
            raise InputError(where, spec.load, "a load above capacity with no end", remedy)
        if not is_shared:
            text = f"{where} = {spec.load:g}: above capacity, queues grow until the last arrival"
            text += f" ({spec.load:g} % would be {spec.load / 100:g})" if spec.load > HIGHEST_LOAD else ""
            warnings.warn(PointsmanWarning(text), stacklevel=4)
    if capacity_rps is None:
        remedy = "give rate in requests/s"
        raise InputError(where, spec.load, "the capacity of the cluster is not known here", remedy)
    capacity = capacity_rps()
    if not capacity > 0.0:
        remedy = "set workload.max_tokens, or take replicas with more memory"
        raise InputError(where, spec.load, "no replica can hold such long requests", remedy)
    return spec.load * capacity


def _lengths(
    spec: WorkloadSpec, num_requests: int, seeds: _Seeds, base_dir: Path | None
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    if spec.prefixes is None:
        return _added(spec, num_requests, seeds, base_dir)
    sessions = _draw_sessions(spec, num_requests, seeds, base_dir)
    return sessions.num_prefill_tokens, sessions.num_decode_tokens


def _added(
    spec: WorkloadSpec, num_requests: int, seeds: _Seeds, base_dir: Path | None
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Lengths [N] of prompts, without what they may share with others, and of outputs."""

    def read(file: TraceFile) -> Workload:
        from pointsman.workload.readers import read_trace

        return read_trace(file, base_dir, needs_times=False, lifts_zeros=spec.max_tokens is not None)

    lengths = spec.lengths
    if spec.trace is not None:
        shared = spec.trace.model_dump(include=set(TraceFile.model_fields))
        lengths = TraceLengths(**shared)
    assert lengths is not None
    prefill, decode = draw_lengths(lengths, num_requests, np.random.default_rng(seeds.lengths), read)
    if spec.max_tokens is not None:
        clip_tokens(prefill, decode, spec.max_tokens)
    return prefill, decode


def _sessions(spec: WorkloadSpec, times: NDArray[np.float64], seeds: _Seeds) -> NDArray[np.int32]:
    if spec.sessions is None:
        return np.full(len(times), NO_SESSION, dtype=np.int32)
    rate_rps = len(times) / max(float(times[-1]), 1e-9)
    num_active = max(1, min(round(rate_rps * spec.session_gap_s), len(times)))
    return draw_sessions(len(times), spec.sessions, num_active, np.random.default_rng(seeds.sessions))
