"""The requests of one run, as flat arrays: ten million of them take 280 MB and no Python objects."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pointsman.workload.reading import TraceReading

NO_SESSION = -1


def _none(dtype: Any) -> NDArray[Any]:
    return np.empty(0, dtype)


@dataclass(frozen=True)
class Workload:
    """N requests in the order of their arrival.

    Open loop (`num_users` = 0): request i arrives at `arrived_at[i]`, whatever the cluster does. Closed loop
    (`num_users` > 0): a free user sends the next request i, `think_s[i]` after its last one finished; the
    first `num_users` requests start at `think_s[i]` after time 0. `arrived_at` is all zeros. Sessions
    (`next_turn` is there): request `next_turn[i]` arrives `think_s` of its own after request i finished.
    Later turns stand behind all first ones; their `arrived_at` is that of the last of those.

    A prompt is a path in a tree of prefixes. The links of request i are rows `chain_start[i]` to
    `chain_start[i] + chain_length[i] - 1` of `link_key` and `link_tokens`, shortest prefix first; they cover
    what others may have in common with it, the rest of the prompt is its own. Where a later request continues
    its answer, `answer_key` is the key of the link that ends with the answer, which the chain of that request
    contains.
    """

    arrived_at: NDArray[np.float64]  # [N] s, non-decreasing
    num_prefill_tokens: NDArray[np.int32]  # [N], at least 1
    num_decode_tokens: NDArray[np.int32]  # [N], at least 1
    session: NDArray[np.int32]  # [N], dense from 0, -1 = none
    request_id: NDArray[np.int64]  # [N] row in the source; pass k over a trace of n rows adds k * n
    num_users: int = 0
    think_s: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))  # [N] if closed loop, else [0]
    reading: TraceReading | None = None  # of the file that the times are from
    next_turn: NDArray[np.int32] = field(
        default_factory=lambda: _none(np.int32)
    )  # [N] row, -1 = none; or [0]
    # [N], or [0] if no request shares anything.
    chain_start: NDArray[np.int64] = field(default_factory=lambda: _none(np.int64))
    chain_length: NDArray[np.int32] = field(default_factory=lambda: _none(np.int32))
    answer_key: NDArray[np.int64] = field(default_factory=lambda: _none(np.int64))  # 0 = nobody continues it
    # [L]
    link_key: NDArray[np.int64] = field(default_factory=lambda: _none(np.int64))  # of the whole prefix, not 0
    link_tokens: NDArray[np.int32] = field(default_factory=lambda: _none(np.int32))  # of the whole prefix

    def __post_init__(self) -> None:
        num_requests = len(self.arrived_at)
        num_thinks = num_requests if self.num_users or len(self.next_turn) else 0
        num_chains = num_requests if len(self.chain_start) else 0
        for name, length in (
            ("num_prefill_tokens", num_requests),
            ("num_decode_tokens", num_requests),
            ("session", num_requests),
            ("request_id", num_requests),
            ("think_s", num_thinks),
            ("next_turn", len(self.next_turn) and num_requests),
            ("chain_start", num_chains),
            ("chain_length", num_chains),
            ("answer_key", num_chains),
            ("link_tokens", len(self.link_key)),
        ):
            assert getattr(self, name).shape == (length,), name

    def __len__(self) -> int:
        return len(self.arrived_at)

    @property
    def is_shared(self) -> bool:
        """Whether prompts have prefixes in common."""
        return len(self.link_key) > 0

    @property
    def num_later_turns(self) -> int:
        return int(np.count_nonzero(self.next_turn >= 0))


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
