"""CSV with commas, semicolons, tabs or bars, as programs and people write it.

Before the header there may be empty lines, lines that begin with # and Excel's `sep=;`. Rows may end in
separators too many. Where the header comes again, as in files that were joined, it is left out with a
warning.
"""

from __future__ import annotations

import csv
import io
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import polars as pl

from pointsman.errors import InputError, PointsmanWarning
from pointsman.workload.objects import parts_of, split_objects
from pointsman.workload.raw import LINE, RawTable, TraceSource, file_error, raw_table

_SEPARATORS = ",;\t|"
_NUM_ROWS_FOR_OBJECTS = 100
_QUOTES = "check its quotes and commas"


def csv_source(path: Path, data: bytes) -> TraceSource:
    data, num_skipped = _from_header(data)
    separator = max(_SEPARATORS, key=data.partition(b"\n")[0].decode("utf-8").count)

    def read(columns: list[str] | None, num_rows: int | None = None) -> pl.DataFrame:
        is_ragged = False
        while True:
            try:
                return pl.read_csv(
                    io.BytesIO(data),
                    columns=columns,
                    n_rows=num_rows,
                    infer_schema=False,
                    separator=separator,
                    truncate_ragged_lines=is_ragged,
                )
            except pl.exceptions.PolarsError as error:
                _reject_long_rows(path, data, num_skipped, separator)
                if is_ragged:
                    problem = str(error).partition("\n")[0]
                    raise file_error(path, f"cannot be parsed as CSV ({problem})", _QUOTES) from None
                is_ragged = True

    def load(columns: list[str]) -> RawTable:
        wanted = list(dict.fromkeys(column if column in top else owner[column] for column in columns))
        frame = split_objects(read(wanted), columns, owner)
        lines = pl.Series(LINE, _lines(data, separator, len(frame)), pl.Int64) + num_skipped
        frame = _without_headers(path, frame.insert_column(0, lines))
        table = raw_table(path, frame, "line")
        return replace(table, has_decimal_commas=separator != ",")

    head = read(None, _NUM_ROWS_FOR_OBJECTS)
    top, owner = head.columns, parts_of(head)
    return TraceSource(path, [*top, *owner], load)


def _from_header(data: bytes) -> tuple[bytes, int]:
    """What follows comments, empty lines and `sep=;` at its beginning, and how many lines these are."""
    num_skipped = 0
    while (first := data.partition(b"\n")[0].strip()).startswith((b"#", b"sep=")) or not first:
        if not (rest := data.partition(b"\n")[2]):
            break
        data, num_skipped = rest, num_skipped + 1
    return data, num_skipped


def _lines(data: bytes, separator: str, num_rows: int) -> list[int] | range:
    """The line that each row begins in: not all the same where texts in quotes have several."""
    num_breaks = data.count(b"\n") + (not data.endswith(b"\n"))
    if b'"' not in data or num_breaks == num_rows + 1:
        return range(2, num_rows + 2)
    try:
        begins = [begin for begin, _ in _rows(data, separator)]
    except csv.Error:
        begins = []
    return begins[1:] if len(begins) == num_rows + 1 else range(2, num_rows + 2)


def _rows(data: bytes, separator: str) -> Iterator[tuple[int, list[str]]]:
    """Rows as Python reads them, each with the line that it begins in. An open quote ends in `csv.Error`."""
    csv.field_size_limit(sys.maxsize)
    rows = csv.reader(io.StringIO(data.decode("utf-8"), newline=""), delimiter=separator, strict=True)
    begin = 1
    while True:
        try:
            row = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            raise csv.Error(begin) from error
        yield begin, row
        begin = rows.line_num + 1


def _reject_long_rows(path: Path, data: bytes, num_skipped: int, separator: str) -> None:
    """Polars doesn't say which line is wrong; look for it. Empty fields at the end of a row are not."""
    num_fields = None
    try:
        for line, row in _rows(data, separator):
            if num_fields is None:
                num_fields = len(row)
            if any(field.strip() for field in row[num_fields:]):
                problem = f"{len(row)} fields, but the header has {num_fields}"
                place = f"{path} line {num_skipped + line}"
                raise InputError(place, separator.join(row), problem, "correct the line")
    except csv.Error as error:
        if isinstance(error.args[0], int):
            line = num_skipped + error.args[0]
            text = data.split(b"\n", error.args[0])[error.args[0] - 1].decode("utf-8")
            raise InputError(f"{path} line {line}", text, "its quotes do not match", _QUOTES) from None


def _without_headers(path: Path, frame: pl.DataFrame) -> pl.DataFrame:
    columns = [column for column in frame.columns if column != LINE]
    if not frame[columns[0]].str.contains(columns[0].strip(), literal=True).any():
        return frame
    is_header = frame.select(
        pl.all_horizontal(
            pl.col(column).str.strip_chars(' \t\r\ufeff"') == column.strip(' \t\r"') for column in columns
        ).fill_null(False)
    ).to_series()
    if not is_header.any():
        return frame
    lines = frame[LINE].filter(is_header).to_list()
    where = f"line {lines[0]}" + (f" and {len(lines) - 1} more" if len(lines) > 1 else "")
    warnings.warn(
        PointsmanWarning(
            f"{path}: its header comes again in {where}, and is left out; several files in one?"
        ),
        stacklevel=2,
    )
    return frame.filter(~is_header)
