"""What the simulator says of blocks of requests, from calibrations of the servers: to be written down first.

    python benchmarks/gpu/predict_blocks.py two-5.jsonl two-6.jsonl --servers a.yaml b.yaml --out two.json

The servers' files are those of `pointsman calibrate --url`. A block is simulated several times, every time
with all steps of a server a little slower or faster and all arrivals a few milliseconds later: the tail of
one block hangs on a few requests, and its mean over such runs is what can be predicted. Changes are
geometric means over blocks and runs, each run against the first policy's.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from pointsman.config import Config
from pointsman.experiments.simulate import prepare, simulate
from pointsman.spec import parse_spec

Floats = NDArray[np.float64]

POLICIES = ("least-outstanding", "default", "late-binding", "gathering", "round-robin")
MEASURES = ("ttft_mean_s", "ttft_p99_s", "e2e_mean_s", "e2e_p99_s")
SPEED_SPREAD, ARRIVAL_SPREAD_S = 0.02, 0.01
SIGNALS = {"scrape_interval_s": 1.0, "scrape_delay_s": 0.02}  # as `pointsman serve` reads them
MAX_NUM_SEQS = 1024  # vLLM's default on this card, which probes do not find


def measures(arrived_at: Floats, first_token_at: Floats, completed_at: Floats) -> Floats:
    """As in MEASURES."""
    ttft_s, e2e_s = first_token_at - arrived_at, completed_at - arrived_at
    return np.array([ttft_s.mean(), np.quantile(ttft_s, 0.99), e2e_s.mean(), np.quantile(e2e_s, 0.99)])


def replica(description: dict[str, Any]) -> dict[str, Any]:
    made = dict(description["replica"])
    made["scheduler"] = made["scheduler"] | {"max_num_seqs": MAX_NUM_SEQS}
    return made


def disturbed(rows: Sequence[dict[str, Any]], rng: np.random.Generator) -> list[dict[str, Any]]:
    late = rng.exponential(ARRIVAL_SPREAD_S, len(rows))
    moved = [row | {"arrived_at": row["arrived_at"] + by} for row, by in zip(rows, late, strict=True)]
    return sorted(moved, key=lambda row: row["arrived_at"])


def simulated(
    block: Path, servers: Sequence[dict[str, Any]], policies: Sequence[str], num_runs: int
) -> Floats:
    """[policies, runs, measures]"""
    rows = [json.loads(line) for line in block.read_text().splitlines()]
    trace: dict[str, Any] = {"path": "block.jsonl", "start_at_zero": False}
    if "block_hashes" in rows[0]:
        trace["block_tokens"] = 16
    found = np.zeros((len(policies), num_runs, len(MEASURES)))
    for run in range(num_runs):
        rng = np.random.default_rng([7, run])
        groups = [
            {"count": 1, "slowdown": float(np.exp(rng.normal(0, SPEED_SPREAD))), **replica(server)}
            for server in servers
        ]
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            lines = (json.dumps(row) + "\n" for row in disturbed(rows, rng))
            (folder / "block.jsonl").write_text("".join(lines))
            configs = [
                {
                    "workload": {"trace": trace},
                    "cluster": {"replicas": groups, "device": "H200", "signals": SIGNALS},
                    "policy": {"kind": policy},
                }
                for policy in policies
            ]
            made = simulate([prepare(parse_spec(Config, data), folder) for data in configs])
        for number, one in enumerate(made):
            times = (one.requests[name] for name in ("arrived_at", "first_token_at", "completed_at"))
            found[number, run] = measures(*times)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("blocks", nargs="+", type=Path)
    parser.add_argument("--servers", nargs="+", type=Path, required=True, help="files of `calibrate`")
    parser.add_argument("--policies", default=",".join(POLICIES), help="the first is the baseline")
    parser.add_argument("--runs", type=int, default=16, help="of each block")
    parser.add_argument("--out", type=Path, default=None)
    asked = parser.parse_args()
    servers = [yaml.safe_load(path.read_text()) for path in asked.servers]
    policies = asked.policies.split(",")
    tables = np.array([simulated(block, servers, policies, asked.runs) for block in asked.blocks])
    logs = np.log(tables / tables[:, :1])  # [blocks, policies, runs, measures]
    change = np.exp(logs.mean(axis=(0, 2))) - 1
    spread = logs.std(axis=2).mean(axis=0)
    absolute = np.exp(np.log(tables).mean(axis=(0, 2)))
    prediction = {
        "blocks": [block.name for block in asked.blocks],
        "servers": [path.name for path in asked.servers],
        "policies": {
            policy: {
                name: {"seconds": round(s, 4), "change": round(c, 4), "sd_of_a_block": round(d, 4)}
                for name, s, c, d in zip(MEASURES, absolute[k], change[k], spread[k], strict=True)
            }
            for k, policy in enumerate(policies)
        },
    }
    for policy, row in prediction["policies"].items():
        cells = [
            f"{one['seconds']:.3f} s {100 * one['change']:+6.1f} % ±{100 * one['sd_of_a_block']:.0f}"
            for one in row.values()
        ]
        print(f"{policy:18}", "   ".join(cells))
    if asked.out is not None:
        asked.out.write_text(json.dumps(prediction, indent=1) + "\n")


if __name__ == "__main__":
    main()
