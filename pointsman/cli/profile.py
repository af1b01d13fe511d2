"""`pointsman profile`: step times of a model on this machine's device, by its shapes, without a server."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pointsman.cli.completion import model_names
from pointsman.cli.console import print_json, progress, say
from pointsman.cli.options import AsJson
from pointsman.errors import InputError

if TYPE_CHECKING:
    from pointsman.live.layers import Rows


def profile(
    model: Annotated[
        str,
        typer.Option("--model", metavar="NAME", help="See `pointsman hardware`.", autocompletion=model_names),
    ] = "Llama-3-8B",
    tensor_parallel: Annotated[
        int, typer.Option("--tensor-parallel", metavar="N", help="Time the shapes of one of N devices.")
    ] = 1,
    device: Annotated[str, typer.Option("--device", metavar="cuda|cpu", help="Device of PyTorch.")] = "cuda",
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE.yaml", help="Write tables and the cost model.")
    ] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", metavar="N", help="Tokens a step, at most.")
    ] = 8192,
    max_seqs: Annotated[
        int, typer.Option("--max-seqs", metavar="N", help="Sequences a step, at most.")
    ] = 256,
    repeats: Annotated[
        int, typer.Option("--repeats", metavar="N", help="How often to repeat each timing.")
    ] = 20,
    catalogue: Annotated[
        Path | None, typer.Option("--catalogue", metavar="FILE.yaml", help="Your own devices and models.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Time a model's layers with PyTorch and random weights, and write them as a replica's description.

    It leaves out what a server does beside its layers, and communication between devices; `calibrate`
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
    if device not in ("cuda", "cpu"):
        raise InputError("--device", device, "is not a device of PyTorch", "use cuda or cpu")
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
        "replica": {
            "model": shape.name,
            "tensor_parallel": tensor_parallel,
            "cost": layers_cost(tables, shape.name, tensor_parallel),
        },
        "measured": {
            "device": name,
            "torch": str(torch.__version__),
            "undetermined": ["time of a server beside its layers", "communication between devices", "clocks"],
        },
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


def layers_cost(tables: Mapping[str, Rows], model: str, tensor_parallel: int) -> dict[str, Any]:
    """A cost of kind `layers`: the tables of `profile_layers`, row by row."""
    keys = {
        "products": ("tokens",),
        "head": ("tokens",),
        "prompt": ("tokens",),
        "decode": ("num_seqs", "context"),
    }
    rows = {
        name: [[*(int(row[key]) for key in sizes), float(f"{row['seconds']:.4g}")] for row in tables[name]]
        for name, sizes in keys.items()
    }
    return {"kind": "layers", "model": model, "tensor_parallel": tensor_parallel, **rows}
