"""The `pooled` network of networks.py as one compiled pass; pooled_gradients.py is the way back.

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

from pointsman.envs.entity import Observation
from pointsman.training.jit import Array, compiled, inner
from pointsman.training.losses import ILLEGAL, draw_action
from pointsman.training.normalisers import CLIP

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
    """What one encoder computes on the way."""

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


@inner
def _new_activations(num_slots: int, width: int, depth: int, num_extra: int) -> Activations:
    num_rows = max(PIECE_ROWS, num_slots)
    return Activations(
        np.empty((depth, num_rows, width), np.float32),
        np.empty((PIECE_DECISIONS, 2 * width + num_extra), np.float32),
        np.empty((PIECE_DECISIONS, width), np.int32),
        np.empty((PIECE_DECISIONS, width), np.float32),
    )


@inner
def new_piece(shape: Shape, num_slots: int) -> Piece:
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


@inner
def matrix(flat: Array, at: int, num_rows: int, num_columns: int) -> Array:
    return flat[at : at + num_rows * num_columns].reshape(num_rows, num_columns)


@inner
def _scaled(value: Any, shift: Any, factor: Any) -> Any:
    return min(max((value - shift) * factor, np.float32(-CLIP)), np.float32(CLIP))


@inner
def take_piece(
    seen: Observation, scales: Scales, shape: Shape, index: Array, first: int, piece: Piece
) -> int:
    """Scale the next decisions, as many as there is room for; returns how many."""
    num_features, num_context, num_slots = shape.num_features, shape.num_context, seen.entities.shape[1]
    num_before, num_after = 2 * shape.width, 2 * shape.width + shape.num_context
    num_left = len(index) - first
    if num_left > PIECE_DECISIONS:  # the last two pieces share what is left
        num_left = min((num_left + 1) // 2, PIECE_DECISIONS)
    # No views in the loop: making one takes as long as scaling ten features. And no sums as index: that they
    # are not negative only we know, and the compiler makes no vectors of what might be.
    entities, context, privileged = seen.entities, seen.context, seen.privileged
    inputs, of_context = piece.inputs, piece.inputs[:, num_features:]
    for_actor, for_critic = piece.actor.pooled[:, num_before:], piece.critic.pooled[:, num_before:]
    secret = piece.critic.pooled[:, num_after:]
    shift, factor = scales.entity_shift, scales.entity_factor
    row, num = 0, 0
    piece.starts[0] = 0
    while num < num_left and row + num_slots <= inputs.shape[0]:
        i = index[first + num]
        for j in range(num_context):
            value = _scaled(context[i, j], scales.context_shift[j], scales.context_factor[j])
            for_actor[num, j] = value
            for_critic[num, j] = value
        for j in range(shape.num_privileged):
            value = _scaled(privileged[i, j], scales.privileged_shift[j], scales.privileged_factor[j])
            secret[num, j] = value
        for k in range(num_slots):
            if seen.entity_mask[i, k]:
                for j in range(num_features):
                    inputs[row, j] = _scaled(entities[i, k, j], shift[j], factor[j])
                for j in range(num_context):
                    of_context[row, j] = for_actor[num, j]
                piece.slots[row] = k
                row += 1
        num += 1
        piece.starts[num] = row
    return num


@inner
def _add_relu(out: Array, bias: Array) -> None:
    zero = np.float32(0)
    for i in range(out.shape[0]):
        for j in range(out.shape[1]):
            out[i, j] = max(out[i, j] + bias[j], zero)


@inner
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


@inner
def _encode(inputs: Array, turned: Array, at: int, starts: Array, num: int, out: Activations) -> None:
    num_rows, width = starts[num], out.g.shape[1]
    layer = inputs[:num_rows]
    for number in range(out.layers.shape[0]):
        num_inputs = layer.shape[1]
        h = out.layers[number][:num_rows]
        np.dot(layer, matrix(turned, at, num_inputs, width), h)
        at += num_inputs * width
        _add_relu(h, turned[at : at + width])
        at += width
        layer = h
    _pool(layer, starts, num, out.pooled, out.highest)
    num_pooled = out.pooled.shape[1]
    g = out.g[:num]
    np.dot(out.pooled[:num], matrix(turned, at, num_pooled, width), g)
    at += num_pooled * width
    _add_relu(g, turned[at : at + width])


@inner
def forward_actor(
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
    np.dot(piece.actor.layers[-1][:num_rows], matrix(turned, of_entity, width, width), hidden)
    np.dot(g, matrix(turned, of_all, width, width), shared)
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


@inner
def forward_critic(shape: Shape, turned: Array, num: int, piece: Piece) -> None:
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
    piece = new_piece(shape, seen.entities.shape[1])
    first = 0
    while first < len(index):
        num = take_piece(seen, scales, shape, index, first, piece)
        forward_actor(seen, shape, turned, index, first, num, piece)
        logits[first : first + num] = piece.logits[:num]
        first += num


@compiled
def run_values(seen: Observation, scales: Scales, shape: Shape, turned: Array, values: Array) -> None:
    """[B]"""
    index = np.arange(len(seen.context))
    piece = new_piece(shape, seen.entities.shape[1])
    first = 0
    while first < len(index):
        num = take_piece(seen, scales, shape, index, first, piece)
        forward_critic(shape, turned, num, piece)
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
    piece = new_piece(shape, seen.entities.shape[1])
    first = 0
    while first < len(index):
        num = take_piece(seen, scales, shape, index, first, piece)
        forward_actor(seen, shape, turned, index, first, num, piece)
        for b in range(num):
            i = first + b
            logits, mask = piece.logits[b], seen.action_mask[i]
            actions[i], logp[i] = draw_action(logits, mask, temperature, epsilon, chance[i])
            greedy[i] = np.argmax(logits)
        first += num
