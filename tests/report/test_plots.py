from __future__ import annotations

import math

import pytest

from pointsman.evaluation.bootstrap import Ratio
from pointsman.report.figure import Bar, Ladder, Line
from pointsman.report.plots import change_figure, percentile_figure, styles, survival_figure
from pointsman.routing.heuristics import HEURISTICS

from .factories import make_comparison

VALUES = {"least-outstanding": [2.0, 2.5, 2.2], "random": [30.0, 33.0, 31.0], "least-work": [1.5, 1.7, 1.6]}


def test_curves_show_the_tail_and_the_policy_on_top() -> None:
    one = make_comparison(VALUES)
    curves = {policy: one.curves[policy]["ttft"].survival() for policy in one.names}
    figure = survival_figure(curves, "random", "Time to first token", "time to first token, s")
    lines = [mark for mark in figure.marks if isinstance(mark, Line)]
    assert figure.x.is_log and figure.y.is_log
    for line in lines:
        assert min(line.y) <= 100 * 2 / 2000, "one of 2,000 requests is seen"
        assert figure.x.low < max(line.x) < figure.x.high, "the policy on top is never cut"
        assert figure.y.low < min(line.y)
    assert lines[-1].name == "random" and lines[-1].width == max(line.width for line in lines)


def test_one_hopeless_policy_does_not_flatten_the_others() -> None:
    fine = [f"p{number}" for number in range(4)]
    one = make_comparison({"least-outstanding": [2.0] * 3, "random": [2000.0] * 3})
    curve, hopeless = (one.curves[name]["ttft"].survival() for name in ("least-outstanding", "random"))
    figure = survival_figure({**dict.fromkeys(fine, curve), "random": hopeless}, "p0", "TTFT", "s")
    assert max(curve[0]) < figure.x.high < max(hopeless[0]) / 10
    assert "Beyond the right edge: random (" in figure.note

    ratios = {name: Ratio(0.8, 0.7, 0.9) for name in fine} | {"random": Ratio(66.0, 60.0, 70.0)}
    figure = change_figure(ratios, "base", "TTFT mean")
    gains = figure.x.share(1.0) - figure.x.share(0.8)
    assert gains > 0.15, "a sixth of the width for a fifth less, not a twentieth"
    *bars, cut = (mark for mark in figure.marks if isinstance(mark, Bar))
    assert cut.label == "×66" and not any(bar.label for bar in bars)


def test_bars_span_from_no_change_to_the_ratio() -> None:
    ratios = {"a": Ratio(0.5, 0.4, 0.7), "b": Ratio(3.0, math.nan, math.nan), "c": Ratio(*[math.nan] * 3)}
    figure = change_figure(ratios, "base", "TTFT mean")
    bars = [mark for mark in figure.marks if isinstance(mark, Bar)]
    assert [text for _, text in figure.y.ticks] == ["a", "b"], "what cannot be said is left out"
    assert [(bar.start, bar.end, bar.interval) for bar in bars] == [(1, 0.5, (0.4, 0.7)), (1, 3.0, None)]
    ticks = dict(figure.x.ticks)
    assert ticks[1.0] == "0" and ticks[1.5] == "+50 %" and ticks[0.6] == "−40 %"


@pytest.mark.parametrize("ratio", [0.002, 0.5, 0.9, 0.955, 0.98, 0.9999, 1.0, 1.02, 1.3, 7.0, 5000.0])
def test_any_ratio_has_an_axis_with_several_ticks(ratio: float) -> None:
    axis = change_figure({"a": Ratio(ratio, ratio, ratio)}, "base", "t").x
    assert axis.low < ratio < axis.high
    assert 3 <= len(axis.ticks) <= 9
    assert len({text for _, text in axis.ticks}) == len(axis.ticks)
    assert any(value == pytest.approx(1.0) and text == "0" for value, text in axis.ticks)
    assert all(axis.low <= value <= axis.high for value, _ in axis.ticks)


def test_percentiles_of_policies_share_a_row_and_do_not_overlap() -> None:
    values = {"s": {"a": [1.0, 2.0, 3.0, 9.0], "b": [2.0, 3.0, 4.0, 5.0]}, "t": {"a": [math.nan] * 4}}
    figure = percentile_figure(values, "TTFT", "s")
    first, second = (mark for mark in figure.marks if isinstance(mark, Ladder))
    assert -0.5 < first.row < second.row < 0.5
    assert figure.x.low < 1.0 and figure.x.high > 9.0
    assert first.texts[-1] == "a, P99: 9.00 s"


def test_policies_shown_together_look_different() -> None:
    names = [f"run-{number}" for number in range(7)]
    looks = styles([*names, "random", "least-work"])
    assert len(set(looks.values())) == 9
    assert looks["random"] == styles(["random"])["random"], "known ones always look the same"


def test_every_policy_that_ships_has_a_look_of_its_own() -> None:
    """Beside each other, and alone in another chart of the same page."""
    names = [*HEURISTICS, "default"]
    together = styles(names)
    assert len(set(together.values())) == len(names)
    assert together == {name: styles([name])[name] for name in names}
    bars = change_figure(
        dict.fromkeys(("gathering", "default"), Ratio(0.7, 0.6, 0.8)), "random", "TTFT"
    ).marks
    assert len({bar.colour for bar in bars if isinstance(bar, Bar)}) == 2
