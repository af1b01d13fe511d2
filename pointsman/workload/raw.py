"""A table of raw values, and what there is to say of a file or a value in it that cannot be read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import polars as pl

from pointsman.errors import InputError

LINE = "#line"
# What programs write where there is no value.
NOTHING = (
    "",
    "-",
    "--",
    "?",
    "null",
    "<null>",
    "none",
    "nil",
    "na",
    "n/a",
    "#n/a",
    "\\n",
    "undefined",
    "missing",
)


@dataclass(frozen=True)
class RawTable:
    """Columns of a file, and in column `LINE` where each row stands in it. Never empty."""

    path: Path
    frame: pl.DataFrame
    line_name: Literal["line", "row"]
    has_decimal_commas: bool = (
        False  # 0,5 may be a half: spreadsheets of half of Europe, which use semicolons
    )

    def reject(self, column: str, is_bad: pl.Series, problem: str, remedy: str) -> None:
        """Raise for the first row marked in `is_bad`, if any."""
        row = is_bad.arg_max()
        if row is None or not is_bad[row]:
            return
        raise InputError(f"{self.place(row)}, column {column}", self.frame[column][row], problem, remedy)

    def place(self, row: int) -> str:
        return f"{self.path} {self.line_name} {self.frame[LINE][row]}"

    def head(self, num_rows: int) -> RawTable:
        return replace(self, frame=self.frame.head(num_rows))

    def values(self, column: str) -> pl.Series:
        """Texts lose the spaces around them; where there is nothing, in whichever word, is null."""
        values = self.frame[column]
        if values.dtype != pl.String:
            return values
        values = values.str.strip_chars()
        return values.set(values.str.to_lowercase().is_in(NOTHING), None)


@dataclass(frozen=True)
class TraceSource:
    """An opened file: its column names, and a way to load some of them."""

    path: Path
    columns: list[str]
    load: Callable[[list[str]], RawTable]


def raw_table(path: Path, frame: pl.DataFrame, line_name: Literal["line", "row"]) -> RawTable:
    is_blank = pl.all_horizontal(pl.exclude(LINE).is_null())
    frame = frame.filter(~is_blank)
    if frame.is_empty():
        raise file_error(path, "a header but no requests", "give a file with at least one request")
    return RawTable(path, frame, line_name)


def file_error(path: Path, problem: str, remedy: str) -> InputError:
    return InputError("trace file", str(path), problem, remedy)
