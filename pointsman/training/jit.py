"""Compilation of what training spends its time in: like compiled/jit.py, with faster arithmetic.

Sums may be taken in any order and fused with products; what is not finite stays so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
from numpy.typing import NDArray

from pointsman.compiled.jit import entry_point

Array = NDArray[Any]
Kernel = TypeVar("Kernel", bound=Callable[..., Any])

OPTIONS: dict[str, Any] = {"error_model": "numpy", "fastmath": {"contract", "reassoc", "nsz"}}
INNER = OPTIONS | {"nogil": True, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}


def inner(function: Kernel) -> Kernel:
    """A part of a kernel, called from compiled code only."""
    kernel: Kernel = numba.njit(function, **INNER)
    return kernel


def compiled(function: Kernel) -> Kernel:
    """A kernel, with a cache on disk; the GIL is released while it runs."""
    kernel: Kernel = entry_point(function, **OPTIONS)
    return kernel
