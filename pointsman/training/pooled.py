"""The `pooled` network of networks.py and its gradients as one compiled pass.

PyTorch runs layer by layer over a whole minibatch: an activation is a megabyte that leaves the cache before
it is needed again. Here a few decisions at a time go all the way forward, through the losses and back, in
memory that stays in the cache. Only entities that are there have a row: padding costs nothing.
`PolicyNetwork` says what is computed, and tests compare the two.

All parameters are one vector, in the order of `PolicyNetwork.parameters()`; `turned` is that vector with
every matrix transposed, because products without a transposed factor are the fast ones. `np.dot` is SciPy's
BLAS here, which must be held to one thread (`passes.use_one_thread`).

Letters: n decisions and m rows (entities) of a piece, R slots, W units, I inputs of an entity, E extra ones.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pointsman.envs.entity import Observation
from pointsman.training.losses import (
    ILLEGAL,
    NUM_SUMS,
    Losses,
    Rows,
    add_losses,
    compiled,
    draw_action,
    finish_terms,
    is_bonus_off,
    num_advised,
)
from pointsman.training.normalisers import CLIP

Array = NDArray[Any]

PIECE_ROWS = 240  # activations fit the cache, and OpenBLAS has its fastest kernels for products this small
PIECE_DECISIONS = 60


class Shape(NamedTuple):
    """Sizes, and where the parts begin in the vector of parameters."""

    num_features: int
    num_context: int
    num_privileged: int  # that the critic sees
    width: int
    depth: int
    hint_column: int  # -1: none, else the hint's strength comes first
    actor: int
    head: int
    critic: int
    value: int


class Scales(NamedTuple):
    """What is subtracted from features, and what they are then multiplied by."""

    entity_shift: Array
    entity_factor: Array
    context_shift: Array
    context_factor: Array
    privileged_shift: Array
    privileged_factor: Array


class Activations(NamedTuple):
    """Of one encoder."""

    layers: Array  # [depth, m, W]; the last is h
    pooled: Array  # [n, 2 W + E] mean, max and extra features
    highest: Array  # [n, W] which row the maximum came from; -1: none
    g: Array  # [n, W]


class Piece(NamedTuple):
    """Memory for the decisions that are computed together."""

    inputs: Array  # [m, I] scaled features of an entity and the context
    slots: Array  # [m] where the entity stood
    starts: Array  # [n + 1] the first row of each decision
    actor: Activations
    critic: Activations
    shared: Array  # [n, W]
    hidden: Array  # [m, W]
    logits: Array  # [n, A]
    values: Array  # [n]


@compiled
def _new_activations(num_slots: int, width: int, depth: int, num_extra: int) -> Activations:
    num_rows = max(PIECE_ROWS, num_slots)
    return Activations(
        np.empty((depth, num_rows, width), np.float32),
        np.empty((PIECE_DECISIONS, 2 * width + num_extra), np.float32),
        np.empty((PIECE_DECISIONS, width), np.int32),
        np.empty((PIECE_DECISIONS, width), np.float32),
    )


@compiled
def _new_piece(shape: Shape, num_slots: int) -> Piece:
    num_rows, width = max(PIECE_ROWS, num_slots), shape.width
    return Piece(
        np.empty((num_rows, shape.num_features + shape.num_context), np.float32),
        np.empty(num_rows, np.int32),
        np.empty(PIECE_DECISIONS + 1, np.int64),
        _new_activations(num_slots, width, shape.depth, shape.num_context),
        _new_activations(num_slots, width, shape.depth, shape.num_context + shape.num_privileged),
        np.empty((PIECE_DECISIONS, width), np.float32),
        np.empty((num_rows, width), np.float32),
        np.empty((PIECE_DECISIONS, num_slots + 1), np.float32),
        np.empty(PIECE_DECISIONS, np.float32),
    )


@compiled
def turn(flat: Array, matrices: Array, out: Array) -> None:
    """Transpose every matrix of a vector; matrices [K, 3]: where it begins, its rows and columns."""
    for number in range(len(matrices)):
        at, num_rows, num_columns = matrices[number, 0], matrices[number, 1], matrices[number, 2]
        for i in range(num_rows):
            for j in range(num_columns):
                out[at + j * num_rows + i] = flat[at + i * num_columns + j]


@compiled
def turn_back(turned: Array, matrices: Array, out: Array) -> None:
    for number in range(len(matrices)):
        at, num_rows, num_columns = matrices[number, 0], matrices[number, 1], matrices[number, 2]
        for i in range(num_rows):
            for j in range(num_columns):
                out[at + i * num_columns + j] = turned[at + j * num_rows + i]


@compiled
def _matrix(flat: Array, at: int, num_rows: int, num_columns: int) -> Array:
    return flat[at : at + num_rows * num_columns].reshape(num_rows, num_columns)


@compiled
def _scaled(value: Any, shift: Any, factor: Any) -> Any:
    return min(max((value - shift) * factor, np.float32(-CLIP)), np.float32(CLIP))


# Forward --------------------------------------------------------------------------------------------------


@compiled
def _take(seen: Observation, scales: Scales, shape: Shape, index: Array, first: int, piece: Piece) -> int:
    """Scale the next decisions, as many as there is room for; returns how many."""
    num_features, num_context = shape.num_features, shape.num_context
    num_slots, pooled_width = seen.entities.shape[1], 2 * shape.width
    row, num = 0, 0
    piece.starts[0] = 0
    num_left = len(index) - first
    if num_left > PIECE_DECISIONS:  # the last two pieces share what is left
        num_left = min((num_left + 1) // 2, PIECE_DECISIONS)
    while num < num_left:
        i = index[first + num]
        if row + num_slots > piece.inputs.shape[0]:
            break
        context = piece.actor.pooled[num, pooled_width:]
        for j in range(num_context):
            context[j] = _scaled(seen.context[i, j], scales.context_shift[j], scales.context_factor[j])
            piece.critic.pooled[num, pooled_width + j] = context[j]
        for j in range(shape.num_privileged):
            piece.critic.pooled[num, pooled_width + num_context + j] = _scaled(
                seen.privileged[i, j], scales.privileged_shift[j], scales.privileged_factor[j]
            )
        for k in range(num_slots):
            if seen.entity_mask[i, k]:
                entity, inputs = seen.entities[i, k], piece.inputs[row]
                for j in range(num_features):
                    inputs[j] = _scaled(entity[j], scales.entity_shift[j], scales.entity_factor[j])
                for j in range(num_context):
                    inputs[num_features + j] = context[j]
                piece.slots[row] = k
                row += 1
        num += 1
        piece.starts[num] = row
    return num


@compiled
def _add_relu(out: Array, bias: Array) -> None:
    zero = np.float32(0)
    for i in range(out.shape[0]):
        for j in range(out.shape[1]):
            out[i, j] = max(out[i, j] + bias[j], zero)


@compiled
def _pool(h: Array, starts: Array, num: int, pooled: Array, highest: Array) -> None:
    """Mean and maximum of the rows of each decision; nothing in h is negative."""
    width = h.shape[1]
    zero = np.float32(0)
    for b in range(num):
        for j in range(2 * width):
            pooled[b, j] = zero
        for j in range(width):
            highest[b, j] = -1  # where all are zero none is the highest, and none gets the gradient
        share = np.float32(1.0 / max(starts[b + 1] - starts[b], 1))
        for row in range(starts[b], starts[b + 1]):
            for j in range(width):
                pooled[b, j] += share * h[row, j]
            top = pooled[b, width:]
            number = np.int32(row)  # as wide as float32, so that the loop is made of vectors
            for j in range(width):
                is_higher = h[row, j] > top[j]
                top[j] = h[row, j] if is_higher else top[j]
                highest[b, j] = number if is_higher else highest[b, j]


@compiled
def _encode(inputs: Array, turned: Array, at: int, starts: Array, num: int, out: Activations) -> None:
    num_rows, width = starts[num], out.g.shape[1]
    layer = inputs[:num_rows]
    for number in range(out.layers.shape[0]):
        num_inputs = layer.shape[1]
        h = out.layers[number][:num_rows]
        np.dot(layer, _matrix(turned, at, num_inputs, width), h)
        at += num_inputs * width
        _add_relu(h, turned[at : at + width])
        at += width
        layer = h
    _pool(layer, starts, num, out.pooled, out.highest)
    num_pooled = out.pooled.shape[1]
    g = out.g[:num]
    np.dot(out.pooled[:num], _matrix(turned, at, num_pooled, width), g)
    at += num_pooled * width
    _add_relu(g, turned[at : at + width])


@compiled
def _act(
    seen: Observation, shape: Shape, turned: Array, index: Array, first: int, num: int, piece: Piece
) -> None:
    """The logits of a piece."""
    width, starts = shape.width, piece.starts
    _encode(piece.inputs, turned, shape.actor, starts, num, piece.actor)
    g, shared = piece.actor.g[:num], piece.shared[:num]
    num_rows = starts[num]
    hidden = piece.hidden[:num_rows]
    of_entity = shape.head
    of_all = of_entity + width * width + width
    score = of_all + width * width
    hold = score + width
    np.dot(piece.actor.layers[-1][:num_rows], _matrix(turned, of_entity, width, width), hidden)
    np.dot(g, _matrix(turned, of_all, width, width), shared)
    bias = turned[of_all - width : of_all]
    score_weight, hold_weight, hold_bias = (
        turned[score:hold],
        turned[hold : hold + width],
        turned[hold + width],
    )
    zero = np.float32(0)
    for b in range(num):
        logits, i = piece.logits[b], index[first + b]
        logits[:] = ILLEGAL
        if seen.action_mask[i, 0]:
            total = hold_bias
            for j in range(width):
                total += g[b, j] * hold_weight[j]
            logits[0] = total
        for j in range(width):
            shared[b, j] += bias[j]
        for row in range(starts[b], starts[b + 1]):
            total = zero
            for j in range(width):
                value = max(hidden[row, j] + shared[b, j], zero)
                hidden[row, j] = value
                total += value * score_weight[j]
            slot = piece.slots[row]
            if shape.hint_column >= 0:
                total -= turned[0] * seen.entities[i, slot, shape.hint_column]
            if seen.action_mask[i, slot + 1]:
                logits[slot + 1] = total


@compiled
def _value(shape: Shape, turned: Array, num: int, piece: Piece) -> None:
    """The values of a piece."""
    _encode(piece.inputs, turned, shape.critic, piece.starts, num, piece.critic)
    weight, bias = turned[shape.value : shape.value + shape.width], turned[shape.value + shape.width]
    for b in range(num):
        total = bias
        for j in range(shape.width):
            total += piece.critic.g[b, j] * weight[j]
        piece.values[b] = total


@compiled
def run_logits(seen: Observation, scales: Scales, shape: Shape, turned: Array, logits: Array) -> None:
    """[B, A]"""
    index = np.arange(len(seen.context))
    piece = _new_piece(shape, seen.entities.shape[1])
    first = 0
    while first < len(index):
        num = _take(seen, scales, shape, index, first, piece)
        _act(seen, shape, turned, index, first, num, piece)
        logits[first : first + num] = piece.logits[:num]
        first += num


@compiled
def run_values(seen: Observation, scales: Scales, shape: Shape, turned: Array, values: Array) -> None:
    """[B]"""
    index = np.arange(len(seen.context))
    piece = _new_piece(shape, seen.entities.shape[1])
    first = 0
    while first < len(index):
        num = _take(seen, scales, shape, index, first, piece)
        _value(shape, turned, num, piece)
        values[first : first + num] = piece.values[:num]
        first += num


@compiled
def run_decisions(
    seen: Observation,
    scales: Scales,
    shape: Shape,
    turned: Array,
    temperature: float,
    epsilon: float,
    chance: Array,
    actions: Array,
    logp: Array,
    greedy: Array,
) -> None:
    """Draw an action for each decision by chance [B], uniform in [0, 1); and say what arg-max would do."""
    index = np.arange(len(seen.context))
    piece = _new_piece(shape, seen.entities.shape[1])
    first = 0
    while first < len(index):
        num = _take(seen, scales, shape, index, first, piece)
        _act(seen, shape, turned, index, first, num, piece)
        for b in range(num):
            i = first + b
            logits, mask = piece.logits[b], seen.action_mask[i]
            actions[i], logp[i] = draw_action(logits, mask, temperature, epsilon, chance[i])
            greedy[i] = np.argmax(logits)
        first += num


# And back -------------------------------------------------------------------------------------------------


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


@compiled
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


@compiled
def _add_product(inputs: Array, slopes: Array, product: Array, gradient: Array) -> None:
    """gradient [I * W] += inputs [m, I] transposed times slopes [m, W]"""
    num = inputs.shape[1] * slopes.shape[1]
    np.dot(inputs.T, slopes, product[:num].reshape(inputs.shape[1], slopes.shape[1]))
    for i in range(num):
        gradient[i] += product[i]


@compiled
def _relu_back(slopes: Array, out: Array, bias_gradient: Array) -> None:
    """Through relu(z + bias) = out, in place."""
    zero = np.float32(0)
    for i in range(out.shape[0]):
        for j in range(out.shape[1]):
            value = slopes[i, j] if out[i, j] > 0 else zero
            slopes[i, j] = value
            bias_gradient[j] += value


@compiled
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
    np.dot(slope_g, _matrix(weights, summary, width, num_pooled), slope_pooled)

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
        np.dot(here, _matrix(weights, layer_at, width, width), other)
        _relu_back(other, below, gradient[layer_at - width : layer_at])
        here, other = other, here
        layer_at -= (width if layer > 1 else num_inputs) * width + width
    _add_product(inputs[:num_rows], here, slopes.product, gradient[at : at + num_inputs * width])


@compiled
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
    np.dot(slope_hidden, _matrix(weights, of_entity, width, width), slopes.h[:num_rows])
    np.dot(slope_shared, _matrix(weights, of_all, width, width), slopes.g[:num])
    for b in range(num):
        for j in range(width):
            slopes.g[b, j] += slopes.logits[b, 0] * hold_weight[j]
    _encode_back(piece.inputs, weights, shape.actor, starts, num, piece.actor, True, slopes, gradient)


@compiled
def _value_back(
    shape: Shape, weights: Array, num: int, piece: Piece, slopes: Slopes, gradient: Array
) -> None:
    """From the slopes of the values to the gradients of the critic."""
    width, at = shape.width, shape.value
    g = piece.critic.g
    for b in range(num):
        slope = slopes.values[b]
        gradient[at + width] += slope
        for j in range(width):
            gradient[at + j] += slope * g[b, j]
            slopes.g[b, j] = slope * weights[at + j]
    _encode_back(
        piece.inputs, weights, shape.critic, piece.starts, num, piece.critic, False, slopes, gradient
    )


@compiled
def _new_rows(rows: Rows, num_actions: int) -> Rows:
    return Rows(
        np.empty(PIECE_DECISIONS, np.int64),
        np.empty((4, PIECE_DECISIONS), np.float32),
        np.empty((PIECE_DECISIONS, num_actions), np.bool_),
        np.empty((PIECE_DECISIONS if len(rows.ref_logits) else 0, num_actions), np.float32),
        np.empty(PIECE_DECISIONS if len(rows.teacher_actions) else 0, np.int64),
    )


@compiled
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


@compiled
def _mean_std(values: Array, index: Array) -> tuple[float, float]:
    mean = 0.0
    for i in index:
        mean += values[i]
    mean /= len(index)
    square = 0.0
    for i in index:
        square += (values[i] - mean) ** 2
    return mean, np.sqrt(square / len(index))


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
        _new_piece(shape, num_slots),
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
            num = _take(seen, scales, shape, index, first, piece)
            _take_rows(rows, index, first, num, mean, std, here)
            _act(seen, shape, turned, index, first, num, piece)
            _value(shape, turned, num, piece)
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
    turn_back(turned_gradient, matrices, gradient)
    finish_terms(sums, num_total, num_advice, losses, terms)
