"""`pointsman calibrate`: a server's speed, measured from outside or read from its traffic."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pointsman.cli.console import compilation_announced, print_json, progress, say
from pointsman.cli.options import AsJson
from pointsman.errors import InputError

if TYPE_CHECKING:
    from pointsman.live.probing import Facts
    from pointsman.live.traffic import TrafficFit


def calibrate(
    url: Annotated[
        str | None, typer.Option("--url", metavar="URL", help="A running server to probe.")
    ] = None,
    traffic: Annotated[
        Path | None,
        typer.Option(
            "--traffic",
            metavar="FILE",
            help="Recorded requests with their times, instead of probing; with --url, those of that server.",
        ),
    ] = None,
    neighbours: Annotated[
        list[str] | None,
        typer.Option(
            "--neighbour",
            metavar="URL",
            help="Another server on the card of --url, once for each: what its steps cost is in --traffic.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE.yaml", help="Write the replica's description.")
    ] = None,
    minutes: Annotated[float, typer.Option("--minutes", metavar="M", help="Time to probe.")] = 3.0,
    max_streams: Annotated[
        int, typer.Option("--max-streams", metavar="N", help="Requests at once, at most.")
    ] = 64,
    as_json: AsJson = False,
) -> None:
    """Fit the cost model of a server, with its uncertainty, and describe it for the simulator and the router.

    Probing needs a server that is quiet now and then: it waits for that, and uses half of the KV memory at
    most. The file is read by `serve --backends FILE`, and in a configuration as
    `cluster.replicas: [{description: FILE}]`.

    A server that shares its card or host is slower than a probe of it alone says: calibrate it from traffic
    that all of them served. With --url and --traffic, KV memory is what the server says, nothing is probed,
    and the file is of the same form. --neighbour names those on the same card, whose steps slow it down.

    Example: pointsman calibrate --url http://127.0.0.1:8000 --minutes 3 --out my-server.yaml
    """
    import yaml

    from pointsman.files import output_file

    if url is None and traffic is None:
        raise InputError("--url", url, "this or --traffic is needed", "give one of the two, or both")
    if neighbours and (url is None or traffic is None):
        remedy = "give --url, and with --traffic what all of them served"
        raise InputError(
            "--neighbour", neighbours[0], "shares the card of a server that is not named", remedy
        )
    # Opened first: minutes of probing are not lost to a path that cannot be written.
    with nullcontext() if out is None else output_file("--out", out) as file, compilation_announced():
        if traffic is None:
            assert url is not None
            data = _probe(url, minutes, max_streams)
        else:
            data = _read(traffic) if url is None else _read_one(url, traffic, neighbours or [])
        if file is not None:
            file.write("# Written by `pointsman calibrate`.\n")
            file.write(yaml.safe_dump(data, sort_keys=False, default_flow_style=None, width=110))
    if as_json or out is None:
        print_json(data)
        return
    _tell(data, out)


def _probe(url: str, minutes: float, max_streams: int) -> dict[str, Any]:
    from pointsman.live.fitting import description, fit_probes
    from pointsman.live.probing import Prober, Server

    if not 0 < minutes < math.inf:
        raise InputError("--minutes", minutes, "is not a time to probe for", "for example 3")
    if max_streams < 1:
        raise InputError("--max-streams", max_streams, "leaves no requests to probe with", "for example 64")

    async def measure() -> dict[str, Any]:
        server = Server(url)
        prober = Prober(server, await server.facts(), max_streams)
        with progress("probing", 1000) as advance:
            shown = 0

            def show(share: float, _: str) -> None:
                nonlocal shown
                advance(int(1000 * share) - shown)
                shown = int(1000 * share)

            probes = await prober.run(60 * minutes, show)
        if prober.num_disturbed:
            say(f"{prober.num_disturbed} probes were left out: others used the server")
        fit = fit_probes(probes, prober.facts, prober.limit_seqs)
        return description(server.url, prober.facts, fit, prober.limit_seqs, prober.num_together)

    return asyncio.run(measure())


def _read(path: Path) -> dict[str, Any]:
    from pointsman.live.traffic import UNDETERMINED, fit_traffic, read_traffic

    servers = [_of_server(fit) for fit in fit_traffic(read_traffic(path))]
    alone = {"replica": servers[0]["replica"]} if len(servers) == 1 else {}
    undetermined = [*UNDETERMINED, "the KV memory: give --url as well"]
    return {**alone, "servers": servers, "measured": {"traffic": str(path), "undetermined": undetermined}}


def _of_server(fit: TrafficFit) -> dict[str, Any]:
    return {
        "server": fit.server,
        "replica": fit.replica,
        "uncertainty": fit.errors,
        "off_on_this_traffic": fit.replayed,
        "requests": fit.num_requests,
    }


def _percents(shares: dict[str, float]) -> str:
    return ", ".join(f"{100 * value:+.1f} % ({name.replace('_', ' ')})" for name, value in shares.items())


def _read_one(url: str, path: Path, neighbours: Sequence[str]) -> dict[str, Any]:
    """What `_probe` gives, from traffic and what the server says about itself."""
    from pointsman.live.probing import Server
    from pointsman.live.traffic import read_traffic

    read_traffic(path)  # what is wrong with it is said before the server is asked
    server = Server(url)
    facts = asyncio.run(server.facts())
    return described(server.url, facts, path, [Server(other).url for other in neighbours])


def described(url: str, facts: Facts, path: Path, neighbours: Sequence[str]) -> dict[str, Any]:
    """The description of a server by its traffic; `neighbours` are on its card."""
    from pointsman.live.traffic import UNDETERMINED, fit_server, read_traffic

    table = read_traffic(path)
    names = table["server"].unique().sort().to_list()
    is_of_one = names == ["all"]
    for option, name in (("--url", url), *(("--neighbour", other) for other in neighbours)):
        if name not in names and not (is_of_one and option == "--url"):
            problem = f"has no requests of {name}, but of {', '.join(names[:4])}"
            raise InputError("--traffic", str(path), problem, f"name one of these with {option}")
    name = "all" if is_of_one else url
    fit = fit_server(table, name, neighbours, facts.num_blocks, facts.block_size or 16)
    calibration = fit.speeds
    undetermined = list(UNDETERMINED)
    if fit.card is not None and fit.card.doubt is not None:
        undetermined.insert(0, f"what a neighbour's step costs: {fit.card.doubt}")
    if facts.num_blocks is None or facts.block_size is None:
        undetermined.append("KV memory: /metrics does not tell")
    else:
        calibration["kv_capacity_tokens"] = facts.num_blocks * facts.block_size
    return {
        "backends": [{"url": url, "calibration": calibration}],
        "replica": fit.replica,
        "measured": {
            "url": url,
            "model": facts.model,
            "traffic": str(path),
            "servers": [_of_server(fit)],
            "undetermined": undetermined,
        },
    }


def _tell(data: dict[str, Any], out: Path) -> None:
    from pointsman.plain import in_percent

    measured = data["measured"]
    if "traffic" in measured:
        for one in data.get("servers") or measured["servers"]:
            cost = one["replica"]["cost"]
            say(
                f"server {one['server']}, {one['requests']} requests: {1e3 * cost['a']:.2f} ms a step, "
                f"{1e6 * cost['b']:.1f} µs a prompt token, {1e6 * cost['c']:.1f} µs a stream"
            )
            if "card" in one["replica"]:
                error = one["uncertainty"].get("neighbour_step_s", 0.0)
                say(
                    f"  {1e3 * one['replica']['neighbour_step_s']:.2f} ms (±{in_percent(error, 0)}) "
                    "for each step of a neighbour on its card"
                )
            off = one["off_on_this_traffic"]
            say(f"  simulated, the same requests are off by {_percents(off)}")
    else:
        figures = data["backends"][0]["calibration"]
        errors = measured["uncertainty"]
        step_s, prompt_s = figures["step_floor_s"], figures.get("prefill_s_per_token", 0.0)
        say(
            f"{measured['probes']} probes, the fit is off by "
            f"{in_percent(measured['error_of_the_fit'], 1)} typically: "
            f"{1e3 * step_s:.2f} ms a step (±{in_percent(errors['step_floor_s'], 1)}), "
            f"{1e6 * prompt_s:.1f} µs a prompt token (±{in_percent(errors['prefill_s_per_token'], 1)})"
        )
        if "under_load" in measured:
            say(
                f"answers that came and went took {measured['under_load']:.2f} times as long as "
                "single probes would say; the file follows them: "
                f"simulated, they are off by {_percents(measured['off_under_load'])}"
            )
        if data["replica"]["scheduler"]["async_scheduling"]:
            say("the next step is planned while one runs (asynchronous scheduling)")
    say("not determined: " + "; ".join(measured["undetermined"]))
    say(f"written to {out}")
