"""Whatever a log holds, no rule stumbles: constants, gaps, zeros, numbers of any size, columns missing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pointsman.diagnosis.curves import Array, RunLog
from pointsman.diagnosis.findings import diagnose
from pointsman.errors import InputError
from pointsman.plain import to_json

from .made import foreign, healthy, make

NAMES = [
    *healthy(rows=8),
    "approx_kl_max",
    "invalid_late_frac",
    "gamma",
    "reward/latency",
    "eval_invalid_frac",
]


@st.composite
def logs(draw: st.DrawFn) -> RunLog:
    rows = draw(st.sampled_from([1, 2, 3, 7, 8, 16, 40]))
    rng = np.random.default_rng(draw(st.integers(0, 1000)))

    def column(kind: str) -> Array:
        match kind:
            case "constant":
                return np.full(rows, rng.normal())
            case "zero":
                return np.zeros(rows)
            case "huge":
                return rng.normal(size=rows) * 1e30
            case "tiny":
                return rng.normal(size=rows) * 1e-30
            case "nothing":
                return np.full(rows, np.nan)
            case "once":
                return np.where(np.arange(rows) == rng.integers(rows), rng.normal(), np.nan)
        values = rng.random(rows) if kind == "share" else np.cumsum(rng.normal(size=rows))
        return np.where(rng.random(rows) < 0.3, np.nan, values)

    kinds = st.sampled_from(["constant", "zero", "huge", "tiny", "nothing", "once", "share", "walk"])
    names = draw(st.lists(st.sampled_from(NAMES), unique=True, min_size=1))
    columns = {name: column(draw(kinds)) for name in names}
    columns["update"] = np.arange(1.0, rows + 1)
    return (make if draw(st.booleans()) else foreign)(columns)


@settings(max_examples=300)
@given(logs())
def test_no_rule_stumbles(log: RunLog) -> None:
    try:
        diagnosis = diagnose(log)
    except InputError:
        return
    assert [one for one in diagnosis.not_judged if "Error" in one.why] == []
    to_json(diagnosis.to_dict())


@pytest.mark.parametrize("name", NAMES)
def test_a_column_may_be_missing(name: str) -> None:
    columns = healthy()
    columns.pop(name, None)
    diagnosis = diagnose(make(columns))
    assert diagnosis.is_clean, [str(one) for one in diagnosis.findings]
    assert [one for one in diagnosis.not_judged if "Error" in one.why] == []
