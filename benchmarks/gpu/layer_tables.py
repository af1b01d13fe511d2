"""Compares layer tables of an H200 with a real server and with the roofline, and writes the shipped replicas.

    python benchmarks/gpu/layer_tables.py            # print the comparisons
    python benchmarks/gpu/layer_tables.py --write    # and write pointsman/simulator/replicas/h200-*.yaml

`h200/layers/replayed.json` is what `profile_shapes.py` wrote; `launched.json` (`--tables`) an earlier run
whose kernels the host launched one by one, which hides short kernels behind the launches. Llama-3-8B is
measured on a server too: its table is compared, not shipped. The time beside the layers comes from that.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from pointsman.cli.profile import layers_cost
from pointsman.simulator.cost import CostTables, RooflineCost, cost_tables
from pointsman.simulator.hardware import Deployment, load_catalogue
from pointsman.simulator.layers import LayersCost
from pointsman.simulator.measured import measured_replicas

HERE = Path(__file__).parent
REPLICAS = HERE.parents[1] / "pointsman" / "simulator" / "replicas"
SERVED = "Llama-3-8B"
SOURCE = (
    "one layer by its shapes (benchmarks/gpu/profile_shapes.py): random bf16 weights, experts equally "
    "loaded, products and attention of torch {torch} as CUDA graphs on one {device} of 700 W, 2026-11-16; "
    "overhead_s: what a vLLM step of Llama-3-8B took beside its layers; collectives are computed"
)
Batch = dict[str, Any]


def decodes(num_seqs: int, context: float) -> Batch:
    return {"num_decodes": num_seqs, "context_tokens": round(num_seqs * context), "num_seqs": num_seqs}


def prompt(tokens: int) -> Batch:
    return {"num_prefill_tokens": tokens, "pairs": tokens**2 / 2, "squares": float(tokens**2), "num_seqs": 1}


def grid(cost: LayersCost) -> Iterator[tuple[str, Batch]]:
    """Steps whose parts were all timed: decoding batches, and whole prompts."""
    for num_seqs, context, _ in cost.decode:
        yield "decode", decodes(num_seqs, context)
    for tokens, _ in cost.prompt:
        yield "prompt", prompt(tokens)


def server_steps() -> Iterator[tuple[str, Batch, float]]:
    """(kind, batch, seconds) of the real server: decode steps, and idle first tokens less the API's time."""
    steps = HERE / "h200" / "steps"
    for row in csv.DictReader((steps / "decode.csv").open()):
        batch = decodes(int(row["batch"]), float(row["mean_context"]))
        yield "decode", batch, float(row["median_ms"]) * 1e-3
    served = next(one for one in measured_replicas() if one.model == SERVED)
    for row in csv.DictReader((steps / "prefill.csv").open()):
        tokens = int(row["prompt"])
        if tokens >= 512:  # shorter ones are mostly what is subtracted
            beside_s = served.server.api_s + served.server.api_s_per_token * tokens
            yield "prompt", prompt(tokens), float(row["ttft_ms"]) * 1e-3 - beside_s


def errors(found: list[tuple[float, float]]) -> str:
    ratios = sorted(value / truth - 1 for value, truth in found)
    mean = sum(map(abs, ratios)) / len(ratios)
    return f"{ratios[0]:+5.0%} to {ratios[-1]:+5.0%}, median {median(ratios):+5.0%}, mean size {mean:4.0%}"


def compare_with_server(tables: CostTables, title: str) -> None:
    for kind in ("decode", "prompt"):
        found = [(tables.stage_s(**batch), seconds) for k, batch, seconds in server_steps() if k == kind]
        print(f"  {title}, {kind}: {errors(found)}")


def roofline(deployment: Deployment, **constants: float) -> CostTables:
    return cost_tables(RooflineCost(kind="roofline", **constants), deployment)


def size_of_error(costs: dict[Deployment, LayersCost], **constants: float) -> float:
    """Root mean square of log(roofline / table), every model and both kinds of step with the same weight."""
    means = []
    for deployment, cost in costs.items():
        computed, timed = roofline(deployment, **constants), cost_tables(cost, deployment)
        for kind in ("decode", "prompt"):
            logs = [
                math.log(computed.stage_s(**b) / timed.stage_s(**b)) ** 2 for k, b in grid(cost) if k == kind
            ]
            means.append(sum(logs) / len(logs))
    return math.sqrt(sum(means) / len(means))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--tables", type=Path, default=HERE / "h200" / "layers" / "replayed.json")
    arguments = parser.parse_args()
    data = json.loads(arguments.tables.read_text())
    known = load_catalogue()
    timed = {
        name: layers_cost(one["tables"], name, one["tensor_parallel"]) for name, one in data["models"].items()
    }
    costs = {
        Deployment(known.device("H200"), known.model(name), cost["tensor_parallel"]): LayersCost(**cost)
        for name, cost in timed.items()
    }

    served = next(one for one in costs if one.model.name == SERVED)
    bare = cost_tables(costs[served], served)
    beside = [seconds - bare.stage_s(**batch) for kind, batch, seconds in server_steps() if kind == "decode"]
    overhead_s = max(0.0, float(f"{median(beside):.2g}"))
    print(f"{SERVED} against the server; a decode step takes {overhead_s * 1e3:.2f} ms more than its layers")
    compare_with_server(bare, "layers alone")
    costs = {one: cost.model_copy(update={"overhead_s": overhead_s}) for one, cost in costs.items()}
    compare_with_server(cost_tables(costs[served], served), "layers and overhead")
    compare_with_server(roofline(served), "roofline")

    print("roofline against the tables (with overhead)")
    for deployment, cost in costs.items():
        computed, tables = roofline(deployment), cost_tables(cost, deployment)
        for kind in ("decode", "prompt"):
            found = [(computed.stage_s(**b), tables.stage_s(**b)) for k, b in grid(cost) if k == kind]
            print(f"  {deployment.model.name}/{deployment.tensor_parallel}, {kind}: {errors(found)}")
    steps = [0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9]
    fits = {
        (flops, bandwidth): size_of_error(costs, flops_efficiency=flops, bandwidth_efficiency=bandwidth)
        for flops, bandwidth in product(steps[:5], steps[2:])
    }
    best = min(fits, key=fits.__getitem__)
    print(f"  as shipped (0.55, 0.8): {fits[0.55, 0.8]:.3f}; best {best}: {fits[best]:.3f}")
    compare_with_server(
        roofline(served, flops_efficiency=best[0], bandwidth_efficiency=best[1]),
        "best roofline and the server",
    )

    for name, cost in timed.items() if arguments.write else ():
        if name != SERVED:
            described = {
                "device": "H200",
                "model": name,
                "tensor_parallel": cost["tensor_parallel"],
                "source": SOURCE.format(torch=data["torch"], device=data["device"]),
                "cost": {"kind": "layers", "overhead_s": overhead_s, **cost},
            }
            text = yaml.safe_dump(described, sort_keys=False, default_flow_style=None, width=110)
            head = "# Times of one layer, seconds: written by benchmarks/gpu/layer_tables.py.\n"
            (REPLICAS / f"h200-{name.lower()}.yaml").write_text(head + text)


if __name__ == "__main__":
    main()
