"""What a replica runs on: devices, models, and how many KV blocks are left once the weights are loaded.

The catalogue is data (`catalogue.yaml`, public figures with their sources). `Deployment` puts a model on a
device with tensor and pipeline parallelism and refuses what vLLM would refuse. Two ways to size the KV
memory: `kv_capacity_blocks` as vLLM does it, and `vidur_plan`, Vidur's memory planner, for its schedulers.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import yaml
from pydantic import Field, model_validator

from pointsman.errors import InputError, reason_of
from pointsman.spec import Spec, parse_spec, parse_yaml

GIB = 1024**3
GB = 1e9

Dtype = Literal["fp16", "fp8"]
DTYPE_BYTES: Mapping[str, int] = {"fp16": 2, "fp8": 1}

# Not weights, not KV, with vLLM's default of 8,192 tokens a step: the CUDA context, NCCL and the sampler, and
# the widest activations of a layer. Gives 1.4 GiB for Llama-3-8B, where vLLM logs 1.26 GiB of activations and
# 0.1 to 0.3 GiB of the rest (vLLM pulls 10511 and 12126).
RUNTIME_RESERVE_BYTES = GIB // 2
PROFILED_BATCH_TOKENS = 8192


class Device(Spec):
    """One accelerator. See `catalogue.yaml` for where each figure is read."""

    name: str
    aliases: tuple[str, ...] = ()
    fp16_tflops: float = Field(gt=0, description="dense fp16/bf16 peak, TFLOP/s")
    fp8_tflops: float | None = Field(default=None, gt=0, description="dense fp8 peak, TFLOP/s; none = no fp8")
    memory_gb: float = Field(gt=0, description="memory on the label, GB")
    usable_memory_gib: float = Field(gt=0, description="memory the driver shows to a program, GiB")
    bandwidth_gb_s: float = Field(gt=0, description="memory bandwidth, GB/s")
    link_bandwidth_gb_s: float = Field(default=32, gt=0, description="to its neighbours, one direction, GB/s")
    link_latency_us: float = Field(default=30, ge=0, description="of one collective or send, µs")
    source: str = ""

    def peak_flops(self, dtype: Dtype) -> float:
        if dtype == "fp16":
            return self.fp16_tflops * 1e12
        if self.fp8_tflops is None:
            raise InputError(
                "dtype", dtype, f"{self.name} has no fp8 arithmetic", "use fp16 or another device"
            )
        return self.fp8_tflops * 1e12


class Model(Spec):
    """The shape of a decoder-only transformer. Biases and head norms are too small to count."""

    name: str
    aliases: tuple[str, ...] = ()
    num_layers: int = Field(ge=1)
    hidden_size: int = Field(ge=1)
    num_heads: int = Field(ge=1, description="query heads")
    num_kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)
    intermediate_size: int = Field(ge=1, description="width of the MLP; of one expert in a mixture")
    is_mlp_gated: bool = Field(default=True, description="three matrices (up, gate, down) instead of two")
    num_experts: int = Field(default=0, ge=0, description="0 = dense")
    num_experts_per_token: int = Field(default=0, ge=0)
    vocab_size: int = Field(ge=1)
    has_tied_embeddings: bool = Field(default=False, description="the LM head shares the embedding's weights")
    max_context_tokens: int = Field(ge=1)
    source: str = ""

    @model_validator(mode="after")
    def _check_shape(self) -> Model:
        if self.num_heads % self.num_kv_heads:
            problem, remedy = f"does not divide the {self.num_heads} query heads", "correct one of the two"
            raise InputError(f"{self.name}.num_kv_heads", self.num_kv_heads, problem, remedy)
        num_active = self.num_experts_per_token
        if num_active > self.num_experts or (num_active == 0) != (self.num_experts == 0):
            problem = f"does not go with num_experts = {self.num_experts}"
            remedy = "use 1 to num_experts, or leave both out for a dense model"
            raise InputError(f"{self.name}.num_experts_per_token", num_active, problem, remedy)
        return self

    def attention_parameters(self, tensor_parallel: int = 1) -> float:
        """Count those of one layer, on one device. KV heads are copied if there are fewer than devices."""
        query = self.num_heads / tensor_parallel
        kv = max(1.0, self.num_kv_heads / tensor_parallel)
        return self.hidden_size * self.head_dim * 2 * (query + kv)

    def mlp_parameters(self, tensor_parallel: int = 1) -> float:
        """Count those of one expert (the whole MLP of a dense model) of one layer, on one device."""
        num_matrices = 3 if self.is_mlp_gated else 2
        return num_matrices * self.hidden_size * self.intermediate_size / tensor_parallel

    @property
    def router_parameters(self) -> int:
        return self.hidden_size * self.num_experts

    @property
    def embedding_parameters(self) -> int:
        return self.vocab_size * self.hidden_size

    def layer_parameters(self, tensor_parallel: int = 1) -> float:
        norms = 2 * self.hidden_size
        experts = max(1, self.num_experts) * self.mlp_parameters(tensor_parallel)
        return self.attention_parameters(tensor_parallel) + self.router_parameters + experts + norms

    @property
    def num_parameters(self) -> int:
        num_tables = 1 if self.has_tied_embeddings else 2
        return round(self.num_layers * self.layer_parameters() + num_tables * self.embedding_parameters)

    @property
    def num_active_parameters(self) -> int:
        """What one token passes through, embedding and LM head included, as model cards count it."""
        num_idle = max(0, self.num_experts - self.num_experts_per_token)
        return round(self.num_parameters - self.num_layers * num_idle * self.mlp_parameters())


class _Named(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def aliases(self) -> tuple[str, ...]: ...


E = TypeVar("E", bound=_Named)


@dataclass(frozen=True)
class Catalogue:
    """Devices and models by their proper name; look-ups ignore case and know aliases."""

    devices: Mapping[str, Device] = field(default_factory=dict)
    models: Mapping[str, Model] = field(default_factory=dict)

    def device(self, name: str) -> Device:
        return _find("device", self.devices, name)

    def model(self, name: str) -> Model:
        return _find("model", self.models, name)


def _find(kind: str, entries: Mapping[str, E], name: str) -> E:
    by_name: dict[str, E] = {}
    for entry in entries.values():
        by_name.update({alias.lower(): entry for alias in entry.aliases})
    by_name.update({proper.lower(): entry for proper, entry in entries.items()})
    found = by_name.get(name.lower())
    if found is not None:
        return found
    near = difflib.get_close_matches(name.lower(), by_name, n=6, cutoff=0.5)
    names = list(dict.fromkeys(by_name[match].name for match in near))[:3] or sorted(entries)
    question = f"did you mean {' or '.join(names)}?" if near else f"known: {', '.join(names)}."
    raise InputError(kind, name, "not in the catalogue", f"{question} Or add it in a file of your own")


def load_catalogue(extra: Path | None = None) -> Catalogue:
    """The shipped catalogue, with the entries of the user's own file on top."""
    shipped = _shipped_catalogue()
    if extra is None:
        return shipped
    own = _read_catalogue(extra)
    return Catalogue({**shipped.devices, **own.devices}, {**shipped.models, **own.models})


