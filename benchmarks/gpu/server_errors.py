"""Does a cost that was fitted to one policy's traffic hold under another? Server by server, block by block.

    python benchmarks/gpu/server_errors.py benchmarks/gpu/h200/traffic/record-three.jsonl.gz
    python benchmarks/gpu/server_errors.py benchmarks/gpu/h200/policies/record-two.jsonl.gz --warm-up 3 \
        --neighbours

A recording of `pointsman serve --record` with pauses between its blocks. The first blocks are the warm-up:
each server's cost (time a step, a prompt token, a stream) is fitted to them as `pointsman calibrate
--traffic --neighbour` does, and then says how long all answers of every block should have taken. A row is a
block; figures are what the fit says against what was measured, in %. With `--neighbours` there is a fourth
cost: that of a step which another server on the same card makes meanwhile. The last lines are the change of
all answers' time against least-outstanding, judged blocks only, as measured and as the fit says.
"""

from __future__ import annotations

import argparse
import gzip
from collections import defaultdict
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from pointsman.live.neighbours import fit_beside, pace_beside, said_beside
from pointsman.live.traffic import MIN_OUTPUT, read_traffic, stream_table

Floats = NDArray[np.float64]

PAUSE_S = 2.5
BASELINE = "least-outstanding"


def block_tables(block: pl.DataFrame, has_neighbours: bool) -> dict[str, tuple[Floats, Floats, Floats]]:
    """Of each server, what its answers consist of, [n, 3], the pace of its neighbours, and their seconds."""
    servers = {str(key[0]): rows for key, rows in block.partition_by("server", as_dict=True).items()}
    timed = {name: rows.filter(pl.col("num_decode_tokens") >= MIN_OUTPUT) for name, rows in servers.items()}
    found = {}
    for name, rows in sorted(servers.items()):
        others = [other for key, other in timed.items() if key != name and has_neighbours]
        streams, seconds = stream_table(rows)
        found[name] = streams, pace_beside(timed[name], others), seconds
    return found


def read_blocks(recording: Path) -> tuple[list[pl.DataFrame], list[str]]:
    """What came between two pauses, and under which policy."""
    plain = recording.with_suffix("")
    plain.write_bytes(gzip.decompress(recording.read_bytes()))
    try:
        table = read_traffic(plain).sort("arrived_at")
    finally:
        plain.unlink()
    number = np.concatenate([[0], np.cumsum(np.diff(table["arrived_at"].to_numpy()) > PAUSE_S)])
    blocks = table.with_columns(block=pl.Series(number)).partition_by("block", maintain_order=True)
    return blocks, [block["policy"][0] for block in blocks]


def fitted(tables: list[dict[str, tuple[Floats, Floats, Floats]]]) -> dict[str, Floats]:
    """Of each server, what its steps cost, and what those of its neighbours do."""
    return {
        name: fit_beside(*(np.concatenate(column) for column in zip(*(t[name] for t in tables), strict=True)))
        for name in tables[0]
    }


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
        said = {
            name: float(said_beside(streams, pace, costs[name]).sum())
            for name, (streams, pace, _) in block.items()
        }
        took = {name: float(seconds.sum()) for name, (_, _, seconds) in block.items()}
        cells = [
            f"{name[-4:]} {100 * (said[name] / took[name] - 1):+5.1f} ({len(block[name][2])} answers)"
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
