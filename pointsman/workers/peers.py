"""What two processes say to each other over a link, and how each notices that the other is gone.

A link is a socket, on this machine or over TCP. A message is its length and that many bytes: values as
pickles, arrays of float32 as they are, received where they are needed. A connection of `multiprocessing`
copies what it receives three times and makes a selector for each message, which for 43,000 gradients there
and back takes 0.3 ms more.
"""

from __future__ import annotations

import pickle
import select
import socket
import struct
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

ASK_EVERY_S = 1.0
PATIENCE_S = 600.0  # an evaluation may take minutes; who says nothing for longer will not come back
_LENGTH = struct.Struct("!q")


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
        link: socket.socket,
        name: str,
        is_alive: Callable[[], bool] = lambda: True,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """`is_alive` is asked in silence: not every end of a process closes the link."""
        self.link, self.name, self.is_alive, self.patience_s = link, name, is_alive, patience_s
        self._poll = select.poll()
        self._poll.register(link, select.POLLIN)

    def send(self, value: Any) -> None:
        self.send_pickled(pickle.dumps(value))

    def send_pickled(self, data: bytes) -> None:
        self._send(data)

    def receive(self) -> Any:
        return self.unpickled(self.receive_pickled())

    def receive_pickled(self) -> bytearray:
        return self._read(self._next_length())

    def unpickled(self, data: bytearray) -> Any:
        """What the other sent; what it says of a failure is raised."""
        value = pickle.loads(data)
        if isinstance(value, _Failure):
            raise WorkerError(f"{self.name} failed: {value.text}")
        return value

    def send_array(self, array: NDArray[np.float32]) -> None:
        self._send(array.data.cast("B"))

    def receive_array(self, out: NDArray[np.float32]) -> None:
        """Into a contiguous array of the size that was sent."""
        length = self._next_length()
        if length % 4:
            raise WorkerError(f"{self.name} failed: {pickle.loads(self._read(length)).text}")
        assert length == out.nbytes
        self._read_into(out.data.cast("B"))

    def send_failure(self, text: str) -> None:
        """It may come where the other expects an array: its length is that of none."""
        data = pickle.dumps(_Failure(text))
        self._send(data + b" " * ((1 - len(data)) % 4))

    def _send(self, data: bytes | memoryview) -> None:
        length = _LENGTH.pack(len(data))
        try:
            num_sent = self.link.sendmsg([length, data])
            if num_sent < len(length) + len(data):
                self.link.sendall(length[num_sent:])
                self.link.sendall(memoryview(data)[max(0, num_sent - len(length)) :])
        except OSError:
            raise self._gone() from None

    def _next_length(self) -> int:
        """Wait for the next message, which may be long in coming; returns its length."""
        started = time.monotonic()
        while not self._poll.poll(1e3 * min(self.patience_s, ASK_EVERY_S)):
            if not self.is_alive():
                raise self._gone()
            if time.monotonic() - started >= self.patience_s:
                raise LostWorkerError(f"{self.name} did not answer for {self.patience_s:g} s")
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        return int(length)

    def _read(self, num_bytes: int) -> bytearray:
        data = bytearray(num_bytes)
        self._read_into(memoryview(data))
        return data

    def _read_into(self, left: memoryview) -> None:
        try:
            while left:
                num_bytes = self.link.recv_into(left)
                if num_bytes == 0:
                    raise self._gone()
                left = left[num_bytes:]
        except OSError:
            raise self._gone() from None

    def _gone(self) -> LostWorkerError:
        return LostWorkerError(f"{self.name} ended unexpectedly (killed, or out of memory)")
