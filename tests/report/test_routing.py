"""What the report of a routing run shows beside its evaluation."""

from __future__ import annotations

import numpy as np
import pytest

from pointsman.cli.evaluate import AGAINST as EVALUATE_AGAINST
from pointsman.config import load_config
from pointsman.errors import PointsmanWarning
from pointsman.experiments.simulate import prepare, simulate
from pointsman.report.routing import AGAINST, outstanding, replica_names
from pointsman.simulator.spec import ClusterSpec, ReplicaGroup


def test_load_is_what_a_count_of_requests_says() -> None:
    config = load_config(
        None,
        ["workload.requests=300", "policy.kind=hold-until-room", "cluster.replicas=3"],
        {"workload": {"arrivals": {"kind": "poisson", "rate": 40}, "lengths": "azure-conv"}},
    )
    with pytest.warns(PointsmanWarning, match="above capacity"):  # else nothing would be held
        prepared = prepare(config)
    (outcome,) = simulate([prepared])
    requests = outcome.requests
    times = np.linspace(0.0, float(requests["completed_at"].max()) + 1.0, 50)
    counts = outstanding(outcome, 3, times)
    expected = np.zeros_like(counts)
    for request in requests:
        for column, now in enumerate(times):
            if request["arrived_at"] <= now < request["dispatched_at"]:
                expected[0, column] += 1
            elif request["dispatched_at"] <= now < request["completed_at"]:
                expected[1 + request["replica"], column] += 1
    assert (counts == expected).all()
    assert counts[0].max() > 0 and (counts[1:].max(axis=1) > 0).all(), "some were held, all replicas served"
    assert (counts[:, -1] == 0).all()


def test_replicas_are_named_by_their_device() -> None:
    groups = (ReplicaGroup(count=2, device="H100"), ReplicaGroup())
    assert replica_names(ClusterSpec(replicas=groups, device="A40")) == ["0 H100", "1 H100", "2 A40"]


def test_report_and_evaluate_name_the_same_rivals() -> None:
    assert ",".join(AGAINST) == EVALUATE_AGAINST
