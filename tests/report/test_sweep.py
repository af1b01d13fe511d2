"""What is said of a sweep."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from pointsman.report.appraisal import BETTER, UNCLEAR, WORSE
from pointsman.report.sweep import SweepReport, gain_interval, write_sweep
from pointsman.training.search_space import draw_values, parse_search
from pointsman.training.sweep import FAILED, FINISHED_TRIAL, STOPPED, WAITING, Evaluation, Trial

from .pages import check_page, figures_of

KEYS = [parse_search("ppo.learning_rate=1e-4..1e-2"), parse_search("network.width=32,64,128")]
LUCK = np.array([0.01, -0.01, 0.02, -0.02])


def evaluated(score: float, blocks: list[float] | None = None) -> list[Evaluation]:
    """Before training, half-way, and at the end."""
    blocks = (score + LUCK).tolist() if blocks is None else blocks
    return [
        Evaluation(0, 0.0, 0.1, blocks),
        Evaluation(10, 0.5, score - 0.02, blocks),
        Evaluation(20, 0.9, score, blocks),
    ]


def report(folder: Path, base: float = 0.2, gain: float = 0.1) -> SweepReport:
    """Twelve trials, where the learning rate decides and the width does nothing; one was stopped."""
    trials = [Trial(0, {}, FINISHED_TRIAL, 0.9, evaluated(base))]
    for number, values in enumerate(draw_values(KEYS, 12, seed=0), start=1):
        off = abs(np.log10(values["ppo.learning_rate"]) + 3.0)  # the best is 1e-3
        trials.append(Trial(number, values, FINISHED_TRIAL, 0.9, evaluated(base + gain - 0.2 * off)))
    trials[5].status, trials[5].why = STOPPED, "below the median of 3 others at 25 %"
    return SweepReport(trials, KEYS, folder, "pointsman sweep", "env: routing\n")


def test_trials_stand_best_first(tmp_path: Path) -> None:
    found = report(tmp_path)
    scores = [best.score for _, best in found.ranked]
    assert scores == sorted(scores, reverse=True) and len(scores) == 13
    rows = found.rows()
    assert rows[0][:2] == [
        str(found.ranked[0][0].number),
        str(found.ranked[0][0].values["ppo.learning_rate"]),
    ]
    assert ["unchanged", "unchanged"] in [row[1:3] for row in rows]
    assert sum("below the median" in row[-1] for row in rows) == 1
    assert {row[-2] for row in rows} == {"100 %", "90 %"}, "percents as on the rest of the page"


def test_what_decided_is_named_first(tmp_path: Path) -> None:
    found = report(tmp_path)
    assert next(iter(found.shares)) == "ppo.learning_rate"
    assert found.shares["ppo.learning_rate"] > 0.5 > 0.1 > found.shares["network.width"]
    assert found.mattered().startswith("Of the order of the scores, ppo.learning_rate explains ")


@pytest.mark.parametrize(
    ("gain", "tone", "said"),
    [
        (0.1, BETTER, "more than the unchanged configuration"),
        (-0.1, WORSE, "No trial of 12 beats the unchanged configuration, which scores 0.2."),
    ],
)
def test_verdicts(tmp_path: Path, gain: float, tone: str, said: str) -> None:
    verdict = report(tmp_path, gain=gain).verdict
    assert verdict.tone == tone
    assert said in verdict.sentence
    assert any("pointsman evaluate" in line and "report seeds" in line for line in verdict.details)


def test_a_gain_within_the_spread_of_blocks_may_be_luck(tmp_path: Path) -> None:
    found = report(tmp_path)
    winner = found.ranked[0][0]
    winner.evaluations = evaluated(0.4, [0.1, 0.7, 0.0, 0.8])
    verdict = SweepReport(found.trials, KEYS, tmp_path, "", "").verdict
    assert verdict.tone == UNCLEAR and "which may be luck" in verdict.sentence


def test_the_best_of_many_has_a_wider_interval() -> None:
    best, base = evaluated(0.3, [0.3, 0.28, 0.32, 0.30])[-1], evaluated(0.2, [0.2, 0.21, 0.2, 0.19])[-1]
    one, many = gain_interval(best, base, 1), gain_interval(best, base, 12)
    assert many[0] < one[0] < 0.1 < one[1] < many[1]
    # t = 3.182 of three degrees of freedom; the differences are 0.1, 0.07, 0.12, 0.11.
    half = 3.182 * np.std([0.1, 0.07, 0.12, 0.11], ddof=1) / 2
    assert one == pytest.approx((0.1 - half, 0.1 + half), abs=1e-4)
    assert np.isnan(gain_interval(best, base._replace(blocks=[]), 1)[0])


def test_the_page_has_all_of_it(tmp_path: Path) -> None:
    found = report(tmp_path)
    write_sweep(found)
    html = (tmp_path / "report.html").read_text()
    page = check_page(html)
    assert page.titles == ["Trials", "What mattered", "Settings"]
    assert len(figures_of(html)) == 2 + len(KEYS)
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["trials"][0]["score"] == found.ranked[0][1].score
    assert results["is_over"] and results["seeds"] == "selection"


def test_a_sweep_without_scores_has_a_page_too(tmp_path: Path) -> None:
    trials = [Trial(0, {}, FAILED, why="out of memory"), Trial(1, {"a": 1}, WAITING)]
    found = SweepReport(trials, [parse_search("a=1,2")], tmp_path, "pointsman sweep", "")
    assert found.verdict.sentence == "No trial came as far as an evaluation."
    assert found.num_left == 1
    check_page(found.html())
