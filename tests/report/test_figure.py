from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.report.figure import Axis, linear_axis, linear_ticks, log_axis, log_ticks, row_axis, short

ENDS = st.floats(-1e9, 1e9, allow_nan=False)


@given(ENDS, st.floats(1e-6, 1e9))
def test_linear_ticks_are_round_even_and_enough(low: float, span: float) -> None:
    if low + span == low or span < 1e-9 * abs(low):
        return
    ticks = linear_ticks(low, low + span)
    assert 3 <= len(ticks) <= 8
    values = [value for value, _ in ticks]
    steps = [b - a for a, b in itertools.pairwise(values)]
    assert max(steps) == pytest.approx(min(steps), rel=1e-3, abs=1e-6 * span)
    assert low - 1e-6 * span <= values[0] and values[-1] <= low + span * (1 + 1e-6)
    assert len({text for _, text in ticks}) == len(ticks)


@given(st.floats(1e-6, 1e6), st.floats(1.02, 1e9))
def test_log_ticks_are_enough(low: float, factor: float) -> None:
    ticks = log_ticks(low, low * factor)
    assert 3 <= len(ticks) <= 9
    assert all(low * 0.999 <= value <= low * factor * 1.001 for value, _ in ticks)
    assert len({text for _, text in ticks}) == len(ticks)


def test_ticks_read_as_people_write() -> None:
    assert [text for _, text in linear_ticks(-0.004, 0.0041)] == [
        "−0.004",
        "−0.002",
        "0.000",
        "0.002",
        "0.004",
    ]
    assert [text for _, text in linear_ticks(0, 20_000)] == ["0", "5,000", "10,000", "15,000", "20,000"]
    assert [text for _, text in log_ticks(0.1, 100)] == ["0.1", "1", "10", "100"]
    assert [text for _, text in log_ticks(0.1, 2)] == ["0.1", "0.3", "1"]


@pytest.mark.parametrize("values", [[], [math.nan], [3.0], [0.0, 0.0], [-2.0, math.nan, 5.0]])
def test_an_axis_holds_any_values(values: list[float]) -> None:
    axis = linear_axis("x", values)
    assert axis.low < axis.high and len(axis.ticks) >= 3
    assert all(0 <= axis.share(value) <= 1 for value in values if math.isfinite(value))
    axis = log_axis("x", values)
    assert 0 < axis.low < axis.high and len(axis.ticks) >= 3


def test_axes_run_both_ways() -> None:
    assert Axis("", 1.0, 100.0, (), is_log=True).share(10.0) == pytest.approx(0.5)
    rows = row_axis(["a", "b"])
    assert rows.share(0.0) == 0.75 and rows.share(1.0) == 0.25, "the first is above"


def test_short_numbers() -> None:
    numbers = (0.0, 12345.6, 0.00012345, -1234567.0, 0.5, math.nan)
    assert [short(value) for value in numbers] == ["0", "12,300", "1.2e−4", "−1.2e6", "0.5", "–"]
