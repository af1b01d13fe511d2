from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest

from pointsman.evaluation.bootstrap import Ratio
from pointsman.report.comparison import ComparisonReport
from pointsman.report.plots import change_figure, survival_figure

from .factories import make_comparison

VALUES = {"least-outstanding": [2.0, 2.5, 2.2], "random": [30.0, 33.0, 31.0], "least-work": [1.5, 1.7, 1.6]}


@pytest.fixture(scope="module")
def report() -> ComparisonReport:
    two = [make_comparison(VALUES), make_comparison(VALUES, name="mixed")]
    return ComparisonReport(two, "pointsman compare --scenario '<all>'", wall_s=1.0)


@pytest.fixture(scope="module")
def html(report: ComparisonReport) -> str:
    return report.html()


class Page(HTMLParser):
    """Checks that tags are closed in order, and collects what they say."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.external: list[str] = []
        self.tables = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.external += [value for name, value in attributes if name in ("src", "href") and value]
        self.tables += tag == "table"
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def figures_of(html: str) -> list[dict[str, Any]]:
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', html, re.DOTALL)
    assert found is not None
    figures: list[dict[str, Any]] = json.loads(found.group(1))
    return figures


def test_page_is_well_formed_and_needs_nothing_else(html: str) -> None:
    page = Page(html)
    assert page.open == []
    assert all(link.startswith("#") for link in page.external)
    assert page.tables == 1 + 2 * 2
    assert html.count("plotly.js v") == 1, "inlined once"
    assert len(html.encode()) < 6_000_000
    assert "&lt;all&gt;" in html and "made up &lt;for&gt; a test" in html


def test_figures_are_what_plotly_knows(html: str) -> None:
    figures = figures_of(html)
    assert len(figures) == 4 + 2 * 6
    for figure in figures:
        go.Figure(figure)  # refuses unknown properties and values
        assert figure["layout"]["title"]["text"]
        assert figure["layout"]["xaxis"]["title"]["text"]
    assert html.count("data-figure=") == len(figures)


def test_legend_names_every_policy_of_its_section(html: str) -> None:
    assert re.findall(r'data-policy="([^"]+)"', html) == [*VALUES, *VALUES]


def test_many_scenarios_stay_small() -> None:
    policies = {
        f"{name}": [2.0, 2.5] for name in ("random", "least-work", "least-kv", "least-tokens", "power-of-two")
    }
    many = [make_comparison({"least-outstanding": [2.0, 2.0], **policies}, name=f"s{i}") for i in range(16)]
    assert len(ComparisonReport(many, "", 0.0).html().encode()) < 6_000_000


def test_curves_show_the_tail() -> None:
    one = make_comparison(VALUES)
    curves = {policy: one.curves[policy]["ttft"].survival() for policy in one.names}
    figure = survival_figure(curves, one.baseline, "Time to first token", "s")
    assert figure["layout"]["xaxis"]["type"] == figure["layout"]["yaxis"]["type"] == "log"
    for trace in figure["data"]:
        assert min(trace["y"]) <= 2 / 2000
        low, high = figure["layout"]["xaxis"]["range"]
        assert math.log10(max(trace["x"])) <= high
        assert low < high
    assert not figure["layout"]["showlegend"]


def test_bars_span_from_the_baseline_to_the_ratio() -> None:
    ratios = {"a": Ratio(0.5, 0.4, 0.7), "b": Ratio(3.0, math.nan, math.nan), "c": Ratio(*[math.nan] * 3)}
    figure = change_figure(ratios, "base", "TTFT mean")
    (bars,) = figure["data"]
    assert bars["y"] == ["b", "a"], "what cannot be said is left out; plotly draws from below"
    assert bars["base"] == 1 and bars["x"] == [2.0, -0.5]
    assert bars["error_x"]["array"] == pytest.approx([0, 0.2])
    assert bars["error_x"]["arrayminus"] == pytest.approx([0, 0.1])
    assert 1.0 in figure["layout"]["xaxis"]["tickvals"]
    assert "+200 %" in figure["layout"]["xaxis"]["ticktext"]


@pytest.mark.parametrize("ratio", [0.002, 0.98, 1.0, 1.02, 7.0, 5000.0])
def test_any_ratio_has_an_axis(ratio: float) -> None:
    axis = change_figure({"a": Ratio(ratio, ratio, ratio)}, "base", "t")["layout"]["xaxis"]
    low, high = axis["range"]
    assert low < math.log10(ratio) < high
    assert 1 <= len(axis["tickvals"]) <= 8
    go.Figure(change_figure({"a": Ratio(ratio, ratio, ratio)}, "base", "t"))


def test_markdown(report: ComparisonReport) -> None:
    text = report.markdown()
    assert text.startswith("`pointsman compare")
    assert "| **1.60** (−28 % [" in text
    assert "×14" in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == 5 + 2 * (5 + 5)


def test_files_are_complete(report: ComparisonReport, tmp_path: Path) -> None:
    report.write(tmp_path)
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["geometric_mean_ratios"]["random"]["e2e_p99_s"]["ratio"] > 10
    assert (tmp_path / "table.md").read_text() == report.markdown()
    survival = results["comparisons"][0]["survival"]["random"]["ttft"]
    assert len(survival["seconds"]) == len(survival["share_above"]) > 50
