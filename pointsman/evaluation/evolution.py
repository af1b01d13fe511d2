"""CMA-ES: a search that learns in which directions the weights may move together.

A generation is drawn from a normal distribution; its better half pulls the mean towards it and shapes the
covariance. Only the order of the costs counts, so neither their scale nor a cost of infinity matters. After
Hansen, "The CMA Evolution Strategy: A Tutorial" (arXiv 1604.00772), without negative weights. The fifty lines
are fewer than what a package would bring along, and the same on every machine.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class EvolutionStrategy:
    """`ask` for candidates [K, D], `tell` their costs [K], lowest best; `mean` [D] is the result."""

    def __init__(self, mean: Floats, step_size: float, rng: np.random.Generator) -> None:
        d = len(mean)
        self.mean = mean.astype(np.float64)
        self.step_size = step_size
        self.num_candidates = 4 + int(3 * math.log(d))
        self._rng = rng
        num_parents = self.num_candidates // 2
        shares = math.log((self.num_candidates + 1) / 2) - np.log(np.arange(1, num_parents + 1))
        self._shares: Floats = shares / shares.sum()
        self._num_effective = mu = 1.0 / float(np.square(self._shares).sum())
        # Rates at which the step size, the path and the covariance forget, and the damping.
        self._step_rate = (mu + 2) / (d + mu + 5)
        self._damping = 1 + 2 * max(0.0, math.sqrt((mu - 1) / (d + 1)) - 1) + self._step_rate
        self._path_rate = (4 + mu / d) / (d + 4 + 2 * mu / d)
        self._rank_one_rate = 2 / ((d + 1.3) ** 2 + mu)
        self._rank_mu_rate = min(1 - self._rank_one_rate, 2 * (mu - 2 + 1 / mu) / ((d + 2) ** 2 + mu))
        self._expected_norm = math.sqrt(d) * (1 - 1 / (4 * d) + 1 / (21 * d * d))
        self._num_generations = 0
        self._step_path = np.zeros(d)
        self._path = np.zeros(d)
        self._covariance = np.eye(d)
        self._axes, self._lengths = np.eye(d), np.ones(d)
        self._drawn = np.zeros((self.num_candidates, d))

    def ask(self) -> Floats:
        normal = self._rng.normal(size=(self.num_candidates, len(self.mean)))
        self._drawn = (normal * self._lengths) @ self._axes.T
        candidates: Floats = self.mean + self.step_size * self._drawn
        return candidates

    def tell(self, costs: Floats) -> None:
        parents = self._drawn[np.argsort(costs, kind="stable")[: len(self._shares)]]
        step = self._shares @ parents
        self.mean = self.mean + self.step_size * step
        self._num_generations += 1
        norm = self._follow(step)
        is_steady = (
            norm / math.sqrt(1 - (1 - self._step_rate) ** (2 * self._num_generations))
            < (1.4 + 2 / (len(step) + 1)) * self._expected_norm
        )
        rate = self._path_rate
        self._path = (1 - rate) * self._path
        if is_steady:  # no stretching while the step size still grows
            self._path += math.sqrt(rate * (2 - rate) * self._num_effective) * step
        lost = 0.0 if is_steady else rate * (2 - rate)
        self._covariance = (
            (1 - self._rank_one_rate * (1 - lost) - self._rank_mu_rate) * self._covariance
            + self._rank_one_rate * np.outer(self._path, self._path)
            + self._rank_mu_rate * (parents.T * self._shares) @ parents
        )
        self.step_size *= math.exp(self._step_rate / self._damping * (norm / self._expected_norm - 1))
        squares, self._axes = np.linalg.eigh(self._covariance)
        self._lengths = np.sqrt(np.maximum(squares, 1e-20))

    def _follow(self, step: Floats) -> float:
        """Add the step, as if the distribution were round, to the path whose length sets the step size."""
        rate = self._step_rate
        whitened = self._axes @ ((self._axes.T @ step) / self._lengths)
        self._step_path = (1 - rate) * self._step_path
        self._step_path += math.sqrt(rate * (2 - rate) * self._num_effective) * whitened
        return float(np.linalg.norm(self._step_path))

    def rescale(self) -> None:
        """To a mean of length 1, for functions to which only the direction matters."""
        length = float(np.linalg.norm(self.mean))
        if length > 0:
            self.mean, self.step_size = self.mean / length, self.step_size / length
