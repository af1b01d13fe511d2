"""What `pointsman plan` says of goodputs that are known."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np

from pointsman.config import load_config
from pointsman.evaluation.bootstrap import NUM_RESAMPLES
from pointsman.evaluation.goodput import Goodput
from pointsman.plain import to_json
from pointsman.report.plan import PlanReport

CONFIG = load_config(
    None,
    (),
    {"workload": {"arrivals": {"kind": "poisson", "rate": 4}, "lengths": "azure-conv"}},
)


def goodput(rate_rps: float, **more: Any) -> Goodput:
    tried, shares = np.array([0.1, 20.0]), np.array([0.995 if rate_rps else 0.9, 0.5])
    spread = np.full(NUM_RESAMPLES, rate_rps)
    fields = {"is_highest_tried": False, **more}
    return Goodput(rate_rps, rate_rps, rate_rps, 10.0, tried, shares, spread, 6, **fields)


def report(policies: dict[str, Goodput], more: int | None = None, **fields: Any) -> PlanReport:
    return PlanReport(
        name="mine",
        config=CONFIG,
        seeds=range(1000, 1006),
        share=0.99,
        traffic_rps=4.0,
        target_rps=8.0,
        baseline="least-outstanding",
        policies=policies,
        one_more={"A100-80": goodput(12.0)},
        servers={"A100-80": more},
        counts={"A100-80": 1},
        **{"is_shared": False, "command": "pointsman plan", **fields},
    )


def test_a_policy_that_serves_none_is_compared_with_nobody() -> None:
    """The baseline's goodput was made up, and the best was `×1,160` of it."""
    found = report({"least-outstanding": goodput(0.0), "late-binding": goodput(8.0)}, 0)
    said = " ".join(found.verdict.lines)
    assert "least-outstanding serves none in time." in said
    assert "×" not in said.removeprefix("4 ×") and "not clearly more" not in said
    assert found.policy_rows()[0] == ["least-outstanding", "none", "", "", "baseline"]
    assert found.policy_rows()[1][-1] == ""
    plain = json.loads(to_json(found.results()))
    assert plain["policies"]["least-outstanding"]["goodput_rps"] is None
    assert plain["policies"]["late-binding"]["goodput_rps"] == 8.0
    assert plain["change"]["late-binding"] == {"ratio": None, "low": None, "high": None}
    page = found.html()
    assert "least-outstanding: none" in page and "NaN" not in page and "nan" not in page


def test_without_an_interval_only_what_is_large_is_more() -> None:
    unknown = {"resampled_rps": np.full(NUM_RESAMPLES, math.nan)}
    for rate, said in ((8.1, "not clearly more than least-outstanding"), (12.0, "That is +50 % against")):
        policies = {"least-outstanding": goodput(8.0), "late-binding": goodput(rate)}
        policies = {name: replace(one, **unknown) for name, one in policies.items()}
        assert any(said in line for line in report(policies, 0).verdict.lines)


def test_where_no_policy_serves_any_other_servers_may() -> None:
    nothing = {"least-outstanding": goodput(0.0)}
    hopeless = report(nothing)
    assert "cannot serve this within the service level at any rate" in hopeless.verdict.lines[0]
    assert not any("it takes" in line for line in hopeless.verdict.lines)
    assert any("For 8.00 requests/s it takes" in line for line in report(nothing, 2).verdict.lines)
    assert math.isnan(hopeless.changes["least-outstanding"].ratio)


def test_it_says_where_it_stopped_looking() -> None:
    stopped = report({"least-outstanding": goodput(9.84, is_highest_tried=True)}, 0)
    assert any("highest rate tried, at 98.4 % of capacity" in line for line in stopped.verdict.lines)
    assert stopped.policy_rows()[0][2] == "highest tried"
    assert not any(
        "highest rate" in line for line in report({"least-outstanding": goodput(9.0)}, 0).verdict.lines
    )


def test_it_says_what_capacity_is_where_prefixes_are_shared() -> None:
    rows = {"least-outstanding": goodput(30.0)}
    assert any("with nothing cached" in note for note in report(rows, is_shared=True).notes())
    assert not any("with nothing cached" in note for note in report(rows).notes())
