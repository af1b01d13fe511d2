"""`pointsman scenarios`, `policies` and `hardware`: what there is, with one line each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from pointsman.cli.completion import problem_names
from pointsman.cli.console import print_json, stdout
from pointsman.cli.options import AsJson

if TYPE_CHECKING:
    from pointsman.routing.heuristics import Heuristic
    from pointsman.simulator.hardware import Catalogue, Device, Model

TENSOR_PARALLEL = (1, 2, 4, 8)


class FittedTable(Table):
    """A table whose words stay whole, or on a terminal too narrow for that a list: cells below each other.

    Rich would take the same from every column and break words anywhere.
    """

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        ranges = [self._measure_column(console, options, column) for column in self.columns]
        room = options.max_width - self._extra_width
        if sum(one.minimum for one in ranges) <= room:
            if sum(one.maximum for one in ranges) > room:
                shared = _shared([one.minimum for one in ranges], [one.maximum for one in ranges], room)
                for column, width in zip(self.columns, shared, strict=True):
                    column.width = width - self._get_padding_width(column._index)
            yield from super().__rich_console__(console, options)
            return
        first, *others = self.columns
        width = max((len(str(column.header)) for column in others), default=0)
        for row, name in enumerate(first.cells):
            yield Text.from_markup("".join(str(name).split("\n")), style="bold")
            for column in others:
                cell = " ".join(str(list(column.cells)[row]).split("\n"))
                if cell:
                    yield Text.from_markup(f"  {column.header!s:<{width}}  {cell}")


def _shared(lowest: Sequence[int], highest: Sequence[int], room: int) -> list[int]:
    """Widths that add up to `room`: all have what their words need, and none wants what it has not needed."""
    widths = list(lowest)
    for _ in range(room - sum(widths)):
        wanting = [k for k, most in enumerate(highest) if widths[k] < most]
        if not wanting:
            break
        widths[min(wanting, key=lambda k: widths[k])] += 1
    return widths


def plain_table(*headers: str, right: Sequence[str] = ()) -> Table:
    """A table without rules; columns in `right` hold numbers."""
    table = FittedTable(
        box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False, header_style="bold"
    )
    for header in headers:
        table.add_column(header, justify="right" if header in right else "left", overflow="fold")
    return table


def scenarios(as_json: AsJson = False) -> None:
    """List the named scenarios, and those that nothing is ever tuned or trained on.

    Example: pointsman scenarios
    """
    from pointsman.experiments.scenarios import PREFIXES, SATURATED, SCENARIOS, SUITES, UNSEEN

    known = {**SCENARIOS, **SATURATED, **UNSEEN}
    if as_json:
        suites = {name: [suite for suite, names in SUITES.items() if name in names] for name in known}
        rows = [{"name": one.name, "what": one.what, "suites": suites[one.name]} for one in known.values()]
        print_json(rows)
        return
    console = stdout()
    tables = (
        ("scenario", SUITES["all"]),
        ("with shared prefixes", PREFIXES),
        ("past saturation", SATURATED),
        ("never trained on", UNSEEN),
    )
    for title, names in tables:
        table = plain_table(title, "what")
        for name in names:
            table.add_row(name, known[name].what)
        console.print(table, "")
    for suite, names in SUITES.items():
        what = "every scenario of the first list" if suite == "all" else ", ".join(names)
        console.print(f"[bold]--suite {suite}[/bold]: {what}")


def policies(
    signals: Annotated[
        bool, typer.Option("--signals", help="List the signals a linear-score can weigh.")
    ] = False,
    env: Annotated[
        str | None,
        typer.Option(
            "--env",
            metavar="NAME",
            help="Those of another problem than routing: jobs.",
            autocompletion=problem_names,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the routing policies, or the signals they decide from.

    Example: pointsman policies --signals
    """
    from pointsman.routing.heuristics import HEURISTICS
    from pointsman.routing.signals import SIGNALS
    from pointsman.routing.sources import SHIPPED

    known = {name: one.what + _parameters(one) for name, one in HEURISTICS.items()} | SHIPPED
    title = "sends a request to"
    if env is not None and env != "routing":
        from pointsman.evaluation.problem import make_judge

        known, title = dict(make_judge({"kind": env}).heuristics), "picks"
    if as_json:
        rows: list[dict[str, Any]] = [signal._asdict() for signal in SIGNALS]
        if not signals:
            rows = [{"name": name, "what": what} for name, what in known.items()]
        print_json(rows)
        return
    if signals:
        table = plain_table("signal", "unit", "source", "meaning")
        for signal in SIGNALS:
            table.add_row(signal.name, signal.unit, signal.source, signal.meaning)
    else:
        table = plain_table("policy", title)
        for name, what in known.items():
            table.add_row(name, what)
    stdout().print(table)


