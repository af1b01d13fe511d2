"""Proximal policy optimisation: its configuration, and one update on a rollout.

The update watches itself. If the ratio of the first minibatch is not 1, something differs between rollout and
update (a mask, a normaliser, a recurrent state), and `RatioError` says so instead of training on. If a loss
or a gradient is not finite, `DivergedError` comes before the step that would spoil the weights. Everything
that is decided between two minibatches is decided on numbers averaged over all ranks, so ranks never part.

What is minimised: clipped surrogate + value_coef * value loss - entropy_coef * entropy, and where its weight
is above 0: KL to the policy that acted, KL to a frozen reference, cross-entropy to a teacher's actions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from pointsman.spec import Spec
from pointsman.training.advantages import DiscountSpec, TimeDiscount
from pointsman.training.flat import FlatGradients
from pointsman.training.losses import Losses, Terms, behaviour_logp, sample
from pointsman.training.minibatches import Batch, Rollout
from pointsman.training.passes import make_pass
from pointsman.training.schedules import Schedule, check_range, constant, linear

if TYPE_CHECKING:
    from pointsman.training.networks import PolicyNetwork

__all__ = [
    "Batch",
    "DivergedError",
    "KlPenaltySpec",
    "Knobs",
    "PpoSpec",
    "RatioError",
    "behaviour_logp",
    "sample",
    "update",
]

# Averages a tensor over all ranks, in place.
Average = Callable[[Tensor], None]

# Rollout and update run the network on batches of different sizes, which rounds differently. Bugs are larger:
# a dropped mask gives .9, a forgotten temperature .3.
RATIO_TOLERANCE = 1e-3


class Optimizer(Protocol):
    def step(self, gradients: Tensor, learning_rate: float) -> None:
        """Move all parameters, given the gradients of all: see `flat.Adam`."""
        ...


class DivergedError(RuntimeError):
    """A loss or a gradient is not finite. Raised before the optimizer takes the step."""


class RatioError(RuntimeError):
    """The update sees another policy than the one that acted."""


class KlPenaltySpec(Spec):
    """KL to the policy that acted, as a loss; its weight follows the KL of the last update."""

    target: float = Field(default=0.01, gt=0, description="KL of an update to hold [nats]")
    start: float = Field(
        default=1.0, gt=0, description="weight at first; doubled above 1.5 targets, halved below 2/3"
    )
    highest: float = Field(default=100.0, gt=0, description="weight, at most")


class RateByKlSpec(Spec):
    """The schedule's learning rate, lowered while updates go too far and raised while they hardly move."""

    target: float = Field(default=0.01, gt=0, description="mean KL of an update to hold [nats]")
    limit: float = Field(default=10.0, gt=1, description="factor on the schedule's rate, up or down, at most")


class PpoSpec(Spec):
    learning_rate: Schedule = Field(default=linear(5e-4, 5e-5), description="of Adam, over the run")
    num_epochs: int = Field(default=4, ge=1, description="passes over a rollout")
    minibatch_size: int = Field(default=1024, ge=2, description="decisions a gradient step, about")
    sequence_length: int = Field(default=16, ge=1, description="recurrent networks: steps of a sequence")
    clip_ratio: Schedule = Field(default=constant(0.2), description="the ratio's gain ends at 1 ± this")
    clip_value: float | None = Field(
        default=None, gt=0, description="a value may move this far an update [std of returns]; null: off"
    )
    lead: bool = Field(
        default=True,
        description="values are what the environment says of the future, where it does, plus the critic's",
    )
    value_coef: float = Field(default=0.5, ge=0, description="weight of the value loss")
    max_grad_norm: float = Field(default=0.5, gt=0, description="length of a gradient, at most")
    target_kl: float | None = Field(
        default=0.03, gt=0, description="an update stops when its KL exceeds this [nats]; null: off"
    )
    kl_penalty: KlPenaltySpec | None = Field(default=None, description="adaptive KL penalty; null: off")
    lr_by_kl: RateByKlSpec | None = Field(
        default=None, description="learning rate that follows the measured KL; null: the schedule's"
    )
    normalise_advantages: Literal["minibatch", "group", "none"] = Field(
        default="minibatch", description="to mean 0, std 1: of a minibatch, or of each group in the rollout"
    )
    entropy_jump_clip: float | None = Field(
        default=0.3,
        gt=0,
        description="mean entropy may change this much an update [nats]: a fall beyond ends the update, "
        "beyond a rise the entropy bonus pushes no further; null: off",
    )
    reward_memory: int | None = Field(
        default=50,
        ge=1,
        description="rewards are divided by the spread of returns in their group, averaged over this many "
        "updates; null: off",
    )
    critic_first: int = Field(
        default=0,
        ge=0,
        description="[updates] in which only the critic learns: a warm start teaches it nothing",
    )
    adam_eps: float = Field(default=1e-5, gt=0, description="epsilon of Adam")
    kl_reference: Schedule = Field(
        default=constant(0.0), description="weight of the KL to the reference policy"
    )
    imitation: Schedule = Field(default=constant(0.0), description="weight of the teacher's actions")
    discount: DiscountSpec = TimeDiscount()

    @model_validator(mode="after")
    def _in_range(self) -> Self:
        check_range("learning_rate", self.learning_rate, 0.0)
        check_range("clip_ratio", self.clip_ratio, 1e-6, 1.0)
        check_range("kl_reference", self.kl_reference, 0.0)
        check_range("imitation", self.imitation, 0.0)
        return self


