"""Check the reference simulator against the golden runs of Vidur, bit for bit; or time it.

    python benchmarks/check_reference.py [--golden DIR]    # one line a run; exit status 1 if one differs
    python benchmarks/check_reference.py --speed           # batch iterations/s and requests/s

Compared per request: replica, restarts, first schedule, first token, completion. Compared per run: the number
of batches of `summary.csv`, and the batches of `batches_*.csv` where there are any.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import re
import sys
import time
from pathlib import Path
from typing import Any

from reference_simulator import BatchRecord, Result, simulate

GOLDEN = Path(__file__).resolve().parents[1] / "tests" / "data" / "golden"
RUN_NAME = re.compile(
    r"(vllm|sarathi|orca)_(round_robin|lor)_(\d+)r_(mod|over|burst|tight|cap|chunk64)(_pp2)?"
)
ROUTER = {"round_robin": "round-robin", "lor": "vidur-lor"}
PLANNED_BLOCKS = 30208  # Vidur's memory planner: 118 sequences of 4,096 tokens
ORCA_MAX_BATCH_SIZE = 118  # the planner's sequences, below the cap of 128; also when num_blocks is given


def read_csv(path: Path) -> list[dict[str, str]]:
    """Of `path`, or of the same packed by gzip."""
    packed = path.with_name(path.name + ".gz")
    text = gzip.decompress(packed.read_bytes()).decode() if packed.exists() else path.read_text()
    return list(csv.DictReader(text.splitlines()))


def read_trace(golden: Path, name: str) -> tuple[list[float], list[int], list[int]]:
    rows = read_csv(golden / f"trace_{name}.csv")
    return (
        [float(row["arrived_at"]) for row in rows],
        [int(row["num_prefill_tokens"]) for row in rows],
        [int(row["num_decode_tokens"]) for row in rows],
    )


def run_settings(run: str) -> tuple[str, dict[str, Any]]:
    """The trace and the arguments of `simulate` behind the name of a golden run (golden/README.md)."""
    match = RUN_NAME.fullmatch(run)
    if match is None:
        raise ValueError(f"{run}: not a run name of the golden set")
    scheduler, router, replicas, load, pp2 = match.groups()
    if load in ("burst", "cap"):
        trace = "burst"
    else:
        trace = f"{'mod' if load == 'mod' else 'over'}_{replicas}r"
    if load in ("mod", "cap"):
        num_blocks = PLANNED_BLOCKS
    elif load == "tight":
        num_blocks = 400
    elif load == "chunk64":
        num_blocks = 400 if replicas == "1" else 600
    else:
        num_blocks = 2048
    return trace, {
        "replicas": int(replicas),
        "scheduler": scheduler,
        "router": ROUTER[router],
        "num_blocks": num_blocks,
        "max_batch_size": ORCA_MAX_BATCH_SIZE if scheduler == "orca" else 128,
        "chunk_size": 64 if load == "chunk64" else 512,
        "pipeline_stages": 2 if pp2 else 1,
    }


def request_differences(result: Result, rows: list[dict[str, str]]) -> list[str]:
    differences = []
    for i, row in enumerate(rows):
        expected = (
            int(row["replica_id"]),
            int(row["num_restarts"]),
            float(row["scheduled_at"]),
            float(row["prefill_completed_at"]),
            float(row["completed_at"]),
        )
        found = (
            result.replica_id[i],
            result.num_restarts[i],
            result.scheduled_at[i],
            result.first_token_at[i],
            result.completed_at[i],
        )
        if found != expected:
            differences.append(f"request {i}: expected {expected}, found {found}")
    return differences


def batch_differences(result: Result, rows: list[dict[str, str]]) -> list[str]:
    differences = []
    for i, row in enumerate(rows):
        expected = BatchRecord(
            replica_id=int(row["replica_id"]),
            scheduled_at=float(row["scheduled_at"]),
            completed_at=float(row["completed_at"]),
            batch_size=int(row["batch_size"]),
            num_prefill_tokens=int(row["num_prefill_tokens"]),
            num_decode_tokens=int(row["num_decode_tokens"]),
            num_allocated_blocks=int(row["allocated_blocks_after_end"]),
        )
        found = result.batches[i] if i < len(result.batches) else None
        if found != expected:
            differences.append(f"batch {i}: expected {expected}, found {found}")
    return differences


def check(golden: Path) -> bool:
    summary = {row["tag"]: row for row in read_csv(golden / "summary.csv")}
    names = sorted(path.name.partition(".")[0] for path in golden.glob("*.csv*"))
    runs = [name for name in names if RUN_NAME.fullmatch(name)]
    num_exact = 0
    for run in runs:
        trace, settings = run_settings(run)
        result = simulate(*read_trace(golden, trace), **settings, log_batches=True)
        rows = read_csv(golden / f"{run}.csv")
        differences = request_differences(result, rows)
        if run in summary and int(summary[run]["batches"]) != result.num_batches:
            differences.append(f"batches: expected {summary[run]['batches']}, found {result.num_batches}")
        if f"batches_{run}" in names:
            differences += batch_differences(result, read_csv(golden / f"batches_{run}.csv"))
        verdict = (
            f"NOT exact, {len(differences)} differences, first: {differences[0]}" if differences else "exact"
        )
        print(f"{run:34} {len(rows)} requests {result.num_batches:6} batches  {verdict}", flush=True)
        num_exact += not differences
    print(f"{num_exact} of {len(runs)} runs exact")
    return num_exact == len(runs)


def measure_speed(golden: Path, repeats: int = 5) -> None:
    """Best of `repeats` runs of the 4-replica traces, which shared cores disturb least."""
    print(
        f"{'trace':8} {'scheduler':10} {'batches':>8} {'mean size':>9} {'batches/s':>10} {'requests/s':>10}"
    )
    for trace, load in (("over_4r", "over"), ("mod_4r", "mod")):
        columns = read_trace(golden, trace)
        for scheduler in ("vllm", "sarathi", "orca", "vllm-v1"):
            named = "vllm" if scheduler == "vllm-v1" else scheduler
            _, settings = run_settings(f"{named}_round_robin_4r_{load}")
            settings["scheduler"] = scheduler
            seconds = []
            for _ in range(repeats):
                start = time.perf_counter()
                result = simulate(*columns, **settings)
                seconds.append(time.perf_counter() - start)
            best = min(seconds)
            logged = simulate(*columns, **settings, log_batches=True).batches
            mean_size = sum(record.batch_size for record in logged) / len(logged)
            print(
                f"{trace:8} {scheduler:10} {result.num_batches:8} {mean_size:9.1f}"
                f" {result.num_batches / best:10.0f} {len(columns[0]) / best:10.0f}",
                flush=True,
            )


def main() -> int:
    parser = argparse.ArgumentParser(description="Check or time the reference simulator.")
    parser.add_argument("--golden", type=Path, default=GOLDEN, help="folder of the golden runs")
    parser.add_argument("--speed", action="store_true", help="time the 4-replica traces instead")
    arguments = parser.parse_args()
    if not list(arguments.golden.glob("summary.csv*")):
        parser.error(f"{arguments.golden} holds no golden runs; give their folder with --golden")
    if arguments.speed:
        measure_speed(arguments.golden)
        return 0
    return 0 if check(arguments.golden) else 1


if __name__ == "__main__":
    sys.exit(main())
