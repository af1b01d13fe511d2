"""Run directories; and runs that are killed, stopped, damaged, and go on as if nothing had happened."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pointsman.errors import InputError
from pointsman.inference.checkpoint import Checkpoint, load_checkpoint
from pointsman.inference.space import EntitySpace
from pointsman.training import runs
from pointsman.training.config import TrainConfig, load_train_config, to_yaml
from pointsman.training.files import read_state, write_state
from pointsman.training.networks import build_network
from pointsman.training.stopping import CompileClock, CutError, StopSwitch

from .fakes import FakeEnv, FakeSpec, fake_config

TESTS = Path(__file__).parents[1]
NUM_UPDATES = 12
CONFIG = fake_config(
    run={"steps": 16 * 32 * NUM_UPDATES, "evaluate_every": 3, "checkpoint_every": 4, "headroom_steps": 4}
)


class Silent:
    def begin(self, config: TrainConfig, folder: Path, update: int) -> None: ...

    def headroom(self, headroom: Any) -> None: ...

    def prepared(self, metrics: dict[str, float]) -> None: ...

    def first_evaluation(self, metrics: dict[str, float]) -> None: ...

    def row(self, row: Any) -> None: ...

    def news(self, news: Any) -> None: ...


def fake_space() -> EntitySpace:
    return FakeEnv(FakeSpec(), 1).space


def fake_arrays() -> dict[str, Any]:
    network = build_network(CONFIG.network, fake_space(), seed=0)
    return {name: tensor.numpy() for name, tensor in network.state_dict().items()}


def start(config: TrainConfig, folder: Path) -> runs.Result:
    return runs.start(config, folder, Silent(), StopSwitch(), "pointsman train …")


def resume(folder: Path, **options: Any) -> runs.Result:
    return runs.resume(folder, Silent(), StopSwitch(), "pointsman train --resume", **options)


def policy(folder: Path, name: str = "last") -> dict[str, bytes]:
    arrays = load_checkpoint(folder / "checkpoints" / f"{name}.safetensors").arrays
    return {name: array.tobytes() for name, array in arrays.items()}


def curves(folder: Path) -> list[dict[str, str]]:
    """All columns but those that depend on the clock."""
    with (folder / "progress.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    timed = {"elapsed_s", "steps_per_s"}
    return [
        {name: cell for name, cell in row.items() if name not in timed and not name.startswith("time/")}
        for row in rows
    ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "whole"
    result = start(CONFIG, folder)
    assert (result.update, result.is_stopped) == (NUM_UPDATES, False)
    return folder


def test_a_run_directory_holds_everything(whole: Path) -> None:
    names = {str(path.relative_to(whole)) for path in whole.rglob("*") if path.is_file()}
    states = {f"checkpoints/state-{update:08d}.safetensors" for update in (8, 12)}  # the last two
    files = {"config.yaml", "schema.json", "meta.json", "progress.csv", "evaluation.json"}
    assert files | states | {"checkpoints/last.safetensors", "checkpoints/best.safetensors"} <= names
    assert load_train_config(whole / "config.yaml") == CONFIG
    assert [row["update"] for row in curves(whole)] == [str(n + 1) for n in range(NUM_UPDATES)]
    meta = json.loads((whole / "meta.json").read_text())
    assert meta["sessions"][0]["command"] == "pointsman train …"
    schema = json.loads((whole / "schema.json").read_text())
    assert [feature["name"] for feature in schema["entity_features"]] == ["cost", "noise"]
    assert not list(whole.rglob("*.part"))


def test_policies_on_the_way_are_kept_if_asked_for(tmp_path: Path) -> None:
    run = CONFIG.run.model_copy(update={"keep": 2, "steps": 16 * 32 * 7})
    folder = tmp_path / "run"
    start(CONFIG.model_copy(update={"run": run}), folder)
    kept = sorted(path.stem for path in (folder / "checkpoints").glob("update-*"))
    assert kept == ["update-000000", "update-000006"]  # of the evaluations at 0, 3, 6 and 7
    assert load_checkpoint(folder / "checkpoints" / "update-000006.safetensors").metadata["update"] == 6


def test_a_stage_that_makes_no_sense_is_said_before_anything_is_played(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(env: FakeEnv, difficulty: dict[str, Any]) -> None:
        if "entitles" in difficulty:
            raise InputError("difficulty", difficulty, "unknown", "known: entities")

    def play(*arguments: Any) -> None:
        pytest.fail("heuristics play for the headroom before the curriculum is looked at")

    monkeypatch.setattr(FakeEnv, "set_difficulty", refuse)
    monkeypatch.setattr(runs, "find_headroom", play)
    stages = [{"difficulty": {"entities": 2}}, {"difficulty": {"entitles": 3}, "from_fraction": 0.5}]
    with pytest.raises(InputError, match="entitles"):
        start(fake_config(curriculum={"stages": stages}, run={"headroom_steps": 4}), tmp_path / "run")


def test_returns_are_in_every_row_once_there_are_any(whole: Path) -> None:
    filled = [bool(row["mean_ep_return"]) for row in curves(whole)]
    assert filled == sorted(filled) and filled[-1]


def test_a_state_given_as_a_policy_says_what_to_use(whole: Path) -> None:
    with pytest.raises(InputError, match=r"to resume from, not a policy; use last\.safetensors"):
        load_checkpoint(next((whole / "checkpoints").glob("state-*")))


def test_the_configuration_written_is_the_one_read(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    rates = {"start": 1e-3, "end": 1e-4, "kind": "exponential"}
    config = fake_config(ppo={"learning_rate": rates}, warm_start={}, run={"steps": None, "minutes": 1.5})
    path.write_text(to_yaml(config))
    assert load_train_config(path) == config
    assert load_train_config(path, ["run.seed=3"]) != config


@contextmanager
def process(config: TrainConfig, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """`pointsman train` in a process of its own, on a configuration beside the run directory."""
    path = folder.with_suffix(".yaml")
    path.write_text(to_yaml(config))
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    command = [sys.executable, "-m", "pointsman", "train", str(path), "--out", str(folder)]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as running:
        yield running


def wait_for_rows(folder: Path, count: int) -> None:
    give_up_at = time.monotonic() + 300
    while not (folder / "progress.csv").exists() or len(curves(folder)) < count:
        assert time.monotonic() < give_up_at
        time.sleep(0.005)


def test_killed_and_resumed_is_the_same_to_the_last_bit(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "killed"
    with process(CONFIG, folder) as running:
        wait_for_rows(folder, 5)
        running.kill()
    assert running.returncode == -signal.SIGKILL
    assert len(curves(folder)) < NUM_UPDATES
    assert policy(folder) != policy(whole)
    result = resume(folder)
    assert result.update == NUM_UPDATES
    assert policy(folder) == policy(whole)
    assert policy(folder, "best") == policy(whole, "best")
    assert curves(folder) == curves(whole)  # no row twice
    sessions = json.loads((folder / "meta.json").read_text())["sessions"]
    assert [session["from_update"] for session in sessions] in ([0, 4], [0, 8])


def test_stopped_on_request_and_resumed_is_the_same_too(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "stopped"
    with process(CONFIG, folder) as running:
        wait_for_rows(folder, 1)
        running.send_signal(signal.SIGTERM)
        assert running.stderr is not None
        said = running.stderr.read()
    assert running.returncode == 130
    assert f"to go on: pointsman train --resume {folder}" in said
    state = runs.newest_state(folder)
    assert state is not None
    assert state.values["num_updates"] == len(curves(folder)) < NUM_UPDATES
    resume(folder)
    assert policy(folder) == policy(whole)
    assert curves(folder) == curves(whole)


class CutAtUpdate(Silent):
    """Presses the switch in the middle of an update, as a signal does."""

    def __init__(self, update: int, switch: StopSwitch) -> None:
        self._update, self._switch = update, switch

    def row(self, row: Any) -> None:
        if row["update"] == self._update:
            self.before = FakeEnv.step
            switch, before = self._switch, self.before

            def step(env: FakeEnv, actions: Any) -> Any:
                FakeEnv.step = before  # type: ignore[method-assign]
                switch.press()

            FakeEnv.step = step  # type: ignore[assignment,method-assign]


def test_cut_in_the_middle_of_an_update_is_the_same_too(whole: Path, tmp_path: Path) -> None:
    folder, stop = tmp_path / "cut", StopSwitch()
    result = runs.start(CONFIG, folder, CutAtUpdate(6, stop), stop)
    assert (result.update, result.is_stopped) == (6, True)
    assert not (folder / "finished.json").exists()
    state = runs.newest_state(folder)
    assert state is not None and state.values["num_updates"] == len(curves(folder)) == 6
    resume(folder)
    assert policy(folder) == policy(whole)
    assert curves(folder) == curves(whole)
    assert (folder / "finished.json").exists()


def test_cut_in_an_evaluation_is_the_same_too(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, stop, evaluate = tmp_path / "cut", StopSwitch(), runs.Run.evaluate

    def cut(run: runs.Run, checkpoint: Checkpoint) -> dict[str, float]:
        if checkpoint.metadata["update"] == 6:
            stop.press()
        return evaluate(run, checkpoint)

    monkeypatch.setattr(runs.Run, "evaluate", cut)
    assert runs.start(CONFIG, folder, Silent(), stop).is_stopped
    monkeypatch.undo()
    resume(folder)
    assert policy(folder) == policy(whole)
    assert curves(folder) == curves(whole)


def test_what_is_written_is_never_cut() -> None:
    stop = StopSwitch()
    stop.press()
    with pytest.raises(CutError), stop.cuttable():
        raise AssertionError("pressed before: it does not begin")
    other = StopSwitch()
    with pytest.raises(CutError), other.cuttable():
        other.press()


class SlowEvaluate:
    """An evaluation in real time: it knows how long it takes."""

    expected_s, least_s = 600.0, 700.0

    def __call__(self, checkpoint: Checkpoint) -> dict[str, float]:
        return {}


def test_minutes_hold_the_last_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "make_evaluate", lambda section: SlowEvaluate())

    def run_of(minutes: float) -> runs.Run:
        changed = CONFIG.run.model_copy(update={"steps": None, "minutes": minutes})
        config = CONFIG.model_copy(update={"run": changed})
        return runs.Run(config, tmp_path, None, Silent(), StopSwitch(), "")

    with pytest.raises(InputError, match="--minutes = 11: an update and an evaluation take about 12 min"):
        run_of(11)
    run = run_of(20)
    assert run.outlook(0).fraction_done < 0.01
    for elapsed_s, fraction in ((300.0, 0.5), (599.0, 1.0)):  # a second is left, an update takes four
        run._update_s = 4.0
        run._started = time.monotonic() - elapsed_s
        assert run.outlook(512).fraction_done == pytest.approx(fraction, abs=0.01)
    assert run.outlook(512).is_over
    run.close()


def test_time_spent_compiling_is_no_training(tmp_path: Path) -> None:
    import numba

    class Compiles(Silent):
        def row(self, row: Any) -> None:
            numba.njit(lambda x: np.sort(np.cumsum(x) + np.dot(x, x)))(np.ones(4))

    clock = CompileClock()
    started = time.monotonic()
    result = runs.start(CONFIG, tmp_path / "run", Compiles(), StopSwitch())
    clock.close()
    assert clock.elapsed_s > 0.1, "there was something to compile"
    assert result.elapsed_s <= time.monotonic() - started - clock.elapsed_s + 0.05


def test_a_damaged_state_is_passed_over(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(whole, folder)
    newest = folder / "checkpoints" / "state-00000012.safetensors"
    newest.write_bytes(newest.read_bytes()[:-100])
    (folder / "checkpoints" / "last.safetensors").unlink()
    state = runs.newest_state(folder)
    assert state is not None
    assert state.values["num_updates"] == 8
    resume(folder)
    assert policy(folder) == policy(whole)
    for path in (folder / "checkpoints").glob("state-*"):
        path.write_bytes(b"nothing")
    with pytest.raises(InputError, match="no checkpoint that can be read"):
        resume(folder)


def test_a_finished_run_can_be_made_longer(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "longer"
    shutil.copytree(whole, folder)
    with pytest.raises(InputError, match=r"has reached its end \(6,144 decisions\); nothing is left to do"):
        resume(folder)
    result = resume(folder, steps=16 * 32 * (NUM_UPDATES + 1))
    assert result.update == NUM_UPDATES + 1
    assert load_train_config(folder / "config.yaml").run.steps == 16 * 32 * (NUM_UPDATES + 1)
    assert len(curves(folder)) == NUM_UPDATES + 1


def test_nothing_is_overwritten_and_nothing_left_behind(whole: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="exists; name another directory, or go on with --resume"):
        start(CONFIG, whole)
    with pytest.raises(InputError, match="not a run directory"):
        resume(tmp_path)
    impossible = fake_config(network={"hint": "weather", "hint_strength": 1.0})
    with pytest.raises(InputError, match="weather"):
        start(impossible, tmp_path / "new" / "run")
    assert not (tmp_path / "new").exists()


def test_the_best_policy_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = iter([0.1, 0.5, 0.3, float("nan")])
    monkeypatch.setattr(runs, "make_evaluate", lambda env: lambda checkpoint: {"eval_score": next(scores)})
    run = runs.Run(CONFIG, tmp_path, None, Silent(), StopSwitch(), "")
    whole = Checkpoint(CONFIG.network, fake_space(), fake_arrays())
    for update in range(4):
        run.evaluate(replace(whole, metadata={"update": update}))
    evaluation = json.loads((tmp_path / "evaluation.json").read_text())
    assert evaluation["best"] == {"update": 1, "eval_score": 0.5}
    assert evaluation["last"] == {"update": 3, "eval_score": None}
    assert load_checkpoint(tmp_path / "checkpoints" / "best.safetensors").metadata["update"] == 1


def test_states_are_complete_or_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state.safetensors"
    write_state(path, {"x": np.arange(3)}, {"n": 1})

    def fail(descriptor: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="no space"):
        write_state(path, {"x": np.arange(9)}, {"n": 2})
    found = read_state(path)
    assert found is not None
    assert found[0]["x"].tolist() == [0, 1, 2]
    assert found[1] == {"n": 1}
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
