"""What servers on one card cost each other, from the traffic that all of them served.

Every step reads weights from a memory that all share, so a step takes longer for each that a neighbour makes
meanwhile. How many those were follows from the pace of the neighbours' answers. Counted over the time that an
answer really took, they would explain everything that made it slow: a slow answer has more of them beside it.
So they are counted over the time that the fit says it takes, and the fit is repeated until that is steady.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl
from numpy.typing import NDArray

from pointsman.live.least_squares import nonnegative

Floats = NDArray[np.float64]

MIN_OUTPUT = 8  # tokens of an answer that tells a pace
GRID_S = 0.02
NUM_ROUNDS = 20


def pace_beside(rows: pl.DataFrame, neighbours: Sequence[pl.DataFrame]) -> Floats:
    """How many steps a second all neighbours together made during each answer of `rows`."""
    first, last = (rows[name].to_numpy() for name in ("first_token_at", "completed_at"))
    grid = np.arange(first.min(), last.max() + GRID_S, GRID_S)
    steps = sum((_steps_until(other, grid) for other in neighbours), np.zeros(len(grid) + 1))
    low, high = np.searchsorted(grid, first), np.searchsorted(grid, last)
    found: Floats = (steps[high] - steps[low]) / np.maximum(last - first, GRID_S)
    return found


def _steps_until(rows: pl.DataFrame, grid: Floats) -> Floats:
    """[cells + 1] how many steps a server had made, by the pace of the answers that were streaming."""
    first, last, tokens = (
        rows[name].to_numpy() for name in ("first_token_at", "completed_at", "num_decode_tokens")
    )
    pace, weight = np.zeros(len(grid)), np.zeros(len(grid))
    for begin, end, num in zip(first, last, tokens, strict=True):
        if num >= MIN_OUTPUT and end > begin:
            low, high = np.searchsorted(grid, (begin, end))
            pace[low:high] += (num - 1) / (end - begin) ** 2
            weight[low:high] += 1 / (end - begin)  # a short answer says more about its own time
    paced = np.divide(pace, weight, out=np.zeros(len(grid)), where=weight > 0)
    return np.concatenate([[0.0], np.cumsum(paced) * GRID_S])


def fit_beside(table: Floats, pace: Floats, seconds: Floats, weight: Floats) -> Floats:
    """[4] what a step, a prompt token, a stream and a neighbour's step cost; `table` as of `stream_table`."""
    found = np.append(nonnegative(table * weight[:, None], seconds * weight), 0.0)
    for _ in range(NUM_ROUNDS):
        said_s = table @ found[:3] / np.maximum(1.0 - found[3] * pace, 0.1)
        full = np.column_stack([table, pace * said_s])
        found = nonnegative(full * weight[:, None], seconds * weight)
    return found
