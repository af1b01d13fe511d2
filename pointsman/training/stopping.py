"""How a run is asked to end, and the time that compilers take of it.

A run can be cut off in the middle of an update: what it was after the one before is kept in memory, and is
saved then. While files are written, or where nothing is known yet that could be saved, it is not cut.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from numba.core import event


class CutError(KeyboardInterrupt):
    """Raised out of what may be cut off. A KeyboardInterrupt, as compiled code and compilers know what to do
    about those."""


class StopSwitch:
    """Pressed by whoever wants the run to end, from a signal handler if need be."""

    def __init__(self) -> None:
        self.is_pressed = False
        self._may_cut = False

    def press(self) -> None:
        self.is_pressed = True
        if self._may_cut:
            self._may_cut = False
            raise CutError

    @contextmanager
    def cuttable(self) -> Iterator[None]:
        """What may be cut off at any moment."""
        if self.is_pressed:
            raise CutError
        self._may_cut = True
        try:
            yield
        finally:
            self._may_cut = False


class CompileClock(event.Listener):
    """How long numba compiled in this process. Compilations within others count once."""

    def __init__(self) -> None:
        self.elapsed_s = 0.0
        self._depth = 0
        self._started = 0.0
        event.register("numba:compile", self)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        event.unregister("numba:compile", self)  # type: ignore[no-untyped-call]

    def on_start(self, event: Any) -> None:
        if self._depth == 0:
            self._started = time.monotonic()
        self._depth += 1

    def on_end(self, event: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.elapsed_s += time.monotonic() - self._started
