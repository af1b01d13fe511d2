from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pointsman.config import SloSpec
from pointsman.errors import InputError
from pointsman.experiments.metrics import measure, slo_excess
from pointsman.experiments.objective import (
    BREACH_WEIGHT,
    DEFAULT_OBJECTIVE,
    OBJECTIVES,
    Limit,
    Objective,
    find_objective,
    parse_keep,
    parse_limit,
)
from pointsman.experiments.running import run_to_end
from pointsman.experiments.scenarios import find_scenario
from pointsman.experiments.simulate import prepare
from pointsman.routing.policy import PolicySpec, PolicyTables
from pointsman.simulator.cluster import Clusters

SLO = SloSpec(ttft_s=0.2, tpot_s=0.02)  # tight, so that many requests miss it
EVERYTHING = Objective(name="all", outstanding=1.0, waiting=8.0, age=0.8, slo=5.0)


def finished(scenario: str, policy: str, num_requests: int = 400) -> Clusters:
    prepared = prepare(find_scenario(scenario).config(3, [f"workload.requests={num_requests}"]))
    clusters = Clusters([prepared.config.cluster], [prepared.plans], [prepared.workload], [3])
    clusters.sims.slo_ttft_s, clusters.sims.slo_tpot_s = SLO.ttft_s, SLO.tpot_s
    run_to_end(clusters, PolicyTables([PolicySpec(kind=policy)], max_replicas=8))
    return clusters


@pytest.mark.parametrize(
    ("scenario", "policy"),
    [
        ("steady-chat", "random"),
        ("failure", "least-work"),  # requests are sent again, some after their first token
        ("tight-memory", "hold-until-room"),  # held, preempted
        ("mixed-hardware", "round-robin"),
    ],
)
def test_latencies_are_the_integrals(scenario: str, policy: str) -> None:
    """What training integrates between decisions adds up to what an evaluation reads off the latencies."""
    clusters = finished(scenario, policy)
    sim = clusters.sims[0]
    metrics = measure(clusters, 0, SLO)
    integral = (
        EVERYTHING.outstanding * sim.in_system_area
        + EVERYTHING.waiting * sim.unstarted_area
        + EVERYTHING.age * sim.age_area
        + EVERYTHING.slo * sim.slo_excess_s
    )
    cost = EVERYTHING.cost(metrics)
    assert cost == pytest.approx(integral / sim.num_requests, rel=1e-9)
    for term in ("outstanding", "waiting", "age", "slo"):  # each of them is big enough to be missed
        without = EVERYTHING.model_copy(update={term: 0.0})
        assert without.cost(metrics) < 0.999 * cost
    doubled = metrics | {"ttft_square_mean_s2": 2 * metrics["ttft_square_mean_s2"]}  # the half forgotten
    assert EVERYTHING.cost(doubled) != pytest.approx(cost, rel=1e-4)


def test_slo_excess_request_by_request() -> None:
    requests = finished("steady-chat", "random", 100).requests[0]

    def excess_of(request: Any) -> float:
        late = max(0.0, request.first_token_at - request.arrived_at - SLO.ttft_s)
        allowed = (request.num_decode - 1) * SLO.tpot_s
        return late + max(0.0, request.completed_at - request.first_token_at - allowed)

    expected = [excess_of(request) for request in requests]
    np.testing.assert_allclose(slo_excess(requests, SLO), expected, atol=1e-9)
    assert 0 < np.count_nonzero(expected) < len(expected)


def test_costs_of_arrays_are_arrays_of_costs() -> None:
    rows = [
        {"e2e_mean_s": 5.0, "ttft_mean_s": 0.5, "ttft_square_mean_s2": 1.0, "slo_excess_mean_s": 0.25},
        {"e2e_mean_s": 7.0, "ttft_mean_s": 0.1, "ttft_square_mean_s2": 0.5, "slo_excess_mean_s": 0.0},
    ]
    arrays = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    assert EVERYTHING.cost(rows[0]) == pytest.approx(5 + 8 * 0.5 + 0.8 * 0.5 * 1.0 + 5 * 0.25)
    np.testing.assert_allclose(EVERYTHING.cost(arrays), [EVERYTHING.cost(row) for row in rows])


