"""The figures of docs/jobs.md from scratch: heuristics and training seeds, and which differ from the page.

Runs the documented commands one after the other, each in a process of its own, prints the page's two tables
as they are now, and compares them with the page: two figures differ if their 95 % intervals do not meet. The
exit status is 1 if any does, or if a training seed is no better than the best heuristic.

    .venv/bin/python benchmarks/jobs_claim.py                    # ten seeds, about 10 minutes
    .venv/bin/python benchmarks/jobs_claim.py --long-seeds 3     # and three of a million steps
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

PAGE = Path(__file__).parents[1] / "docs" / "jobs.md"
RIVAL = "wide-and-short"
SHORT, LONG = "200,000 steps", "1,000,000 steps"
LONG_OPTIONS = ("--steps", "500000")  # a decision is about two steps
NORMAL_95 = 1.96
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
        text = heuristics_table(pointsman("compare", "--env", "jobs", "--json")["policies"])
        runs = {(SHORT, seed): judged(out / f"short-{seed}", seed) for seed in range(options.seeds)}
        for seed in range(options.long_seeds):
            runs[LONG, seed] = judged(out / f"long-{seed}", seed, *LONG_OPTIONS)
    text += "\n" + training_table(runs)
    revision = subprocess.run(("git", "rev-parse", "--short", "HEAD"), capture_output=True, text=True).stdout
    print(f"\n{datetime.now(UTC):%Y-%m-%d}, revision {revision.strip()}\n\n{text}")
    worse = [f"{kind}, seed {seed}" for (kind, seed), found in runs.items() if found["gain"]["low"] <= 0]
    print(f"no better than {RIVAL}, by the interval: {', '.join(worse) or 'none'}")
    differing = list(differences(figures(PAGE.read_text(encoding="utf-8")), figures(text)))
    print("\n".join(differing) or "every figure agrees with docs/jobs.md")
    sys.exit(bool(differing or worse))


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
    return mine | {"gain": policies[RIVAL]["gain"]}


def heuristics_table(policies: dict[str, Any]) -> str:
    lines = ["| policy | return | worst block | no-op |", "|---|---:|---:|---:|"]
    for name, found in sorted(policies.items(), key=lambda item: -item[1]["return"]["mean"]):
        values = found["metrics"]["return"]
        error = statistics.stdev(values) / len(values) ** 0.5
        noop = f"{100 * found['means']['noop_frac']:.0f} %"
        lines.append(
            f"| {name} | {found['return']['mean']:.3f} ± {error:.3f} | {found['worst_block']:.3f} | {noop} |"
        )
    return "\n".join(lines) + "\n"


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
    return "\n".join(lines) + "\n"


def _mean(values: list[float]) -> Figure:
    """With Student's interval: how far the mean of other seeds may be."""
    mean = statistics.mean(values)
    half = STUDENT_95[len(values)] * statistics.stdev(values) / len(values) ** 0.5
    return Figure(mean, mean - half, mean + half)


def figures(markdown: str) -> dict[str, Figure]:
    """The column `return` of every table that has one, by the names of its rows."""
    found: dict[str, Figure] = {}
    header: list[str] = []
    for line in markdown.splitlines():
        cells = [cell.strip(" *") for cell in line.strip().strip("|").split("|")]
        if not line.startswith("|"):
            header = []
        elif not header:
            header = cells
        elif "return" in header and not set(cells[0]) <= set("-:"):
            name = ", ".join(cells[: 2 if "seed" in header else 1])
            figure = parse_figure(cells[header.index("return")])
            if figure is not None:
                found[name] = figure
    return found


def parse_figure(text: str) -> Figure | None:
    """`0.770 ± 0.007`, a standard error, or `0.809 [0.798, 0.818]`, an interval of 95 %."""
    numbers = [float(number) for number in re.findall(r"-?\d+\.\d+", text.replace("−", "-"))]
    if len(numbers) == 2 and "±" in text:
        mean, error = numbers
        return Figure(mean, mean - NORMAL_95 * error, mean + NORMAL_95 * error)
    return Figure(*numbers) if len(numbers) == 3 else None


def differences(old: dict[str, Figure], new: dict[str, Figure]) -> list[str]:
    lines = []
    for name, now in new.items():
        then = old.get(name)
        if then is None:
            lines.append(f"not on the page: {name}: {now}")
        elif then.low > now.high or now.low > then.high:
            lines.append(f"differs: {name}: {now}, on the page {then}")
    return lines


if __name__ == "__main__":
    main()
