"""Cost per request from 4 to 1,024 replicas at equal load per replica, and memory for ten million requests.

python benchmarks/simulator_scale.py [--requests 10000000]
"""

from __future__ import annotations

import argparse
import resource
import time

from pointsman.config import Config
from pointsman.experiments.running import run_to_end
from pointsman.experiments.simulate import prepare, simulate
from pointsman.routing.policy import PolicyTables
from pointsman.simulator.cluster import Clusters
from pointsman.spec import parse_spec

REPLICAS = (4, 64, 1024)
POLICIES = ("round-robin", "least-outstanding", "least-work")


def config(num_replicas: int, num_requests: int, policy: str) -> Config:
    return parse_spec(
        Config,
        {
            "workload": {
                "arrivals": {"kind": "poisson", "load": 0.8},
                "lengths": "azure-conv",
                "requests": num_requests,
            },
            "cluster": {"replicas": num_replicas},
            "policy": {"kind": policy},
        },
    )


def microseconds_per_request(num_replicas: int, policy: str, rounds: int = 3) -> float:
    num_requests = max(100_000, 500 * num_replicas)
    prepared = prepare(config(num_replicas, num_requests, policy))
    seconds = []
    for _ in range(rounds):
        clusters = Clusters([prepared.config.cluster], [prepared.plans], [prepared.workload], [0])
        start = time.process_time()
        run_to_end(clusters, PolicyTables([prepared.config.policy], len(prepared.plans)))
        seconds.append(time.process_time() - start)
    return min(seconds) / num_requests * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=10_000_000, help="requests of the memory test")
    num_requests = parser.parse_args().requests
    simulate([prepare(config(4, 100, "round-robin"))])  # compile before anything is timed

    print("µs of CPU per request (and relative to 4 replicas), load 0.8, azure-conv, one thread\n")
    print("| policy | " + " | ".join(f"{count:,} replicas" for count in REPLICAS) + " |")
    print("|---" * (len(REPLICAS) + 1) + "|")
    for policy in POLICIES:
        costs = [microseconds_per_request(count, policy) for count in REPLICAS]
        cells = [f"{cost:.2f} ({cost / costs[0]:.2f}×)" for cost in costs]
        print(f"| {policy} | " + " | ".join(cells) + " |", flush=True)

    start = time.perf_counter()
    outcome = simulate([prepare(config(4, num_requests, "least-outstanding"))])[0]
    peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    print(
        f"\n{num_requests:,} requests on 4 replicas: {time.perf_counter() - start:.0f} s in all, "
        f"peak memory {peak_gb:.2f} GB, P99 TTFT {outcome.metrics['ttft_p99_s']:.3f} s"
    )


if __name__ == "__main__":
    main()
