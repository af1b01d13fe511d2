"""A quick way from Python into machine code whose arguments are numbers.

Numba's own way takes the arguments as a tuple, and makes an int or a float of each before it reads it: 9 ns
an argument, so that a decision, which has nine, took 95 ns to call and 30 ns to make. This way is the one by
which CPython calls its own functions (METH_FASTCALL), and takes half as long. It is compiled beside numba's
and cached with it.

It is stricter: a float is not taken for an int. And it keeps the GIL.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import types

NUMBERS = (types.int64, types.float64, types.boolean)

_FASTCALL = 0x80
_SIZE = ir.IntType(8 * ctypes.sizeof(ctypes.c_ssize_t))


class _Method(ctypes.Structure):
    """CPython's PyMethodDef."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    )


_new_function = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)(
    ("PyCFunction_NewEx", ctypes.pythonapi)
)
_methods: list[_Method] = []  # a function reads its own as long as it lives


def quick_call(compiled: Any) -> Callable[..., Any]:
    """A function of Python, from what numba compiled after `add_quick_call`."""
    description = compiled.fndesc
    address = compiled.library.get_pointer_to_function(_name(description))
    if not address:
        raise ValueError(f"{description.qualname} was compiled without a quick call")
    _methods.append(_Method(description.qualname.encode(), address, _FASTCALL, None))
    function: Callable[..., Any] = _new_function(ctypes.addressof(_methods[-1]), None, None)
    return function


def add_quick_call(context: Any, library: Any, description: Any) -> None:
    """Compile the way in for the function that numba describes so, into its library."""
    module = context.create_module("quick_call")
    convention = context.call_conv
    result_type, kinds = description.restype, description.argtypes
    callee = ir.Function(module, convention.get_function_type(result_type, kinds), description.llvm_func_name)
    pointer = context.get_argument_type(types.pyobject)
    signature = ir.FunctionType(pointer, [pointer, pointer.as_pointer(), _SIZE])
    function = ir.Function(module, signature, _name(description))
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    api = context.get_python_api(builder)
    _, arguments, count = function.args
    with builder.if_then(builder.icmp_signed("!=", count, _SIZE(len(kinds))), likely=False):
        api.err_set_string("PyExc_TypeError", f"{description.qualname} takes {len(kinds)} arguments")
        builder.ret(api.get_null_object())
    numbers = [
        _read(builder, api, builder.load(builder.gep(arguments, [_SIZE(n)])), kind)
        for n, kind in enumerate(kinds)
    ]
    status, result = convention.call_function(
        builder, callee, result_type, kinds, numbers, attrs=("noinline",)
    )
    with builder.if_then(status.is_ok, likely=True):
        builder.ret(api.from_native_return(result_type, result, None))
    convention.raise_error(builder, api, status)
    builder.ret(api.get_null_object())
    library.add_ir_module(module)


def _read(builder: Any, api: Any, argument: Any, kind: Any) -> Any:
    """The number in a Python object; if there is none, the function ends with the error of CPython."""
    if kind == types.float64:
        number = api.float_as_double(argument)
        may_be_none = builder.fcmp_ordered("==", number, number.type(-1.0))
    else:
        number = api.object_istrue(argument) if kind == types.boolean else api.long_as_longlong(argument)
        may_be_none = builder.icmp_signed("==", number, number.type(-1))
    with builder.if_then(may_be_none, likely=False), builder.if_then(api.c_api_error(), likely=False):
        builder.ret(api.get_null_object())
    return builder.icmp_signed("!=", number, number.type(0)) if kind == types.boolean else number


def _name(description: Any) -> str:
    return f"quick.{description.llvm_func_name}"
