"""The configuration file: what to serve, on what, how to route it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from pointsman.routing.policy import PolicySpec
from pointsman.routing.sources import anchored_policy
from pointsman.simulator.spec import ClusterSpec
from pointsman.spec import Spec, apply_override, parse_spec, read_yaml
from pointsman.workload import WorkloadSpec


class SloSpec(Spec):
    """What a request must meet to count as good."""

    ttft_s: float = Field(default=2.0, gt=0, description="time to first token, at most")
    tpot_s: float = Field(default=0.1, gt=0, description="time per output token, at most")


class Config(Spec):
    workload: WorkloadSpec = Field(description="requests to serve")
    cluster: ClusterSpec = ClusterSpec()
    policy: PolicySpec = PolicySpec()
    slo: SloSpec = SloSpec()
    seed: int = Field(default=0, ge=0, description="of arrivals, lengths and random ties")


def load_config(path: Path | None, overrides: Sequence[str] = (), defaults: Any = None) -> Config:
    """Read a YAML file, apply `key=value` overrides, validate."""
    data = read_yaml(path, "workload") if path is not None else dict(defaults or {})
    for override in overrides:
        apply_override(data, override, "workload.requests=5000")
    if path is not None and "policy" in data:
        data["policy"] = anchored_policy(data["policy"], path.parent)
    return parse_spec(Config, data)
