"""Execution times from a model's layers, timed by their shapes (`pointsman profile`).

A step is the layers of a stage, each its products by tokens and its attention, then the LM head by sequences.
At the sizes that were timed a step is exactly their sum; in between it is interpolated. Two things are not in
such tables: what devices of a tensor-parallel replica say to each other, which is computed as for `roofline`,
and `overhead_s`, what an engine does beside its layers.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from pointsman.errors import InputError
from pointsman.simulator.hardware import Deployment
from pointsman.simulator.steps import Curve, curve_table
from pointsman.spec import Spec

Floats = NDArray[np.float64]

CONTEXT_CELL_TOKENS = 64
CHUNK_CELL_TOKENS = 32


class LayersCost(Spec):
    """Times of one layer on one device, seconds, as `pointsman profile` writes them."""

    kind: Literal["layers"]
    model: str = Field(description="whose shapes were timed")
    tensor_parallel: int = Field(
        default=1, ge=1, description="the shapes are those of one of so many devices"
    )
    overhead_s: float = Field(default=0.0, ge=0, description="fixed time a step, beside the layers, seconds")
    products: Curve = Field(min_length=1, description="[tokens, seconds]: all but attention")
    head: Curve = Field(min_length=1, description="[sequences, seconds]: the LM head, once a step")
    prompt: Curve = Field(min_length=1, description="[tokens, seconds]: attention of a prompt")
    decode: tuple[tuple[int, int, float], ...] = Field(
        min_length=1, description="[sequences, context tokens of each, seconds]: attention of decoding"
    )

    @model_validator(mode="after")
    def _tables_are_in_order(self) -> LayersCost:
        remedy = "list each size once, in order, from 1 on"
        for name in ("products", "head", "prompt"):
            sizes = [size for size, _ in getattr(self, name)]
            if sizes[0] < 1 or any(second <= first for first, second in pairwise(sizes)):
                raise InputError(f"cluster.cost.{name}", sizes, "sizes do not rise", remedy)
        pairs = [(num_seqs, context) for num_seqs, context, _ in self.decode]
        batches, contexts = ({pair[i] for pair in pairs} for i in (0, 1))
        if len(set(pairs)) != len(pairs) or len(pairs) != len(batches) * len(contexts) or min(batches) < 1:
            problem = "is not every number of sequences with every context"
            raise InputError("cluster.cost.decode", f"{len(pairs)} rows", problem, "time the missing ones")
        times = [row[-1] for name in ("products", "head", "prompt", "decode") for row in getattr(self, name)]
        if min(times) <= 0:
            raise InputError("cluster.cost", min(times), "a layer takes no time", "correct it")
        return self

    def check(self, deployment: Deployment) -> None:
        """Refuse a replica whose layers have other shapes than those that were timed."""
        timed = {"model": self.model, "tensor_parallel": self.tensor_parallel, "dtype": "fp16"}
        used = {
            "model": deployment.model.name,
            "tensor_parallel": deployment.tensor_parallel,
            "dtype": deployment.dtype,
        }
        for name, value in used.items():
            if value != timed[name]:
                problem = f"the layers of `cost: layers` were timed with {name} {timed[name]}"
                remedy = (
                    f"use {timed[name]}, time these shapes with `pointsman profile`, or use cost: roofline"
                )
                raise InputError(f"cluster.{name}", value, problem, remedy)

    def decode_s(self) -> Floats:
        """[sequences + 1, cells of context + 1], one layer; shorter contexts than were timed cost no less."""
        batches = sorted({num_seqs for num_seqs, _, _ in self.decode})
        contexts = sorted({context for _, context, _ in self.decode})
        timed = {(num_seqs, context): seconds for num_seqs, context, seconds in self.decode}
        by_context = np.array([[timed[n, context] for n in batches] for context in contexts])
        seqs = np.arange(max(2, batches[-1] + 1))
        by_seqs = np.array([np.interp(seqs, batches, row) for row in by_context]).T
        cells = np.arange(max(2, contexts[-1] // CONTEXT_CELL_TOKENS + 1)) * CONTEXT_CELL_TOKENS
        return _without_falling_ends(np.array([np.interp(cells, contexts, row) for row in by_seqs]))

    def prefill_s(self) -> Floats:
        """[cells of context + 1, cells of chunk + 1], one layer.

        Prompts were timed from their start; a chunk behind `context` tokens takes as long as the prompt with
        the same number of token pairs.
        """
        last = self.prompt[-1][0]
        context = np.arange(max(2, last // CONTEXT_CELL_TOKENS + 1))[:, None] * float(CONTEXT_CELL_TOKENS)
        chunk = np.arange(max(2, last // CHUNK_CELL_TOKENS + 1))[None, :] * float(CHUNK_CELL_TOKENS)
        pairs = chunk * (context + chunk / 2)
        tokens, seconds = (np.array(column, np.float64) for column in zip(*self.prompt, strict=True))
        known = tokens**2 / 2
        slope = max(0.0, (seconds[-1] - seconds[-2]) / (known[-1] - known[-2])) if known.size > 1 else 0.0
        beyond = np.maximum(0.0, pairs - known[-1])
        return _without_falling_ends(np.interp(pairs, known, seconds) + slope * beyond)

    def products_s(self) -> Floats:
        """[tokens + 1], one layer."""
        return curve_table(self.products)

    def head_s(self) -> Floats:
        """[sequences + 1]"""
        return curve_table(self.head)


def _without_falling_ends(table: Floats) -> Floats:
    """Add a row and a column where a table falls at its ends: continued, its times would become negative."""
    down, right = table[-1] - table[-2], table[:, -1] - table[:, -2]
    both = right[-1] - right[-2]
    if min(down.min(), right.min(), both) >= 0:
        return table
    longer = np.pad(table, (0, 1), "edge")
    longer[-1, :-1] += np.maximum(0.0, down)
    longer[:-1, -1] += np.maximum(0.0, right)
    longer[-1, -1] = longer[-1, -2] + longer[-2, -1] - table[-1, -1] + max(0.0, both)
    return longer
