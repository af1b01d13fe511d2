"""What to optimise: the price of a second, in four ways to spend it.

Mean and tail pull apart, and the weights choose between them. `tune`, `train` and the rewards share these
names, so that two policies with the same objective can be compared by their `cost`.

The cost of a run is a time integral, ∫ (outstanding·N + waiting·W + age·A) dt + slo·E, a request, where N is
the number of requests in the system, W of those without a first token, A the sum of the ages of the latter,
and E counts the seconds beyond the service level at each first token and each last one. Summed over a drained
run these are latencies: N gives the end-to-end time of all requests, W their TTFT, A half their squared TTFT.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from pointsman.errors import InputError
from pointsman.spec import Spec

Value = TypeVar("Value", float, NDArray[np.float64])


class Objective(Spec):
    """Weights per second."""

    name: str
    outstanding: float = Field(default=1.0, ge=0, description="per request in the system")
    waiting: float = Field(default=0.0, ge=0, description="per request without a first token")
    age: float = Field(default=0.0, ge=0, description="per second of age of those: keeps the tail short")
    slo: float = Field(default=0.0, ge=0, description="per second beyond the service level")

    @property
    def formula(self) -> str:
        """In words, with the weights of the means it is made of; times in seconds."""
        terms = (
            (self.outstanding, "e2e"),
            (self.waiting, "TTFT"),
            (0.5 * self.age, "TTFT²"),
            (self.slo, "seconds beyond the SLO"),
        )
        return f"{self.name} = " + " + ".join(
            what if weight == 1 else f"{weight:g} × {what}" for weight, what in terms if weight
        )

    def cost(self, metrics: Mapping[str, Value]) -> Value:
        """What a request costs on average, from the metrics of a run or arrays of them."""
        return (
            self.outstanding * metrics["e2e_mean_s"]
            + self.waiting * metrics["ttft_mean_s"]
            + self.age * 0.5 * metrics["ttft_square_mean_s2"]
            + self.slo * metrics["slo_excess_mean_s"]
        )


# The more a second of waiting and its age cost, the shorter the tail and the longer the mean, and between the
# two lies a cliff. On `steady-chat`, selection seeds, against least-outstanding: with waiting 3, age 0.8, two
# minutes of training ended at mean end-to-end −9.3 %, P99 TTFT +37 %; with waiting 4, age 4 (rewards by the
# moment's price) the best was −2.6 %, −30 %. `balanced` is near the cliff: keep the best checkpoint.
OBJECTIVES: Mapping[str, Objective] = {
    one.name: one
    for one in (
        Objective(name="balanced", waiting=2.0, age=3.0),
        Objective(name="mean", waiting=2.0, age=0.3),
        Objective(name="tail", waiting=8.0, age=12.0),
        Objective(name="slo", waiting=2.0, age=0.8, slo=50.0),
    )
}
DEFAULT_OBJECTIVE = "balanced"


def find_objective(name: str) -> Objective:
    if name in OBJECTIVES:
        return OBJECTIVES[name]
    near = difflib.get_close_matches(name, OBJECTIVES, n=1)
    remedy = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(OBJECTIVES)}"
    raise InputError("--objective", name, "unknown objective", remedy)
