"""Compilation: which functions are machine code, and when a cached one is stale.

Numba caches a compiled function under the time stamp of the file it stands in. Our entry points pull in the
whole kernel from several files, so a change in any of them must invalidate the cache: entry points are
cached under a digest of all kernel sources instead.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numba

IS_INTERPRETED = bool(vars(numba.config)["DISABLE_JIT"])

# `_nrt`: arrays in the kernel belong to Python (memory.py), so there is nothing to count references of.
INNER: dict[str, Any] = {
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
    "_nrt": False,
    "error_model": "numpy",
}

KERNEL_FILES = (
    "simulator/*.py",
    "policies/kernels.py",
    "policies/network.py",
    "policies/observation.py",
    "policies/rollout.py",
    "signals.py",
)


@cache
def kernel_digest(files: tuple[str, ...] = KERNEL_FILES) -> str:
    package = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for pattern in files:
        for path in sorted(package.glob(pattern)):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def kernel(function: Callable[..., Any]) -> Any:
    """Compile a part of the kernel: called from compiled code only, so it needs no way in from Python."""
    return numba.njit(function, **INNER)


def entry_point(
    function: Callable[..., Any], files: tuple[str, ...] = KERNEL_FILES, keeps_gil: bool = False
) -> Any:
    """Compile with a cache on disk. `files`: all that it is made of; `keeps_gil`: it takes no time."""
    dispatcher = numba.njit(function, nogil=not keeps_gil, cache=True)
    if not IS_INTERPRETED:
        cache_file = dispatcher._cache._cache_file
        cache_file._source_stamp = kernel_digest(files)
    return dispatcher


def is_compiled(dispatcher: Any) -> bool:
    """Whether a call would start at once: compiled in this process, or found in the cache on disk."""
    if IS_INTERPRETED or dispatcher.signatures:
        return True
    return bool(dispatcher._cache._cache_file._load_index())


def direct(function: Any, kinds: str) -> Callable[..., Any]:
    """An entry point for arguments of these kinds (i: int, f: float, b: bool), in order.

    Called as it is, it looks at the type of every argument first, which takes longer than short work.
    """
    types = {"i": numba.int64, "f": numba.float64, "b": numba.boolean}
    found: Callable[..., Any] = function
    return found if IS_INTERPRETED else function.compile(tuple(types[kind] for kind in kinds))
