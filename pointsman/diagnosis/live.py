"""Findings while a run is going on: each is told once, when it turns up."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pointsman.diagnosis.curves import RunLog
from pointsman.diagnosis.findings import Finding, diagnose
from pointsman.diagnosis.readers import read_run
from pointsman.diagnosis.rule import SEVERITIES, Severity
from pointsman.diagnosis.several import SeveralRunsError
from pointsman.errors import InputError


class LogWatch:
    """Reads the whole log each time: a resumed run is judged as a whole, and it takes a moment only."""

    def __init__(
        self,
        path: Path,
        own_map: Mapping[str, str] | None = None,
        severities: tuple[Severity, ...] = SEVERITIES,
    ) -> None:
        self.path, self.own_map, self.severities = path, own_map, severities
        self._told: set[tuple[str, Severity]] = set()

    def read(self) -> RunLog | None:
        """None while there is nothing to read."""
        try:
            return read_run(self.path, self.own_map)
        except SeveralRunsError:
            raise  # more rows would not change it
        except InputError:
            return None

    def skip(self) -> None:
        """What is there now counts as told."""
        if self.path.exists():
            self.news(self.read())

    def news(self, log: RunLog | None) -> list[Finding]:
        """Findings of the severities wanted that were not told before."""
        try:
            findings = diagnose(log).findings if log is not None else ()
        except InputError:
            return []  # too little to judge yet
        wanted = [one for one in findings if one.severity in self.severities]
        fresh = [one for one in wanted if (one.name, one.severity) not in self._told]
        self._told.update((one.name, one.severity) for one in fresh)
        return fresh
