"""From a file to a table of raw values: CSV, JSON or Parquet, plain or gzip, recognised by their content.

CSV may have commas, semicolons, tabs or bars, and lines that begin with # before its header; JSON is one
object per line, one list of objects, or an object that holds one such list, and the keys of objects in
objects are joined by dots (`usage.prompt_tokens`). Text is UTF-8, or UTF-16 with its mark, as Windows writes
it. Values of text files stay text here: numbers are made later, where an error can name line and value.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NoReturn

import polars as pl

from pointsman.errors import InputError, no_such_file

LINE = "#line"
_READABLE = "give a CSV, JSONL or Parquet file, plain or gzip"
# Optional keys (a session) may be absent from the first line of a JSONL file.
_NUM_LINES_FOR_KEYS = 100
_MAX_JSON_DEPTH = 5
_SEPARATORS = ",;\t|"
_MARK = b"\xef\xbb\xbf"  # of UTF-8


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
        place = f"{self.path} {self.line_name} {self.frame[LINE][row]}, column {column}"
        raise InputError(place, self.frame[column][row], problem, remedy)


@dataclass(frozen=True)
class TraceSource:
    """An opened file: its column names, and a way to load some of them."""

    path: Path
    columns: list[str]
    load: Callable[[list[str]], RawTable]


def open_source(path: Path) -> TraceSource:
    data = _read_bytes(path)
    if not data.strip():
        raise _file_error(path, "the file is empty", _READABLE)
    if data.startswith(b"PAR1"):
        return _parquet_source(path, data)
    if b"\0" in data:
        raise _file_error(path, "neither text nor Parquet", _READABLE)
    if not _is_utf8(data):
        raise _file_error(path, "not in UTF-8", "save it as UTF-8; Excel calls that CSV UTF-8")
    if data.lstrip().startswith((b"{", b"[")):
        return _json_source(path, data)
    return _csv_source(path, data)


def _file_error(path: Path, problem: str, remedy: str) -> InputError:
    return InputError("trace file", str(path), problem, remedy)


def _read_bytes(path: Path) -> bytes:
    if path.is_dir():
        raise _file_error(path, "a directory", "give the file in it")
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise no_such_file("trace file", path) from None
    except OSError as error:
        raise _file_error(
            path, f"cannot be read ({error.strerror})", "check the path and its rights"
        ) from None
    if data.startswith(b"\x1f\x8b"):
        try:
            data = gzip.decompress(data)
        except (EOFError, OSError, zlib.error):
            raise _file_error(path, "a damaged or truncated gzip file", "copy or download it again") from None
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        try:
            data = data.decode("utf-16").encode()
        except UnicodeError:
            raise _file_error(path, "damaged text in UTF-16", "save it as UTF-8") from None
    return data.removeprefix(_MARK)


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _csv_source(path: Path, data: bytes) -> TraceSource:
    data, num_skipped = _from_header(data)
    separator = max(_SEPARATORS, key=data.partition(b"\n")[0].decode("utf-8").count)

    def load(columns: list[str]) -> RawTable:
        try:
            frame = pl.read_csv(io.BytesIO(data), columns=columns, infer_schema=False, separator=separator)
        except pl.exceptions.PolarsError as error:
            _reject_csv(path, data, num_skipped, separator, error)
        table = _table(path, frame.with_row_index(LINE, offset=num_skipped + 2), "line")
        return replace(table, has_decimal_commas=separator == ";")

    try:
        header = pl.read_csv(io.BytesIO(data), n_rows=0, infer_schema=False, separator=separator)
    except pl.exceptions.PolarsError as error:
        _reject_csv(path, data, num_skipped, separator, error)
    return TraceSource(path, header.columns, load)


def _from_header(data: bytes) -> tuple[bytes, int]:
    """What follows the comments and empty lines at its beginning, and how many lines these are."""
    num_skipped = 0
    while (first := data.partition(b"\n")[0].strip()).startswith(b"#") or not first:
        if not (rest := data.partition(b"\n")[2]):
            break
        data, num_skipped = rest, num_skipped + 1
    return data, num_skipped


def _reject_csv(
    path: Path, data: bytes, num_skipped: int, separator: str, error: pl.exceptions.PolarsError
) -> NoReturn:
    """Polars doesn't say which line is wrong; look for it."""
    rows = csv.reader(io.StringIO(data.decode("utf-8")), delimiter=separator)
    try:
        num_fields = len(next(rows))
        for row in rows:
            if len(row) > num_fields:
                problem = f"{len(row)} fields, but the header has {num_fields}"
                shown = separator.join(row)
                place = f"{path} line {num_skipped + rows.line_num}"
                raise InputError(place, shown, problem, "correct the line")
    except csv.Error:
        pass
    problem = str(error).partition("\n")[0]
    raise _file_error(path, f"cannot be parsed as CSV ({problem})", "check its quotes and commas")


