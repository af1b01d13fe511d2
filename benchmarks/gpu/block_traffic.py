"""Writes the requests of a block: when they come, how long they are, which prefixes they share.

    python benchmarks/gpu/block_traffic.py single --trace AzureLLMInferenceTrace_conv.csv \
        --servers a.yaml b.yaml --load 0.8 --seconds 40 --seed 5 --out two-5.jsonl
    python benchmarks/gpu/block_traffic.py chats --servers a.yaml b.yaml --load 1 --seed 5 --out chats-5.jsonl

The rate is told, or a share of what the servers can do together by the files of `pointsman calibrate`.

`single` has Poisson arrivals and consecutive lengths of a trace; the seed also says where in the trace it
begins. `chats` are conversations: a system prompt that many share, a first message, and turns that repeat
all that was said. A row is a request, as the simulator reads it (`workload.trace`, `block_tokens: 16`);
`router_blocks.py` sends the same rows as token ids. Needs PyYAML.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import random
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

BLOCK_TOKENS = 16
LONGEST, MAX_OUTPUT = 8192, 400  # tokens; with longer answers it takes long until a block has drained
ROWS_A_SEED = 1500
STREAMS = 64

NUM_SYSTEMS, SYSTEM_BLOCKS = 12, 48  # 768 tokens each
FIRST_BLOCKS, LATER_BLOCKS = (16, 96), (4, 20)  # of a message, from and to
OUTPUT_TOKENS = (40, 200)
MEAN_TURNS, MEAN_THINK_S, TOKEN_S = 4.0, 4.0, 0.02


def requests_per_s(description: dict[str, Any], prompt: float, output: float) -> float:
    """How many requests of such lengths a server can take, with STREAMS of them running."""
    cost = description["replica"]["cost"]
    if cost["kind"] == "linear":  # of traffic
        slowdown = description["backends"][0]["calibration"]["step_floor_s"] / cost["a"]  # by neighbours
        return 1.0 / (prompt * cost["b"] + output * (cost["c"] + cost["a"] / STREAMS)) / slowdown
    curve = dict(map(tuple, cost["step_s"]))
    token_s = (curve[2048] - curve[512]) / 1536
    stream_s = (curve[64] - curve[1]) / 63 + cost["sequence_s"] + cost["context_s"] * (prompt + output / 2)
    prompt_s = prompt * token_s + cost["pair_s"] * prompt**2 / 2
    return 1.0 / (prompt_s + output * (stream_s + curve[1] / STREAMS))


def lengths(trace: Path) -> Iterator[tuple[int, int]]:
    """Prompt and output of an Azure trace, cut to what the servers take."""
    with trace.open() as file:
        for row in csv.DictReader(file):
            output = min(int(row["GeneratedTokens"]), MAX_OUTPUT)
            yield max(1, min(int(row["ContextTokens"]), LONGEST - output)), output


def single(trace: Path, rate: float, seconds: float, seed: int) -> list[dict[str, Any]]:
    dice, at, rows = random.Random(seed), 0.0, []
    for prompt, output in itertools.islice(lengths(trace), seed * ROWS_A_SEED, None):
        at += dice.expovariate(rate)
        if at > seconds:
            break
        rows.append({"arrived_at": round(at, 6), "num_prefill_tokens": prompt, "num_decode_tokens": output})
    return rows


def chats(rate: float, seconds: float, seed: int) -> list[dict[str, Any]]:
    """`rate` is that of all requests, once as many chats have gone on as begin."""
    dice = random.Random(seed)
    names = itertools.count(NUM_SYSTEMS * SYSTEM_BLOCKS)
    rows, begins = [], 0.0
    while (begins := begins + dice.expovariate(rate / MEAN_TURNS)) < seconds:
        system = dice.choices(range(NUM_SYSTEMS), [1 / (k + 1) for k in range(NUM_SYSTEMS)])[0]
        said = list(range(system * SYSTEM_BLOCKS, (system + 1) * SYSTEM_BLOCKS))
        at, message = begins, FIRST_BLOCKS
        while at < seconds:
            said += itertools.islice(names, dice.randint(*message))
            prompt, output = BLOCK_TOKENS * len(said), dice.randint(*OUTPUT_TOKENS)
            if prompt + output > LONGEST:
                break
            rows.append(
                {
                    "arrived_at": round(at, 6),
                    "num_prefill_tokens": prompt,
                    "num_decode_tokens": output,
                    "block_hashes": list(said),
                }
            )
            if dice.random() < 1 / MEAN_TURNS:
                break
            # The answer comes back as other tokens than the server's: only what was asked before is found.
            said += itertools.islice(names, -(-output // BLOCK_TOKENS))
            at += TOKEN_S * output + dice.expovariate(1 / MEAN_THINK_S)
            message = LATER_BLOCKS
    return sorted(rows, key=lambda row: row["arrived_at"])


def mean(rows: list[dict[str, Any]], name: str) -> float:
    return statistics.mean(row[name] for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=("single", "chats"))
    parser.add_argument("--trace", type=Path, default=None, help="an Azure trace, for `single`")
    parser.add_argument("--servers", nargs="+", type=Path, default=(), help="files of `calibrate`")
    parser.add_argument("--load", type=float, default=0.8)
    parser.add_argument("--rate", type=float, default=None, help="requests/s, instead of --load")
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()

    def rows_at(rate: float) -> list[dict[str, Any]]:
        if asked.kind == "single":
            return single(asked.trace, rate, asked.seconds, asked.seed)
        return chats(rate, asked.seconds, asked.seed)

    if asked.rate is None and not asked.servers:
        parser.error("--servers or --rate is needed")
    usual = [mean(rows_at(20.0), name) for name in ("num_prefill_tokens", "num_decode_tokens")]
    servers = [yaml.safe_load(path.read_text()) for path in asked.servers]
    capacity = sum(requests_per_s(server, *usual) for server in servers)
    rate = asked.rate or round(asked.load * capacity, 1)
    rows = rows_at(rate)
    asked.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokens = [f"{mean(rows, f'num_{kind}_tokens'):.0f}" for kind in ("prefill", "decode")]
    print(f"{asked.out}: {len(rows)} requests, {rate}/s of {capacity:.1f}; tokens: {' + '.join(tokens)} each")


if __name__ == "__main__":
    main()
