"""Policies judged by the returns of their episodes, where a problem has no latencies to speak of.

Every policy plays the same episodes, one a seed. Blocks of episodes in a row show how far the mean of a few
can be trusted, and the worst of them whether a policy falls apart on some. Intervals: bootstrap.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pointsman.evaluation.bootstrap import Ratio, resamples, with_intervals
from pointsman.inference.checkpoint import Checkpoint

RETURN = "return"
BLOCK_EPISODES = 20

Metrics = dict[str, NDArray[np.float64]]  # [S] each, RETURN among them
Policies = Mapping[str, str | Checkpoint]  # by the name that tables show


class Judge(Protocol):
    """Plays the episodes of one problem."""

    baseline: str  # of the heuristics: what others are compared with
    heuristics: Mapping[str, str]  # and what each of them does
    rivals: Sequence[str]  # of the heuristics: whom a comparison shows if nobody is named
    num_episodes: int  # that a comparison plays if nobody says how many
    headers: Mapping[str, str]  # metrics beside the return that a table shows: seconds (`_s`) or shares

    def play(self, policy: str | Checkpoint, seeds: Sequence[int], where: str = "policy") -> Metrics:
        """One episode a seed by a heuristic, or by a checkpoint, called `where` in errors."""
        ...


def block_means(values: NDArray[np.float64], num_blocks: int) -> NDArray[np.float64]:
    """[S] -> [num_blocks], consecutive and of equal size but for one."""
    return np.array([block.mean() for block in np.array_split(values, num_blocks)])


def estimate(values: NDArray[np.float64]) -> Ratio:
    """The mean of values [S], with its interval."""
    samples = np.einsum("bs,s->b", resamples(len(values)), values) / len(values)
    (found,) = with_intervals(values.mean(keepdims=True), samples[:, None], len(values))
    return found


@dataclass(frozen=True)
class Returns:
    """What several policies earned on the same episodes."""

    seeds: tuple[int, ...]
    baseline: str
    metrics: Mapping[str, Metrics]  # by policy

    @property
    def names(self) -> list[str]:
        return list(self.metrics)

    @property
    def num_blocks(self) -> int:
        return max(1, len(self.seeds) // BLOCK_EPISODES)

    def blocks(self, policy: str) -> NDArray[np.float64]:
        return block_means(self.metrics[policy][RETURN], self.num_blocks)

    @cached_property
    def means(self) -> dict[str, Ratio]:
        return {name: estimate(table[RETURN]) for name, table in self.metrics.items()}

    def gain(self, policy: str, other: str) -> Ratio:
        """How much more than the other it earned, episode by episode."""
        return estimate(self.metrics[policy][RETURN] - self.metrics[other][RETURN])


def play_all(
    judge: Judge, policies: Policies, baseline: str, seeds: Sequence[int], advance: Callable[[float], None]
) -> Returns:
    """All policies on all seeds; `advance` gets 1 for each policy that is done."""
    metrics = {}
    for name, policy in policies.items():
        metrics[name] = judge.play(policy, seeds, name)
        advance(1)
    return Returns(tuple(seeds), baseline, metrics)
