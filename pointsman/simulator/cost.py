"""How long one pipeline stage takes for a batch: five cost models, one compiled function.

- `linear`    a + b*P + c*D + d*S + e*Q, the closed form of Vidur's golden runs;
- `roofline`  from the model's shape and the device's peak: whichever of memory and arithmetic is slower;
- `profile`   measured tables, operator by operator (`profile_tables.py`);
- `layers`    measured tables of one layer, by shapes (`layers.py`);
- `steps`     measured on a server, step by step (`steps.py`).

`auto` is what was measured where the package has it (`measured.py`), else `roofline`.

Whatever the model, it becomes `CostTables`, and the simulator calls `stage_time`. A batch is described by

    P   prefill tokens scheduled
    D   decoding sequences, one token each          T = P + D tokens in all
    S   context tokens of the decoding sequences, summed
    Q   chunk * (processed before + chunk / 2), summed over prefill chunks: token pairs of causal attention
    K   tokens processed before, each rounded up to 64, summed over prefill chunks
    C2  chunk ** 2, summed over prefill chunks

All stages of a pipeline take the time of the slowest: the largest share of layers, the LM head, and a send.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Literal, get_args

import numpy as np
from numba import njit
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field

from pointsman.errors import InputError
from pointsman.simulator.hardware import DTYPE_BYTES, Deployment
from pointsman.simulator.layers import CHUNK_CELL_TOKENS, CONTEXT_CELL_TOKENS, LayersCost
from pointsman.simulator.measured import find_measured
from pointsman.simulator.profile import CHUNK_STEP_TOKENS, KV_STEP_TOKENS, ProfileCost
from pointsman.simulator.steps import PowerLimit, StepsCost, curve_table
from pointsman.spec import Spec, one_of

Floats = NDArray[np.float64]

LINEAR, TABLE, PROFILE = range(3)
NUM_COEFFICIENTS = 6
NUM_GRID_STEPS = 3
PER_STEP = 0  # index of a in `coefficients`
PER_PAIR = 4  # index of e in `coefficients`
SEVERAL_CHUNKS = 5  # index of the factor behind a, b, c, d, e in `coefficients`

# Beyond these, dense and mixture models alike are limited by arithmetic and grow linearly.
MAX_TOKENS = 4096
MAX_SEQS = 1024

# Vidur's operator tables for A100, H100 and A40 agree: matrix products of 1 to 8 tokens reach 0.75 to 0.80 of
# the memory bandwidth, and the operators of a layer with 512 tokens or more 0.56 to 0.68 of the fp16 peak.
# Engines stay at the lower end: 0.55 and half a millisecond a step put Llama-3-8B on one A100-80 near the
# linear reference of Vidur's golden runs (8.5 ms, 80 us a prefill token, 0.08 us a context token).
FLOPS_EFFICIENCY = 0.55
BANDWIDTH_EFFICIENCY = 0.8
STEP_OVERHEAD_S = 5e-4
# NCCL on DGX A100 and H100, messages of 64 MB: 0.52 to 0.75 of the one-way NVLink bandwidth (Vidur's tables).
LINK_EFFICIENCY = 0.6


class LinearCost(Spec):
    """t = a + b*P + c*D + d*S + e*Q, seconds for each pipeline stage."""

    kind: Literal["linear"]
    a: float = Field(ge=0, description="seconds a step")
    b: float = Field(default=0.0, ge=0, description="seconds a prefill token")
    c: float = Field(default=0.0, ge=0, description="seconds a decoding sequence")
    d: float = Field(default=0.0, ge=0, description="seconds a context token of a decoding sequence")
    e: float = Field(default=0.0, ge=0, description="seconds a pair of tokens in prefill attention")


class RooflineCost(Spec):
    """From the replica's device, model and parallelism."""

    kind: Literal["roofline"]
    flops_efficiency: float = Field(
        default=FLOPS_EFFICIENCY, gt=0, le=1, description="share of the peak FLOP/s"
    )
    bandwidth_efficiency: float = Field(
        default=BANDWIDTH_EFFICIENCY, gt=0, le=1, description="share of the memory bandwidth"
    )
    overhead_s: float = Field(default=STEP_OVERHEAD_S, ge=0, description="fixed time a step, seconds")


