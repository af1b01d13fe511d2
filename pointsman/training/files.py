"""The state of a trainer on disk: complete, or as it was before, whatever happens meanwhile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from pointsman.files import replace_file

HEADER = "pointsman_state"


def write_state(path: Path, arrays: dict[str, NDArray[Any]], values: dict[str, Any]) -> None:
    """Arrays and plain JSON in one safetensors file: no pickle, which could run code."""
    whole = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    replace_file(path, save(whole, {HEADER: json.dumps(values)}))


def read_state(path: Path) -> tuple[dict[str, NDArray[Any]], dict[str, Any]] | None:
    """None where the file is damaged or of another kind."""
    try:
        with safe_open(path, framework="numpy") as file:
            values = json.loads((file.metadata() or {})[HEADER])
            return {name: file.get_tensor(name) for name in file.keys()}, values  # noqa: SIM118
    except (SafetensorError, KeyError, ValueError, OSError):
        return None
