"""How many steps a second GPU job scheduling makes on one core, and how many times that of plain Python.

Through the environment that training uses, with observations, autoreset and random jobs that fit; and by
heuristics inside the compiled simulator, without observations. The plain-Python twin (reference_jobs.py) gets
actions of the same kind and must agree on the returns. All in this process, one after the other, CPU seconds.

    python benchmarks/jobs_speed.py [--steps 400000] [--envs 128]
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from reference_jobs import Job, JobsTwin

from pointsman.envs.jobs import JobsEnv, JobsSpec, make_clusters
from pointsman.jobs.clusters import JobPolicyTables
from pointsman.jobs.heuristics import HEURISTICS
from pointsman.jobs.rollout import advise, decide_all, play_all
from pointsman.jobs.workload import draw_jobs

WANTED = 200_000  # steps/s through the environment
NUM_EPISODES = 300
NUM_TWIN_EPISODES = 3


def through_environment(spec: JobsSpec, num_envs: int, num_steps: int) -> float:
    """Steps/s: `step` alone, without the choice of an action."""
    env = JobsEnv(spec, num_envs)
    rng = np.random.default_rng(0)
    mask = env.reset(0).action_mask
    spent_s, num_rounds = 0.0, -(-num_steps // num_envs)
    for _ in range(num_rounds):
        drawn = rng.random(mask.shape, np.float32) * mask
        drawn[:, 0] *= 1e-6  # nothing only where nothing fits
        actions = drawn.argmax(axis=1)
        start = time.process_time()
        env.step(actions)
        spent_s += time.process_time() - start
    return num_rounds * num_envs / spent_s


def inside_the_kernel(spec: JobsSpec, name: str) -> float:
    clusters = load(spec, NUM_EPISODES)
    rows, ends = JobPolicyTables(name, NUM_EPISODES, spec.window).rows, np.full(NUM_EPISODES, spec.max_steps)
    start = time.process_time()
    play_all(clusters.sims, rows, ends, 0, NUM_EPISODES)
    return int(clusters.sims.num_steps.sum()) / (time.process_time() - start)


def load(spec: JobsSpec, num_episodes: int) -> Any:
    clusters = make_clusters(spec, num_episodes)
    for i in range(num_episodes):
        clusters.load(i, draw_jobs(spec.workload, spec.num_gpus, i), i)
    return clusters


def by_the_twin(spec: JobsSpec, features: str) -> float:
    """Steps/s of the twin along random jobs that fit; its returns are compared with ours."""
    has_all = features == "full"
    clusters = load(spec, NUM_TWIN_EPISODES)
    policy = JobPolicyTables("random-feasible", 1, spec.window).rows
    spent_s, num_steps = 0.0, 0
    for i in range(NUM_TWIN_EPISODES):
        jobs = draw_jobs(spec.workload, spec.num_gpus, i)
        columns = (jobs.arrived_at, jobs.duration_s, jobs.gpus, jobs.priority)
        twin = JobsTwin([Job(*row) for row in zip(*(column.tolist() for column in columns), strict=True)])
        sims = clusters.sims[i : i + 1]
        total, is_over = 0.0, False
        while not is_over:
            action = np.zeros(1, np.int64)
            advise(sims, policy, action, 0, 1)
            decide_all(sims, action, False, 0, 1)
            start = time.process_time()
            outcome = twin.step(int(action[0]))
            if features != "none":
                twin.job_rows(has_all), twin.context("sorted", has_all), twin.legal()
            spent_s += time.process_time() - start
            total += outcome.reward
            num_steps += 1
            is_over = outcome.all_done or outcome.cut_off
        if abs(total - float(sims.episode_return[0])) > 1e-9:
            sys.exit(f"episode {i}: the twin earns {total}, the compiled one {sims.episode_return[0]}")
    return num_steps / spent_s


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=400_000, help="through the environment")
    parser.add_argument("--envs", type=int, default=128, help="that step together")
    arguments = parser.parse_args()
    spec = JobsSpec()
    # Compile before anything is timed.
    through_environment(spec, 2, 2)
    inside_the_kernel(spec, "fifo")
    print(f"{spec.num_gpus} GPUs, {spec.workload.num_jobs} jobs, window {spec.window}; one core, steps/s\n")
    print("| what | compiled | Python | ratio |\n|---|---:|---:|---:|")
    python = {features: by_the_twin(spec, features) for features in ("full", "original", "none")}

    def show(what: str, rate: float, twin: float) -> None:
        print(f"| {what} | {rate:,.0f} | {twin:,.0f} | {rate / twin:,.0f} |", flush=True)

    rates = {}
    for features in ("full", "original"):
        one = spec.model_copy(update={"features": features})
        rates[features] = through_environment(one, arguments.envs, arguments.steps)
        show(f"environment, {features} features", rates[features], python[features])
    for name in HEURISTICS:
        show(f"{name}, no observations", inside_the_kernel(spec, name), python["none"])
    if rates["full"] < WANTED:
        sys.exit(f"fewer than {WANTED:,} steps/s through the environment")


if __name__ == "__main__":
    main()
