"""Logs of others: made by really running Stable-Baselines3 and a CleanRL-style script; RLlib's by hand."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import numpy as np
import pytest

from pointsman.diagnosis.findings import diagnose
from pointsman.diagnosis.readers import read_run
from pointsman.errors import InputError

from .made import CONFIG, found, healthy
from .others import NUM_ENVS, NUM_STEPS, NUM_UPDATES, cleanrl_style, stable_baselines


@pytest.fixture(scope="module")
def sb3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("stable_baselines3")
    folder = tmp_path_factory.mktemp("sb3")
    stable_baselines(folder, is_evaluated=True)
    return folder


@pytest.fixture(scope="module")
def cleanrl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cleanrl") / "CartPole-v1__ppo__1"
    cleanrl_style(folder)
    return folder


def sb3_rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "progress.csv").open(newline="") as file:
        return [row for row in csv.DictReader(file) if row["train/entropy_loss"]]


def test_stable_baselines_csv(sb3: Path) -> None:
    log = read_run(sb3)
    assert log.kind == "Stable-Baselines3 CSV"
    assert log.score_name == "eval_mean_return"
    rows = sb3_rows(sb3)
    assert np.allclose(log.series("entropy").y, [-float(row["train/entropy_loss"]) for row in rows])
    assert np.allclose(log.series("v_loss").y, [float(row["train/value_loss"]) for row in rows])
    assert log.series("entropy_frac").y[0] == pytest.approx(1.0, abs=0.02)
    assert log.series("early_stop").y.max() == 0.0
    diagnosis = diagnose(log)
    assert diagnosis.is_clean, [str(one) for one in diagnosis.findings]
    unjudged = {one.name: one.why for one in diagnosis.not_judged}
    assert unjudged["mask-bug"] == "no invalid_frac or eval_invalid_frac"


def test_stable_baselines_tensorboard_says_the_same(sb3: Path) -> None:
    (file,) = sb3.glob("*tfevents*")
    log, table = read_run(file), read_run(sb3)
    assert log.kind == "Stable-Baselines3 TensorBoard"
    assert log.x_name == "timesteps"
    for name in ("entropy", "approx_kl_mean", "explained_variance", "eval_mean_return"):
        assert np.allclose(log.series(name).y, table.series(name).y, rtol=1e-5)


def test_stable_baselines_that_does_not_learn(tmp_path: Path) -> None:
    pytest.importorskip("stable_baselines3")
    stable_baselines(tmp_path, learning_rate=1e-8)
    assert next(iter(found(read_run(tmp_path)))) == "flat-learning"


def test_stable_baselines_counts_epochs_so_stops_show(tmp_path: Path) -> None:
    pytest.importorskip("stable_baselines3")
    stable_baselines(tmp_path, learning_rate=0.02, target_kl=0.01)
    log = read_run(tmp_path)
    assert log.series("early_stop").y.mean() > 0.5


def test_cleanrl_tensorboard(cleanrl: Path) -> None:
    log = read_run(cleanrl)
    assert log.kind == "CleanRL TensorBoard"
    assert log.score_name == "mean_ep_return"
    assert len(log.series("entropy")) == NUM_UPDATES
    assert log.series("entropy").x[-1] == NUM_ENVS * NUM_STEPS * NUM_UPDATES
    assert log.series("approx_kl_max").y.max() < 0.05
    diagnosis = diagnose(log)
    assert diagnosis.is_clean, [str(one) for one in diagnosis.findings]
    assert {"mask-bug", "noop-collapse", "brittle"} <= {one.name for one in diagnosis.not_judged}


def test_cleanrl_that_does_not_learn(tmp_path: Path) -> None:
    cleanrl_style(tmp_path, learning_rate=1e-9)
    assert next(iter(found(read_run(tmp_path)))) == "flat-learning"


# By hand, with the column names that RLlib 2.x writes (old and new API stack): Ray is not installed.
OLD = "info/learner/default_policy/learner_stats/"
NEW = "learners/default_policy/"
RLLIB = {
    "old": {
        "update": "training_iteration",
        "timesteps": "timesteps_total",
        "mean_ep_return": "episode_reward_mean",
        "mean_ep_length": "episode_len_mean",
        "entropy": f"{OLD}entropy",
        "approx_kl_mean": f"{OLD}kl",
        "v_loss": f"{OLD}vf_loss",
        "pg_loss": f"{OLD}policy_loss",
        "explained_variance": f"{OLD}vf_explained_var",
        "lr": f"{OLD}cur_lr",
    },
    "new": {
        "update": "training_iteration",
        "timesteps": "num_env_steps_sampled_lifetime",
        "mean_ep_return": "env_runners/episode_return_mean",
        "mean_ep_length": "env_runners/episode_len_mean",
        "entropy": f"{NEW}entropy",
        "approx_kl_mean": f"{NEW}mean_kl_loss",
        "v_loss": f"{NEW}vf_loss",
        "pg_loss": f"{NEW}policy_loss",
        "explained_variance": f"{NEW}vf_explained_var",
        "lr": f"{NEW}default_optimizer_learning_rate",
    },
}


@pytest.mark.parametrize("stack", RLLIB)
def test_rllib_csv(stack: str, tmp_path: Path) -> None:
    columns = healthy()
    columns["mean_ep_return"] = 100.0 + 20.0 * columns["reward_mean"] / 0.005
    columns["mean_ep_length"] = np.full(len(columns["update"]), 1024.0)
    header = [*RLLIB[stack].values(), "config/gamma", "hostname", "date"]
    rows = [
        [*(f"{columns[ours][i]:.6g}" for ours in RLLIB[stack]), "0.99", "node-1", "2025-01-01_10-00-00"]
        for i in range(len(columns["update"]))
    ]
    path = tmp_path / "progress.csv"
    path.write_text("\n".join(",".join(row) for row in [header, *rows]) + "\n")
    log = read_run(tmp_path)
    assert log.kind == "RLlib CSV"
    for ours in RLLIB[stack]:
        assert np.allclose(log.series(ours).y, columns[ours], rtol=1e-4, atol=1e-6)
    assert log.series("gamma").y[-1] == 0.99
    assert diagnose(log).is_clean


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def numbered(*names: str, rows: int = 12) -> list[str]:
    return [",".join(str(row + 0.1 * place) for place in range(len(names))) for row in range(1, rows + 1)]


def test_any_csv_through_a_map(tmp_path: Path) -> None:
    path = write(tmp_path / "log.csv", "iter,H,my kl,score", *numbered("iter", "H", "kl", "score"))
    plain = read_run(path)
    assert plain.x_name == "update"
    assert not plain.has("entropy")
    mapped = read_run(path, {"entropy": "H", "approx_kl_mean": "my kl", "eval_mean_return": "score"})
    assert mapped.series("entropy").y[0] == pytest.approx(1.1)
    assert mapped.score_name == "eval_mean_return"
    assert mapped.label("entropy") == "H"
    with pytest.raises(InputError, match="no column 'nothing'"):
        read_run(path, {"entropy": "nothing"})


def test_usual_names_need_no_map(tmp_path: Path) -> None:
    names = {
        "global_step": "timesteps",
        "episode_reward": "mean_ep_return",
        "eval/return": "eval_mean_return",
        "Policy Entropy": "entropy",
        "kl": "approx_kl_mean",
        "train/value_loss": "v_loss",
        "explained_var": "explained_variance",
        "clipfrac": "clip_frac",
        "noop_fraction": "noop_frac",
    }
    log = read_run(write(tmp_path / "log.csv", ",".join(names), *numbered(*names)))
    for place, name in enumerate(names.values()):
        assert log.series(name).y[0] == pytest.approx(1 + 0.1 * place)


def test_our_names_win_over_usual_ones(tmp_path: Path) -> None:
    log = read_run(write(tmp_path / "log.csv", "update,kl,approx_kl_mean", *numbered("a", "b", "c")))
    assert log.series("approx_kl_mean").y[0] == pytest.approx(1.2)


def test_blocks_and_actions_give_what_rules_look_at(tmp_path: Path) -> None:
    header = "update,eval_block0_return,eval_block1_return,action_frac/0,action_frac/1,action_frac/2"
    log = read_run(write(tmp_path / "log.csv", header, *numbered(*header.split(","))))
    assert np.allclose(log.series("eval_min_block_return").y, log.series("eval_block0_return").y)
    actions = [log.series(f"action_frac/{i}").y for i in range(3)]  # these do not sum to 1: counts
    assert np.allclose(log.series("action_frac_max").y, actions[2] / np.sum(actions, axis=0))


def test_rows_written_again_after_a_resume_count_once(tmp_path: Path) -> None:
    log = read_run(write(tmp_path / "a.csv", "update,entropy", "1,0.9", "2,0.8", "3,0.7", "2,0.5", "3,0.4"))
    assert log.series("entropy").y.tolist() == [0.9, 0.5, 0.4]
    assert any("update goes back 1 times" in note for note in log.notes)


def test_a_loss_that_turns_into_nan_is_divergence(tmp_path: Path) -> None:
    rows = [f"{i},{0.5 if i < 9 else 'nan'},{'' if i % 2 else 1.0}" for i in range(1, 13)]
    log = read_run(write(tmp_path / "a.csv", "update,value_loss,eval_return", *rows))
    (finding,) = (one for one in diagnose(log).findings if one.name == "diverged")
    assert finding.began_at == 9.0


def test_entropy_of_continuous_actions_is_no_share_of_anything(tmp_path: Path) -> None:
    rows = [f"{i},{1.4 - 0.3 * i}" for i in range(1, 13)]
    log = read_run(write(tmp_path / "a.csv", "update,entropy", *rows))
    assert not log.has("entropy_frac")


def test_our_run_directory_knows_more_than_its_curves(tmp_path: Path) -> None:
    import json

    import yaml

    columns = healthy()
    rows = [
        ",".join("" if math.isnan(values[i]) else f"{values[i]:.7g}" for values in columns.values())
        for i in range(len(columns["update"]))
    ]
    write(tmp_path / "progress.csv", ",".join(columns), *rows)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    (tmp_path / "evaluation.json").write_text(json.dumps({"first": {"update": 0, "eval_score": -3.5}}))
    (tmp_path / "headroom.json").write_text("{ cut off")
    log = read_run(tmp_path)
    assert log.kind == "run directory"
    assert log.facts.setting("ppo.target_kl") == 0.03
    assert (log.score.x[0], log.score.y[0]) == (0.0, -3.5)
    assert "baseline-at-the-ceiling" in {one.name for one in diagnose(log).not_judged}
