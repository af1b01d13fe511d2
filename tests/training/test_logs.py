from __future__ import annotations

import csv
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pointsman.training.logs import FIRST_COLUMNS, NEWS, CsvLog, Curves, update_of


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "progress.csv"


def test_a_new_name_is_a_new_column(path: Path) -> None:
    log = CsvLog(path, last_update=0)
    log.append({"update": 1, "entropy": 0.123456789})
    log.append({"update": 2, "entropy": 0.1, "eval_score": -0.5, "reward/age": 3.0})
    log.append({"update": 3, "entropy": float("nan")})
    rows = read(path)
    assert [row["reward/age"] for row in rows] == ["", "3", ""]
    assert [row["entropy"] for row in rows] == ["0.1234568", "0.1", "nan"]
    assert list(rows[0])[: len(FIRST_COLUMNS)] == list(FIRST_COLUMNS)


def test_rows_that_will_be_written_again_go(path: Path) -> None:
    log = CsvLog(path, last_update=0)
    for update in range(1, 6):
        log.append({"update": update, "x": update})
    resumed = CsvLog(path, last_update=3)
    resumed.append({"update": 4, "x": 40})
    assert [(row["update"], row["x"]) for row in read(path)] == [
        ("1", "1"),
        ("2", "2"),
        ("3", "3"),
        ("4", "40"),
    ]


def test_a_row_cut_off_by_a_kill_goes_too(path: Path) -> None:
    log = CsvLog(path, last_update=0)
    log.append({"update": 1, "x": 1})
    log.append({"update": 2, "x": 2})
    text = path.read_text()
    for length in range(text.index("\n2") + 2, len(text)):
        path.write_text(text[:length])
        CsvLog(path, last_update=2)
        rows = read(path)
        assert rows[0]["update"] == "1"
        assert len(rows) == 1 or rows[1]["x"] == "2"


def test_tensorboard_has_the_same_names_and_numbers(tmp_path: Path) -> None:
    with Curves(tmp_path, last_update=0) as curves:
        curves.append({"update": 1, "timesteps": 100, "reward/age": -0.5})
        curves.append({"update": 2, "timesteps": 200, "reward/age": -0.25, "eval_score": 1.0})
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert set(board.Tags()["scalars"]) == {"timesteps", "reward/age", "eval_score"}
    points = [(event.step, event.value) for event in board.Scalars("reward/age")]
    assert points == [(1, -0.5), (2, -0.25)]


def test_actions_are_a_histogram_in_tensorboard(tmp_path: Path) -> None:
    with Curves(tmp_path, last_update=0) as curves:
        curves.append({"update": 1, "action_frac/0": 0.1, "action_frac/1": 0.6, "action_frac/2": 0.3})
        curves.append({"update": 2, "x": 1.0})
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    (event,) = board.Histograms("actions")
    assert event.step == 1
    assert event.histogram_value.bucket_limit == [0.5, 1.5, 2.5]
    assert event.histogram_value.bucket == pytest.approx([0.1, 0.6, 0.3])


def test_news_are_kept_as_they_were_said(tmp_path: Path) -> None:
    with Curves(tmp_path, last_update=0) as curves:
        curves.append({"update": 1, "x": 1.0})
        assert not (tmp_path / NEWS).exists()
        curves.append({"update": 2, "x": 1.0}, ["update 2: KL too high", "update 2: temperature 1 → 2"])
        curves.append({"update": 5, "x": 1.0}, ["update 5: behind"])
    with (tmp_path / NEWS).open("a", encoding="utf-8") as file:
        file.write("update 3: cut o")
    with Curves(tmp_path, last_update=4) as curves:
        curves.append({"update": 5, "x": 1.0}, ["update 5: ahead"])
    lines = (tmp_path / NEWS).read_text(encoding="utf-8").splitlines()
    assert lines == ["update 2: KL too high", "update 2: temperature 1 → 2", "update 5: ahead"]
    assert [update_of(line) for line in (*lines, "update", "")] == [2, 2, 5, 0, 0]
