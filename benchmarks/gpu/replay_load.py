"""Replays measured load runs in the simulator and prints what it predicts beside what was measured.

    python benchmarks/gpu/replay_load.py load_0.3.csv load_0.6.csv --device H200 --model Llama-3-8B \
        --set cluster.scheduler.max_num_seqs=1024 --set cluster.scheduler.max_num_batched_tokens=8192 \
        --set cluster.scheduler.num_blocks=57512

A load run is a CSV file with one row a request: arrived_at, first_token_at and completed_at in seconds,
prompt_tokens and output_tokens. It exits with 1 if an error exceeds 5 % in a mean or 10 % in a P99, so that
it can serve as a check.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from pointsman.config import Config
from pointsman.experiments.simulate import prepare, simulate
from pointsman.spec import parse_spec

LIMITS = {"mean": 0.05, "p99": 0.10}
COLUMNS = ("arrived_at", "prompt_tokens", "output_tokens", "first_token_at", "completed_at")


def summary(name: str, seconds: np.ndarray) -> dict[str, float]:
    quantiles = {f"{name}_p{q}": float(np.percentile(seconds, q)) for q in (50, 90, 99)}
    return {f"{name}_mean": float(seconds.mean())} | quantiles


def measured(run: pl.DataFrame) -> dict[str, float]:
    ttft = (run["first_token_at"] - run["arrived_at"]).to_numpy()
    return summary("ttft", ttft) | summary("e2e", (run["completed_at"] - run["arrived_at"]).to_numpy())


def predicted(run: pl.DataFrame, cluster: dict[str, Any]) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        trace = run.select(
            "arrived_at", num_prefill_tokens="prompt_tokens", num_decode_tokens="output_tokens"
        )
        trace.sort("arrived_at").write_csv(Path(folder) / "trace.csv")
        workload = {"trace": {"path": "trace.csv", "start_at_zero": False}}
        data = {"workload": workload, "cluster": cluster, "policy": {"kind": "round-robin"}}
        requests = simulate([prepare(parse_spec(Config, data), Path(folder))])[0].requests
    ttft = requests["first_token_at"] - requests["arrived_at"]
    return summary("ttft", ttft) | summary("e2e", requests["completed_at"] - requests["arrived_at"])


def cluster_of(arguments: argparse.Namespace) -> dict[str, Any]:
    cluster: dict[str, Any] = {"replicas": 1, "scheduler": {"kind": "vllm-v1"}}
    cluster |= {"device": arguments.device, "model": arguments.model}
    if arguments.roofline:
        cluster["cost"] = {"kind": "roofline"}
    for assignment in arguments.set:
        key, _, value = assignment.partition("=")
        *path, last = key.removeprefix("cluster.").split(".")
        section = cluster
        for part in path:
            section = section.setdefault(part, {})
        section[last] = json.loads(value)
    return cluster


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--device", default="H200")
    parser.add_argument("--model", default="Llama-3-8B")
    parser.add_argument("--roofline", action="store_true", help="as if nothing had been measured")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the cluster")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    cluster = cluster_of(arguments)
    rows, is_good = [], True
    for path in arguments.runs:
        run = pl.read_csv(path, columns=list(COLUMNS))
        truth, guess = measured(run), predicted(run, cluster)
        rows.append({"run": path.stem, "requests": len(run), "measured": truth, "predicted": guess})
        for name in truth:
            limit = LIMITS.get(name.split("_")[1])
            is_good &= limit is None or abs(guess[name] / truth[name] - 1) <= limit
    if arguments.json:
        print(json.dumps(rows, indent=1))
    else:
        for row in rows:
            print(f"{row['run']}, {row['requests']} requests")
            for name, truth_s in row["measured"].items():
                guess_s = row["predicted"][name]
                error = 100 * (guess_s / truth_s - 1)
                print(
                    f"  {name:<10} measured {truth_s:8.4f} s   predicted {guess_s:8.4f} s   {error:+6.1f} %"
                )
    sys.exit(0 if is_good else 1)


if __name__ == "__main__":
    main()
