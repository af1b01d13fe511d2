"""What the order of held requests is worth past saturation, and what it costs at normal load.

Each row is a policy, a limit on the requests of a replica (`policy.stream_limit`) and the time by which small
requests may overtake (`cluster.hold.overtake_s`, 0: in order of arrival). The change is against the row with
the lowest mean end-to-end latency among those in order of arrival; the longest wait at the router stands
beside its limit, `cluster.hold.max_hold_s`.

    python benchmarks/ordering.py [--suite saturated] [--seeds 16] [--selection]
"""

from __future__ import annotations

import argparse
import warnings
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pointsman.errors import PointsmanWarning
from pointsman.experiments.scenarios import REPORT_SEEDS, SELECTION_SEEDS, Scenario, find_suite
from pointsman.experiments.simulate import Prepared, prepare, simulate
from pointsman.report.tables import markdown
from pointsman.routing.policy import HoldSpec, PolicySpec

OVERTAKE_S = 60.0
METRICS = {
    "e2e mean": "e2e_mean_s",
    "e2e P99": "e2e_p99_s",
    "TTFT mean": "ttft_mean_s",
    "TTFT P99": "ttft_p99_s",
}
Floats = NDArray[np.float64]


class Row(NamedTuple):
    kind: str
    stream_limit: int | None = None
    overtake_s: float = 0.0

    @property
    def name(self) -> str:
        limit = f", {self.stream_limit} a replica" if self.stream_limit else ""
        return f"{self.kind}{limit}{', small first' if self.overtake_s else ''}"


BY_ARRIVAL = [
    *(Row(kind) for kind in ("least-outstanding", "hold-until-room", "late-binding", "gathering", "default")),
    *(Row(kind, 96) for kind in ("hold-until-room", "late-binding", "gathering")),
]
SMALL_FIRST = [
    Row("late-binding", None, OVERTAKE_S),
    Row("default", None, OVERTAKE_S),
    *(Row(kind, 96, OVERTAKE_S) for kind in ("hold-until-room", "late-binding", "gathering")),
]


class Found(NamedTuple):
    metrics: dict[str, Floats]  # [seeds] each
    longest_wait_s: float


def run(row: Row, scenario: Scenario, seeds: range) -> Found:
    override = f"cluster.hold.overtake_s={row.overtake_s}"
    policy = PolicySpec.model_validate({"kind": row.kind})
    policy = policy.model_copy(update={"stream_limit": row.stream_limit})
    prepared: list[Prepared] = [prepare(scenario.config(seed, [override])) for seed in seeds]
    outcomes = simulate(prepared, 2, policies=[policy] * len(prepared))
    waits_s = [(one.requests["dispatched_at"] - one.requests["arrived_at"]).max() for one in outcomes]
    metrics = {name: np.array([one.metrics[name] for one in outcomes]) for name in METRICS.values()}
    return Found(metrics, float(max(waits_s)))


def table(scenario: Scenario, seeds: range) -> str:
    found = {row: run(row, scenario, seeds) for row in (*BY_ARRIVAL, *SMALL_FIRST)}
    best = min(BY_ARRIVAL, key=lambda row: found[row].metrics["e2e_mean_s"].mean())
    rows = []
    for row, (metrics, longest_wait_s) in found.items():
        cells = []
        for name in METRICS.values():
            mean_s, best_s = metrics[name].mean(), found[best].metrics[name].mean()
            change = f"{mean_s / best_s - 1.0:+.0%}" if row != best else "best"
            cells.append(f"{mean_s:.2f} s ({change})")
        ratios = metrics["e2e_mean_s"] / found[best].metrics["e2e_mean_s"] - 1.0
        cells += [f"{ratios.max():+.0%}", f"{longest_wait_s:.1f} of {HoldSpec().max_hold_s:g} s"]
        rows.append([row.name, *cells])
    return markdown(["policy", *METRICS, "e2e mean, worst seed", "longest wait"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--suite", default="saturated")
    parser.add_argument("--seeds", type=int, default=16)
    parser.add_argument("--selection", action="store_true", help="selection seeds, to try things out")
    options = parser.parse_args()
    seeds = (SELECTION_SEEDS if options.selection else REPORT_SEEDS)[: options.seeds]
    warnings.simplefilter("ignore", PointsmanWarning)  # more traffic than the cluster can serve
    for scenario in find_suite(options.suite):
        print(f"## {scenario.name}\n\n{scenario.what}\n\n{table(scenario, seeds)}\n", flush=True)


if __name__ == "__main__":
    main()
