"""What mattered of settings that were varied at once."""

from __future__ import annotations

import numpy as np
import pytest

from pointsman.evaluation.mattered import MIN_POINTS, SHRINKAGE, explained_shares, missed_squares


def settings(rng: np.random.Generator, count: int) -> dict[str, np.ndarray]:
    return {"one": rng.random((count, 1)), "other": rng.random((count, 1))}


def test_errors_are_those_of_fits_without_the_point() -> None:
    """Against fitting again without each point, by augmented least squares."""
    rng = np.random.default_rng(0)
    columns, scores = rng.random((9, 3)), rng.random(9)
    scaled = (columns - columns.mean(axis=0)) / columns.std(axis=0)
    design = np.hstack([np.ones((9, 1)), scaled])
    pull = np.sqrt(SHRINKAGE) * np.eye(4)[1:]
    errors = []
    for left_out in range(9):
        kept = np.arange(9) != left_out
        rows, wanted = np.vstack([design[kept], pull]), np.append(scores[kept], np.zeros(3))
        weights = np.linalg.lstsq(rows, wanted, rcond=None)[0]
        errors.append(scores[left_out] - design[left_out] @ weights)
    assert missed_squares([columns], scores) == pytest.approx(np.square(errors).sum())


def test_what_decides_the_scores_is_found() -> None:
    rng = np.random.default_rng(1)
    found = [
        explained_shares(varied, 3.0 * varied["one"][:, 0] + 0.3 * rng.normal(size=16))
        for varied in (settings(rng, 16) for _ in range(20))
    ]
    assert np.mean([one["one"] for one in found]) > 0.7
    assert np.mean([one["other"] for one in found]) < 0.05


def test_luck_explains_nothing() -> None:
    rng = np.random.default_rng(2)
    found = [explained_shares(settings(rng, 12), rng.normal(size=12)) for _ in range(50)]
    assert np.mean([sum(one.values()) for one in found]) < 0.1


def test_few_points_say_nothing() -> None:
    rng = np.random.default_rng(3)
    assert explained_shares(settings(rng, MIN_POINTS - 1), rng.random(MIN_POINTS - 1)) == {}
