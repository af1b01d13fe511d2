"""The layers that training spends its time in, with gradients by hand.

On one CPU thread, PyTorch's own matrix products run at full speed; what is between them does not: each bias,
relu, mask and pool is a pass over megabytes, and several more on the way back. Here each stretch between two
products is one compiled pass each way, which makes an update about twice as fast.

Letters: B observations, R entities, W units, I inputs, E extra features. Entities are flat, [B * R, ...].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd import Function

TALL = 1024  # rows
CLIP = 10.0  # standard deviations; `policies/network.py` has the same

Array = NDArray[Any]
Kernel = TypeVar("Kernel", bound=Callable[..., None])


def compiled(function: Kernel) -> Kernel:
    fast = {"contract", "reassoc", "nsz"}
    kernel: Kernel = numba.njit(function, cache=True, nogil=True, error_model="numpy", fastmath=fast)
    return kernel


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x [n, I] times the transpose of weight [W, I] -> [n, W]"""
    out: Tensor = _apply(_Product, x, weight)
    return out


def relu(z: Tensor, bias: Tensor) -> Tensor:
    """relu(z + bias) in the memory of z [n, W]; bias [W]"""
    out: Tensor = _apply(_Relu, z, bias)
    return out


def relu_pool(z: Tensor, bias: Tensor, mask: Tensor, extra: Tensor) -> tuple[Tensor, Tensor]:
    """h = relu(z + bias) in the memory of z [B * R, W], and [mean of h ; max of h ; extra].

    mask [B, R] bool: padded rows of h become zero and are not pooled. extra [B, E] gets no gradient.
    -> h [B * R, W], pooled [B, 2 W + E]
    """
    h, pooled = _apply(_ReluPool, z, bias, mask, extra)
    return h, pooled


def relu_score(z: Tensor, shared: Tensor, weight: Tensor) -> Tensor:
    """relu(z + shared) . weight, in the memory of z [B * R, W]; shared [B, W], weight [W] -> [B * R]"""
    out: Tensor = _apply(_ReluScore, z, shared, weight)
    return out


def _apply(function: Any, *inputs: Tensor) -> Any:
    if torch.is_grad_enabled():
        return function.apply(*inputs)
    return function.forward(_NoContext(), *inputs)  # `apply` costs more than a small batch


class _NoContext:
    """Forgets what would be kept for the way back."""

    def forget(self, *_: Any) -> None: ...

    save_for_backward = mark_dirty = set_materialize_grads = forget


class _Product(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        # The copy of a small matrix makes the product of a tall one a fifth faster.
        return x @ (weight.t().contiguous() if len(x) >= TALL else weight.t())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor]:
        x, weight = ctx.saved_tensors
        grad_x = grad @ weight if ctx.needs_input_grad[0] else None
        return grad_x, grad.t() @ x


class _Relu(Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, bias: Tensor) -> Tensor:
        ctx.mark_dirty(z)
        _relu_forward(_array(z), _array(bias))
        ctx.save_for_backward(z)
        return z

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        (h,) = ctx.saved_tensors
        grad_z, grad_bias = torch.empty_like(h), h.new_zeros(h.shape[1])
        _relu_backward(_array(grad.contiguous()), _array(h), grad_z.numpy(), grad_bias.numpy())
        return grad_z, grad_bias


class _ReluPool(Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, bias: Tensor, mask: Tensor, extra: Tensor) -> tuple[Tensor, Tensor]:
        ctx.mark_dirty(z)
        ctx.set_materialize_grads(False)
        num_rows, width = mask.shape[0], z.shape[1]
        pooled = z.new_empty(num_rows, 2 * width + extra.shape[1])
        highest = np.empty((num_rows, width), np.int32)
        _pool_forward(_array(z), _array(bias), _array(mask), _array(extra), pooled.numpy(), highest)
        ctx.save_for_backward(z, mask)
        ctx.highest = highest
        return z, pooled

    @staticmethod
    def backward(ctx: Any, grad_h: Tensor | None, grad_pooled: Tensor | None) -> tuple[Tensor | None, ...]:
        h, mask = ctx.saved_tensors
        if grad_pooled is None:
            grad_pooled = h.new_zeros(len(mask), 2 * h.shape[1])
        grad_z, grad_bias = torch.empty_like(h), h.new_zeros(h.shape[1])
        _pool_backward(
            _array(h if grad_h is None else grad_h.contiguous()),
            grad_h is not None,  # a critic uses only what was pooled
            _array(grad_pooled.contiguous()),
            _array(h),
            _array(mask),
            ctx.highest,
            grad_z.numpy(),
            grad_bias.numpy(),
        )
        return grad_z, grad_bias, None, None


class _ReluScore(Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, shared: Tensor, weight: Tensor) -> Tensor:
        scores = z.new_empty(len(z))
        hidden = z.detach()
        _score_forward(hidden.numpy(), _array(shared), _array(weight), scores.numpy())
        ctx.save_for_backward(hidden, weight)
        ctx.num_rows = len(shared)
        return scores

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden, weight = ctx.saved_tensors
        grad_z, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        grad_shared = hidden.new_empty(ctx.num_rows, hidden.shape[1])
        _score_backward(
            _array(grad.contiguous()),
            _array(hidden),
            _array(weight),
            grad_z.numpy(),
            grad_shared.numpy(),
            grad_weight.numpy(),
        )
        return grad_z, grad_shared, grad_weight


