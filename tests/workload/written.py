"""Traces on disk, written and read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pointsman.workload import Workload
from pointsman.workload.readers import read_trace
from pointsman.workload.spec import TraceFile

AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"


def write(folder: Path, content: str | bytes, name: str = "trace.csv") -> Path:
    path = folder / name
    path.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
    return path


def read(path: Path, **options: Any) -> Workload:
    return read_trace(TraceFile(path=str(path), **options))


def as_rows(workload: Workload) -> list[tuple[float, int, int]]:
    columns = (workload.arrived_at, workload.num_prefill_tokens, workload.num_decode_tokens)
    return list(zip(*(column.tolist() for column in columns), strict=True))
