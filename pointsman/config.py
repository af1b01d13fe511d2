"""The configuration file: what to serve, on what, how to route it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field

from pointsman.errors import InputError
from pointsman.policies.spec import PolicySpec
from pointsman.simulator.spec import ClusterSpec
from pointsman.spec import Spec, parse_spec
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
    data = _read_yaml(path) if path is not None else dict(defaults or {})
    for override in overrides:
        _apply(data, override)
    return parse_spec(Config, data)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError("CONFIG", str(path), "no such file", "check the path") from None
    except IsADirectoryError:
        raise InputError("CONFIG", str(path), "is a directory", "name a YAML file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError("CONFIG", str(path), f"cannot be read ({error})", "name a YAML text file") from None
    except yaml.YAMLError as error:
        problem = " ".join(str(error).split())
        raise InputError("CONFIG", str(path), f"not valid YAML ({problem})", "correct the file") from None
    if not isinstance(data, dict):
        raise InputError("CONFIG", str(path), "does not hold keys", "start with `workload:`")
    return data


def _apply(data: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise InputError("--set", override, "is not key=value", "for example --set workload.requests=5000")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise InputError(f"--set {key}", text, "is not a YAML value", "quote it") from None
    *parents, last = key.split(".")
    for parent in parents:
        inner = data.setdefault(parent, {})
        if isinstance(inner, str):  # a kind or the path of a trace, written short
            inner = data[parent] = {"path" if parent == "trace" else "kind": inner}
        if not isinstance(inner, dict):
            raise InputError(f"--set {key}", value, f"{parent} is not a section", "set it as a whole")
        data = inner
    data[last] = value
