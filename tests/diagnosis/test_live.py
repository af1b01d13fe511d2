"""A training run that goes wrong says so while it goes, once, and a resumed one does not say it again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from training.fakes import fake_config
from training.test_runs import Silent

from pointsman.training import runs
from pointsman.training.safety import Alert, SafetyError
from pointsman.training.stopping import StopSwitch

STEPS = 16 * 32


class Listener(Silent):
    def __init__(self) -> None:
        self.heard: list[Alert] = []

    def news(self, news: Any) -> None:
        if isinstance(news, Alert):
            self.heard.append(news)


def config(steps: int, **ppo: Any) -> Any:
    run = {"steps": STEPS * steps, "evaluate_every": 2, "checkpoint_every": 4, "headroom_steps": 0}
    return fake_config(run=run, ppo={"learning_rate": 0.3, "target_kl": 0.01, **ppo})


def test_a_run_that_goes_wrong_says_so_once(tmp_path: Path) -> None:
    listener = Listener()
    runs.start(config(20), tmp_path / "run", listener, StopSwitch())
    brakes = [one for one in listener.heard if one.name == "kl-brake-always-on"]
    assert len(brakes) == 1
    assert 8 <= brakes[0].update < 20
    lines = (tmp_path / "run" / "news.txt").read_text().splitlines()
    assert sum("KL brake always on" in line for line in lines) == 1
    again = Listener()
    runs.resume(tmp_path / "run", again, StopSwitch(), steps=STEPS * 24)
    assert "kl-brake-always-on" not in {one.name for one in again.heard}


def test_a_healthy_run_is_quiet(tmp_path: Path) -> None:
    listener = Listener()
    runs.start(config(20, learning_rate=0.003, target_kl=0.1), tmp_path / "run", listener, StopSwitch())
    assert listener.heard == []


def test_a_run_that_the_trainer_stops_is_diagnosed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from training.fakes import FakeEnv

    from pointsman.diagnosis.findings import diagnose
    from pointsman.diagnosis.readers import read_run

    step = FakeEnv.step

    def complaining(self: FakeEnv, actions: Any) -> Any:
        return step(self, actions)._replace(is_illegal=actions == 1)

    monkeypatch.setattr(FakeEnv, "step", complaining)
    listener = Listener()
    with pytest.raises(SafetyError):
        runs.start(config(20), tmp_path / "run", listener, StopSwitch())
    assert [one.name for one in listener.heard] == ["mask-bug"]
    diagnosis = diagnose(read_run(tmp_path / "run"))
    (cause,) = diagnosis.findings
    (symptom,) = cause.symptoms
    assert (cause.name, symptom.name) == ("mask-bug", "stopped")
    assert "illegal: a mask is wrong" in symptom.evidence
