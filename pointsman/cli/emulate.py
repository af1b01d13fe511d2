"""`pointsman emulate`: vLLM servers without GPUs."""

from __future__ import annotations

import asyncio
import signal
from typing import Annotated, Any

import typer

from pointsman.cli.completion import device_names, length_names, model_names
from pointsman.cli.console import compilation_announced, print_json, say
from pointsman.cli.options import AsJson, check_port
from pointsman.errors import InputError

MAX_REPLICAS = 1_000


def emulate(
    replicas: Annotated[
        int | None,
        typer.Option(
            "--replicas", metavar="N", help="Number of servers. Default: 4, or one for each of --devices."
        ),
    ] = None,
    model: Annotated[
        str,
        typer.Option("--model", metavar="NAME", help="See `pointsman hardware`.", autocompletion=model_names),
    ] = "llama-3-8b",
    device: Annotated[
        str,
        typer.Option(
            "--device", metavar="NAME", help="What every server runs on.", autocompletion=device_names
        ),
    ] = "a100",
    devices: Annotated[
        str | None,
        typer.Option(
            "--devices",
            metavar="A,B,…",
            help="A device for each server, instead of --device.",
            autocompletion=device_names,
        ),
    ] = None,
    time_scale: Annotated[
        float, typer.Option("--time-scale", metavar="X", help="This many times as fast as the real thing.")
    ] = 1.0,
    lengths: Annotated[
        str,
        typer.Option(
            "--lengths",
            metavar="NAME",
            help="Lengths of answers that end before max_tokens.",
            autocompletion=length_names,
        ),
    ] = "azure-conv",
    host: Annotated[str, typer.Option("--host", metavar="ADDRESS")] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option(
            "--port", metavar="PORT", help="Port of the first server; the others follow. 0 takes any."
        ),
    ] = 8100,
    admin_port: Annotated[
        int | None,
        typer.Option("--admin-port", metavar="PORT", help="Where faults are made. Default: --port minus 1."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Seed of the lengths of answers.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Serve like vLLM, with the timing of the simulator and filler for text. Ctrl-C ends it.

    Faults are made on the admin port: slow, hang, reset, error, die, or none to go back to normal.

    \b
    Example: pointsman emulate --replicas 4 --model llama-3-8b --device a100 --time-scale 10
    curl localhost:8099/replicas/0/fault -d '{"kind": "slow", "factor": 4, "for_s": 10}'
    """
    import uvloop

    from pointsman.emulator.cluster import Emulator, EmulatorSpec
    from pointsman.emulator.engine import load_engine
    from pointsman.router.http.sockets import raise_file_limit
    from pointsman.spec import parse_spec

    named = _devices(replicas, device, devices)
    check_port("--port", port)
    if port > 0 and port + len(named) - 1 > 65535:
        problem = f"leaves no port for the last of {len(named)} servers"
        raise InputError("--port", port, problem, f"use one up to {65536 - len(named)}")
    if admin_port is not None:
        check_port("--admin-port", admin_port)
    fields: dict[str, Any] = {
        "model": model,
        "devices": named,
        "time_scale": time_scale,
        "lengths": lengths,
        "seed": seed,
        "host": host,
        "port": port,
        "admin_port": max(0, port - 1) if admin_port is None else admin_port,
    }
    raise_file_limit()
    with compilation_announced():
        emulator = Emulator(parse_spec(EmulatorSpec, fields))
        load_engine()
    uvloop.run(_serve(emulator, as_json))


def _devices(replicas: int | None, device: str, devices: str | None) -> tuple[str, ...]:
    if replicas is not None and not 1 <= replicas <= MAX_REPLICAS:
        remedy = f"give 1 to {MAX_REPLICAS:,}"
        raise InputError("--replicas", replicas, "is not a number of servers", remedy)
    if devices is None:
        return (device,) * (4 if replicas is None else replicas)
    named = tuple(name.strip() for name in devices.split(",") if name.strip())
    if replicas is not None and replicas != len(named):
        remedy = "leave out one of the two, or make them agree"
        raise InputError("--devices", devices, f"names {len(named)} for {replicas} replicas", remedy)
    return named


async def _serve(emulator: Any, as_json: bool) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    await emulator.open()
    if as_json:
        servers = [{"name": replica.name, "url": replica.url} for replica in emulator.replicas]
        print_json({"model": emulator.spec.model, "replicas": servers, "admin": emulator.admin_url})
    else:
        for replica in emulator.replicas:
            say(f"{replica.url}  {replica.name}")
        say(f"{emulator.admin_url}  faults: POST /replicas/N/fault. Ctrl-C ends it.")
    await stop.wait()
    emulator.close()
    await asyncio.sleep(0)  # let the connections close
