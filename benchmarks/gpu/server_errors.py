"""Does a cost that was fitted to one policy's traffic hold under another? Server by server, block by block.

    python benchmarks/gpu/server_errors.py benchmarks/gpu/h200/traffic/record-three.jsonl.gz
    python benchmarks/gpu/server_errors.py benchmarks/gpu/h200/policies/record-two.jsonl.gz --warm-up 3 \
        --neighbours

A recording of `pointsman serve --record` with pauses between its blocks. The first blocks are the warm-up:
each server's cost (time a step, a prompt token, a stream) is fitted to them as `pointsman calibrate
--traffic` does, and then says how long all answers of every block should have taken. A row is a block;
figures are what the fit says against what was measured, in %. With `--neighbours` there is a fourth cost:
that of a step which another server on the same card makes meanwhile. The last lines are the change of all
answers' time against least-outstanding, judged blocks only, as measured and as the fit says.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections import defaultdict
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from pointsman.live.least_squares import nonnegative
from pointsman.live.traffic import MIN_OUTPUT, read_traffic, stream_table

Floats = NDArray[np.float64]

PAUSE_S, GRID_S = 2.5, 0.02
BASELINE = "least-outstanding"


def steps_until(rows: pl.DataFrame, grid: Floats) -> Floats:
    """How many steps a server had made at each time, by the pace of the answers that were streaming."""
    first, last, tokens = (
        rows[name].to_numpy() for name in ("first_token_at", "completed_at", "num_decode_tokens")
    )
    pace, weight = np.zeros(len(grid)), np.zeros(len(grid))
    for begin, end, num in zip(first, last, tokens, strict=True):
        if num >= MIN_OUTPUT:
            low, high = np.searchsorted(grid, (begin, end))
            pace[low:high] += (num - 1) / (end - begin) ** 2
            weight[low:high] += 1 / (end - begin)  # a short answer says more about its own time
    paced = np.divide(pace, weight, out=np.zeros(len(grid)), where=weight > 0)
    return np.concatenate([[0.0], np.cumsum(paced) * GRID_S])


def block_tables(block: pl.DataFrame, has_neighbours: bool) -> dict[str, tuple[Floats, Floats]]:
    """Of each server, what its answers consist of, [n, 3 or 4], and their seconds."""
    servers = {str(key[0]): rows for key, rows in block.partition_by("server", as_dict=True).items()}
    found = {name: stream_table(rows) for name, rows in sorted(servers.items())}
    if not has_neighbours:
        return found
    grid = np.arange(block["first_token_at"].min(), block["completed_at"].max(), GRID_S)
    steps = {name: steps_until(rows, grid) for name, rows in servers.items()}
    for name, (table, seconds) in found.items():
        timed = servers[name].filter(pl.col("num_decode_tokens") >= MIN_OUTPUT)
        low, high = (
            np.searchsorted(grid, timed[column].to_numpy()) for column in ("first_token_at", "completed_at")
        )
        beside = sum(other[high] - other[low] for key, other in steps.items() if key != name)
        found[name] = np.column_stack([table, beside]), seconds
    return found


def read_blocks(recording: Path) -> tuple[list[pl.DataFrame], list[str]]:
    """What came between two pauses, and under which policy."""
    lines = gzip.decompress(recording.read_bytes()).splitlines()
    policies = {row["arrived_at"]: row["policy"] for row in map(json.loads, lines)}
    plain = recording.with_suffix("")
    plain.write_bytes(b"\n".join(lines))
    try:
        table = read_traffic(plain).sort("arrived_at")
    finally:
        plain.unlink()
    number = np.concatenate([[0], np.cumsum(np.diff(table["arrived_at"].to_numpy()) > PAUSE_S)])
    blocks = table.with_columns(block=pl.Series(number)).partition_by("block", maintain_order=True)
    return blocks, [policies[block["arrived_at"][0]] for block in blocks]


def fitted(tables: list[dict[str, tuple[Floats, Floats]]], power: float = 1.0) -> dict[str, Floats]:
    """Of each server, what its steps cost. An answer's error is weighed by its seconds to this power."""
    costs = {}
    for name in tables[0]:
        streams, seconds = (np.concatenate(column) for column in zip(*(t[name] for t in tables), strict=True))
        weight = seconds**-power
        costs[name] = nonnegative(streams * weight[:, None], seconds * weight)
    return costs


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recording", type=Path)
    parser.add_argument("--warm-up", type=int, default=1, help="how many blocks the costs are fitted to")
    parser.add_argument("--neighbours", action="store_true", help="with a cost of the others' steps")
    asked = parser.parse_args()
    parts, policies = read_blocks(asked.recording)
    blocks = [block_tables(part, asked.neighbours) for part in parts]
    costs = fitted(blocks[: asked.warm_up])
    for name, cost in costs.items():
        print(name, "µs a step, prompt token, stream, neighbour's step:", (1e6 * cost).round(1))
    totals: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for k, (policy, block) in enumerate(zip(policies, blocks, strict=True)):
        said = {name: float((streams @ costs[name]).sum()) for name, (streams, _) in block.items()}
        took = {name: float(seconds.sum()) for name, (_, seconds) in block.items()}
        cells = [
            f"{name[-4:]} {100 * (said[name] / took[name] - 1):+5.1f} ({len(block[name][1])} answers)"
            for name in block
        ]
        print(f"{k:2} {policy:18}", "   ".join(cells))
        if k >= asked.warm_up:
            totals[policy].append((sum(took.values()), sum(said.values())))
    base = np.array(totals[BASELINE])
    for policy, sums in totals.items():
        if policy != BASELINE and len(sums) == len(base):
            measured, by_fit = np.exp(np.log(np.array(sums) / base).mean(axis=0)) - 1
            print(f"{policy}: {100 * measured:+.1f} % measured, {100 * by_fit:+.1f} % by the fit")


if __name__ == "__main__":
    main()
