from __future__ import annotations

import json
from pathlib import Path

import pytest

from pointsman.report.comparison import ComparisonReport
from pointsman.report.evaluation import EvaluationReport
from pointsman.report.evaluation_page import write_evaluation

from .factories import make_comparison

# The policy to judge first, then what it is judged against, the baseline first.
VALUES = {
    "least-work": [1.0, 1.1, 0.9],
    "least-outstanding": [2.0, 2.2, 1.9],
    "random": [30.0, 33.0, 31.0],
    "vidur-lor": [0.5, 0.6, 0.5],
}


@pytest.fixture(scope="module")
def report() -> EvaluationReport:
    slower = {policy: [4 * value for value in row] for policy, row in VALUES.items()}
    worse = slower | {"least-work": [12.0, 13.0, 12.5]}
    two = [make_comparison(VALUES), make_comparison(worse, name="mixed")]
    return EvaluationReport(ComparisonReport(two, "pointsman evaluate x", wall_s=1.0))


def test_who_is_judged_against_whom(report: EvaluationReport) -> None:
    assert report.policy == "least-work"
    assert report.against == ["least-outstanding", "random", "vidur-lor"]


def test_changes_are_those_of_the_policy(report: EvaluationReport) -> None:
    rows = dict(report.scenario_rows())
    assert rows["steady-chat"][0].text.startswith("−51 % [") and rows["steady-chat"][0].direction == -1
    assert rows["mixed"][0].text.startswith("+54 % [") and rows["mixed"][0].direction == 1


def test_geometric_means_against_each(report: EvaluationReport) -> None:
    ratios = [one.ratios_between("least-work", "random")["e2e_mean_s"].ratio for one in report.comparisons]
    mean = report.geometric_means["random"]["e2e_mean_s"]
    assert mean.ratio == pytest.approx((ratios[0] * ratios[1]) ** 0.5)
    assert mean.low < mean.ratio < mean.high
    assert [name for name, _ in report.summary_rows()] == ["least-outstanding", "random", "vidur-lor †"]


def test_more_is_better_for_some_metrics(report: EvaluationReport) -> None:
    one = report.comparisons[0]
    rows = {name: changes for name, _, changes in report.metric_rows(one)}
    assert rows["TTFT P99"][0].direction == -1
    assert rows["within SLO"][0].direction == 1, "half of it is worse"


def test_results_hold_every_pair(report: EvaluationReport, tmp_path: Path) -> None:
    write_evaluation(report, tmp_path)
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["policy"] == "least-work"
    assert list(results["against"]) == report.against
    pair = results["against"]["random"]["mixed"]["e2e_p99_s"]
    assert pair["low"] <= pair["ratio"] <= pair["high"] < 1
    assert results["geometric_mean_against"]["random"]["e2e_p99_s"]["ratio"] < 1
    assert [one["name"] for one in results["comparisons"]] == ["steady-chat", "mixed"]
    assert (tmp_path / "report.html").exists()


def test_markdown(report: EvaluationReport) -> None:
    text = report.markdown()
    assert text.startswith("# least-work\n")
    for title in ("over all scenarios", "in each scenario", "least-work on mixed", "## All scenarios"):
        assert title in text
    (line,) = [line for line in text.splitlines() if line.startswith("| mixed ")]
    assert line.count("+54 %") == 4


def test_one_scenario_has_no_summary() -> None:
    one = EvaluationReport(ComparisonReport([make_comparison(VALUES)], "", 0.0))
    assert "over all scenarios" not in one.markdown()
