"""Compilation of what training spends its time in: like simulator/jit.py, with faster arithmetic.

Sums may be taken in any order and fused with products; what is not finite stays so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
from numpy.typing import NDArray

from pointsman.simulator.jit import IS_INTERPRETED, kernel_digest

Array = NDArray[Any]
Kernel = TypeVar("Kernel", bound=Callable[..., Any])

# A change in any of them makes all cached kernels stale: they are compiled into each other.
KERNEL_FILES = tuple(
    f"training/{name}.py" for name in ("flat", "jit", "losses", "normalisers", "pooled", "pooled_gradients")
)
ENTRY: dict[str, Any] = {
    "cache": True,
    "nogil": True,
    "error_model": "numpy",
    "fastmath": {"contract", "reassoc", "nsz"},
}
INNER = ENTRY | {"cache": False, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}


def inner(function: Kernel) -> Kernel:
    """A part of a kernel, called from compiled code only."""
    kernel: Kernel = numba.njit(function, **INNER)
    return kernel


def compiled(function: Kernel) -> Kernel:
    """A kernel, with a cache on disk; the GIL is released while it runs."""
    kernel: Any = numba.njit(function, **ENTRY)
    if not IS_INTERPRETED:
        kernel._cache._cache_file._source_stamp = kernel_digest(KERNEL_FILES)
    entry: Kernel = kernel
    return entry
