"""How long prompts and outputs are.

A sampler fills blocks of fixed size, so the temporaries of ten million requests stay small and the first N
lengths of a seed are the same however many follow.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from pointsman.workload.spec import (
    AnyLengths,
    FixedLengths,
    LognormalLengths,
    MixtureLengths,
    NamedLengths,
    TraceFile,
    TraceLengths,
    UniformLengths,
    ZipfLengths,
)
from pointsman.workload.tables import load_table
from pointsman.workload.workload import Workload

Tokens = NDArray[np.int32]
Sampler = Callable[[int, Generator], tuple[Tokens, Tokens]]
TraceReader = Callable[[TraceFile], Workload]

_BLOCK = 4096
_MAX_TOKENS = 10_000_000


def draw_lengths(
    spec: AnyLengths, num_requests: int, rng: Generator, read: TraceReader
) -> tuple[Tokens, Tokens]:
    """Prompt and output lengths [N] in tokens; `read` loads the file of a `trace` distribution."""
    sample = _sampler(spec, read)
    prompt = np.empty(num_requests, dtype=np.int32)
    output = np.empty(num_requests, dtype=np.int32)
    for start in range(0, num_requests, _BLOCK):
        block_prompt, block_output = sample(_BLOCK, rng)
        num_wanted = min(_BLOCK, num_requests - start)
        prompt[start : start + _BLOCK] = block_prompt[:num_wanted]
        output[start : start + _BLOCK] = block_output[:num_wanted]
    return prompt, output


def resample(trace: Workload) -> Sampler:
    """Rows of `trace`, drawn with replacement: prompt and output of a request stay together."""

    def sample(num: int, rng: Generator) -> tuple[Tokens, Tokens]:
        row = rng.integers(len(trace), size=num)
        return trace.num_prefill_tokens[row], trace.num_decode_tokens[row]

    return sample


def _sampler(spec: AnyLengths, read: TraceReader) -> Sampler:
    match spec:
        case NamedLengths():
            return load_table(spec.kind).sample
        case LognormalLengths():
            return _lognormal(spec)
        case ZipfLengths():
            return _zipf(spec)
        case UniformLengths():
            return _uniform(spec)
        case FixedLengths():
            return lambda num, rng: (
                np.full(num, spec.prompt, dtype=np.int32),
                np.full(num, spec.output, dtype=np.int32),
            )
        case TraceLengths():
            return resample(read(spec))
        case MixtureLengths():
            return _mixture(spec, read)


def _lognormal(spec: LognormalLengths) -> Sampler:
    def tokens(mean: float, cv: float, normal: NDArray[np.float64]) -> Tokens:
        variance = math.log1p(cv * cv)
        drawn = np.exp(math.log(mean) - variance / 2.0 + math.sqrt(variance) * normal)
        return np.clip(np.rint(drawn), 1, _MAX_TOKENS).astype(np.int32)

    def sample(num: int, rng: Generator) -> tuple[Tokens, Tokens]:
        first = rng.standard_normal(num)
        second = rng.standard_normal(num)
        second *= math.sqrt(1.0 - spec.correlation**2)
        second += spec.correlation * first
        return tokens(spec.prompt_mean, spec.prompt_cv, first), tokens(
            spec.output_mean, spec.output_cv, second
        )

    return sample


def _zipf(spec: ZipfLengths) -> Sampler:
    totals = np.arange(spec.min_total, spec.max_total + 1)
    shares = np.cumsum(np.arange(1, len(totals) + 1, dtype=np.float64) ** -spec.theta)

    def sample(num: int, rng: Generator) -> tuple[Tokens, Tokens]:
        total = totals[np.searchsorted(shares, rng.random(num) * shares[-1], side="right")]
        output = np.clip(np.ceil(total / (1.0 + spec.prompt_to_output)), 1, total - 1)
        return (total - output).astype(np.int32), output.astype(np.int32)

    return sample


def _uniform(spec: UniformLengths) -> Sampler:
    def sample(num: int, rng: Generator) -> tuple[Tokens, Tokens]:
        return (
            rng.integers(spec.prompt_min, spec.prompt_max, num, dtype=np.int32, endpoint=True),
            rng.integers(spec.output_min, spec.output_max, num, dtype=np.int32, endpoint=True),
        )

    return sample


def _mixture(spec: MixtureLengths, read: TraceReader) -> Sampler:
    samplers = [_sampler(part.lengths, read) for part in spec.parts]
    shares = np.cumsum([part.weight for part in spec.parts])

    def sample(num: int, rng: Generator) -> tuple[Tokens, Tokens]:
        chosen = np.searchsorted(shares, rng.random(num) * shares[-1], side="right")
        drawn = [draw(num, rng) for draw in samplers]
        prompts, outputs = (np.stack(both) for both in zip(*drawn, strict=True))
        return prompts[chosen, np.arange(num)], outputs[chosen, np.arange(num)]

    return sample
