"""Tables as they are found: CSV with comments before the header, headers again in the middle and rows that do
not fit it; JSON (json_logs.py)."""

from __future__ import annotations

import codecs
import csv
import math
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from pointsman.diagnosis.curves import Array
from pointsman.diagnosis.json_logs import looks_like_json, read_json
from pointsman.errors import InputError
from pointsman.plain import counted

DELIMITERS = ",;\t"
REMEDY = (
    "name a run directory, a CSV or JSON with one row an update or a decision, or TensorBoard event files"
)
MIN_OF_A_KIND = 3  # rows of another length: fewer are damage
_DECIMAL_COMMA = re.compile(r"^([+-]?\d+),(\d+(?:[eE][+-]?\d+)?)$")
_NAME = re.compile(r"[A-Za-z_][\w ./()%-]*")


class Table(NamedTuple):
    columns: dict[str, Array]  # [U], NaN where a cell is empty or no number
    broken_at: dict[str, int]  # columns -> row of the first NaN or infinity that was written as such
    notes: tuple[str, ...]
    words: Mapping[str, Mapping[int, str]] = MappingProxyType({})  # columns -> row -> what is no number


class CsvLine(NamedTuple):
    """A line with numbers, and the header that holds for it: the last of its length, else the last of all."""

    header: tuple[str, ...]
    cells: list[str]
    is_last: bool

    @property
    def num_extra(self) -> int:
        return len(self.cells) - len(self.header)


def read_table(path: Path) -> Table:
    """Lines of several shapes (one kind a decision, another an update) keep their own columns."""
    text = _text(path)
    if looks_like_json(text):
        return _json_table(path, text)
    lines = _lines(path, text)
    start = _header(lines)
    if start is None:
        raise InputError("RUN", str(path), "has no header with names of columns", REMEDY)
    notes = []
    if any(len(set(row)) > 1 for row in lines[:start]):
        notes.append(f"{start} lines before the header were skipped")
    data, headers = _under_headers(lines[start:])
    if len(headers) > 1:
        notes.append(
            f"the header stands {len(headers)} times; each holds for the rows of its length below it"
        )
    named, more_notes = _named(data)
    if not named:
        raise InputError("RUN", str(path), "has a header but no row", "wait for the first update")
    repeated = [name for name in dict.fromkeys(headers[-1]) if name and headers[-1].count(name) > 1]
    if repeated:
        more_notes.append(f"columns that stand twice, the first counts: {', '.join(repeated)}")
    return _collect(named)._replace(notes=(*notes, *more_notes))


def _json_table(path: Path, text: str) -> Table:
    rows, num_damaged = read_json(text)
    if not rows:
        raise InputError("RUN", str(path), "holds no JSON object", REMEDY)
    damaged = counted(num_damaged, "line")
    notes = (f"skipped, because no JSON object: {damaged}",) if num_damaged else ()
    return _collect(rows)._replace(notes=notes)


def _under_headers(lines: Sequence[list[str]]) -> tuple[list[CsvLine], list[tuple[str, ...]]]:
    """Lines with numbers, and all headers in their order."""
    data: list[CsvLine] = []
    headers: list[tuple[str, ...]] = []
    by_length: dict[int, tuple[str, ...]] = {}
    for position, row in enumerate(lines):
        if _is_header(row) and (
            not headers or tuple(row) in headers or _is_new_header(lines, position, headers)
        ):
            headers.append(tuple(row))
            by_length[len(row)] = tuple(row)
            continue
        header = headers[-1] if len(row) == len(headers[-1]) else by_length.get(len(row), headers[-1])
        while len(row) > len(header) and not row[-1]:
            row = row[:-1]  # commas at the end
        data.append(CsvLine(header, row, position == len(lines) - 1))
    return data, headers


def _named(data: Sequence[CsvLine]) -> tuple[list[tuple[list[str], list[str]]], list[str]]:
    """Names and cells of each line that can be matched, and notes about the others."""
    notes = []
    names_of = {}
    for key, lines in _by_shape(data).items():
        header, length = key
        fitting = [line for line in data if line.header == header and line.num_extra == 0]
        names = [name or f"unnamed {position}" for position, name in enumerate(header)]
        extra = length - len(header)
        if extra == 0:
            names_of[key] = names
        elif extra == 1 and len(lines) >= len(fitting):
            names_of[key] = ["unnamed index", *names]  # as pandas writes an index without a name
        elif extra < 0 and length > 1 and not _is_other_kind(fitting, lines, data):
            names_of[key] = names[:length]  # empty cells left out, or columns added to the header later
        elif length > 1 and len(lines) >= MIN_OF_A_KIND:
            names_of[key] = [f"{length}:{position}" for position in range(1, length + 1)]
            notes.append(
                f"{len(lines)} rows have {length} cells and no header of their own: their columns are called "
                f"{length}:1 to {length}:{length}; --map says what they are"
            )
    named = []
    num_odd = 0
    for line in data:
        names = names_of.get((line.header, len(line.cells)), [])
        is_cut_off = line.is_last and names == list(line.header[: len(names)]) and line.num_extra < 0
        if not names or is_cut_off:
            num_odd += 1
        else:
            named.append((names, line.cells))
    if num_odd:
        notes.append(f"{num_odd} rows did not fit the header and were skipped")
    return named, notes


