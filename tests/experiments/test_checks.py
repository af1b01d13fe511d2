"""Traffic that cannot be served is warned about before it is simulated; other traffic is not."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pointsman.config import Config
from pointsman.errors import PointsmanWarning
from pointsman.experiments.simulate import prepare
from pointsman.spec import parse_spec

STEP_S = 0.1  # whatever is in the batch, so that 16 requests of 1 + 9 steps take a second
CLUSTER = {
    "replicas": 1,
    "scheduler": {"kind": "vllm-v1", "num_blocks": 10_000, "max_num_seqs": 16},
    "cost": {"kind": "linear", "a": STEP_S},
}


def told(workload: dict[str, Any], **cluster: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        prepare(parse_spec(Config, {"workload": workload, "cluster": CLUSTER | cluster}))
    assert all(one.category is PointsmanWarning for one in caught)
    return [str(one.message) for one in caught]


def trace(folder: Path, times: np.ndarray, prompt: int = 10) -> dict[str, Any]:
    rows = "".join(f"{time},{prompt},10\n" for time in times)
    path = folder / "mine.csv"
    path.write_text(f"time,prompt_tokens,completion_tokens\n{rows}")
    return {"trace": str(path)}


@pytest.mark.parametrize(("rate_rps", "is_told"), [(12.0, False), (20.0, True)])
def test_a_trace_above_capacity(tmp_path: Path, rate_rps: float, is_told: bool) -> None:
    """Capacity is 16 requests/s."""
    found = told(trace(tmp_path, 1.7e9 + np.arange(400) / rate_rps))
    assert len(found) == is_told
    assert not found or "mine.csv: 20 requests/s are above capacity (about 16/s)" in found[0]


def test_a_trace_whose_peak_is_above_capacity(tmp_path: Path) -> None:
    calm, peak = np.arange(0.0, 3600.0, 1.0), 3600.0 + np.arange(4000) / 30.0
    found = told(trace(tmp_path, np.concatenate((calm, peak))))
    assert len(found) == 1 and "at its busiest above capacity" in found[0]
    told_s = re.search(r"so that (\d+) s of work wait", found[0])
    assert told_s is not None and float(told_s[1]) == pytest.approx(4000 / 16 - 4000 / 30, abs=1)


@pytest.mark.parametrize(("rate_rps", "is_told"), [(12.0, False), (20.0, True)])
def test_a_rate_above_capacity(rate_rps: float, is_told: bool) -> None:
    lengths = {"kind": "fixed", "prompt": 10, "output": 10}
    found = told(
        {"arrivals": {"kind": "gamma", "cv": 0, "rate": rate_rps}, "lengths": lengths, "requests": 400}
    )
    assert len(found) == is_told


def test_requests_beyond_the_context_of_the_model(tmp_path: Path) -> None:
    workload = trace(tmp_path, np.arange(3.0), prompt=9000)
    (found,) = told(workload)
    assert "3 of 3 requests (the longest 9,010 tokens) are beyond the context of Llama-3-8B" in found
    assert told(workload | {"max_tokens": 8192}) == []
    assert told(workload, model="Llama-3.1-8B") == []
