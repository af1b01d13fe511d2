"""What two processes say to each other over a link, and how each notices that the other is gone.

A link is a `multiprocessing` connection, over a pipe or over TCP. Values go as pickles, arrays of float32 as
they are: a pickle of 43,000 gradients takes twice as long.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

ASK_EVERY_S = 1.0
PATIENCE_S = 600.0  # an evaluation may take minutes; who says nothing for longer will not come back


class WorkerError(RuntimeError):
    """A worker failed, or none is to be had."""


class LostWorkerError(WorkerError):
    """A worker is gone: killed, out of memory, or its machine is. Another one can take its place."""


class _Failure(NamedTuple):
    """What a worker sends instead of a value when it fails."""

    text: str


class LinkedProcess:
    """The process at the other end of a link."""

    def __init__(
        self,
        link: Connection,
        name: str,
        is_alive: Callable[[], bool] = lambda: True,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """`is_alive` is asked in silence: not every end of a process closes the link."""
        self.link, self.name, self.is_alive, self.patience_s = link, name, is_alive, patience_s

    def send(self, value: Any) -> None:
        self._send(pickle.dumps(value))

    def receive(self) -> Any:
        value = pickle.loads(self._receive())
        if isinstance(value, _Failure):
            raise WorkerError(f"{self.name} failed: {value.text}")
        return value

    def send_array(self, array: NDArray[np.float32]) -> None:
        self._send(array.data.cast("B"))

    def receive_array(self) -> NDArray[np.float32]:
        data = self._receive()
        if len(data) % 4:
            raise WorkerError(f"{self.name} failed: {pickle.loads(data).text}")
        return np.frombuffer(data, np.float32)

    def send_failure(self, text: str) -> None:
        """It may come where the other expects an array: its length is that of none."""
        data = pickle.dumps(_Failure(text))
        self._send(data + b" " * ((1 - len(data)) % 4))

    def _send(self, data: bytes | memoryview) -> None:
        try:
            self.link.send_bytes(data)
        except OSError:
            raise self._gone() from None

    def _receive(self) -> bytes:
        try:
            started = time.monotonic()
            while not self.link.poll(min(self.patience_s, ASK_EVERY_S)):
                if not self.is_alive():
                    raise self._gone()
                if time.monotonic() - started >= self.patience_s:
                    raise LostWorkerError(f"{self.name} did not answer for {self.patience_s:g} s")
            return self.link.recv_bytes()
        except (EOFError, OSError):
            raise self._gone() from None

    def _gone(self) -> LostWorkerError:
        return LostWorkerError(f"{self.name} ended unexpectedly (killed, or out of memory)")
