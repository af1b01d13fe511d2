"""Times the layers of several models on a GPU whose machine has PyTorch and nothing else of ours.

    python benchmarks/gpu/profile_shapes.py shapes.json tables.json

`shapes.json`: {"name": {"shape": {…as in the catalogue…}, "tensor_parallel": 1}}; on a machine with Pointsman
installed `pointsman profile` does the same for one model.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from pathlib import Path

import torch


def main() -> None:
    source, target = map(Path, sys.argv[1:3])
    path = Path(__file__).parents[2] / "pointsman" / "live" / "layers.py"
    spec = importlib.util.spec_from_file_location("layers", path)
    assert spec is not None and spec.loader is not None
    layers = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(layers)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    limits = {} if device == "cuda" else {"max_tokens": 256, "max_seqs": 8, "repeats": 2, "dtype": "float32"}
    found = {}
    for name, one in json.loads(source.read_text()).items():
        began = time.perf_counter()
        tables = layers.profile_layers(one["shape"], one["tensor_parallel"], device, **limits)
        found[name] = {**one, "tables": tables}
        print(f"{name}: {time.perf_counter() - began:.1f} s", flush=True)
        torch.cuda.empty_cache()
    described = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    target.write_text(json.dumps({"device": described, "torch": str(torch.__version__), "models": found}))


if __name__ == "__main__":
    main()
