"""What rules measure on curves: how the score went, how noisy it is, what rose, and since when."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pointsman.diagnosis.curves import Array, RunLog, Series

MIN_SCORES = 4  # fewer say nothing about a trend
MANY_SCORES = 8  # fewer do not tell a score that stays where it was from noise
LOST = 0.25  # of what was gained: more is a fall
SLIGHTLY_LOST, MOSTLY_LOST = 0.1, 0.5
BEHIND = 0.1  # of what was gained, below the baseline
MEDIANS_AT_ONCE = 1_000_000  # values in memory
SIGNIFICANT = 3.0  # times the noise
AVERAGED = 3.0  # training returns are often moving averages: their noise looks so much smaller than it is
MEDIAN_ERROR = 1.25  # of a median, in errors of a mean
FEW = 7.0  # values: their spread may well be half of what more would have
MIN_BLOCKS = 14  # fewer, and a single fall would pass for noise
MIN_BLOCK, BLOCKS = 10, 3  # values in a block; blocks on each side of a fall
MIN_BEHIND = 8  # evaluations, all on one side of the baseline: with noise alone it takes luck, 1 in 256
MIN_ATTEMPT = 6  # updates
NO_KL = 1e-7  # of an update: the policy stands still
LARGE_KL = 0.05  # of an update [nats]; usual targets are 0.01 to 0.03
LARGE_MAX_KL = 0.15  # of a single minibatch
SPIKE_KL = 0.02  # if it is so much for this run:
SPIKE = 5.0  # times the median
COLLAPSED = 0.05  # entropy, of that of uniform actions


def running_median(y: Array, window: int) -> Array:
    """The median of each value and the ones before it."""
    window = min(window, len(y))
    if window < 2:
        return y.copy()
    first = [float(np.median(y[: i + 1])) for i in range(window - 1)]
    windows = np.lib.stride_tricks.sliding_window_view(y, window)
    rows = max(1, MEDIANS_AT_ONCE // window)
    parts = [np.median(windows[i : i + rows], axis=1) for i in range(0, len(windows), rows)]
    return np.concatenate([first, *parts])


def noise(y: Array) -> float:
    """Standard deviation about the trend: how far values lie off the middle of their neighbours.

    With few values it errs on the large side.
    """
    settled = y[len(y) // 4 :]
    off = settled[1:-1] - (settled[:-2] + settled[2:]) / 2
    if not len(off):
        return 0.0
    return float(1.4826 * np.median(np.abs(off)) / np.sqrt(1.5) * (1.0 + (FEW / len(off)) ** 1.5))


def noise_of_medians(y: Array, window: int) -> float:
    """Estimate the noise of running medians: from single values, or from whole windows if those vary more.

    Neighbouring values of a moving average are alike, so that they seem less noisy than they are.
    """
    if window == 1:
        return noise(y)
    alone = MEDIAN_ERROR * noise(y) / float(np.sqrt(window))
    num_blocks = len(y) // window
    if num_blocks < MIN_BLOCKS:
        return alone
    blocks = y[len(y) - num_blocks * window :].reshape(num_blocks, window)
    return max(alone, noise(np.median(blocks, axis=1)))


def by_chance(num: int) -> float:
    """How far the highest of so many values of noise lies above its middle, in standard deviations."""
    return float(np.sqrt(2.0 * np.log(max(num, 1))))


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
    window: int  # values that a smooth one is made of
    baseline: float | None
    noise: float  # of smooth values
    unit: float
    least_unit: float  # what it would be without noise

    @property
    def start(self) -> float:
        return float(self.series.y[0])

    @cached_property
    def sure(self) -> Array:
        """[K] smooth values, the first ones lower by what luck may have added: they are made of few."""
        num_values = np.minimum(np.arange(1, len(self.smooth) + 1), self.window)
        errors = self.noise * np.sqrt(self.window / num_values)
        return np.asarray(self.smooth - (SIGNIFICANT + self.luck) * (errors - self.noise))

    @property
    def best(self) -> float:
        return float(self.smooth[int(self.sure.argmax())])

    @property
    def best_x(self) -> float:
        return float(self.series.x[int(self.sure.argmax())])

    @property
    def end(self) -> float:
        return float(self.smooth[-1])

    @property
    def luck(self) -> float:
        """How high the best of so many lies by luck, in units of the noise."""
        return by_chance(len(self.series) // self.window)

    @property
    def chance(self) -> float:
        """A fall from the best that noise alone may show."""
        return self.noise * (SIGNIFICANT + self.luck)

    @property
    def lost(self) -> float:
        """Share of the gain that is gone again; 0 where that is within the noise."""
        drop = self.best - self.end
        return drop / self.unit if float(self.sure.max()) - self.end > self.chance else 0.0

    def _is_lower_throughout(self) -> bool:
        """Whether, however noisy single values are, some blocks of them all lie lower than all of some before
        by more than a fall takes; between the two is one block for the fall itself. Noise that lasts for
        blocks shows this now and then: it is for falls that something else explains."""
        if self.window < MIN_BLOCK:
            return False
        num = len(self.series) // self.window
        blocks = np.median(self.series.y[-num * self.window :].reshape(num, self.window), axis=1)
        alone = MEDIAN_ERROR * noise(self.series.y) / float(np.sqrt(self.window))
        least = max(LOST * self.unit, SIGNIFICANT * alone)
        for at in range(BLOCKS, num - BLOCKS):
            if blocks[at - BLOCKS : at].min() - blocks[at + 1 : at + 1 + BLOCKS].max() >= least:
                return True
        return False

    @property
    def is_behind(self) -> bool:
        """Clearly at the end; or, however noisy, at every evaluation of the second half."""
        if self.baseline is None:
            return False
        if self.baseline - self.end > max(BEHIND * self.unit, SIGNIFICANT * self.noise):
            return True
        late = self.series.tail(0.5)
        return len(late) >= MIN_BEHIND and bool(self.baseline - late.max() > BEHIND * self.least_unit)

    @property
    def has_improved(self) -> bool:
        """The end lies clearly above the start; of noisy scores, the last third above the first."""
        size = 0.1 * max(abs(self.start), abs(self.best))
        if rise(self.series) > SIGNIFICANT:
            third = len(self.series) // 3
            return float(self.series.y[-third:].mean() - self.series.y[:third].mean()) > size
        return self.end - self.start > max(SIGNIFICANT * noise(self.series.y), size)

    @property
    def fall(self) -> Fall:
        depths = np.maximum.accumulate(self.sure) - self.smooth
        depths[: self.window - 1] = 0.0
        trough = int(depths.argmax())
        peak = int(self.sure[: trough + 1].argmax())
        high, low = float(self.smooth[peak]), float(self.smooth[trough])
        is_clear = depths[trough] > self.chance + self.luck * self.noise  # the lowest is low by luck, too
        is_clear = bool(is_clear) or self._is_lower_throughout()
        depth = (high - low) / self.unit if is_clear else 0.0
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


def and_trouble(score: ScoreCourse | None) -> str:
    """What the evidence ends with; nothing where the score is well, or not known."""
    return f"; {score.trouble}" if score is not None and score.trouble else ""


def progress(log: RunLog) -> ScoreCourse | None:
    """None where the score is not known, or too seldom."""
    name, series = log.score_name, log.score
    if name is None or len(series) < MIN_SCORES:
        return None
    num = len(series)
    window = 1 if num < 6 else 3 if num < 45 else num // 15
    smooth = running_median(series.y, window)
    scatter = noise_of_medians(series.y, window)
    if not name.startswith("eval") and window < 2 * AVERAGED and not log.is_folded:
        scatter *= AVERAGED
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
    least_unit, unit = unit, max(unit, 2 * scatter, 1e-12)
    return ScoreCourse(name, log.label(name), series, smooth, window, baseline, scatter, unit, least_unit)


def has_kl_spike(log: RunLog, after: float, until: float) -> bool:
    """Whether an update between two points went far."""
    kl = log.series("approx_kl_mean")
    highest = float(kl.between(after, until).max(initial=0.0))
    is_spike = highest >= SPIKE_KL and highest >= SPIKE * float(np.median(np.abs(kl.y)))
    in_minibatch = float(log.series("approx_kl_max").between(after, until).max(initial=0.0))
    return highest >= LARGE_KL or is_spike or in_minibatch >= LARGE_MAX_KL


def stands_still(log: RunLog, after: float = -np.inf) -> bool:
    """Whether updates change nothing after some point: then the policy is not why a score changes."""
    kl = log.series("approx_kl_mean").after(after).y
    return len(kl) > 0 and float(np.median(np.abs(kl))) < NO_KL  # some estimates of it may be negative


def given_up(log: RunLog) -> list[tuple[float, float]]:
    """(after, until) of each part of the run whose weights the trainer dropped for the best ones before. What
    went wrong in it is gone from the rows that follow."""
    times = log.series("times_back")
    if len(times) < 2:
        return []
    ends = np.flatnonzero(np.diff(times.y) > 0)  # the last row of each
    starts = np.append(-1, ends)[:-1]
    return [
        (float(times.x[start]) if start >= 0 else -np.inf, float(times.x[end]))
        for start, end in zip(starts, ends, strict=True)
        if end - start >= MIN_ATTEMPT
    ]


def training_return(log: RunLog) -> Series:
    """What is earned in training: of whole episodes where enough ended, else of single steps."""
    episodes = log.series("mean_ep_return")
    if len(episodes) < 9 and log.has("reward_mean"):
        return log.series("reward_mean")
    if not log.is_ours or not len(episodes):
        return episodes
    # Every row repeats the mean of the last episodes until others end: it counts once. Single steps would not
    # tell more: environments that begin in step earn less and less while queues grow, then begin anew.
    is_new = np.append(True, np.diff(episodes.y) != 0.0)
    return Series(episodes.x[is_new], episodes.y[is_new])
