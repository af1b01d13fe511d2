"""The section `env` of a training run on Vidur, and the arrivals it stands for."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator
from vidur.config.config import SarathiSchedulerConfig, VllmSchedulerConfig

from pointsman.errors import InputError
from pointsman.experiments.objective import DEFAULT_OBJECTIVE, find_objective
from pointsman.inference.checkpoint import Checkpoint, load_checkpoint
from pointsman.integrations.vidur.cluster import VidurCluster
from pointsman.integrations.vidur.running import Arrival
from pointsman.routing.policy import PolicySpec
from pointsman.spec import Spec, parse_spec
from pointsman.workload import build_workload
from pointsman.workload.spec import WorkloadSpec

BASELINE = "least-outstanding"
ENGINES = {"vllm": VllmSchedulerConfig, "sarathi": SarathiSchedulerConfig}


class VidurEvaluation(Spec):
    seeds: int = Field(default=8, ge=1, le=500, description="selection seeds, an episode each")


class VidurSpec(Spec):
    """Equal replicas of Llama-3-8B on A100s, each step as long as costs.py says; Poisson arrivals."""

    replicas: int = Field(default=4, ge=1, le=64)
    engine: Literal["vllm", "sarathi"] = Field(default="vllm", description="Vidur's scheduler of a replica")
    num_blocks: int | None = Field(
        default=None, ge=1, description="KV blocks of a replica; null: what Vidur's memory planner finds"
    )
    rate_rps: float = Field(default=18.0, gt=0, description="requests a second, of all replicas together")
    lengths: str = Field(default="azure-conv", description="of prompts and outputs: kind of workload.lengths")
    requests: int = Field(default=150, ge=2, le=100_000, description="of an episode")
    max_tokens: int = Field(default=4096, ge=2, description="bound on prompt + output")
    objective: str = Field(default=DEFAULT_OBJECTIVE, description="balanced, mean or tail: its mean cost")
    start: str = Field(default="default", description="the policy to start from; its rules of holding stay")
    evaluation: VidurEvaluation = VidurEvaluation()

    @field_validator("objective")
    @classmethod
    def _has_no_service_level(cls, name: str) -> str:
        if find_objective(name).slo > 0:
            raise InputError("env.objective", name, "counts service levels", "use balanced, mean or tail")
        return name

    @property
    def run_must_be(self) -> dict[str, Any]:
        return {"start_from": self.start}

    @cached_property
    def checkpoint(self) -> Checkpoint:
        path = parse_spec(PolicySpec, {"kind": self.start}, "env.start").checkpoint
        if path is None:
            raise InputError("env.start", self.start, "is not a trained policy", "name `default` or a run")
        return load_checkpoint(path, "env.start")

    @property
    def weights(self) -> NDArray[np.float64]:
        """[3] what a second costs: of a request in the system, of one without a first token, of its age."""
        objective = find_objective(self.objective)
        return np.array([objective.outstanding, objective.waiting, objective.age])

    def arrivals(self, seed: int) -> list[Arrival]:
        section = {
            "arrivals": {"kind": "poisson", "rate": self.rate_rps},
            "lengths": self.lengths,
            "requests": self.requests,
            "max_tokens": self.max_tokens,
        }
        workload = build_workload(parse_spec(WorkloadSpec, section, "env"), seed)
        columns = (workload.arrived_at, workload.num_prefill_tokens, workload.num_decode_tokens)
        return [Arrival(float(t), int(p), int(d)) for t, p, d in zip(*columns, strict=True)]

    def cluster(self, seed: int, policy: str) -> VidurCluster:
        engine = ENGINES[self.engine]()
        return VidurCluster(
            self.arrivals(seed), policy, engine, num_replicas=self.replicas, num_blocks=self.num_blocks
        )


def spent(times: NDArray[np.float64], now: float) -> NDArray[np.float64]:
    """[3] seconds until now: requests in the system, without a first token, and the ages of the latter.

    `times` [requests, 3]: arrival, first token, end. Each is the integral of a number over time.
    """
    arrived, first, done = np.minimum(times, now).T
    waited = first - arrived
    integrals: NDArray[np.float64] = np.array(
        [(done - arrived).sum(), waited.sum(), 0.5 * np.square(waited).sum()]
    )
    return integrals
