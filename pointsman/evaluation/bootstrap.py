"""How sure a comparison is: paired bootstrap intervals over seeds.

All policies serve the same arrivals, so one seed is one paired observation. Seeds are drawn with replacement,
always the same for both sides of a ratio, and the ratio of the means is computed again; its percentiles are
the interval. Plain percentiles are too narrow with few seeds (8 seeds cover 89 %, not 95 %), so the tails
follow Hesterberg's expanded percentile interval ("What Teachers Should Know about the Bootstrap", 2014): for
the mean of normal values it is as wide as Student's t interval. No bootstrap reaches beyond the values seen:
with fewer than 6 seeds even the widest interval covers less than 95 %.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

LEVEL = 0.95
NUM_RESAMPLES = 10_000
MIN_SEEDS = 6  # below, no interval reaches LEVEL: 1 - 2 / 2**n
METHOD = "paired bootstrap, expanded percentile interval"
_SEED = 20140804  # of the resampling: a constant, so that a comparison is a function of its runs

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Ratio:
    """A mean over that of the baseline; NaN where it cannot be said (baseline 0, interval of one seed)."""

    ratio: float
    low: float
    high: float


def paired_ratios(values: Floats, baseline: Floats) -> list[Ratio]:
    """For each of M metrics: mean of `values` [S, M] over mean of `baseline` [S, M], with its interval."""
    return with_intervals(ratios_of_means(values, baseline), resampled_ratios(values, baseline), len(values))


def ratios_of_means(values: Floats, baseline: Floats) -> Floats:
    return _ratios(values.mean(axis=0), baseline.mean(axis=0))


def resampled_ratios(values: Floats, baseline: Floats) -> Floats:
    """The same [NUM_RESAMPLES, M] for seeds drawn with replacement."""
    # Not `@`: the last digits of BLAS depend on the shape and on the number of threads.
    sums = [np.einsum("bs,sm->bm", resamples(len(side)), side) for side in (values, baseline)]
    return _ratios(*sums)


def with_intervals(ratios: Floats, samples: Floats, num_seeds: int) -> list[Ratio]:
    """`ratios` [M] and `samples` [NUM_RESAMPLES, M] of them, from `num_seeds` seeds."""
    ordered = np.sort(samples, axis=0)  # NaN last
    num_left_out = int(expanded_tail(num_seeds) * NUM_RESAMPLES) if num_seeds > 1 else 0
    is_known = ~np.isnan(ordered[-1]) & (num_seeds > 1)
    low, high = np.where(is_known, ordered[[num_left_out, -1 - num_left_out]], np.nan)
    return [Ratio(*map(float, row)) for row in zip(ratios, low, high, strict=True)]


def _ratios(values: Floats, baseline: Floats) -> Floats:
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = values / baseline
    return np.where(np.isfinite(ratios), ratios, np.nan)


@cache
def resamples(num_seeds: int) -> Floats:
    """How often each seed is drawn [NUM_RESAMPLES, S]. The same for every metric, policy and scenario."""
    rng = np.random.default_rng([_SEED, num_seeds])
    drawn = rng.multinomial(num_seeds, np.full(num_seeds, 1.0 / num_seeds), size=NUM_RESAMPLES)
    return drawn.astype(np.float64)


@cache
def expanded_tail(num_seeds: int, level: float = LEVEL) -> float:
    """Share of the resamples to leave out at each end."""
    t = student_t_quantile(0.5 + level / 2, num_seeds - 1)
    return NormalDist().cdf(-math.sqrt(num_seeds / (num_seeds - 1)) * t)


def student_t_quantile(probability: float, dof: int) -> float:
    """For a probability above 0.5, by bisection: scipy would make `compare` need 140 MB more."""
    low, high = 0.0, 1.0
    while _student_t_cdf(high, dof) < probability:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _student_t_cdf(middle, dof) < probability else (low, middle)
    return high


def _student_t_cdf(t: float, dof: int) -> float:
    """Abramowitz and Stegun, 26.7.3 and 26.7.4: a finite sum for whole degrees of freedom."""
    angle = math.atan(t / math.sqrt(dof))
    sine, cosine = math.sin(angle), math.cos(angle)
    is_odd = dof % 2
    term = cosine if is_odd else 1.0
    total = term if dof > 1 else 0.0
    for k in range(2 + is_odd, dof - 1, 2):
        term *= (k - 1) / k * cosine**2
        total += term
    within = 2 / math.pi * (angle + sine * total) if is_odd else sine * total
    return 0.5 + within / 2
