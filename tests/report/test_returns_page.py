"""The page of `evaluate --out` and `compare --out` where policies are judged by returns."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from pointsman.evaluation.returns import RETURN, Returns
from pointsman.report.returns import ReturnsReport
from pointsman.report.returns_page import returns_html, write_returns

from .pages import check_page, figures_of

ENV = {"kind": "jobs", "note": "<made> up"}


def report(
    num_seeds: int, policy: str | None, names: tuple[str, ...] = ("sjf", "<mine>", "fifo")
) -> ReturnsReport:
    luck = np.random.default_rng(0).normal(0.5, 0.1, num_seeds)
    metrics = {
        name: {RETURN: luck + 0.1 * rank, "noop_frac": np.full(num_seeds, 0.5)}
        for rank, name in enumerate(names)
    }
    returns = Returns(tuple(range(1000, 1000 + num_seeds)), "sjf", metrics)
    return ReturnsReport(returns, {"noop_frac": "no-op"}, ENV, "pointsman 'a < b'", 1.0, policy)


def test_comparison_page() -> None:
    html = returns_html(report(60, None))
    found = check_page(html)
    assert (found.tables, found.titles) == (1, ["Policies", "Settings"])
    assert "pointsman &#x27;a &lt; b&#x27;" in html and "&lt;made&gt;" in html
    gains, blocks = figures_of(html)
    assert gains.count("<title>") == 2  # all but the baseline
    assert "fifo: +0.200" in gains
    assert blocks.count("<circle") == 3 * 3


def test_comparison_page_says_which_to_take() -> None:
    assert 'fifo returns most: <span class="whole">0.7' in returns_html(report(60, None))
    assert "+0.200 [" in returns_html(report(60, None))
    noise = report(60, None)
    noise.returns.metrics["<mine>"][RETURN][:] = noise.returns.metrics["fifo"][RETURN] - [0.1, -0.08] * 30
    html = returns_html(noise)
    assert "Just as good, within the interval: &lt;mine&gt;." in html and 'class="verdict unclear"' in html
    assert "One episode cannot tell how sure that is." in returns_html(report(1, None))


def test_evaluation_page_begins_with_the_verdict() -> None:
    html = returns_html(report(60, "<mine>"))
    check_page(html)
    assert '&lt;mine&gt; beats sjf: <span class="whole">+0.100' in html
    assert "But fifo does better." in html
    assert html.index('class="verdict') < html.index("<table")


def test_evaluation_page_without_the_usual_baseline() -> None:
    html = returns_html(report(60, "<mine>", ("<mine>", "fifo")))
    assert "&lt;mine&gt; is worse than fifo" in html


@pytest.mark.parametrize("policy", [None, "<mine>"])
def test_one_seed_has_no_interval(policy: str | None, tmp_path: Path) -> None:
    write_returns(report(1, policy), tmp_path)
    check_page((tmp_path / "report.html").read_text())
    assert json.loads((tmp_path / "results.json").read_text())["seeds"] == [1000]
    assert (tmp_path / "table.md").read_text().startswith("`pointsman")
