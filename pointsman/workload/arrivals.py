"""When requests come: arrival processes, all drawn in a few vectorised steps.

Each process is a renewal process of mean gap 1 in *operational time*, mapped to seconds through the inverse
of the cumulative rate. So the mean rate holds by construction, and the same gaps serve every rate.
Unlike Vidur's, the Poisson gaps are not clipped: Vidur cuts them at three mean gaps, which offers 5 % more
load than asked for and takes the quiet moments away.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.random import SeedSequence
from numpy.typing import NDArray

from pointsman.errors import InputError
from pointsman.workload.spec import (
    MAX_REQUESTS,
    DiurnalArrivals,
    GammaArrivals,
    MmppArrivals,
    RampArrivals,
    Rated,
)

Times = NDArray[np.float64]

# The diurnal rate is held constant within 1/4096 of a period: an exact Poisson process of a step-shaped rate.
_DIURNAL_STEPS = 4096


@dataclass(frozen=True)
class ArrivalSeeds:
    """Separate streams, so that drawing more gaps doesn't move the bursts."""

    gaps: SeedSequence
    states: SeedSequence


def arrival_times(
    spec: Rated, rate_rps: float, num_requests: int | None, duration_s: float | None, seeds: ArrivalSeeds
) -> Times:
    """Times [N] in s, ascending: the first `num_requests`, those up to `duration_s`, or what both allow."""
    if duration_s is None:
        assert num_requests is not None
        return _first_times(spec, rate_rps, num_requests, _ramp_length_s(spec, rate_rps, num_requests), seeds)
    times = _times_until(spec, rate_rps, duration_s, num_requests, seeds)
    if len(times) == 0:
        remedy = "make it longer, or raise workload.arrivals.load or rate"
        raise InputError("workload.duration_s", duration_s, "no request arrives in this time", remedy)
    return times


def think_times(mean_s: float, num_requests: int, seeds: ArrivalSeeds) -> Times:
    """Pauses [N] in s of the users of a closed loop, exponential."""
    pauses = np.random.default_rng(seeds.gaps).standard_exponential(num_requests)
    pauses *= mean_s
    return pauses


def _times_until(
    spec: Rated, rate_rps: float, duration_s: float, num_requests: int | None, seeds: ArrivalSeeds
) -> Times:
    expected = rate_rps * spec.peak_share * duration_s
    if num_requests is None and expected > MAX_REQUESTS:
        problem = f"about {expected:.3g} requests, more than {MAX_REQUESTS}"
        raise InputError(
            "workload.duration_s", duration_s, problem, "make it shorter, or set workload.requests"
        )
    limit = MAX_REQUESTS if num_requests is None else num_requests
    num_drawn = math.ceil(min(expected + 6 * math.sqrt(expected) + 16, limit))
    while True:
        times = _first_times(spec, rate_rps, num_drawn, duration_s, seeds)
        if times[-1] > duration_s or num_drawn == limit:
            return times[: np.searchsorted(times, duration_s, side="right")]
        num_drawn = min(2 * num_drawn, limit)


def _first_times(
    spec: Rated, rate_rps: float, num_requests: int, ramp_length_s: float, seeds: ArrivalSeeds
) -> Times:
    operational = _operational_times(spec, num_requests, np.random.default_rng(seeds.gaps))
    match spec:
        case MmppArrivals():
            return _through_bursts(spec, operational, rate_rps, seeds.states)
        case DiurnalArrivals():
            return _through_days(spec, operational, rate_rps)
        case RampArrivals():
            return _up_the_ramp(spec, operational, rate_rps, ramp_length_s)
        case _:
            operational /= rate_rps
            return operational


def _operational_times(spec: Rated, num_requests: int, rng: np.random.Generator) -> Times:
    if not isinstance(spec, GammaArrivals):
        gaps = rng.standard_exponential(num_requests)
    elif spec.cv == 0:
        gaps = np.ones(num_requests)
    else:
        variance = spec.cv * spec.cv
        gaps = rng.standard_gamma(1.0 / variance, num_requests)
        gaps *= variance
    return np.cumsum(gaps, out=gaps)


def _through_bursts(spec: MmppArrivals, operational: Times, rate_rps: float, seed: SeedSequence) -> Times:
    """Two-state Markov-modulated Poisson process, started in its stationary state."""
    cycle_s = spec.burst_s + spec.calm_s
    calm_rps = rate_rps * cycle_s / (spec.calm_s + spec.burst_factor * spec.burst_s)
    num_cycles = math.ceil(operational[-1] / (rate_rps * cycle_s)) + 16
    while True:
        rng = np.random.default_rng(seed)
        starts_in_burst = rng.random() < spec.burst_s / cycle_s
        order = slice(None, None, -1) if starts_in_burst else slice(None)
        stays_s = rng.standard_exponential((num_cycles, 2)) * np.array([spec.calm_s, spec.burst_s])[order]
        arrivals = stays_s * np.array([calm_rps, spec.burst_factor * calm_rps])[order]
        knots_operational = np.concatenate(([0.0], np.cumsum(arrivals)))
        if knots_operational[-1] >= operational[-1]:
            return np.interp(operational, knots_operational, np.concatenate(([0.0], np.cumsum(stays_s))))
        num_cycles *= 2


def _through_days(spec: DiurnalArrivals, operational: Times, rate_rps: float) -> Times:
    day = np.linspace(0.0, 1.0, _DIURNAL_STEPS + 1)
    arrivals = day + spec.amplitude * (1.0 - np.cos(2.0 * np.pi * day)) / (2.0 * np.pi)
    operational /= rate_rps * spec.period_s
    whole_days = np.floor(operational)
    operational -= whole_days
    times = np.interp(operational, arrivals, day)
    times += whole_days
    times *= spec.period_s
    return times


def _up_the_ramp(spec: RampArrivals, operational: Times, rate_rps: float, length_s: float) -> Times:
    """Invert start*t + (end - start)*t^2 / (2*length) up to `length_s`; the end rate holds from there on."""
    operational /= rate_rps
    total = length_s * (spec.start + spec.end) / 2.0
    on_ramp = np.minimum(operational, total)
    slope = (spec.end - spec.start) / length_s
    # Rounding may take the root below 0 at the very end of a falling ramp.
    root = np.sqrt(np.maximum(spec.start * spec.start + 2.0 * slope * on_ramp, 0.0))
    times = 2.0 * on_ramp / (spec.start + root)
    times += (operational - on_ramp) / spec.end
    return times


def _ramp_length_s(spec: Rated, rate_rps: float, num_requests: int) -> float:
    return num_requests / (rate_rps * spec.mean_share)
