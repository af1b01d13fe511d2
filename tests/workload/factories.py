"""Specs and files with defaults for everything a test doesn't care about."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pointsman.spec import parse_spec
from pointsman.workload import WorkloadSpec

TRACES = Path(__file__).parents[3] / "shared" / "traces"
VIDUR_HEADER = "arrived_at,num_prefill_tokens,num_decode_tokens"


def spec(**workload: Any) -> WorkloadSpec:
    return parse_spec(WorkloadSpec, workload, "workload")


def synthetic(arrivals: Any = None, lengths: Any = None, **workload: Any) -> WorkloadSpec:
    return spec(
        arrivals={"kind": "poisson", "rate": 10.0} if arrivals is None else arrivals,
        lengths={"kind": "fixed", "prompt": 100, "output": 10} if lengths is None else lengths,
        **workload,
    )


def vidur_file(folder: Path, *rows: str, name: str = "trace.csv") -> Path:
    path = folder / name
    path.write_text("\n".join([VIDUR_HEADER, *rows]) + "\n", encoding="utf-8")
    return path
