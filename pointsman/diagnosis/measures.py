"""What rules measure on curves: how the score went, how noisy it is, what rose, and since when."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pointsman.diagnosis.curves import Array, RunLog, Series

MIN_SCORES = 4  # fewer say nothing about a trend
MANY_SCORES = 8  # fewer do not tell a score that stays where it was from noise
LOST = 0.25  # of what was gained: more is a fall
SLIGHTLY_LOST, MOSTLY_LOST = 0.1, 0.5
BEHIND = 0.1  # of what was gained, below the baseline
SIGNIFICANT = 3.0  # times the noise
LARGE_KL = 0.05  # of an update [nats]; usual targets are 0.01 to 0.03
LARGE_MAX_KL = 0.15  # of a single minibatch
SPIKE_KL = 0.02  # if it is so much for this run:
SPIKE = 5.0  # times the median
COLLAPSED = 0.05  # entropy, of that of uniform actions


def running_median(y: Array, window: int) -> Array:
    """The median of each value and the ones before it."""
    return np.array([np.median(y[max(0, i - window + 1) : i + 1]) for i in range(len(y))])


def noise(y: Array) -> float:
    """Standard deviation about the trend: how far values lie off the middle of their neighbours."""
    settled = y[len(y) // 4 :]
    off = settled[1:-1] - (settled[:-2] + settled[2:]) / 2
    return float(1.4826 * np.median(np.abs(off)) / np.sqrt(1.5)) if len(off) else 0.0


def rise(series: Series) -> float:
    """How much the last third lies above the first, in standard errors of that difference."""
    third = len(series) // 3
    if third < 2:
        return 0.0
    first, last = series.y[:third], series.y[-third:]
    error = np.sqrt((first.var(ddof=1) + last.var(ddof=1)) / third)
    difference = float(last.mean() - first.mean())
    if error == 0.0:
        return 0.0 if difference == 0.0 else float(np.sign(difference)) * np.inf
    return float(difference / error)


def since(series: Series, holds: NDArray[np.bool_]) -> float | None:
    """Where a condition begins that holds to the end; None if it does not hold there."""
    if not len(holds) or not holds[-1]:
        return None
    broken = np.flatnonzero(~holds)
    return float(series.x[broken[-1] + 1 if len(broken) else 0])


def first_x(series: Series, holds: NDArray[np.bool_]) -> float | None:
    """Where a condition holds for the first time."""
    return float(series.x[int(np.argmax(holds))]) if holds.any() else None


@dataclass(frozen=True)
class Fall:
    """The deepest fall of the score from what it had reached."""

    peak_x: float
    trough_x: float
    high: float
    low: float
    depth: float  # in units of the score


@dataclass(frozen=True)
class ScoreCourse:
    """How the score went. `unit` is what counts as a gain of one: differences are judged by it."""

    name: str
    label: str  # what the log calls it
    series: Series
    smooth: Array  # [K]
    baseline: float | None
    noise: float
    unit: float

    @property
    def start(self) -> float:
        return float(self.series.y[0])

    @property
    def best(self) -> float:
        return float(self.smooth.max())

    @property
    def best_x(self) -> float:
        return float(self.series.x[int(self.smooth.argmax())])

    @property
    def end(self) -> float:
        return float(self.smooth[-1])

    @property
    def lost(self) -> float:
        """Share of the gain that is gone again; 0 where that is within the noise."""
        drop = self.best - self.end
        return drop / self.unit if drop > SIGNIFICANT * self.noise else 0.0

    @property
    def is_behind(self) -> bool:
        return self.baseline is not None and self.end < self.baseline - BEHIND * self.unit

    @property
    def has_improved(self) -> bool:
        """The end lies clearly above the start."""
        size = max(abs(self.start), abs(self.best))
        return self.end - self.start > max(SIGNIFICANT * self.noise, 0.1 * size)

    @property
    def fall(self) -> Fall:
        reached = np.maximum.accumulate(self.smooth)
        depths = reached - self.smooth
        trough = int(depths.argmax())
        peak = int(self.smooth[: trough + 1].argmax())
        high, low = float(self.smooth[peak]), float(self.smooth[trough])
        depth = (high - low) / self.unit if high - low > SIGNIFICANT * self.noise else 0.0
        return Fall(float(self.series.x[peak]), float(self.series.x[trough]), high, low, depth)

    @property
    def fall_text(self) -> str:
        return f"{self.label} fell from {self.best:.3g} to {self.end:.3g}"

    @property
    def trouble(self) -> str:
        """What is wrong with the score, in words; empty if nothing is."""
        if self.is_behind:
            return f"{self.label} is {self.end:.3g}, behind the baseline's {self.baseline:.3g}"
        if self.lost >= LOST:
            return self.fall_text
        if self.baseline is None and len(self.series) >= MANY_SCORES and not self.has_improved:
            return f"{self.label} did not rise ({self.start:.3g} at first, {self.end:.3g} now)"
        return ""


def progress(log: RunLog) -> ScoreCourse | None:
    """None where the score is not known, or too seldom."""
    name, series = log.score_name, log.score
    if name is None or len(series) < MIN_SCORES:
        return None
    num = len(series)
    window = 1 if num < 6 else 3 if num < 45 else num // 15
    smooth = running_median(series.y, window)
    smooth[: window - 1] = series.y[: window - 1]
    scatter = noise(series.y) / np.sqrt(window)
    baseline = log.baseline if name.startswith("eval") else None
    best = float(smooth.max())
    if baseline is None:
        # Training returns wander, and many are moving averages already: only large falls count.
        floor = 0.2 if name.startswith("eval") else 0.5
        unit = max(best - float(series.y[0]), floor * max(abs(best), abs(float(series.y[0]))))
    else:
        # Where the policy hardly beats the baseline, what random loses against it gives the measure.
        random = log.series("eval_random_return").y[-1:]
        unit = max(best - baseline, 0.05 * float(np.abs(random - baseline).max(initial=0.0)))
    unit = max(unit, 2 * scatter, 1e-12)
    return ScoreCourse(name, log.label(name), series, smooth, baseline, float(scatter), unit)


def has_kl_spike(log: RunLog, after: float, until: float) -> bool:
    """Whether an update between two points went far."""
    kl = log.series("approx_kl_mean")
    highest = float(kl.between(after, until).max(initial=0.0))
    is_spike = highest >= SPIKE_KL and highest >= SPIKE * float(np.median(kl.y))
    in_minibatch = float(log.series("approx_kl_max").between(after, until).max(initial=0.0))
    return highest >= LARGE_KL or is_spike or in_minibatch >= LARGE_MAX_KL


def training_return(log: RunLog) -> Series:
    """What is earned in training: of whole episodes where enough ended, else of single steps."""
    episodes = log.series("mean_ep_return")
    return episodes if len(episodes) >= 9 or not log.has("reward_mean") else log.series("reward_mean")
