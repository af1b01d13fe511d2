"""`pointsman train`, on the fake problem of tests/training; presets are only read."""

from __future__ import annotations

import io
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from pointsman.errors import InputError

from .conftest import Cli

CONFIG = """\
env: {kind: training.fakes}
network: {width: 8, depth: 1}
ppo: {minibatch_size: 128}
run: {steps: 1024, num_envs: 32, rollout_steps: 16, settle_steps: 8, headroom_steps: 4, evaluate_every: 1}
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "fake.yaml"
    path.write_text(CONFIG)
    return path


def test_train_says_how_it_goes_and_where_it_is(cli: Cli, config: Path) -> None:
    result = cli("train", config)
    assert result.status == 0
    assert result.out.splitlines()[0].startswith("trained     1,024 decisions, 2 updates in ")
    assert "next        pointsman report runs/fake-1" in result.out
    lines = result.err.splitlines()
    assert "training in runs/fake-1: 1,024 decisions, 1 × 32 environments" in lines
    assert any(line.startswith("before training: score -0.") for line in lines)
    evaluations = [line for line in lines if line.startswith("update ")]
    assert len(evaluations) == 2
    for word in ("score", "(baseline -0.5)", "entropy", "KL", "decisions/s (environment"):
        assert word in evaluations[0]


def test_options_reach_the_configuration(cli: Cli, config: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    options = ("--steps", 512, "--seed", 5, "--objective", "mean", "--set", "ppo.num_epochs=1")
    result = cli("train", config, "--out", out, "--json", *options)
    assert result.status == 0
    assert (result.json["update"], result.json["num_decisions"]) == (1, 512)
    written = (out / "config.yaml").read_text()
    for line in ("objective: mean", "seed: 5", "num_epochs: 1", "steps: 512", "minutes: null"):
        assert line in written
    again = cli("train", config, "--out", out)
    assert again.status == 2
    assert "exists; name another directory, or go on with --resume" in again.err
    longer = cli("train", "--resume", out, "--steps", 1024, "--json")
    assert longer.json["update"] == 2


def test_a_run_of_minutes_ends_in_time(cli: Cli, config: Path, tmp_path: Path) -> None:
    result = cli("train", config, "--out", tmp_path / "run", "--minutes", 0.02, "--json")
    assert 0.6 <= result.json["elapsed_s"] < 30  # of an update, at most half would have been too late
    again = cli("train", "--resume", tmp_path / "run")
    assert again.status == 2 and "has reached its end (0.02 min); nothing is left to do" in again.err


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--minutes", 1e-6), "no update was made"),
        (
            ("--set", "ppo.critic_first=2"),
            "only the critic learns in the first updates, of which 2 were made",
        ),
    ],
)
def test_a_run_that_learned_nothing_is_no_success(
    cli: Cli, config: Path, options: tuple[object, ...], why: str
) -> None:
    result = cli("train", config, *options)
    assert result.status == 1
    line = result.err.splitlines()[-1]
    assert line.startswith(f"error: nothing was learned: {why}")
    assert line.endswith("give it more time, for example: pointsman train --resume runs/fake-1 --minutes 4")


def test_a_diverging_run_ends_with_status_1_and_keeps_what_was_good(
    cli: Cli, config: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    result = cli("train", config, "--out", out, "--set", "env.poison_at_step=12")
    assert result.status == 1
    line = result.err.splitlines()[-1]
    assert line.startswith("error: training stopped: ")
    assert "not finite" in line
    assert line.endswith(f"kept: update 0, {out}/checkpoints/last.safetensors")


def test_ctrl_c_saves_at_once_and_says_how_to_go_on(cli: Cli, config: Path, tmp_path: Path) -> None:
    """In the middle of an update that would take a minute."""
    out = tmp_path / "run"
    handler = signal.getsignal(signal.SIGINT)

    asked_at: list[float] = []

    def interrupt() -> None:
        while not (out / "checkpoints" / "state-00000000.safetensors").exists():
            time.sleep(0.01)
        time.sleep(0.3)
        asked_at.append(time.process_time())
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    long_update = ("--set", "run.num_envs=256", "--set", "run.rollout_steps=4000")
    result = cli("train", config, "--out", out, "--steps", 512 * 10_000, *long_update)
    assert time.process_time() - asked_at[0] < 1.5  # of processor time: others may use this machine, too
    assert result.status == 130
    assert not (out / "progress.csv").exists()
    assert "stopping…" in result.err
    assert result.err.splitlines()[-1].endswith(f"to go on: pointsman train --resume {out}")
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--minutes", "1", "--steps", "5"], "--steps = 5: given beside --minutes; give one of the two"),
        (["--resume", ".", "--seed", "1"], "--seed = '1': given beside --resume"),
        (["--resume", "."], "--resume = '.': is not a run directory"),
        (["fake.yaml", "--preset", "quick"], "CONFIG = 'fake.yaml': given beside --preset"),
        (["fake.yaml", "fake.yaml"], "CONFIG = 'fake.yaml': a second training configuration"),
        (["--scenario", "stedy-chat"], "--scenario = 'stedy-chat': unknown scenario"),
        (
            ["--start-from", "NOBODY"],
            "--start-from = 'NOBODY': unknown policy; name `default`, a run or a checkpoint",
        ),
        (["--start-from", "defualt"], "--start-from = 'defualt': unknown policy; did you mean 'default'?"),
        (["--start-from", "random"], "--start-from = 'random': was not trained; name `default`, a run"),
        (["--start-from", "runs/nosuch"], "--start-from = 'runs/nosuch': no such file; check the path"),
        (["--set", "run.start_from=NOBODY"], "run.start_from = 'NOBODY': unknown policy; name `default`"),
        (["--scenario", "nosuch.yaml"], "CONFIG = 'nosuch.yaml': no such file"),
        (
            ["--preset", "nosuch"],
            "--preset = 'nosuch': no such preset; presets: generalist, jobs, live, own, quick",
        ),
        (["nosuch.yaml"], "CONFIG = 'nosuch.yaml': no such file"),
        (["fake.yaml", "--set", "ppo.epochs=3"], "ppo.epochs = 3: unknown key; did you mean 'num_epochs'?"),
        (
            ["fake.yaml", "--set", "env.kind=nosuch"],
            "env.kind = 'nosuch': unknown kind; kinds: jobs, live,",
        ),
        (["fake.yaml", "--set", "env.entitys=3"], "env.entitys = 3: unknown key; did you mean 'entities'?"),
        (["fake.yaml", "--objective", "speed"], "--objective = 'speed'"),
        (["fake.yaml", "--steps", "0"], "--steps = 0: must be greater than or equal to 1"),
        (["fake.yaml", "--minutes", "0"], "--minutes = 0.0: must be greater than 0"),
        (["fake.yaml", "--set", "run.steps=0"], "run.steps = 0: must be greater than or equal to 1"),
        (["fake.yaml", "--workers", "5"], "run.num_envs = 32: no multiple of 5 workers"),
        (["fake.yaml", "--set", "ppo.minibatch_size=4096"], "an update has 512 decisions"),
        (["fake.yaml", "--set", "run.minutes=1"], "run.minutes = 1.0: given beside run.steps"),
    ],
)
def test_bad_input_is_one_line(cli: Cli, config: Path, arguments: list[str], message: str) -> None:
    result = cli("train", *arguments)
    assert result.status == 2
    assert len(result.err.splitlines()) == 1
    assert message in result.err
    assert not Path("runs").exists()


def test_the_live_view_draws_learning_and_evaluations(tmp_path: Path) -> None:
    from rich.console import Console
    from rich.live import Live

    from pointsman.cli.training_view import LiveView

    row = {
        "update": 3.0,
        "timesteps": 1536.0,
        "fraction_done": 0.25,
        "elapsed_s": 30.0,
        "steps_per_s": 2000.0,
    }
    row |= {"time/env_s": 1.0, "time/inference_s": 1.0, "time/update_s": 2.0, "entropy_frac": 0.5, "lr": 1e-3}
    row |= {"approx_kl_mean": 0.01, "clip_frac": 0.1, "explained_variance": 0.8, "noop_frac": 0.0}
    row |= {"temperature": 1.0, "eval_score": 0.2, "eval_baseline_score": 0.0, "eval_random_return": -7.0}
    row |= {"eval_mean_return": 0.3, "eval_min_block_return": 0.1, "eval_block0_return": 5.5}
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    view = LiveView(Live(console=console))
    view.row(row)
    view.row({**row, "update": 4.0, "eval_score": 0.1})
    with console.capture() as capture:
        console.print(view._draw(row))
    text = capture.get()
    assert "2,000 decisions/s (environment 25%, inference 25%, update 50%)" in text
    assert "25%, 1:30 left" in text
    lines = [line.split() for line in text.splitlines()]
    assert ["update", "3", "(best)", "0.2", "0", "0.3", "0.1"] in lines
    assert ["update", "4", "0.1", "0", "0.3", "0.1"] in lines
    assert ["random", "-7"] in lines
    assert "5.5" not in text  # blocks are for the log


def test_help_shows_an_example(cli: Cli) -> None:
    result = cli("train", "--help")
    assert "Example: pointsman train my-cluster.yaml --out runs/mine" in result.out
    for option in ("--preset", "--resume", "--minutes", "--steps", "--workers", "--objective", "--json"):
        assert option in result.out


@pytest.mark.parametrize("preset", ["quick", "own", "generalist"])
def test_presets_are_valid(preset: str) -> None:
    from pointsman.training.config import load_train_config

    assert load_train_config(preset).env["kind"] == "routing"
    with pytest.raises(InputError):
        load_train_config(preset, ["env.scenario=x"])
