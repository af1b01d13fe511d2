"""Replicas that were measured: which pairs of device and model the package has times of.

One YAML file each in `replicas/`, with where its figures come from. `cost: auto`, the default, uses them.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, Field

from pointsman.simulator.hardware import Deployment, Dtype
from pointsman.simulator.layers import LayersCost
from pointsman.simulator.steps import StepsCost
from pointsman.spec import Spec, one_of, parse_spec


class ServerTimes(Spec):
    """What a server does beside its steps; the same fields as in the scheduler `vllm-v1`."""

    async_scheduling: bool = False
    api_s: float = Field(default=0.0, ge=0)
    api_s_per_token: float = Field(default=0.0, ge=0)
    api_s_per_stream: float = Field(default=0.0, ge=0)


class MeasuredReplica(Spec):
    device: str
    model: str
    tensor_parallel: int = Field(default=1, ge=1)
    dtype: Dtype = "fp16"
    source: str = Field(description="who measured what, when, with which versions")
    cost: Annotated[StepsCost | LayersCost, BeforeValidator(one_of("cost", (StepsCost, LayersCost)))]
    server: ServerTimes = ServerTimes()

    @property
    def measured_on(self) -> Literal["server", "layers"]:
        return "server" if isinstance(self.cost, StepsCost) else "layers"

    def describes(self, deployment: Deployment) -> bool:
        return (
            self.device == deployment.device.name
            and self.model == deployment.model.name
            and self.tensor_parallel == deployment.tensor_parallel
            and deployment.pipeline_parallel == 1
            and self.dtype == deployment.dtype
        )

    def missing_times(self, scheduler: Spec) -> dict[str, Any]:
        """What the scheduler's specification leaves to the measurement."""
        return {name: value for name, value in self.server if getattr(scheduler, name) is None}


@cache
def measured_replicas() -> tuple[MeasuredReplica, ...]:
    folder = Path(__file__).with_name("replicas")
    return tuple(
        parse_spec(MeasuredReplica, yaml.safe_load(path.read_text(encoding="utf-8")), path.name)
        for path in sorted(folder.glob("*.yaml"))
    )


def find_measured(deployment: Deployment) -> MeasuredReplica | None:
    return next((one for one in measured_replicas() if one.describes(deployment)), None)
