"""How long a run must be to judge a rate of arrivals by, and which part of it counts.

A cluster begins empty, and what exceeds its capacity by a hundredth takes minutes to show, so a run that is
short flatters. Its length follows from what fluctuates: queues need 1/(1 - load)² arrivals or so to forget
what they were like, a burst or a day must be there several times or as a whole, and sessions must have lived
out their lives. The first part fills the cluster and does not count. Of a trace the last pass counts.

What is in time may still pile up where the limits are wide: `growth` says how much.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from pointsman.workload import WorkloadSpec
from pointsman.workload.build import DEFAULT_NUM_REQUESTS
from pointsman.workload.spec import DiurnalArrivals, GammaArrivals, MmppArrivals, RampArrivals

FEWEST_REQUESTS, SHORTEST_S = 40_000, 240.0  # of a run
WARM_UP = 0.2  # of it
RELAXATIONS = 20.0  # times 1/(1 - load)² arrivals
BURSTS = 20  # cycles of burst and calm
LIVES = 10.0  # of a session

GROWING = 0.01  # of the arrivals, which nobody serves: the rate is too high for a hundredth
NOISE = 3.0  # standard deviations of how many requests are there


class Stretch(NamedTuple):
    """Seconds from the first arrival on: until when the cluster fills, and until when requests arrive."""

    warm_up_s: float
    end_s: float

    @property
    def is_steady(self) -> bool:
        """A ramp has no part that is like another."""
        return self.warm_up_s > 0


def num_needed(rate_rps: float, load: float) -> float:
    """Arrivals in a run; `load` 0 where nobody knows how much of the capacity this is."""
    relaxing = RELAXATIONS / (1 - load) ** 2 if load < 1 else 0.0
    return max(FEWEST_REQUESTS, SHORTEST_S * rate_rps, relaxing)


def stretch_of(spec: WorkloadSpec, rate_rps: float, load: float, own_rate_rps: float) -> Stretch:
    """How long made-up traffic must go on; at least as long as the file asks for."""
    arrivals = spec.arrivals
    own = spec.requests or (spec.duration_s or 0.0) * own_rate_rps
    if isinstance(arrivals, RampArrivals):  # it rises once, over whatever the file says
        return Stretch(0.0, spec.duration_s or (own or DEFAULT_NUM_REQUESTS) / rate_rps)
    spread = (1 + arrivals.cv**2) / 2 if isinstance(arrivals, GammaArrivals) else 1.0
    needed_s = num_needed(rate_rps, load) * max(spread, 1.0) / rate_rps
    needed_s = max(needed_s, own / max(rate_rps, own_rate_rps))
    if isinstance(arrivals, MmppArrivals):
        needed_s = max(needed_s, BURSTS * (arrivals.burst_s + arrivals.calm_s))
    if spec.prefixes is not None:
        needed_s = max(needed_s, LIVES * (spec.prefixes.turns - 1) * spec.prefixes.think_s)
    warm_up_s = WARM_UP * needed_s
    if isinstance(arrivals, DiurnalArrivals):
        num_days = max(1, round((needed_s - warm_up_s) / arrivals.period_s))
        return Stretch(warm_up_s, warm_up_s + num_days * arrivals.period_s)
    return Stretch(warm_up_s, needed_s)


def growth(requests: Any, from_s: float, to_s: float) -> float:
    """How many more requests were there at the end, beyond chance, as a share of those that arrived."""
    done = requests[requests["completed_at"] >= 0]
    arrived, left = np.sort(done["arrived_at"]), np.sort(done["completed_at"])
    num_arrived = np.searchsorted(arrived, (from_s, to_s), side="right")
    num_there = num_arrived - np.searchsorted(left, (from_s, to_s), side="right")
    by_chance = NOISE * np.sqrt(max(num_there[0], 1))
    grown = float(num_there[1] - num_there[0] - by_chance)
    return max(grown, 0.0) / max(float(num_arrived[1] - num_arrived[0]), 1.0)
