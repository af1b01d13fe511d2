"""What mattered of several settings that were varied at once: how much of the scores each explains.

A score is taken to be a sum of one curve a setting. What the sum explains is measured on points that it was
not fitted to, by leaving out one at a time: a setting that only fits luck explains nothing, and with few
points nearly everything is luck. A setting's share is what the sum explains less without it.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

MIN_POINTS = 5
SHRINKAGE = 1.0  # every coefficient is pulled to zero as if by one more point


def explained_shares(settings: Mapping[str, Floats], scores: Floats) -> dict[str, float]:
    """The share of the variance of scores [V] that each setting [V, C] explains; none of too few points."""
    if len(scores) < MIN_POINTS:
        return {}
    missed_by_mean = missed_squares([], scores)
    missed = missed_squares(list(settings.values()), scores)
    shares = {}
    for name in settings:
        without = missed_squares([columns for other, columns in settings.items() if other != name], scores)
        shares[name] = float(np.clip((min(without, missed_by_mean) - missed) / missed_by_mean, 0.0, 1.0))
    return shares


def missed_squares(settings: list[Floats], scores: Floats) -> float:
    """The sum of squared errors at points that were left out, by a ridge regression on all columns."""
    ones = np.ones((len(scores), 1))
    columns = np.hstack([ones[:, :0], *settings])
    spread = columns.std(axis=0)
    columns = (columns - columns.mean(axis=0))[:, spread > 0] / spread[spread > 0]
    design = np.hstack([ones, columns])
    pull = SHRINKAGE * np.eye(design.shape[1])
    pull[0, 0] = 0.0
    hat = design @ np.linalg.solve(design.T @ design + pull, design.T)
    # Leaving a point out changes its error by a known factor: no need to fit again.
    errors = (scores - hat @ scores) / (1.0 - np.diag(hat))
    return float((errors**2).sum())
