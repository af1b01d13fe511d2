"""Which tables of Vidur's profiler to take execution times from; profile_tables.py reads them.

Apart from that module, which needs polars: who only names a device, as a router does, need not load it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from pointsman.spec import Spec

KV_STEP_TOKENS = 64  # of the tables that are made of them
CHUNK_STEP_TOKENS = 32


class ProfileCost(Spec):
    """Measured tables: paths of Vidur's CSV files."""

    kind: Literal["profile"]
    attention: Path = Field(description="attention.csv")
    mlp: Path = Field(description="mlp.csv")
    all_reduce: Path | None = Field(default=None, description="all_reduce.csv; with tensor_parallel > 1")
    send_recv: Path | None = Field(default=None, description="send_recv.csv; with pipeline_parallel > 1")
    cpu_overheads: Path | None = Field(default=None, description="cpu_overheads.csv; none = no CPU overhead")
    block_size: int = Field(
        default=16, ge=1, description="KV block size of the attention rows to use, tokens"
    )
    is_multi_node: bool = Field(default=False, description="pipeline stages are on different nodes")

    def under(self, base_dir: Path) -> ProfileCost:
        """The same with relative paths starting at `base_dir`."""
        paths = {name: value for name, value in self if isinstance(value, Path)}
        return self.model_copy(update={name: base_dir / path for name, path in paths.items()})
