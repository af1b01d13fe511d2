"""When an episode has gone so bad that it is ended: limits on queues and latencies, absolute and relative.

An early end costs `bad_end_s` seconds of the present excess, so that it never pays, and is counted by the
limit that was passed: columns `ended/<limit>` (of an update) and `safety/<limit>` (so far).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from pointsman.spec import Spec

NUM_RECENT = 500  # first tokens that a P99 is taken of
MIN_RECENT = 100

Bools = NDArray[np.bool_]
Array = NDArray[np.float64]


class LimitSpec(Spec):
    """Each is off where it is null."""

    overhang: float | None = Field(
        default=200.0, gt=0, description="requests a replica in the system above the shadow's"
    )
    queue: float | None = Field(default=None, gt=0, description="requests a replica in the system")
    wait_s: float | None = Field(default=None, gt=0, description="age of a request without a first token [s]")
    ttft_p99_s: float | None = Field(
        default=None, gt=0, description=f"P99 of the TTFT of the last {NUM_RECENT} requests [s]"
    )
    ttft_p99_ratio: float | None = Field(
        default=None, gt=1, description="the same, as a multiple of the shadow's on the same requests"
    )
    imbalance_cv: float | None = Field(
        default=None,
        gt=0,
        description="standard deviation over mean of the outstanding requests, mean so far",
    )
    bad_end_s: float = Field(
        default=20.0, ge=0, description="an early end costs as much as this long at the same excess"
    )

    @property
    def needs_requests(self) -> bool:
        return self.ttft_p99_s is not None or self.ttft_p99_ratio is not None


def passed(spec: LimitSpec, values: Mapping[str, Callable[[], Array]]) -> dict[str, Bools]:
    """Say which environments [N] are beyond each limit now; only values that have a limit are asked for."""
    limits = {name: getattr(spec, name) for name in values}
    return {name: values[name]() > limit for name, limit in limits.items() if limit is not None}


def ttft_p99_passed(spec: LimitSpec, own: Any, shadow: Any) -> list[str]:
    """The same of one environment's last first tokens; own and shadow are REQUEST of the same arrivals."""
    started = np.flatnonzero(own["first_token_at"] >= 0)[-NUM_RECENT:]
    if len(started) < MIN_RECENT:
        return []
    p99_s = _p99_s(own[started])
    beyond = []
    if spec.ttft_p99_s is not None and p99_s > spec.ttft_p99_s:
        beyond.append("ttft_p99_s")
    theirs = shadow[started]
    theirs = theirs[theirs["first_token_at"] >= 0]
    ratio = spec.ttft_p99_ratio
    if ratio is not None and len(theirs) >= MIN_RECENT and p99_s > ratio * _p99_s(theirs):
        beyond.append("ttft_p99_ratio")
    return beyond


def _p99_s(requests: Any) -> float:
    return float(np.percentile(requests["first_token_at"] - requests["arrived_at"], 99))
