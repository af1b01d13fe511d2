"""Compiled inference against PyTorch: the same logits for the same weights."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from training.networks import KINDS, SYMMETRIC, make_network, make_observation

from pointsman.inference.network import NetworkTables, network_logits, scratch_size
from pointsman.training.networks import PolicyNetwork, TensorObservation, to_checkpoint

torch.set_num_threads(1)

GUARD = np.float32(123.25)  # around what the kernel may write
MARGIN = 64


class Compiled:
    """A network with its buffers, and guards around them."""

    def __init__(self, network: PolicyNetwork, num_entities: int) -> None:
        self.tables = NetworkTables(to_checkpoint(network, {}))
        self.num_entities = num_entities
        size = scratch_size(self.tables.rows[0], num_entities)
        width = network.spec.width if network.spec.kind == "attention+gru" else 0
        self.buffers = [np.full(n + 2 * MARGIN, GUARD) for n in (size, width, num_entities + 1)]
        self.scratch, self.state, self.logits = (buffer[MARGIN:-MARGIN] for buffer in self.buffers)
        self.state[:] = 0.0

    def __call__(self, observation: TensorObservation, row: int = 0) -> NDArray[np.float32]:
        """Logits of the entities that are there, hold first."""
        is_there = observation.entity_mask[row]
        entities = observation.entities[row][is_there].contiguous().numpy()
        network_logits(
            self.tables.rows,
            entities,
            observation.context[row].numpy(),
            len(entities),
            self.scratch,
            self.state,
            self.logits,
        )
        for buffer in self.buffers:
            assert (buffer[:MARGIN] == GUARD).all() and (buffer[-MARGIN:] == GUARD).all()
        return self.logits[: len(entities) + 1].copy()


def expected(network: PolicyNetwork, observation: TensorObservation, row: int = 0) -> NDArray[np.float32]:
    with torch.no_grad():
        logits, _ = network.act(observation.rows(slice(row, row + 1)), network.initial_state(1))
    is_there = torch.cat((torch.ones(1, dtype=torch.bool), observation.entity_mask[row]))
    found: NDArray[np.float32] = logits[0][is_there].numpy()
    return found


@pytest.mark.parametrize("kind", SYMMETRIC)
def test_logits_are_those_of_pytorch_for_any_number_of_entities(kind: str) -> None:
    network = make_network(kind=kind, width=20, depth=3, hint="entity3", hint_strength=0.4)
    for num_entities in (*range(1, 10), 31, 64):
        observation = make_observation(1, num_entities, seed=num_entities)
        compiled = Compiled(network, num_entities)
        found = compiled(observation)
        np.testing.assert_allclose(found, expected(network, observation), rtol=0, atol=1e-4)
        # The test is not blind: another observation has other logits.
        other = expected(network, make_observation(1, num_entities, seed=99))
        assert np.abs(found - other).max() > 1e-2


@pytest.mark.parametrize("kind", SYMMETRIC)
@pytest.mark.parametrize("depth", [1, 2])
def test_one_network_serves_observations_of_different_sizes(kind: str, depth: int) -> None:
    network = make_network(6, kind=kind, depth=depth)
    observation = make_observation(30, 6, is_padded=True)
    legal = observation._replace(action_mask=torch.ones(30, 7, dtype=torch.bool))
    for row in range(30):
        compiled = Compiled(network, 6)
        found = compiled(legal, row)
        np.testing.assert_allclose(found, expected(network, legal, row), rtol=0, atol=1e-4)


@pytest.mark.parametrize("depth", [1, 3])
def test_mlp_with_missing_entities_at_the_end(depth: int) -> None:
    network = make_network(5, kind="mlp", depth=depth, hint="entity0", hint_strength=0.3)
    compiled = Compiled(network, 5)
    for num_there in range(1, 6):
        observation = make_observation(1, 5, seed=num_there)
        observation.entity_mask[:, num_there:] = False
        np.testing.assert_allclose(compiled(observation), expected(network, observation), rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_extreme_features_are_clipped_alike(kind: str) -> None:
    network = make_network(kind=kind)
    observation = make_observation(1)
    observation.entities[0, 0] = 1e20
    observation.context[0, 0] = -1e20
    compiled = Compiled(network, 4)
    found = compiled(observation)
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found, expected(network, observation), rtol=0, atol=1e-4)


def test_a_memory_goes_from_decision_to_decision() -> None:
    network = make_network(kind="attention+gru")
    observation = make_observation(20)
    compiled, forgetful = Compiled(network, 4), Compiled(network, 4)
    state, largest = network.initial_state(1), 0.0
    for row in range(20):
        with torch.no_grad():
            logits, state = network.act(observation.rows(slice(row, row + 1)), state)
        np.testing.assert_allclose(compiled(observation, row), logits[0].numpy(), rtol=0, atol=1e-4)
        forgetful.state[:] = 0.0
        largest = max(largest, np.abs(forgetful(observation, row) - logits[0].numpy()).max())
    assert state is not None
    np.testing.assert_allclose(compiled.state, state[0].numpy(), rtol=0, atol=1e-5)
    assert largest > 0.01


def small_logits() -> dict[str, list[float]]:
    """A few logits of every kind; run as a script, prints them."""
    results = {}
    for kind in KINDS:
        network = make_network(3, kind=kind, width=8, hint="entity1", hint_strength=0.2)
        compiled = Compiled(network, 3)
        results[kind] = [float(x) for row in range(2) for x in compiled(make_observation(2, 3), row)]
    return results


def test_the_kernels_give_the_same_without_compilation() -> None:
    environment = os.environ | {"NUMBA_DISABLE_JIT": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    script = "from inference.test_network import small_logits; print(small_logits())"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=True,
    )
    interpreted: dict[str, Any] = eval(done.stdout)
    for kind, logits in small_logits().items():
        np.testing.assert_allclose(interpreted[kind], logits, rtol=0, atol=1e-5)
