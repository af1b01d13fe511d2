from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from pointsman.evaluation.evolution import EvolutionStrategy

Floats = NDArray[np.float64]
Cost = Callable[[Floats], Floats]

NUM_WEIGHTS = 6
OPTIMUM = np.linspace(-1.0, 1.0, NUM_WEIGHTS)


def narrow_valley(points: Floats) -> Floats:
    """Axes of lengths 1 to 100, turned so that no weight can be improved on its own."""
    turned, _ = np.linalg.qr(np.random.default_rng(5).normal(size=(NUM_WEIGHTS, NUM_WEIGHTS)))
    stretched = (points - OPTIMUM) @ turned * np.geomspace(1, 100, NUM_WEIGHTS)
    costs: Floats = np.square(stretched).sum(axis=1)
    return costs


def search(cost: Cost, num_generations: int = 220, seed: int = 0, adapts: bool = True) -> EvolutionStrategy:
    strategy = EvolutionStrategy(np.zeros(NUM_WEIGHTS), 0.5, np.random.default_rng(seed))
    for _ in range(num_generations):
        strategy.tell(cost(strategy.ask()))
        if not adapts:  # the step size alone
            strategy._covariance = np.eye(NUM_WEIGHTS)
            strategy._axes, strategy._lengths = np.eye(NUM_WEIGHTS), np.ones(NUM_WEIGHTS)
    return strategy


@pytest.mark.parametrize("seed", range(3))
def test_finds_the_bottom_of_a_narrow_valley(seed: int) -> None:
    assert np.abs(search(narrow_valley, seed=seed).mean - OPTIMUM).max() < 1e-3
    without = search(narrow_valley, seed=seed, adapts=False)
    assert np.abs(without.mean - OPTIMUM).max() > 0.05, "the valley is found by learning its shape"


def test_gets_there_through_noise() -> None:
    rng = np.random.default_rng(1)

    def noisy(points: Floats) -> Floats:
        costs: Floats = np.square(points - OPTIMUM).sum(axis=1)
        return costs + 0.05 * rng.normal(size=len(points))

    assert np.linalg.norm(search(noisy, 100).mean - OPTIMUM) < 0.4 < np.linalg.norm(OPTIMUM)


def test_only_the_order_counts() -> None:
    plain = search(narrow_valley, 30)
    squashed = search(lambda points: np.exp(np.sqrt(narrow_valley(points)) / 10) - 7, 30)
    np.testing.assert_array_equal(plain.mean, squashed.mean)
    upside_down = search(lambda points: -narrow_valley(points), 30)
    assert narrow_valley(upside_down.mean[None])[0] > 100 * narrow_valley(np.zeros((1, NUM_WEIGHTS)))[0]


def test_infinite_costs_are_avoided() -> None:
    def walled(points: Floats) -> Floats:
        return np.where(points[:, 0] > 0.5, np.inf, -points[:, 0])

    strategy = search(walled, 40)
    assert 0.3 < strategy.mean[0] < 0.6
    assert np.isfinite(strategy.mean).all()


def test_same_seed_same_path() -> None:
    np.testing.assert_array_equal(search(narrow_valley, 10).mean, search(narrow_valley, 10).mean)
    assert not np.array_equal(search(narrow_valley, 10).mean, search(narrow_valley, 10, seed=1).mean)


def test_one_weight() -> None:
    strategy = EvolutionStrategy(np.zeros(1), 0.3, np.random.default_rng(0))
    for _ in range(60):
        strategy.tell(np.abs(strategy.ask()[:, 0] - 2.0))
    assert strategy.mean[0] == pytest.approx(2.0, abs=0.01)


def test_rescaling_keeps_direction_and_relative_steps() -> None:
    strategy = EvolutionStrategy(np.array([3.0, 4.0]), 0.5, np.random.default_rng(0))
    strategy.rescale()
    np.testing.assert_allclose(strategy.mean, [0.6, 0.8])
    assert strategy.step_size == pytest.approx(0.1)
