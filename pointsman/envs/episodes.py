"""The traffic and the clusters that training sees: windows of scenarios, of files, or drawn at random.

Training draws its own seeds, disjoint from those that select and report (experiments/scenarios.py); of a
configuration file it sees the part for training (experiments/own.py). `random` is not a scenario but a
family: any model on any number of any devices, any traffic, so that a policy trained on it has seen more than
the situations it is judged by.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from pointsman.config import Config, load_config
from pointsman.errors import InputError, PointsmanWarning
from pointsman.experiments.own import refuse_trace_of_nobody, training_episode
from pointsman.experiments.scenarios import (
    LONGEST_CHAT_TOKENS,
    REPORT_SEEDS,
    SCENARIOS,
    UNSEEN,
    find_scenario,
    is_file,
)
from pointsman.experiments.simulate import Prepared, prepare
from pointsman.simulator.hardware import Deployment, kv_capacity_blocks, load_catalogue
from pointsman.spec import Spec

RANDOM = "random"
FIRST_TRAINING_SEED = REPORT_SEEDS.stop
SEED_RANGE = 1 << 40

# From short lists, because the capacity of each combination is measured once and remembered.
MEMORY_SHARES = (0.5, 0.35, 0.25, 1 / 6, 0.12)
MIXTURES = (0.2, 0.5, 0.8)
PROMPT_MEANS, OUTPUT_MEANS, LENGTH_CVS = (120, 500, 2000, 4000), (30, 150, 500), (0.5, 1.5)
LENGTHS = ("azure-conv", "azure-code", "mooncake-conv", "mixture", "lognormal")
LONGEST_MOONCAKE_TOKENS = 131_072
# How often each model is drawn, and on how many devices together; all read 32,768 tokens or more.
MODELS = (
    ("Llama-3.1-8B", 1, 0.4),
    ("Qwen2.5-7B", 1, 0.2),
    ("Qwen2.5-14B", 1, 0.1),
    ("Qwen2.5-32B", 2, 0.15),
    ("Llama-3.1-70B", 4, 0.15),
)


class Difficulty(Spec):
    """How hard the episodes are; a curriculum moves it."""

    load: float = Field(default=1.0, gt=0, description="factor on every scenario's load")
    load_jitter: float = Field(default=0.1, ge=0, lt=1, description="and a random one of ± this share")
    max_replicas: int = Field(default=8, ge=2, description="largest cluster drawn by `random`")
    hardware_mix: float = Field(default=0.5, ge=0, le=1, description="share of mixed clusters in `random`")
    strictness: float = Field(default=1.0, ge=0, description="factor on the age and SLO terms of the reward")


def draw(
    group: str,
    num_requests: int,
    difficulty: Difficulty,
    rng: np.random.Generator,
    changes: Sequence[str] = (),
) -> Prepared:
    """An episode of a scenario, or of the random family, with `num_requests` arrivals."""
    seed = FIRST_TRAINING_SEED + int(rng.integers(SEED_RANGE))
    load = difficulty.load * float(rng.uniform(1.0 - difficulty.load_jitter, 1.0 + difficulty.load_jitter))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PointsmanWarning)  # a load above capacity is meant here
        if group == RANDOM:
            return prepare(random_config(num_requests, load, difficulty, seed, rng))
        if is_file(group):
            return training_episode(Path(group), num_requests, load, seed, rng, changes)
        scenario = find_scenario(group, changes)
        overrides = [f"workload.requests={num_requests}"]
        arrivals = scenario.config(seed).workload.arrivals
        base = getattr(arrivals, "load", None)
        if base is not None:
            overrides.append(f"workload.arrivals.load={base * load}")
        return prepare(scenario.config(seed, overrides))


def check_groups(groups: Sequence[str], changes: Sequence[str] = ()) -> None:
    if not groups:
        raise InputError("env.scenarios", groups, "nothing to train on", f"known: {', '.join(SCENARIOS)}")
    for name in groups:
        if name != RANDOM:
            refuse_trace_of_nobody(find_scenario(name, changes))
        elif changes:
            problem = f"`{RANDOM}` draws its clusters and traffic by itself"
            raise InputError("env.changes", changes[0], problem, "leave it out, or train on scenarios")
        if name in UNSEEN:
            problem = "is there to see how policies generalise, not to train on"
            raise InputError("env.scenarios", name, problem, f"train on: {', '.join(SCENARIOS)}, {RANDOM}")


@cache
def _devices(model_name: str, num_devices: int, longest_tokens: int) -> tuple[tuple[str, int], ...]:
    """Devices of which so many hold the model and the longest request, with their KV memory in tokens."""
    catalogue = load_catalogue()
    model = catalogue.model(model_name)
    found = []
    for name in sorted(catalogue.devices):
        try:
            deployment = Deployment(catalogue.devices[name], model, tensor_parallel=num_devices)
            tokens = kv_capacity_blocks(deployment, block_size=1)
        except InputError:
            continue
        if tokens >= longest_tokens:
            found.append((name, tokens))
    return tuple(found)


def random_config(
    num_requests: int, load: float, difficulty: Difficulty, seed: int, rng: np.random.Generator
) -> Config:
    """Anything a user might run."""
    kind = str(rng.choice(LENGTHS, p=(0.35, 0.15, 0.1, 0.2, 0.2)))
    longest = LONGEST_MOONCAKE_TOKENS if kind == "mooncake-conv" else LONGEST_CHAT_TOKENS
    fitting = [one for one in MODELS if load_catalogue().model(one[0]).max_context_tokens >= longest]
    weights = np.array([weight for _, _, weight in fitting])
    model, num_devices, _ = fitting[int(rng.choice(len(fitting), p=weights / weights.sum()))]
    devices = _devices(model, num_devices, longest)
    num_replicas = int(rng.integers(2, difficulty.max_replicas + 1))
    is_mixed = rng.random() < difficulty.hardware_mix
    drawn = [devices[int(rng.integers(len(devices)))] for _ in range(num_replicas if is_mixed else 1)]
    smallest = min(tokens for _, tokens in drawn)
    # Memory is what runs out first on many clusters: a third of the episodes have little of it.
    shares = [share for share in MEMORY_SHARES if share * smallest > longest] or [1.0]
    share = 1.0 if rng.random() < 0.65 else float(rng.choice(shares))
    counts = num_replicas if not is_mixed else 1
    cluster: dict[str, Any] = {
        "model": model,
        "tensor_parallel": num_devices,
        "replicas": [{"device": name, "count": counts} for name, _ in drawn],
        "kv_memory_share": share,
    }
    workload = {
        "arrivals": _random_arrivals(load, rng),
        "lengths": _random_lengths(kind, rng),
        "requests": num_requests,
        "max_tokens": longest - 512,
    }
    config = load_config(None, (), {"workload": workload, "cluster": cluster, "seed": seed})
    if rng.random() < 0.25:
        config = _with_event(config, num_requests, rng)
    return config


def _random_arrivals(load: float, rng: np.random.Generator) -> dict[str, Any]:
    base = float(rng.uniform(0.45, 1.05))
    kind = str(rng.choice(("poisson", "gamma", "mmpp"), p=(0.5, 0.25, 0.25)))
    if kind == "gamma":
        return {"kind": "gamma", "load": base * load, "cv": float(rng.uniform(0.5, 3.0))}
    if kind == "mmpp":
        return {
            "kind": "mmpp",
            "load": 0.8 * base * load,
            "burst_factor": float(rng.uniform(1.5, 4.0)),
            "burst_s": float(rng.uniform(2.0, 20.0)),
            "calm_s": float(rng.uniform(10.0, 60.0)),
        }
    return {"kind": "poisson", "load": base * load}


def _random_lengths(kind: str, rng: np.random.Generator) -> Any:
    if kind == "mixture":
        weight = float(rng.choice(MIXTURES))
        return {
            "kind": "mixture",
            "parts": [
                {"weight": weight, "lengths": "azure-conv"},
                {"weight": 1.0 - weight, "lengths": "azure-code"},
            ],
        }
    if kind == "lognormal":
        return {
            "kind": "lognormal",
            "prompt_mean": int(rng.choice(PROMPT_MEANS)),
            "prompt_cv": float(rng.choice(LENGTH_CVS)),
            "output_mean": int(rng.choice(OUTPUT_MEANS)),
            "output_cv": float(rng.choice(LENGTH_CVS)),
        }
    return kind


def _with_event(config: Config, num_requests: int, rng: np.random.Generator) -> Config:
    """A replica that runs slower for a while, or dies and comes back."""
    prepared = prepare(config)
    window_s = float(prepared.workload.arrived_at[-1])
    start = float(rng.uniform(0.05, 0.6))
    end = start + float(rng.uniform(0.1, 0.35))
    replica = int(rng.integers(config.cluster.num_replicas))
    if rng.random() < 0.7:
        kinds = (("slow", float(rng.uniform(1.5, 5.0))), ("slow", 1.0))
    else:
        kinds = (("fail", 1.0), ("recover", 1.0))
    events = [
        {"at_s": share * window_s, "kind": kind, "replica": replica, "factor": factor}
        for share, (kind, factor) in zip((start, end), kinds, strict=True)
    ]
    data = config.model_dump(mode="json", exclude_unset=True)
    data["cluster"]["events"] = events
    return load_config(None, (), data)
