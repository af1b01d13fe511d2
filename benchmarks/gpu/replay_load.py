"""Replays measured load runs in the simulator and prints predicted → measured.

    python benchmarks/gpu/replay_load.py load_0.3.csv load_0.6.csv --device H200 --model Llama-3-8B \
        --set cluster.scheduler.max_num_seqs=1024 --set cluster.scheduler.max_num_batched_tokens=8192 \
        --set cluster.scheduler.num_blocks=57512

A load run is a CSV file with one row a request: arrived_at, first_token_at and completed_at in seconds,
prompt_tokens and output_tokens. It exits with 1 if an error exceeds 5 % in a mean or 10 % in a P99, so that
it can serve as a check.

Machines of one kind differ. `--adapt-to RUN ...` first finds, from other runs of the same server, two figures
in which it differs from the description: how much slower its steps are, and its API server's time a request.
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
from pointsman.simulator.plan import plan_replicas
from pointsman.simulator.spec import ClusterSpec
from pointsman.spec import parse_spec

JUDGED = ("ttft_mean", "ttft_p99", "e2e_mean", "e2e_p99")
LIMITS = {"mean": 0.05, "p99": 0.10}
ADAPT_ROUNDS = 6
SENSITIVITY = 2.0  # percents of mean end-to-end for one of all steps: from 1 when idle to 3.5 near saturation
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
    for assignment in arguments.set:
        key, _, value = assignment.partition("=")
        *path, last = key.removeprefix("cluster.").split(".")
        section = cluster
        for part in path:
            section = section.setdefault(part, {})
        section[last] = json.loads(value)
    return cluster


def adapted(cluster: dict[str, Any], runs: list[pl.DataFrame]) -> dict[str, Any]:
    """The cluster with a slowdown and an `api_s` by which these runs' mean end-to-end and TTFT are right."""
    slowdown, api_s = 1.0, plan_replicas(parse_spec(ClusterSpec, cluster))[0].scheduler.api_s

    def changed() -> dict[str, Any]:
        scheduler = cluster["scheduler"] | {"api_s": max(0.0, api_s)}
        return cluster | {"scheduler": scheduler, "replicas": [{"count": 1, "slowdown": slowdown}]}

    truths = [measured(run) for run in runs]
    for _ in range(ADAPT_ROUNDS):
        guesses = [predicted(run, changed()) for run in runs]
        pairs = list(zip(guesses, truths, strict=True))
        too_slow = np.mean([np.log(guess["e2e_mean"] / truth["e2e_mean"]) for guess, truth in pairs])
        slowdown *= float(np.exp(-too_slow / SENSITIVITY))
        api_s -= float(np.mean([guess["ttft_mean"] - truth["ttft_mean"] for guess, truth in pairs]))
    print(f"adapted: slowdown {slowdown:.4f}, api_s {max(0.0, api_s):.4f}")
    return changed()


def error(row: dict[str, Any], name: str, source: str = "predicted") -> float:
    return float(row[source][name] / row["measured"][name] - 1)


def is_within(row: dict[str, Any], name: str) -> bool:
    return abs(error(row, name)) <= LIMITS[name.split("_")[1]]


def table(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| run | TTFT mean, s | TTFT P99, s | e2e mean, s | e2e P99, s | the roofline's errors |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        cells = [row["run"].removeprefix("load_").replace("_", " ")]
        for name in JUDGED:
            digits = 4 if name == "ttft_mean" else 3
            guess, truth = (f"{row[source][name]:.{digits}f}" for source in ("predicted", "measured"))
            cell = f"{guess} → {truth} ({100 * error(row, name):+.1f} %)"
            cells.append(cell if is_within(row, name) else f"**{cell}**")
        cells.append(", ".join(f"{100 * error(row, name, 'roofline'):+.0f}" for name in JUDGED) + " %")
        lines.append(f"| {' | '.join(cells)} |".replace("-", "−"))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--device", default="H200")
    parser.add_argument("--model", default="Llama-3-8B")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the cluster")
    parser.add_argument(
        "--adapt-to", nargs="+", type=Path, default=[], metavar="RUN", help="runs to adapt to"
    )
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    cluster = cluster_of(arguments)
    if arguments.adapt_to:
        cluster = adapted(cluster, [pl.read_csv(path, columns=list(COLUMNS)) for path in arguments.adapt_to])
    rows = []
    for path in arguments.runs:
        run = pl.read_csv(path, columns=list(COLUMNS))
        by_roofline = predicted(run, cluster_of(arguments) | {"cost": {"kind": "roofline"}})
        guesses = {"predicted": predicted(run, cluster), "roofline": by_roofline}
        rows.append({"run": path.stem, "requests": len(run), "measured": measured(run)} | guesses)
    if arguments.json:
        print(json.dumps(rows, indent=1))
    else:
        print("\n".join(table(rows)))
    is_good = all(is_within(row, name) for row in rows for name in JUDGED)
    sys.exit(0 if is_good else 1)


if __name__ == "__main__":
    main()
