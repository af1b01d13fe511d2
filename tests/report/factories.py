"""Comparisons without a simulation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from pointsman.evaluation.compare import COST, CURVES, HEADLINES, Comparison, LatencyHistogram
from pointsman.evaluation.scenarios import find_scenario
from pointsman.policies.spec import PolicySpec
from pointsman.report.tables import HEADERS


def make_comparison(
    values: Mapping[str, Sequence[float]],
    name: str = "steady-chat",
    baseline: str = "least-outstanding",
) -> Comparison:
    """`values[policy]`: one a seed, the same for every metric."""
    num_seeds = len(next(iter(values.values())))
    rng = np.random.default_rng(0)
    curves = {policy: {curve: LatencyHistogram() for curve in CURVES} for policy in values}
    for policy, row in values.items():
        for histogram in curves[policy].values():
            histogram.add(np.mean(row) * rng.lognormal(size=2000))
    return Comparison(
        name=name,
        what="made up <for> a test",
        seeds=tuple(range(1000, 1000 + num_seeds)),
        configs=tuple(find_scenario("steady-chat").config(1000 + i) for i in range(num_seeds)),
        policies=tuple(PolicySpec(kind=policy) for policy in values),
        baseline=baseline,
        metrics={
            policy: {metric: np.array(row, float) for metric in {*HEADLINES, *HEADERS} - {COST}}
            for policy, row in values.items()
        },
        curves=curves,
    )