def test_names() -> None:
    assert DEFAULT_OBJECTIVE in OBJECTIVES
    assert list(OBJECTIVES) == ["balanced", "mean", "tail", "slo"]
    assert all(find_objective(name).name == name for name in OBJECTIVES)
    assert find_objective("tail").age > find_objective("balanced").age > 0
    assert find_objective("mean").limits == () and find_objective("balanced").limits
    mean, balanced = find_objective("mean").formula, find_objective("balanced").formula
    assert mean.removeprefix("mean") == balanced.removeprefix("balanced")
    assert [name for name, one in OBJECTIVES.items() if one.slo > 0] == ["slo"]
    assert EVERYTHING.formula == "all = e2e + 8 × TTFT + 0.4 × TTFT² + 5 × seconds beyond the SLO"
    assert Objective(name="x").formula == "x = e2e"
    with pytest.raises(InputError, match=r"--objective.*did you mean 'balanced'"):
        find_objective("balance")
    with pytest.raises(InputError, match="known: balanced, mean, tail, slo"):
        find_objective("x")


def test_limits_are_policies_factors_or_seconds() -> None:
    assert parse_limit("ttft_p99", "least-delay") == Limit(metric="ttft_p99", policy="least-delay")
    assert (
        parse_limit("e2e_p99", 1.05) == parse_limit("e2e_p99", "1.05") == Limit(metric="e2e_p99", factor=1.05)
    )
    assert parse_limit("e2e_p99", "20s") == Limit(metric="e2e_p99", seconds=20.0)
    assert parse_limit("e2e_p99", "20s").text == "P99 end-to-end at most 20 s"
    assert parse_limit("ttft_p99", "0.9").text == "P99 TTFT at most 0.9 × late-binding's"
    for metric, value in (("ttft_p98", "1"), ("ttft_p99", "fast"), ("ttft_p99", "-1"), ("e2e_p99", "0s")):
        with pytest.raises(InputError, match="--keep"):
            parse_limit(metric, value)
    with pytest.raises(InputError, match="METRIC=LIMIT"):
        parse_keep(["ttft_p99"])
    kept = find_objective("balanced", parse_keep(["e2e_p99=least-delay"]))
    assert [limit.text for limit in kept.limits] == [
        "P99 TTFT at most 1.1 × late-binding's",
        "P99 end-to-end at most least-delay's",
    ]
    assert kept.references == ("late-binding", "least-delay")
    assert not find_objective("mean").limits


def test_what_is_beyond_a_limit_is_taken_from_the_score() -> None:
    objective = find_objective("balanced", {"ttft_p99": "2s"})
    metrics = {"ttft_p99_s": np.array([2.0, 2.2]), "e2e_p99_s": np.array([9.0, 12.0])}
    references = {"late-binding": {"ttft_p99_s": np.array([1.0, 9.0]), "e2e_p99_s": np.array([10.0, 10.0])}}
    breaches = objective.breaches(metrics, references)
    np.testing.assert_allclose(breaches["ttft_p99"], np.log([1.0, 1.1]), atol=1e-12)
    np.testing.assert_allclose(breaches["e2e_p99"], np.log([0.9, 1.2]))
    expected = (np.log(1.1) - 0.01) / 2 + (np.log(1.2) - 0.01) / 2
    assert objective.penalty(breaches) == pytest.approx(BREACH_WEIGHT * expected)
    assert objective.penalty(objective.breaches(references["late-binding"], references)) == pytest.approx(
        BREACH_WEIGHT * (np.log(4.5) - 0.01) / 2
    )
