"""Columns that hold objects, as logs of answers do: a `usage` with prompt_tokens and completion_tokens.

An object is a struct of Parquet, or text in JSON or as Python prints a dictionary. Its parts become columns,
named by the path to them: `usage.prompt_tokens`.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping
from typing import Any

import polars as pl

_MAX_DEPTH = 5


def flat(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Keys and values, those of objects within it included, and of objects written as text."""
    for key, value in record.items():
        inner = _as_object(value)
        if inner is None or prefix.count(".") >= _MAX_DEPTH:
            yield prefix + key, value
        elif len(inner) == 1 and next(iter(inner)).startswith("$"):  # MongoDB's {"$date": …}
            yield prefix + key, next(iter(inner.values()))
        else:
            yield from flat(inner, f"{prefix}{key}.")


def as_text(value: object) -> str | None:
    """Half of a pair of UTF-16, which JSON can say and no text can hold, becomes U+FFFD."""
    if value is None:
        return None
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return repr(value) if is_number else as_text(json.dumps(value, default=str))


def parts_of(head: pl.DataFrame) -> dict[str, str]:
    """The parts that objects in these rows have, each with the column that it is in."""
    owner: dict[str, str] = {}
    for column in head.columns:
        if not _may_be_object(head[column].dtype):
            continue
        for value in head[column]:
            if (inner := _as_object(value)) is not None:
                owner.update((part, column) for part, _ in flat(inner, f"{column}."))
    return owner


def split_objects(frame: pl.DataFrame, columns: list[str], owner: Mapping[str, str]) -> pl.DataFrame:
    """These columns; those that `frame` does not have are parts of its objects, as text."""
    texts: dict[str, list[str | None]] = {column: [] for column in columns if column not in frame.columns}
    for column in {owner[part] for part in texts}:
        parts = [part for part in texts if owner[part] == column]
        for value in frame[column]:
            found = dict(flat(_as_object(value) or {}, f"{column}."))
            for part in parts:
                texts[part].append(as_text(found.get(part)))
    return frame.with_columns(pl.Series(name, values, pl.String) for name, values in texts.items()).select(
        columns
    )


def _may_be_object(dtype: pl.DataType) -> bool:
    return dtype == pl.String or isinstance(dtype, pl.Struct)


def _as_object(value: object) -> Mapping[str, Any] | None:
    if isinstance(value, str):
        text = value.strip()
        if not (text.startswith("{") and text.endswith("}")):
            return None
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            try:
                value = ast.literal_eval(text)
            except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
                return None
    return value if isinstance(value, dict) and all(isinstance(key, str) for key in value) else None
