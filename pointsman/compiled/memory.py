"""How compiled code reaches the arrays of a cluster: by address, in one instruction.

A cluster has two dozen arrays. Passing them all to every function, or in a tuple, costs more than the
functions themselves (copies and reference counts: a factor of 50 measured). So the cluster's record holds
their addresses, functions get that one record, and rows are read through the accessors made here.

Two things keep that safe. `Records` own the arrays whose addresses they hold, so that no record outlives what
it points to. And without compilation (`NUMBA_DISABLE_JIT=1`) the same addresses are read through ctypes, slow
and identical, and every access is checked: it must lie in one array that went through `address_of` and is
alive, or it raises `BadAccessError`.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any, Self, cast

import numpy as np
from numba import from_dtype, types
from numba.core import cgutils
from numba.extending import intrinsic, register_jitable
from numba.np.arrayobj import make_array, populate_array
from numpy.typing import NDArray

from pointsman.compiled.allocations import Allocations
from pointsman.compiled.jit import IS_INTERPRETED

_LINE_BYTES = 64

_allocations = Allocations()
_read_bytes: list[tuple[bytes, NDArray[Any]]] = []  # without compilation: those whose address was asked for
_BYTES_AT = bytes.__basicsize__ - 1  # where CPython keeps what is in a bytes object
_SIZE_AT = _BYTES_AT - 16  # and how much that is

if IS_INTERPRETED:

    def address_of(array: NDArray[Any]) -> int:
        """Where the array begins; from now on, its memory may be reached by address."""
        return _allocations.add(array)

    def bytes_at(data: bytes) -> int:
        """Where the bytes lie, for compiled code to read as long as somebody keeps them."""
        if not data:
            return 0
        _read_bytes.append((data, np.frombuffer(data, np.uint8)))
        return _allocations.add(_read_bytes[-1][1])

    def sized_bytes_at(data: bytes) -> int:
        """Where the bytes lie with their size, for `size_of_bytes` and `start_of_bytes` in compiled code."""
        buffer: Any = (ctypes.c_char * (_BYTES_AT + len(data))).from_address(id(data))
        _read_bytes.append((data, np.frombuffer(buffer, np.uint8)))
        return _allocations.add(_read_bytes[-1][1])

else:

    @register_jitable
    def address_of(array: NDArray[Any]) -> int:
        """Where the array begins. For Python and for compiled code."""
        return array.ctypes.data

    def bytes_at(data: bytes) -> int:
        """Where the bytes lie, for compiled code to read as long as somebody keeps them.

        To copy them to an array that has an address took 0.1 to 0.2 µs, four times a request.
        """
        return id(data) + _BYTES_AT

    # Nothing but `id`, which is quicker to call than a function of ours.
    sized_bytes_at = id  # type: ignore[assignment]


class Records(np.recarray[Any, Any]):
    """[count] records, zeroed, that keep alive the arrays whose addresses they hold.

    They own their memory, so a slice, a row or a plain view of them keeps them alive, and with them what they
    point to. A copy of single records into another array does not.
    """

    _held: list[NDArray[Any]]

    def __new__(cls, count: int, dtype: np.dtype[Any]) -> Self:
        records = cast(Self, super().__new__(cls, count, dtype))
        records.view(np.ndarray)[:] = np.zeros((), dtype)
        return records

    def __array_finalize__(self, source: Any) -> None:
        super().__array_finalize__(source)
        self._held = getattr(source, "_held", [])

    def hold(self, array: NDArray[Any]) -> int:
        """Keep the array alive as long as these records; returns its address."""
        self._held.append(array)
        return address_of(array)


def row_accessor(dtype: np.dtype[Any]) -> Any:
    """A function (address, index) -> the record at that index of an array of `dtype`."""
    if IS_INTERPRETED:
        return lambda address, index: array_at(address, dtype, 1, index)[0]
    record = from_dtype(dtype)

    @intrinsic
    def row_at(typing_context, address, index):
        def generate(context, builder, signature, arguments):
            start, position = arguments
            stride = context.get_constant(types.int64, dtype.itemsize)
            target = builder.add(start, builder.mul(position, stride))
            return builder.inttoptr(target, context.get_value_type(record))

        return record(types.int64, types.int64), generate

    return row_at


def array_accessor(element: Any, num_axes: int) -> Any:
    """A function (address, size of each axis) -> the array there, in C order."""
    dtype = np.dtype(element)
    if IS_INTERPRETED:
        return lambda address, *shape: array_at(address, dtype, math.prod(shape)).reshape(shape)
    array = types.Array(from_dtype(dtype), num_axes, "C")
    signature = array(types.int64, *[types.int64] * num_axes)

    def generate(context, builder, signature, arguments):
        itemsize = context.get_constant(types.intp, dtype.itemsize)
        shape = arguments[1:]
        strides = [itemsize]
        for size in reversed(shape[1:]):
            strides.insert(0, builder.mul(strides[0], size))
        made = make_array(array)(context, builder)
        data = builder.inttoptr(arguments[0], made.data.type)
        populate_array(made, data=data, shape=shape, strides=strides, itemsize=itemsize, meminfo=None)
        return made._getvalue()

    if num_axes == 1:

        @intrinsic
        def list_at(typing_context, address, size):
            return signature, generate

        return list_at

    @intrinsic
    def table_at(typing_context, address, num_rows, num_columns):
        return signature, generate

    return table_at


def array_at(address: int, dtype: Any, count: int, first: int = 0) -> Any:
    """Elements first..first + count - 1 of the array at that address, for callers in Python."""
    dtype = np.dtype(dtype)
    start, num_bytes = int(first) * dtype.itemsize, int(count) * dtype.itemsize
    if IS_INTERPRETED:
        _allocations.check(int(address), start, num_bytes)
    buffer = (ctypes.c_char * num_bytes).from_address(int(address) + start)
    array = np.frombuffer(buffer, dtype)
    return array.view(np.recarray) if dtype.names else array


if IS_INTERPRETED:

    def read_in_order(address: int) -> int:
        """The i8 there, read after everything before and before everything after, whoever may write it."""
        return int(array_at(address, np.int64, 1)[0])

else:

    @intrinsic
    def read_in_order(typing_context, address):
        def generate(context, builder, signature, arguments):
            pointer = builder.inttoptr(arguments[0], context.get_value_type(types.int64).as_pointer())
            return builder.load_atomic(pointer, ordering="seq_cst", align=8)

        return types.int64(types.int64), generate


if IS_INTERPRETED:

    def copy_bytes(target: int, source: int, num_bytes: int) -> None:
        """From one address to another; they do not overlap."""
        if num_bytes > 0:
            array_at(target, np.uint8, num_bytes)[:] = array_at(source, np.uint8, num_bytes)

else:

    @intrinsic
    def copy_bytes(typing_context, target, source, num_bytes):
        def generate(context, builder, signature, arguments):
            to, of = (builder.inttoptr(one, cgutils.voidptr_t) for one in arguments[:2])
            cgutils.raw_memcpy(builder, to, of, arguments[2], context.get_constant(types.int64, 1))
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64), generate


@register_jitable
def size_of_bytes(address: int) -> int:
    """How many bytes there are at what `sized_bytes_at` gave."""
    return long_list(address + _SIZE_AT, 1)[0]  # type: ignore[no-any-return]


@register_jitable
def start_of_bytes(address: int) -> int:
    """Where they begin."""
    return address + _BYTES_AT


def aligned(array: NDArray[Any]) -> NDArray[Any]:
    """A contiguous copy that begins with a line of the cache; elsewhere, vectors lie across two of them."""
    room = np.empty(array.nbytes + _LINE_BYTES, np.uint8)
    start = -room.ctypes.data % _LINE_BYTES
    copy: NDArray[Any] = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


byte_list = array_accessor(np.uint8, 1)
int_list = array_accessor(np.int32, 1)
long_list = array_accessor(np.int64, 1)
single_list = array_accessor(np.float32, 1)
single_table = array_accessor(np.float32, 2)
float_list = array_accessor(np.float64, 1)
float_table = array_accessor(np.float64, 2)
