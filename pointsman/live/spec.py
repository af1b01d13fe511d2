"""The section `env` of a training run on live servers."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from pointsman.config import Config, load_config
from pointsman.errors import InputError
from pointsman.experiments.objective import DEFAULT_OBJECTIVE, find_objective
from pointsman.experiments.scenarios import DEFAULT, find_scenario
from pointsman.inference.checkpoint import Checkpoint
from pointsman.spec import Spec
from pointsman.training.warm_start import find_policy


class LiveEvaluation(Spec):
    """Blocks of requests, all by the policy or all by the one it started from, in turn."""

    requests: int = Field(default=200, ge=8, description="of a block; its first quarter counts for neither")
    pairs: int = Field(default=6, ge=2, description="of blocks, each with one of either policy")


class LiveSpec(Spec):
    servers: tuple[str, ...] = Field(default=(), description="http://host:port of each, as --live has them")
    scenario: str = Field(default=DEFAULT, description="whose arrivals are sent")
    config: Path | None = Field(default=None, description="a configuration, instead of a scenario")
    workload: dict[str, Any] = Field(default={}, description="what to change in its section `workload`")
    objective: str = Field(default=DEFAULT_OBJECTIVE, description="balanced, mean or tail")
    start: str = Field(default="default", description="the policy to start from, which also stands in")
    share: float = Field(
        default=0.5, ge=0.05, le=0.95, description="of requests that the policy in training decides"
    )
    margin: float = Field(
        default=0.3, gt=0, description="its requests may cost this much more a token, as a share"
    )
    window: int = Field(default=300, ge=20, description="requests of either kind that are compared")
    max_failed: float = Field(default=0.05, ge=0, lt=1, description="share of failed requests that ends it")
    patience_s: float = Field(
        default=0.02, gt=0, le=1, description="how long a request waits for the trainer's action"
    )
    decisions: int = Field(default=256, ge=2, description="length of an episode: run.rollout_steps")
    evaluation: LiveEvaluation = LiveEvaluation()

    @field_validator("scenario")
    @classmethod
    def _known(cls, name: str) -> str:
        return find_scenario(name).name

    @field_validator("objective")
    @classmethod
    def _seen_by_routers(cls, name: str) -> str:
        if find_objective(name).slo > 0:
            problem = "counts service levels, which a router's books do not have"
            raise InputError("env.objective", name, problem, "use balanced, mean or tail")
        return name

    @property
    def run_must_be(self) -> dict[str, Any]:
        """One cluster that nobody can copy, rewind or try at random; see training/config.py."""
        return {
            "start_from": self.start,
            "rollout_steps": self.decisions,
            "workers": 1,
            "num_envs": 1,
            "settle_steps": 0,
            "headroom_steps": 0,
            "checkpoint_every": 1,
        }

    @cached_property
    def checkpoint(self) -> Checkpoint:
        found = find_policy(self.start, "env.start")
        if found.network.kind == "attention+gru":
            problem = "has a memory, which would miss what the other policy decides"
            raise InputError("env.start", self.start, problem, "start from one of another network.kind")
        return found

    def traffic(self, seed: int) -> Config:
        """The configuration whose arrivals are sent."""
        changes = [f"workload.{key}={json.dumps(value)}" for key, value in self.workload.items()]
        if self.config is None:
            return find_scenario(self.scenario).config(seed, changes)
        return load_config(self.config, changes).model_copy(update={"seed": seed})
