"""A short training run by two workers that anything can be done to on the way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from training.fakes import fake_config
from training.test_runs import Silent, curves, policy

from pointsman.training import runs
from pointsman.training.stopping import StopSwitch
from pointsman.workers.processes import Launcher

NUM_UPDATES = 6
CONFIG = fake_config(
    network={"width": 8},
    run={"workers": 2, "steps": 16 * 32 * NUM_UPDATES, "evaluate_every": 2, "checkpoint_every": 4},
)


class Disturbed(Silent):
    """Does something when an update is recorded, and keeps the news."""

    def __init__(self, at_update: int, disturb: Callable[[], None]) -> None:
        self.at_update, self.disturb = at_update, disturb
        self.said: list[str] = []

    def row(self, row: Any) -> None:
        if row["update"] == self.at_update:
            self.disturb()

    def news(self, news: Any) -> None:
        self.said.append(str(news))


def train(folder: Path, launcher: Launcher, show: Silent | None = None) -> runs.Result:
    return runs.start(CONFIG, folder, show or Silent(), StopSwitch(), launcher=launcher)


def assert_same(one: Path, other: Path) -> None:
    """Policies and curves, to the last bit."""
    assert policy(one) == policy(other)
    assert policy(one, "best") == policy(other, "best")
    assert curves(one) == curves(other)
