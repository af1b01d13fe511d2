"""Which memory may be reached by address: the arrays whose address was asked for, while they live."""

from __future__ import annotations

import weakref
from bisect import bisect_left, bisect_right, insort
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class BadAccessError(Exception):
    """Memory was reached by an address where no such array is, or is no longer."""


class _Allocation(NamedTuple):
    end: int
    owner: weakref.ref[NDArray[Any]]  # of the memory; the array itself may be a view


class Allocations:
    def __init__(self) -> None:
        self._starts: list[int] = []  # sorted
        self._known: dict[int, _Allocation] = {}
        self._lock = Lock()

    def add(self, array: NDArray[Any]) -> int:
        """Note the array's memory; returns its address. Of two arrays that begin alike, the later counts."""
        if not array.flags.c_contiguous:
            raise ValueError(f"an array of shape {array.shape} with gaps cannot be reached by address")
        start, end = int(array.ctypes.data), int(array.ctypes.data) + array.nbytes
        with self._lock:
            # What was freed may overlap with what lies there now.
            for inside in self._starts[bisect_left(self._starts, start) : bisect_left(self._starts, end)]:
                if self._known[inside].owner() is None:
                    del self._known[inside]
                    del self._starts[bisect_left(self._starts, inside)]
            if array.nbytes > 0:
                if start not in self._known:
                    insort(self._starts, start)
                self._known[start] = _Allocation(end, weakref.ref(_owner(array)))
        return start

    def check(self, address: int, offset: int, num_bytes: int) -> None:
        """Bytes offset..offset + num_bytes - 1 from the address must lie in the array that is there."""
        if num_bytes == 0:
            return
        what = f"{num_bytes} bytes, {offset} after address {address:#x}"
        start, end, is_alive = self._find(address)
        if start == end:
            raise BadAccessError(f"{what}: no array is there")
        if not is_alive:
            raise BadAccessError(f"{what}: the array there was freed")
        if address + offset < start or address + offset + num_bytes > end:
            raise BadAccessError(f"{what}: the array there has {end - start} bytes, from {start:#x} on")

    def _find(self, address: int) -> tuple[int, int, bool]:
        """Start, end and life of the array around the address; of views within views, the smallest."""
        with self._lock:
            for index in range(bisect_right(self._starts, address) - 1, -1, -1):
                start = self._starts[index]
                end, owner = self._known[start]
                if address < end:
                    return start, end, owner() is not None
        return 0, 0, False


def _owner(array: NDArray[Any]) -> NDArray[Any]:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array
