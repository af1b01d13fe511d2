"""Configurations in files, with defaults for everything a test doesn't care about."""

from __future__ import annotations

import csv
import gzip
from pathlib import Path

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "data" / "golden"

HEADER = "arrived_at,num_prefill_tokens,num_decode_tokens"

# The example of the configuration's documentation.
EXAMPLE = """\
workload: {trace: trace.csv}
cluster:
  replicas: 4
  scheduler: {kind: sarathi, chunk_size: 512, max_batch_size: 128, block_size: 16, num_blocks: 2048, \
watermark: 0.01, pipeline_stages: 1}
  cost: {kind: linear, a: 0.0085, b: 8.0e-5, c: 3.0e-5, d: 8.0e-8, e: 3.4e-9}
policy: {kind: round-robin}
seed: 0
"""


def config_file(folder: Path, *rows: str, config: str = EXAMPLE, header: str = HEADER) -> Path:
    """The example with a trace of these rows beside it."""
    (folder / "trace.csv").write_text("\n".join([header, *rows]) + "\n")
    path = folder / "cluster.yaml"
    path.write_text(config)
    return path


def read_rows(path: Path) -> list[dict[str, str]]:
    packed = path.with_name(path.name + ".gz")
    text = gzip.decompress(packed.read_bytes()).decode() if packed.exists() else path.read_text()
    return list(csv.DictReader(text.splitlines()))
