from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from pointsman import __version__, plain
from pointsman.plain import git_revision, provenance, to_json


def test_numbers_any_parser_takes() -> None:
    value = {
        "nan": math.nan,
        "inf": [math.inf, -math.inf],
        "array": np.array([1.5, np.nan]),
        "ints": (np.int64(3), True, 4),
        "path": Path("a/b"),
        "text": "µs",
        1: None,
        "range": range(2),
        "f4": np.float32(0.5),
    }
    assert json.loads(to_json(value)) == {
        "nan": None,
        "inf": [None, None],
        "array": [1.5, None],
        "ints": [3, True, 4],
        "path": "a/b",
        "text": "µs",
        "1": None,
        "range": [0, 1],
        "f4": 0.5,
    }


def test_doubles_survive() -> None:
    values = np.random.default_rng(0).uniform(0, 1e5, 1000)
    assert json.loads(to_json(values)) == values.tolist()


def test_what_has_no_json_is_our_mistake() -> None:
    with pytest.raises(TypeError, match="no JSON for object"):
        to_json(object())


def test_revision_is_that_of_the_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert provenance()["pointsman"] == __version__
    revision = git_revision()
    assert revision is None or len(revision.removesuffix("-dirty")) == 40
    monkeypatch.setattr(plain, "_ROOT", tmp_path)
    assert git_revision() is None
