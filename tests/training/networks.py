"""Small networks and observations for the tests of networks, compiled and not."""

from __future__ import annotations

from typing import Any

import torch

from pointsman.inference.space import EntitySpace, Feature
from pointsman.training.networks import NetworkSpec, PolicyNetwork, TensorObservation, build_network

KINDS = ("pooled", "attention", "attention+gru", "mlp")
SYMMETRIC = ("pooled", "attention", "attention+gru")
NUM_FEATURES, NUM_CONTEXT, NUM_PRIVILEGED = 7, 5, 3


def make_space(num_entities: int = 4) -> EntitySpace:
    def features(prefix: str, count: int) -> tuple[Feature, ...]:
        return tuple(Feature(f"{prefix}{i}", "1", "group", "of a test") for i in range(count))

    return EntitySpace(
        num_entities,
        features("entity", NUM_FEATURES),
        features("context", NUM_CONTEXT),
        features("privileged", NUM_PRIVILEGED),
    )


def make_observation(
    num_rows: int, num_entities: int = 4, seed: int = 0, is_padded: bool = False
) -> TensorObservation:
    """Random numbers; with `is_padded`, 1 to R of the entities are there, in random slots, not all legal."""
    draw = torch.Generator().manual_seed(seed)
    mask = torch.ones(num_rows, num_entities, dtype=torch.bool)
    legal = torch.ones(num_rows, num_entities + 1, dtype=torch.bool)
    if is_padded:
        mask = torch.rand(num_rows, num_entities, generator=draw) < 0.6
        mask[:, num_rows % num_entities] = True
        legal[:, 1:] = mask & (torch.rand(num_rows, num_entities, generator=draw) < 0.9)
    return TensorObservation(
        2 * torch.randn(num_rows, num_entities, NUM_FEATURES, generator=draw) + 1,
        torch.randn(num_rows, NUM_CONTEXT, generator=draw) - 1,
        mask,
        legal,
        torch.randn(num_rows, NUM_PRIVILEGED, generator=draw),
    )


def make_network(num_entities: int = 4, seed: int = 0, **spec: Any) -> PolicyNetwork:
    """A network that has seen data and whose weights are not those of a beginner."""
    defaults: dict[str, Any] = {"width": 16, "heads": 2}
    network = build_network(NetworkSpec(**defaults | spec), make_space(num_entities), seed)
    network.observe(make_observation(200, num_entities, seed + 1))
    draw = torch.Generator().manual_seed(seed + 2)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=draw)
    return network
