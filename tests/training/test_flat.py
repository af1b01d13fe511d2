from __future__ import annotations

import copy

import pytest
import torch

from pointsman.training import flat as flat_module
from pointsman.training.flat import Adam, FlatGradients, flat_parameters

from .networks import make_network


def test_parameters_become_views_of_one_vector_once() -> None:
    network = make_network()
    before = [parameter.detach().clone() for parameter in network.parameters()]
    flat = flat_parameters(network)
    assert flat_parameters(network).data_ptr() == flat.data_ptr()
    assert torch.equal(flat, torch.cat([part.flatten() for part in before]))
    flat.add_(1.0)
    for parameter, old in zip(network.parameters(), before, strict=True):
        torch.testing.assert_close(parameter.detach(), old + 1.0)
    twin = copy.deepcopy(network)
    assert flat_parameters(twin).data_ptr() != flat.data_ptr()


def distance_from_torch(num_steps: int) -> float:
    """How far Adam's parameters are from torch.optim.Adam's after random gradients."""
    mine, theirs = make_network(), make_network()
    adam, flat = Adam(mine, 1e-5), FlatGradients(mine)
    reference = torch.optim.Adam(theirs.parameters(), lr=1.0, eps=1e-5)
    theirs_flat, draw = FlatGradients(theirs), torch.Generator().manual_seed(0)
    for step in range(num_steps):
        flat.gradients.normal_(generator=draw)
        theirs_flat.gradients.copy_(flat.gradients)
        rate = 0.01 / (step + 1)
        for group in reference.param_groups:
            group["lr"] = rate
        adam.step(flat.gradients, rate)
        reference.step()
    return float((flat_parameters(mine) - flat_parameters(theirs)).abs().max())


def test_adam_is_that_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert distance_from_torch(20) < 1e-6
    monkeypatch.setattr(flat_module, "BETA2", 0.99)
    assert distance_from_torch(20) > 1e-4, "a wrong correction of the bias shows"


def test_clipping_keeps_the_direction() -> None:
    flat = FlatGradients(make_network())
    flat.gradients.copy_(torch.arange(len(flat.gradients)))
    direction = flat.gradients / flat.gradients.norm()
    assert flat.clip(0.5) == pytest.approx(float(torch.arange(len(flat.gradients)).double().norm()), rel=1e-5)
    torch.testing.assert_close(flat.gradients, 0.5 * direction)
    assert flat.clip(0.6) == pytest.approx(0.5)
    torch.testing.assert_close(flat.gradients, 0.5 * direction)
