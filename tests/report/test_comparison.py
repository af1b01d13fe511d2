from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pointsman.experiments.metrics import HitsOverTime
from pointsman.report.comparison import ComparisonReport

from .factories import make_comparison
from .pages import check_page, figures_of

VALUES = {"least-outstanding": [2.0, 2.5, 2.2], "random": [30.0, 33.0, 31.0], "least-work": [1.5, 1.7, 1.6]}


@pytest.fixture(scope="module")
def report() -> ComparisonReport:
    two = [make_comparison(VALUES), make_comparison(VALUES, name="mixed")]
    return ComparisonReport(two, "pointsman compare --scenario '<all>'", wall_s=1.0)


@pytest.fixture(scope="module")
def html(report: ComparisonReport) -> str:
    return report.html()


def test_page_is_well_formed_and_needs_nothing_else(html: str) -> None:
    page = check_page(html)
    assert page.tables == 1 + 2 * 2
    assert page.titles == ["All scenarios", "steady-chat", "mixed"]
    assert "&lt;all&gt;" in html and "made up &lt;for&gt; a test" in html
    assert len(figures_of(html)) == 4 + 2 * 6


def test_legend_names_every_policy(html: str) -> None:
    survival = [figure for figure in figures_of(html) if 'aria-label="Time to first token"' in figure]
    assert len(survival) == 2
    for figure in survival:
        keys = re.findall(r'class="key" data-series="([^"]+)"', figure)
        assert sorted(keys) == sorted(VALUES)


def test_many_scenarios_stay_small() -> None:
    policies = {
        f"{name}": [2.0, 2.5] for name in ("random", "least-work", "least-kv", "least-tokens", "power-of-two")
    }
    many = [make_comparison({"least-outstanding": [2.0, 2.0], **policies}, name=f"s{i}") for i in range(16)]
    assert len(ComparisonReport(many, "", 0.0).html().encode()) < 1_500_000


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


def test_hits_by_replica_are_shown_where_prompts_share_prefixes() -> None:
    shares = np.array([[0.0, 0.5, 0.25], [1.0, np.nan, 0.5], [0.1, 0.2, 0.3], [0.1, 0.2, 0.3]])
    plain = make_comparison(VALUES)
    one = replace(plain, hits={"least-work": HitsOverTime(60.0, shares)})
    with_hits, without = (ComparisonReport([which], "", 0.0) for which in (one, plain))
    assert len(figures_of(with_hits.html())) == len(figures_of(without.html())) + 1
    assert "1 A100-80, 0 s: 100 % cached" in with_hits.html()
    assert "1 A100-80, 60 s" not in with_hits.html(), "nobody began there"
    found = with_hits.results()["comparisons"][0]["hits_over_time"]["least-work"]
    assert found == {
        "window_s": 60.0,
        "hit_share": [[0.0, 0.5, 0.25], [1.0, None, 0.5], *[[0.1, 0.2, 0.3]] * 2],
    }
