"""The `policy:` section of the configuration, and the list of heuristics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator, model_validator

from pointsman.errors import InputError
from pointsman.policies import kernels
from pointsman.signals import NUM_SIGNALS, SIGNAL_INDEX, SIGNALS
from pointsman.spec import Spec


class Heuristic(NamedTuple):
    kernel: int
    what: str


HEURISTICS: Mapping[str, Heuristic] = {
    "random": Heuristic(kernels.RANDOM, "any replica"),
    "round-robin": Heuristic(kernels.ROUND_ROBIN, "one after the other"),
    "weighted-round-robin": Heuristic(
        kernels.WEIGHTED_ROUND_ROBIN, "one after the other, faster replicas more often"
    ),
    "least-outstanding": Heuristic(kernels.LEAST_OUTSTANDING, "fewest requests sent and not finished"),
    "vidur-lor": Heuristic(
        kernels.VIDUR_LOR,
        "Vidur's: shortest queue on the server, ties to the lowest id (oracle signal)",
    ),
    "power-of-two": Heuristic(kernels.POWER_OF_TWO, "two at random, the one with fewer outstanding"),
    "least-tokens": Heuristic(kernels.LEAST_TOKENS, "fewest tokens: waiting prompts and running context"),
    "least-work": Heuristic(
        kernels.LEAST_WORK, "shortest estimated time to finish what it has, by its speed"
    ),
    "least-delay": Heuristic(
        kernels.LEAST_DELAY, "least waiting added, for the request itself and for those already there"
    ),
    "least-kv": Heuristic(kernels.LEAST_KV, "lowest KV use by the last scrape"),
    "session-affinity": Heuristic(
        kernels.SESSION_AFFINITY, "a session stays on its replica; without one, least-outstanding"
    ),
    "hold-until-room": Heuristic(
        kernels.HOLD_UNTIL_ROOM, "hold at the router until a replica has room, then least-outstanding"
    ),
    "linear-score": Heuristic(
        kernels.LINEAR_SCORE, "lowest weighted sum of signals, weights from the configuration"
    ),
}


class PolicySpec(Spec):
    kind: str = Field(default="least-outstanding", description="a heuristic; see `pointsman policies`")
    weights: dict[str, float] = Field(default={}, description="linear-score: weight of each signal")
    kv_limit: float = Field(
        default=0.95, gt=0, description="hold-until-room: share of a replica's KV memory that may be booked"
    )
    prefill_limit_tokens: float = Field(
        default=2048,
        gt=0,
        description="hold-until-room: prompt tokens that may wait on a replica",
    )

    @field_validator("kind")
    @classmethod
    def _known(cls, kind: str) -> str:
        if kind not in HEURISTICS:
            raise InputError("policy.kind", kind, "unknown policy", f"known: {', '.join(HEURISTICS)}")
        return kind

    @model_validator(mode="after")
    def _weights_fit(self) -> Self:
        unknown = [name for name in self.weights if name not in SIGNAL_INDEX]
        if unknown:
            remedy = f"known signals: {', '.join(SIGNAL_INDEX)}"
            raise InputError("policy.weights", unknown[0], "unknown signal", remedy)
        if self.kind == "linear-score" and not any(self.weights.values()):
            raise InputError(
                "policy.weights", self.weights, "linear-score needs a weight", "for example {outstanding: 1}"
            )
        if self.kind != "linear-score" and self.weights:
            raise InputError("policy.weights", self.weights, "only for linear-score", "leave it out")
        return self


class PolicyTables:
    """Policies as the kernel wants them: `rows` [N] POLICY, one for each cluster."""

    def __init__(self, specs: Sequence[PolicySpec | None]) -> None:
        """None stands for a policy outside the kernel."""
        self._weights: NDArray[Any] = np.zeros((len(specs), NUM_SIGNALS))
        self.rows = np.zeros(len(specs), kernels.POLICY).view(np.recarray)
        for row, spec, weights in zip(self.rows, specs, self._weights, strict=True):
            row.weights = weights.ctypes.data
            if spec is None:
                row.kind = kernels.EXTERNAL
                continue
            row.kind = HEURISTICS[spec.kind].kernel
            row.kv_limit = spec.kv_limit
            row.prefill_limit = spec.prefill_limit_tokens
            for name, weight in spec.weights.items():
                weights[SIGNAL_INDEX[name]] = weight
                row.reads_derived |= SIGNALS[SIGNAL_INDEX[name]].source == "derived"