def _parameters(heuristic: Heuristic) -> str:
    """What can be set of it, with what it is if nobody does."""
    named = ", ".join(f"{one.name} {one.default:g}" for one in heuristic.parameters)
    return f" ({named})" if named else ""


def hardware(
    catalogue: Annotated[
        Path | None, typer.Option("--catalogue", metavar="FILE.yaml", help="Your own devices and models.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List devices, models, and how many tokens of KV memory each pair leaves.

    Example: pointsman hardware --catalogue my-devices.yaml
    """
    from pointsman.simulator.hardware import load_catalogue
    from pointsman.simulator.measured import measured_replicas

    known = load_catalogue(catalogue)
    if as_json:
        print_json(
            {
                "devices": [device.model_dump(mode="json") for device in known.devices.values()],
                "models": [_model_figures(model) for model in known.models.values()],
                "kv_capacity": [_kv_figures(model, known) for model in known.models.values()],
                "measured": [
                    {"measured_on": one.measured_on, **one.model_dump(mode="json")}
                    for one in measured_replicas()
                ],
            }
        )
        return
    console = stdout()
    for table in (_device_table(known), _model_table(known), _kv_table(known)):
        console.print(table, "")
    console.print(
        "KV memory in thousands of tokens a replica (fp16, 0.9 of the memory), with the fewest devices that\n"
        "hold the model: /2 = tensor_parallel 2; – = does not fit on 8.",
        "",
    )
    console.print(_measured_table(), "")
    console.print(
        "server: step times of a real server; layers: times of one layer by its shapes, with an assumed\n"
        "overhead. All other pairs, and other tensor_parallel, are computed (`cost: roofline`)."
    )


def _device_table(known: Catalogue) -> Table:
    columns = ("fp16 TFLOP/s", "fp8 TFLOP/s", "memory GB", "bandwidth GB/s", "link GB/s")
    table = plain_table("device", *columns, right=columns)
    for device in known.devices.values():
        fp8 = "–" if device.fp8_tflops is None else f"{device.fp8_tflops:g}"
        figures = (device.memory_gb, device.bandwidth_gb_s, device.link_bandwidth_gb_s)
        table.add_row(device.name, f"{device.fp16_tflops:g}", fp8, *(f"{figure:g}" for figure in figures))
    return table


def _model_table(known: Catalogue) -> Table:
    columns = ("parameters", "active", "layers", "KV heads", "KV kB/token", "context")
    table = plain_table("model", *columns, right=columns)
    for model in known.models.values():
        figures = _model_figures(model)
        table.add_row(
            model.name,
            f"{figures['num_parameters'] / 1e9:.1f} B",
            f"{figures['num_active_parameters'] / 1e9:.1f} B",
            str(model.num_layers),
            str(model.num_kv_heads),
            f"{figures['kv_bytes_per_token'] / 1000:.0f}",
            f"{model.max_context_tokens:,}",
        )
    return table


def _kv_table(known: Catalogue) -> Table:
    table = plain_table("model", *known.devices, right=list(known.devices))
    for model in known.models.values():
        cells = []
        for device in known.devices.values():
            found = _smallest_fit(device, model)
            if found is None:
                cells.append("–")
            else:
                num_devices, tokens = found
                cells.append(f"{tokens / 1000:,.0f}" + (f"/{num_devices}" if num_devices > 1 else ""))
        table.add_row(model.name, *cells)
    return table


def _measured_table() -> Table:
    from pointsman.simulator.measured import measured_replicas

    table = plain_table("device", "model", "measured on", "source")
    for one in measured_replicas():
        parallel = f"/{one.tensor_parallel}" if one.tensor_parallel > 1 else ""
        table.add_row(one.device, one.model + parallel, one.measured_on, one.source)
    return table


def _model_figures(model: Model) -> dict[str, Any]:
    return {
        **model.model_dump(mode="json"),
        "num_parameters": model.num_parameters,
        "num_active_parameters": model.num_active_parameters,
        "kv_bytes_per_token": 2 * 2 * model.num_layers * model.num_kv_heads * model.head_dim,
    }


def _kv_figures(model: Model, known: Catalogue) -> dict[str, Any]:
    fits = {name: _smallest_fit(device, model) for name, device in known.devices.items()}
    return {
        "model": model.name,
        "devices": {
            name: None if fit is None else {"tensor_parallel": fit[0], "tokens": fit[1]}
            for name, fit in fits.items()
        },
    }


def _smallest_fit(device: Device, model: Model) -> tuple[int, int] | None:
    """Tensor parallelism and KV tokens of the smallest replica that holds the model."""
    from pointsman.errors import InputError
    from pointsman.simulator.hardware import Deployment, kv_capacity_blocks

    block_size = 16
    for tensor_parallel in TENSOR_PARALLEL:
        try:
            deployment = Deployment(device, model, tensor_parallel)
            return tensor_parallel, kv_capacity_blocks(deployment, block_size) * block_size
        except InputError:
            continue
    return None
