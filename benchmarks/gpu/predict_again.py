"""What calibration and simulator as they are now say of recorded blocks: computed afterwards, no prediction.

    python benchmarks/gpu/predict_again.py benchmarks/gpu/h200/policies two --warm-up 3 --out two
    python benchmarks/gpu/judge_blocks.py benchmarks/gpu/h200/policies/blocks two --predicted two

Each server is calibrated from the first blocks of each recording as `pointsman calibrate --url URL --traffic
RECORD --neighbour URL ...` would do; how much KV memory it has is read from the description that it got then,
since it runs no more. Blocks have the requests that were sent. `--alone` leaves the neighbours out.
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl
import yaml

from pointsman.cli.calibrate import described
from pointsman.live.probing import Facts

PAUSE_S = 2.5  # between two blocks
BETWEEN_S = 1000.0  # two recordings
BASELINE = "least-outstanding"
MAX_MODEL_TOKENS = 8192  # as in shares.sh


def warm_up(recordings: Sequence[Path], num_blocks: int) -> list[str]:
    """Lines of the first blocks of each recording, one recording after the other."""
    kept: list[dict[str, Any]] = []
    for recording in recordings:
        rows = [json.loads(line) for line in gzip.decompress(recording.read_bytes()).splitlines()]
        rows.sort(key=lambda row: row["arrived_at"])
        starts_at = kept[-1]["arrived_at"] + BETWEEN_S if kept else 0.0
        blocks_left, last_at = num_blocks, rows[0]["arrived_at"]
        for row in rows:
            blocks_left -= row["arrived_at"] - last_at > PAUSE_S
            if blocks_left == 0:
                break
            last_at = row["arrived_at"]
            kept.append(row | {"arrived_at": starts_at + last_at})
    return [json.dumps(row) for row in kept]


def facts(known: dict[str, Any]) -> Facts:
    scheduler = known["replica"]["scheduler"]
    return Facts(
        known["measured"]["model"], MAX_MODEL_TOKENS, scheduler["block_size"], scheduler["num_blocks"]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("kind", help="how the names of its blocks begin")
    parser.add_argument(
        "--recording", nargs="+", type=Path, default=None, help="default: FOLDER/record-KIND.jsonl.gz"
    )
    parser.add_argument("--warm-up", type=int, required=True, help="blocks of each to calibrate from")
    parser.add_argument("--servers", nargs="+", type=Path, default=None, help="default: FOLDER/KIND-*.yaml")
    parser.add_argument(
        "--policies",
        default="least-outstanding,default,late-binding,round-robin",
        help="the first is the baseline",
    )
    parser.add_argument("--rounds", default=None, help="only these, with commas; default: all")
    parser.add_argument("--alone", action="store_true", help="as if no server had neighbours on its card")
    parser.add_argument("--runs", default="16")
    parser.add_argument("--out", type=Path, required=True, help="folder of what this writes")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    recordings = asked.recording or [asked.folder / f"record-{asked.kind}.jsonl.gz"]
    warm = asked.out / "warm-up.jsonl"
    warm.write_text("\n".join(warm_up(recordings, asked.warm_up)) + "\n")
    servers = [
        yaml.safe_load(path.read_text())
        for path in asked.servers or sorted(asked.folder.glob(f"{asked.kind}-*.yaml"))
    ]
    urls = [one["measured"]["url"] for one in servers]
    described_at = []
    for url, known in zip(urls, servers, strict=True):
        neighbours = [] if asked.alone else [other for other in urls if other != url]
        data = described(url, facts(known), warm, neighbours)
        path = asked.out / f"{asked.kind}-{url.rpartition(':')[2]}.yaml"
        path.write_text(yaml.safe_dump(data, sort_keys=False))
        described_at.append(str(path))
        replica, (one,) = data["replica"], data["measured"]["servers"]
        print(
            path,
            {name: replica.get(name) for name in ("cost", "neighbour_step_s")},
            replica["scheduler"],
            flush=True,
        )
        print("  ", one["off_on_this_traffic"], one["uncertainty"], data["measured"]["undetermined"][0])
    blocks = []
    for sent in sorted((asked.folder / "blocks").glob(f"{asked.kind}_*_{BASELINE}.csv.gz")):
        name = sent.name.partition(f"_{BASELINE}")[0]
        if asked.rounds is not None and name.rpartition("_")[2] not in asked.rounds.split(","):
            continue
        path = asked.out / f"{name}.jsonl"
        pl.read_csv(sent).select(
            arrived_at="due_at", num_prefill_tokens="prompt_tokens", num_decode_tokens="output_tokens"
        ).write_ndjson(path)
        blocks.append(str(path))
    command = [sys.executable, str(Path(__file__).with_name("predict_blocks.py")), *blocks]
    command += ["--servers", *described_at, "--policies", asked.policies, "--runs", asked.runs]
    subprocess.run([*command, "--out", str(asked.out / f"predicted-{asked.kind}.json")], check=True)


if __name__ == "__main__":
    main()
