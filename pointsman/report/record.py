"""What a run directory says of its run, whatever state it is in: cut off, broken off, or still running."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pointsman.diagnosis.curves import Array, RunLog
from pointsman.diagnosis.readers import read_facts
from pointsman.diagnosis.readers import read_run as read_log
from pointsman.errors import InputError
from pointsman.training.logs import FINISHED, NEWS, update_of

CHECKPOINTS = ("best", "last")
_OF_A_RUN = ("config.yaml", "progress.csv", "meta.json")
_REMEDY = "name a directory that `pointsman train` made"


@dataclass(frozen=True)
class RunRecord:
    folder: Path
    log: RunLog  # without columns where no update was finished
    meta: dict[str, Any]
    news: list[str]  # interventions and alerts
    problems: list[str] = field(default_factory=list)  # what is missing or cannot be read

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def num_updates(self) -> int:
        return self.log.num_rows

    @property
    def updates(self) -> Array:
        return self.log.x

    def column(self, name: str) -> Array:
        """[U], all NaN where there is no such column."""
        return self.log.columns.get(name, np.full(self.num_updates, np.nan))

    def has(self, name: str) -> bool:
        return self.log.has(name)

    def group(self, prefix: str) -> dict[str, Array]:
        """Columns `prefix/<name>` that say anything, by name."""
        return {name: self.column(f"{prefix}/{name}") for name in self.log.group(prefix)}

    def news_of(self, update: float) -> list[str]:
        return [line for line in self.news if update_of(line) == int(update)]

    @property
    def config(self) -> dict[str, Any]:
        return dict(self.log.facts.config)

    @property
    def checkpoint(self) -> Path | None:
        """The best policy, or else the last."""
        paths = (self.folder / "checkpoints" / f"{name}.safetensors" for name in CHECKPOINTS)
        return next((path for path in paths if path.is_file()), None)

    @property
    def is_over(self) -> bool:
        last = {name: float(values[-1]) for name, values in self.log.columns.items()}
        return bool(last) and is_over(self.folder, last)

    @property
    def digest(self) -> str | None:
        """The digest of the configuration that its checkpoints carry."""
        path = self.folder / "config.yaml"
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.is_file() else None


def require_run(folder: Path, may_be_empty: bool = False) -> Path:
    """Refuses what is no run directory; one that a run has just begun in is empty."""
    folder = folder.expanduser()
    if not folder.is_dir():
        problem = "is not a directory" if folder.exists() else "does not exist"
        raise InputError("RUN", str(folder), problem, _REMEDY)
    is_run = any((folder / name).is_file() for name in _OF_A_RUN)
    if not is_run and not (may_be_empty and not any(folder.iterdir())):
        raise InputError("RUN", str(folder), f"has no {', '.join(_OF_A_RUN)}", _REMEDY)
    return folder


def read_run(folder: Path) -> RunRecord:
    """All that can be read."""
    folder = require_run(folder)
    problems: list[str] = []
    try:
        log = read_log(folder)
        problems += log.notes
    except InputError as error:
        log = RunLog(str(folder), "run directory", {}, read_facts(folder))
        problems.append(f"{Path(str(error.value)).name} {error.problem}: no curves")
    if not log.facts.config:
        problems.append("config.yaml is missing or damaged")
    return RunRecord(folder, log, _meta(folder, problems), read_news(folder), problems)


def is_over(folder: Path, last: Mapping[str, float]) -> bool:
    """Whether a run saved its last state and reached its length; `last` is its newest row."""
    if not (folder / "checkpoints" / f"state-{last.get('update', 0.0):08.0f}.safetensors").exists():
        return False
    facts = read_facts(folder)
    steps, minutes = facts.setting("run.steps"), facts.setting("run.minutes")
    if steps is not None:
        return bool(last.get("timesteps", 0.0) >= steps)
    is_finished = (folder / FINISHED).exists()
    return is_finished or (minutes is not None and bool(last.get("elapsed_s", 0.0) >= 60 * minutes))


def read_news(folder: Path) -> list[str]:
    try:
        return (folder / NEWS).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return []


def _meta(folder: Path, problems: list[str]) -> dict[str, Any]:
    try:
        found = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = None
    if isinstance(found, dict):
        return found
    problems.append("meta.json is missing or damaged: no commands or versions")
    return {}
