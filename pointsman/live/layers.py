"""Times the layers of a model by their shapes, with PyTorch and random weights: no server and no checkpoint.

One layer is timed and counted as often as the model has layers: its matrix products by the number of tokens,
prompt attention by the length of the prompt, decode attention by batch and context. Tensor parallelism is a
matter of shapes; what the devices say to each other is not timed, nor is anything that a server does beside
the layers. Imports nothing but PyTorch, so that it runs on a machine that has nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch.nn import functional

TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
PROMPTS = (256, 1024, 2048, 4096, 8192)
BATCHES = (1, 8, 32, 64, 128, 256)
CONTEXTS = (256, 1024, 4096)
WARM_UPS = 3
CALLS = 10
Rows = list[dict[str, float]]


class Timer:
    """Median seconds of a call. On a GPU, of `CALLS` in a row replayed as a CUDA graph: as servers run small
    steps, and without the host's time to launch kernels, which is longer than many a kernel."""

    def __init__(self, device: str, repeats: int) -> None:
        self._device = device
        self._repeats = repeats

    def __call__(self, work: Callable[[], Any]) -> float:
        times = self._cpu_times(work) if self._device == "cpu" else self._graph_times(work)
        return sorted(times)[len(times) // 2]

    def _cpu_times(self, work: Callable[[], Any]) -> list[float]:
        for _ in range(WARM_UPS):
            work()
        times = []
        for _ in range(self._repeats):
            began = time.perf_counter()
            work()
            times.append(time.perf_counter() - began)
        return times

    def _graph_times(self, work: Callable[[], Any]) -> list[float]:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                work()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(CALLS):
                work()
        graph.replay()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(self._repeats + 1)]  # type: ignore[no-untyped-call]
        marks[0].record()
        for mark in marks[1:]:
            graph.replay()
            mark.record()
        torch.cuda.synchronize()
        return [first.elapsed_time(second) * 1e-3 / CALLS for first, second in pairwise(marks)]


class Layer:
    """The weights of one layer on one of `tensor_parallel` devices; `shape` has the catalogue's names."""

    def __init__(
        self, shape: Mapping[str, Any], tensor_parallel: int, dtype: torch.dtype, device: str
    ) -> None:
        self.num_heads = shape["num_heads"] // tensor_parallel
        self.num_kv_heads = max(1, shape["num_kv_heads"] // tensor_parallel)
        self.head_dim = shape["head_dim"]
        self.hidden_size = shape["hidden_size"]
        self.num_experts = shape.get("num_experts", 0)
        self.num_active = max(1, shape.get("num_experts_per_token", 0))
        self.is_gated = shape.get("is_mlp_gated", True)
        self._dtype = dtype
        self._device = device
        width = shape["intermediate_size"] // tensor_parallel
        heads = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        self.qkv = self.make(heads, self.hidden_size)
        self.out = self.make(self.hidden_size, self.num_heads * self.head_dim)
        num_mlps = max(1, self.num_experts)
        self.up = self.make(num_mlps, self.hidden_size, width * (2 if self.is_gated else 1))
        self.down = self.make(num_mlps, width, self.hidden_size)
        self.head = self.make(shape["vocab_size"] // tensor_parallel, self.hidden_size)

    def make(self, *size: int) -> torch.Tensor:
        return torch.randn(*size, dtype=self._dtype, device=self._device) * 0.02

    def products(self, states: torch.Tensor) -> torch.Tensor:
        """Everything that does not look at other tokens. states: [tokens, hidden]"""
        query = functional.linear(states, self.qkv)[:, : self.num_heads * self.head_dim]
        states = states + functional.linear(query, self.out)
        if self.num_experts == 0:
            return states + self._mlps(states[None])[0]
        # Every expert gets an equal part, as if the router balanced them.
        num_rows = len(states) * self.num_active
        num_used = min(self.num_experts, num_rows)
        rows = states.repeat(-(-num_rows // len(states)), 1)
        rows = functional.pad(rows, (0, 0, 0, -num_rows % num_used))
        return self._mlps(rows.view(num_used, -1, self.hidden_size))

    def _mlps(self, states: torch.Tensor) -> torch.Tensor:
        """states: [experts, tokens, hidden]"""
        wide = torch.bmm(states, self.up[: len(states)])
        if self.is_gated:
            gate, wide = wide.chunk(2, dim=-1)
            wide = functional.silu(gate) * wide
        return torch.bmm(wide, self.down[: len(states)])

    def attention(self, num_seqs: int, num_queries: int, context: int) -> Callable[[], torch.Tensor]:
        """num_queries new tokens of each sequence, which see `context` tokens and each other."""
        query = self.make(num_seqs, self.num_heads, num_queries, self.head_dim)
        keys = self.make(num_seqs, self.num_kv_heads, context, self.head_dim)
        values = self.make(num_seqs, self.num_kv_heads, context, self.head_dim)
        is_grouped = self.num_heads != self.num_kv_heads
        return lambda: functional.scaled_dot_product_attention(
            query, keys, values, is_causal=num_queries > 1, enable_gqa=is_grouped
        )


@torch.inference_mode()
def profile_layers(
    shape: Mapping[str, Any],
    tensor_parallel: int = 1,
    device: str = "cpu",
    dtype: str = "bfloat16",
    max_tokens: int = 8192,
    max_seqs: int = 256,
    repeats: int = 20,
    on_row: Callable[[str], None] | None = None,
) -> dict[str, Rows]:
    """-> seconds: `products` and `head` by tokens, `prompt` by its length, `decode` by batch and context."""
    layer = Layer(shape, tensor_parallel, getattr(torch, dtype), device)
    timed = Timer(device, repeats)
    tables: dict[str, Rows] = {"products": [], "head": [], "prompt": [], "decode": []}

    def add(name: str, seconds: float, **row: float) -> None:
        tables[name].append({**row, "seconds": seconds})
        if on_row is not None:
            on_row(name)

    for tokens in (size for size in TOKENS if size <= max_tokens):
        states = layer.make(tokens, layer.hidden_size)
        add("products", timed(partial(layer.products, states)), tokens=tokens)
        if tokens <= max_seqs:
            add("head", timed(partial(functional.linear, states, layer.head)), tokens=tokens)
    for tokens in (size for size in PROMPTS if size <= max_tokens):
        add("prompt", timed(layer.attention(1, tokens, tokens)), tokens=tokens)
    for context in (size for size in CONTEXTS if size <= max_tokens):
        for num_seqs in (size for size in BATCHES if size <= max_seqs):
            add("decode", timed(layer.attention(num_seqs, 1, context)), num_seqs=num_seqs, context=context)
    return tables
