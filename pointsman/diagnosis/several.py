"""Several runs in one file, one for each seed: told apart by a column that names the run, or refused.

Read as one run they would be a mixture in which the last one written hides all others.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from pointsman.diagnosis.curves import Array, RunLog
from pointsman.diagnosis.names import plain
from pointsman.diagnosis.tables import Table
from pointsman.errors import InputError

MAX_RUNS = 64
MIN_RUN = 4  # rows
SHARED = 0.75  # different x values of all runs, of those of each added up: fewer, and they run side by side
REPEATED = 0.9  # of the x values: a run that was resumed writes a part of them again
_NAMES_A_RUN = r"(random_)?seeds?|(run|trial|experiment|exp)(_id|_idx|_index|_name|_seed)?|replicate(_id)?"


class SeveralRunsError(InputError):
    """A file with several runs where one was asked for, or that cannot be told apart."""


def runs_in(table: Table, log: RunLog) -> dict[str, NDArray[np.int64]]:
    """Which rows belong to each run, by "seed 3"; empty for a single one. `log`: the same by our names."""
    for name, values in table.columns.items():
        if re.fullmatch(_NAMES_A_RUN, plain(name).rpartition("/")[2]) and name not in log.names.values():
            labels = _labels(values, table.words.get(name, {}))
            rows = {one: np.flatnonzero(labels == one) for one in dict.fromkeys(labels.tolist())}
            rows.pop("", None)
            if _are_runs([*rows.values()], log):
                return {f"{name} {one}": part for one, part in rows.items()}
    return {}


def _labels(values: Array, words: Mapping[int, str]) -> NDArray[np.str_]:
    numbers = [f"{value:g}" if np.isfinite(value) else "" for value in values]
    return np.array([words.get(row, number) for row, number in enumerate(numbers)])


def _are_runs(parts: list[NDArray[np.int64]], log: RunLog) -> bool:
    """Each has the x values that the others have; without an x, each stands in one piece."""
    if not 1 < len(parts) <= MAX_RUNS or min(map(len, parts)) < MIN_RUN:
        return False
    if log.x_name == "row":
        return all(part[-1] - part[0] == len(part) - 1 for part in parts)
    num_alone = sum(len(np.unique(log.x[part])) for part in parts)
    return len(np.unique(log.x[np.concatenate(parts)])) < SHARED * num_alone


def refuse_several_prefixes(names: Iterable[str], source: str) -> None:
    """What Weights & Biases exports of several runs has the name of each before a dash."""
    prefixes: dict[str, set[str]] = {}
    for name in names:
        prefix, dash, _ = name.rpartition(" - ")
        if dash:
            prefixes.setdefault(plain(name), set()).add(prefix)
    several = max(prefixes.values(), key=len, default=set())
    if len(several) > 1:
        problem = f"has columns of {len(several)} runs: {', '.join(sorted(several)[:3])}"
        raise SeveralRunsError("RUN", source, problem, "export each into a file of its own")


def part_of(table: Table, rows: NDArray[np.int64]) -> Table:
    """These rows of it."""
    place_of = {int(row): place for place, row in enumerate(rows)}
    columns = {name: values[rows] for name, values in table.columns.items()}
    words = {
        name: {place_of[row]: word for row, word in texts.items() if row in place_of}
        for name, texts in table.words.items()
    }
    broken_at = {}
    for name, first in table.broken_at.items():
        later = rows[rows >= first]
        is_broken = ~np.isfinite(table.columns[name][later])
        if is_broken.any():
            broken_at[name] = place_of[int(later[int(is_broken.argmax())])]
    return table._replace(columns=columns, broken_at=broken_at, words=words)


def refuse_a_mixture(log: RunLog) -> None:
    """Where almost every x comes again with other values in several columns, those are runs of their own.

    If x never goes back, they may as well be the parts of an update: minibatches, or episodes.
    """
    if (np.diff(log.x) >= 0).all():
        return
    order = np.argsort(log.x, kind="stable")
    x = log.x[order]
    is_same = np.diff(x) == 0
    num_changed = np.zeros(len(is_same), int)
    for values in log.columns.values():
        change = np.diff(values[order])
        num_changed += np.isfinite(change) & (change != 0)
    is_other = is_same & (num_changed > 1)
    num_x = len(np.unique(x))
    if len(np.unique(x[1:][is_other])) >= REPEATED * num_x and len(x) > MIN_RUN * 2:
        times = len(x) / num_x
        problem = f"has each {log.x_name} about {times:.0f} times, with different values, as of several runs"
        remedy = "name them in a column seed, or write a file for each"
        raise SeveralRunsError("RUN", log.source, problem, remedy)
