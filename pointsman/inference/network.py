"""Inference of a trained policy, compiled: the logits of one observation, without PyTorch or allocation.

The same arithmetic as `training/networks.py`, which explains it. The simulator calls `forward` inside its own
kernel for evaluation at full speed; the live router calls `network_logits`. Weights lie as [inputs, outputs],
so that the innermost loops run over outputs that are next to each other in memory; all entities go through a
layer before the next one, four at a time, so that each weight is loaded once for four of them.
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np

from pointsman.compiled.jit import INNER, entry_point
from pointsman.compiled.memory import (
    Records,
    address_of,
    aligned,
    int_list,
    row_accessor,
    single_list,
    single_table,
)
from pointsman.inference.checkpoint import Checkpoint

POOLED, ATTENTION, ATTENTION_GRU, MLP = range(4)
KINDS = {"pooled": POOLED, "attention": ATTENTION, "attention+gru": ATTENTION_GRU, "mlp": MLP}

CLIP = np.float32(10.0)
SINGLE = 4  # bytes

# A network as the kernel wants it: sizes, and the addresses of float32 arrays.
NETWORK = np.dtype(
    [
        ("kind", "i8"),
        ("num_features", "i8"),  # F
        ("num_context", "i8"),  # C
        ("num_inputs", "i8"),  # of the first layer: F + C; mlp: R F + C
        ("num_outputs", "i8"),  # mlp: R + 1; otherwise 0
        ("width", "i8"),  # W
        ("depth", "i8"),  # D
        ("num_heads", "i8"),
        ("hint_column", "i8"),  # -1: none
        ("hint_strength", "f4"),
        ("entity_shift", "i8"),  # [F]
        ("entity_factor", "i8"),  # [F]
        ("context_shift", "i8"),  # [C]
        ("context_factor", "i8"),  # [C]
        ("first", "i8"),  # [num_inputs, W]
        ("hidden", "i8"),  # [D - 1, W, W]
        ("biases", "i8"),  # [D, W] of the first and hidden layers
        ("attention_in", "i8"),  # [W, 3 W]: queries, keys, values
        ("attention_in_bias", "i8"),  # [3 W]
        ("attention_out", "i8"),  # [W, W]
        ("attention_out_bias", "i8"),  # [W]
        ("summary", "i8"),  # [2 W + C, W]
        ("summary_bias", "i8"),  # [W]
        ("memory_in", "i8"),  # [W, 3 W]: reset, update, new
        ("memory_in_bias", "i8"),  # [3 W]
        ("memory_state", "i8"),  # [W, 3 W]
        ("memory_state_bias", "i8"),  # [3 W]
        ("of_entity", "i8"),  # [W, W]
        ("of_entity_bias", "i8"),  # [W]
        ("of_all", "i8"),  # [W, W]
        ("score", "i8"),  # [W]
        ("hold", "i8"),  # [W]
        ("hold_bias", "i8"),  # [1]
        ("output", "i8"),  # [W, num_outputs]: mlp
        ("output_bias", "i8"),  # [num_outputs]
    ],
    align=True,
)

# Which layer of training/networks.py a field (and its field_bias) holds.
LAYERS = {
    "attention_in": "actor.attention.queries_keys_values",
    "attention_out": "actor.attention.output",
    "summary": "actor.summary",
    "of_entity": "head.of_entity",
    "of_all": "head.of_all",
    "score": "head.score",
    "hold": "head.hold",
    "output": "head.output",
}


network_at = row_accessor(NETWORK)


def kernel(function: Any) -> Any:
    """Like `simulator.jit.kernel`, with products and sums fused and sums in any order."""
    return numba.njit(function, fastmath={"contract", "reassoc", "nsz"}, **INNER)


@entry_point
def network_logits(networks, entities, context, num_entities, scratch, state, logits):
    """logits [R + 1] of one observation, for callers in Python.

    networks: [1] NETWORK; entities: [>= R, F] and context: [C], float32; scratch: float32 of `scratch_size`;
    state: [W] float32, read and overwritten by attention+gru, of any size for the others.
    """
    forward(networks[0], entities, context, num_entities, address_of(scratch), address_of(state), logits)


@kernel
def forward(net, entities, context, num_entities, scratch, state, logits):
    """Fill logits[: num_entities + 1]; which actions are legal is the caller's business.

    net: NETWORK; entities: [>= R, F], the first `num_entities` rows count; context: [C]; `scratch` and
    `state` are addresses, see `network_logits`.
    """
    if net.kind == MLP:
        forward_flat(net, entities, context, num_entities, scratch, logits)
    else:
        forward_entities(net, entities, context, num_entities, scratch, state, logits)
    if net.hint_column >= 0:
        for k in range(num_entities):
            logits[k + 1] -= net.hint_strength * entities[k, net.hint_column]


@kernel
def forward_entities(net, entities, context, num_entities, scratch, state, logits):
    width = net.width
    x = single_table(scratch, num_entities, net.num_features)
    scratch += num_entities * net.num_features * SINGLE
    a = single_table(scratch, num_entities, width)
    scratch += num_entities * width * SINGLE
    b = single_table(scratch, num_entities, width)
    scratch += num_entities * width * SINGLE
    pooled = single_table(scratch, 1, 2 * width + net.num_context)
    scaled_context = single_table(scratch + 2 * width * SINGLE, 1, net.num_context)
    scratch += (2 * width + net.num_context) * SINGLE
    g = single_table(scratch, 1, width)
    scratch += width * SINGLE
    inputs = int_list(scratch, 2 * width + net.num_context)
    scratch += (2 * width + net.num_context) * SINGLE

    scale_entities(net, entities, num_entities, x)
    scale_context(net, context, scaled_context)
    # The context is the same for all entities: its share of the first layer is computed once.
    dense(scaled_context, net.first + net.num_features * width * SINGLE, net.biases, g)
    for k in range(num_entities):
        for j in range(width):
            a[k, j] = g[0, j]
    add_product(x, single_table(net.first, net.num_features, width), a)
    relu(a)
    a, b = hidden_layers(net, a, b)
    if net.kind != POOLED:
        attend(net, a, b, scratch)

    pool(a, pooled)
    dense_row(pooled, net.summary, net.summary_bias, g, inputs)
    relu(g)
    if net.kind == ATTENTION_GRU:
        remember(net, g, scratch, single_table(state, 1, width))

    # The entities' share of the last hidden layer starts from what g adds to all of them.
    base = single_table(scratch, 1, width)
    dense_row(g, net.of_all, net.of_entity_bias, base, inputs)
    for k in range(num_entities):
        for j in range(width):
            b[k, j] = base[0, j]
    add_product(a, single_table(net.of_entity, width, width), b)
    score = single_list(net.score, width)
    hold = single_list(net.hold, width)
    logits[0] = single_list(net.hold_bias, 1)[0]
    for j in range(width):
        logits[0] += hold[j] * g[0, j]
    for k in range(num_entities):
        total = np.float32(0.0)
        for j in range(width):
            total += score[j] * max(b[k, j], np.float32(0.0))
        logits[k + 1] = total


@kernel
def forward_flat(net, entities, context, num_entities, scratch, logits):
    """`mlp`: all entities and the context are one row; the slots of missing entities are zero."""
    width = net.width
    num_slots = net.num_outputs - 1
    x = single_table(scratch, 1, net.num_inputs)
    table = single_table(scratch, num_slots, net.num_features)
    scaled_context = single_table(scratch + num_slots * net.num_features * SINGLE, 1, net.num_context)
    scratch += net.num_inputs * SINGLE
    a = single_table(scratch, 1, width)
    b = single_table(scratch + width * SINGLE, 1, width)
    scale_entities(net, entities, num_entities, table)
    for k in range(num_entities, num_slots):
        for j in range(net.num_features):
            table[k, j] = 0.0
    scale_context(net, context, scaled_context)
    dense(x, net.first, net.biases, a)
    relu(a)
    a, b = hidden_layers(net, a, b)
    weights = single_table(net.output, width, net.num_outputs)
    bias = single_list(net.output_bias, net.num_outputs)
    for k in range(num_entities + 1):
        total = bias[k]
        for j in range(width):
            total += weights[j, k] * a[0, j]
        logits[k] = total


@kernel
def scale_entities(net, entities, num_entities, out):
    shift = single_list(net.entity_shift, net.num_features)
    factor = single_list(net.entity_factor, net.num_features)
    for k in range(num_entities):
        for j in range(net.num_features):
            out[k, j] = min(max((entities[k, j] - shift[j]) * factor[j], -CLIP), CLIP)


@kernel
def scale_context(net, context, out):
    shift = single_list(net.context_shift, net.num_context)
    factor = single_list(net.context_factor, net.num_context)
    for j in range(net.num_context):
        out[0, j] = min(max((context[j] - shift[j]) * factor[j], -CLIP), CLIP)


@kernel
def attend(net, h, gathered, scratch):
    """h = relu(h + attention(h)); `gathered` is overwritten."""
    num_entities, width = h.shape
    size = width // net.num_heads
    qkv = single_table(scratch, num_entities, 3 * width)
    scratch += num_entities * 3 * width * SINGLE
    keys = single_table(scratch, width, num_entities)
    weights = single_list(scratch + num_entities * width * SINGLE, num_entities)
    dense(h, net.attention_in, net.attention_in_bias, qkv)
    scale = np.float32(1.0 / math.sqrt(size))
    for m in range(num_entities):
        for j in range(width):
            keys[j, m] = scale * qkv[m, width + j]
    for head in range(net.num_heads):
        first = head * size
        for k in range(num_entities):
            for m in range(num_entities):
                weights[m] = 0.0
            for j in range(first, first + size):
                query = qkv[k, j]
                for m in range(num_entities):
                    weights[m] += query * keys[j, m]
            softmax(weights)
            for j in range(first, first + size):
                gathered[k, j] = 0.0
            for m in range(num_entities):
                weight = weights[m]
                for j in range(first, first + size):
                    gathered[k, j] += weight * qkv[m, 2 * width + j]
    bias = single_list(net.attention_out_bias, width)
    for k in range(num_entities):
        for j in range(width):
            h[k, j] += bias[j]
    add_product(gathered, single_table(net.attention_out, width, width), h)
    relu(h)


@kernel
def softmax(x):
    highest = x[0]
    for value in x:
        highest = max(highest, value)
    total = np.float32(0.0)
    for m in range(len(x)):
        x[m] = np.exp(x[m] - highest)
        total += x[m]
    for m in range(len(x)):
        x[m] /= total


@kernel
def remember(net, g, scratch, state):
    """A step of the GRU: `state` and g become the new state. Gates lie as reset, update, new."""
    width = net.width
    of_input = single_table(scratch, 1, 3 * width)
    of_state = single_table(scratch + 3 * width * SINGLE, 1, 3 * width)
    dense(g, net.memory_in, net.memory_in_bias, of_input)
    dense(state, net.memory_state, net.memory_state_bias, of_state)
    for j in range(width):
        reset = sigmoid(of_input[0, j] + of_state[0, j])
        update = sigmoid(of_input[0, width + j] + of_state[0, width + j])
        new = np.tanh(of_input[0, 2 * width + j] + reset * of_state[0, 2 * width + j])
        state[0, j] = new + update * (state[0, j] - new)
        g[0, j] = state[0, j]


@kernel
def sigmoid(x):
    return np.float32(1.0) / (np.float32(1.0) + np.exp(-x))


@kernel
def pool(h, pooled):
    """pooled [1, >= 2 W]: the mean of the rows of h, then their maximum. Nothing in h is negative."""
    num_entities, width = h.shape
    for j in range(2 * width):
        pooled[0, j] = 0.0
    share = np.float32(1.0) / np.float32(max(num_entities, 1))
    for k in range(num_entities):
        for j in range(width):
            pooled[0, j] += h[k, j] * share
            pooled[0, width + j] = max(pooled[0, width + j], h[k, j])


@kernel
def hidden_layers(net, a, b):
    """Take a [n, W] through the layers after the first; -> where the result lies, and the other one."""
    size = net.width * SINGLE
    for layer in range(1, net.depth):
        dense(a, net.hidden + (layer - 1) * net.width * size, net.biases + layer * size, b)
        relu(b)
        a, b = b, a
    return a, b


@kernel
def dense(x, weights, bias, out):
    """out [n, O] = x [n, I] @ weights [I, O] + bias [O], these two by address"""
    num_rows, num_outputs = out.shape
    row = single_list(bias, num_outputs)
    for k in range(num_rows):
        for j in range(num_outputs):
            out[k, j] = row[j]
    add_product(x, single_table(weights, x.shape[1], num_outputs), out)


@kernel
def dense_row(x, weights, bias, out, inputs):
    """`dense` of one row without the inputs that are 0, two thirds of them behind a ReLU; inputs: [I] i4.

    One row uses a weight once, so that loading it takes longest: this saves 0.4 of 2.7 µs for 4 entities.
    """
    num_inputs, num_outputs = x.shape[1], out.shape[1]
    table = single_table(weights, num_inputs, num_outputs)
    row = single_list(bias, num_outputs)
    for j in range(num_outputs):
        out[0, j] = row[j]
    count = 0
    for i in range(num_inputs):
        inputs[count] = i
        count += x[0, i] != 0.0
    first_odd = count - count % 4
    for n in range(0, first_odd, 4):
        i0, i1, i2, i3 = inputs[n], inputs[n + 1], inputs[n + 2], inputs[n + 3]
        a0, a1, a2, a3 = x[0, i0], x[0, i1], x[0, i2], x[0, i3]
        for j in range(num_outputs):
            out[0, j] += a0 * table[i0, j] + a1 * table[i1, j] + a2 * table[i2, j] + a3 * table[i3, j]
    for n in range(first_odd, count):
        a0 = x[0, inputs[n]]
        for j in range(num_outputs):
            out[0, j] += a0 * table[inputs[n], j]


@kernel
def relu(x):
    num_rows, width = x.shape
    for k in range(num_rows):
        for j in range(width):
            x[k, j] = max(x[k, j], np.float32(0.0))


@kernel
def add_product(x, weights, out):
    """out [n, O] += x [n, I] @ weights [I, O]

    Two rows and four inputs at a time: eight products for each four weights loaded (80 against 20 GFLOP/s).
    """
    num_rows, num_inputs = x.shape
    num_outputs = out.shape[1]
    first_odd = num_inputs - num_inputs % 4
    for k in range(0, num_rows - 1, 2):
        for i in range(0, first_odd, 4):
            a0, a1, a2, a3 = x[k, i], x[k, i + 1], x[k, i + 2], x[k, i + 3]
            b0, b1, b2, b3 = x[k + 1, i], x[k + 1, i + 1], x[k + 1, i + 2], x[k + 1, i + 3]
            for j in range(num_outputs):
                w0, w1, w2, w3 = weights[i, j], weights[i + 1, j], weights[i + 2, j], weights[i + 3, j]
                out[k, j] += a0 * w0 + a1 * w1 + a2 * w2 + a3 * w3
                out[k + 1, j] += b0 * w0 + b1 * w1 + b2 * w2 + b3 * w3
        for i in range(first_odd, num_inputs):
            a0, b0 = x[k, i], x[k + 1, i]
            for j in range(num_outputs):
                out[k, j] += a0 * weights[i, j]
                out[k + 1, j] += b0 * weights[i, j]
    if num_rows % 2 == 1:
        k = num_rows - 1
        for i in range(0, first_odd, 4):
            a0, a1, a2, a3 = x[k, i], x[k, i + 1], x[k, i + 2], x[k, i + 3]
            for j in range(num_outputs):
                w0, w1, w2, w3 = weights[i, j], weights[i + 1, j], weights[i + 2, j], weights[i + 3, j]
                out[k, j] += a0 * w0 + a1 * w1 + a2 * w2 + a3 * w3
        for i in range(first_odd, num_inputs):
            a0 = x[k, i]
            for j in range(num_outputs):
                out[k, j] += a0 * weights[i, j]


def scratch_size(network: Any, num_entities: int) -> int:
    """float32 numbers that `forward` needs to work in, for up to `num_entities` entities."""
    width = int(network["width"])
    of_all = 5 * width + 2 * int(network["num_context"]) + 6 * width
    of_each = int(network["num_features"]) + 2 * width + 4 * width + 1
    return max(int(network["num_inputs"]) + 2 * width, of_all + num_entities * of_each)


class NetworkTables:
    """A network as the kernel wants it: `rows` [1] NETWORK, which hold the arrays they point to."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        spec, arrays = checkpoint.network, checkpoint.arrays
        self.rows = Records(1, NETWORK)
        row = self.rows[0]
        row.kind = KINDS[spec.kind]
        row.num_features = len(checkpoint.space.entity_features)
        row.num_context = len(checkpoint.space.context_features)
        row.width, row.depth, row.num_heads = spec.width, spec.depth, spec.heads
        names = [feature.name for feature in checkpoint.space.entity_features]
        row.hint_column = -1 if spec.hint is None else names.index(spec.hint)
        row.hint_strength = arrays["hint_strength"]
        for name in ("entity", "context"):
            row[f"{name}_shift"] = self._keep(arrays[f"{name}_scale.shift"])
            row[f"{name}_factor"] = self._keep(arrays[f"{name}_scale.factor"])
        layers = [f"actor.layers.{number}" for number in range(spec.depth)]
        row.num_inputs = arrays["actor.layers.0.weight"].shape[1]
        row.first = self._keep(arrays["actor.layers.0.weight"].T)
        row.hidden = self._keep([arrays[f"{layer}.weight"].T for layer in layers[1:]])
        row.biases = self._keep([arrays[f"{layer}.bias"] for layer in layers])
        for field, layer in LAYERS.items():
            if f"{layer}.weight" in arrays:
                row[field] = self._keep(arrays[f"{layer}.weight"].T)
            if f"{layer}.bias" in arrays:
                row[f"{field}_bias"] = self._keep(arrays[f"{layer}.bias"])
        if spec.kind == "attention+gru":
            for field, end in (("memory_in", "ih"), ("memory_state", "hh")):
                row[field] = self._keep(arrays[f"memory.weight_{end}"].T)
                row[f"{field}_bias"] = self._keep(arrays[f"memory.bias_{end}"])
        if spec.kind == "mlp":
            row.num_outputs = len(arrays["head.output.bias"])

    def _keep(self, array: Any) -> int:
        """The address of a copy that lives as long as the rows."""
        return self.rows.hold(aligned(np.asarray(array, np.float32)))
