"""The prices of limits, found by training: Lagrange multipliers, one for each limit and group of episodes.

An objective minimises a mean cost subject to limits (experiments/objective.py). A fixed price on a tail is
too high for one scenario and too low for another, and too low for all once the policy is good. So after each
evaluation the price of a limit follows its breach there, by a PID controller on the logarithm of the price:
the arg-max policy is what is served, and that is what the evaluation plays. (Stooke, Achiam & Abbeel 2020
control multipliers so, with the plain price instead of its logarithm; ours differ by orders of magnitude
between scenarios and must not be 0, where a tail would have no price at all when it begins to grow.)

Unit: at price p, a tail twice as heavy as the reference's costs as much as a share p of the mean cost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from pointsman.spec import Spec

# A breach that shrinks faster than that from one evaluation to the next is not added up: the policy follows a
# price slowly, and would be driven far past its limit.
ON_ITS_WAY = 0.9
BREACH = "eval_breach"  # metrics eval_breach/<limit>/<group>: how far beyond it, as a logarithm


class PriceSpec(Spec):
    start: dict[str, float] = Field(
        default={"ttft_p99": 0.005, "e2e_p99": 0.02}, description="price of a limit at first; others: 0.02"
    )
    range: float = Field(
        default=32.0, ge=1, description="at most this many times dearer or cheaper; 1: fixed"
    )
    proportional: float = Field(default=4.0, ge=0, description="of the breach, on the logarithm of the price")
    integral: float = Field(
        default=3.0,
        ge=0,
        description="of the sum of breaches, one an evaluation; what shrinks by itself is not added",
    )
    derivative: float = Field(
        default=2.0, ge=0, description="of what a breach grew since the last evaluation"
    )
    slack: float = Field(
        default=1.0, ge=0, le=1, description="of all these while a limit holds; below 1 a price falls slowly"
    )
    clip: float = Field(default=0.3, gt=0, description="a larger breach counts as this")


class Prices:
    """`after_evaluation`, then `of` holds for the updates that follow. The state is plain JSON."""

    def __init__(self, spec: PriceSpec, limits: Sequence[str], groups: Sequence[str]) -> None:
        self.spec, self.limits, self.groups = spec, tuple(limits), tuple(groups)
        pairs = [f"{limit}/{group}" for limit in limits for group in dict.fromkeys(groups)]
        self._sums = dict.fromkeys(pairs, 0.0)  # what the integral part has come to
        self._breaches: dict[str, float] = {}  # at the last evaluation
        self._factors = dict.fromkeys(pairs, 0.0)  # logarithms

    def after_evaluation(self, metrics: Mapping[str, float]) -> None:
        spec, bound = self.spec, math.log(self.spec.range)
        for pair in self._sums:
            breach = metrics.get(f"{BREACH}/{pair}", math.nan)
            if not math.isfinite(breach):
                continue
            error = min(max(breach, -spec.clip), spec.clip)
            error *= 1.0 if error > 0.0 else spec.slack
            before = self._breaches.get(pair, error)
            grown = error - before
            self._breaches[pair] = error
            if abs(error) > ON_ITS_WAY * abs(before):
                self._sums[pair] = min(max(self._sums[pair] + spec.integral * error, -bound), bound)
            turn = self._sums[pair] + spec.proportional * error + spec.derivative * max(grown, 0.0)
            self._factors[pair] = min(max(turn, -bound), bound)

    def of(self, limit: str) -> NDArray[np.float64]:
        """[G] the price in each group. One that is not evaluated pays what the others do on average."""
        known = [self._factors[f"{limit}/{group}"] for group in self._known(limit)]
        mean = float(np.mean(known)) if known else 0.0
        factors = [
            self._factors[pair] if (pair := f"{limit}/{group}") in self._breaches else mean
            for group in self.groups
        ]
        prices: NDArray[np.float64] = self.spec.start.get(limit, 0.02) * np.exp(factors)
        return prices

    def _known(self, limit: str) -> list[str]:
        return [group for group in dict.fromkeys(self.groups) if f"{limit}/{group}" in self._breaches]

    def metrics(self) -> dict[str, float]:
        """price/<limit>, the geometric mean; where there are several groups, price/<limit>/<group>, too."""
        found = {}
        for limit in self.limits:
            prices = self.of(limit)
            found[f"price/{limit}"] = float(np.exp(np.log(prices).mean()))
            if len(self.groups) > 1:
                by_group = zip(self.groups, prices.tolist(), strict=True)
                found |= {f"price/{limit}/{group}": price for group, price in by_group}
        return found

    def state_dict(self) -> dict[str, Any]:
        return {"sums": self._sums, "breaches": self._breaches, "factors": self._factors}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._sums, self._breaches = dict(state["sums"]), dict(state["breaches"])
        self._factors = dict(state["factors"])
