from __future__ import annotations

import numpy as np
import pytest

from pointsman.workload.sessions import draw_sessions


def slow_twin(num_requests: int, mean_requests: float, num_active: int, seed: int) -> list[tuple[int, int]]:
    """(slot, how many sessions the slot had before), one request after the other."""
    rng = np.random.default_rng(seed)
    slots = rng.integers(num_active, size=num_requests, dtype=np.int32)
    is_last = rng.random(num_requests) < 1.0 / mean_requests
    ages = [0] * num_active
    sessions = []
    for slot, last in zip(slots.tolist(), is_last.tolist(), strict=True):
        sessions.append((slot, ages[slot]))
        ages[slot] += last
    return sessions


def test_sessions_are_those_of_the_slow_twin() -> None:
    sessions = draw_sessions(2_000, 4.0, 10, np.random.default_rng(7)).tolist()
    twin = slow_twin(2_000, 4.0, 10, seed=7)
    assert len(set(zip(sessions, twin, strict=True))) == len(set(twin)) == len(set(sessions))
    assert set(sessions) == set(range(max(sessions) + 1))


def test_mean_size() -> None:
    session = draw_sessions(200_000, 5.0, 50, np.random.default_rng(0))
    assert np.bincount(session).mean() == pytest.approx(5.0, rel=0.03)


def test_sessions_of_one_request() -> None:
    session = draw_sessions(1_000, 1.0, 8, np.random.default_rng(0))
    assert np.array_equal(np.sort(session), np.arange(1_000))
