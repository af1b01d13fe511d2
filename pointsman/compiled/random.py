"""Random numbers and hashes for compiled code, the same ones as without compilation."""

from __future__ import annotations

import numpy as np

from pointsman.compiled.jit import kernel


@kernel
def next_random(memory):
    """xorshift32 on `memory.rng`, in integers that behave alike in Python and in machine code."""
    x = memory.rng
    x ^= (x << 13) & 0xFFFFFFFF
    x ^= x >> 17
    x ^= (x << 5) & 0xFFFFFFFF
    memory.rng = x
    return x


@kernel
def mix(x):
    """A 31-bit hash in products that stay below 2^63."""
    x &= 0x7FFFFFFF
    x = ((x >> 16) ^ x) * 0x45D9F3B & 0x7FFFFFFF
    x = ((x >> 16) ^ x) * 0x45D9F3B & 0x7FFFFFFF
    return (x >> 16) ^ x


def first_state(*seeds: int) -> int:
    """A start for `next_random`, which must not be 0."""
    return int(np.random.SeedSequence(seeds).generate_state(1)[0]) | 1
