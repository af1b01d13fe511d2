"""Reports of runs that were never trained: whole ones, and all kinds of broken ones."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from pointsman.errors import InputError
from pointsman.report.appraisal import by_evaluations
from pointsman.report.comparison import ComparisonReport
from pointsman.report.curves import MAX_POINTS, exploration_figures, learning_figures, reward_figures
from pointsman.report.evaluation import EvaluationReport
from pointsman.report.evaluation_page import evaluation_sections
from pointsman.report.figure import Band, Dots, Figure, Flags, Line
from pointsman.report.findings import diagnosis_of
from pointsman.report.record import read_run
from pointsman.report.run import RunReport, baseline_of, build_report

from .factories import NUM_UPDATES, RUN_CONFIG, make_comparison, make_rows, make_run
from .pages import check_page, figures_of, look_at, needs_chromium


def report_of(folder: Path) -> RunReport:
    record = read_run(folder)
    appraisal = by_evaluations(record.name, record.log.facts.evaluation, baseline_of(record))
    return build_report(record, appraisal, diagnosis_of(record.log), None, "pointsman report x")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("run") / "made-up", make_rows())


@pytest.fixture(scope="module")
def report(run: Path) -> RunReport:
    return report_of(run)


def named(figures: list[Figure], title: str) -> Figure:
    (found,) = [figure for figure in figures if figure.title == title]
    return found


def test_page_has_everything(report: RunReport) -> None:
    html = report.html()
    page = check_page(html)
    assert page.titles == ["Findings", "Learning", "Exploration", "Reward", "Time", "How to reproduce it"]
    assert html.index('class="verdict') < html.index("<h2>"), "the verdict comes first"
    assert len(figures_of(html)) == len(report.figures()) == 14
    for text in (
        "pointsman train --preset &lt;quick&gt;",
        "pointsman report x",
        "sha256 ",
        "git revision",
        "Warning: most rewards are &lt;zero&gt;.",
        "1 intervention in exploration, 1 alert.",
        "<pre>update 20: temperature 1 → 1.5, plateau\nupdate 30: KL &lt;too&gt; far</pre>",
        "The run has not reached its end.",
    ):
        assert text in html, text


def test_every_figure_has_title_and_units(report: RunReport) -> None:
    for figure in report.figures().values():
        assert figure.title and figure.x.title
        is_rows = figure.y.low > figure.y.high
        assert figure.y.title or is_rows, figure.title
        assert len(figure.x.ticks) >= 3 and (is_rows or len(figure.y.ticks) >= 3)


def test_a_bad_start_does_not_flatten_the_curve(tmp_path: Path) -> None:
    rows = make_rows()
    for number, row in enumerate(rows):
        row["mean_ep_return"] = -1000.0 if number < 2 else 1.0 + 0.01 * number
    figures = learning_figures(read_run(make_run(tmp_path / "run", rows)), "least-outstanding")
    figure = named(figures, "Episodes in training")
    assert figure.y.low > 0.9
    assert figure.note == "It begins at −1,000, below the axis."


def test_learning_has_baselines_and_interventions(run: Path) -> None:
    figure = named(learning_figures(read_run(run), "least-outstanding"), "Evaluations during training")
    lines = {mark.name: mark for mark in figure.marks if isinstance(mark, Line)}
    assert list(lines["least-outstanding"].y) == [0.0, 0.0]
    assert list(lines["round-robin"].y) == [-0.1, -0.1]
    assert "random" not in lines and figure.note == "Beyond the axis: random −5."
    flags = {mark.name: mark for mark in figure.marks if isinstance(mark, Flags)}
    assert list(flags["best checkpoint"].x) == [NUM_UPDATES]
    assert flags["interventions"].texts == ["update 20: temperature 1 → 1.5, plateau"]
    assert flags["alerts"].texts == ["update 30: KL <too> far"]


def test_reward_terms_are_stacked_away_from_zero(run: Path) -> None:
    figure = named(reward_figures(read_run(run)), "Reward of a decision, by term")
    waiting, age = (mark for mark in figure.marks if isinstance(mark, Band))
    (total,) = (mark for mark in figure.marks if isinstance(mark, Line))
    assert (min(waiting.low), max(waiting.high)) == pytest.approx((0.0, 0.02))
    assert (min(age.low), max(age.high)) == pytest.approx((-0.01, 0.0))
    assert total.y[-1] == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("kind", "named_as"), [("routing", "replica 0"), ("jobs", "job 1"), ("own", "action 1")]
)
def test_replicas_of_actions_count_from_0_as_everywhere(tmp_path: Path, kind: str, named_as: str) -> None:
    rows = [row | {"action_frac/0": 0.1, "action_frac/1": 0.6, "action_frac/2": 0.3} for row in make_rows()]
    folder = make_run(tmp_path / "run", rows, config=f"{{env: {{kind: {kind}}}, ppo: {{}}, run: {{}}}}")
    figure = named(exploration_figures(read_run(folder)), "Actions, by entity")
    names = [mark.name for mark in figure.marks if isinstance(mark, Band)]
    assert names[:2] == ["none", named_as]


def test_long_runs_are_thinned_to_means(tmp_path: Path) -> None:
    rows = make_rows(5 * MAX_POINTS)
    figure = named(exploration_figures(read_run(make_run(tmp_path, rows))), "Temperature")
    (line,) = (mark for mark in figure.marks if isinstance(mark, Line))
    assert len(line.y) == MAX_POINTS
    assert line.y[0] == pytest.approx(sum(row["temperature"] for row in rows[:5]) / 5, abs=1e-6)
    assert figure.x.title == "update (points are means of 5)"


def test_a_worse_run_is_called_worse(tmp_path: Path) -> None:
    rows = make_rows(score=-0.4)
    rows[-1] |= {f"eval_block{index}_return": -0.4 + 0.01 * index for index in range(4)}
    html = report_of(make_run(tmp_path / "bad", rows)).html()
    assert '<div class="verdict worse"><p><strong>bad is worse than least-outstanding: score −0.4' in html


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([], "made-up cannot be judged: it has no evaluation yet."),
        (make_rows(1), "made-up cannot be judged: it has no evaluation yet."),
        (make_rows(9), "No evaluation was made yet"),
        (make_rows(10), "made-up is above least-outstanding: score"),
    ],
    ids=["no row", "one row", "no evaluation", "one evaluation"],
)
def test_young_runs(tmp_path: Path, rows: list[dict[str, float]], says: str) -> None:
    html = report_of(make_run(tmp_path / "made-up", rows)).html()
    check_page(html)
    assert says in html


def test_columns_of_nan_give_no_figure(tmp_path: Path) -> None:
    rows = [row | {"temperature": math.nan, "reward_raw_p99": math.inf} for row in make_rows()]
    report = report_of(make_run(tmp_path, rows))
    check_page(report.html())
    assert "temperature" not in report.figures() and "raw-reward-of-a-decision" not in report.figures()
    assert "entropy-of-the-policy" in report.figures()


def test_a_row_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    path = make_run(tmp_path, make_rows()) / "progress.csv"
    path.write_text(path.read_text()[:-40])
    report = report_of(tmp_path)
    check_page(report.html())
    assert named(list(report.figures().values()), "Temperature").x.high in (NUM_UPDATES - 1, NUM_UPDATES)


@pytest.mark.parametrize("text", [None, "{", "[1, 2]", "42", "{}"])
@pytest.mark.parametrize("name", ["config", "meta", "evaluation", "headroom"])
def test_broken_files_are_left_out(tmp_path: Path, name: str, text: str | None) -> None:
    folder = make_run(tmp_path / "run", make_rows(), **{name: text})
    check_page(report_of(folder).html())


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", make_rows(), meta=None, config=": [")
    problems = read_run(folder).problems
    assert any("config.yaml" in line for line in problems) and any("meta.json" in line for line in problems)
    assert "config.yaml is missing or damaged" in report_of(folder).html()


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "other").mkdir()
    for path, problem in (
        (tmp_path / "nosuch", "does not exist"),
        (tmp_path / "file", "is not a directory"),
        (tmp_path / "other", "has no config.yaml, progress.csv, meta.json"),
    ):
        with pytest.raises(InputError, match=problem):
            read_run(path)


def test_a_run_is_over_when_its_last_state_is_saved(tmp_path: Path) -> None:
    assert RUN_CONFIG["run"]["steps"] == 100 * NUM_UPDATES  # type: ignore[index]
    folder = make_run(tmp_path, make_rows())
    assert not read_run(folder).is_over
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / f"state-{NUM_UPDATES:08d}.safetensors").touch()
    assert read_run(folder).is_over


@needs_chromium
def test_browsers_have_nothing_to_complain_about(report: RunReport, tmp_path: Path) -> None:
    """On a desktop and on a phone: no error, nothing loaded, nothing wider than the window or its figure."""
    values = {name: [1.0, 1.1, 0.9] for name in ("least-work", "least-outstanding", "random")}
    compared = EvaluationReport(ComparisonReport([make_comparison(values)], "", 0.0))
    both = RunReport(report.title, report.lead, [*report.sections, *evaluation_sections(compared)])
    seen, complaints = look_at(both.html(), tmp_path)
    assert complaints == []
    assert sorted(one["width"] for one in seen) == [390, 1280]
    for one in seen:
        assert one["content"] <= one["width"]
        assert one["loaded"] == []
        assert len(one["figures"]) == len(both.figures()) and all(one["figures"])


def test_no_column_is_needed(tmp_path: Path) -> None:
    """Each in turn is missing, or has no number, or is the same throughout."""
    rows = make_rows(12)
    for name in dict.fromkeys(name for row in rows for name in row):
        for number, change in enumerate(({}, {name: math.nan}, {name: 0.0})):
            odd = [{key: value for key, value in row.items() if key != name} | change for row in rows]
            folder = tmp_path / f"{name.replace('/', '-')}-{number}"
            check_page(report_of(make_run(folder, odd)).html())


@pytest.mark.parametrize(
    "text", ["", "\n", "update,eval_score\n", "a;b;c\n1;2;3\n", "update,x\nnan,nan\nnan,nan\n"]
)
def test_odd_tables_give_a_page_that_says_so(tmp_path: Path, text: str) -> None:
    folder = make_run(tmp_path / "run", [], evaluation=None, headroom=None)
    (folder / "progress.csv").write_text(text)
    html = report_of(folder).html()
    check_page(html)
    assert "cannot be judged: it has no evaluation yet" in html


def test_mean_against_tail_shows_whom_nobody_beats_in_both(run: Path) -> None:
    record = read_run(run)
    figure = named(learning_figures(record, "least-outstanding"), "Mean against tail")
    dots = {mark.name: mark for mark in figure.marks if isinstance(mark, Dots)}
    assert set(dots) == {"evaluated", "no other is better in both", "late-binding"}, "random is beyond"
    every, front = dots["evaluated"], dots["no other is better in both"]
    points = list(zip(every.x, every.y, strict=True))
    best = [
        one for one in points if not any(x <= one[0] and y <= one[1] and (x, y) != one for x, y in points)
    ]
    assert sorted(zip(front.x, front.y, strict=True)) == sorted(best)
    assert all(text.startswith("update ") for text in front.texts)
    assert [*dots["late-binding"].x, *dots["late-binding"].y] == pytest.approx([-2.0, -25.0])
