"""Workloads made by hand, and patience."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from pointsman.workload import Workload
from pointsman.workload.workload import NO_SESSION


def workload(
    num_requests: int = 10,
    gap_s: float = 0.01,
    prompt: int | Sequence[int] = 20,
    output: int | Sequence[int] = 5,
    session: int = NO_SESSION,
) -> Workload:
    def column(value: int | Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        return np.resize(np.array(value, np.int32), num_requests)

    return Workload(
        arrived_at=np.arange(num_requests) * gap_s,
        num_prefill_tokens=column(prompt),
        num_decode_tokens=column(output),
        session=column(session),
        request_id=np.arange(num_requests),
    )


def wait_until(is_true: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + 30
    while not is_true():
        assert time.monotonic() < give_up_at
        time.sleep(0.01)
