from __future__ import annotations

import io
import time

import numpy as np

from pointsman.report.requests import write_requests
from pointsman.simulator.state import REQUEST


def written(requests: np.ndarray, request_id: np.ndarray) -> list[str]:
    file = io.StringIO()
    write_requests(file, requests, request_id)
    return file.getvalue().splitlines()


def test_times_are_shortest_exact_decimals() -> None:
    times = [0.0, 1e-05, 130.87382949619976, 0.1 + 0.2, 1 / 3, 1e16, 5e-324]
    requests = np.zeros(len(times), REQUEST)
    requests["completed_at"] = times
    cells = [line.split(",")[7] for line in written(requests, np.arange(len(times)))[1:]]
    assert cells == [
        "0.0",
        "1e-05",
        "130.87382949619976",
        "0.30000000000000004",
        "0.3333333333333333",
        "1e+16",
        "5e-324",
    ]
    assert [float(cell) for cell in cells] == times


def test_what_never_happened_is_empty() -> None:
    requests = np.zeros(2, REQUEST)
    requests["arrived_at"] = (0.5, 0.25)
    requests["replica"] = (-1, 3)
    requests["hit_tokens"] = (0, 16)
    for column in ("scheduled_at", "first_token_at", "completed_at"):
        requests[column] = (-1.0, 7.0)
    lines = written(requests, np.array([1, 0]))
    assert lines[1:] == ["0,3,0,0,0.25,7.0,7.0,7.0,0,16", "1,,0,0,0.5,,,,0,0"]


def test_order_of_ids_over_many_chunks() -> None:
    num = 200_000
    requests = np.zeros(num, REQUEST)
    request_id = np.random.default_rng(0).permutation(num)
    requests["num_prefill"] = request_id
    started = time.perf_counter()
    lines = written(requests, request_id)
    assert time.perf_counter() - started < 20, "a million rows in a minute, at the very least"
    assert [line.split(",")[0] for line in lines[1:]] == [str(i) for i in range(num)]
    assert all(line.split(",")[0] == line.split(",")[2] for line in lines[1:1000])