@cache
def _shipped_catalogue() -> Catalogue:
    return _read_catalogue(Path(__file__).with_name("catalogue.yaml"))


def _read_catalogue(path: Path) -> Catalogue:
    remedy = "give a YAML file with the sections `devices` and `models`"
    try:
        content = parse_yaml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise InputError("catalogue", str(path), f"cannot be read ({reason_of(error)})", remedy) from None
    if not isinstance(content, dict) or not content.keys() <= {"devices", "models"}:
        raise InputError("catalogue", str(path), "is not a catalogue", remedy)

    def entries(section: str) -> dict[str, dict[str, Any]]:
        found = content.get(section) or {}
        if not isinstance(found, dict) or not all(isinstance(entry, dict) for entry in found.values()):
            raise InputError(f"{path}: {section}", found, "is not a mapping of names to figures", remedy)
        return {str(name): {"name": str(name), **entry} for name, entry in found.items()}

    return Catalogue(
        {name: parse_spec(Device, e, f"{path}: devices.{name}") for name, e in entries("devices").items()},
        {name: parse_spec(Model, e, f"{path}: models.{name}") for name, e in entries("models").items()},
    )


@dataclass(frozen=True)
class Deployment:
    """A model on the devices of one replica: `tensor_parallel` x `pipeline_parallel` of them.

    `dtype` is that of weights and arithmetic; the KV cache stays in fp16 unless `kv_dtype` says otherwise,
    as in vLLM. Embedding and LM head are never quantised.
    """

    device: Device
    model: Model
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    dtype: Dtype = "fp16"
    kv_dtype: Dtype = "fp16"

    def __post_init__(self) -> None:
        self.device.peak_flops(self.dtype)
        model = self.model
        if not 1 <= self.pipeline_parallel <= model.num_layers:
            problem = f"cannot split the {model.num_layers} layers of {model.name}"
            remedy = f"use 1 to {model.num_layers}"
            raise InputError("pipeline_parallel", self.pipeline_parallel, problem, remedy)
        problem = _tensor_parallel_problem(model, self.tensor_parallel)
        if problem:
            possible = [n for n in range(1, model.num_heads + 1) if not _tensor_parallel_problem(model, n)]
            raise InputError("tensor_parallel", self.tensor_parallel, problem, f"use one of {possible}")

    @property
    def num_stage_layers(self) -> int:
        """Layers of the largest pipeline stage."""
        return -(-self.model.num_layers // self.pipeline_parallel)

    @property
    def num_kv_heads_per_device(self) -> int:
        return max(1, self.model.num_kv_heads // self.tensor_parallel)

    @property
    def kv_bytes_per_token(self) -> int:
        """On one device of the largest stage."""
        per_layer = 2 * self.num_kv_heads_per_device * self.model.head_dim * DTYPE_BYTES[self.kv_dtype]
        return per_layer * self.num_stage_layers

    @property
    def weight_bytes(self) -> float:
        """On one device of the heaviest stage, which holds an embedding table, an LM head, or both."""
        layers = self.num_stage_layers * self.model.layer_parameters(self.tensor_parallel)
        num_tables = 1 if self.model.has_tied_embeddings or self.pipeline_parallel > 1 else 2
        tables = num_tables * self.model.embedding_parameters / self.tensor_parallel
        return layers * DTYPE_BYTES[self.dtype] + tables * DTYPE_BYTES["fp16"]

    @property
    def activation_bytes(self) -> float:
        model = self.model
        mlp_width = 3 * model.intermediate_size * max(1, model.num_experts_per_token) / self.tensor_parallel
        widest = 4 * model.hidden_size + mlp_width
        return PROFILED_BATCH_TOKENS * widest * DTYPE_BYTES["fp16"] + RUNTIME_RESERVE_BYTES


def _tensor_parallel_problem(model: Model, tensor_parallel: int) -> str:
    if tensor_parallel < 1:
        return "is less than one device"
    if model.num_heads % tensor_parallel:
        return f"does not divide the {model.num_heads} attention heads of {model.name}"
    if model.num_kv_heads % tensor_parallel and tensor_parallel % model.num_kv_heads:
        return f"neither divides nor is a multiple of the {model.num_kv_heads} KV heads of {model.name}"
    if model.intermediate_size % tensor_parallel:
        return f"does not divide the MLP width {model.intermediate_size} of {model.name}"
    return ""


def kv_capacity_blocks(deployment: Deployment, block_size: int = 16, memory_utilization: float = 0.9) -> int:
    """KV blocks of `block_size` tokens that fit beside weights and activations, as vLLM counts them."""
    if block_size < 1:
        raise InputError("block_size", block_size, "is less than one token", "vLLM's default is 16")
    if not 0 < memory_utilization <= 1:
        raise InputError("memory_utilization", memory_utilization, "is not a share of the memory", "use 0.9")
    free_bytes = _free_bytes(deployment, memory_utilization)
    num_blocks = int(free_bytes // (deployment.kv_bytes_per_token * block_size))
    if num_blocks < 1:
        raise _does_not_fit(
            deployment,
            available_bytes=deployment.device.usable_memory_gib * GIB * memory_utilization,
            needed_bytes=deployment.weight_bytes + deployment.activation_bytes,
            fits=lambda other: _free_bytes(other, memory_utilization) > 0,
        )
    return num_blocks


def _free_bytes(deployment: Deployment, memory_utilization: float) -> float:
    usable_bytes = deployment.device.usable_memory_gib * GIB * memory_utilization
    return usable_bytes - deployment.weight_bytes - deployment.activation_bytes


def _does_not_fit(
    deployment: Deployment, available_bytes: float, needed_bytes: float, fits: Callable[[Deployment], bool]
) -> InputError:
    model, device = deployment.model, deployment.device
    wider = [
        n
        for n in (2, 4, 8)
        if n > deployment.tensor_parallel
        and not _tensor_parallel_problem(model, n)
        and fits(replace(deployment, tensor_parallel=n))
    ]
    more = f"use tensor_parallel {wider[0]}" if wider else "use more tensor_parallel or pipeline_parallel"
    problem = (
        f"needs {needed_bytes / GB:.1f} GB on each {device.name} with tensor_parallel "
        f"{deployment.tensor_parallel} and pipeline_parallel {deployment.pipeline_parallel}, "
        f"but {available_bytes / GB:.1f} GB are available"
    )
    return InputError("model", model.name, problem, f"{more}, or a device with more memory")


@dataclass(frozen=True)
class VidurPlan:
    """`num_slots`: requests of full length that fit on a replica; Orca batches at most that many."""

    num_slots: int
    num_blocks: int


def vidur_plan(
    deployment: Deployment, max_tokens: int = 4096, block_size: int = 16, memory_margin: float = 0.1
) -> VidurPlan:
    """Vidur's memory planner: what its schedulers use where `num_blocks` is not given.

    It forgets embeddings and activations, and charges a request for all layers even with pipeline stages.
    It reads the memory on the label; Vidur itself has 45 GB for the A40.
    """
    model, num_stages = deployment.model, deployment.pipeline_parallel
    if model.num_layers % num_stages:
        problem = f"does not divide the {model.num_layers} layers of {model.name}, as Vidur's planner needs"
        raise InputError("pipeline_parallel", num_stages, problem, "use a divisor, or give num_blocks")
    available_bytes = deployment.device.memory_gb * GIB * (1 - memory_margin)

    def num_slots(on: Deployment) -> int:
        free_bytes = available_bytes - _vidur_weight_bytes(on)
        return int(free_bytes // _vidur_request_bytes(on, max_tokens))

    if num_slots(deployment) < 1:
        needed_bytes = _vidur_weight_bytes(deployment) + _vidur_request_bytes(deployment, max_tokens)
        raise _does_not_fit(
            deployment, available_bytes, needed_bytes, fits=lambda other: num_slots(other) > 0
        )
    num_blocks = max_tokens // block_size * num_slots(deployment) * num_stages
    return VidurPlan(num_slots=num_slots(deployment), num_blocks=num_blocks)


def _vidur_weight_bytes(deployment: Deployment) -> int:
    model, tensor_parallel = deployment.model, deployment.tensor_parallel
    experts = max(1, model.num_experts) * model.mlp_parameters(tensor_parallel)
    per_layer = int(model.attention_parameters(tensor_parallel) + experts)
    return 2 * per_layer * (model.num_layers // deployment.pipeline_parallel)


def _vidur_request_bytes(deployment: Deployment, max_tokens: int) -> int:
    model = deployment.model
    return 4 * model.head_dim * deployment.num_kv_heads_per_device * max_tokens * model.num_layers
