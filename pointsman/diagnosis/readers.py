"""A run's log, ours or anybody's: a run directory, a CSV, JSON, TensorBoard event files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from pointsman.diagnosis.curves import Array, RunFacts, RunLog
from pointsman.diagnosis.decisions import fold
from pointsman.diagnosis.names import derive, translate, unread
from pointsman.diagnosis.several import (
    SeveralRunsError,
    part_of,
    refuse_a_mixture,
    refuse_several_prefixes,
    runs_in,
)
from pointsman.diagnosis.tables import REMEDY, Table, read_table
from pointsman.diagnosis.tensorboard import read_scalars
from pointsman.errors import InputError

PROGRESS = "progress.csv"
MAX_UNREAD = 8  # columns that are told of
_TABLES = ("*.csv", "result.json", "trainer_state.json", "*.jsonl")


def read_run(path: Path, own_map: Mapping[str, str] | None = None) -> RunLog:
    """`own_map` says what the log calls our columns: {"entropy": "policy_entropy"}."""
    logs = read_runs(path, own_map)
    if len(logs) > 1:
        problem = f"holds {len(logs)} runs: {', '.join(log.source.rpartition(', ')[2] for log in logs[:6])}"
        raise SeveralRunsError("RUN", str(path), problem, "give each a file of its own")
    return logs[0]


def read_runs(path: Path, own_map: Mapping[str, str] | None = None) -> list[RunLog]:
    """The run, or each of several that one file holds: their sources end in ", seed 3"."""
    path = path.expanduser()
    if not path.exists():
        raise InputError("RUN", str(path), "no such file or directory", REMEDY)
    facts = RunFacts()
    if path.is_dir():
        facts = read_facts(path)
        table, kind = _folder(path, is_ours=bool(facts.config))
    elif "tfevents" in path.name:
        table, kind = _events([path]), "TensorBoard"
    else:
        table, kind = read_table(path), _kind_of(path)
    if not facts.config:
        refuse_several_prefixes(table.columns, str(path))
        _, columns, names = translate(table.columns, own_map or {})
        whole = RunLog(str(path), kind, columns, names=names)
        parts = [
            _log(f"{path}, {run}", kind, facts, part_of(table, rows), own_map or {})
            for run, rows in runs_in(table, whole).items()
        ]
        if parts:
            return parts
    return [_log(str(path), kind, facts, table, own_map or {})]


def _log(source: str, kind: str, facts: RunFacts, table: Table, own_map: Mapping[str, str]) -> RunLog:
    """A table as rules see it."""
    writer, columns, names = translate(table.columns, own_map)
    theirs = {theirs: ours for ours, theirs in names.items()}
    broken_at = {theirs.get(name, name): row for name, row in table.broken_at.items()}
    notes = [*table.notes]
    if not facts.config:
        notes += unread(table.columns, columns, names)[:MAX_UNREAD]
    num_actions = None
    folded = None
    if not facts.config:
        folded = fold(columns, broken_at, table.words.get(names.get("action", "action"), {}))
    if folded is not None:
        columns, broken_at, num_actions = folded.columns, folded.broken_at, folded.num_actions
        notes += folded.notes
    derive(columns, names, facts, num_actions)
    kind = "run directory" if facts.config else f"{writer} {kind}" if writer != "table" else kind
    empty = [name for name, values in columns.items() if not np.isfinite(values).any()]
    if empty:
        notes.append(f"no number in {', '.join(empty[:8])}" + (" …" if len(empty) > 8 else ""))
    return _in_order(RunLog(source, kind, columns, facts, tuple(notes), names, broken_at, folded is not None))


def _folder(path: Path, is_ours: bool) -> tuple[Table, str]:
    if (path / PROGRESS).is_file():
        return read_table(path / PROGRESS), "CSV"
    if is_ours:
        raise InputError("RUN", str(path), f"has no {PROGRESS}", "wait for the first update")
    files = sorted(path.glob("*tfevents*"))
    if not files:
        folders = sorted({file.parent for file in path.rglob("*tfevents*")})
        if len(folders) > 1:
            some = ", ".join(str(folder.relative_to(path)) for folder in folders[:6])
            raise InputError(
                "RUN",
                str(path),
                f"holds {len(folders)} runs",
                f"name one of them: {some}",
            )
        files = sorted(folders[0].glob("*tfevents*")) if folders else []
    if files:
        return _events(files), "TensorBoard"
    tables = [one for ending in _TABLES for one in sorted(path.glob(ending))]
    if not tables:
        raise InputError("RUN", str(path), "is not a run directory and holds no log", REMEDY)
    if len(tables) > 1:
        some = ", ".join(one.name for one in tables[:6])
        raise InputError("RUN", str(path), f"holds {len(tables)} logs", f"name one of them: {some}")
    return read_table(tables[0]), _kind_of(tables[0])


def _kind_of(table: Path) -> str:
    return "JSON" if table.suffix in (".json", ".jsonl") else "CSV"


def read_facts(folder: Path) -> RunFacts:
    """What our runs write beside their curves; nothing where a file is missing or damaged."""

    def read(name: str) -> dict[str, Any]:
        try:
            text = (folder / name).read_text(encoding="utf-8")
            data = yaml.safe_load(text) if name.endswith(".yaml") else json.loads(text)
        except (OSError, ValueError, yaml.YAMLError):
            return {}
        return data if isinstance(data, dict) else {}

    config = read("config.yaml")
    if not {"env", "ppo", "run"} <= set(config):
        return RunFacts()  # somebody else's
    names = ("headroom", "evaluation", "schema", "stopped")
    return RunFacts(config, *(read(f"{name}.json") for name in names))


def _events(files: Sequence[Path]) -> Table:
    """Rows by step. A file that was written later replaces what earlier ones say of the same step."""
    found: dict[str, dict[int, list[float]]] = {}
    notes = []
    for path in files:
        scalars, is_cut = read_scalars(path)
        if is_cut:
            notes.append(f"{path.name} is cut off or damaged; what came before that was read")
        fresh: dict[str, dict[int, list[float]]] = {}
        for tag, step, value in scalars:
            fresh.setdefault(tag, {}).setdefault(step, []).append(value)
        for tag, steps in fresh.items():
            found.setdefault(tag, {}).update(steps)
    if not found:
        where = str(files[0] if len(files) == 1 else files[0].parent)
        raise InputError("RUN", where, "holds no scalars", REMEDY)
    all_steps = sorted({step for values in found.values() for step in values})
    row_of = {step: row for row, step in enumerate(all_steps)}
    columns: dict[str, Array] = {}
    broken_at: dict[str, int] = {}
    for tag, values in found.items():
        column = columns[tag] = np.full(len(all_steps), np.nan)
        for step, several in values.items():
            mean = float(np.mean(several))
            column[row_of[step]] = mean if np.isfinite(mean) else np.nan
            if not np.isfinite(mean):
                broken_at[tag] = min(row_of[step], broken_at.get(tag, row_of[step]))
    # Ours count updates, all others decisions.
    name = "update" if "timesteps" in columns else "timesteps"
    columns.setdefault(name, np.array(all_steps, np.float64))
    return Table(columns, broken_at, tuple(notes))


def _in_order(log: RunLog) -> RunLog:
    """Rows by their x. Of several rows for the same x each cell that was written last counts: after a resume
    they come again, and Stable-Baselines3 gives evaluations a row of their own."""
    x = log.x
    if (np.diff(x) > 0).all():
        return log
    if not log.is_ours:
        refuse_a_mixture(log)
    values, place = np.unique(x[np.isfinite(x)], return_inverse=True)
    rows = np.flatnonzero(np.isfinite(x))
    columns = {}
    is_replaced = np.zeros(len(values), bool)
    for name, column in log.columns.items():
        merged = columns[name] = np.full(len(values), np.nan)
        seen = np.isfinite(column[rows])
        merged[place[seen]] = column[rows][seen]  # the last of several assignments stays
        is_replaced[place[seen][merged[place[seen]] != column[rows][seen]]] = True
    place_of = dict(zip(rows.tolist(), place.tolist(), strict=True))
    broken_at = {name: place_of[row] for name, row in log.broken_at.items() if row in place_of}
    went_back = int((np.diff(x[rows]) < 0).sum())
    last = "what was written last counts"
    if went_back:
        notes = (*log.notes, f"{log.x_name} goes back {went_back} times; {last}")
    elif is_replaced.any():
        notes = (*log.notes, f"{is_replaced.sum()} values of {log.x_name} come in several rows; {last}")
    else:
        notes = log.notes
    return replace(log, columns=columns, notes=notes, broken_at=broken_at)
