"""Logs in JSON: one object a line (RLlib's result.json, home-made loggers), a list of objects, or an object
that holds one such list (`log_history` in the trainer_state.json of Hugging Face's trainers).

Keys of objects in objects are joined by slashes, as RLlib does in its own CSV.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

Row = tuple[list[str], list[str]]  # names and cells

_DEEPEST = 8  # objects within objects


class JsonLog(NamedTuple):
    rows: list[Row]
    num_damaged: int  # lines


def looks_like_json(text: str) -> bool:
    return text.lstrip()[:1] in ("{", "[")


def read_json(text: str) -> JsonLog:
    """No rows if nothing in it is an object."""
    whole = _parsed(text)
    if whole is not None:
        return JsonLog([_row(record) for record in _records(whole)], 0)
    lines = [_parsed(line) for line in text.splitlines() if line.strip()]
    records = [line for line in lines if isinstance(line, dict)]
    return JsonLog([_row(record) for record in records], len(lines) - len(records))


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _records(whole: Any) -> list[dict[str, Any]]:
    if isinstance(whole, dict):
        lists = [value for value in whole.values() if isinstance(value, list) and _are_objects(value)]
        whole = lists[0] if len(lists) == 1 else [whole]
    return [record for record in whole if isinstance(record, dict)] if isinstance(whole, list) else []


def _are_objects(values: list[Any]) -> bool:
    return bool(values) and all(isinstance(value, dict) for value in values)


def _row(record: dict[str, Any]) -> Row:
    pairs = list(_flat(record))
    return [name for name, _ in pairs], [cell for _, cell in pairs]


def _flat(record: dict[str, Any], prefix: str = "", depth: int = 0) -> Iterator[tuple[str, str]]:
    for key, value in record.items():
        if isinstance(value, dict) and depth < _DEEPEST:
            yield from _flat(value, f"{prefix}{key}/", depth + 1)
        elif isinstance(value, bool):
            yield prefix + key, str(int(value))
        elif isinstance(value, int | float | str):
            yield prefix + key, str(value)
