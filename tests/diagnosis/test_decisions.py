"""Logs with one row a decision: shares follow from the column of actions, and noise stays noise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pointsman.diagnosis.curves import RunLog
from pointsman.diagnosis.findings import Diagnosis, diagnose
from pointsman.diagnosis.readers import read_run

NUM = 3000
DONE = np.arange(NUM) / NUM
UNIFORM = np.full(NUM, 0.25)
# 74 % of all decisions for one of four replicas, 91 % of the last: the others share the rest.
COLLAPSING = np.interp(DONE, [0.0, 0.7, 1.0], [0.47, 0.91, 0.91])
LEARNING = np.interp(DONE, [0.0, 1.0], [0.25, 0.6])
PER_UPDATE = 50


def entropy_of(share: Any) -> Any:
    return -(share * np.log(share) + (1 - share) * np.log((1 - share) / 3))


def decisions(seed: int, share: Any) -> dict[str, Any]:
    """Of a policy that chooses replica 2 with this probability. Rewards are noise around a constant."""
    rng = np.random.default_rng(seed)
    return {
        "step": np.arange(NUM),
        "selected_replica": np.where(rng.random(NUM) < share, 2, rng.choice([0, 1, 3], NUM)),
        "reward": rng.normal(-0.25, 1.5, NUM),
        "entropy": entropy_of(share) + rng.normal(0.0, 0.02, NUM),
        "approx_kl": np.abs(rng.normal(0.01, 0.003, NUM)),
        "explained_var": rng.normal(0.4, 0.2, NUM),
        "temperature": np.ones(NUM),
    }


def write(path: Path, columns: dict[str, Any]) -> Path:
    rows = zip(*columns.values(), strict=True)
    lines = [
        ",".join(f"{cell:.6g}" if isinstance(cell, float) else str(cell) for cell in row) for row in rows
    ]
    path.write_text("\n".join([",".join(columns), *lines]) + "\n")
    return path


def read(tmp_path: Path, columns: dict[str, Any]) -> RunLog:
    return read_run(write(tmp_path / "log.csv", columns))


def names(diagnosis: Diagnosis) -> list[str]:
    return [one.name for cause in diagnosis.findings for one in (cause, *cause.symptoms)]


def test_shares_follow_from_the_column(tmp_path: Path) -> None:
    columns = decisions(0, COLLAPSING)
    log = read(tmp_path, columns)
    shares = log.group("action_share")
    assert set(shares) == {"0", "1", "2", "3"}
    assert sum(series.y for series in shares.values()) == pytest.approx(np.ones(log.num_rows))
    parts = np.array_split(columns["selected_replica"] == 2, log.num_rows)
    assert shares["2"].y == pytest.approx([part.mean() for part in parts])
    assert log.series("entropy_frac").y[-1] == pytest.approx(entropy_of(0.91) / np.log(4), abs=0.02)
    assert log.x_name == "timesteps" and log.x[-1] == NUM - 1
    assert any("3,000 decisions" in note for note in log.notes)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", ["selected_replica", "action", "chosen_server", "replica_id", "Chosen Node"])
def test_a_policy_that_ends_with_one_of_four_replicas_is_named_first(
    tmp_path: Path, seed: int, name: str
) -> None:
    columns = decisions(seed, COLLAPSING)
    assert np.mean(columns["selected_replica"] == 2) == pytest.approx(0.76, abs=0.03)
    columns = {name if key == "selected_replica" else key: values for key, values in columns.items()}
    diagnosis = diagnose(read(tmp_path, columns))
    first = diagnosis.findings[0]
    assert (first.name, first.severity) == ("one-entity-collapse", "bad")
    assert "are for 2, one of 4" in first.evidence
    overall = np.mean(decisions(seed, COLLAPSING)["selected_replica"] == 2)
    assert first.figures["overall"] == pytest.approx(overall, abs=0.001)
    assert first.figures["action_share/2"] == pytest.approx(0.91, abs=0.03)
    assert {"slow-drift", "best-early", "overshoot"}.isdisjoint(names(diagnosis))


def test_replicas_with_names(tmp_path: Path) -> None:
    columns = decisions(0, COLLAPSING)
    columns["selected_replica"] = [f"gpu-{number}" for number in columns["selected_replica"]]
    first = diagnose(read(tmp_path, columns)).findings[0]
    assert first.name == "one-entity-collapse"
    assert "for gpu-2" in first.evidence


@pytest.mark.parametrize("seed", range(20))
def test_a_policy_that_spreads_is_not_accused(tmp_path: Path, seed: int) -> None:
    """Its rewards are pure noise, so that nothing is gained may be said; nothing else."""
    assert set(names(diagnose(read(tmp_path, decisions(seed, LEARNING))))) <= {"no-gain"}


def test_uniform_to_the_end_is_stuck(tmp_path: Path) -> None:
    assert diagnose(read(tmp_path, decisions(0, UNIFORM))).findings[0].name == "stuck-at-uniform"


def test_negative_actions_are_no_ops(tmp_path: Path) -> None:
    columns = decisions(0, UNIFORM)
    rng = np.random.default_rng(0)
    columns["selected_replica"] = np.where(rng.random(NUM) < 0.8 * DONE, -1, columns["selected_replica"])
    log = read(tmp_path, columns)
    assert log.series("noop_frac").y[-5:].mean() == pytest.approx(0.77, abs=0.06)
    assert "-1" not in log.group("action_share")


def test_clipped_rewards_are_seen_in_single_decisions(tmp_path: Path) -> None:
    columns = decisions(0, LEARNING)
    columns["reward"] = np.clip(columns["reward"], -1.0, 0.79)
    log = read(tmp_path, columns)
    raw = columns["reward"]
    assert log.series("reward_clipped_frac").y.mean() == pytest.approx(np.mean((raw == -1.0) | (raw == 0.79)))
    assert diagnose(log).findings[0].name == "reward-saturation"
    columns["reward"] = (columns["reward"] > 0).astype(float)  # two values: no clip
    assert not read(tmp_path, columns).has("reward_clipped_frac")


def test_nan_between_is_not_divergence_but_nan_to_the_end_is(tmp_path: Path) -> None:
    columns = decisions(0, LEARNING)
    columns["approx_kl"][np.arange(NUM) % 50 != 0] = np.nan
    assert "diverged" not in names(diagnose(read(tmp_path, columns)))
    columns["entropy"][2000:] = np.nan
    first = diagnose(read(tmp_path, columns)).findings[0]
    assert first.name == "diverged"
    assert first.began_at == pytest.approx(2000, abs=NUM / 30)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("action", np.random.default_rng(0).normal(size=100)),  # of a robot
        ("action", np.arange(100)),
        ("action", np.ones(100, int)),
        ("worker", np.arange(100) % 4),  # who wrote the row
    ],
)
def test_a_column_that_does_not_say_who_was_chosen_folds_nothing(
    tmp_path: Path, name: str, values: Any
) -> None:
    columns = {"update": np.arange(100), name: values, "entropy": np.ones(100)}
    assert read(tmp_path, columns).num_rows == 100


@pytest.mark.parametrize("total", [1.0, 588.0])
def test_counts_of_actions_an_update_are_shares_too(tmp_path: Path, total: float) -> None:
    share = np.interp(np.arange(60) / 60, [0.0, 0.7, 1.0], [0.47, 0.91, 0.91])
    columns = {"update": np.arange(60)}
    columns |= {f"action_{i}": total * (share if i == 2 else (1 - share) / 3) for i in range(4)}
    log = read(tmp_path, columns)
    assert log.series("action_frac_max").y == pytest.approx(share, abs=1e-4)
    first = diagnose(log).findings[0]
    assert (first.name, first.severity) == ("one-entity-collapse", "bad")
    assert "91 % at last" in first.evidence


# Rows of two kinds: one a decision, one after each update ---------------------------------------------------


def two_kinds(tmp_path: Path, form: str) -> Path:
    """An update after every 50 decisions; its KL and explained variance stand in its row alone."""
    columns = decisions(0, COLLAPSING)
    rng = np.random.default_rng(1)
    decision_names, update_names = (
        ["step", "selected_replica", "reward"],
        ["update", "approx_kl", "explained_var"],
    )
    update_names += ["entropy", "v_loss"]
    lines = []
    if form in ("one header each", "no header for updates"):
        lines.append(",".join(decision_names))
    if form == "one header each":
        lines.append(",".join(update_names))
    if form == "one header for all":
        lines.append(",".join([*decision_names, *update_names]))
    if form == "updates first":
        lines.append(",".join(update_names))
    for i in range(NUM):
        if form == "a header at every change" and i % PER_UPDATE == 0:
            lines.append(",".join(decision_names))
        row = [str(i), str(columns["selected_replica"][i]), f"{columns['reward'][i]:.4f}"]
        empty = [""] * len(update_names)
        lines.append(",".join([*row, *empty] if form == "one header for all" else row))
        if i % PER_UPDATE == PER_UPDATE - 1:
            if form == "a header at every change":
                lines.append(",".join(update_names))
            entropy = entropy_of(COLLAPSING[i])
            row = [str(i // PER_UPDATE), "0.01", f"{rng.normal(0.4, 0.1):.4f}", f"{entropy:.4f}", "0.5"]
            lines.append(",".join([*[""] * 3, *row] if form == "one header for all" else row))
    path = tmp_path / "two.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("form", ["one header each", "one header for all", "a header at every change"])
def test_rows_of_two_kinds_are_told_apart(tmp_path: Path, form: str) -> None:
    log = read_run(two_kinds(tmp_path, form))
    assert log.num_rows == NUM // PER_UPDATE
    assert log.series("approx_kl_mean").y == pytest.approx(np.full(60, 0.01))
    assert log.series("entropy").y == pytest.approx(entropy_of(COLLAPSING[49::50]), abs=1e-4)
    assert np.mean(log.group("action_share")["2"].y) == pytest.approx(0.76, abs=0.03)
    assert not any("skipped" in note for note in log.notes)
    assert diagnose(log).findings[0].name == "one-entity-collapse"


@pytest.mark.parametrize(("form", "missing"), [("no header for updates", 5), ("updates first", 3)])
def test_a_kind_without_a_header_can_be_mapped(tmp_path: Path, form: str, missing: int) -> None:
    """Longer or shorter than the header: never read under the names of the other kind."""
    path = two_kinds(tmp_path, form)
    if missing == 5:
        log = read_run(path, {"approx_kl_mean": "5:2", "explained_variance": "5:3", "entropy": "5:4"})
        assert log.series("explained_variance").y.mean() == pytest.approx(0.4, abs=0.05)
    else:
        log = read_run(path, {"action": "3:2", "mean_ep_return": "3:3"})
    assert log.series("entropy").y == pytest.approx(entropy_of(COLLAPSING[49::50]), abs=1e-4)
    assert any(f"have {missing} cells and no header of their own" in note for note in log.notes)
    assert diagnose(log).findings[0].name == "one-entity-collapse"
