"""Generalised advantage estimation for windows of endless traffic, and the discount it uses.

Two things differ from the textbook loop. Decisions are not equally spaced, so discount and trace may depend
on the seconds that passed; and a decision is felt while its request runs and the queue behind it drains, so
they may follow from how long requests live in the episode. The other: an episode that is cut off (truncated)
is not over: the value of what was seen last is still to come, whereas after a termination nothing comes.
Mixing the two up hardly shows in the return of a policy, but makes every value wrong.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field

from pointsman.spec import Spec, one_of

Floats = NDArray[np.float64]


class TimeDiscount(Spec):
    """Discount by elapsed time: decisions that come thick and fast do not shorten the horizon.

    Nor do a few long ones: both reach at least as many decisions as given.
    """

    kind: Literal["time"] = "time"
    horizon_s: float = Field(default=60.0, gt=0, description="a reward this far away counts 1/e [s]")
    trace_s: float = Field(
        default=12.0, gt=0, description="beyond this, advantages trust the critic more than rewards seen [s]"
    )
    horizon_steps: float = Field(default=200.0, gt=0, description="the horizon, at least [decisions]")
    trace_steps: float = Field(default=32.0, gt=0, description="the trace, at least [decisions]")

    def arrays(self, elapsed_s: NDArray[Any], lifetime_s: NDArray[Any]) -> tuple[Floats, Floats]:
        """Discount and trace [T, N] of steps that took `elapsed_s` [T, N]; lifetimes do not matter."""
        elapsed = np.asarray(elapsed_s, dtype=np.float64)
        discount = np.exp(-np.minimum(elapsed / self.horizon_s, 1.0 / self.horizon_steps))
        return discount, np.exp(-np.minimum(elapsed / self.trace_s, 1.0 / self.trace_steps))


class LifetimeDiscount(Spec):
    """Discount by elapsed time in units of how long a request of the episode lives, on average.

    What a decision causes is over when its request is, and the queue that it made. By Little's law, a
    lifetime is as many decisions as there are requests in the system.
    """

    kind: Literal["lifetimes"] = "lifetimes"
    horizon: float = Field(default=8.0, gt=0, description="a reward this far away counts 1/e [lifetimes]")
    trace: float = Field(
        default=1.7,
        gt=0,
        description="beyond this, advantages trust the critic more than rewards seen [lifetimes]",
    )
    horizon_steps: float = Field(default=200.0, gt=0, description="the horizon, at least [decisions]")
    trace_steps: float = Field(default=32.0, gt=0, description="the trace, at least [decisions]")

    def arrays(self, elapsed_s: NDArray[Any], lifetime_s: NDArray[Any]) -> tuple[Floats, Floats]:
        """Discount and trace [T, N] of steps that took `elapsed_s`, where requests live `lifetime_s`."""
        lifetimes = np.asarray(elapsed_s, dtype=np.float64) / lifetime_s
        discount = np.exp(-np.minimum(lifetimes / self.horizon, 1.0 / self.horizon_steps))
        return discount, np.exp(-np.minimum(lifetimes / self.trace, 1.0 / self.trace_steps))


class StepDiscount(Spec):
    """The usual γ and λ: every decision counts the same, however long it took."""

    kind: Literal["steps"] = "steps"
    gamma: float = Field(default=0.998, ge=0, le=1, description="discount of a decision")
    lam: float = Field(default=0.97, ge=0, le=1, description="λ of generalised advantage estimation")

    def arrays(self, elapsed_s: NDArray[Any], lifetime_s: NDArray[Any]) -> tuple[Floats, Floats]:
        """Discount and trace [T, N]; only the shape of `elapsed_s` matters."""
        shape = np.shape(elapsed_s)
        return np.full(shape, self.gamma), np.full(shape, self.lam)


AnyDiscount = TimeDiscount | LifetimeDiscount | StepDiscount
DiscountSpec = Annotated[
    AnyDiscount, BeforeValidator(one_of("ppo.discount", (TimeDiscount, LifetimeDiscount, StepDiscount)))
]


def gae(
    rewards: NDArray[Any],
    values: NDArray[Any],
    final_values: NDArray[Any],
    terminated: NDArray[np.bool_],
    truncated: NDArray[np.bool_],
    discount: NDArray[Any],
    trace: NDArray[Any],
) -> tuple[Floats, Floats]:
    """Advantages and returns, both [T, N], in the unit of the rewards.

    rewards, terminated, truncated, discount, trace: [T, N].
    values: [T + 1, N], V of the observations acted on; the last row is V of what followed the last step.
    final_values: [T, N], V of the final observation where an episode was truncated in that step; not read
      elsewhere. (values[t + 1] is there the value of the *next* episode's first observation.)
    """
    num_steps = len(rewards)
    if len(values) != num_steps + 1:
        raise ValueError(f"values has {len(values)} rows, not {num_steps + 1}: one more than rewards")
    values = np.asarray(values, dtype=np.float64)
    next_values = np.where(truncated, final_values, values[1:])
    next_values[terminated] = 0.0
    discount = np.asarray(discount, dtype=np.float64)
    advantages = np.asarray(rewards, dtype=np.float64) + discount * next_values - values[:-1]
    carry = discount * trace * ~(terminated | truncated)
    for t in range(num_steps - 2, -1, -1):
        advantages[t] += carry[t] * advantages[t + 1]
    return advantages, advantages + values[:-1]
