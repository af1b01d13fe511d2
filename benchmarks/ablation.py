"""What mattered: the set-up of the notes this project started from, and its fixes, one after the other.

The notes' agent (a flat network, a clipped reward made of snapshots, a state without the request) ended no
better than random. Each row below keeps everything of the row above and changes one thing. All train on
`steady-chat` with the same number of decisions and are evaluated on report seeds.

    .venv/bin/python benchmarks/ablation.py            # about 15 minutes on two cores; prints the table
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

NOTES_SETUP = {
    "network": {"kind": "mlp", "privileged_critic": False},
    "env.hold.allowed": False,
    "env.features_off": ["request", "hint", "delay", "trend"],
    "env.reward": {
        "terms": {"logistic_latency": 4.0, "smoothed_throughput": 1.0, "imbalance_cv": 0.2},
        "relative": False,
        "scale": "none",
        "clip": [-4.0, 4.0],
        "throughput_target_rps": 14.0,  # the notes' agent served 1.7 times its target; so does this
    },
    "ppo.discount": {"kind": "steps", "gamma": 0.99, "lam": 0.9},
    "ppo.clip_ratio": 0.15,
    "ppo.learning_rate": 0.0003,
    "ppo.reward_memory": None,
    "exploration.entropy_coef": 0.02,
    "run.average_updates": 1,
    "run.rollout_lifetimes": None,
    "run.going_back": None,
}
TANH = {"env.reward": NOTES_SETUP["env.reward"] | {"clip": None, "squash": "tanh"}}

# (what changes, overrides), each on top of those before it.
STEPS: list[tuple[str, dict[str, Any]]] = [
    ("the notes' set-up", NOTES_SETUP),
    ("+ the state shows the request, delays and trends", {"env.features_off": ["hint"]}),
    (
        "+ reward: cost integral, not a clipped snapshot",
        {"env.reward": {"relative": False, "scale": "moment"}},
    ),
    ("+ reward relative to a shadow", {"env.reward": {"relative": True, "scale": "moment"}}),
    (
        "+ discount by time, horizon 20 s",
        {"ppo.discount": {"kind": "time", "horizon_s": 20.0, "trace_s": 1.3}},
    ),
    ("+ one network for every replica", {"network": {"kind": "pooled", "privileged_critic": False}}),
    ("+ a critic that sees the shadow", {"network": {"kind": "pooled"}}),
    (
        "+ step sizes of today, rewards scaled, policies averaged",
        {
            "ppo.clip_ratio": 0.2,
            "ppo.learning_rate": {"kind": "linear", "start": 1e-3, "end": 1e-4},
            "ppo.reward_memory": 50,
            "exploration.entropy_coef": {"kind": "linear", "start": 0.01, "end": 0.001},
            "run.average_updates": 30,
        },
    ),
    ("+ hint: what least-delay would score", {"env.features_off": []}),
    ("+ holding", {"env.hold.allowed": True}),
]
METRICS = ("ttft_mean_s", "ttft_p99_s", "e2e_mean_s", "e2e_p99_s")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--decisions", type=int, default=600_000)
    parser.add_argument("--seeds", type=int, default=2, help="training seeds")
    parser.add_argument("--parallel", type=int, default=2)
    options = parser.parse_args()

    rows: list[tuple[str, dict[str, Any]]] = []
    overrides: dict[str, Any] = {}
    for name, change in STEPS:
        overrides = overrides | change
        rows.append((name, overrides))
    rows.insert(1, ("the same with tanh instead of the clip", NOTES_SETUP | TANH))
    jobs = [(name, settings, seed) for name, settings in rows for seed in range(options.seeds)]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.parallel) as pool:
        done = list(pool.map(lambda job: run(Path(folder), options.decisions, *job), jobs))

    print("| set-up | mean TTFT | P99 TTFT | mean e2e | P99 e2e |\n|---|--:|--:|--:|--:|")
    for name, _ in rows:
        of_seeds = [ratios for job, ratios in zip(jobs, done, strict=True) if job[0] == name]
        cells = [" / ".join(change(one[metric]) for one in of_seeds) for metric in METRICS]
        print(f"| {name} | {' | '.join(cells)} |")
    for policy in ("random", "round-robin", "least-delay"):
        print(f"| *{policy}* | {' | '.join(change(done[0][policy][metric]) for metric in METRICS)} |")


def change(ratio: float) -> str:
    """`−31 %`, or `× 66` of what is several times as long."""
    if ratio >= 2:
        return f"× {ratio:,.0f}" if ratio >= 10 else f"× {ratio:.1f}"
    percent = 100 * (ratio - 1)
    return f"{percent:+.{0 if abs(percent) >= 10 else 1}f} %".replace("-", "−")


def run(folder: Path, decisions: int, name: str, overrides: dict[str, Any], seed: int) -> dict[str, Any]:
    """Train and evaluate; the ratios to least-outstanding, and those of heuristics by name."""
    out = folder / f"{abs(hash(name))}-{seed}"
    settings = [part for key, value in overrides.items() for part in ("--set", f"{key}={json.dumps(value)}")]
    program = [sys.executable, "-m", "pointsman"]
    train = ["train", "--preset", "quick", "--workers", "1", "--steps", str(decisions), "--seed", str(seed)]
    call([*program, *train, "--out", str(out), *settings])
    against = ["--against", "least-outstanding,random,round-robin,least-delay"]
    last = str(out / "checkpoints" / "last.safetensors")
    text = call([*program, "evaluate", last, "--scenario", "steady-chat", "--seeds", "8", *against, "--json"])
    print(f"{name}, seed {seed}: done", file=sys.stderr)
    return read(json.loads(text))


def call(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def read(result: dict[str, Any]) -> dict[str, Any]:
    ratios = result["comparisons"][0]["ratios"]
    named = {name: {metric: ratios[name][metric]["ratio"] for metric in METRICS} for name in ratios}
    return named | named[result["policy"]]


if __name__ == "__main__":
    main()