class AutoCost(Spec):
    """Measured on this device and model where the package has it, else `roofline`."""

    kind: Literal["auto"]


DEFAULT_ROOFLINE = RooflineCost(kind="roofline")

AnyCost = AutoCost | LinearCost | RooflineCost | ProfileCost | LayersCost | StepsCost
CostSpec = Annotated[AnyCost, BeforeValidator(one_of("cluster.cost", get_args(AnyCost)))]


@dataclass(frozen=True, eq=False)
class CostTables:
    """A cost model as flat arrays; times in seconds for one pipeline stage.

    kind          LINEAR, TABLE (roofline, steps) or PROFILE (profile, layers)
    coefficients  [6] a, b, c, d, e, and the factor on prefill attention with several chunks (PROFILE)
    token_s       [tokens + 1] by T: weights, products, communication, fixed overhead
    sequence_s    [sequences + 1] by sequences in the batch: LM head or CPU overhead
    decode_s      [decodes + 1, contexts] by D and S / D / grid[0] (PROFILE)
    prefill_s     [contexts, chunks] by K / grid[1] and sqrt(C2) / grid[2] (PROFILE)
    grid          [3] tokens a cell
    start_s       [tokens + 1] by T: what a step takes longer if the engine was idle
    power         the device's power limit, if it has one

    Tables are continued linearly from their last two entries; a table of one entry is constant.
    """

    kind: int
    coefficients: Floats
    token_s: Floats = field(default_factory=lambda: np.zeros(1))
    sequence_s: Floats = field(default_factory=lambda: np.zeros(1))
    decode_s: Floats = field(default_factory=lambda: np.zeros((1, 1)))
    prefill_s: Floats = field(default_factory=lambda: np.zeros((1, 1)))
    grid: NDArray[np.int64] = field(default_factory=lambda: np.ones(3, np.int64))
    start_s: Floats = field(default_factory=lambda: np.zeros(1))
    power: PowerLimit | None = None

    def stage_s(
        self,
        num_prefill_tokens: int = 0,
        num_decodes: int = 0,
        context_tokens: int = 0,
        pairs: float = 0.0,
        num_seqs: int = 1,
        kv_tokens: int = 0,
        squares: float = 0.0,
    ) -> float:
        """`stage_time` for callers outside the compiled code: at full clocks."""
        tables = (self.coefficients, self.token_s, self.sequence_s, self.decode_s, self.prefill_s, self.grid)
        # Always the same types: numba compiles once for each combination.
        tokens = (num_prefill_tokens, num_decodes, context_tokens)
        batch = (*tokens, float(pairs), num_seqs, kv_tokens, float(squares))
        return float(stage_time(self.kind, *tables, *batch))


def cost_tables(spec: AnyCost, deployment: Deployment | None) -> CostTables:
    """`deployment` may be missing for costs that know no hardware."""
    if isinstance(spec, LinearCost):
        return CostTables(LINEAR, np.array([spec.a, spec.b, spec.c, spec.d, spec.e, 1.0]))
    if isinstance(spec, StepsCost):
        return _steps_tables(spec)
    if deployment is None:
        problem = "needs to know what the replica runs on"
        raise InputError("cost.kind", spec.kind, problem, "set the replica's device and model")
    if isinstance(spec, ProfileCost):
        return _profile_tables(spec, deployment)
    if isinstance(spec, AutoCost):
        measured = find_measured(deployment)
        return cost_tables(measured.cost if measured else DEFAULT_ROOFLINE, deployment)
    if isinstance(spec, LayersCost):
        return _layers_tables(spec, deployment)
    return _roofline_tables(spec, deployment)