def _by_shape(data: Sequence[CsvLine]) -> dict[tuple[tuple[str, ...], int], list[CsvLine]]:
    shapes: dict[tuple[tuple[str, ...], int], list[CsvLine]] = {}
    for line in data:
        shapes.setdefault((line.header, len(line.cells)), []).append(line)
    return shapes


def _is_other_kind(fitting: Sequence[CsvLine], short: Sequence[CsvLine], data: Sequence[CsvLine]) -> bool:
    """Short rows are of another kind if their cells do not go on where the header's own rows stopped: the
    first column, which only grows there, jumps back; or a column of whole numbers is none any more."""
    if len(short) < MIN_OF_A_KIND or not fitting:
        return False
    length = len(short[0].cells)
    together = [line.cells for line in data if line.num_extra == 0 or len(line.cells) == length]
    if _only_grows([line.cells[0] for line in fitting]) and not _only_grows([cells[0] for cells in together]):
        return True
    return any(
        _are_whole([line.cells[column] for line in fitting])
        and not _are_whole([line.cells[column] for line in short])
        for column in range(length)
    )


def _only_grows(cells: Sequence[str]) -> bool:
    numbers = [_number(cell) for cell in cells]
    return None not in numbers and all(b >= a for a, b in pairwise(numbers))  # type: ignore[operator]


def _are_whole(cells: Sequence[str]) -> bool:
    """All that are not empty are whole numbers."""
    numbers = [_number(cell) for cell in cells if cell]
    return all(number is not None and number.is_integer() for number in numbers)


def _collect(named: Sequence[tuple[list[str], list[str]]]) -> Table:
    columns: dict[str, Array] = {}
    broken_at: dict[str, int] = {}
    words: dict[str, dict[int, str]] = {}
    for row, (names, cells) in enumerate(named):
        seen = set()
        for name, cell in zip(names, cells, strict=True):
            if name in seen:
                continue  # the name stands twice in the header: the first counts
            seen.add(name)
            column = columns.get(name)
            if column is None:
                column = columns[name] = np.full(len(named), math.nan)
            value = _number(cell)
            if value is None:
                if cell:
                    words.setdefault(name, {})[row] = cell
            elif math.isfinite(value):
                column[row] = value
            else:
                broken_at.setdefault(name, row)
    return Table(columns, broken_at, (), words)


def _text(path: Path) -> str:
    try:
        data = path.read_bytes()
        is_wide = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))  # as Windows writes it
        text = data.decode("utf-16" if is_wide else "utf-8-sig")
    except UnicodeDecodeError:
        raise InputError("RUN", str(path), "is not text", REMEDY) from None
    except OSError as error:
        reason = (error.strerror or type(error).__name__).lower()
        raise InputError("RUN", str(path), f"cannot be read ({reason})", REMEDY) from None
    if "\0" in text:
        raise InputError("RUN", str(path), "is not text", REMEDY)
    return text


def _lines(path: Path, text: str) -> list[list[str]]:
    """The cells of each line that is not blank or a comment."""
    kept = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    if not kept:
        raise InputError("RUN", str(path), "is empty", REMEDY)
    delimiter = max(DELIMITERS, key=lambda mark: sum(line.count(mark) for line in kept[:20]))
    has_decimal_commas = all(";" in line for line in kept[:20])  # spreadsheets of half of Europe
    delimiter = ";" if has_decimal_commas else delimiter
    try:
        rows = list(csv.reader(kept, delimiter=delimiter))
    except csv.Error as error:
        raise InputError("RUN", str(path), f"is no CSV ({error})", REMEDY) from None
    cells = [[cell.strip() for cell in row] for row in rows]
    if has_decimal_commas:
        cells = [[_DECIMAL_COMMA.sub(r"\1.\2", cell) for cell in row] for row in cells]
    return cells


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


def _is_new_header(lines: Sequence[Sequence[str]], position: int, headers: Sequence[Sequence[str]]) -> bool:
    """It shares names with one before; or it has other names, all different, and numbers in its own shape
    come below it."""
    row = lines[position]
    if any(len(set(row) & set(header) - {""}) >= 2 for header in headers):
        return True
    has_rows = any(
        len(line) == len(row) and any(_number(cell) is not None for cell in line)
        for line in lines[position + 1 :]
    )
    return has_rows and len(set(row)) == len(row) and all(_NAME.fullmatch(cell) for cell in row)


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
