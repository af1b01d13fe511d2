"""The training seeds of docs/jobs.md, run again, against the best heuristic.

Runs the documented commands one after the other, each in a process of its own, and prints the table of the
page. The exit status is 1 if a training seed is no better than the best heuristic; benchmarks/results.py says
which figures differ from the page.

    .venv/bin/python benchmarks/jobs_claim.py                    # ten seeds, about 10 minutes
    .venv/bin/python benchmarks/jobs_claim.py --long-seeds 3     # and three of a million steps
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

RIVAL = "wide-and-short"
SHORT, LONG = "200,000 steps", "1,000,000 steps"
LONG_OPTIONS = ("--steps", "500000")  # a decision is about two steps
STUDENT_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}  # by seeds


class Figure(NamedTuple):
    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10, choices=STUDENT_95, metavar="2..10")
    parser.add_argument("--long-seeds", type=int, default=0, metavar="N")
    parser.add_argument("--out", type=Path, help="keep the runs here; what is there already is not run again")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        out = options.out or Path(folder)
        runs = {(SHORT, seed): judged(out / f"short-{seed}", seed) for seed in range(options.seeds)}
        for seed in range(options.long_seeds):
            runs[LONG, seed] = judged(out / f"long-{seed}", seed, *LONG_OPTIONS)
    print(training_table(runs))
    worse = [f"{kind}, seed {seed}" for (kind, seed), found in runs.items() if found["gain"]["low"] <= 0]
    print(f"no better than {RIVAL}, by the interval: {', '.join(worse) or 'none'}")
    sys.exit(bool(worse))


def pointsman(*arguments: str) -> Any:
    command = (sys.executable, "-m", "pointsman", *arguments)
    print(" ".join(("pointsman", *arguments)), file=sys.stderr, flush=True)
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, env=os.environ).stdout)


def judged(run: Path, seed: int, *options: str) -> dict[str, Any]:
    """Trained with this seed and judged on report seeds, beside the best heuristic."""
    if not (run / "judged.json").exists():
        pointsman("train", "--env", "jobs", "--seed", str(seed), "--out", str(run), "--json", *options)
        found = pointsman("evaluate", str(run), "--against", RIVAL, "--json")
        (run / "judged.json").write_text(json.dumps(found))
    policies = json.loads((run / "judged.json").read_text())["policies"]
    mine: dict[str, Any] = policies[run.name]
    return mine | {"gain": policies[RIVAL]["gain"], "rival": policies[RIVAL]}


def training_table(runs: dict[tuple[str, int], dict[str, Any]]) -> str:
    lines = [f"| training | seed | return | worst block of 20 | more than {RIVAL} |", "|---|--:|--:|--:|--:|"]
    for (kind, seed), found in runs.items():
        mean, gain = Figure(**found["return"]), Figure(**found["gain"])
        lines.append(f"| {kind} | {seed} | {mean} | {found['worst_block']:.3f} | {gain} |")
    for kind in dict.fromkeys(kind for kind, _ in runs):
        means = [found["return"]["mean"] for (one, _), found in runs.items() if one == kind]
        if len(means) in STUDENT_95:
            lines.append(
                f"| {kind} | mean of {len(means)} | {_mean(means)} | worst seed {min(means):.3f} | |"
            )
    rival = next(iter(runs.values()))["rival"]
    lines.append(f"| {RIVAL} | | {Figure(**rival['return'])} | {rival['worst_block']:.3f} | |")
    return "\n".join(lines) + "\n"


def _mean(values: list[float]) -> Figure:
    """With Student's interval: how far the mean of other seeds may be."""
    mean = statistics.mean(values)
    half = STUDENT_95[len(values)] * statistics.stdev(values) / len(values) ** 0.5
    return Figure(mean, mean - half, mean + half)


if __name__ == "__main__":
    main()
