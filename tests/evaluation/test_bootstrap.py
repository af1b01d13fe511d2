from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from pointsman.evaluation.bootstrap import (
    NUM_RESAMPLES,
    Ratio,
    expanded_tail,
    paired_ratios,
    resampled_ratios,
    student_t_quantile,
    with_intervals,
)


def one_ratio(values: list[float], baseline: list[float]) -> Ratio:
    return paired_ratios(np.array(values)[:, None], np.array(baseline)[:, None])[0]


# Table of the two-sided 95 % points, and of 99 % for 5.
@pytest.mark.parametrize(
    ("probability", "dof", "quantile"),
    [
        (0.975, 1, 12.706),
        (0.975, 2, 4.303),
        (0.975, 3, 3.182),
        (0.975, 4, 2.776),
        (0.975, 7, 2.365),
        (0.975, 15, 2.131),
        (0.975, 30, 2.042),
        (0.995, 5, 4.032),
    ],
)
def test_student_t(probability: float, dof: int, quantile: float) -> None:
    assert student_t_quantile(probability, dof) == pytest.approx(quantile, abs=6e-4)


def test_tails_approach_the_plain_percentiles() -> None:
    tails = [expanded_tail(num_seeds) for num_seeds in (4, 8, 16, 1000)]
    assert tails == sorted(tails)
    assert tails[-1] == pytest.approx(0.025, rel=0.01)


def test_resamples_are_those_of_brute_force() -> None:
    """All 4 ** 4 ordered draws of four seeds, each as likely as the other."""
    values, baseline = np.array([3.0, 1.0, 4.0, 1.5]), np.array([2.0, 2.5, 1.0, 3.0])
    exact = np.sort(
        [
            values[list(drawn)].sum() / baseline[list(drawn)].sum()
            for drawn in itertools.product(range(4), repeat=4)
        ]
    )
    found = np.sort(resampled_ratios(values[:, None], baseline[:, None])[:, 0])
    assert len(found) == NUM_RESAMPLES
    assert set(np.round(found, 12)) <= set(np.round(exact, 12))
    points = np.linspace(exact[0], exact[-1], 50)
    theirs = np.searchsorted(exact, points, side="right") / len(exact)
    ours = np.searchsorted(found, points, side="right") / len(found)
    np.testing.assert_allclose(ours, theirs, atol=0.02)


def test_interval_of_a_mean_is_students() -> None:
    """A constant baseline of 1: the ratio is a mean, whose interval is known for normal values."""
    num_seeds = 24
    values = 10 + np.random.default_rng(5).normal(size=num_seeds)
    ratio = one_ratio(values.tolist(), [1.0] * num_seeds)
    half = student_t_quantile(0.975, num_seeds - 1) * values.std(ddof=1) / math.sqrt(num_seeds)
    assert ratio.ratio == pytest.approx(values.mean())
    assert ratio.low == pytest.approx(values.mean() - half, abs=0.08 * half)
    assert ratio.high == pytest.approx(values.mean() + half, abs=0.08 * half)


def test_interval_covers_as_often_as_it_says() -> None:
    """8 seeds, pairs that move together; plain percentiles cover 89 %."""
    rng = np.random.default_rng(0)
    num_trials, num_seeds = 1500, 8
    common = rng.normal(scale=0.3, size=(num_seeds, num_trials))
    baseline = np.exp(common)
    values = 0.8 * baseline + rng.normal(scale=0.05, size=(num_seeds, num_trials))
    covered = [ratio.low <= 0.8 <= ratio.high for ratio in paired_ratios(values, baseline)]
    assert 0.92 <= np.mean(covered) <= 0.975


def test_pairing_cancels_what_is_common() -> None:
    baseline = [1.0, 5.0, 2.0, 9.0, 3.0, 4.0]
    ratio = one_ratio([0.7 * value for value in baseline], baseline)
    assert (ratio.ratio, ratio.low, ratio.high) == pytest.approx((0.7, 0.7, 0.7))


def test_the_baseline_against_itself_is_one() -> None:
    ratio = one_ratio([1.0, 5.0, 2.0], [1.0, 5.0, 2.0])
    assert (ratio.ratio, ratio.low, ratio.high) == (1.0, 1.0, 1.0)


def test_what_cannot_be_said_is_nan() -> None:
    assert math.isnan(one_ratio([1.0, 2.0], [0.0, 0.0]).ratio)
    assert math.isnan(one_ratio([math.nan, 2.0], [1.0, 1.0]).ratio)
    # A resample can hit the one seed whose baseline is 0.
    rare = one_ratio([1.0, 2.0], [0.0, 4.0])
    assert rare.ratio == pytest.approx(0.75)
    assert math.isnan(rare.low) and math.isnan(rare.high)
    single = one_ratio([1.0], [2.0])
    assert single.ratio == 0.5
    assert math.isnan(single.low) and math.isnan(single.high)


def test_metrics_do_not_touch_each_other() -> None:
    rng = np.random.default_rng(1)
    values, baseline = rng.uniform(1, 2, (6, 5)), rng.uniform(1, 2, (6, 5))
    together = paired_ratios(values, baseline)
    for column, ratio in enumerate(together):
        alone = one_ratio(values[:, column].tolist(), baseline[:, column].tolist())
        np.testing.assert_allclose(list(vars(alone).values()), list(vars(ratio).values()), rtol=1e-13)


def test_bounds_are_order_statistics() -> None:
    samples = np.arange(NUM_RESAMPLES, dtype=float)[::-1, None]
    (ratio,) = with_intervals(np.array([5.0]), samples, num_seeds=10_000)
    assert ratio.low == pytest.approx(0.025 * NUM_RESAMPLES, rel=0.01)
    assert ratio.high == pytest.approx(0.975 * NUM_RESAMPLES, rel=0.01)