@dataclass(frozen=True)
class Knobs:
    """What schedules and the exploration controller say for one rollout and its update."""

    lr: float
    clip: float = 0.2
    temperature: float = 1.0
    epsilon: float = 0.0  # share of uniform actions
    entropy_coef: float = 0.0
    kl_coef: float = 0.0  # KL to the policy that acted
    kl_ref_coef: float = 0.0  # KL to the reference policy
    imitation_coef: float = 0.0


def update(
    spec: PpoSpec,
    network: PolicyNetwork,
    optimizer: Optimizer,
    batch: Batch,
    knobs: Knobs,
    generator: torch.Generator,
    average: Average | None = None,
) -> dict[str, float]:
    """Improve the network on one rollout; return the metrics of the update.

    With several ranks, each calls it with a rollout of its own of the same size, and all take the same steps.
    """
    runner, flat = make_pass(network), FlatGradients(network)
    rollout = Rollout(spec, batch)
    history: list[dict[str, float]] = []
    norms: list[float] = []
    stop = ""
    jump = spec.entropy_jump_clip if spec.entropy_jump_clip is not None else math.inf
    highest_entropy = math.inf
    for index in (part for _ in range(spec.num_epochs) for part in rollout.epoch(generator)):
        runner.gradients(rollout, index, losses_of(spec, knobs, highest_entropy), flat)
        if average is not None:
            average(flat.everything)
        terms = dict(zip(Terms._fields, flat.terms.tolist(), strict=True))
        if not history:
            _check_ratio(terms["ratio_error"])
            highest_entropy = terms["entropy"] + jump
        history.append(terms)
        if spec.target_kl is not None and terms["approx_kl"] > spec.target_kl:
            stop = "kl"
        elif terms["entropy"] < history[0]["entropy"] - jump:
            stop = "entropy"
        norm = flat.clip(spec.max_grad_norm)
        if not (math.isfinite(norm) and math.isfinite(terms["loss"])):
            raise DivergedError(f"{_not_finite(terms, norm)} is not finite; the step was not taken")
        if stop:
            break
        norms.append(norm)
        optimizer.step(flat.gradients, knobs.lr)
    return {
        **_summary(history),
        "explained_variance": explained_variance(batch.old_values, batch.returns),
        "advantage_std": float(batch.advantages.double().std(correction=0)),
        "grad_norm": sum(norms) / max(len(norms), 1),
        "early_stop": float(stop == "kl"),
        "entropy_stop": float(stop == "entropy"),
        "num_steps": float(len(norms)),
        "lr": knobs.lr,
        "clip": knobs.clip,
        "temperature": knobs.temperature,
        "epsilon": knobs.epsilon,
        "ent_coef": knobs.entropy_coef,
        "kl_coef": knobs.kl_coef,
        "kl_ref_coef": knobs.kl_ref_coef,
        "imitation_coef": knobs.imitation_coef,
    }


def losses_of(spec: PpoSpec, knobs: Knobs, highest_entropy: float = math.inf) -> Losses:
    return Losses(
        temperature=knobs.temperature,
        epsilon=knobs.epsilon,
        clip=knobs.clip,
        entropy_coef=knobs.entropy_coef,
        kl_coef=knobs.kl_coef,
        kl_ref_coef=knobs.kl_ref_coef,
        imitation_coef=knobs.imitation_coef,
        value_coef=spec.value_coef,
        clip_value=math.inf if spec.clip_value is None else spec.clip_value,
        highest_entropy=highest_entropy,
    )


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """1: the values foresee the returns exactly; 0: no better than their mean; below: worse."""
    variance = returns.double().var(correction=0)
    if variance == 0:
        return math.nan
    return float(1.0 - (returns.double() - values.double()).var(correction=0) / variance)


def _check_ratio(error: float) -> None:
    if error > RATIO_TOLERANCE:
        raise RatioError(
            f"the ratio of the first minibatch is off 1 by {error:.2g}: rollout and update differ "
            "(mask, temperature, epsilon, normaliser or recurrent state)"
        )


def _not_finite(terms: dict[str, float], norm: float) -> str:
    bad = [name for name, value in terms.items() if not math.isfinite(value)]
    return ", ".join(bad) or f"the gradient ({norm})"


def _summary(history: list[dict[str, float]]) -> dict[str, float]:
    """Means over the minibatches of an update, under the names of the log."""
    names = ("pg_loss", "v_loss", "entropy", "entropy_frac", "clip_frac", "kl_ref", "imitation_loss")
    means = {name: sum(terms[name] for terms in history) / len(history) for name in names}
    kls = [terms["approx_kl"] for terms in history]
    return {
        **means,
        "approx_kl_last": kls[-1],
        "approx_kl_mean": sum(kls) / len(kls),
        "approx_kl_max": max(kls),
    }