def _steps_tables(spec: StepsCost) -> CostTables:
    return CostTables(
        kind=TABLE,
        coefficients=np.array([0.0, 0.0, 0.0, spec.context_s, spec.pair_s, 1.0]),
        token_s=curve_table(spec.step_s),
        sequence_s=np.array([0.0, spec.sequence_s]),
        start_s=np.append(curve_table(spec.start_s), spec.start_s[-1][1]),
        power=spec.power,
    )


def _profile_tables(spec: ProfileCost, deployment: Deployment) -> CostTables:
    from pointsman.simulator.profile_tables import read_profile  # loads polars

    profile = read_profile(spec, deployment)
    return CostTables(
        kind=PROFILE,
        coefficients=np.array([0.0, 0.0, 0.0, 0.0, 0.0, profile.batching_factor]),
        token_s=profile.token_s(),
        sequence_s=profile.sequence_s(),
        decode_s=profile.decode_s(),
        prefill_s=profile.prefill_s(),
        grid=np.array([KV_STEP_TOKENS, KV_STEP_TOKENS, CHUNK_STEP_TOKENS], np.int64),
    )


def _layers_tables(spec: LayersCost, deployment: Deployment) -> CostTables:
    spec.check(deployment)
    num_layers, products_s = deployment.num_stage_layers, spec.products_s()
    tokens = np.arange(products_s.size, dtype=np.float64)
    layer_s = products_s + 2 * _all_reduce_s(deployment, tokens)
    return CostTables(
        kind=PROFILE,
        coefficients=np.array([0.0, 0.0, 0.0, 0.0, 0.0, 1.0]),
        token_s=spec.overhead_s + num_layers * layer_s + _send_s(deployment, tokens),
        sequence_s=spec.head_s(),
        decode_s=num_layers * spec.decode_s(),
        prefill_s=num_layers * spec.prefill_s(),
        grid=np.array([CONTEXT_CELL_TOKENS, CONTEXT_CELL_TOKENS, CHUNK_CELL_TOKENS], np.int64),
    )


def _roofline_tables(spec: RooflineCost, deployment: Deployment) -> CostTables:
    device, model = deployment.device, deployment.model
    tensor_parallel, num_layers = deployment.tensor_parallel, deployment.num_stage_layers
    bytes_per_s = device.bandwidth_gb_s * 1e9 * spec.bandwidth_efficiency
    flops_per_s = device.peak_flops(deployment.dtype) * spec.flops_efficiency
    fp16_flops_per_s = device.peak_flops("fp16") * spec.flops_efficiency

    tokens = np.arange(MAX_TOKENS + 1, dtype=np.float64)
    every_token = model.attention_parameters(tensor_parallel) + model.router_parameters
    mlp = model.mlp_parameters(tensor_parallel)
    num_active_mlps = max(1, model.num_experts_per_token)
    weight_bytes = (every_token + mlp * _mlps_touched(deployment, tokens)) * DTYPE_BYTES[deployment.dtype]
    flops = 2 * (every_token + mlp * num_active_mlps) * tokens
    layer_s = np.maximum(weight_bytes / bytes_per_s, flops / flops_per_s)
    layer_s += 2 * _all_reduce_s(deployment, tokens)

    seqs = np.arange(MAX_SEQS + 1, dtype=np.float64)
    head = model.embedding_parameters / tensor_parallel
    head_s = np.maximum(head * DTYPE_BYTES["fp16"] / bytes_per_s, 2 * head * seqs / fp16_flops_per_s)

    # A context token is read once; a pair costs a product with the key and one with the value.
    context_s = deployment.kv_bytes_per_token / bytes_per_s
    pair_s = 4 * (model.num_heads / tensor_parallel) * model.head_dim * num_layers / fp16_flops_per_s
    return CostTables(
        kind=TABLE,
        coefficients=np.array([0.0, 0.0, 0.0, context_s, pair_s, 1.0]),
        token_s=spec.overhead_s + num_layers * layer_s + _send_s(deployment, tokens),
        sequence_s=head_s,
    )


