"""Our policies inside Vidur, against its own `round_robin` and `lor`: four replicas, moderate and heavy load.

Run, where Vidur is installed: python benchmarks/vidur_policies.py [--traces 8] [--policies default]
The reference traces (tests/data/golden) are played once. Then come `--traces` others with Poisson arrivals
and lengths of the Azure chat trace; their ratios have 95 % intervals. Step times are in closed form
(integrations/vidur/costs.py). Heavy load is 40 requests/s with 2048 KV blocks a replica. PyPI's Vidur
(0.0.26) breaks off when a request is preempted, whatever schedules, so there heavy load is 28 requests/s with
as many blocks as its memory planner finds.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import logging
from pathlib import Path

import numpy as np
from vidur.config.config import (
    LORGlobalSchedulerConfig,
    RoundRobinGlobalSchedulerConfig,
    SarathiSchedulerConfig,
    VllmSchedulerConfig,
)

from pointsman.evaluation.bootstrap import paired_ratios
from pointsman.integrations.vidur.running import Arrival, Lifetime, is_of_pypi, run, simulator
from pointsman.integrations.vidur.scheduler import PointsmanGlobalSchedulerConfig
from pointsman.spec import parse_spec
from pointsman.workload import build_workload
from pointsman.workload.spec import WorkloadSpec

GOLDEN = Path(__file__).parents[1] / "tests" / "data" / "golden"
VIDURS = {"round_robin": RoundRobinGlobalSchedulerConfig, "lor": LORGlobalSchedulerConfig}
ENGINES = {"vllm": VllmSchedulerConfig, "sarathi": SarathiSchedulerConfig}
METRICS = ("e2e mean", "e2e P99", "TTFT mean", "TTFT P99")


def loads() -> dict[str, tuple[float, int | None, str]]:
    """-> requests/s, KV blocks of a replica, the reference trace"""
    heavy = (28.0, None, "") if is_of_pypi() else (40.0, 2048, "trace_over_4r")
    return {"moderate": (18.0, None, "trace_mod_4r"), "heavy": heavy}


def reference(name: str) -> list[Arrival]:
    text = gzip.decompress((GOLDEN / f"{name}.csv.gz").read_bytes()).decode()
    return [
        Arrival(float(row["arrived_at"]), int(row["num_prefill_tokens"]), int(row["num_decode_tokens"]))
        for row in csv.DictReader(text.splitlines())
    ]


def drawn(rate_rps: float, seed: int) -> list[Arrival]:
    section = {
        "arrivals": {"kind": "poisson", "rate": rate_rps},
        "lengths": "azure-conv",
        "requests": 600,
        "max_tokens": 4096,
    }
    workload = build_workload(parse_spec(WorkloadSpec, section, "workload"), seed)
    columns = (workload.arrived_at, workload.num_prefill_tokens, workload.num_decode_tokens)
    return [Arrival(float(t), int(p), int(d)) for t, p, d in zip(*columns, strict=True)]


def measures(served: list[Lifetime]) -> list[float]:
    e2e_s, ttft_s = [s.e2e_s for s in served], [s.ttft_s for s in served]
    return [measure for times in (e2e_s, ttft_s) for measure in (np.mean(times), np.percentile(times, 99))]


def play(policy: str, engine: str, arrivals: list[Arrival], num_blocks: int | None) -> list[float]:
    kind = VIDURS.get(policy)
    chosen = PointsmanGlobalSchedulerConfig(policy=policy) if kind is None else kind()
    return measures(run(simulator(arrivals, chosen, ENGINES[engine](), num_blocks=num_blocks)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=int, default=8)
    parser.add_argument("--policies", default="default")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    policies = options.policies.split(",")
    for engine in ENGINES:
        for load, (rate_rps, num_blocks, trace) in loads().items():
            print(f"\n{engine}, {load} load ({rate_rps:g} requests/s)")
            if trace:
                for policy in (*VIDURS, *policies):
                    found = play(policy, engine, reference(trace), num_blocks)
                    cells = ", ".join(
                        f"{name} {value:.3f} s" for name, value in zip(METRICS, found, strict=True)
                    )
                    print(f"  reference trace, {policy}: {cells}")
            traces = [drawn(rate_rps, seed) for seed in range(options.traces)]
            played = {
                policy: np.array([play(policy, engine, arrivals, num_blocks) for arrivals in traces])
                for policy in (*VIDURS, *policies)
            }
            for policy in policies:
                for other in VIDURS:
                    ratios = paired_ratios(played[policy], played[other])
                    cells = ", ".join(
                        f"{name} {ratio.ratio - 1:+.1%} [{ratio.low - 1:+.1%}, {ratio.high - 1:+.1%}]"
                        for name, ratio in zip(METRICS, ratios, strict=True)
                    )
                    print(f"  {options.traces} traces, {policy} against {other}: {cells}", flush=True)


if __name__ == "__main__":
    main()