def _json_source(path: Path, data: bytes) -> TraceSource:
    records = _json_list(path, data)

    def load(columns: list[str]) -> RawTable:
        texts: dict[str, list[str | None]] = {column: [] for column in columns}
        lines = []
        for line, record in _json_records(path, data, records):
            lines.append(line)
            flat = dict(_flat(record))
            for column, values in texts.items():
                values.append(_as_text(flat.get(column)))
        frame = pl.DataFrame({LINE: lines, **texts}, schema_overrides=dict.fromkeys(columns, pl.String))
        return _table(path, frame, "row" if records is not None else "line")

    keys: dict[str, None] = {}
    for (_, record), _ in zip(_json_records(path, data, records), range(_NUM_LINES_FOR_KEYS), strict=False):
        keys.update(dict.fromkeys(key for key, _ in _flat(record)))
    return TraceSource(path, list(keys), load)


def _flat(record: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Keys and values, those of objects within it included."""
    for key, value in record.items():
        if isinstance(value, dict) and prefix.count(".") < _MAX_JSON_DEPTH:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _json_records(path: Path, data: bytes, records: list[Any] | None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Objects and where they stand: place in the list, or line."""
    if records is not None:
        for place, record in enumerate(records, start=1):
            if not isinstance(record, dict):
                shown = _as_text(record)
                raise InputError(f"{path} row {place}", shown, "not a JSON object", "give a list of objects")
            yield place, record
        return
    for line, text in enumerate(io.BytesIO(data), start=1):
        if not text.strip():
            continue
        try:
            record = json.loads(text)
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict):
            shown = text.decode("utf-8").strip()
            remedy = "write one JSON object per line, or one list of them"
            raise InputError(f"{path} line {line}", shown, "not a JSON object", remedy)
        yield line, record


def _json_list(path: Path, data: bytes) -> list[Any] | None:
    """The list that the file is, or that the one object in it holds; None for one object per line."""
    is_list = data.lstrip().startswith(b"[")
    try:
        whole = json.loads(data)
    except (ValueError, RecursionError):
        if not is_list:
            return None
        problem = "begins with [ and is not a list in JSON"
        raise _file_error(path, problem, "write one JSON object per line, or one list of them") from None
    if isinstance(whole, list):
        return whole
    lists = [value for value in whole.values() if _is_list_of_objects(value)]
    # One request alone has numbers, too; its list is one of messages.
    is_request = any(isinstance(value, int | float | dict) for value in whole.values())
    return lists[0] if len(lists) == 1 and not is_request else None


def _is_list_of_objects(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, dict) for one in value)


def _as_text(value: object) -> str | None:
    if value is None or isinstance(value, str):
        return value
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return repr(value) if is_number else json.dumps(value)


def _parquet_source(path: Path, data: bytes) -> TraceSource:
    def load(columns: list[str]) -> RawTable:
        try:
            frame = pl.read_parquet(io.BytesIO(data), columns=columns)
        except pl.exceptions.PolarsError:
            raise _damaged_parquet(path) from None
        return _table(path, frame.with_row_index(LINE, offset=1), "row")

    try:
        columns = list(pl.read_parquet_schema(io.BytesIO(data)))
    except pl.exceptions.PolarsError:
        raise _damaged_parquet(path) from None
    return TraceSource(path, columns, load)


def _damaged_parquet(path: Path) -> InputError:
    return _file_error(path, "a damaged or truncated Parquet file", "copy or download it again")


def _table(path: Path, frame: pl.DataFrame, line_name: Literal["line", "row"]) -> RawTable:
    is_blank = pl.all_horizontal(pl.exclude(LINE).is_null())
    frame = frame.filter(~is_blank)
    if frame.is_empty():
        raise _file_error(path, "a header but no requests", "give a file with at least one request")
    return RawTable(path, frame, line_name)
