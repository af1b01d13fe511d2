"""`pointsman profile`: step times of a model on this machine's device, by its shapes, without a server."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pointsman.cli.console import print_json, progress, say
from pointsman.cli.options import AsJson
from pointsman.errors import InputError

if TYPE_CHECKING:
    from pointsman.live.layers import Rows


def profile(
    model: Annotated[
        str, typer.Option("--model", metavar="NAME", help="See `pointsman hardware`.")
    ] = "Llama-3-8B",
    tensor_parallel: Annotated[
        int, typer.Option("--tensor-parallel", metavar="N", help="Time the shapes of one of N devices.")
    ] = 1,
    device: Annotated[str, typer.Option("--device", metavar="cuda|cpu", help="Of PyTorch.")] = "cuda",
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE.yaml", help="Write tables and the cost model.")
    ] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", metavar="N", help="Tokens a step, at most.")
    ] = 8192,
    max_seqs: Annotated[
        int, typer.Option("--max-seqs", metavar="N", help="Sequences a step, at most.")
    ] = 256,
    repeats: Annotated[int, typer.Option("--repeats", metavar="N", help="Of each timing.")] = 20,
    catalogue: Annotated[
        Path | None, typer.Option("--catalogue", metavar="FILE.yaml", help="Your own devices and models.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Time a model's layers with PyTorch and random weights, and write them as a replica's description.

    What a server does beside its layers, and what devices say to each other, is not in it: `calibrate`
    measures a running server. The file is read as `cluster.replicas: [{description: FILE}]`.

    Example: pointsman profile --model Llama-3.1-70B --tensor-parallel 8 --out 70b-shard.yaml
    """
    import torch

    from pointsman.live.layers import profile_layers
    from pointsman.simulator.hardware import Deployment, load_catalogue

    known = load_catalogue(catalogue)
    shape = Deployment(next(iter(known.devices.values())), known.model(model), tensor_parallel).model
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device", device, "PyTorch sees no GPU here", "use --device cpu to try it out")
    dtype = "bfloat16" if device == "cuda" else "float32"
    with progress("timing", 0) as advance:
        tables = profile_layers(
            shape.model_dump(),
            tensor_parallel,
            device,
            dtype,
            max_tokens,
            max_seqs,
            repeats,
            lambda _: advance(1),
        )
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    data = {
        "replica": {"cost": steps_cost(tables, shape.num_layers)},
        "measured": {
            "model": shape.name,
            "tensor_parallel": tensor_parallel,
            "device": name,
            "torch": str(torch.__version__),
            "undetermined": ["time of a server beside its layers", "communication between devices", "clocks"],
        },
        "tables": tables,
    }
    if out is not None:
        import yaml

        from pointsman.files import output_file

        with output_file("--out", out) as file:
            file.write(
                "# Written by `pointsman profile`. Times are seconds; tables are those of one layer.\n"
            )
            file.write(yaml.safe_dump(data, sort_keys=False, default_flow_style=None, width=110))
    if as_json or out is None:
        print_json(data)
    else:
        say(f"{shape.name} on {name}: {sum(map(len, tables.values()))} timings, written to {out}")


def steps_cost(tables: dict[str, Rows], num_layers: int) -> dict[str, Any]:
    """A cost of kind `steps`, from the times of one layer and of the LM head."""
    head = tables["head"]
    per_sequence = (head[-1]["seconds"] - head[0]["seconds"]) / max(
        1.0, head[-1]["tokens"] - head[0]["tokens"]
    )
    curve = []
    slowest = 0.0
    for row in tables["products"]:
        slowest = max(
            slowest, num_layers * row["seconds"] + head[0]["seconds"]
        )  # more tokens never take less time
        curve.append([int(row["tokens"]), float(f"{slowest:.4g}")])
    pairs = _slope([(row["tokens"] ** 2 / 2, row["seconds"]) for row in tables["prompt"]])
    context = _slope([(row["num_seqs"] * row["context"], row["seconds"]) for row in tables["decode"]])
    others = {
        "sequence_s": max(0.0, per_sequence),
        "context_s": num_layers * context,
        "pair_s": num_layers * pairs,
    }
    return {"kind": "steps", "step_s": curve} | {
        name: float(f"{value:.4g}") for name, value in others.items()
    }


def _slope(points: list[tuple[float, float]]) -> float:
    """The slope of the line through the origin that fits best relative to each value; 0 without points."""
    weighted = [(x / seconds, 1.0) for x, seconds in points if seconds > 0]
    squares = sum(x * x for x, _ in weighted)
    return sum(x for x, _ in weighted) / squares if squares > 0 else 0.0
