"""Several runs in one file are judged one by one, or refused; never are they mixed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pointsman.cli.main import main
from pointsman.diagnosis.findings import diagnose
from pointsman.diagnosis.live import LogWatch
from pointsman.diagnosis.readers import read_run, read_runs
from pointsman.errors import InputError

from .made import HOME_ROWS as ROWS
from .made import around, log_of, write

DONE = np.arange(ROWS) / ROWS
COLLAPSED: dict[str, Any] = {"entropy": 1.38 * np.exp(-12 * DONE) + 0.003}
COLLAPSED["reward"] = around(-190.0, 8.0, 0)


def seeds(order: str, **names: str) -> dict[str, Any]:
    """Three runs that collapse, then one that learns; stacked, or taking turns."""
    runs = [
        log_of(seed, **(COLLAPSED if seed < 3 else {})) | {"seed": np.full(ROWS, seed)} for seed in range(4)
    ]
    columns = {name: np.array([run[name] for run in runs]) for name in runs[0]}
    return {
        names.get(name, name): (values if order == "stacked" else values.T).ravel()
        for name, values in columns.items()
    }


@pytest.mark.parametrize("order", ["stacked", "in turn"])
@pytest.mark.parametrize("name", ["seed", "run_id", "Trial"])
def test_each_seed_is_judged(tmp_path: Path, order: str, name: str) -> None:
    logs = read_runs(write(tmp_path / "log.csv", seeds(order, seed=name)))
    assert [log.source.rpartition(", ")[2] for log in logs] == [f"{name} {seed}" for seed in range(4)]
    assert [log.num_rows for log in logs] == [ROWS] * 4
    firsts = [[one.name for one in diagnose(log).findings][:1] for log in logs]
    assert firsts == [["entropy-collapse"]] * 3 + [[]]


def test_the_worst_comes_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "log.csv", seeds("in turn"))
    assert main(["diagnose", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("holds 4 runs")
    assert lines[1:3] == ["  bad: seed 0, seed 1, seed 2", "  clean: seed 3"]
    assert main(["diagnose", str(path), "--json"]) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [one["verdict"] for one in runs] == ["wrong", "wrong", "wrong", "clean"]


def test_without_a_column_that_tells_them_apart_they_are_refused(tmp_path: Path) -> None:
    columns = seeds("stacked")
    del columns["seed"]
    path = write(tmp_path / "log.csv", columns)
    with pytest.raises(InputError, match="has each update about 4 times"):
        read_run(path)
    with pytest.raises(InputError, match="name them in a column seed"):
        LogWatch(path).read()


def test_where_one_run_is_asked_for_several_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"holds 4 runs: seed 0, seed 1, seed 2, seed 3; give each a file"):
        read_run(write(tmp_path / "log.csv", seeds("stacked")))


def test_a_nan_belongs_to_the_seed_that_has_it(tmp_path: Path) -> None:
    columns = seeds("in turn")
    columns["kl"][(columns["seed"] == 1) & (columns["update"] > 100)] = np.nan
    logs = read_runs(write(tmp_path / "log.csv", columns))
    assert [dict(log.broken_at) for log in logs] == [{}, {"approx_kl_mean": 100}, {}, {}]


def test_a_seed_that_changes_from_row_to_row_is_no_run_of_its_own(tmp_path: Path) -> None:
    columns = {**log_of(0), "seed": np.arange(float(ROWS)) % 4}
    assert len(read_runs(write(tmp_path / "log.csv", columns))) == 1


def test_rows_of_one_update_are_merged(tmp_path: Path) -> None:
    """Minibatches, episodes, or runs that take turns: nobody can tell, so it is said."""
    columns = seeds("in turn")
    del columns["seed"]
    log = read_run(write(tmp_path / "log.csv", columns))
    assert log.num_rows == ROWS
    assert f"{ROWS} values of update come in several rows; what was written last counts" in log.notes


def test_workers_of_a_router_are_no_runs(tmp_path: Path) -> None:
    columns = {**log_of(0, update=np.arange(ROWS) // 30.0), "worker": np.arange(float(ROWS)) % 4}
    assert len(read_runs(write(tmp_path / "log.csv", columns))) == 1


def test_an_export_of_several_runs_is_refused(tmp_path: Path) -> None:
    columns = log_of(0)
    update = columns.pop("update")
    both = {f"{run} - {name}": values for run in ("a", "b") for name, values in columns.items()}
    with pytest.raises(InputError, match="has columns of 2 runs: a, b; export each into a file of its own"):
        read_run(write(tmp_path / "log.csv", {"update": update, **both}))
    one = {name: values for name, values in both.items() if name.startswith("a")}
    assert read_run(write(tmp_path / "log.csv", {"update": update, **one})).num_rows == ROWS


def test_rows_that_were_merged_are_said(tmp_path: Path) -> None:
    columns = log_of(0, update=np.sort(np.arange(ROWS) % 120.0))
    log = read_run(write(tmp_path / "log.csv", columns))
    assert log.num_rows == 120
    assert "30 values of update come in several rows; what was written last counts" in log.notes
