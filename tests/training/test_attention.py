from __future__ import annotations

import numpy as np
import pytest
import torch

from pointsman.evaluation.explain import RecordedDecisions
from pointsman.inference.checkpoint import Checkpoint, NetworkSpec
from pointsman.inference.space import EntitySpace, Feature
from pointsman.training.attention import attention_by_preference
from pointsman.training.networks import TensorObservation, build_network

SPACE = EntitySpace(
    5,
    tuple(Feature(name, "1", "g", "") for name in "abc"),
    (Feature("d", "1", "g", ""),),
    (Feature("e", "1", "g", ""),),
)


def checkpoint(kind: str) -> Checkpoint:
    spec = NetworkSpec(kind=kind, width=8, depth=1, heads=2)  # type: ignore[arg-type]
    network = build_network(spec, SPACE, seed=3)
    with torch.no_grad():  # strong weights: attention and preference far from even
        for parameter in network.parameters():
            parameter.mul_(3.0)
    return Checkpoint(spec, SPACE, {name: tensor.numpy() for name, tensor in network.state_dict().items()})


def decisions(num_entities: list[int], width: int) -> RecordedDecisions:
    rng = np.random.default_rng(0)
    count = len(num_entities)
    sizes = np.array(num_entities)
    there = np.arange(5) < sizes[:, None]
    entities = rng.normal(size=(count, 5, 3)).astype(np.float32) * there[:, :, None]
    legal = np.concatenate((np.ones((count, 1), bool), there), axis=1)
    context = rng.normal(size=(count, 1)).astype(np.float32)
    return RecordedDecisions(entities, context, sizes, legal, np.zeros((count, width), np.float32))


@pytest.mark.parametrize("kind", ["attention", "attention+gru"])
def test_rows_are_shares_in_the_order_of_preference(kind: str) -> None:
    """Against each decision taken on its own, entities put in order before the network sees them."""
    policy = checkpoint(kind)
    seen = decisions([3, 3, 5, 3, 2], width=8)
    found = attention_by_preference(policy, seen)
    assert found is not None and found.shape == (2, 3, 3), "of the most frequent number of entities"
    assert found.sum(axis=2) == pytest.approx(np.ones((2, 3)), abs=1e-6)
    network = build_network(policy.network, SPACE, seed=0)
    network.load_state_dict({name: torch.from_numpy(array) for name, array in policy.arrays.items()})
    expected = []
    for row in (0, 1, 3):

        def look(order: list[int], row: int = row) -> torch.Tensor:
            entities = torch.from_numpy(seen.entities[row : row + 1][:, order])
            mask = torch.ones(1, 3, dtype=torch.bool)
            context = torch.from_numpy(seen.context[row : row + 1])
            observation = TensorObservation(
                entities, context, mask, torch.ones(1, 4, dtype=torch.bool), torch.zeros(1, 1)
            )
            with torch.no_grad():
                logits, _ = network.act(observation, network.initial_state(1))
            return logits[0, 1:]

        order = look([0, 1, 2]).argsort(descending=True).tolist()
        look(order)
        assert network.last_attention is not None
        expected.append(network.last_attention[0].numpy())
    assert found == pytest.approx(np.mean(expected, axis=0), abs=1e-5)
    assert found.std() > 0.01, "a network that looks everywhere alike would tell nothing"


def test_other_networks_have_none() -> None:
    assert attention_by_preference(checkpoint("pooled"), decisions([3, 3], width=8)) is None
