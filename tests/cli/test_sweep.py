"""`pointsman sweep`, with workers in threads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from workers.threads import Threads

from pointsman.cli import sweep

from .conftest import Cli

CONFIG = """\
env: {kind: training.fakes}
network: {width: 16, depth: 1}
ppo: {minibatch_size: 128, learning_rate: 0.003}
run: {steps: 1024, num_envs: 32, rollout_steps: 16, settle_steps: 8, headroom_steps: 0, evaluate_every: 1}
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))
    path = tmp_path / "training.yaml"
    path.write_text(CONFIG)
    return path


def test_a_sweep_from_end_to_end(
    cli: Cli, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[Threads] = []
    monkeypatch.setattr(sweep, "launcher", lambda ray: launched.append(Threads()) or launched[-1])
    out = tmp_path / "sweep"
    options = ("--search", "ppo.learning_rate=1e-6..1e-2", "--workers", 1, "--out", out, "--json")
    done = cli("sweep", config, *options, "--trials", 2)
    assert done.status == 0
    found = json.loads(done.out)
    assert [one["status"] for one in found["trials"]] == ["finished"] * 3
    scores = [one["score"] for one in found["trials"]]
    assert scores == sorted(scores, reverse=True) and len(set(scores)) == 3
    assert (out / "trials" / "02" / "checkpoints" / "best.safetensors").is_file()
    assert f"pointsman evaluate {out}/trials/" in " ".join(found["verdict"])
    for name in ("report.html", "results.json", "table.md"):
        assert (out / name).is_file()
    again = cli("sweep", config, *options, "--trials", 2)
    assert again.status == 0 and json.loads(again.out)["trials"] == found["trials"]
    assert len(launched) == 1  # there was nothing left to train
    other = cli("sweep", config, *options, "--trials", 2, "--set", "ppo.num_epochs=1")
    assert other.status == 2 and "holds a sweep with another configuration" in other.err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "nothing to vary"),
        (("--search", "network.widht=1,2"), "network.widht = 1: unknown key; did you mean 'width'?"),
        (("--search", "ppo.minibatch_size=64,1024"), "an update has 512 decisions"),
        (("--search", "run.steps=1..9"), "must be the same for all trials; give --steps"),
        (("--search", "network.width=8,16", "--search", "network.width=32,64"), "given twice"),
        (("--search", "network.width=8,16", "--workers", -1), "is negative"),
    ],
)
def test_bad_input_is_refused_before_anything_is_trained(
    cli: Cli, config: Path, tmp_path: Path, options: tuple[object, ...], said: str
) -> None:
    done = cli("sweep", config, "--out", tmp_path / "sweep", *options)
    assert done.status == 2
    assert said in done.err and done.err.count("\n") == 1
    assert not (tmp_path / "sweep").exists()


@pytest.mark.parametrize("options", [("--objective", "tial"), ("--search", "env.objective=mean,tial")])
def test_what_an_environment_refuses_is_an_error_and_no_table_of_trials_that_failed(
    cli: Cli, tmp_path: Path, options: tuple[str, str]
) -> None:
    search = ("--search", "network.width=8,16", "--out", tmp_path / "sweep")
    done = cli("sweep", "--preset", "quick", *search, *options)
    assert done.status == 2
    assert "= 'tial': unknown objective; did you mean 'tail'?" in done.err
    assert not (tmp_path / "sweep").exists()
