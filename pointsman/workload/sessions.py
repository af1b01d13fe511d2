"""Which requests belong together: sessions for workloads that don't come from a trace."""

from __future__ import annotations

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray


def draw_sessions(
    num_requests: int, mean_requests: float, num_active: int, rng: Generator
) -> NDArray[np.int32]:
    """Session [N] of each request, numbered from 0 by slot and age.

    `num_active` sessions are open at any time. A request belongs to one of them at random, and is its last
    with probability 1 / `mean_requests`; a new session then takes its slot. So sizes are geometric.
    """
    slot = rng.integers(num_active, size=num_requests, dtype=np.int32)
    is_last = rng.random(num_requests) < 1.0 / mean_requests
    order = np.argsort(slot, kind="stable")
    # In slot order, a session begins at a new slot and after every last request.
    begins = np.empty(num_requests, dtype=bool)
    begins[0] = True
    begins[1:] = is_last[order][:-1] | (np.diff(slot[order]) != 0)
    session = np.empty(num_requests, dtype=np.int32)
    session[order] = np.cumsum(begins, dtype=np.int32) - 1
    return session
