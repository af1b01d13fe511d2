"""Least squares with nothing below 0: times that add up cannot be negative."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def nonnegative(table: Floats, values: Floats) -> Floats:
    """The x >= 0 with the least |table @ x - values| (Lawson and Hanson's active sets)."""
    scale = np.maximum(np.linalg.norm(table, axis=0), 1e-300)
    scaled = table / scale
    num_columns = table.shape[1]
    found, is_free = np.zeros(num_columns), np.zeros(num_columns, bool)
    for _ in range(3 * num_columns):
        gradient = scaled.T @ (values - scaled @ found)
        gradient[is_free] = -math.inf
        if gradient.max() <= 1e-10:
            break
        is_free[int(gradient.argmax())] = True
        while True:
            trial = np.zeros(num_columns)
            trial[is_free] = np.linalg.lstsq(scaled[:, is_free], values, rcond=None)[0]
            if trial[is_free].min() > 0:
                break
            falls = is_free & (trial <= 0)
            step = np.min(found[falls] / np.maximum(found[falls] - trial[falls], 1e-300))
            found = found + step * (trial - found)
            is_free &= found > 1e-14
            if not is_free.any():
                trial = found
                break
        found = trial
    unscaled: Floats = found / scale
    return unscaled
