"""How many times as fast as one worker two of them train, and what the machine itself allows.

    python benchmarks/worker_scaling.py [--presets quick,generalist] [--decisions 500000]

Trains each preset by one worker, by two, and by two separate runs of one worker side by side, which have
nothing to do with each other: cores may share caches, memory and clock, so these need not be twice as fast as
one.
Decisions a second are counted from update to update, logging and all, without the first updates, warm start
and evaluations. Needs two cores that nobody else uses; on a busy machine, run it with `chrt -r 1` (as root).
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from pointsman.report.tables import markdown

NUM_SKIPPED = 5  # updates: in the first ones memory is allocated and code is loaded


def start(preset: str, workers: int, decisions: int, cores: str, folder: Path) -> subprocess.Popen[bytes]:
    """On these cores, as `taskset` takes them."""
    changes = ("warm_start=null", "run.headroom_steps=0", "run.evaluate_every=1000000", "evaluation.seeds=1")
    options = ["--preset", preset, "--workers", str(workers), "--steps", str(decisions), "--out", str(folder)]
    command = ["taskset", "-c", cores, sys.executable, "-m", "pointsman", "train", *options]
    command += [part for change in changes for part in ("--set", change)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


def decisions_per_s(folder: Path) -> float:
    """Without the last update, which ends with an evaluation."""
    with (folder / "progress.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))[NUM_SKIPPED:-1]
    first, last = rows[0], rows[-1]
    num_decisions = float(last["timesteps"]) - float(first["timesteps"])
    return num_decisions / (float(last["elapsed_s"]) - float(first["elapsed_s"]))


def measured(preset: str, runs: Sequence[tuple[int, str]], decisions: int) -> float:
    """Decisions a second of all runs (workers, cores) together, which go on at the same time."""
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name) / str(number) for number in range(len(runs))]
        started = [
            start(preset, workers, decisions, cores, folder)
            for (workers, cores), folder in zip(runs, folders, strict=True)
        ]
        if any(process.wait() != 0 for process in started):
            raise SystemExit("a run failed")
        return sum(map(decisions_per_s, folders))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--presets", default="quick,generalist")
    parser.add_argument("--decisions", type=int, default=500_000, help="of each run")
    asked = parser.parse_args()
    rows = []
    for preset in asked.presets.split(","):
        one, two, separate = (
            measured(preset, runs, asked.decisions)
            for runs in ([(1, "0")], [(2, "0,1")], [(1, "0"), (1, "1")])
        )
        cells = [f"{one:,.0f}", f"{two:,.0f}", f"{two / one:.2f} ×", f"{separate / one:.2f} ×"]
        rows.append([f"`{preset}`", *cells])
    print(markdown(["preset", "one worker", "two workers", "gain", "two separate runs"], rows))


if __name__ == "__main__":
    main()
