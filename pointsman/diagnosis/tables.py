"""CSV as it is found: comments before the header, headers again in the middle, rows that do not fit it."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pointsman.diagnosis.curves import Array
from pointsman.errors import InputError

DELIMITERS = ",;\t"
REMEDY = "name a run directory, a CSV with one row an update, or TensorBoard event files"


class Table(NamedTuple):
    columns: dict[str, Array]  # [U], NaN where a cell is empty or no number
    broken_at: dict[str, int]  # columns -> row of the first NaN or infinity that was written as such
    notes: tuple[str, ...]


def read_table(path: Path) -> Table:
    lines = _lines(path)
    start = _header(lines)
    if start is None:
        raise InputError("RUN", str(path), "has no header with names of columns", REMEDY)
    header = lines[start]
    columns: dict[str, list[float]] = {}
    broken_at: dict[str, int] = {}
    notes = []
    if any(len(set(row)) > 1 for row in lines[:start]):
        notes.append(f"{start} lines before the header were skipped")
    num_rows = num_headers = num_odd = 0
    for position, row in enumerate(lines[start:], start):
        if _is_header(row) and (row == header or _is_new_header(row, header)):
            header = row
            num_headers += 1
            continue
        names = _names(header, row, is_last=position == len(lines) - 1)
        if names is None:
            num_odd += 1
            continue
        for name, cell in zip(names, row, strict=False):
            value = _number(cell)
            column = columns.setdefault(name, [])
            if len(column) > num_rows:
                continue  # the name stands twice in the header: the first counts
            column += [math.nan] * (num_rows - len(column))
            column.append(value if value is not None and math.isfinite(value) else math.nan)
            if value is not None and not math.isfinite(value):
                broken_at.setdefault(name, num_rows)
        num_rows += 1
    if num_rows == 0:
        raise InputError("RUN", str(path), "has a header but no row", "wait for the first update")
    if num_headers > 1:
        notes.append(f"the header stands {num_headers} times; each holds for the rows below it")
    if num_odd:
        notes.append(f"{num_odd} rows did not fit the header and were skipped")
    repeated = [name for name in dict.fromkeys(header) if name and header.count(name) > 1]
    if repeated:
        notes.append(f"columns that stand twice, the first counts: {', '.join(repeated)}")
    arrays = {
        name: np.array(values + [math.nan] * (num_rows - len(values))) for name, values in columns.items()
    }
    return Table(arrays, broken_at, tuple(notes))


def _lines(path: Path) -> list[list[str]]:
    """The cells of each line that is not blank or a comment."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise InputError("RUN", str(path), "is not text", REMEDY) from None
    except OSError as error:
        reason = (error.strerror or type(error).__name__).lower()
        raise InputError("RUN", str(path), f"cannot be read ({reason})", REMEDY) from None
    if "\0" in text:
        raise InputError("RUN", str(path), "is not text", REMEDY)
    kept = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    if not kept:
        raise InputError("RUN", str(path), "is empty", REMEDY)
    delimiter = max(DELIMITERS, key=lambda mark: sum(line.count(mark) for line in kept[:20]))
    try:
        rows = list(csv.reader(kept, delimiter=delimiter))
    except csv.Error as error:
        raise InputError("RUN", str(path), f"is no CSV ({error})", REMEDY) from None
    return [[cell.strip() for cell in row] for row in rows]


def _number(cell: str) -> float | None:
    if cell.lower() in ("true", "false"):
        return float(cell.lower() == "true")
    try:
        return float(cell)
    except ValueError:
        return None


def _is_header(row: Sequence[str]) -> bool:
    """Names and no numbers; more than one, or a sentence would be a header."""
    named = [cell for cell in row if cell]
    return len(named) > 1 and all(_number(cell) is None for cell in named)


def _is_new_header(row: Sequence[str], header: Sequence[str]) -> bool:
    """Other columns, or the same in another order: it shares names with the one before."""
    return len(set(row) & set(header) - {""}) >= 2


def _header(lines: Sequence[Sequence[str]]) -> int | None:
    """Where it is: names, and a row with a number below."""
    for position, row in enumerate(lines):
        below = lines[position + 1 : position + 2]
        has_numbers = any(_number(cell) is not None for line in below for cell in line)
        if _is_header(row) and (has_numbers or not below or _is_header(below[0])):
            return position
        if not _is_header(row) and any(_number(cell) is not None for cell in row) and len(row) > 1:
            return None  # data without a header
    return None


def _names(header: Sequence[str], row: Sequence[str], is_last: bool) -> list[str] | None:
    """A name for each cell; None for a row that cannot be matched."""
    names = [name or f"unnamed {position}" for position, name in enumerate(header)]
    extra = len(row) - len(names)
    if extra == 0:
        return names
    if extra > 0 and not any(row[len(names) :]):
        return names  # commas at the end
    if extra == 1:
        return ["unnamed index", *names]  # as pandas writes an index without a name
    if extra < 0 and not is_last and len(row) > 1:
        return names[: len(row)]  # columns were added to the header later
    return None
