"""What mattered: the first set-up, and its fixes switched on one after the other, up to today's `quick`.

The agent that this project began with (a flat network, a clipped reward made of snapshots, a state without
the request) ended no better than random. Each row below keeps everything of the row above and changes one
thing. All train on `steady-chat` with the same number of decisions; the last policy, not the best, is judged
on report seeds. A cell is the geometric mean over training seeds, and the worst of them.

    python benchmarks/ablation.py [--decisions 250000] [--seeds 5] [--parallel 2]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

Settings = dict[str, Any]

FIRST_SETUP: Settings = {
    "warm_start": None,
    "network": {"kind": "mlp", "privileged_critic": False},
    "env.objective": "mean",
    "env.shadow": {"kind": "least-outstanding"},
    "env.hold": {"allowed": False, "small_first": 0.0},
    "env.features_off": ["request", "hint", "delay", "trend", "prefix", "prefill"],
    "env.reward": {
        "terms": {"logistic_latency": 4.0, "smoothed_throughput": 1.0, "imbalance_cv": 0.2},
        "relative": False,
        "scale": "none",
        "clip": [-4.0, 4.0],
        "throughput_target_rps": 14.0,  # the agent of the notes served 1.7 times its target; so does this
    },
    "ppo.discount": {"kind": "steps", "gamma": 0.99, "lam": 0.9},
    "ppo.lead": False,
    "ppo.critic_first": 0,
    "ppo.clip_ratio": 0.15,
    "ppo.learning_rate": 0.0003,
    "ppo.reward_memory": None,
    "exploration.entropy_coef": 0.02,
    "exploration.temperature": 1.0,
    "run.average_updates": 1,
    "run.rollout_lifetimes": None,
    "run.going_back": None,
}
TANH: Settings = {"env.reward": FIRST_SETUP["env.reward"] | {"clip": None, "squash": "tanh"}}
TODAY_STEPS: Settings = {
    "ppo.clip_ratio": 0.2,
    "ppo.learning_rate": {"kind": "linear", "start": 1e-3, "end": 3e-4},
    "ppo.reward_memory": 50,
    "exploration.entropy_coef": {"kind": "linear", "start": 0.005, "end": 0.001},
    "exploration.temperature": {"kind": "linear", "start": 1.0, "end": 0.7},
    "run.average_updates": 30,
}
SHORT_CREDIT: Settings = {
    "ppo.discount": {"kind": "time", "horizon_s": 20.0, "trace_s": 1.3},
    "run.rollout_lifetimes": None,
}

# (what changes, settings), each on top of those before it; the last is `quick`.
BUILT_UP: list[tuple[str, Settings]] = [
    ("the first set-up", FIRST_SETUP),
    ("+ the state shows the request, delays and trends", {"env.features_off": ["hint"]}),
    (
        "+ reward: cost integral, not a clipped snapshot",
        {"env.reward": {"relative": False, "scale": "moment"}},
    ),
    (
        "+ reward relative to a shadow",
        {"env.reward": {"relative": True, "scale": "moment"}, "env.shadow": {"kind": "late-binding"}},
    ),
    ("+ discount by time, horizon 20 s", SHORT_CREDIT),
    (
        "+ one network for every replica",
        {"network": {"kind": "pooled", "width": 64, "privileged_critic": False}},
    ),
    ("+ a critic that sees the shadow", {"network": {"kind": "pooled", "width": 64}}),
    ("+ step sizes of today, rewards scaled, policies averaged", TODAY_STEPS),
    (
        "+ credit as long as the consequences",
        {"ppo.discount": {"kind": "lifetimes", "trace": 0.4}, "run.rollout_lifetimes": 3},
    ),
    ("+ values begin at what a plain model knows", {"ppo.lead": True}),
    ("+ hints: what heuristics would score", {"env.features_off": []}),
    ("+ holding", {"env.hold": {"small_first": 0.0}}),
    ("+ small ones of the held go first", {"env.hold": {"small_first": 0.4}}),
    (
        "+ a clone of the better of two heuristics first",
        {
            "warm_start": {
                "decisions": 100000,
                "smoothing": 0.2,
                "best_by_group": True,
                "trial_steps": 2000,
            },
            "ppo.critic_first": 4,
            "run.going_back": {},
        },
    ),
    ("+ limits on tails, at prices that training finds: `quick`", {"env.objective": "balanced"}),
]
METRICS = ("ttft_mean_s", "ttft_p99_s", "e2e_mean_s", "e2e_p99_s", "cost")
HEADERS = ("mean TTFT", "P99 TTFT", "mean e2e", "P99 e2e", "cost")
HEURISTICS = ("random", "round-robin", "least-delay", "late-binding", "gathering")


class Job(NamedTuple):
    name: str
    settings: Settings
    decisions: int
    seed: int


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--decisions", type=int, default=250_000)
    parser.add_argument("--seeds", type=int, default=5, help="training seeds")
    parser.add_argument("--parallel", type=int, default=2)
    options = parser.parse_args()

    rows: list[tuple[str, Settings]] = []
    settings: Settings = {}
    for name, changes in BUILT_UP:
        settings = settings | changes
        rows.append((name, settings))
    rows.insert(1, ("the same with tanh instead of the clip", FIRST_SETUP | TANH))
    jobs = [Job(name, its, options.decisions, seed) for name, its in rows for seed in range(options.seeds)]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.parallel) as pool:
        done = list(pool.map(lambda item: run(Path(folder) / str(item[0]), item[1]), enumerate(jobs)))

    print(f"| {' | '.join(('set-up', *HEADERS))} |\n|---|{'--:|' * len(HEADERS)}")
    for name, _ in rows:
        of_seeds = [ratios for job, ratios in zip(jobs, done, strict=True) if job.name == name]
        cells = [cell([ratios[metric] for ratios in of_seeds]) for metric in METRICS]
        print(f"| {name} | {' | '.join(cells)} |")
    for policy in HEURISTICS:
        print(f"| *{policy}* | {' | '.join(change(done[0][policy][metric]) for metric in METRICS)} |")


def cell(ratios: list[float]) -> str:
    """The geometric mean over training seeds, and the worst of them."""
    return f"{change(float(np.exp(np.mean(np.log(ratios)))))} ({change(max(ratios))})"


def change(ratio: float) -> str:
    """`−31 %`, or `× 66` of what is several times as long."""
    if ratio >= 2:
        return f"× {ratio:,.0f}" if ratio >= 10 else f"× {ratio:.1f}"
    percent = 100 * (ratio - 1)
    return f"{percent:+.{0 if abs(percent) >= 10 else 1}f} %".replace("-", "−")


def run(out: Path, job: Job) -> dict[str, Any]:
    """Train and evaluate; the ratios to least-outstanding, and those of heuristics by name."""
    settings = [
        part for key, value in job.settings.items() for part in ("--set", f"{key}={json.dumps(value)}")
    ]
    program = [sys.executable, "-m", "pointsman"]
    train = ["train", "--preset", "quick", "--workers", "1", "--steps", str(job.decisions)]
    train += ["--seed", str(job.seed), "--set", "run.headroom_steps=0", "--set", "run.keep=null"]
    call([*program, *train, "--out", str(out), *settings])
    against = ["--against", ",".join(("least-outstanding", *HEURISTICS))]
    last = str(out / "checkpoints" / "last.safetensors")
    judge = [
        "evaluate",
        last,
        "--scenario",
        "steady-chat",
        "--objective",
        "balanced",
        "--seeds",
        "8",
        "--json",
    ]
    text = call([*program, *judge, *against])
    print(f"{job.name}, seed {job.seed}: done", file=sys.stderr)
    return read(json.loads(text))


def call(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def read(result: dict[str, Any]) -> dict[str, Any]:
    ratios = result["comparisons"][0]["ratios"]
    named = {name: {metric: ratios[name][metric]["ratio"] for metric in METRICS} for name in ratios}
    return named | named[result["policy"]]


if __name__ == "__main__":
    main()
