"""Does a cost that was fitted to one policy's traffic hold under another? Server by server, block by block.

    python benchmarks/gpu/server_errors.py benchmarks/gpu/h200/traffic/record-three.jsonl.gz

A recording of `pointsman serve --record` with pauses between its blocks. The first block is the warm-up: each
server's cost (time a step, a prompt token, a stream) is fitted to it as `pointsman calibrate --traffic` does,
and then says how long all answers of every block should have taken. A row is a block; figures are what the
fit says against what was measured, in %.
"""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path

import numpy as np
import polars as pl

from pointsman.live.least_squares import nonnegative
from pointsman.live.traffic import read_traffic, stream_table

PAUSE_S = 3.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recording", type=Path)
    asked = parser.parse_args()
    lines = gzip.decompress(asked.recording.read_bytes()).splitlines()
    policies = {row["arrived_at"]: row["policy"] for row in map(json.loads, lines)}
    plain = asked.recording.with_suffix("")
    plain.write_bytes(b"\n".join(lines))
    try:
        table = read_traffic(plain).sort("arrived_at")
    finally:
        plain.unlink()
    arrived = table["arrived_at"].to_numpy()
    block = np.concatenate([[0], np.cumsum(np.diff(arrived) > PAUSE_S)])
    table = table.with_columns(block=pl.Series(block))
    costs = {}
    for (number,), rows in table.group_by("block", maintain_order=True):
        cells = []
        for (server,), its in sorted(rows.partition_by("server", as_dict=True).items(), key=str):
            streams, seconds = stream_table(its)
            if number == 0:
                costs[server] = nonnegative(streams / seconds[:, None], np.ones(len(seconds)))
            said_s = (streams @ costs[server]).sum()
            cells.append(
                f"{str(server)[-4:]} {100 * (said_s / seconds.sum() - 1):+5.1f} ({len(its)} requests)"
            )
        print(f"{number:2} {policies[rows['arrived_at'][0]]:18}", "   ".join(cells))


if __name__ == "__main__":
    main()
