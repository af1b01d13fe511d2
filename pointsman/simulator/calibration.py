"""What a user says about a live replica, in the figures of the router's books; a model by the catalogue."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Self

from pydantic import Field, model_validator

from pointsman.errors import InputError
from pointsman.routing.calibration import FIGURES, Figures
from pointsman.simulator.hardware import Dtype
from pointsman.simulator.plan import plan_replicas
from pointsman.simulator.spec import ClusterSpec
from pointsman.spec import Spec, parse_spec


class Calibration(Spec):
    """What a user may say about a replica; anything left out is estimated."""

    model: str | None = Field(default=None, description="of the catalogue; needs device")
    device: str | None = Field(default=None, description="of the catalogue; needs model")
    tensor_parallel: int = Field(default=1, ge=1, description="devices a replica")
    dtype: Dtype = "fp16"
    prefill_s_per_token: float | None = Field(default=None, gt=0, description="time of a prompt token, s")
    decode_s_per_token: float | None = Field(
        default=None, gt=0, description="what one more stream adds to a step, s"
    )
    step_floor_s: float | None = Field(default=None, gt=0, description="time of the smallest step, s")
    kv_capacity_tokens: float | None = Field(default=None, ge=1, description="KV memory, tokens")

    @model_validator(mode="after")
    def _both_or_neither(self) -> Self:
        if (self.model is None) != (self.device is None):
            missing = "device" if self.device is None else "model"
            remedy = "give both, or the figures themselves"
            raise InputError(f"calibration.{missing}", None, "missing beside the other", remedy)
        return self

    def figures(self) -> Figures:
        """What is known; where a figure and the catalogue both say something, the figure counts."""
        known: Figures = {}
        if self.model is not None and self.device is not None:
            known = _by_catalogue(self.model, self.device, self.tensor_parallel, self.dtype)
        given = {name: getattr(self, name) for name in FIGURES}
        return known | {name: float(value) for name, value in given.items() if value is not None}


def known_figures(calibration: Mapping[str, Any] | None) -> Figures:
    """The figures a configuration gives for a replica; refuses what makes no sense."""
    return parse_spec(Calibration, calibration or {}, "calibration").figures()


@cache
def _by_catalogue(model: str, device: str, tensor_parallel: int, dtype: Dtype) -> Figures:
    spec = ClusterSpec(replicas=1, model=model, device=device, tensor_parallel=tensor_parallel, dtype=dtype)
    plan = plan_replicas(spec)[0]
    return {name: float(getattr(plan, name)) for name in FIGURES}
