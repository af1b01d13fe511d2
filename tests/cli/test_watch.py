from __future__ import annotations

import io
import json
import os
import threading
import time
from pathlib import Path

import pytest
from report.factories import NUM_UPDATES, make_rows, make_run
from rich.console import Console

from pointsman.cli.watch import QUIET_S, START_S, Tail, draw, how_it_ended
from pointsman.training.logs import CsvLog

from .conftest import Cli
from .test_bad_input import check


def finish(folder: Path, update: int = NUM_UPDATES) -> None:
    (folder / "checkpoints").mkdir(exist_ok=True)
    (folder / "checkpoints" / f"state-{update:08d}.safetensors").touch()


def age(folder: Path, seconds: float) -> None:
    then = time.time() - seconds
    for path in (folder, *folder.iterdir()):
        os.utime(path, (then, then))


def test_a_finished_run_is_shown_at_once(cli: Cli, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", make_rows())
    finish(folder)
    result = cli("watch", folder)
    assert (result.status, result.err) == (0, "")
    lines = result.out.splitlines()
    assert len(lines) == 6 + 2 + 1
    assert lines[0].startswith("update 10  15%  score 0.03333 (baseline 0)  entropy 0.8333  KL 0.00")
    assert lines[2:5:2] == ["update 20: temperature 1 → 1.5, plateau", "update 30: KL <too> far"]
    assert lines[-1] == f"finished after update {NUM_UPDATES}; next: pointsman report {folder}"


def test_a_run_is_followed_until_its_end(cli: Cli, tmp_path: Path) -> None:
    rows = make_rows()
    folder = make_run(tmp_path / "run", rows[:5])

    def go_on() -> None:
        log = CsvLog(folder / "progress.csv", 5)
        for row in rows[5:]:
            log.append(row)
            time.sleep(0.02)
        finish(folder)

    thread = threading.Thread(target=go_on)
    thread.start()
    result = cli("watch", folder)
    thread.join()
    assert [line.split()[1] for line in result.out.splitlines() if "score" in line] == [
        "10",
        "20",
        "30",
        "40",
        "50",
        "60",
    ], "every evaluation once"
    assert result.out.splitlines()[-1].startswith("finished after update 60; ")


def test_a_run_without_rows_is_waited_for_and_says_so(cli: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    age(folder, START_S + 1)  # so that it does not wait for long
    first, *_ = cli("watch", folder).out.splitlines()
    assert first == f"waiting for the first update in {folder}; Ctrl-C ends it"


def test_only_whole_rows_count_and_new_columns_start_over(tmp_path: Path) -> None:
    path = tmp_path / "progress.csv"
    tail = Tail(path)
    assert not tail.read()
    path.write_text("update,x\n1,5\n2,")
    assert tail.read() and tail.rows == [{"update": 1.0, "x": 5.0}]
    assert not tail.read()
    with path.open("a") as file:
        file.write("nan\n3\n,,,\n")
    assert tail.read() and tail.rows[1:] == [{"update": 2.0}, {"update": 3.0}, {"update": 0.0}]
    path.write_text("update,x,y\n1,5,6\n")
    assert tail.read() and tail.rows == [{"update": 1.0, "x": 5.0, "y": 6.0}]


def test_how_runs_end(tmp_path: Path) -> None:
    rows = make_rows()
    folder = make_run(tmp_path / "run", rows)
    assert how_it_ended(folder, rows) is None, "the last state is not saved yet"
    age(folder, QUIET_S + 5)
    ended = how_it_ended(folder, rows)
    assert ended is not None and ended.startswith(
        "nothing new for 65 s, the run stopped after update 60; to go"
    )
    slow = [row | {"elapsed_s": 100.0 * row["update"]} for row in rows]
    assert how_it_ended(folder, slow) is None, "its rows come more slowly"
    assert how_it_ended(folder, []) is None
    age(folder, START_S + 5)
    assert "before its first update" in str(how_it_ended(folder, []))
    (folder / "stopped.json").write_text(json.dumps({"update": 60, "why": "update 60: v_loss not finite"}))
    assert str(how_it_ended(folder, rows)).startswith(
        "stopped by itself: update 60: v_loss not finite; to go on"
    )


def test_the_view_has_progress_curves_evaluations_and_news(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", make_rows())
    console = Console(file=io.StringIO(), width=110)
    console.print(draw(folder, make_rows()))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    for part in ("update 60, 6,000 decisions", "98%", "60 decisions/s (environment 28%", "(best)", "random"):
        assert part in text
    for curve in ("return", "score", "entropy", "KL"):
        assert any(line.startswith(f"{curve} ") and "▁" in line for line in text.splitlines())
    assert "update 30: KL <too> far" in text
    console.print(draw(folder, []), draw(folder, [{"update": 1.0}]))


def test_bad_input(cli: Cli, tmp_path: Path) -> None:
    check(cli("watch", tmp_path / "nosuch"), "does not exist; name a directory that `pointsman train` made")
    (tmp_path / "notes.txt").write_text("")
    check(cli("watch", tmp_path), "has no config.yaml, progress.csv, meta.json")


@pytest.mark.parametrize("text", ["", "\0\0", "update\n", "no commas here\n\n\n"])
def test_odd_files_end_in_a_line(cli: Cli, tmp_path: Path, text: str) -> None:
    folder = make_run(tmp_path / "run", [])
    (folder / "progress.csv").write_text(text)
    age(folder, START_S + QUIET_S)
    result = cli("watch", folder)
    assert result.status == 0 and "nothing new for 6 min" in result.out
