"""`pointsman diagnose`: what people and scripts see; what is no log ends in one line."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from pointsman.cli.main import main

from .made import CONFIG, healthy

Columns = dict[str, Any]
Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    def call(*arguments: object) -> tuple[int, str, str]:
        status = main(["diagnose", *map(str, arguments)])
        out, err = capsys.readouterr()
        return status, out, err

    return call


def write_csv(path: Path, columns: Columns) -> Path:
    rows = zip(*columns.values(), strict=True)
    lines = [",".join("" if np.isnan(value) else f"{value:.7g}" for value in row) for row in rows]
    path.write_text("\n".join([",".join(columns), *lines]) + "\n")
    return path


def write_run(folder: Path, columns: Columns, **run: Any) -> Path:
    folder.mkdir(exist_ok=True)
    write_csv(folder / "progress.csv", columns)
    config = {**CONFIG, "run": {**CONFIG["run"], **run}}  # type: ignore[dict-item]
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


def broken() -> Columns:
    columns = healthy()
    columns["early_stop"][:] = 1.0
    columns["num_steps"][:] = 1.0
    return columns


def test_a_finding_says_all_there_is_to_say(cli: Cli, tmp_path: Path) -> None:
    status, out, _ = cli(write_run(tmp_path / "run", broken()))
    assert status == 0
    lines = " ".join(out.split())
    for part in (
        "run directory, 120 updates",
        "bad KL brake always on since update 1",
        "100 % of the updates were stopped early",
        "approx_kl_mean",
        "cause steps so large",
        "check KL of the first minibatches",
        "turn learning rate: lower (ppo.learning_rate)",
    ):
        assert part in lines


def test_a_healthy_run_gets_a_clean_bill_with_margins(cli: Cli, tmp_path: Path) -> None:
    status, out, _ = cli(write_run(tmp_path / "run", healthy()))
    assert status == 0
    assert "clean    nothing went wrong, as far as 28 of 29 rules could judge" in out
    assert "how far from trouble" in out
    assert "> 0.05" in next(line for line in out.splitlines() if "largest KL" in line)
    assert "baseline-at-the-ceiling: no headroom" in out


def test_a_log_that_tells_almost_nothing_is_not_called_clean(cli: Cli, tmp_path: Path) -> None:
    columns = {name: healthy()[name] for name in ("update", "lr", "approx_kl_mean")}
    status, out, _ = cli(write_csv(tmp_path / "thin.csv", columns))
    assert status == 0
    assert "unclear  only 1 of 29 rules could judge this log" in out
    assert "clean " not in out


def test_json(cli: Cli, tmp_path: Path) -> None:
    status, out, _ = cli(write_run(tmp_path / "run", broken()), "--json")
    data = json.loads(out)
    assert status == 0
    assert data["findings"][0]["name"] == "kl-brake-always-on"
    assert data["findings"][0]["knobs"][0] == {
        "name": "learning rate",
        "turn": "lower",
        "key": "ppo.learning_rate",
    }
    assert not data["is_clean"]


def test_a_map(cli: Cli, tmp_path: Path) -> None:
    columns = healthy()
    path = write_csv(tmp_path / "a.csv", {"n": columns["update"], "H": columns["entropy"] * 0.0 + 1.6})
    assert cli(path)[0] == 2
    status, out, _ = cli(path, "--map", "update=n", "--map", "entropy=H")
    assert status == 0
    assert "Stuck at uniform" in out
    assert "learning rate: raise" in out  # without our keys
    assert "exploration." not in out
    status, _, err = cli(path, "--map", "entropy")
    assert (status, err) == (
        2,
        "error: --map = 'entropy': is not OURS=THEIRS; for example --map entropy=policy_entropy\n",
    )


def test_the_base_install_is_enough(sb3_style: Path) -> None:
    """Neither PyTorch nor TensorBoard: they are told to be missing."""
    lines = (
        "import sys",
        "for name in ('torch', 'tensorboard', 'tensorflow', 'gymnasium'): sys.modules[name] = None",
        "from pointsman.cli.main import main",
        f"sys.exit(main(['diagnose', {str(sb3_style)!r}]))",
    )
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Stable-Baselines3 TensorBoard" in done.stdout


@pytest.fixture
def sb3_style(tmp_path: Path) -> Path:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        for step in range(20):
            writer.add_scalar("train/entropy_loss", -0.69 + 0.01 * step, 256 * step)
            writer.add_scalar("train/approx_kl", 0.004, 256 * step)
    (path,) = tmp_path.glob("*tfevents*")
    return path


def bad_inputs(folder: Path) -> dict[str, Path]:
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere" / "poem.txt").write_text("words\n")
    (folder / "empty").mkdir()
    (folder / "events.out.tfevents.1").write_bytes(b"no event file at all, but long enough")
    files = {
        "empty.csv": b"",
        "header.csv": b"update,entropy\n",
        "one-row.csv": b"update,entropy\n1,0.5\n",
        "nan.csv": b"update,entropy,v_loss\n" + b"".join(b"%d,nan,\n" % i for i in range(20)),
        "text.csv": b"dear diary\ntoday I trained\n",
        "binary.csv": bytes(range(256)),
    }
    for name, content in files.items():
        (folder / name).write_bytes(content)
    names = [*files, "elsewhere", "empty", "events.out.tfevents.1", "nowhere"]
    return {name: folder / name for name in names}


@pytest.mark.parametrize(
    "name",
    [
        "empty.csv",
        "header.csv",
        "one-row.csv",
        "nan.csv",
        "text.csv",
        "binary.csv",
        "elsewhere",
        "empty",
        "events.out.tfevents.1",
        "nowhere",
    ],
)
def test_what_is_no_log_is_one_clear_line(cli: Cli, tmp_path: Path, name: str) -> None:
    status, out, err = cli(bad_inputs(tmp_path)[name])
    assert status == 2
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("error: RUN = ")
    assert name in err


def test_watching_tells_each_finding_once_and_ends_with_the_run(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pointsman.cli.diagnose.WATCH_EVERY_S", 0.05)
    columns, rows = broken(), len(healthy()["update"])
    folder = tmp_path / "run"
    write_run(folder, {name: values[:2] for name, values in columns.items()}, steps=2048 * rows)
    (folder / "checkpoints").mkdir()

    def train() -> None:
        for done in (40, 80, rows):
            time.sleep(0.2)
            part = {name: values[:done] for name, values in columns.items()}
            write_csv(folder / "next.csv", part).replace(folder / "progress.csv")
        (folder / "checkpoints" / f"state-{rows:08d}.safetensors").touch()

    thread = threading.Thread(target=train)
    thread.start()
    status, out, err = cli(folder, "--watch")
    thread.join()
    assert status == 0
    assert out.count("KL brake always on") == 1
    assert "finished after update 120" in err