def _array(tensor: Tensor) -> Array:
    """A view for a kernel. All tensors made here lie in C order; gradients may come otherwise."""
    array: Array = tensor.detach().numpy()
    return array


@compiled
def scale_kernel(
    entities: Array,
    context: Array,
    mask: Array,
    entity_shift: Array,
    entity_factor: Array,
    context_shift: Array,
    context_factor: Array,
    rows: Array,
    scaled: Array,
) -> None:
    """rows [B * R, F + C]: each entity beside the context, (x - shift) * factor, padded ones zero;
    scaled [B, C]: the context alone."""
    num_rows, num_entities, num_features = entities.shape
    num_context = context.shape[1]
    for b in range(num_rows):
        for j in range(num_context):
            scaled[b, j] = min(max((context[b, j] - context_shift[j]) * context_factor[j], -CLIP), CLIP)
        for k in range(num_entities):
            row = b * num_entities + k
            if mask[b, k]:
                for j in range(num_features):
                    value = (entities[b, k, j] - entity_shift[j]) * entity_factor[j]
                    rows[row, j] = min(max(value, -CLIP), CLIP)
                for j in range(num_context):
                    rows[row, num_features + j] = scaled[b, j]
            else:
                rows[row] = 0.0


@compiled
def _relu_forward(z: Array, bias: Array) -> None:
    for i in range(z.shape[0]):
        for j in range(z.shape[1]):
            z[i, j] = max(z[i, j] + bias[j], z.dtype.type(0))


@compiled
def _relu_backward(grad: Array, h: Array, grad_z: Array, grad_bias: Array) -> None:
    for i in range(h.shape[0]):
        for j in range(h.shape[1]):
            value = grad[i, j] if h[i, j] > 0 else grad.dtype.type(0)
            grad_z[i, j] = value
            grad_bias[j] += value


@compiled
def _pool_forward(z: Array, bias: Array, mask: Array, extra: Array, pooled: Array, highest: Array) -> None:
    num_rows, num_entities = mask.shape
    width = z.shape[1]
    for b in range(num_rows):
        for j in range(2 * width):
            pooled[b, j] = 0.0
        for j in range(extra.shape[1]):
            pooled[b, 2 * width + j] = extra[b, j]
        for j in range(width):
            highest[b, j] = -1
        count = 0
        for k in range(num_entities):
            row = b * num_entities + k
            if not mask[b, k]:
                z[row] = 0.0
                continue
            count += 1
            for j in range(width):
                z[row, j] = max(z[row, j] + bias[j], z.dtype.type(0))
                pooled[b, j] += z[row, j]
            # Nothing is negative: where all are zero none is the highest, and none gets the gradient.
            maxima = pooled[b, width:]
            number = np.int32(k)  # as wide as float32, so that the loop is made of vectors
            for j in range(width):
                is_higher = z[row, j] > maxima[j]
                maxima[j] = z[row, j] if is_higher else maxima[j]
                highest[b, j] = number if is_higher else highest[b, j]
        share = z.dtype.type(1.0 / max(count, 1))
        for j in range(width):
            pooled[b, j] *= share


@compiled
def _pool_backward(
    grad_h: Array,
    has_grad_h: bool,
    grad_pooled: Array,
    h: Array,
    mask: Array,
    highest: Array,
    grad_z: Array,
    grad_bias: Array,
) -> None:
    num_rows, num_entities = mask.shape
    width = h.shape[1]
    zero = h.dtype.type(0)
    for b in range(num_rows):
        count = 0
        for k in range(num_entities):
            count += mask[b, k]
        share = h.dtype.type(1.0 / max(count, 1))
        for k in range(num_entities):
            row = b * num_entities + k
            number = np.int32(k)
            for j in range(width):
                value = share * grad_pooled[b, j] + (grad_h[row, j] if has_grad_h else zero)
                value += grad_pooled[b, width + j] if highest[b, j] == number else zero
                value = value if h[row, j] > 0 else zero  # padded rows are zero too
                grad_z[row, j] = value
                grad_bias[j] += value


@compiled
def _score_forward(z: Array, shared: Array, weight: Array, scores: Array) -> None:
    num_rows, width = shared.shape
    num_entities = z.shape[0] // max(num_rows, 1)
    for b in range(num_rows):
        for k in range(num_entities):
            row = b * num_entities + k
            total = z.dtype.type(0)
            for j in range(width):
                z[row, j] = max(z[row, j] + shared[b, j], z.dtype.type(0))
                total += z[row, j] * weight[j]
            scores[row] = total


@compiled
def _score_backward(
    grad: Array, hidden: Array, weight: Array, grad_z: Array, grad_shared: Array, grad_weight: Array
) -> None:
    num_rows, width = grad_shared.shape
    num_entities = hidden.shape[0] // max(num_rows, 1)
    zero = hidden.dtype.type(0)
    for b in range(num_rows):
        for j in range(width):
            grad_shared[b, j] = 0.0
        for k in range(num_entities):
            row = b * num_entities + k
            of_row = grad[row]
            for j in range(width):
                value = of_row * weight[j] if hidden[row, j] > 0 else zero
                grad_z[row, j] = value
                grad_shared[b, j] += value
                grad_weight[j] += of_row * hidden[row, j]
