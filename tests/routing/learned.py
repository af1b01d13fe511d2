"""Checkpoints with random weights, made without PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from pointsman.inference.checkpoint import Checkpoint, NetworkSpec, _inference_shapes, save_checkpoint
from pointsman.inference.space import EntitySpace, Feature
from pointsman.routing.features import CONTEXT_FEATURES, ENTITY_FEATURES


def make_checkpoint(
    seed: int = 0,
    num_entities: int = 8,
    entity_features: tuple[Feature, ...] = ENTITY_FEATURES,
    **network: Any,
) -> Checkpoint:
    rng = np.random.default_rng(seed)
    spec = NetworkSpec(**{"width": 8, "depth": 1} | network)
    space = EntitySpace(num_entities, entity_features, CONTEXT_FEATURES, ())
    shapes = _inference_shapes(spec, space)
    arrays = {name: np.asarray(0.3 * rng.normal(size=shape), np.float32) for name, shape in shapes}
    return Checkpoint(spec, space, arrays, {"hold": {"allowed": False}})


def make_run(folder: Path, seed: int = 0) -> Path:
    """A run directory as `pointsman train` leaves it, with two checkpoints."""
    (folder / "checkpoints").mkdir(parents=True)
    for offset, name in enumerate(("best", "last")):
        save_checkpoint(folder / "checkpoints" / f"{name}.safetensors", make_checkpoint(seed + offset))
    return folder
