"""The gradients of the `pooled` network: each piece of pooled.py through the losses and back.

Written out by hand, as autograd would do it; tests compare the two. Not piece by piece: advantages are scaled
by the mean and std of the minibatch, and the entropy bonus ends where the minibatch's mean entropy is
too high, which is known only at the end: then all is done again without it.

Letters: see pooled.py.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pointsman.envs.entity import Observation
from pointsman.training.jit import Array, compiled, inner
from pointsman.training.losses import (
    NUM_SUMS,
    Losses,
    Rows,
    add_losses,
    finish_terms,
    is_bonus_off,
    num_advised,
)
from pointsman.training.pooled import (
    PIECE_DECISIONS,
    PIECE_ROWS,
    Activations,
    Piece,
    Scales,
    Shape,
    forward_actor,
    forward_critic,
    matrix,
    new_piece,
    take_piece,
    turn,
)


class Slopes(NamedTuple):
    """Memory for the way back."""

    logits: Array  # [n, A]
    values: Array  # [n]
    g: Array  # [n, W]
    h: Array  # [m, W]
    before: Array  # [m, W] of the layer before
    hidden: Array  # [m, W]
    shared: Array  # [n, W]
    pooled: Array  # as many as the larger `Activations.pooled`
    product: Array  # as many as the largest matrix of parameters


@inner
def _new_slopes(shape: Shape, num_slots: int) -> Slopes:
    num_rows, width = max(PIECE_ROWS, num_slots), shape.width
    num_pooled = 2 * width + shape.num_context + shape.num_privileged
    num_inputs = shape.num_features + shape.num_context
    return Slopes(
        np.empty((PIECE_DECISIONS, num_slots + 1), np.float32),
        np.empty(PIECE_DECISIONS, np.float32),
        np.empty((PIECE_DECISIONS, width), np.float32),
        np.empty((num_rows, width), np.float32),
        np.empty((num_rows, width), np.float32),
        np.empty((num_rows, width), np.float32),
        np.empty((PIECE_DECISIONS, width), np.float32),
        np.empty(PIECE_DECISIONS * num_pooled, np.float32),
        np.empty(max(num_pooled, num_inputs) * width, np.float32),
    )


@inner
def _add_product(inputs: Array, slopes: Array, product: Array, gradient: Array) -> None:
    """gradient [I * W] += inputs [m, I] transposed times slopes [m, W]"""
    num = inputs.shape[1] * slopes.shape[1]
    np.dot(inputs.T, slopes, product[:num].reshape(inputs.shape[1], slopes.shape[1]))
    for i in range(num):
        gradient[i] += product[i]


@inner
def _relu_back(slopes: Array, out: Array, bias_gradient: Array) -> None:
    """Through relu(z + bias) = out, in place."""
    zero = np.float32(0)
    for i in range(out.shape[0]):
        for j in range(out.shape[1]):
            value = slopes[i, j] if out[i, j] > 0 else zero
            slopes[i, j] = value
            bias_gradient[j] += value


@inner
def _encode_back(
    inputs: Array,
    weights: Array,
    at: int,
    starts: Array,
    num: int,
    of: Activations,
    has_slope_h: bool,
    slopes: Slopes,
    gradient: Array,
) -> None:
    """From the slopes of g and, in the actor, of h to the gradients of an encoder."""
    num_rows, width, depth = starts[num], of.g.shape[1], of.layers.shape[0]
    num_inputs, num_pooled = inputs.shape[1], of.pooled.shape[1]
    last = at + (num_inputs + 1) * width + (depth - 2) * (width + 1) * width  # the last layer's weights
    if depth == 1:
        last = at
    size_last = num_inputs * width if depth == 1 else width * width
    summary = last + size_last + width
    slope_g, slope_h = slopes.g[:num], slopes.h[:num_rows]
    after = summary + num_pooled * width
    _relu_back(slope_g, of.g[:num], gradient[after : after + width])
    _add_product(of.pooled[:num], slope_g, slopes.product, gradient[summary:after])
    slope_pooled = slopes.pooled[: num * num_pooled].reshape(num, num_pooled)
    np.dot(slope_g, matrix(weights, summary, width, num_pooled), slope_pooled)

    zero = np.float32(0)
    h, bias = of.layers[depth - 1], gradient[last + size_last : summary]
    for b in range(num):
        share = np.float32(1.0 / max(starts[b + 1] - starts[b], 1))
        of_mean, of_top, from_row = slope_pooled[b, :width], slope_pooled[b, width : 2 * width], of.highest[b]
        for row in range(starts[b], starts[b + 1]):
            number = np.int32(row)
            for j in range(width):
                value = share * of_mean[j] + (slope_h[row, j] if has_slope_h else zero)
                value += of_top[j] if from_row[j] == number else zero
                value = value if h[row, j] > 0 else zero
                slope_h[row, j] = value
                bias[j] += value

    here, other = slope_h, slopes.before[:num_rows]
    layer_at = last
    for layer in range(depth - 1, 0, -1):
        below = of.layers[layer - 1][:num_rows]
        end = layer_at + width * width
        _add_product(below, here, slopes.product, gradient[layer_at:end])
        np.dot(here, matrix(weights, layer_at, width, width), other)
        _relu_back(other, below, gradient[layer_at - width : layer_at])
        here, other = other, here
        layer_at -= (width if layer > 1 else num_inputs) * width + width
    _add_product(inputs[:num_rows], here, slopes.product, gradient[at : at + num_inputs * width])


@inner
def _act_back(
    seen: Observation,
    shape: Shape,
    weights: Array,
    index: Array,
    first: int,
    num: int,
    piece: Piece,
    slopes: Slopes,
    gradient: Array,
) -> None:
    """From the slopes of the logits to the gradients of head and actor."""
    width, starts = shape.width, piece.starts
    num_rows = starts[num]
    of_entity = shape.head
    of_all = of_entity + width * width + width
    score = of_all + width * width
    hold = score + width
    score_weight, hold_weight = weights[score:hold], weights[hold : hold + width]
    score_gradient, hold_gradient = gradient[score:hold], gradient[hold : hold + width]
    bias = gradient[of_all - width : of_all]
    g, shared = piece.actor.g, slopes.shared
    zero = np.float32(0)
    for b in range(num):
        for j in range(width):
            shared[b, j] = zero
        for row in range(starts[b], starts[b + 1]):
            slot = piece.slots[row]
            slope = slopes.logits[b, slot + 1]
            for j in range(width):
                value = slope * score_weight[j] if piece.hidden[row, j] > 0 else zero
                slopes.hidden[row, j] = value
                shared[b, j] += value
                score_gradient[j] += slope * piece.hidden[row, j]
            if shape.hint_column >= 0:
                gradient[0] -= slope * seen.entities[index[first + b], slot, shape.hint_column]
        slope = slopes.logits[b, 0]
        gradient[hold + width] += slope
        for j in range(width):
            bias[j] += shared[b, j]
            hold_gradient[j] += slope * g[b, j]
    h, slope_hidden, slope_shared = piece.actor.layers[-1][:num_rows], slopes.hidden[:num_rows], shared[:num]
    _add_product(h, slope_hidden, slopes.product, gradient[of_entity : of_all - width])
    _add_product(g[:num], slope_shared, slopes.product, gradient[of_all:score])
    np.dot(slope_hidden, matrix(weights, of_entity, width, width), slopes.h[:num_rows])
    np.dot(slope_shared, matrix(weights, of_all, width, width), slopes.g[:num])
    for b in range(num):
        for j in range(width):
            slopes.g[b, j] += slopes.logits[b, 0] * hold_weight[j]
    _encode_back(piece.inputs, weights, shape.actor, starts, num, piece.actor, True, slopes, gradient)


@inner
def _value_back(
    shape: Shape, weights: Array, num: int, piece: Piece, slopes: Slopes, gradient: Array
) -> None:
    """From the slopes of the values to the gradients of the critic."""
    width, at = shape.width, shape.value
    g, weight, weight_gradient = piece.critic.g, weights[at : at + width], gradient[at : at + width]
    for b in range(num):
        slope = slopes.values[b]
        gradient[at + width] += slope
        for j in range(width):
            weight_gradient[j] += slope * g[b, j]
            slopes.g[b, j] = slope * weight[j]
    _encode_back(
        piece.inputs, weights, shape.critic, piece.starts, num, piece.critic, False, slopes, gradient
    )


@inner
def _new_rows(rows: Rows, num_actions: int) -> Rows:
    return Rows(
        np.empty(PIECE_DECISIONS, np.int64),
        np.empty((4, PIECE_DECISIONS), np.float32),
        np.empty((PIECE_DECISIONS, num_actions), np.bool_),
        np.empty((PIECE_DECISIONS if len(rows.ref_logits) else 0, num_actions), np.float32),
        np.empty(PIECE_DECISIONS if len(rows.teacher_actions) else 0, np.int64),
    )


@inner
def _take_rows(rows: Rows, index: Array, first: int, num: int, mean: float, std: float, out: Rows) -> None:
    for b in range(num):
        i = index[first + b]
        out.actions[b] = rows.actions[i]
        out.action_mask[b] = rows.action_mask[i]
        for k in range(4):
            out.scalars[k, b] = rows.scalars[k, i]
        out.scalars[1, b] = (rows.scalars[1, i] - mean) / std
        if len(rows.ref_logits):
            out.ref_logits[b] = rows.ref_logits[i]
        if len(rows.teacher_actions):
            out.teacher_actions[b] = rows.teacher_actions[i]


@inner
def _mean_std(values: Array, index: Array) -> tuple[float, float]:
    mean = 0.0
    for i in index:
        mean += values[i]
    mean /= len(index)
    square = 0.0
    for i in index:
        square += (values[i] - mean) ** 2
    return mean, np.sqrt(square / len(index))


@inner
def _turn_back(turned: Array, matrices: Array, out: Array) -> None:
    """The opposite of `turn`."""
    for number in range(len(matrices)):
        at, num_rows, num_columns = matrices[number, 0], matrices[number, 1], matrices[number, 2]
        for i in range(num_rows):
            for j in range(num_columns):
                out[at + i * num_columns + j] = turned[at + j * num_rows + i]


@compiled
def run_gradients(
    seen: Observation,
    rows: Rows,
    scales: Scales,
    shape: Shape,
    weights: Array,
    matrices: Array,
    index: Array,
    has_scaled_advantages: bool,
    losses: Losses,
    gradient: Array,
    terms: Array,
) -> None:
    """The losses of the decisions at `index`: their terms, and the gradient by all parameters."""
    turned, turned_gradient = np.empty_like(weights), np.empty_like(weights)
    turn(weights, matrices, turned)
    num_slots, num_total = seen.entities.shape[1], len(index)
    piece, slopes, here = (
        new_piece(shape, num_slots),
        _new_slopes(shape, num_slots),
        _new_rows(rows, num_slots + 1),
    )
    num_advice = num_advised(rows, index)
    mean, std = 0.0, 1.0
    if has_scaled_advantages:
        mean, std = _mean_std(rows.scalars[1], index)
        std += 1e-8
    sums = np.empty(NUM_SUMS)
    has_bonus = True
    while True:
        sums[:] = 0.0
        turned_gradient[:] = 0.0
        first = 0
        while first < num_total:
            num = take_piece(seen, scales, shape, index, first, piece)
            _take_rows(rows, index, first, num, mean, std, here)
            forward_actor(seen, shape, turned, index, first, num, piece)
            forward_critic(shape, turned, num, piece)
            add_losses(
                piece.logits,
                piece.values,
                here,
                num,
                num_total,
                num_advice,
                losses,
                has_bonus,
                sums,
                slopes.logits,
                slopes.values,
            )
            _act_back(seen, shape, weights, index, first, num, piece, slopes, turned_gradient)
            _value_back(shape, weights, num, piece, slopes, turned_gradient)
            first += num
        # The mean entropy is known only now; that it is too high is rare.
        if has_bonus and is_bonus_off(sums, num_total, losses):
            has_bonus = False
        else:
            break
    _turn_back(turned_gradient, matrices, gradient)
    finish_terms(sums, num_total, num_advice, losses, terms)
