"""What is good: a low mean cost, subject to limits on tails.

Mean and tail pull apart. The weights of the cost say what a second is worth in four ways to spend it, the
limits what must not be paid with. `tune`, `train`, its rewards, its checkpoints, `evaluate` and the reports
share one definition, so that two policies with the same objective can be compared.

The cost of a run is a time integral, ∫ (outstanding·N + waiting·W + age·A) dt + slo·E, a request, where N is
the number of requests in the system, W of those without a first token, A the sum of the ages of the latter,
and E counts the seconds beyond the service level at each first token and each last one. Summed over a drained
run these are latencies: N gives the end-to-end time of all requests, W their TTFT, A half their squared TTFT.

A limit holds where a P99 is no longer than that of a named policy on the same arrivals, times a factor, or
than so many seconds.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from pointsman.errors import InputError
from pointsman.routing.heuristics import HEURISTICS
from pointsman.spec import Spec

Value = TypeVar("Value", float, NDArray[np.float64])

REFERENCE = "late-binding"  # whose P99 a limit is about that names no policy
LIMITED = ("ttft_p99", "e2e_p99")
# A share of cost saved is worth nothing if bought with as much of a limit, so it counts several times.
BREACH_WEIGHT = 2.0
# P99s of a few runs are this uncertain: less than that beyond a limit is no breach.
TOLERANCE = 0.01


class Limit(Spec):
    """On a P99: at most `factor` times that of `policy` on the same arrivals, or `seconds`."""

    metric: str
    policy: str = REFERENCE
    factor: float = Field(default=1.0, gt=0)
    seconds: float | None = Field(default=None, gt=0)

    @property
    def text(self) -> str:
        what = f"P99 {'TTFT' if self.metric == 'ttft_p99' else 'end-to-end'}"
        if self.seconds is not None:
            return f"{what} at most {self.seconds:g} s"
        factor = "" if self.factor == 1.0 else f"{self.factor:g} × "
        return f"{what} at most {factor}{self.policy}'s"

    def breach(self, value_s: Value, reference_s: Value) -> Value:
        """How far beyond the limit, as a logarithm: 0.1 is about 10 % too long; below 0 the limit holds."""
        limit_s = self.factor * reference_s if self.seconds is None else self.seconds
        breach: Value = np.log(value_s / limit_s)
        return breach


class Objective(Spec):
    """Weights per second, and limits."""

    name: str
    outstanding: float = Field(default=1.0, ge=0, description="per request in the system")
    waiting: float = Field(default=0.0, ge=0, description="per request without a first token")
    age: float = Field(default=0.0, ge=0, description="per second of age of those: keeps the tail short")
    slo: float = Field(default=0.0, ge=0, description="per second beyond the service level")
    limits: tuple[Limit, ...] = Field(default=(), description="on tails: what no mean may be bought with")

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

    @property
    def references(self) -> tuple[str, ...]:
        """The policies that limits name."""
        return tuple(dict.fromkeys(limit.policy for limit in self.limits if limit.seconds is None))

    def breaches(
        self,
        metrics: Mapping[str, NDArray[np.float64]],
        references: Mapping[str, Mapping[str, NDArray[np.float64]]],
    ) -> dict[str, NDArray[np.float64]]:
        """Breaches by limit, of metrics like `ttft_p99_s` (any shape), given `references` by policy."""
        found = {}
        for limit in self.limits:
            name = f"{limit.metric}_s"
            other = metrics if limit.seconds is not None else references[limit.policy]
            found[limit.metric] = limit.breach(metrics[name], other[name])
        return found

    def penalty(self, breaches: Mapping[str, NDArray[np.float64]], tolerance: float = TOLERANCE) -> float:
        """What breaches [scenarios] take from the share of cost that a policy saves."""
        beyond = [np.maximum(0.0, breach - tolerance).mean() for breach in breaches.values()]
        return BREACH_WEIGHT * float(np.sum(beyond))


def _limits(**kept: Any) -> tuple[Limit, ...]:
    return tuple(parse_limit(metric, value) for metric, value in kept.items())


def parse_limit(metric: str, value: Any) -> Limit:
    """`late-binding`, a policy; `1.05`, times the P99 of the reference; `0.5s`, seconds."""
    where = f"--keep {metric}"
    if metric not in LIMITED:
        raise InputError("--keep", metric, "unknown limit", f"known: {', '.join(LIMITED)}")
    text = str(value)
    if text in HEURISTICS:
        return Limit(metric=metric, policy=text)
    is_absolute = text.endswith("s")
    try:
        number = float(text.removesuffix("s"))
    except ValueError:
        number = -1.0
    if not 0.0 < number < np.inf:
        remedy = "a policy (late-binding), a factor on late-binding's (1.05) or seconds (0.5s)"
        raise InputError(where, text, "is not a limit", remedy)
    return Limit(metric=metric, seconds=number) if is_absolute else Limit(metric=metric, factor=number)


# The more a second of waiting and its age cost, the shorter the tail and the longer the mean; the limits keep
# what the mean is not to be bought with. First tokens of late-binding have nearly the shortest tail there is;
# `balanced` may spend a tenth of it, `mean` all.
OBJECTIVES: Mapping[str, Objective] = {
    one.name: one
    for one in (
        Objective(name="balanced", waiting=2.0, age=3.0, limits=_limits(ttft_p99=1.1, e2e_p99=1.0)),
        Objective(name="mean", waiting=2.0, age=3.0),
        Objective(name="tail", waiting=8.0, age=12.0, limits=_limits(ttft_p99=0.85, e2e_p99=1.0)),
        Objective(name="slo", waiting=2.0, age=0.8, slo=50.0),
    )
}
DEFAULT_OBJECTIVE = "balanced"


def find_objective(name: str, keep: Mapping[str, Any] | None = None) -> Objective:
    """The objective of this name; `keep`, limits by metric, stands in for its own where it names one."""
    if name not in OBJECTIVES:
        near = difflib.get_close_matches(name, OBJECTIVES, n=1)
        remedy = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(OBJECTIVES)}"
        raise InputError("--objective", name, "unknown objective", remedy)
    objective = OBJECTIVES[name]
    if not keep:
        return objective
    given = {metric: parse_limit(metric, value) for metric, value in keep.items()}
    limits = {limit.metric: limit for limit in objective.limits} | given
    return objective.model_copy(update={"limits": tuple(limits.values())})


def parse_keep(options: Sequence[str]) -> dict[str, str]:
    """`--keep ttft_p99=late-binding` as a mapping."""
    kept = {}
    for option in options:
        metric, sign, value = option.partition("=")
        if not sign:
            raise InputError("--keep", option, "is no METRIC=LIMIT", "e.g. --keep ttft_p99=late-binding")
        parse_limit(metric, value)
        kept[metric] = value
    return kept
