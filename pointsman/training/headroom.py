"""What is there to gain? Random, round-robin and every heuristic play for the reward before anything learns.

If the baseline already earns what the best of them does, or if rewards are flat or zero most of the time, a
policy cannot learn from them to be better, however long it trains. A minute's look beforehand shows it.

All start from the same seed: the same arrivals, and the same states to begin with. Letters: T, N, A as
everywhere; G groups.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pointsman.envs.entity import Bools, EntityEnv, Floats, Observation
from pointsman.plain import in_percent
from pointsman.training.buffers import QUANTILES, zero_frac
from pointsman.training.ranks import Ranks

# [N] actions for what is seen.
Choose = Callable[[Observation], NDArray[np.int64]]

MAX_FLAT_FRAC = 0.25  # of the steps, clipped or squashed beyond telling better from worse
MAX_ZERO_FRAC = 0.5  # of the steps that take time
MIN_GAIN = 0.05  # of the way from the worst to the best
NUM_BINS = 20
RANDOM = "random"


class Play(NamedTuple):
    """What one way to choose earned."""

    rewards: Floats  # [T, N]
    raw: Floats  # [T, N] the sum of the reward's terms, before any clipping
    elapsed_s: Floats  # [T, N]
    groups: NDArray[np.int64]  # [T, N]
    is_flat: Bools  # [T, N]

    def per_second(self, group: int | None = None) -> float:
        """Mean reward of a simulated second; of one group, or of all. NaN where nobody was in the group."""
        return _ratio(*self._totals(group).sum(axis=1))

    def per_second_by_env(self, group: int | None = None) -> NDArray[np.float64]:
        """[N] the same for each environment."""
        return np.array([_ratio(*column) for column in self._totals(group).T])

    def per_step(self) -> float:
        return float(self.rewards.mean(dtype=np.float64))

    def _totals(self, group: int | None) -> NDArray[np.float64]:
        """[2, N] reward and seconds."""
        where = True if group is None else self.groups == group
        return np.stack(
            [
                np.where(where, part, 0.0).sum(axis=0, dtype=np.float64)
                for part in (self.rewards, self.elapsed_s)
            ]
        )


def _ratio(reward: float, time_s: float) -> float:
    return float(reward / time_s) if time_s > 0 else float("nan")


def play(env: EntityEnv, choose: Choose, num_steps: int, seed: int, ranks: Ranks | None = None) -> Play:
    """Reset with the seed and let `choose` decide T times; with several ranks, what all of them earned."""
    observation = env.reset(seed)
    rows = []
    for _ in range(num_steps):
        step = env.step(choose(observation))
        observation = step.observation
        raw = np.sum(list(step.terms.values()), axis=0) if step.terms else step.reward
        rows.append((step.reward, raw, step.elapsed_s, step.groups, step.is_flat))
    mine = [np.stack(column) for column in zip(*rows, strict=True)]
    parts = (ranks or Ranks()).gather(mine)
    return Play(*(np.concatenate(columns, axis=1) for columns in zip(*parts, strict=True)))


def by_teacher(env: EntityEnv, teacher: int) -> Choose:
    return lambda observation: env.advise(teacher)


def at_random(seed: int) -> Choose:
    """Any legal entity, evenly; holding only where there is no other way."""
    rng = np.random.default_rng(seed)

    def choose(observation: Observation) -> NDArray[np.int64]:
        mask = observation.action_mask
        picks = rng.random(mask.shape) * mask
        picks[:, 0] = mask[:, 0] * 1e-300  # legal, but behind every entity
        return np.asarray(picks.argmax(axis=1), np.int64)

    return choose


def in_turn() -> Choose:
    """Legal entities one after the other; holding only where there is none."""
    last: NDArray[np.int64] | None = None  # [N] the action before

    def choose(observation: Observation) -> NDArray[np.int64]:
        nonlocal last
        legal = observation.action_mask[:, 1:]
        num_envs, num_entities = legal.shape
        if last is None:
            last = np.zeros(num_envs, np.int64)
        turn = (last[:, None] + np.arange(num_entities)) % num_entities  # [N, R] entities, next first
        is_legal = np.take_along_axis(legal, turn, axis=1)
        following = turn[np.arange(num_envs), is_legal.argmax(axis=1)] + 1
        last = np.where(is_legal.any(axis=1), following, last)
        actions: NDArray[np.int64] = np.where(is_legal.any(axis=1), following, 0)
        return actions

    return choose


@dataclass(frozen=True)
class Earned:
    """What one way to choose earned, with the distribution of its raw rewards."""

    name: str
    per_second: float
    per_step: float
    by_group: dict[str, float]  # per second
    quantiles: dict[str, float]  # of a step's raw reward
    histogram: tuple[int, ...]  # steps by raw reward; the outer bins hold all beyond
    zero_frac: float
    flat_frac: float


@dataclass(frozen=True)
class Gain:
    """How much the best heuristic earns above the baseline, and above chance, in a group of episodes."""

    best: str
    per_second: float
    error: float  # standard error of it; both met the same arrivals
    share: float  # of the way from the worst to the best; 0 for a baseline at the ceiling
    above_random: float  # per second
    above_random_error: float

    @property
    def is_small(self) -> bool:
        return self.per_second <= self.error or self.share < MIN_GAIN

    @property
    def is_chance(self) -> bool:
        return self.above_random <= 2 * self.above_random_error


@dataclass(frozen=True)
class Headroom:
    baseline: str
    earned: tuple[Earned, ...]
    gains: dict[str, Gain]  # by group
    edges: tuple[float, ...]  # of the histograms' bins

    @property
    def warnings(self) -> list[str]:
        """What speaks against learning from this reward; empty if nothing does."""
        found = []
        base = next(one for one in self.earned if one.name == self.baseline)
        if base.flat_frac > MAX_FLAT_FRAC:
            found.append(
                f"{in_percent(base.flat_frac)} of the rewards are clipped or squashed: "
                "better and worse look alike"
            )
        zero_frac = min(one.zero_frac for one in self.earned)  # whoever acts as the reference does earns 0
        if zero_frac > MAX_ZERO_FRAC:
            found.append(
                f"{in_percent(zero_frac)} of the rewards are exactly 0: most decisions teach nothing"
            )
        small = [name for name, gain in self.gains.items() if gain.is_small]
        if small:
            found.append(
                f"{self.baseline} earns about as much as any heuristic in {', '.join(small)}: "
                "this reward may have little left to learn there"
            )
        # A single group may be too noisy to tell; if all are, the reward is.
        if all(gain.is_chance for gain in self.gains.values()):
            found.append("no heuristic clearly earns more than random")
        return found

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**asdict(self), "warnings": self.warnings}


def find_headroom(env: EntityEnv, num_steps: int, seed: int) -> Headroom:
    """Let random, round-robin and every teacher decide `num_steps` times in each environment."""
    ways: dict[str, Choose] = {name: by_teacher(env, index) for index, name in enumerate(env.teachers)}
    # These two for every problem, whoever its teachers are.
    ways |= {"round-robin": in_turn(), RANDOM: at_random(seed)}
    plays = {name: play(env, choose, num_steps, seed) for name, choose in ways.items()}
    every = np.concatenate([result.raw.ravel() for result in plays.values()])
    lowest, highest = np.quantile(every, (0.005, 0.995)).tolist()
    edges = np.linspace(lowest, highest, NUM_BINS + 1)
    earned = tuple(_earned(name, result, env.groups, edges) for name, result in plays.items())
    gains = {name: _gain(plays, env.baseline, group) for group, name in enumerate(env.groups)}
    return Headroom(env.baseline, earned, gains, tuple(edges.tolist()))


def _earned(name: str, result: Play, groups: tuple[str, ...], edges: NDArray[np.float64]) -> Earned:
    counts, _ = np.histogram(np.clip(result.raw, edges[0], edges[-1]), edges)
    return Earned(
        name,
        result.per_second(),
        result.per_step(),
        {group: result.per_second(index) for index, group in enumerate(groups)},
        {key: float(np.quantile(result.raw, share)) for key, share in QUANTILES.items()},
        tuple(counts.tolist()),
        zero_frac(result.raw, result.elapsed_s),
        float(result.is_flat.mean()),
    )


def _gain(plays: dict[str, Play], baseline: str, group: int) -> Gain:
    rates = {name: result.per_second(group) for name, result in plays.items()}
    best = max((name for name in rates if name != RANDOM), key=lambda name: rates[name])
    gain, error = _difference(plays[best], plays[baseline], group)
    spread = rates[best] - min(rates.values())
    return Gain(
        best,
        gain,
        error,
        gain / spread if spread > 0 else 0.0,
        *_difference(plays[best], plays[RANDOM], group),
    )


def _difference(one: Play, other: Play, group: int) -> tuple[float, float]:
    """How much more one earned per second, and the standard error of that, from paired environments."""
    by_env = one.per_second_by_env(group) - other.per_second_by_env(group)
    by_env = by_env[np.isfinite(by_env)]
    # A single environment says nothing about chance.
    error = float(by_env.std(ddof=1) / np.sqrt(len(by_env))) if len(by_env) > 1 else 0.0
    return one.per_second(group) - other.per_second(group), error
