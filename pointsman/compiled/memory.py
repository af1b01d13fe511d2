"""How compiled code reaches the arrays of a cluster: by address, in one instruction.

A cluster has two dozen arrays. Passing them all to every function, or in a tuple, costs more than the
functions themselves (copies and reference counts: a factor of 50 measured). So the cluster's record holds
their addresses, functions get that one record, and rows are read through the accessors made here. Whoever
builds the arrays keeps them alive (`cluster.Clusters`). Without compilation (`NUMBA_DISABLE_JIT=1`) the same
addresses are read through ctypes: slow, and identical.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np
from numba import from_dtype, types
from numba.extending import intrinsic
from numba.np.arrayobj import make_array, populate_array

from pointsman.compiled.jit import IS_INTERPRETED


def row_accessor(dtype: np.dtype[Any]) -> Any:
    """A function (address, index) -> the record at that index of an array of `dtype`."""
    if IS_INTERPRETED:
        return lambda address, index: _array_at(address + index * dtype.itemsize, dtype, 1)[0]
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
        return lambda address, *shape: _array_at(address, dtype, math.prod(shape)).reshape(shape)
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


def _array_at(address: int, dtype: Any, count: int) -> Any:
    dtype = np.dtype(dtype)
    buffer = (ctypes.c_char * (dtype.itemsize * int(count))).from_address(int(address))
    array = np.frombuffer(buffer, dtype)
    return array.view(np.recarray) if dtype.names else array


byte_list = array_accessor(np.uint8, 1)
int_list = array_accessor(np.int32, 1)
long_list = array_accessor(np.int64, 1)
single_list = array_accessor(np.float32, 1)
single_table = array_accessor(np.float32, 2)
float_list = array_accessor(np.float64, 1)
float_table = array_accessor(np.float64, 2)
