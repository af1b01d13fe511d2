"""The requests of one run, as flat arrays: ten million of them take 280 MB and no Python objects."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pointsman.workload.reading import TraceReading

NO_SESSION = -1


@dataclass(frozen=True)
class Workload:
    """N requests in the order of their arrival.

    Open loop (`num_users` = 0): request i arrives at `arrived_at[i]`, whatever the cluster does.
    Closed loop (`num_users` > 0): a free user sends the next request i, `think_s[i]` after its last one
    finished; the first `num_users` requests start at `think_s[i]` after time 0. `arrived_at` is all zeros.
    """

    arrived_at: NDArray[np.float64]  # [N] s, non-decreasing
    num_prefill_tokens: NDArray[np.int32]  # [N], at least 1
    num_decode_tokens: NDArray[np.int32]  # [N], at least 1
    session: NDArray[np.int32]  # [N], dense from 0, -1 = none
    request_id: NDArray[np.int64]  # [N] row in the source; pass k over a trace of n rows adds k * n
    num_users: int = 0
    think_s: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))  # [N] if closed loop, else [0]
    reading: TraceReading | None = None  # of the file that the times are from

    def __post_init__(self) -> None:
        num_requests = len(self.arrived_at)
        num_thinks = num_requests if self.num_users else 0
        for name, length in (
            ("num_prefill_tokens", num_requests),
            ("num_decode_tokens", num_requests),
            ("session", num_requests),
            ("request_id", num_requests),
            ("think_s", num_thinks),
        ):
            assert getattr(self, name).shape == (length,), name

    def __len__(self) -> int:
        return len(self.arrived_at)


def clip_tokens(
    num_prefill_tokens: NDArray[np.int32], num_decode_tokens: NDArray[np.int32], max_tokens: int
) -> None:
    """Bound prompt + output by `max_tokens`, in place, as Vidur replays a trace: the prompt pays.

    Vidur leaves an empty or negative prompt where the output alone reaches `max_tokens`; here the output
    gives way to a prompt of one token.
    """
    np.clip(num_decode_tokens, 1, max_tokens - 1, out=num_decode_tokens)
    np.minimum(num_prefill_tokens, max_tokens - num_decode_tokens, out=num_prefill_tokens)
    np.maximum(num_prefill_tokens, 1, out=num_prefill_tokens)
