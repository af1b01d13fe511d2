"""Every heuristic, tuned, on the scenarios whose prompts share prefixes; beside `default`.

    python benchmarks/prefix_heuristics.py --tuned FOLDER [--scenarios multi-turn,rag] [--decisions N]

Parameters are searched for on selection seeds (as `pointsman tune` does), for TTFT + ½ TTFT²: one set for all
scenarios named. What was found is kept in FOLDER and used again. Then all serve the report seeds. In front of
a name: `tuned` for what was found, nothing for the parameters as they come.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import yaml

from pointsman.evaluation.compare import Comparison, compare
from pointsman.evaluation.tune import LINEAR_SCORE, Budget, shortened, tune
from pointsman.experiments.objective import Objective
from pointsman.experiments.scenarios import PREFIXES, REPORT_SEEDS, Scenario, find_scenario
from pointsman.report.tables import markdown, number, percent
from pointsman.routing.heuristics import HEURISTICS

FIRST_TOKENS = Objective(name="first tokens", outstanding=0.0, waiting=1.0, age=1.0)
TUNABLE = (*(name for name, one in HEURISTICS.items() if one.parameters), LINEAR_SCORE)
AS_THEY_COME = (
    "default",
    "default-mean",
    "late-binding",
    "least-delay",
    "session-affinity",
    "least-outstanding",
)


def tuned_policy(kind: str, scenarios: Sequence[Scenario], folder: Path, num_decisions: int) -> Path:
    path = folder / f"tuned-{kind}.yaml"
    if not path.exists():
        found = tune([shortened(one) for one in scenarios], FIRST_TOKENS, Budget(num_decisions), kind=kind)
        plain = {"policy": found.policy.model_dump(mode="json", exclude_defaults=True)}
        path.write_text(yaml.safe_dump(plain, sort_keys=False))
        what = found.policy.parameters or found.policy.weights
        print(f"tuned {kind} in {found.num_generations} generations: {what}", flush=True)
    return path


def report(comparisons: Sequence[Comparison], metric: str) -> str:
    """A row for each policy, a column for each scenario, and the geometric mean over least-outstanding's."""
    names = comparisons[0].names
    means = {name: [one.mean(name, metric) for one in comparisons] for name in names}
    if metric == "hit_share":
        return markdown(
            ["cached", *(one.name for one in comparisons)],
            [[name, *map(percent, row)] for name, row in means.items()],
        )
    best = np.min(list(means.values()), axis=0)
    rows = []
    for name, row in means.items():
        cells = [
            f"**{number(value)}**" if value == low else number(value)
            for value, low in zip(row, best, strict=True)
        ]
        ratio = np.exp(np.mean(np.log(np.array(row) / means["least-outstanding"])))
        rows.append([name, *cells, f"{ratio:.3f}"])
    header = [metric, *(one.name for one in comparisons), "mean ratio to least-outstanding"]
    return markdown(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tuned", type=Path, required=True, metavar="FOLDER", help="of tuned policies")
    parser.add_argument("--scenarios", default=",".join(PREFIXES))
    parser.add_argument("--decisions", type=int, default=5_000_000, help="to tune each heuristic with")
    parser.add_argument("--seeds", type=int, default=16)
    asked = parser.parse_args()
    asked.tuned.mkdir(parents=True, exist_ok=True)
    scenarios = [find_scenario(name) for name in asked.scenarios.split(",")]
    files = [str(tuned_policy(kind, scenarios, asked.tuned, asked.decisions)) for kind in TUNABLE]
    policies = [*AS_THEY_COME, *(kind for kind in TUNABLE if kind != LINEAR_SCORE), *files]
    comparisons = []
    for one in scenarios:
        configs = [one.config(seed) for seed in REPORT_SEEDS[: asked.seeds]]
        comparisons.append(compare(one.name, one.what, configs, policies))
        print(f"{one.name}: done", flush=True)
    for metric in ("ttft_mean_s", "ttft_p99_s", "hit_share", "work_peak"):
        print(f"\n{report(comparisons, metric)}")


if __name__ == "__main__":
    main()
