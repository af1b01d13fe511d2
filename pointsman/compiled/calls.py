"""Calls of compiled functions that come often and are short.

Numba looks at the types of all arguments at each call, to find the code that was compiled for them. Of an
array of records it compares every field, which takes 4 µs for that of a cluster.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba

from pointsman.compiled.jit import IS_INTERPRETED


def direct_for(function: Any, *arguments: Any) -> Callable[..., Any]:
    """An entry point for arguments of the types that these have. It looks at no type: others are misread."""
    found: Callable[..., Any] = function
    return found if IS_INTERPRETED else function.compile(tuple(map(numba.typeof, arguments)))
