"""From a file to a table of raw values: CSV, JSON or Parquet, plain or packed, recognised by their content.

csv_files.py and json_files.py say what these may look like. A column that holds objects is known by its
parts, joined by dots (`usage.prompt_tokens`), whichever kind of file it is in. Text is UTF-8, or UTF-16, as
Windows writes it. Values of text files stay text here: numbers are made later, where an error can name line
and value.
"""

from __future__ import annotations

import codecs
import gzip
import io
import logging
import zlib
from pathlib import Path

import polars as pl

from pointsman.errors import no_such_file
from pointsman.workload.csv_files import csv_source
from pointsman.workload.json_files import json_source
from pointsman.workload.objects import parts_of, split_objects
from pointsman.workload.raw import LINE, RawTable, TraceSource, file_error, raw_table

_log = logging.getLogger(__name__)
_READABLE = "give a CSV, JSONL or Parquet file, plain, gzip or zstd"
_MARK = b"\xef\xbb\xbf"  # of UTF-8
_NUM_ROWS_FOR_OBJECTS = 100
_LARGE = 50_000_000  # bytes: that takes seconds, in JSON a minute
_OTHERS = {
    b"PK\x03\x04": ("a zip archive or a spreadsheet", "unpack it, or save the spreadsheet as CSV"),
    b"BZh": ("packed with bzip2", "unpack it"),
    b"\xfd7zXZ": ("packed with xz", "unpack it"),
    b"ARROW1": ("an Arrow file", "write it as Parquet"),
    b"SQLite format 3": ("a database", "export the table as CSV"),
    b"<!DOCTYPE": ("a page in HTML", "download the file itself"),
    b"<html": ("a page in HTML", "download the file itself"),
    b"version https://git-lfs": ("a pointer of Git LFS", "git lfs pull"),
}

__all__ = ["LINE", "RawTable", "TraceSource", "open_source"]


def open_source(path: Path) -> TraceSource:
    data = _read_bytes(path)
    if not data.strip():
        raise file_error(path, "the file is empty", _READABLE)
    if data.startswith(b"PAR1"):
        return _parquet_source(path, data)
    for beginning, (what, remedy) in _OTHERS.items():
        if data.startswith(beginning):
            raise file_error(path, what, f"{remedy}; {_READABLE}")
    if b"\0" in data:
        raise file_error(path, "neither text nor Parquet", _READABLE)
    if not _is_utf8(data):
        raise file_error(path, "not in UTF-8", "save it as UTF-8; Excel calls that CSV UTF-8")
    if data.lstrip().startswith((b"{", b"[")):
        return json_source(path, data)
    if b"\n" not in data:
        data = data.replace(b"\r", b"\n")  # as Macs once ended lines
    return csv_source(path, data)


def _read_bytes(path: Path) -> bytes:
    if path.is_dir():
        raise file_error(path, "a directory", "give the file in it")
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise no_such_file("trace file", path) from None
    except OSError as error:
        raise file_error(
            path, f"cannot be read ({error.strerror})", "check the path and its rights"
        ) from None
    if len(data) > _LARGE:
        _log.info("%s: reading %d MB", path, round(len(data) / 1e6))
    data = _unpacked(path, data)
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        data = _decoded(path, data, "utf-16")
    elif len(data) % 2 == 0 and data[1:8:2] == b"\0\0\0\0" and 0 not in data[:8:2]:
        data = _decoded(path, data, "utf-16-le")
    return data.removeprefix(_MARK)


def _unpacked(path: Path, data: bytes) -> bytes:
    name = "gzip" if data.startswith(b"\x1f\x8b") else "zstd"
    if name == "zstd" and not data.startswith(b"\x28\xb5\x2f\xfd"):
        return data
    try:
        if name == "gzip":
            return gzip.decompress(data)
        # Polars is the one library here that knows zstd.
        lines = pl.read_lines(io.BytesIO(data))["line"]
    except (EOFError, OSError, zlib.error, pl.exceptions.PolarsError):
        raise file_error(path, f"a damaged or truncated {name} file", "copy or download it again") from None
    return "\n".join(lines).encode()


def _decoded(path: Path, data: bytes, encoding: str) -> bytes:
    try:
        return data.decode(encoding).encode()
    except UnicodeError:
        raise file_error(path, "damaged text in UTF-16", "save it as UTF-8") from None


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _parquet_source(path: Path, data: bytes) -> TraceSource:
    def load(columns: list[str]) -> RawTable:
        wanted = list(dict.fromkeys(column if column in top else owner[column] for column in columns))
        try:
            frame = pl.read_parquet(io.BytesIO(data), columns=wanted)
        except pl.exceptions.PolarsError:
            raise _damaged_parquet(path) from None
        frame = split_objects(frame, columns, owner)
        return raw_table(path, frame.with_row_index(LINE, offset=1), "row")

    try:
        top = list(pl.read_parquet_schema(io.BytesIO(data)))
        head = pl.read_parquet(io.BytesIO(data), n_rows=_NUM_ROWS_FOR_OBJECTS)
    except pl.exceptions.PolarsError:
        raise _damaged_parquet(path) from None
    owner = parts_of(head)
    return TraceSource(path, [*top, *owner], load)


def _damaged_parquet(path: Path) -> Exception:
    return file_error(path, "a damaged or truncated Parquet file", "copy or download it again")
