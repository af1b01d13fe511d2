"""What prefix caching costs the simulator: CPU time with it and without, and requests a second with much
cached.

1. Nothing shared: the same run with caching off and on, alternately, on the kernel's own CPU clock. The
results are
   equal to the last bit where nobody is preempted; where somebody is, caching lets him find his own blocks
   again.
2. Mooncake's conversation trace, repeated, on one replica whose cache holds a million blocks.

    python benchmarks/simulator_prefixes.py [--requests 100000] [--rounds 5]
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from pointsman.config import Config
from pointsman.experiments.running import load_simulator, run_to_end
from pointsman.routing.policy import PolicyTables
from pointsman.simulator.cluster import Clusters
from pointsman.simulator.plan import plan_replicas
from pointsman.spec import parse_spec
from pointsman.workload import build_workload

COST = {"kind": "linear", "a": 0.0085, "b": 8.0e-5, "c": 3.0e-5, "d": 8.0e-8, "e": 3.4e-9}


def make_config(workload: dict, replicas: int, **scheduler: object) -> Config:
    return parse_spec(
        Config,
        {
            "workload": workload,
            "cluster": {"replicas": replicas, "scheduler": {"kind": "vllm-v1", **scheduler}, "cost": COST},
            "policy": {"kind": "round-robin"},
        },
    )


def run_once(config: Config, workload: object) -> tuple[float, Clusters]:
    """CPU seconds of the run alone."""
    plans = plan_replicas(config.cluster)
    clusters = Clusters([config.cluster], [plans], [workload], [0])
    policies = PolicyTables([config.policy], len(plans))
    start = time.process_time()
    run_to_end(clusters, policies)
    return time.process_time() - start, clusters


def compare_off_and_on(num_requests: int, rounds: int) -> None:
    print("| nothing shared | off, CPU s | on, CPU s | more |\n|---|--:|--:|--:|")
    for name, lengths, rate, num_blocks in (
        ("azure-conv, roomy", "azure-conv", 12.0, 30_000),
        ("azure-conv, tight memory", "azure-conv", 12.0, 2_600),
        ("short answers", {"kind": "lognormal", "prompt_mean": 500, "output_mean": 20}, 60.0, 30_000),
    ):
        workload_spec = {
            "arrivals": {"kind": "poisson", "rate": rate},
            "lengths": lengths,
            "requests": num_requests,
        }
        configs = [
            make_config(workload_spec, 4, num_blocks=num_blocks, prefix_caching=is_on)
            for is_on in (False, True)
        ]
        workload = build_workload(configs[0].workload, 0)
        times = np.array([[run_once(config, workload)[0] for config in configs] for _ in range(rounds)])
        off, on = times.min(axis=0)
        print(f"| {name} | {off:.3f} | {on:.3f} | {on / off - 1:+.1%} |", flush=True)


def time_mooncake(num_requests: int, rounds: int) -> None:
    trace = {"path": "mooncake-conversation", "repeat": 0, "rate": 0.5}
    config = make_config(
        {"trace": trace, "requests": num_requests}, 1, num_blocks=1_000_000, max_num_batched_tokens=8192
    )
    workload = build_workload(config.workload, 0)
    runs = [run_once(config, workload) for _ in range(rounds)]
    seconds = min(run[0] for run in runs)
    clusters = runs[-1][1]
    replica = clusters.replicas[0][0]
    cached = sum(int(stretch["stop"] - stretch["start"]) for stretch in free_stretches(clusters))
    hit_share = replica.hit_tokens / replica.prompt_tokens
    print(f"\nMooncake's conversation trace, {num_requests:,} requests on one replica:")
    print(f"{num_requests / seconds:,.0f} requests a CPU second, {hit_share:.1%} of the prompt tokens hit")
    print(f"at the end {cached:,} of {replica.num_blocks:,} blocks are cached and free")


def free_stretches(clusters: Clusters) -> list[np.ndarray]:
    """Those with a key, which somebody may hit."""
    cache = next(
        array for array in clusters.sims._held if array.dtype.names and "oldest" in array.dtype.names
    )
    stretches = next(
        array for array in clusters.sims._held if array.dtype.names and "older" in array.dtype.names
    )
    found = []
    number = int(cache["oldest"][0])
    while number:
        if stretches[number]["key"] != 0:
            found.append(stretches[number])
        number = int(stretches[number]["newer"])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=100_000, help="requests a run")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each, the fastest counts")
    arguments = parser.parse_args()
    load_simulator()
    compare_off_and_on(arguments.requests, arguments.rounds)
    time_mooncake(arguments.requests, arguments.rounds)


if __name__ == "__main__":
    main()
