"""The gradients written by hand, against finite differences and against PyTorch's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from pointsman.training import layers
from pointsman.training.layers import product, relu, relu_pool, relu_score

B, R, W, E = 3, 4, 5, 2
MASK = torch.tensor([[1, 1, 1, 1], [0, 1, 0, 1], [0, 0, 0, 0]], dtype=torch.bool)


def double(*shape: int, seed: int = 0, is_leaf: bool = True) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 17 * sum(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_(is_leaf)


# Layers overwrite z: each gets a copy.
CHECKS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "product": (product, (double(6, W), double(3, W))),
    "relu": (lambda z, bias: relu(z.clone(), bias), (double(6, W), double(W))),
    "pool": (
        lambda z, bias, extra: relu_pool(z.clone(), bias, MASK, extra),
        (double(B * R, W), double(W), double(B, E, is_leaf=False)),
    ),
    "only pooled": (
        lambda z, bias, extra: relu_pool(z.clone(), bias, MASK, extra)[1],
        (double(B * R, W), double(W), double(B, E, is_leaf=False)),
    ),
    "score": (
        lambda z, shared, weight: relu_score(z.clone(), shared, weight),
        (double(B * R, W), double(B, W), double(W)),
    ),
}


@pytest.mark.parametrize("name", CHECKS)
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    layer, inputs = CHECKS[name]
    assert gradcheck(layer, inputs)


def test_a_forgotten_relu_on_the_way_back_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(grad: Any, h: Any, grad_z: Any, grad_bias: Any) -> None:
        grad_z[:] = grad
        grad_bias[:] = grad.sum(0)

    monkeypatch.setattr(layers, "_relu_backward", broken)
    layer, inputs = CHECKS["relu"]
    assert not gradcheck(layer, inputs, raise_exception=False)


def plain_pool(z: Tensor, bias: Tensor, mask: Tensor, extra: Tensor) -> tuple[Tensor, Tensor]:
    h = torch.relu(z + bias).view(*mask.shape, -1) * mask[:, :, None]
    mean = h.sum(1) / mask.sum(1, keepdim=True).clamp(min=1)
    return h.view(z.shape), torch.cat((mean, h.amax(1), extra), -1)


def plain_score(z: Tensor, shared: Tensor, weight: Tensor) -> Tensor:
    return torch.relu(z.view(len(shared), -1, z.shape[1]) + shared[:, None]).matmul(weight).flatten()


def test_values_are_those_of_plain_pytorch() -> None:
    z, bias, extra, shared = double(B * R, W), double(W), double(B, E), double(B, W)
    for mine, theirs in zip(
        relu_pool(z.clone(), bias, MASK, extra), plain_pool(z, bias, MASK, extra), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(relu_score(z.clone(), shared, bias), plain_score(z, shared, bias))
    torch.testing.assert_close(relu(z.clone(), bias), torch.relu(z + bias))
    torch.testing.assert_close(product(z, shared), z @ shared.t())


def test_gradients_that_come_with_strides_are_read_right() -> None:
    z, bias, weight = double(6, W), double(W), double(6, W, seed=1, is_leaf=False)
    (relu(z.clone(), bias).t() * weight.t()).sum().backward()
    assert z.grad is not None
    torch.testing.assert_close(z.grad, torch.where(z + bias > 0, weight, 0.0))


def test_without_gradients_the_values_are_the_same() -> None:
    z, bias, extra, shared = double(B * R, W), double(W), double(B, E), double(B, W)
    with torch.no_grad():
        pools = relu_pool(z.clone(), bias, MASK, extra)
        scores = relu_score(z.clone(), shared, bias)
    assert all(map(torch.equal, pools, relu_pool(z.clone(), bias, MASK, extra)))
    assert torch.equal(scores, relu_score(z.clone(), shared, bias))
