"""One row a request, times as the shortest decimal that is exactly the double."""

from __future__ import annotations

from typing import IO, Any

import numpy as np

COLUMNS = (
    ("replica_id", "replica"),
    ("num_prefill_tokens", "num_prefill"),
    ("num_decode_tokens", "num_decode"),
    ("arrived_at", "arrived_at"),
    ("scheduled_at", "scheduled_at"),
    ("first_token_at", "first_token_at"),
    ("completed_at", "completed_at"),
    ("num_restarts", "restarts"),
    ("num_cached_tokens", "hit_tokens"),
)
ROWS_AT_ONCE = 65_536


def write_requests(file: IO[str], requests: Any, request_id: Any) -> None:
    """`requests` [N] REQUEST, `request_id` [N]; in order of id. What never happened is an empty cell.

    Python writes the numbers: Polars, too, writes shortest decimals, but 1e-05 as 0.00001.
    """
    file.write(",".join(["request_id", *(name for name, _ in COLUMNS)]) + "\n")
    order = np.argsort(request_id, kind="stable")
    for start in range(0, len(order), ROWS_AT_ONCE):
        rows = order[start : start + ROWS_AT_ONCE]
        cells = [map(str, request_id[rows].tolist())]
        cells += [_cells(requests[field][rows]) for _, field in COLUMNS]
        file.writelines(",".join(row) + "\n" for row in zip(*cells, strict=True))


def _cells(values: Any) -> Any:
    """Times and replicas are never negative: -1 stands for what has not come."""
    if values.min() >= 0:
        return map(repr, values.tolist())
    return ("" if value < 0 else repr(value) for value in values.tolist())
