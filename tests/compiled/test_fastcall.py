"""The quick way into machine code: numbers arrive as they are, errors are raised, nothing leaks."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from numba.core.caching import NullCache

from pointsman.compiled import jit

needs_compilation = pytest.mark.skipif(jit.IS_INTERPRETED, reason="nothing is compiled")

LARGEST = 2**63 - 1


def entry_point(function: Callable[..., Any], keeps_gil: bool = True) -> Any:
    """Compiled here and now: the digest that a cache is kept under knows the sources of the package alone."""
    dispatcher = jit.entry_point(function, keeps_gil=keeps_gil)
    if not jit.IS_INTERPRETED:
        dispatcher._cache = NullCache()
    return dispatcher


@entry_point
def _int_of(i, f, b):  # type: ignore[no-untyped-def]
    return i if b else -1


@entry_point
def _float_of(i, f, b):  # type: ignore[no-untyped-def]
    return f if b else -1.0


@entry_point
def _bool_of(i, f, b):  # type: ignore[no-untyped-def]
    return b


@entry_point
def _none_of(i, f, b):  # type: ignore[no-untyped-def]
    return None


@entry_point
def _checked(i):  # type: ignore[no-untyped-def]
    if i < 0:
        raise ValueError("less than nothing")
    return i


@partial(entry_point, keeps_gil=False)
def _without_gil(i):  # type: ignore[no-untyped-def]
    return i


def _called(function: Any, kinds: str = "ifb") -> Callable[..., Any]:
    return jit.direct(function, kinds)


@pytest.mark.parametrize("i", [0, 1, -1, 2**40, LARGEST, -LARGEST - 1])
@pytest.mark.parametrize("f", [0.0, -1.0, 1e300, math.inf, math.nan])
@pytest.mark.parametrize("b", [True, False])
def test_numbers_arrive_and_come_back_as_they_are(i: int, f: float, b: bool) -> None:
    assert _called(_int_of)(i, f, b) == (i if b else -1)
    given, wanted = _called(_float_of)(i, f, b), f if b else -1.0
    assert type(given) is float
    assert given == wanted or (math.isnan(given) and math.isnan(wanted))
    assert _called(_bool_of)(i, f, b) is b
    assert _called(_none_of)(i, f, b) is None


@needs_compilation
@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((1, 2.0), TypeError),
        ((1, 2.0, True, 4), TypeError),
        (("1", 2.0, True), TypeError),
        ((1.5, 2.0, True), TypeError),
        ((None, 2.0, True), TypeError),
        ((1, "2", True), TypeError),
        ((LARGEST + 1, 2.0, True), OverflowError),
    ],
)
def test_what_is_no_such_number_is_an_error(arguments: tuple[Any, ...], error: type[Exception]) -> None:
    with pytest.raises(error):
        _called(_int_of)(*arguments)
    assert _called(_int_of)(1, 2.0, True) == 1, "and the next call is not hurt by it"


def test_an_error_inside_is_raised_as_itself() -> None:
    checked = _called(_checked, "i")
    with pytest.raises(ValueError, match="less than nothing"):
        checked(-1)
    assert checked(3) == 3


@needs_compilation
def test_arguments_and_results_are_released() -> None:
    """One reference too many for each call is a leak, one too few a crash much later."""
    number, fraction = 2**40 + 7, float("12.5")
    give_none, give_int = _called(_none_of), _called(_int_of)
    before = sys.getrefcount(number), sys.getrefcount(fraction)
    before_none = sys.getrefcount(None)
    for _ in range(1000):
        give_none(number, fraction, True)
    assert abs(sys.getrefcount(None) - before_none) < 100
    for _ in range(1000):
        give_int(number, fraction, True)
        with pytest.raises(TypeError):
            give_int(number, fraction, True, "one too many")
        with pytest.raises(TypeError):
            give_int(number, "no float", True)
    assert (sys.getrefcount(number), sys.getrefcount(fraction)) == before
    blocks = sys.getallocatedblocks()
    for _ in range(1000):
        give_int(number, fraction, True)
    assert sys.getallocatedblocks() - blocks < 100


@needs_compilation
def test_entry_points_that_release_the_gil_have_no_quick_call() -> None:
    with pytest.raises(ValueError, match="_without_gil was compiled without a quick call"):
        jit.direct(_without_gil, "i")
