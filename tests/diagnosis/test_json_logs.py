"""The same log as CSV and as JSON says the same; damage is skipped and reported."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from pointsman.diagnosis.findings import diagnose
from pointsman.diagnosis.readers import read_run
from pointsman.errors import InputError

COLUMNS = ("timesteps", "mean_ep_return", "entropy", "approx_kl_mean", "explained_variance")


def rows() -> list[dict[str, float]]:
    rng = np.random.default_rng(0)
    values = ((2048.0 * k, 50 + k + rng.normal(), 1.3 - 0.005 * k, 0.01, 0.9) for k in range(80))
    return [dict(zip(COLUMNS, row, strict=True)) for row in values]


def nested(row: dict[str, float]) -> dict[str, object]:
    """As RLlib's result.json has it."""
    return {
        "num_env_steps_sampled_lifetime": row["timesteps"],
        "env_runners": {"episode_return_mean": row["mean_ep_return"]},
        "learners": {
            "default_policy": {
                "entropy": row["entropy"],
                "mean_kl_loss": row["approx_kl_mean"],
                "vf_explained_var": row["explained_variance"],
            }
        },
        "done": False,
        "hostname": "node",
    }


def test_json_lines_say_what_the_csv_says(tmp_path: Path) -> None:
    with (tmp_path / "log.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows())
    lines = tmp_path / "log.jsonl"
    lines.write_text("\n".join(json.dumps(row) for row in rows()))
    whole = tmp_path / "log.json"
    whole.write_text(json.dumps(rows()))
    expected = read_run(tmp_path / "log.csv")
    for path in (lines, whole):
        log = read_run(path)
        assert log.kind == "JSON"
        for name in COLUMNS:
            assert log.columns[name].tolist() == expected.columns[name].tolist()


def test_rllibs_results_are_recognised_in_their_folder(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text("\n".join(json.dumps(nested(row)) for row in rows()))
    log = read_run(tmp_path)
    assert log.kind == "RLlib JSON"
    assert log.series("entropy").y.tolist() == [row["entropy"] for row in rows()]
    assert log.series("mean_ep_return").y.tolist() == [row["mean_ep_return"] for row in rows()]
    assert diagnose(log).is_clean


def test_the_history_in_an_object(tmp_path: Path) -> None:
    path = tmp_path / "trainer_state.json"
    path.write_text(json.dumps({"best_metric": None, "epoch": 3.0, "log_history": rows()}))
    assert read_run(tmp_path).columns["entropy"].tolist() == [row["entropy"] for row in rows()]


def test_a_line_that_is_cut_off_is_skipped_and_said(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    text = "\n".join(json.dumps(row) for row in rows())
    path.write_text(text[:-20])
    log = read_run(path)
    assert len(log.columns["entropy"]) == 79
    assert "skipped, because no JSON object: 1 line" in log.notes


def test_a_nan_in_json_is_a_number_that_broke(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    broken = [row | {"entropy": float("nan")} if k == 40 else row for k, row in enumerate(rows())]
    path.write_text("\n".join(json.dumps(row) for row in broken))
    assert read_run(path).broken_at == {"entropy": 40}


@pytest.mark.parametrize("text", ["[]", "{", "[1, 2]", '["a"]', "[" * 100_000])
def test_json_without_objects_is_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "log.json"
    path.write_text(text)
    with pytest.raises(InputError, match="holds no JSON object"):
        read_run(path)


def test_several_logs_in_a_folder_are_named(tmp_path: Path) -> None:
    for name in ("a.csv", "b.jsonl"):
        (tmp_path / name).write_text("step,entropy\n1,2\n")
    with pytest.raises(InputError, match=r"a\.csv, b\.jsonl"):
        read_run(tmp_path)
