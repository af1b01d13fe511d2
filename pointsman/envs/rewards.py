"""What a decision earned: a weighted sum of named terms.

The default is a cost integral relative to a shadow. Between two decisions the cluster pays, for each second,
w1 for every request in the system, w2 for every one without a first token and w3 times the ages of those; a
second cluster, the shadow, serves the same arrivals under a reference policy and pays the same way; the
reward is the difference. Its sum is what latency and time to first token gained over the reference, so it is
dense, has no ceiling and no floor, and the noise of the arrivals cancels.

Limits on tails (experiments/objective.py) are no terms of the reward: their prices are the trainer's to find
(training/prices.py). What is earned at a price of 1 comes beside the reward, by limit, in a unit that is the
same everywhere: a policy whose tail is half as heavy as the reference's earns 0.5 a second.

`delta`, `instant` and `hybrid` look natural and do not teach (docs/results/ablation.md shows it); they stay
available so that the failure can be reproduced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator, model_validator

from pointsman.envs.totals import Array, RewardTotals
from pointsman.errors import InputError
from pointsman.experiments.objective import Objective
from pointsman.spec import Spec

FLAT_SLOPE = 0.05  # of tanh; below it, better and worse look the same
SMOOTHING_S = 5.0  # of the latency and the throughput that `delta`, `instant` and `hybrid` look at


class Snapshot(NamedTuple):
    """One step of every environment: what it and its shadow gained, and the load it left."""

    own: RewardTotals  # gained in this step
    shadow: RewardTotals
    # The rest is NaN where no term that counts looks at it.
    outstanding_std: Array  # over the replicas, at the decision
    outstanding_mean: Array
    outstanding_range: Array  # max minus min
    latency_s: Array  # smoothed end-to-end latency of finished requests, after the step
    latency_before_s: Array
    throughput_rps: Array  # smoothed


def _cost(field: str) -> Callable[[Snapshot, RewardSpec], Array]:
    def term(snapshot: Snapshot, spec: RewardSpec) -> Array:
        own: Array = getattr(snapshot.own, field)
        return getattr(snapshot.shadow, field) - own if spec.relative else -own

    return term


def _throughput(snapshot: Snapshot, spec: RewardSpec) -> Array:
    completed = snapshot.own.num_completed
    return completed - snapshot.shadow.num_completed if spec.relative else completed


def _smoothed_throughput(snapshot: Snapshot, spec: RewardSpec) -> Array:
    return snapshot.throughput_rps / spec.throughput_target_rps


def _imbalance_cv(snapshot: Snapshot, spec: RewardSpec) -> Array:
    return -snapshot.outstanding_std / (snapshot.outstanding_mean + 1.0)


def _mean_latency(snapshot: Snapshot, spec: RewardSpec) -> Array:
    completed = snapshot.own.num_completed
    return -snapshot.own.sum_e2e_s / np.maximum(completed, 1.0)


def _latency_improvement(snapshot: Snapshot, spec: RewardSpec) -> Array:
    return snapshot.latency_before_s - snapshot.latency_s


def _logistic_latency(snapshot: Snapshot, spec: RewardSpec) -> Array:
    """Flat far from the target on both sides: what is wrong with it."""
    excess = (snapshot.latency_s - spec.latency_target_s) / (0.1 * spec.latency_target_s)
    return -1.0 / (1.0 + np.exp(-np.clip(excess, -50.0, 50.0)))


TERMS: Mapping[str, Callable[[Snapshot, RewardSpec], Array]] = {
    "outstanding": _cost("in_system_area"),
    "waiting": _cost("unstarted_area"),
    "age": _cost("age_area"),
    "slo": _cost("slo_excess_s"),
    "throughput": _throughput,
    "smoothed_throughput": _smoothed_throughput,
    "imbalance_std": lambda snapshot, spec: -snapshot.outstanding_std,
    "imbalance_cv": _imbalance_cv,
    "imbalance_range": lambda snapshot, spec: -snapshot.outstanding_range,
    "latency": _mean_latency,
    "latency_improvement": _latency_improvement,
    "logistic_latency": _logistic_latency,
    "low_latency": lambda snapshot, spec: snapshot.own.num_fast_first_tokens,
}
COST_TERMS = ("outstanding", "waiting", "age", "slo")
# These look at `own` and `shadow` of a snapshot, and at nothing else of it.
TERMS_OF_TOTALS = frozenset((*COST_TERMS, "throughput", "latency", "low_latency"))

PRESETS: Mapping[str, dict[str, Any]] = {
    "shadow": {},
    "delta": {"terms": {"latency_improvement": 1.0}, "relative": False, "scale": "none"},
    "instant": {"terms": {"latency": 1.0}, "relative": False, "scale": "none"},
    "hybrid": {
        "terms": {"logistic_latency": 4.0, "smoothed_throughput": 1.0, "imbalance_cv": 0.2},
        "relative": False,
        "scale": "none",
        "clip": (-4.0, 4.0),
    },
    "hybrid-tanh": {
        "terms": {"logistic_latency": 4.0, "smoothed_throughput": 1.0, "imbalance_cv": 0.2},
        "relative": False,
        "scale": "none",
        "squash": "tanh",
    },
}


class RewardSpec(Spec):
    """Written short as a preset's name, or in full."""

    terms: dict[str, float] = Field(
        default={}, description="weight of each term; empty: the costs of the objective"
    )
    relative: bool = Field(default=True, description="costs and throughput minus those of the shadow")
    scale: Literal["episode", "moment", "none"] = Field(
        default="episode",
        description="divide by what the shadow pays per second of the episode, so that a reward of 0.1 for a "
        "second means 10 % less cost in every scenario; or by what it pays at the moment, if that is more: "
        "less noise from crowded moments, but where bursts and overload matter they are then neglected",
    )
    clip: tuple[float, float] | None = Field(default=None, description="lowest and highest reward of a step")
    squash: Literal["none", "tanh"] = Field(
        default="none",
        description="tanh hides how much better a good step is; kept to show that it does harm",
    )
    latency_target_s: float = Field(default=6.0, gt=0, description="of logistic_latency")
    throughput_target_rps: float = Field(default=1.85, gt=0, description="of smoothed_throughput")

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        if value not in PRESETS:
            raise InputError("env.reward", value, "unknown preset", f"known: {', '.join(PRESETS)}")
        return PRESETS[value]

    @field_validator("terms")
    @classmethod
    def _known(cls, terms: dict[str, float]) -> dict[str, float]:
        unknown = [name for name in terms if name not in TERMS]
        if unknown:
            raise InputError("env.reward.terms", unknown[0], "unknown term", f"known: {', '.join(TERMS)}")
        return terms

    def weights(self, objective: Objective) -> dict[str, float]:
        """The terms that count, and how much."""
        if self.terms:
            return {name: weight for name, weight in self.terms.items() if weight != 0.0}
        costs = {name: getattr(objective, name) for name in COST_TERMS}
        return {name: weight for name, weight in costs.items() if weight != 0.0}

    def evaluate(
        self, snapshot: Snapshot, weights: Mapping[str, float], scale: Array
    ) -> tuple[Array, dict[str, Array], NDArray[np.bool_]]:
        """(reward [N], its terms, which rewards were clipped or squashed flat)."""
        terms = {name: weight * TERMS[name](snapshot, self) / scale for name, weight in weights.items()}
        raw = sum(terms.values(), start=np.zeros(len(scale)))
        reward = raw
        is_flat = np.zeros(len(raw), np.bool_)
        if self.squash == "tanh":
            reward = np.tanh(raw)
            is_flat |= 1.0 - reward**2 < FLAT_SLOPE
        if self.clip is not None:
            clipped = np.clip(reward, *self.clip)
            is_flat |= clipped != reward
            reward = clipped
        return reward, terms, is_flat
