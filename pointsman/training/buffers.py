"""The memory of one rollout: T steps of N environments, allocated once, filled in place.

Arrays and tensors are two views of the same memory: environments write the one, the network reads the other.
Row t is what the actors saw and did at step t; observations have a row more, for what followed the last step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pointsman.envs.entity import Episode, Observation, Step
from pointsman.inference.space import EntitySpace
from pointsman.training.networks import TensorObservation

MAX_ACTIONS = 17  # whose shares have columns of their own
ENDED = "ended/"  # and the limit that an episode was ended for
QUANTILES = {"p01": 0.01, "p10": 0.1, "p50": 0.5, "p90": 0.9, "p99": 0.99}


def zero_frac(rewards: NDArray[Any], elapsed_s: NDArray[Any]) -> float:
    """The share of rewards that are exactly 0, of steps in which time went by.

    Where requests arrive together, or held ones go out together, a decision follows the other at once:
    what they earn comes with the last of them.
    """
    counts = elapsed_s > 0
    return float((rewards[counts] == 0).mean()) if counts.any() else float((rewards == 0).mean())


class Ending(NamedTuple):
    """What was seen last in the episodes that were cut off at step t: their value is still to come."""

    t: int
    envs: NDArray[np.int64]  # [k]
    observation: TensorObservation  # [k, ...]
    state: Tensor | None  # [k, width]


class Buffers:
    """Buffers [T, N, ...] and what is counted while they fill."""

    def __init__(self, num_steps: int, num_envs: int, space: EntitySpace, state_width: int) -> None:
        self.num_steps, self.num_envs = num_steps, num_envs
        shape = (num_steps, num_envs)
        rows = (num_steps + 1, num_envs)
        num_features = len(space.entity_features)
        self.arrays = Observation(
            np.zeros((*rows, space.num_entities, num_features), np.float32),
            np.zeros((*rows, len(space.context_features)), np.float32),
            np.zeros((*rows, space.num_entities), np.bool_),
            np.zeros((*rows, space.num_actions), np.bool_),
            np.zeros((*rows, len(space.privileged_features)), np.float32),
        )
        self.observation = TensorObservation.from_numpy(self.arrays)  # [T + 1, N, ...]
        self.actions = np.zeros(shape, np.int64)
        self.greedy_actions = np.zeros(shape, np.int64)  # what arg-max would have done
        self.teacher_actions = np.zeros(shape, np.int64)
        self.logp = np.zeros(shape, np.float32)
        self.rewards = np.zeros(shape, np.float32)
        self.elapsed_s = np.zeros(shape, np.float32)
        self.lifetime_s = np.full(shape, np.nan, np.float32)  # NaN: the environment knows of none
        self.terminated = np.zeros(shape, np.bool_)
        self.truncated = np.zeros(shape, np.bool_)
        self.is_flat = np.zeros(shape, np.bool_)
        self.is_illegal = np.zeros(shape, np.bool_)  # by the environment's word
        self.groups = np.zeros(shape, np.int64)
        self.is_start = np.zeros(rows, np.bool_)
        self.states = torch.zeros(*rows, state_width) if state_width else None  # before each decision
        self.clear()

    def clear(self) -> None:
        self.endings: list[Ending] = []
        self.episodes: list[Episode] = []
        self.terms: dict[str, NDArray[np.float32]] = {}
        self.tails: dict[str, NDArray[np.float32]] = {}  # what was earned by each limit, at a price of 1

    def see(self, t: int, observation: Observation) -> Observation:
        """Copy what is acted on at step t; returns the copy [N, ...]."""
        copy = Observation(*(buffer[t] for buffer in self.arrays))
        for mine, array in zip(copy, observation, strict=True):
            mine[:] = array
        return copy

    def record(self, t: int, step: Step, state: Tensor | None) -> None:
        """What followed the actions of step t; `state` [N, width] is the memory after them."""
        self.rewards[t], self.elapsed_s[t], self.groups[t] = step.reward, step.elapsed_s, step.groups
        self.terminated[t], self.truncated[t] = step.terminated, step.truncated
        self.is_flat[t] = step.is_flat
        if step.lifetime_s is not None:
            self.lifetime_s[t] = step.lifetime_s
        self.is_illegal[t] = False if step.is_illegal is None else step.is_illegal
        self.is_start[t + 1] = step.terminated | step.truncated
        for kept, named in ((self.terms, step.terms), (self.tails, step.tails)):
            for name, values in named.items():
                if name not in kept:
                    kept[name] = np.zeros_like(self.rewards)
                kept[name][t] = values
        self.episodes.extend(step.episodes)
        envs = np.flatnonzero(step.truncated & ~step.terminated)
        if len(envs):
            seen = TensorObservation(*(torch.from_numpy(array[envs]) for array in step.final_observation))
            self.endings.append(Ending(t, envs, seen, None if state is None else state[envs]))

    def price(self, limit: str, prices: NDArray[np.float64]) -> None:
        """Let rewards count what was earned by a limit, at prices [G]; once a rollout."""
        if limit in self.tails:
            self.terms[limit] = (prices[self.groups] * self.tails[limit]).astype(np.float32)
            self.rewards += self.terms[limit]

    def metrics(self) -> dict[str, float]:
        """What the log says of rewards, before they are clipped, and of actions."""
        raw = sum(self.terms.values(), np.zeros_like(self.rewards)) if self.terms else self.rewards
        shares, greedy = self._shares(self.actions), self._shares(self.greedy_actions)
        sizes = {name: float(np.abs(values).mean()) for name, values in self.terms.items()}
        total = sum(sizes.values())
        return {
            "reward_mean": float(self.rewards.mean()),
            "reward_raw_mean": float(raw.mean()),
            "reward_raw_std": float(raw.std()),
            **{f"reward_raw_{name}": float(np.quantile(raw, q)) for name, q in QUANTILES.items()},
            "reward_zero_frac": zero_frac(raw, self.elapsed_s),
            "reward_clipped_frac": float(self.is_flat.mean()),
            **{f"reward/{name}": float(values.mean()) for name, values in self.terms.items()},
            **{f"reward_share/{name}": size / total for name, size in sizes.items() if total > 0},
            **self._legality(),
            "noop_frac": float(shares[0]),
            "action_frac_max": float(shares[1:].max()),
            "action_frac_min": float(shares[1:].min()),
            **_by_action(shares),
            "greedy_frac_max": float(greedy[1:].max()),
            "greedy_noop_frac": float(greedy[0]),
            "elapsed_mean_s": float(self.elapsed_s.mean()),
            **self._lifetimes(),
        }

    def _lifetimes(self) -> dict[str, float]:
        """How long requests live, and how many lifetimes the rollout covers; of environments that know."""
        if not np.isfinite(self.lifetime_s).all():
            return {}
        return {
            "lifetime_mean_s": float(self.lifetime_s.mean()),
            "rollout_lifetimes": float((self.elapsed_s / self.lifetime_s).sum(axis=0).mean()),
        }

    def _shares(self, actions: NDArray[np.int64]) -> NDArray[np.float64]:
        """[A] how often each action stands in actions [T, N]."""
        return np.bincount(actions.ravel(), minlength=self.arrays.action_mask.shape[-1]) / actions.size

    def _legality(self) -> dict[str, float]:
        """How many actions were illegal, and how many of those a mask one step off explains.

        Whoever acts by the mask of the step before does what was legal then; an environment that shows its
        mask a step late shows one step later that it was not.
        """
        masks = self.arrays.action_mask

        def allows(mask: NDArray[np.bool_], actions: NDArray[np.int64]) -> NDArray[np.bool_]:
            return np.take_along_axis(mask, actions[..., None], axis=-1)[..., 0]

        is_shown = allows(masks[:-1], self.actions)
        is_illegal = self.is_illegal | ~is_shown
        metrics = {"invalid_frac": float(is_illegal.mean())}
        if is_illegal.any():
            was_legal = allows(masks[:-2], self.actions[1:]) & ~self.is_start[1:-1]
            turns_illegal = ~allows(masks[2:], self.actions[1:]) & ~self.is_start[2:]
            is_late = is_illegal[1:] & np.where(is_shown[1:], turns_illegal, was_legal)
            metrics["invalid_late_frac"] = float(is_late.sum() / is_illegal.sum())
        return metrics


def _by_action(shares: NDArray[np.float64]) -> dict[str, float]:
    """Where there are few of them: action 0 is to hold, k is entity k."""
    if len(shares) > MAX_ACTIONS:
        return {}
    return {f"action_frac/{action}": float(share) for action, share in enumerate(shares)}


def episode_metrics(episodes: list[Episode], groups: tuple[str, ...]) -> dict[str, float]:
    """Means over the episodes that ended; nothing where none did."""
    if not episodes:
        return {}
    columns: dict[str, list[float]] = {}

    def add(name: str, value: Any) -> None:
        columns.setdefault(name, []).append(float(value))

    for episode in episodes:
        add("mean_ep_return", episode.episode_return)
        add("mean_ep_length", episode.length)
        if len(groups) > 1:
            add(f"group/{groups[episode.group]}", episode.episode_return)
        for name, value in episode.metrics.items():
            add(name if name.startswith(ENDED) else f"episode/{name}", value)
    # What ended an episode early is counted, all else are means.
    return {
        name: float(np.sum(values) if name.startswith(ENDED) else np.mean(values))
        for name, values in columns.items()
    }
