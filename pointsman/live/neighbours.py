"""What servers on one card cost each other, from the traffic that all of them served.

Every step reads weights from a memory that all share, so a step takes longer for each that a neighbour makes
meanwhile. How many those were follows from the pace of the neighbours' answers. Counted over the time that an
answer really took, they would explain all that made it slow: a slow answer has more of them beside it. So
they are counted over the time that the fit says it takes, and the fit is repeated until that is steady.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl
from numpy.typing import NDArray

from pointsman.live.least_squares import nonnegative

Floats = NDArray[np.float64]

GRID_S = 0.02
NUM_ROUNDS = 20
STRETCH_S = 5.0  # answers within one have the same neighbours: it is resampled as a whole
NUM_RESAMPLED = 40
SLOWEST = 0.1  # share of the time that is left for own steps, at least


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
        seconds = max(end - begin, GRID_S)
        low, high = np.searchsorted(grid, (begin, end))
        pace[low:high] += (num - 1) / seconds**2
        weight[low:high] += 1 / seconds  # a short answer says more about its own time
    paced = np.divide(pace, weight, out=np.zeros(len(grid)), where=weight > 0)
    return np.concatenate([[0.0], np.cumsum(paced) * GRID_S])


def fit_beside(table: Floats, pace: Floats, seconds: Floats) -> Floats:
    """[4] what a step, a prompt token, a stream and a neighbour's step cost.

    table [n, 3] as of `stream_table`, pace [n] of the neighbours, seconds [n]. An answer is a sum over its
    steps, so its variance grows with its length, and its error is weighed by the root of that.
    """
    found = np.append(nonnegative(table, seconds), 0.0)
    for _ in range(NUM_ROUNDS):
        said_s = said_beside(table, pace, found)
        weight = 1.0 / np.sqrt(np.maximum(said_s, 1e-3))
        full = np.column_stack([table, pace * said_s])
        found = nonnegative(full * weight[:, None], seconds * weight)
    return found


def said_beside(table: Floats, pace: Floats, cost: Floats) -> Floats:
    """[n] how long answers take with these costs."""
    said_s: Floats = table @ cost[:3] / np.maximum(1.0 - cost[3] * pace, SLOWEST)
    return said_s


def refitted(table: Floats, pace: Floats, seconds: Floats, first_at: Floats) -> Floats:
    """[NUM_RESAMPLED, 4] `fit_beside` of stretches of time that were drawn with replacement."""
    stretch = first_at // STRETCH_S
    parts = [np.flatnonzero(stretch == one) for one in np.unique(stretch)]
    rng = np.random.default_rng(0)
    found = []
    for _ in range(NUM_RESAMPLED):
        rows = np.concatenate([parts[k] for k in rng.integers(0, len(parts), len(parts))])
        found.append(fit_beside(table[rows], pace[rows], seconds[rows]))
    return np.array(found)
