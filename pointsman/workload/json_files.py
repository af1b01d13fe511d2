"""JSON: one object per line, objects one after the other, a list of them, or an object that holds them.

An object may hold one list of objects (`{"data": […]}`), a list for each column (what vLLM's benchmark
writes), or an object for each column, by the row (pandas). Objects within objects, and objects written as
text, are taken apart (objects.py).
"""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl

from pointsman.errors import InputError
from pointsman.workload.objects import as_text, flat
from pointsman.workload.raw import LINE, RawTable, TraceSource, file_error, raw_table

# Optional keys (a session) may be absent from the first line, or that be about something else.
_NUM_LINES_FOR_KEYS = 10_000
_LISTS = {"data", "requests", "records", "rows", "results", "items", "logs", "entries", "traces", "spans"}
_ONE_PER_LINE = "write one JSON object per line, or one list of them"


def json_source(path: Path, data: bytes) -> TraceSource:
    records = _json_list(path, data)

    def load(columns: list[str]) -> RawTable:
        texts: dict[str, list[str | None]] = {column: [] for column in columns}
        lines = []
        for line, record in _json_records(path, data, records):
            lines.append(line)
            found = dict(flat(record))
            for column, values in texts.items():
                values.append(as_text(found.get(column)))
        frame = pl.DataFrame({LINE: lines, **texts}, schema_overrides=dict.fromkeys(columns, pl.String))
        return raw_table(path, frame, "row" if records is not None else "line")

    keys: dict[str, None] = {}
    for (_, record), _ in zip(_json_records(path, data, records), range(_NUM_LINES_FOR_KEYS), strict=False):
        keys.update(dict.fromkeys(key for key, _ in flat(record)))
    if not keys:
        raise file_error(path, "holds no requests", "give a file with at least one")
    return TraceSource(path, list(keys), load)


def _json_records(path: Path, data: bytes, records: list[Any] | None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Objects and where they stand: place in the list, or line."""
    if records is not None:
        for place, record in enumerate(records, start=1):
            if not isinstance(record, dict):
                shown = as_text(record)
                raise InputError(f"{path} row {place}", shown, "not a JSON object", "give a list of objects")
            yield place, record
        return
    for line, text in enumerate(io.BytesIO(data), start=1):
        if not text.strip():
            continue
        try:
            record = json.loads(text.rstrip().removesuffix(b","))
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict):
            shown = text.decode("utf-8").strip()
            raise InputError(f"{path} line {line}", shown, "not a JSON object", _ONE_PER_LINE)
        yield line, record


def _json_list(path: Path, data: bytes) -> list[Any] | None:
    """The list that the file is, or that the one object in it holds; None for one object per line."""
    is_list = data.lstrip().startswith(b"[")
    try:
        whole = json.loads(data)
    except (ValueError, RecursionError):
        if is_list:
            problem = "begins with [ and is not a list in JSON"
            raise file_error(path, problem, _ONE_PER_LINE) from None
        return _one_after_the_other(data)
    return whole if isinstance(whole, list) else _held_in(whole)


def _held_in(whole: dict[str, Any]) -> list[Any] | None:
    """The rows that one object holds; None if it is a row itself."""
    lists = {key: value for key, value in whole.items() if _is_list_of_objects(value)}
    named = [value for key, value in lists.items() if key.lower() in _LISTS]
    if len(named) == 1:
        return list(named[0])
    # One request alone has numbers, too; its list is one of messages.
    is_request = any(isinstance(value, int | float | dict) for value in whole.values())
    if len(lists) == 1 and not is_request:
        return list(next(iter(lists.values())))
    return _rows_of_columns(whole)


def _rows_of_columns(whole: dict[str, Any]) -> list[Any] | None:
    if len(whole) > 1 and all(isinstance(value, dict) for value in whole.values()):
        rows = list(next(iter(whole.values())))
        if rows and all(list(value) == rows for value in whole.values()):
            return [{key: value[row] for key, value in whole.items()} for row in rows]
    lengths = Counter(len(value) for value in whole.values() if isinstance(value, list) and value)
    usual, count = lengths.most_common(1)[0] if lengths else (0, 0)
    if count < 2:
        return None
    columns = {key: value for key, value in whole.items() if isinstance(value, list) and len(value) == usual}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _one_after_the_other(data: bytes) -> list[Any] | None:
    """Objects that do not end where lines end; None where the file is no such thing."""
    first = data.lstrip().partition(b"\n")[0].rstrip().removesuffix(b",")
    try:
        if isinstance(json.loads(first), dict):
            return None
    except (ValueError, RecursionError):
        pass
    decoder, text, at = json.JSONDecoder(), data.decode("utf-8"), 0
    records: list[Any] = []
    while True:
        while at < len(text) and text[at] in " \t\r\n,":
            at += 1
        if at == len(text):
            return records
        try:
            record, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return None
        records.append(record)


def _is_list_of_objects(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, dict) for one in value)
