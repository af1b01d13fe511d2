"""What others call the columns: usual trainers', home-made ones', and what is said of those nobody knows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pointsman.diagnosis.readers import read_run

from .made import log_of, write
from .test_decisions import COLLAPSING, decisions
from .test_decisions import write as write_rows

OURS = {"reward": "mean_ep_return", "kl": "approx_kl_mean", "entropy": "entropy"}
OURS |= {"explained_var": "explained_variance", "update": "update"}


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("entropy", "train/entropy"),
        ("entropy", "loss/entropy"),
        ("entropy", "Entropy"),
        ("entropy", "policy/entropy_avg"),
        ("entropy", "ppo-seed1 - train/entropy"),  # an exported chart of Weights & Biases
        ("explained_var", "ev"),
        ("explained_var", "critic/ev"),
        ("explained_var", "misc/explained_variance"),
        ("explained_var", "ExplainedVariance"),
        ("kl", "ApproxKL"),
        ("kl", "loss/approxkl"),
        ("kl", "KL Divergence"),
        ("kl", "policy/approxkl_avg"),
        ("kl", "train/kl_approx"),
        ("reward", "AverageEpRet"),
        ("reward", "eprewmean"),
        ("reward", "MeanReward"),
        ("update", "Epoch"),
        ("update", "misc/nupdates"),
    ],
)
def test_usual_names(tmp_path: Path, ours: str, theirs: str) -> None:
    columns = log_of(0)
    log = read_run(
        write(tmp_path / "log.csv", {theirs if name == ours else name: y for name, y in columns.items()})
    )
    assert log.columns[OURS[ours]] == pytest.approx(columns[ours], rel=1e-4)
    assert log.notes == ()


def test_more_usual_names(tmp_path: Path) -> None:
    names = {
        "_step": "timesteps",
        "train/lr": "lr",
        "LossPi": "pg_loss",
        "LossV": "v_loss",
        "eplenmean": "mean_ep_length",
        "eval/ep_rew_mean": "eval_mean_return",
    }
    columns = {name: np.arange(20.0) + place for place, name in enumerate(names)}
    log = read_run(write(tmp_path / "log.csv", columns))
    for theirs, ours in names.items():
        assert log.columns[ours].tolist() == columns[theirs].tolist()


@pytest.mark.parametrize("kl", ["policy/approxkl_avg", "ppo/policy/approxkl"])
def test_kl_to_the_reference_is_not_that_of_an_update(tmp_path: Path, kl: str) -> None:
    """Language models: how far from the first policy, which may well grow."""
    columns = log_of(0)
    names = {"kl": kl, "reward": "objective/rlhf_reward", "entropy": "policy/entropy_avg"}
    theirs = {"objective/kl": 5 + columns["update"] / 50}
    theirs |= {names.get(name, name): values for name, values in columns.items()}
    log = read_run(write(tmp_path / "log.csv", theirs))
    assert log.columns["approx_kl_mean"] == pytest.approx(columns["kl"], rel=1e-4)
    assert log.columns["kl_to_reference"][0] > 5
    alone = {name: values for name, values in theirs.items() if name != kl}
    assert not read_run(write(tmp_path / "log.csv", alone)).has("approx_kl_mean")


def test_tianshou(tmp_path: Path) -> None:
    columns = log_of(0)
    theirs = {
        "update/env_step": 2048 * columns["update"],
        "train/returns_stat/mean": columns["reward"],
        "update/loss/ent": columns["entropy"],
        "update/loss/vf": columns["kl"],
    }
    log = read_run(write(tmp_path / "log.csv", theirs))
    assert log.kind == "Tianshou CSV"
    assert {"timesteps", "mean_ep_return", "entropy", "v_loss"} <= set(log.columns)


def test_a_column_that_nobody_reads_is_named_where_it_may_matter(tmp_path: Path) -> None:
    columns = {("H" if name == "entropy" else name): values for name, values in log_of(0).items()}
    log = read_run(write(tmp_path / "log.csv", columns | {"entropy_bonus_lost": columns["update"]}))
    assert log.notes[0] == "H is not read; if that is what it is: --map entropy=H"
    assert read_run(tmp_path / "log.csv", {"entropy": "H"}).notes == ()


@pytest.mark.parametrize(
    "name", ["server", "backend_id", "replica_idx", "instance", "pod", "Node", "endpoint"]
)
def test_who_was_chosen(tmp_path: Path, name: str) -> None:
    columns = {(name if key == "selected_replica" else key): y for key, y in decisions(0, COLLAPSING).items()}
    assert len(read_run(write_rows(tmp_path / "log.csv", columns)).group("action_share")) == 4


def test_who_may_have_been_chosen_or_have_written_the_row(tmp_path: Path) -> None:
    columns = decisions(0, COLLAPSING)
    columns = {("worker_id" if key == "selected_replica" else key): y for key, y in columns.items()}
    log = read_run(write_rows(tmp_path / "log.csv", columns))
    assert "worker_id is not read; if that is what it is: --map action=worker_id" in log.notes


def test_the_x_axis_is_the_one_that_does_not_repeat(tmp_path: Path) -> None:
    """Trainers of language models write a rounded share of an epoch beside the step."""
    columns = log_of(0)
    columns["step"] = columns["update"].copy()
    columns["update"] = np.floor(columns["update"] / 10)
    log = read_run(write(tmp_path / "log.csv", columns))
    assert (log.x_name, log.num_rows) == ("timesteps", 150)
