"""Results in plain words, and as plain JSON: what was run by which version, and numbers any parser takes."""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pointsman import __version__

_ROOT = Path(__file__).parents[1]


def counted(count: int, noun: str) -> str:
    """1 alert, 2 alerts"""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def in_percent(share: float, decimals: int = 0) -> str:
    """12 %, as on pages and in tables; Python's own format leaves out the space."""
    return f"{100 * share:.{decimals}f} %"


def to_json(value: Any, indent: int | None = 2) -> str:
    """NaN and infinity, which JSON does not know, become null."""
    return json.dumps(_plain(value), indent=indent, ensure_ascii=False, allow_nan=False)


def _plain(value: Any) -> Any:
    match value:
        case Mapping():
            return {str(key): _plain(inner) for key, inner in value.items()}
        case np.ndarray():
            return _plain(value.tolist())
        case list() | tuple() | range():
            return [_plain(inner) for inner in value]
        case bool() | int() | str() | None:
            return value
        case float() | np.floating():
            return float(value) if math.isfinite(value) else None
        case np.integer():
            return int(value)
        case Path():
            return str(value)
    raise TypeError(f"no JSON for {type(value).__name__}")


def provenance() -> dict[str, Any]:
    return {"pointsman": __version__, "git_revision": git_revision()}


def git_revision() -> str | None:
    """The commit this package runs from, with `-dirty` after local changes; None if it is installed."""
    if not (_ROOT / ".git").exists():
        return None
    command = ["git", "-C", str(_ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
