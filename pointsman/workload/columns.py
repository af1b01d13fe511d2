"""Which column holds what: the names that logs and published traces use, and what to say if none is there.

Names are compared without case, spaces and underscores. A nested key (`usage.prompt_tokens` in a log of
answers) is known by its last part. Where a file has several columns for one thing, the first name wins.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from pointsman.errors import InputError
from pointsman.workload.files import TraceSource
from pointsman.workload.spec import TimeUnit

Names = Sequence[str]

# Of Vidur, Azure, Mooncake, BurstGPT, of usage blocks (OpenAI, Anthropic, Gemini, Langfuse), OpenTelemetry,
# and of vLLM and its like, whose benchmark has a list of each.
REQUEST_NAMES: Mapping[str, Names] = {
    "arrived_at": (
        *("arrived_at", "arrival_time", "arrival_timestamp", "arrival", "arrived", "timestamp", "ts", "time"),
        *(
            "time_iso8601",
            "time_local",
            "request_timestamp",
            "requested_at",
            "request_start_time",
            "received_at",
        ),
        *("start_time", "start_timestamp", "started_at", "start", "sent_at", "send_time"),
        *("created", "created_at", "creation_time", "created_time", "datetime", "date_time", "date"),
        *("start_times", "arrival_times", "timestamps", "start_time_unix_nano"),
        # In nginx's logs, `msec` says when a request ended and `request_time` how long it took; others write
        # durations under both names.
        *("msec", "request_time"),
    ),
    "num_prefill_tokens": (
        *("num_prefill_tokens", "prompt_tokens", "num_prompt_tokens", "input_tokens", "num_input_tokens"),
        *("context_tokens", "request_tokens", "prefill_tokens", "input_length", "prompt_length"),
        *("prompt_len", "input_len", "prompt_token_count", "input_token_count", "prompt_tokens_count"),
        *("n_prompt_tokens", "tokens_in", "tokens_prompt", "prompt_size", "isl", "input_usage"),
        *("usage_input", "input_lens", "prompt_lens", "input_lengths", "prompt_lengths"),
    ),
    "num_decode_tokens": (
        *("num_decode_tokens", "completion_tokens", "num_completion_tokens", "output_tokens"),
        *("num_output_tokens", "generated_tokens", "num_generated_tokens", "generation_tokens"),
        "num_generation_tokens",
        *("response_tokens", "decode_tokens", "output_length", "completion_length", "response_length"),
        *("output_len", "completion_len", "expected_output_len", "completion_token_count"),
        *("output_token_count", "candidates_token_count", "n_completion_tokens", "tokens_out"),
        *("tokens_completion", "osl", "output_usage", "usage_output", "output_lens", "output_lengths"),
    ),
    "session": ("session_id", "session", "conversation_id", "chat_id", "thread_id"),
    "block_hashes": ("hash_ids", "block_hashes", "block_hash_ids", "prefix_hashes"),
}
_MAX_SHOWN = 20
_UNIT_OF_SUFFIX: Mapping[str, TimeUnit] = {
    "s": "s",
    "sec": "s",
    "seconds": "s",
    "ms": "ms",
    "msec": "ms",
    "millis": "ms",
    "us": "us",
    "micros": "us",
    "ns": "ns",
    "nanos": "ns",
    "nano": "ns",
}


def _key(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def find_column(columns: Sequence[str], names: Names) -> str | None:
    """The column with the first of these names, in any spelling, or with a unit behind it."""
    by_key: dict[str, str] = {}
    for key_of in (lambda column: column, lambda column: column.rpartition(".")[2], _without_unit):
        for column in columns:
            by_key.setdefault(_key(key_of(column)), column)
    return next((by_key[_key(name)] for name in names if _key(name) in by_key), None)


def parts_beside(column: str, name: str, columns: Sequence[str], others: Names) -> list[str]:
    """If a column has this name, the others in the same place: of the same object, if it is part of one."""
    place, _, last = column.rpartition(".")
    if _key(last) != _key(name):
        return []
    keys = {_key(other) for other in others}
    beside = [one for one in columns if one.rpartition(".")[0] == place]
    return [one for one in beside if _key(one.rpartition(".")[2]) in keys]


def unit_of(column: str) -> TimeUnit | None:
    """The unit that a name such as `arrival_ms` or `duration (s)` tells."""
    suffix = re.search(r"[^a-zA-Z0-9]([a-zA-Z]+)\)?$", column)
    return _UNIT_OF_SUFFIX.get(suffix.group(1).lower()) if suffix else None


def _without_unit(column: str) -> str:
    last = column.rpartition(".")[2]
    return re.sub(r"[^a-zA-Z0-9]+[a-zA-Z]+\)?$", "", last) if unit_of(last) else last


def choose_columns(
    source: TraceSource,
    given: Mapping[str, str | None],
    known: Mapping[str, Names],
    required: Mapping[str, str],
) -> dict[str, str]:
    """For each field of `known` that is there, the column: as given, or found by its name.

    `required` fields, each with what it is in words, must be found; an error shows how to map them.
    """
    found: dict[str, str] = {}
    for field, names in known.items():
        column = given.get(field)
        if column is not None and column not in source.columns:
            problem = f"column {column!r} for {field} is missing from {_listed(source.columns)}"
            raise InputError("trace file", str(source.path), problem, "name a column that is there")
        column = column or find_column(source.columns, names)
        if column is not None:
            found[field] = column
    missing = {field: what for field, what in required.items() if field not in found}
    if missing and all(column[:1].isdigit() for column in source.columns):
        remedy = f"put a line with the names before it: {','.join(required)}"
        raise InputError("trace file", str(source.path), "its first line has numbers, no names", remedy)
    if missing:
        problem = f"no known column for {' and '.join(missing.values())} among {_listed(source.columns)}"
        mapped = ", ".join(f"{field}: NAME" for field in missing)
        remedy = f"add it, or name it with trace: {{path: {source.path.name}, columns: {{{mapped}}}}}"
        raise InputError("trace file", str(source.path), problem, remedy)
    return found


def _listed(columns: Sequence[str]) -> str:
    more = f" and {len(columns) - _MAX_SHOWN} more" if len(columns) > _MAX_SHOWN else ""
    return ", ".join(columns[:_MAX_SHOWN]) + more
