"""Columns of tokens: how long prompts and outputs are, and which requests failed.

Logs record a request that failed with 0 tokens, or with no output length at all (`null`, `N/A`, `-`). Such
rows are no requests of that length: they are left out, with a warning, whatever the format.

A prompt may be counted in parts. Anthropic's `input_tokens` are those that no cache had to do with; what was
read from one, and what was written to it, is counted beside them. The prompt is their sum. OpenTelemetry's
attributes of the same names (`gen_ai.usage.input_tokens`) are such sums already.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from pointsman.errors import InputError, PointsmanWarning
from pointsman.workload.columns import parts_beside
from pointsman.workload.raw import RawTable
from pointsman.workload.times import FIX_ROW, read_numbers

_MAX_TOKENS = int(np.iinfo(np.int32).max)
# Anthropic, and Bedrock in its own spelling.
_UNCACHED = "input_tokens"
_CACHED = ("cache_read_input_tokens", "cache_creation_input_tokens", "cache_write_input_tokens")
_OF_TELEMETRY = "gen_ai."


def prompt_parts(columns: Sequence[str], prompts: str) -> list[str]:
    """The columns that are to be added to that of the prompts."""
    if _OF_TELEMETRY in prompts:
        return []
    return parts_beside(prompts, _UNCACHED, columns, _CACHED)


def token_counts(table: RawTable, column: str, parts: Sequence[str] = ()) -> NDArray[np.int32]:
    """[N] the sum of a column and its parts; 0 where a request failed."""
    total: NDArray[np.int64] = np.zeros(len(table.frame), np.int64)
    for one in (column, *parts):
        numbers = read_numbers(table, one)
        table.reject(one, numbers < 0, "fewer than 0 tokens", FIX_ROW)
        table.reject(one, numbers > _MAX_TOKENS, "more tokens than any model takes", FIX_ROW)
        table.reject(one, numbers != numbers.floor(), "not a whole number of tokens", FIX_ROW)
        total += numbers.to_numpy().astype(np.int64)
    table.reject(column, pl.Series(total > _MAX_TOKENS), "more tokens than any model takes", FIX_ROW)
    return total.astype(np.int32)


def with_zeros(table: RawTable, prompts: str, outputs: str, parts: Sequence[str]) -> RawTable:
    """0 for the lengths that a log does not have of requests that failed: of the output, or of both."""
    has_none = is_nothing(table, outputs)
    zeros = {prompts: has_none & is_nothing(table, prompts), outputs: has_none}
    return _zeroed(table, zeros | {part: is_nothing(table, part) for part in parts})


def is_nothing(table: RawTable, column: str) -> pl.Series:
    values = table.frame[column]
    if values.dtype == pl.String:
        is_number = values.cast(pl.Float64, strict=False).is_finite().fill_null(False)
        if is_number.all():
            return ~is_number
        values = table.values(column)
        return values.is_null() | (values.str.to_lowercase() == "nan").fill_null(False)
    return values.is_null() | (values.is_nan().fill_null(False) if values.dtype.is_float() else False)


def _zeroed(table: RawTable, zeros: Mapping[str, pl.Series]) -> RawTable:
    changed = [
        pl.select(pl.when(is_zero).then(_zero(table.frame[name])).otherwise(table.frame[name]).alias(name))
        for name, is_zero in zeros.items()
        if is_zero.any()
    ]
    return replace(table, frame=table.frame.with_columns(one.to_series() for one in changed))


def _zero(values: pl.Series) -> pl.Series:
    return pl.Series(["0" if values.dtype == pl.String else 0])


def served_rows(
    prompts: NDArray[np.int32], outputs: NDArray[np.int32], has_none: pl.Series, lifts_zeros: bool, path: Path
) -> NDArray[np.intp]:
    """Which of the requests [N] did not fail; how many did is said. `has_none` [N]: the log has no output.

    `lifts_zeros` takes a 0 for a length like others, to be clipped later.
    """
    is_served = ~has_none.to_numpy()
    if not lifts_zeros:
        is_served &= (prompts > 0) & (outputs > 0)
    served = np.flatnonzero(is_served)
    if len(served) == 0:
        raise InputError("trace file", str(path), "every request failed (no tokens)", "give another file")
    if len(served) < len(is_served):
        num_failures = len(is_served) - len(served)
        text = f"{path}: {num_failures} of {len(is_served)} requests failed (no tokens) and are left out"
        warnings.warn(PointsmanWarning(text), stacklevel=3)
    return served
