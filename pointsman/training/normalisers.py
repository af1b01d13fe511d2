"""Running scales: of the features a network sees, of the returns its critic predicts, of rewards.

The first two are buffers of the network, so a checkpoint holds everything that inference needs. They change
only when they are told to (`update`), never in a forward pass: an evaluation cannot move them, and within a
rollout and its update they stand still, without which the first ratio of PPO would not be 1.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from pointsman.training.jit import Array, compiled

# Sums a tensor over the processes that train together; the identity when there is only one.
Reduce = Callable[[Tensor], Tensor]

CLIP = 10.0  # standard deviations; `inference/network.py` has the same
# Features come divided by their scale. What hardly moved in training must not be blown up when it does.
MIN_STD = 0.01
# Returns drift as the policy improves: a batch of them counts for at least this share of their scale.
MIN_RETURN_SHARE = 0.05


def alone(sums: Tensor) -> Tensor:
    return sums


@compiled
def _add_distances(rows: Array, mean: Array, distances: Array, squares: Array) -> None:
    for i in range(rows.shape[0]):
        for j in range(rows.shape[1]):
            distance = np.float64(rows[i, j]) - mean[j]
            distances[j] += distance
            squares[j] += distance * distance


class FeatureScale(nn.Module):
    """(x - mean) / std, clipped at ±10, with the mean and std of all rows ever shown to `update`."""

    count: Tensor  # [] float64: rows seen
    mean: Tensor  # [K] float64
    square: Tensor  # [K] float64: sum of squared distances from the mean
    shift: Tensor  # [K] float32: what forward subtracts
    factor: Tensor  # [K] float32: and then multiplies by

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(num_features, dtype=torch.float64))
        self.register_buffer("square", torch.zeros(num_features, dtype=torch.float64))
        self.register_buffer("shift", torch.zeros(num_features))
        self.register_buffer("factor", torch.ones(num_features))

    @property
    def std(self) -> Tensor:
        """[K] float64, of the population."""
        return (self.square / self.count.clamp(min=1)).sqrt()

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., K]"""
        return (x - self.shift).mul_(self.factor).clamp_(-CLIP, CLIP)

    @torch.no_grad()
    def update(self, rows: Tensor, reduce: Reduce = alone) -> None:
        """Add rows [n, K] to the statistics; `reduce` adds up those of other processes."""
        sums = torch.zeros(3, len(self.mean), dtype=torch.float64)
        sums[0] = len(rows)
        # All processes have the same mean, so their sums can be added.
        _add_distances(rows.contiguous().numpy(), self.mean.numpy(), sums[1].numpy(), sums[2].numpy())
        sums = reduce(sums)
        num_rows, distance, square = sums
        if len(self.mean) == 0 or num_rows[0] == 0:
            return
        self.count += num_rows[0]
        self.mean += distance / self.count
        self.square += square - distance.square() / self.count
        self.shift.copy_(self.mean)
        # What never moved at all, switched off or not, is not looked at when it does.
        self.factor.copy_(torch.where(self.std > 0, 1 / self.std.clamp(min=MIN_STD), 0.0))


class ValueScale(nn.Module):
    """The last layer of a critic, which predicts returns in units of their running mean and std.

    When the scale moves, the layer moves against it (PopArt, van Hasselt et al. 2016), so that the predicted
    return in real units stays what it was.
    """

    num_updates: Tensor  # [] float64
    mean: Tensor  # [] float64
    square: Tensor  # [] float64: running mean of squared returns
    std: Tensor  # [] float64

    def __init__(self, width: int) -> None:
        super().__init__()
        self.output = nn.Linear(width, 1, device="meta").to_empty(device="cpu")
        for name, start in (("num_updates", 0.0), ("mean", 0.0), ("square", 1.0), ("std", 1.0)):
            self.register_buffer(name, torch.tensor(start, dtype=torch.float64))

    def forward(self, features: Tensor) -> Tensor:
        """[B, width] -> [B] values in units of the scale"""
        values: Tensor = self.output(features)
        return values.squeeze(-1)

    def normalise(self, returns: Tensor) -> Tensor:
        return (returns - self.mean.to(returns.dtype)) / self.std.to(returns.dtype)

    def denormalise(self, values: Tensor) -> Tensor:
        return values * self.std.to(values.dtype) + self.mean.to(values.dtype)

    @torch.no_grad()
    def update(self, returns: Tensor, reduce: Reduce = alone) -> None:
        """Follow the returns of one rollout, of any shape; the first one sets the scale."""
        flat = returns.double().flatten()
        count, total, square = reduce(
            torch.stack((flat.new_tensor(len(flat)), flat.sum(), flat.square().sum()))
        )
        self.num_updates += 1
        share = max(1 / float(self.num_updates), MIN_RETURN_SHARE)
        old_mean, old_std = self.mean.clone(), self.std.clone()
        self.mean.lerp_(total / count, share)
        self.square.lerp_(square / count, share)
        self.std.copy_((self.square - self.mean.square()).clamp(min=1e-8).sqrt())
        self.output.weight.mul_(old_std / self.std)
        bias = self.output.bias.double()
        self.output.bias.copy_((old_std * bias + old_mean - self.mean) / self.std)


class RewardScale:
    """How far returns spread in each group of episodes, and rewards divided by it.

    Without it the critic learns the groups in which much is at stake, an overloaded cluster say, and its
    errors there are larger than all that can be gained elsewhere. The spread is that of the discounted sum of
    rewards to the end of a rollout: it does not depend on the critic.
    """

    def __init__(self, num_groups: int, memory: int) -> None:
        """`memory`: updates over which the spread is averaged."""
        self.memory = memory
        self.num_updates = 0
        self.squares: NDArray[np.float64] = np.zeros(num_groups)

    def update(
        self,
        rewards: NDArray[np.float64],
        discount: NDArray[np.float64],
        groups: NDArray[np.int64],
        reduce: Reduce = alone,
    ) -> None:
        """rewards, discount, groups: [T, N]"""
        sums, to_come = np.zeros(rewards.shape), np.zeros(rewards.shape[1])
        for t in reversed(range(len(rewards))):
            to_come = rewards[t] + discount[t] * to_come
            sums[t] = to_come
        count = np.bincount(groups.ravel(), minlength=len(self.squares))
        squares = np.bincount(groups.ravel(), np.square(sums).ravel(), minlength=len(self.squares))
        both = reduce(torch.from_numpy(np.stack((squares, count.astype(np.float64)))))
        squares, count = both.numpy()
        self.num_updates += 1
        weight = 1.0 / min(self.num_updates, self.memory)
        mean = np.divide(squares, count, out=self.squares.copy(), where=count > 0)
        self.squares = self.squares + weight * (mean - self.squares)

    def scale(self, groups: NDArray[np.int64]) -> NDArray[np.float64]:
        """What to divide rewards by; groups that earned nothing yet stay as they are."""
        spread = np.sqrt(self.squares)
        factor: NDArray[np.float64] = np.where(spread > 0, spread, 1.0)[groups]
        return factor
