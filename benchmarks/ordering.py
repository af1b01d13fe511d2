"""What the order of held requests is worth, at normal load and past saturation.

Past saturation, each row is a policy, a limit on the requests of a replica (`policy.stream_limit`), how much
slower large requests age (`policy.small_first`), and the time by which small ones may overtake them
(`cluster.hold.overtake_s`). The change is against the row with the lowest mean end-to-end latency among those
in order of arrival; the longest wait at the router stands beside its limit, `cluster.hold.max_hold_s`.

    python benchmarks/ordering.py [--suite saturated] [--seeds 16] [--selection]

At normal load, each row is a scenario: what changes if large requests age slower, for two policies.

    python benchmarks/ordering.py --normal [--seeds 16] [--selection]
"""

from __future__ import annotations

import argparse
import warnings
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pointsman.errors import PointsmanWarning
from pointsman.experiments.scenarios import (
    REPORT_SEEDS,
    SCENARIOS,
    SELECTION_SEEDS,
    Scenario,
    find_scenario,
    find_suite,
)
from pointsman.experiments.simulate import Prepared, prepare, simulate
from pointsman.report.tables import markdown
from pointsman.routing.ordering import SMALL_FIRST
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
    small_first: float = 0.0

    @property
    def name(self) -> str:
        limit = f", {self.stream_limit} a replica" if self.stream_limit else ""
        ageing = ", large age slower" if self.small_first else ""
        return f"{self.kind}{limit}{ageing}{', small first' if self.overtake_s else ''}"


BY_ARRIVAL = [
    *(Row(kind) for kind in ("least-outstanding", "hold-until-room", "late-binding", "gathering", "default")),
    *(Row(kind, 96) for kind in ("hold-until-room", "late-binding", "gathering")),
]
BY_SIZE = [
    *(Row(kind, small_first=SMALL_FIRST) for kind in ("late-binding", "default")),
    Row("late-binding", 96, small_first=SMALL_FIRST),
    *(Row(kind, None, OVERTAKE_S) for kind in ("late-binding", "default")),
    *(Row(kind, 96, OVERTAKE_S) for kind in ("hold-until-room", "late-binding", "gathering")),
]


class Found(NamedTuple):
    metrics: dict[str, Floats]  # [seeds] each
    longest_wait_s: float


def run(row: Row, scenario: Scenario, seeds: range) -> Found:
    override = f"cluster.hold.overtake_s={row.overtake_s}"
    policy = PolicySpec.model_validate({"kind": row.kind})
    policy = policy.model_copy(update={"stream_limit": row.stream_limit, "small_first": row.small_first})
    prepared: list[Prepared] = [prepare(scenario.config(seed, [override])) for seed in seeds]
    outcomes = simulate(prepared, 2, policies=[policy] * len(prepared))
    waits_s = [(one.requests["dispatched_at"] - one.requests["arrived_at"]).max() for one in outcomes]
    metrics = {name: np.array([one.metrics[name] for one in outcomes]) for name in METRICS.values()}
    return Found(metrics, float(max(waits_s)))


def table(scenario: Scenario, seeds: range) -> str:
    found = {row: run(row, scenario, seeds) for row in (*BY_ARRIVAL, *BY_SIZE)}
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


def normal_table(seeds: range) -> str:
    """Changes by the order alone, in every scenario; the last row is their geometric mean."""
    kinds = ("late-binding", "default")
    headers = [f"{kind}: {metric}" for kind in kinds for metric in METRICS]
    logs: dict[str, list[float]] = {}
    for name in SCENARIOS:
        scenario = find_scenario(name)
        logs[name] = []
        for kind in kinds:
            before = run(Row(kind), scenario, seeds)
            after = run(Row(kind, small_first=SMALL_FIRST), scenario, seeds)
            ratios = (after.metrics[key].mean() / before.metrics[key].mean() for key in METRICS.values())
            logs[name] += [float(np.log(ratio)) for ratio in ratios]
    logs["all"] = np.mean(list(logs.values()), axis=0).tolist()
    rows = [
        [name, *(f"{100 * np.expm1(change):+.1f} %".replace("-", "−") for change in changes)]
        for name, changes in logs.items()
    ]
    return markdown(["scenario", *headers], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--suite", default="saturated")
    parser.add_argument("--normal", action="store_true", help="what changes at normal load")
    parser.add_argument("--seeds", type=int, default=16)
    parser.add_argument("--selection", action="store_true", help="selection seeds, to try things out")
    options = parser.parse_args()
    seeds = (SELECTION_SEEDS if options.selection else REPORT_SEEDS)[: options.seeds]
    warnings.simplefilter("ignore", PointsmanWarning)  # more traffic than the cluster can serve
    if options.normal:
        print(normal_table(seeds))
        return
    for scenario in find_suite(options.suite):
        print(f"## {scenario.name}\n\n{scenario.what}\n\n{table(scenario, seeds)}\n", flush=True)


if __name__ == "__main__":
    main()
