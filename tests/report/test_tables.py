from __future__ import annotations

import math

import numpy as np
import pytest

from pointsman.evaluation.bootstrap import Ratio
from pointsman.report.tables import change, direction, headline_rows, markdown, number, percent

from .factories import make_comparison


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.23149, "0.231"),
        (0.1, "0.100"),
        (0.014251, "0.0143"),
        (7.1562, "7.16"),
        (59.903, "59.9"),
        (234.27, "234"),
        (12345.6, "12,346"),
        (1.2e-9, "1.20e-09"),
        (math.nan, "–"),
        (-0.5, "-0.500"),
        (9.999, "10.0"),
    ],
)
def test_number(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("share", "text"), [(0.0, "0 %"), (1.0, "100 %"), (0.9994, "99.9 %"), (math.nan, "–"), (0.25, "25.0 %")]
)
def test_percent(share: float, text: str) -> None:
    assert percent(share) == text


@pytest.mark.parametrize(
    ("ratio", "text"),
    [
        (Ratio(0.66, 0.62, 0.7), "−34 % [−38, −30]"),
        (Ratio(1.013, 0.996, 1.028), "+1.3 % [−0.4, 2.8]"),
        (Ratio(0.981, 0.979, 0.982), "−1.9 % [−2.1, −1.8]"),
        (Ratio(1.0, 1.0, 1.0), "0.0 % [0.0, 0.0]"),
        (Ratio(1.11, 0.998, 1.3), "+11 % [0, 30]"),
        (Ratio(0.9997, 0.9, 1.0002), "0 % [−10, 0]"),
        (Ratio(9.9, 9.0, 11.2), "+890 % [800, 1020]"),
        (Ratio(12.2, 9.6, 21.4), "×12 [9.6, 21]"),
        (Ratio(117.9, 99.1, 128.4), "×118 [99, 128]"),
        (Ratio(0.66, math.nan, math.nan), "−34 %"),
        (Ratio(12.2, math.nan, math.nan), "×12"),
        (Ratio(math.nan, math.nan, math.nan), ""),
    ],
)
def test_change(ratio: Ratio, text: str) -> None:
    assert change(ratio) == text


def test_direction_needs_the_whole_interval() -> None:
    assert direction(Ratio(0.9, 0.8, 0.99)) == -1
    assert direction(Ratio(1.1, 1.01, 1.2)) == 1
    assert direction(Ratio(0.9, 0.8, 1.01)) == 0
    assert direction(Ratio(0.9, math.nan, math.nan)) == 0


def test_best_is_lowest_and_no_oracle() -> None:
    comparison = make_comparison(
        {
            "least-outstanding": [2.0, 2.0],
            "random": [3.0, 3.0],
            "least-work": [1.5, 1.5],
            "vidur-lor": [1.0, 1.0],
        }
    )
    rows = {row.policy: row for row in headline_rows(comparison)}
    assert [row.cells[0].is_best for row in rows.values()] == [False, False, True, False]
    assert rows["vidur-lor"].label == "vidur-lor †"
    assert rows["least-outstanding"].cells[0].change == ""
    assert rows["random"].cells[0].change == "+50 % [50, 50]"
    assert [row.cells[0].direction for row in rows.values()] == [0, 1, -1, -1]


def test_means_are_over_seeds() -> None:
    comparison = make_comparison({"least-outstanding": [1.0, 2.0], "random": [3.0, 6.0]})
    assert headline_rows(comparison)[1].cells[0].value == "4.50"
    np.testing.assert_allclose(comparison.ratios["random"]["ttft_mean_s"].ratio, 3.0)


def test_markdown_is_aligned() -> None:
    text = markdown(["policy", "a"], [["x", "1"], ["longer", "−34 %"]])
    assert text == "| policy |     a |\n|--------|------:|\n| x      |     1 |\n| longer | −34 % |"
