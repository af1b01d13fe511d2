"""`pointsman simulate`: one run, its metrics, and on request every request and every batch."""

from __future__ import annotations

import time
import warnings
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pointsman.cli.console import compilation_announced, print_json, progress, stdout
from pointsman.cli.lists import plain_table
from pointsman.cli.options import AsJson, ConfigFile, Overrides, ScenarioName, base_dir, resolve
from pointsman.errors import InputError, PointsmanWarning

if TYPE_CHECKING:
    from rich.table import Table

    from pointsman.experiments.simulate import Outcome, Prepared

LATENCY_NAMES = {
    "ttft": "time to first token",
    "tbt": "time between tokens",
    "tpot": "time per output token",
    "e2e": "end to end",
    "queueing": "queueing",
}
STATISTICS = ("mean", "p50", "p90", "p95", "p99")


def simulate(
    config_file: ConfigFile = None,
    scenario: ScenarioName = None,
    overrides: Overrides = None,
    requests: Annotated[
        Path | None, typer.Option("--requests", metavar="FILE.csv", help="Write one row per request.")
    ] = None,
    trace_out: Annotated[
        Path | None,
        typer.Option(
            "--trace-out",
            metavar="FILE.json",
            help="Write all batches, for ui.perfetto.dev or chrome://tracing.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Simulate a cluster once and print its metrics. Without CONFIG: the scenario steady-chat.

    Requests that never finish (some of Vidur's schedulers can leave one behind) are a warning, not an error:
    they have empty cells in --requests and count in no latency.

    Example: pointsman simulate my-cluster.yaml --set policy.kind=least-work --requests requests.csv
    """
    from pointsman.experiments import simulate as evaluation
    from pointsman.experiments.running import load_simulator
    from pointsman.files import output_file
    from pointsman.report.requests import write_requests
    from pointsman.report.trace import TraceWriter

    if requests is not None and trace_out is not None and requests.resolve() == trace_out.resolve():
        raise InputError("--trace-out", str(trace_out), "is also --requests", "name two files")
    with ExitStack() as outputs:
        requests_file = outputs.enter_context(output_file("--requests", requests)) if requests else None
        trace_file = outputs.enter_context(output_file("--trace-out", trace_out)) if trace_out else None
        outputs.enter_context(compilation_announced())
        config = resolve(config_file, scenario, overrides or [])
        prepared = evaluation.prepare(config, base_dir(config_file, scenario))
        trace = (
            TraceWriter(trace_file, _replica_names(prepared), _num_lanes(prepared)) if trace_file else None
        )
        load_simulator()
        started = time.perf_counter()
        with progress("simulating", len(prepared.workload)) as advance:
            outcome = evaluation.simulate(
                [prepared], progress=advance, on_batches=trace.add if trace else None
            )[0]
        wall_s = time.perf_counter() - started
        if trace:
            trace.close()
        if requests_file:
            write_requests(requests_file, outcome.requests, outcome.request_id)
    _warn_unfinished(outcome)
    if as_json:
        print_json(_as_json(prepared, outcome, wall_s))
    else:
        _print_summary(prepared, outcome, wall_s)


def _replica_names(prepared: Prepared) -> list[str]:
    cluster = prepared.config.cluster
    devices = [group.device or cluster.device for group in cluster.groups for _ in range(group.count)]
    return [f"replica {replica} ({device})" for replica, device in enumerate(devices)]


def _num_lanes(prepared: Prepared) -> int:
    return max(plan.scheduler.pipeline_stages for plan in prepared.plans)


def _warn_unfinished(outcome: Outcome) -> None:
    num_unfinished = int(outcome.metrics["num_unfinished"])
    if num_unfinished:
        text = f"{num_unfinished} of {len(outcome.requests)} requests never finished and count in no latency"
        warnings.warn(PointsmanWarning(text), stacklevel=2)


def _as_json(prepared: Prepared, outcome: Outcome, wall_s: float) -> dict[str, Any]:
    from pointsman.plain import provenance

    return {
        **provenance(),
        "config": prepared.config.model_dump(mode="json"),
        "trace": asdict(reading) if (reading := prepared.workload.reading) else None,
        "metrics": outcome.metrics,
        "replicas": _replica_figures(prepared, outcome),
        **(_hits(outcome) if "hit_share" in outcome.metrics else {}),
        "timings": {"wall_s": wall_s, "requests_per_wall_s": len(outcome.requests) / wall_s},
    }


def _hits(outcome: Outcome) -> dict[str, Any]:
    from pointsman.experiments.metrics import hits_over_time

    return {"hits_over_time": hits_over_time(outcome.requests, len(outcome.replicas)).plain()}


def _replica_figures(prepared: Prepared, outcome: Outcome) -> list[dict[str, Any]]:
    duration_s = outcome.metrics["duration_s"]
    num_sent = max(1, int(outcome.replicas["num_sent"].sum()))
    return [
        {
            "replica": index,
            "name": name,
            "share": float(replica["num_sent"] / num_sent),
            "busy_share": float(replica["busy_s"] / duration_s),
            "kv_use_mean": float(replica["kv_area"] / replica["num_blocks"] / duration_s),
            "hit_share": float(replica["hit_tokens"] / max(1, replica["prompt_tokens"])),
        }
        for index, (name, replica) in enumerate(zip(_replica_names(prepared), outcome.replicas, strict=True))
    ]


def _print_summary(prepared: Prepared, outcome: Outcome, wall_s: float) -> None:
    from pointsman.report.tables import number, percent

    metrics, config = outcome.metrics, prepared.config
    console = stdout()
    console.print(_latency_table(metrics), "")

    def line(name: str, text: str) -> None:
        console.print(f"{name:<12}{text}", soft_wrap=True)

    line(
        "throughput",
        f"{number(metrics['requests_per_s'])} requests/s, {number(metrics['tokens_per_s'])} output tokens/s",
    )
    line(
        "goodput",
        f"{number(metrics['goodput_per_s'])} requests/s ({percent(metrics['good_share'])}) within "
        f"TTFT {config.slo.ttft_s:g} s and TPOT {config.slo.tpot_s:g} s",
    )
    line("balance", _balance(prepared, outcome))
    line(
        "KV memory",
        f"{percent(metrics['kv_use_mean'])} used on average, {metrics['preemptions']:,.0f} preemptions",
    )
    if "hit_share" in metrics:
        line("prefixes", _cached(prepared, outcome))
    line(
        "router",
        f"{config.policy.label}: held {percent(metrics['held_share'])} of the requests, "
        f"{number(metrics['held_mean_s'])} s each; sent {metrics['resent']:,.0f} again",
    )
    rate = f"{metrics['num_requests'] / wall_s:,.0f} requests/s"
    line(
        "simulated",
        f"{metrics['num_requests']:,.0f} requests, {metrics['batches']:,.0f} batches and "
        f"{number(metrics['duration_s'])} s in {number(wall_s)} s ({rate})",
    )


def _latency_table(metrics: dict[str, float]) -> Table:
    from pointsman.report.tables import number

    columns = [name.upper() if name.startswith("p") else name for name in STATISTICS]
    table = plain_table("latency, s", *columns, right=columns)
    for key, name in LATENCY_NAMES.items():
        table.add_row(name, *(number(metrics[f"{key}_{statistic}_s"]) for statistic in STATISTICS))
    return table


def _cached(prepared: Prepared, outcome: Outcome) -> str:
    from pointsman.report.tables import number, percent

    shares = [figures["hit_share"] for figures in _replica_figures(prepared, outcome)]
    text = f"{percent(outcome.metrics['hit_share'])} of the prompt tokens were cached, "
    most = number(outcome.metrics["work_peak"])
    text += f"{percent(min(shares))} to {percent(max(shares))} by replica; "
    return f"{text}at most {most} of its fair share of a minute's work on one replica"


def _balance(prepared: Prepared, outcome: Outcome) -> str:
    """Share of the requests for each replica, for few of them; else the range."""
    from pointsman.report.tables import number, percent

    shares = [figures["share"] for figures in _replica_figures(prepared, outcome)]
    text = f"imbalance {number(outcome.metrics['imbalance_cv'])} (CV of outstanding requests), "
    if len(shares) <= 8:
        return f"{text}shares {', '.join(map(percent, shares))}"
    return f"{text}shares {percent(min(shares))} to {percent(max(shares))} of {len(shares)} replicas"