def _mlps_touched(deployment: Deployment, tokens: Floats) -> Floats:
    """Expected number of distinct experts of a layer that a batch needs, if all are equally likely."""
    num_experts = deployment.model.num_experts
    if num_experts == 0:
        return np.ones_like(tokens)
    share = deployment.model.num_experts_per_token / num_experts
    touched: Floats = num_experts * (1 - (1 - share) ** tokens)
    return touched


def _all_reduce_s(deployment: Deployment, tokens: Floats) -> Floats:
    """A ring: each device sends 2 (n - 1) / n of the activations."""
    num_devices = deployment.tensor_parallel
    if num_devices == 1:
        return np.zeros_like(tokens)
    return _link_s(deployment, 2 * (num_devices - 1) / num_devices * tokens)


def _send_s(deployment: Deployment, tokens: Floats) -> Floats:
    return _link_s(deployment, tokens) if deployment.pipeline_parallel > 1 else np.zeros_like(tokens)


def _link_s(deployment: Deployment, tokens: Floats) -> Floats:
    device = deployment.device
    activation_bytes = tokens * deployment.model.hidden_size * DTYPE_BYTES["fp16"]
    seconds: Floats = device.link_latency_us * 1e-6 + activation_bytes / (
        device.link_bandwidth_gb_s * 1e9 * LINK_EFFICIENCY
    )
    return seconds


# Nothing is allocated here, so the tables need no reference counting: it would add 100 ns to a call of 5 ns.
_compiled = njit(cache=True, nogil=True, forceinline=True, _nrt=False)  # type: ignore[call-overload]


@_compiled
def value_at(table, index):  # type: ignore[no-untyped-def]
    """The entry of a table, which is continued linearly."""
    last = table.size - 1
    if index <= last:
        return table[index]
    if last == 0:
        return table[0]
    return table[last] + (table[last] - table[last - 1]) * (index - last)


@_compiled
def _bilinear(table, row, column):  # type: ignore[no-untyped-def]
    i = min(int(row), table.shape[0] - 2)
    j = min(int(column), table.shape[1] - 2)
    x = row - i
    y = column - j
    near = table[i, j] * (1.0 - y) + table[i, j + 1] * y
    far = table[i + 1, j] * (1.0 - y) + table[i + 1, j + 1] * y
    return near * (1.0 - x) + far * x


@_compiled
def stage_time(  # type: ignore[no-untyped-def]
    kind,
    coefficients,
    token_s,
    sequence_s,
    decode_s,
    prefill_s,
    grid,
    num_prefill_tokens,  # P
    num_decodes,  # D
    context_tokens,  # S
    pairs,  # Q
    num_seqs,
    kv_tokens,  # K
    squares,  # C2
):
    """Seconds one stage takes for a batch; arrays as in `CostTables`, features as in this module's head."""
    time_s = (
        coefficients[0]
        + coefficients[1] * num_prefill_tokens
        + coefficients[2] * num_decodes
        + coefficients[3] * context_tokens
        + coefficients[4] * pairs
    )
    if kind == LINEAR:
        return time_s
    time_s += value_at(token_s, num_prefill_tokens + num_decodes) + value_at(sequence_s, num_seqs)
    if kind == PROFILE:
        if num_decodes > 0:
            time_s += _bilinear(decode_s, num_decodes, context_tokens / num_decodes / grid[0])
        if num_prefill_tokens > 0:
            attention_s = _bilinear(prefill_s, kv_tokens / grid[1], math.sqrt(squares) / grid[2])
            if num_seqs - num_decodes > 1:
                attention_s *= coefficients[SEVERAL_CHUNKS]
            time_s += attention_s
    return time_s
