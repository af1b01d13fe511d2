"""How much faster than plain Python: the same runs by the compiled simulator and by reference_simulator.py.

Both simulate the golden 4-replica traces, repeated to many requests, one after the other in this process, and
must agree on every timestamp to the last bit. Also how much a second thread adds.

    python benchmarks/simulator_speed.py [--requests 200000]
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from reference_simulator import simulate as simulate_in_python

from pointsman.config import Config
from pointsman.experiments.running import run_to_end
from pointsman.experiments.simulate import Prepared
from pointsman.routing.policy import PolicyTables
from pointsman.simulator.cluster import Clusters
from pointsman.simulator.plan import plan_replicas
from pointsman.spec import parse_spec
from pointsman.workload import build_workload

TRACES = Path(__file__).parent.parent / "tests" / "data" / "golden"
COST = {"kind": "linear", "a": 0.0085, "b": 8.0e-5, "c": 3.0e-5, "d": 8.0e-8, "e": 3.4e-9}
NUM_BLOCKS = {"mod": 30208, "over": 2048}
SCHEDULERS = ("vllm", "sarathi", "orca", "vllm-v1")


def prepare(scheduler: str, load: str, num_requests: int) -> Prepared:
    settings = {"kind": scheduler, "num_blocks": NUM_BLOCKS[load], "watermark": 0.01}
    trace = {"path": str(TRACES / f"trace_{load}_4r.csv.gz"), "repeat": 0}
    data = {
        "workload": {"trace": trace, "requests": num_requests},
        "cluster": {"replicas": 4, "scheduler": settings, "cost": COST},
        "policy": {"kind": "round-robin"},
    }
    config = parse_spec(Config, data)
    return Prepared(config, plan_replicas(config.cluster), build_workload(config.workload, 0))


def build(prepared: list[Prepared]) -> tuple[Clusters, PolicyTables]:
    clusters = Clusters(
        [one.config.cluster for one in prepared],
        [one.plans for one in prepared],
        [one.workload for one in prepared],
        [0] * len(prepared),
    )
    return clusters, PolicyTables(
        [one.config.policy for one in prepared], max(len(one.plans) for one in prepared)
    )


def time_compiled(prepared: Prepared, rounds: int = 3) -> tuple[float, Clusters]:
    seconds = []
    for _ in range(rounds):
        clusters, policies = build([prepared])
        start = time.process_time()
        run_to_end(clusters, policies)
        seconds.append(time.process_time() - start)
    return min(seconds), clusters


def time_in_python(prepared: Prepared, scheduler: str, load: str) -> tuple[float, list[float]]:
    workload = prepared.workload
    lists = [array.tolist() for array in (workload.arrived_at, workload.num_prefill_tokens)]
    start = time.process_time()
    result = simulate_in_python(
        *lists,
        workload.num_decode_tokens.tolist(),
        replicas=4,
        scheduler=scheduler,
        cost=tuple(COST[name] for name in "abcde"),
        num_blocks=NUM_BLOCKS[load],
    )
    return time.process_time() - start, result.completed_at


def thread_gain(prepared: Prepared, num_clusters: int = 8, rounds: int = 5) -> float:
    """Wall time on one thread over wall time on two, the best of several interleaved rounds each."""
    best = {1: float("inf"), 2: float("inf")}
    for _ in range(rounds):
        for num_threads in best:
            clusters, policies = build([prepared] * num_clusters)
            start = time.perf_counter()
            run_to_end(clusters, policies, num_threads)
            best[num_threads] = min(best[num_threads], time.perf_counter() - start)
    return best[1] / best[2]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=200_000, help="requests a run")
    num_requests = parser.parse_args().requests
    time_compiled(prepare("vllm", "mod", 600), rounds=1)  # compile before anything is timed

    print(f"{num_requests} requests, 4 replicas, one thread, CPU seconds of this process\n")
    print("| scheduler | trace | compiled req/s | compiled batches/s | Python req/s | ratio |")
    print("|---|---|---|---|---|---|")
    ratios = []
    for scheduler in SCHEDULERS:
        for load in NUM_BLOCKS:
            prepared = prepare(scheduler, load, num_requests)
            compiled_s, clusters = time_compiled(prepared)
            python_s, completed_at = time_in_python(prepared, scheduler, load)
            if not np.array_equal(clusters.requests[0]["completed_at"], np.array(completed_at)):
                sys.exit(f"{scheduler} {load}: the two simulators disagree")
            ratios.append(python_s / compiled_s)
            batches = int(clusters.sims[0].num_batches) / compiled_s
            print(
                f"| {scheduler} | {load} | {num_requests / compiled_s:,.0f} | {batches:,.0f} "
                f"| {num_requests / python_s:,.0f} | {ratios[-1]:.0f} |",
                flush=True,
            )
    print(f"\nlowest ratio {min(ratios):.0f}, geometric mean {np.exp(np.log(ratios).mean()):.0f}")
    print(f"a second thread: {thread_gain(prepare('vllm-v1', 'mod', 50_000)):.2f} times as fast")


if __name__ == "__main__":
    main()
