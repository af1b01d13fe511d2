"""A trend must stand out from the noise of its own column: noise around a constant is no story."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pointsman.diagnosis.measures import noise, noise_of_medians, running_median

from .made import foreign, found, healthy, make

NUM_LOGS = 200
SAID_OF_NOISE = {"no-gain"}  # that nothing rises is true


def noise_log(seed: int) -> dict[str, Any]:
    """Every column is noise around a constant; with and without evaluations and a baseline."""
    rng = np.random.default_rng(seed)
    rows = int(rng.choice([8, 12, 20, 40, 120, 400, 1000]))

    def column(level: float, size: float) -> Any:
        is_normal = seed % 3
        return level + size * (rng.normal(size=rows) if is_normal else rng.uniform(-2.0, 2.0, rows))

    level, size = float(rng.choice([0.0, -5.0, 20.0, 0.3])), float(rng.choice([0.1, 1.0, 10.0]))
    columns = {
        "update": np.arange(1.0, rows + 1),
        "mean_ep_return": column(level, size),
        "approx_kl_mean": np.abs(column(0.003, 0.001)),
        "entropy_frac": column(0.6, 0.01),
        "explained_variance": column(0.5, 0.05),
        "v_loss": np.exp(column(0.0, 0.3)),
        "noop_frac": column(0.3, 0.04),
        "eval_noop_frac": column(0.3, 0.04),
        "action_frac_max": column(0.4, 0.04),
    }
    if seed % 2:
        columns["eval_mean_return"] = column(level, size)
        columns["eval_min_block_return"] = column(level - size, size)
    if seed % 4 == 1:
        columns["eval_baseline_return"] = np.full(rows, level)
    return columns


@pytest.mark.parametrize("first", range(0, NUM_LOGS, 20))
def test_noise_around_a_constant_has_no_trend(first: int) -> None:
    told = {seed: set(found(foreign(noise_log(seed)))) - SAID_OF_NOISE for seed in range(first, first + 20)}
    assert {seed: names for seed, names in told.items() if names} == {}


@pytest.mark.parametrize("seed", range(10))
def test_a_fall_of_ten_times_the_noise_is_seen_in_the_same_logs(seed: int) -> None:
    columns = next(
        log
        for log in map(noise_log, range(1000 * seed + 1, 1000 * seed + 1000, 2))
        if len(log["update"]) >= 20
    )
    rows = len(columns["update"])
    size = np.std(columns["eval_mean_return"])
    done = np.arange(rows) / rows
    columns["eval_mean_return"] += 10 * size * np.interp(done, [0.0, 0.3, 0.5, 1.0], [0.0, 1.0, 1.0, 0.0])
    assert "slow-drift" in found(foreign(columns))


@pytest.mark.parametrize("seed", range(100, 200))
def test_healthy_runs_are_silent(seed: int) -> None:
    assert found(make(healthy(seed))) == {}


@pytest.mark.parametrize("window", [1, 3, 8])
def test_noise_is_measured_in_the_presence_of_a_trend(window: int) -> None:
    rng = np.random.default_rng(0)
    y = np.linspace(0.0, 50.0, 600) + rng.normal(0.0, 2.0, 600)
    assert noise(y) == pytest.approx(2.0, rel=0.15)
    flat = rng.normal(0.0, 2.0, 6000)
    true = running_median(flat, window)[window:].std()
    assert noise_of_medians(flat, window) == pytest.approx(true, rel=0.3)


def test_of_moving_averages_windows_tell_the_noise() -> None:
    rng = np.random.default_rng(0)
    averages = np.convolve(rng.normal(size=1000), np.ones(10) / 10, "valid")
    true = running_median(averages, 60)[60:].std()
    assert noise_of_medians(averages, 60) > 0.5 * true
    assert noise(averages) / np.sqrt(60) < 0.1 * true  # what neighbours alone would say


def test_running_medians_are_medians() -> None:
    y = np.random.default_rng(0).normal(size=50)
    expected = [np.median(y[max(0, i - 6) : i + 1]) for i in range(50)]
    assert running_median(y, 7) == pytest.approx(expected)
    assert running_median(y[:3], 7) == pytest.approx(expected[:3])
    assert running_median(y[:0], 7).shape == (0,)
