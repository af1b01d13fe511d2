"""`pointsman demo-serve`: everything that serves, on this machine, in about two minutes."""

from __future__ import annotations

import shlex
import time
from typing import TYPE_CHECKING

import typer

from pointsman.cli.console import compilation_announced, print_json, progress, say
from pointsman.cli.evaluate import print_report
from pointsman.cli.live import LIVE_SEEDS, say_addresses
from pointsman.cli.options import AsJson, report_seeds

if TYPE_CHECKING:
    from pointsman.config import Config
    from pointsman.evaluation.compare import Comparison

POLICY, BASELINE = "default", "least-outstanding"
SCENARIO = "mixed-hardware"
MODEL = "Llama-3.1-8B"
DEVICES = ("A100-80", "L40S", "A40", "A10")
# Short answers: a block ends seconds after its last arrival.
LENGTHS = "{kind: lognormal, prompt_mean: 1500, output_mean: 40, output_cv: 0.5}"
NUM_REQUESTS = 100  # of a block


def demo_serve(context: typer.Context, as_json: AsJson = False) -> None:
    """Route to four emulated, unequal servers by the trained policy and by least-outstanding, and compare.

    It runs for two minutes in real time, with live pages, and then prints the table. Ctrl-C ends everything.

    Example: pointsman demo-serve
    """
    from pointsman.live.processes import run_to_end
    from pointsman.report.comparison import ComparisonReport
    from pointsman.report.evaluation import EvaluationReport

    started = time.perf_counter()
    with compilation_announced():
        configs = _configs()
        comparison = run_to_end(_served(configs))
    command = shlex.join(["pointsman", *context.obj])
    report = EvaluationReport(ComparisonReport([comparison], command, time.perf_counter() - started))
    if as_json:
        print_json(report.results())
    else:
        print_report(report)


def _configs() -> list[Config]:
    from pointsman.experiments.scenarios import find_scenario

    groups = ", ".join(f"{{device: {device}}}" for device in DEVICES)
    overrides = [
        f"cluster.replicas=[{groups}]",
        f"cluster.model={MODEL}",
        f"workload.lengths={LENGTHS}",
        f"workload.requests={NUM_REQUESTS}",
    ]
    return [find_scenario(SCENARIO).config(seed, overrides) for seed in report_seeds(LIVE_SEEDS)]


async def _served(configs: list[Config]) -> Comparison:
    from pointsman.live.comparison import compare_live, plan_live
    from pointsman.live.processes import emulator

    say(f"starting servers: {MODEL} on {', '.join(DEVICES)}…")
    async with emulator(["--model", MODEL, "--devices", ",".join(DEVICES)]) as servers:
        plan = await plan_live("unequal servers", configs, [POLICY], BASELINE, servers.urls)
        say(f"serving {plan.num_requests:,} requests, two minutes…")
        with progress("serving", 1.0) as advance:
            return await compare_live(plan, None, advance, say_addresses)
