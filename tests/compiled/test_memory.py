"""Memory that is reached by address is there, alive and large enough; where it is not, the checks say so."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import weakref
from typing import Any

import numba
import numpy as np
import pytest

from pointsman.compiled.allocations import Allocations, BadAccessError
from pointsman.compiled.memory import (
    Records,
    aligned,
    array_at,
    byte_list,
    bytes_at,
    size_of_bytes,
    sized_bytes_at,
    start_of_bytes,
)

ROW = np.dtype([("where", "i8")], align=True)


def test_accesses_must_lie_in_one_array() -> None:
    allocations, array = Allocations(), np.zeros(10)
    start = allocations.add(array)
    allocations.check(start, 0, 80)
    allocations.check(start + 8, -8, 80)
    allocations.check(start + 80, 0, 0)  # nothing is read
    for address, offset, num_bytes in ((start, 0, 81), (start, -8, 8), (start, 80, 8), (start + 72, 0, 9)):
        with pytest.raises(BadAccessError, match="the array there has 80 bytes"):
            allocations.check(address, offset, num_bytes)
    for address in (0, start - 1, start + 80):
        with pytest.raises(BadAccessError, match="no array is there"):
            allocations.check(address, 0, 1)


@pytest.mark.parametrize("count", [1, 7, 16, 511, 512, 513, 100_000])
def test_bytes_are_read_where_they_lie(count: int) -> None:
    data = np.random.default_rng(count).bytes(count)
    assert array_at(bytes_at(data), np.uint8, count).tobytes() == data


@numba.njit
def _sum_of_sized(address: int) -> tuple[int, int]:
    size, total = size_of_bytes(address), 0
    for value in byte_list(start_of_bytes(address), size):
        total += int(value)
    return size, total


@pytest.mark.parametrize("count", [0, 1, 16, 511, 100_000])
def test_bytes_tell_their_size(count: int) -> None:
    """For compiled code, and with NUMBA_DISABLE_JIT=1 for what is checked."""
    data = np.random.default_rng(count).bytes(count)
    assert _sum_of_sized(sized_bytes_at(data)) == (count, sum(data))


def test_views_are_arrays_of_their_own() -> None:
    """A row that is written beyond its end is a fault, though its neighbour is there."""
    allocations, table = Allocations(), np.zeros((3, 4))
    whole, middle = allocations.add(table), allocations.add(table[1])
    allocations.check(whole, 0, table.nbytes)
    allocations.check(whole + 64, 0, 32)  # after the view, still in the table
    with pytest.raises(BadAccessError, match="32 bytes"):
        allocations.check(middle, 0, 33)
    with pytest.raises(ValueError, match="gaps"):
        allocations.add(table[:, 1])


def test_freed_memory_is_out_of_reach_until_it_is_used_again() -> None:
    allocations, buffer = Allocations(), bytearray(64)
    array = np.frombuffer(buffer)
    start = allocations.add(array)
    del array
    with pytest.raises(BadAccessError, match="was freed"):
        allocations.check(start, 0, 8)
    again = np.frombuffer(buffer)
    assert allocations.add(again) == start
    allocations.check(start, 0, 64)


@pytest.mark.parametrize(
    "part",
    [
        lambda rows: rows,
        lambda rows: rows[1:],
        lambda rows: rows[0],
        lambda rows: rows.view(np.ndarray),
        lambda rows: rows.view(np.ndarray)[:1],
        lambda rows: rows.copy(),
    ],
)
def test_records_hold_what_they_point_to(part: Any) -> None:
    array = np.zeros(5)
    held = weakref.ref(array)
    rows = Records(2, ROW)
    assert rows["where"].tolist() == [0, 0]
    rows.where = rows.hold(array)
    kept = part(rows)
    del rows, array
    assert held() is not None
    assert (kept["where"] == held().ctypes.data).all()
    del kept
    assert held() is None


FAULTS = {
    "float_list(address_of(np.zeros(3)[:0]), 1)": "no array is there",
    "float_list(address_of(array), 4)": "the array there has 24 bytes",
    "float_table(address_of(array), 2, 2)": "the array there has 24 bytes",
    "row_accessor(np.dtype([('x', 'f8')]))(address_of(array), 3)": "the array there has 24 bytes",
    "row_accessor(np.dtype([('x', 'f8')]))(address_of(array), -1)": "the array there has 24 bytes",
    "float_list(address_of(np.zeros(3)), 3)": "was freed",
    "float_list(address_of(array), 3)": "",
}


def test_without_compilation_every_access_is_checked() -> None:
    lines = ["import numpy as np", "from pointsman.compiled.memory import *", "array = np.zeros(3)"]
    for fault in FAULTS:
        lines += ["try:", f"    {fault}", "    print()", "except Exception as error:", "    print(error)"]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        env=os.environ | {"NUMBA_DISABLE_JIT": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    for said, (fault, expected) in zip(done.stdout.splitlines(), FAULTS.items(), strict=True):
        assert expected in said and bool(said) == bool(expected), (fault, said)


def test_aligned_copies_are_equal_and_begin_with_a_line_of_the_cache() -> None:
    for shape in ((3,), (5, 7), (2, 3, 4)):
        array = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
        for one in (array, array.T):
            copy = aligned(one)
            assert copy.ctypes.data % 64 == 0 and copy.flags.c_contiguous and copy.dtype == np.float32
            np.testing.assert_array_equal(copy, one)
