"""Compilation: which functions are machine code, and when a cached one is stale.

Numba caches a compiled function under the time stamp of the file it stands in. Our entry points pull in the
kernels of several files, so a change in any of them must invalidate the cache: an entry point is cached
under a digest of its module and of all modules of ours that it imports, however far away.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numba
from llvmlite.binding import Linkage
from numba.core import codegen
from numba.core.cpu import CPUContext

from pointsman.compiled.fastcall import NUMBERS, add_quick_call, quick_call

IS_INTERPRETED = bool(vars(numba.config)["DISABLE_JIT"])

# `_nrt`: arrays in the kernel belong to Python (memory.py), so there is nothing to count references of.
INNER: dict[str, Any] = {
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
    "_nrt": False,
    "error_model": "numpy",
}

_WRAPPER = "_ZN7cpython"  # how the names of functions begin that Python calls
_unliteral: Callable[[Any], Any] = numba.types.unliteral
_ROOT = Path(__file__).parents[2]
_IMPORT = re.compile(r"^from (pointsman[\w.]*) import (\([^)]*\)|.*)$", re.MULTILINE)


@cache
def kernel_digest(module: str) -> str:
    """A digest of the sources of a module and of everything of ours that it imports."""
    digest = hashlib.sha256()
    for path in sorted(_sources(module)):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _sources(module: str) -> set[Path]:
    found: set[Path] = set()
    to_read = [_path(module)]
    while to_read:
        path = to_read.pop()
        if path not in found and path.is_file():
            found.add(path)
            to_read += _imported(path.read_text(encoding="utf-8"))
    return found


def _imported(text: str) -> Iterator[Path]:
    for parent, names in _IMPORT.findall(text):
        yield _path(parent)
        for name in re.findall(r"\w+", names):  # which may be modules
            yield _path(f"{parent}.{name}")


def _path(module: str) -> Path:
    return _ROOT.joinpath(*module.split(".")).with_suffix(".py")


def kernel(function: Callable[..., Any]) -> Any:
    """Compile a part of the kernel: called from compiled code only, so it needs no way in from Python."""
    dispatcher = numba.njit(function, **INNER)
    if not IS_INTERPRETED:
        resolve = dispatcher.get_call_template
        dispatcher.get_call_template = lambda args, kws: resolve(tuple(map(_widened, args)), kws)
    return dispatcher


def _optimise_entry_points_only() -> None:
    """Let LLVM work once on all that an entry point calls, and for that entry point alone.

    Numba has it optimise each function with everything below it, and again at each level of calls above.
    Kernels run only as parts of an entry point, so that all but the last time is wasted. And it leaves each
    function open to callers from outside: then those with a single caller are not inlined for it, and until
    the program is started anew calls go to what was compiled first, not to what was optimised last.
    """
    unit: Any = codegen.CPUCodeLibrary
    optimise = unit._optimize_final_module

    def optimise_if_called_from_python(library: Any) -> None:
        functions = [one for one in library._final_module.functions if not one.is_declaration]
        if any(one.name.startswith(_WRAPPER) for one in functions):
            for function in functions:
                if function.linkage == Linkage.linkonce_odr:
                    function.linkage = Linkage.internal
            optimise(library)

    unit._optimize_final_module = optimise_if_called_from_python


_optimise_entry_points_only()

_quick: set[tuple[str, str]] = set()  # module and name of the entry points that keep the GIL


def _add_quick_calls() -> None:
    """Let numba compile the way in that `direct` gives, for entry points that take no time."""
    context: Any = CPUContext
    add_usual = context.create_cpython_wrapper

    def add_both(self: Any, library: Any, description: Any, *rest: Any, **options: Any) -> None:
        add_usual(self, library, description, *rest, **options)
        is_quick = (description.modname, description.qualname) in _quick
        if is_quick and all(kind in NUMBERS for kind in description.argtypes):
            add_quick_call(self, library, description)

    context.create_cpython_wrapper = add_both


_add_quick_calls()


def _widened(argument: Any) -> Any:
    """Integers of any width, constants among them, are one type, or numba compiles a function for each."""
    argument = _unliteral(argument)
    return numba.int64 if argument in numba.types.signed_domain else argument


def inlined(function: Callable[..., Any]) -> Any:
    """Like `kernel`, for functions that return an array: compiled where they are called."""
    return numba.njit(function, inline="always", **INNER)


def entry_point(function: Callable[..., Any], *, keeps_gil: bool = False, **options: Any) -> Any:
    """Compile with a cache on disk. `keeps_gil`: it takes no time; `options` are numba's."""
    if keeps_gil:
        _quick.add((function.__module__, function.__qualname__))
    dispatcher = numba.njit(function, nogil=not keeps_gil, cache=True, **options)
    if not IS_INTERPRETED:
        dispatcher._cache._cache_file._source_stamp = kernel_digest(function.__module__)
    return dispatcher


def is_compiled(dispatcher: Any) -> bool:
    """Whether a call would start at once: compiled in this process, or found in the cache on disk."""
    if IS_INTERPRETED or dispatcher.signatures:
        return True
    return bool(dispatcher._cache._cache_file._load_index())


@cache
def direct(function: Any, kinds: str) -> Callable[..., Any]:
    """An entry point that keeps the GIL, for arguments of these kinds (i: int, f: float, b: bool), in order.

    Called as it is, it looks at the type of every argument first, which takes longer than short work.
    """
    found: Callable[..., Any] = function
    if IS_INTERPRETED:
        return found
    types = {"i": numba.int64, "f": numba.float64, "b": numba.boolean}
    signature = tuple(types[kind] for kind in kinds)
    function.compile(signature)
    return quick_call(function.overloads[signature])
