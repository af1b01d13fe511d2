"""Named situations to judge a policy by: a cluster, its traffic, and what happens to it.

Seeds come in two blocks that never mix. Whatever is tuned, trained or selected may look at `SELECTION_SEEDS`
only; what is reported (`pointsman compare`, `evaluate`) comes from `REPORT_SEEDS`. In the same spirit,
nothing is ever tuned or trained on the scenarios in `UNSEEN`: they show how far a policy generalises.

A scenario is small enough for seconds (8,000 requests, about five simulated minutes of four replicas) and
long enough for a P99; wide clusters and uneven traffic get more requests, so that the time they cover stays
the same or holds several bursts.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pointsman.config import Config, load_config
from pointsman.errors import InputError
from pointsman.experiments.capacity import capacity_rps
from pointsman.routing.sources import anchored_policy
from pointsman.simulator.hardware import Deployment, kv_capacity_blocks, load_catalogue
from pointsman.simulator.plan import plan_replicas
from pointsman.spec import read_yaml
from pointsman.workload.spec import Rated

SELECTION_SEEDS = range(1000)
REPORT_SEEDS = range(1000, 2000)

DEFAULT = "steady-chat"
NUM_REQUESTS = 8_000

# Longest request of azure-conv: 14,050 prompt tokens and 1,000 of output. A device must hold it.
LONGEST_CHAT_TOKENS = 16_384

Data = dict[str, Any]


@dataclass(frozen=True)
class Scenario:
    """`data` gives the configuration for a seed; its event times are shares of the run's expected length."""

    name: str
    what: str
    data: Callable[[int], Data]
    path: Path | None = None  # of a configuration file; its event times are in seconds
    changes: tuple[str, ...] = ()  # `key=value`, which belong to it wherever it is used

    @property
    def folder(self) -> Path | None:
        """Where relative paths of the configuration start; None = here."""
        return self.path.parent if self.path is not None else None

    def config(self, seed: int = 0, overrides: Sequence[str] = ()) -> Config:
        """The configuration with `key=value` overrides applied, event times in seconds."""
        overrides = (*self.changes, *overrides)
        if self.path is not None:
            return load_config(None, overrides, self.data(seed) | {"seed": seed})
        plain = load_config(None, (), self.data(seed) | {"seed": seed})
        if not overrides and not plain.cluster.events:
            return plain
        config = load_config(None, overrides, _without_traffic(self.data(seed), overrides) | {"seed": seed})
        if not plain.cluster.events or config.cluster.events != plain.cluster.events:
            return config  # none, or given by the user, in seconds
        window_s = expected_window_s(config)
        events = tuple(
            event.model_copy(update={"at_s": event.at_s * window_s}) for event in config.cluster.events
        )
        cluster = config.cluster.model_copy(update={"events": events})
        return config.model_copy(update={"cluster": cluster})


def _without_traffic(data: Data, overrides: Sequence[str]) -> Data:
    """A trace that a user sets takes the place of a scenario's own traffic; the cluster stays."""
    keys = [override.partition("=")[0] for override in overrides]
    if not any(key == "workload.trace" or key.startswith("workload.trace.") for key in keys):
        return data
    own = ("arrivals", "lengths", "prefixes", "requests")
    workload = {key: value for key, value in data["workload"].items() if key not in own}
    return data | {"workload": workload}


def expected_window_s(config: Config, base_dir: Path | None = None) -> float:
    """Time from the first to the last arrival, on average."""
    workload = config.workload
    if workload.duration_s is not None:
        return workload.duration_s
    arrivals = workload.arrivals
    if not isinstance(arrivals, Rated) or workload.requests is None:
        kind = arrivals.kind if arrivals is not None else "trace"
        problem = "the events of this scenario are placed by the rate of arrivals"
        raise InputError("workload.arrivals.kind", kind, problem, "set cluster.events, times in seconds")
    rate_rps = arrivals.rate
    if rate_rps is None:
        assert arrivals.load is not None
        rate_rps = arrivals.load * capacity_rps(workload, plan_replicas(config.cluster, base_dir), base_dir)
    return workload.requests / rate_rps


def is_file(name: str) -> bool:
    """Whether this names a configuration file, not one of ours."""
    return name.endswith((".yaml", ".yml", ".json")) or os.sep in name


def short_names(names: Sequence[str]) -> tuple[str, ...]:
    """What tables call them: files by their stems, told apart by a number where those are the same."""
    known: dict[str, str] = {}  # by what it is called
    for name in names:
        short = Path(name).stem if is_file(name) else name
        number = 2
        while known.get(short, name) != name:
            short, number = f"{Path(name).stem}-{number}", number + 1
        known[short] = name
    called = {name: short for short, name in known.items()}
    return tuple(called[name] for name in names)


def scenario_of_file(path: Path) -> Scenario:
    """What a configuration file describes, as `compare` reads it."""
    data = read_yaml(path, "workload")
    if "policy" in data:
        data["policy"] = anchored_policy(data["policy"], path.parent)
    return Scenario(path.stem, str(path), lambda seed: _copied(data), path)


def find_scenario(name: str, changes: Sequence[str] = ()) -> Scenario:
    """One of ours by its name, or a configuration file by its path."""
    if is_file(name):
        return replace(scenario_of_file(Path(name).expanduser()), changes=tuple(changes))
    known = {**SCENARIOS, **SATURATED, **UNSEEN}
    if name in known:
        return replace(known[name], changes=tuple(changes))
    near = difflib.get_close_matches(name, known, n=1)
    remedy = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(SCENARIOS)}; or name a .yaml file"
    raise InputError("--scenario", name, "unknown scenario", remedy)


def _traffic(load: float, lengths: Any = "azure-conv", requests: int = NUM_REQUESTS, **arrivals: Any) -> Data:
    return {
        "arrivals": {"kind": "poisson", "load": load, **arrivals},
        "lengths": lengths,
        "requests": requests,
    }


def _fixed(workload: Data, **cluster: Any) -> Callable[[int], Data]:
    """The same for every seed. Copies, because overrides write into what they get."""

    def data(seed: int) -> Data:
        base = {
            "replicas": 4,
            "device": "A100-80",
            "model": "Llama-3-8B",
            "scheduler": {"kind": "vllm-v1"},  # the defaults, spelt out so that overrides can reach inside
            "cost": {"kind": "roofline"},
        }
        return {"workload": _copied(workload), "cluster": base | _copied(cluster)}

    return data


def _copied(data: Any) -> Any:
    if isinstance(data, Mapping):
        return {key: _copied(value) for key, value in data.items()}
    return [_copied(value) for value in data] if isinstance(data, list) else data


def find_suite(name: str) -> list[Scenario]:
    if name not in SUITES:
        raise InputError("--suite", name, "unknown suite", f"known: {', '.join(SUITES)}")
    return [find_scenario(one) for one in SUITES[name]]


def _random_hardware(seed: int, fewest: int = 4, most: int = 8, requests: int = 2 * NUM_REQUESTS) -> Data:
    """Replicas, each on any device of the catalogue that holds the model and the longest request."""
    catalogue = load_catalogue()
    model = catalogue.model("Llama-3-8B")

    def holds(name: str) -> bool:
        try:
            deployment = Deployment(catalogue.devices[name], model)
            return kv_capacity_blocks(deployment, block_size=1) >= LONGEST_CHAT_TOKENS
        except InputError:
            return False

    devices = [name for name in sorted(catalogue.devices) if holds(name)]
    rng = np.random.default_rng([seed, 0xD1CE])  # not the stream that arrivals and lengths come from
    drawn = rng.choice(devices, size=int(rng.integers(fewest, most + 1)))
    names, counts = np.unique(drawn, return_counts=True)
    groups = [{"device": str(name), "count": int(count)} for name, count in zip(names, counts, strict=True)]
    return _fixed(_traffic(0.85, requests=requests), replicas=groups)(seed)


def _shared(load: float, prefixes: Data, lengths: Any, requests: int = NUM_REQUESTS, **cluster: Any) -> Any:
    """Load 1 is what the replicas could sustain if nothing were cached."""
    return _fixed(_traffic(load, lengths, requests) | {"prefixes": prefixes}, **cluster)


def _mooncake(seed: int) -> Data:
    """A sixth of the trace: from the last 40 % of it for report seeds, from before that for all others."""
    rng = np.random.default_rng([seed, 0x300C])
    begin = rng.uniform(0.6, 0.83) if seed in REPORT_SEEDS else rng.uniform(0.0, 0.43)
    trace = {"path": "mooncake-conversation", "begin": round(begin, 4), "load": 1.1}
    return _fixed({"trace": trace, "requests": 2000}, model="Llama-3.1-8B", replicas=8)(seed)


def _lognormal(prompt: float, output: float, cv: float = 1.0) -> Data:
    lengths = {"prompt_mean": prompt, "prompt_cv": cv, "output_mean": output, "output_cv": cv}
    return {"kind": "lognormal"} | lengths


def _events(*events: tuple[float, str, float]) -> list[Data]:
    """(share of the run, kind, factor). Replica 1: ties to the lowest id would single out replica 0."""
    return [{"at_s": share, "kind": kind, "replica": 1, "factor": factor} for share, kind, factor in events]


_MIXTURE = {
    "kind": "mixture",  # in the proportion of the two Azure traces, which are of the same hour
    "parts": [{"weight": 0.7, "lengths": "azure-conv"}, {"weight": 0.3, "lengths": "azure-code"}],
}
_TIGHT = {"kv_memory_share": 1 / 6}
_UNEVEN = [{"device": "A100-80", "count": 2}, {"device": "A40", "count": 2}]
_STRAGGLER = _events((1 / 3, "slow", 3.0), (2 / 3, "slow", 1.0))
_FAILURE = _events((1 / 3, "fail", 1.0), (2 / 3, "recover", 1.0))
# Bursts at 1.4 times the capacity, calms at 0.47 of it.
_BURSTS = {"kind": "mmpp", "burst_factor": 3.0, "burst_s": 10.0, "calm_s": 30.0}
# Two days of ten minutes, from a third of the capacity to nearly all of it.
_DAYS = {"kind": "diurnal", "period_s": 600.0, "amplitude": 0.5}

# Where the figures are from: docs/prefix-caching.md.
_CHAT = {"systems": {"count": 20, "tokens": 400, "cv": 0.5}, "turns": 4.6, "think_s": 5.0}
_ONE_PROMPT = {"systems": {"count": 1, "tokens": 2548}}
_AGENTS = {
    "systems": {"count": 8, "tokens": 3000, "cv": 0.2},
    "turns": 8.0,
    "think_s": 3.0,
    "context_tokens": 32_768,
}
_RAG = {
    "systems": {"count": 4, "tokens": 500},
    "documents": {"count": 1000, "tokens": 1000, "cv": 0.5, "zipf": 1.07, "per_request": 3},
}

SCENARIOS: Mapping[str, Scenario] = {
    name: Scenario(name, what, data)
    for name, what, data in (
        (
            "steady-chat",
            "4 × A100-80, Llama-3-8B, Azure conversation lengths, Poisson at 0.85 of capacity",
            _fixed(_traffic(0.85)),
        ),
        ("light-chat", "steady-chat at half the capacity", _fixed(_traffic(0.5))),
        ("heavy-chat", "steady-chat at 0.97 of capacity", _fixed(_traffic(0.97))),
        (
            "steady-code",
            "Azure code completion: long prompts, short outputs, load 0.85",
            _fixed(_traffic(0.85, "azure-code")),
        ),
        ("mixed", "conversation and code completion 7 : 3, load 0.85", _fixed(_traffic(0.85, _MIXTURE))),
        (
            "long-context",
            "Llama-3.1-8B, Mooncake conversation: 13,000 tokens, up to 126,000, load 0.85",
            _fixed(_traffic(0.85, "mooncake-conv"), model="Llama-3.1-8B"),
        ),
        (
            "bursty-chat",
            "bursts of about 10 s at twice the mean rate, load 0.7, Markov-modulated",
            _fixed(_traffic(0.7, requests=2 * NUM_REQUESTS, **_BURSTS)),
        ),
        (
            "diurnal",
            "rate that swings between 0.33 and 0.98 of capacity with a period of 10 minutes",
            _fixed(_traffic(0.65, requests=3 * NUM_REQUESTS, **_DAYS)),
        ),
        (
            "tight-memory",
            "a sixth of the KV memory, 0.9 of what is then the capacity",
            _fixed(_traffic(0.9), **_TIGHT),
        ),
        (
            "overload",
            "tight-memory at 1.05 of capacity for 8,000 requests, then drained",
            _fixed(_traffic(1.05), **_TIGHT),
        ),
        (
            "mixed-hardware",
            "2 × A100-80 and 2 × A40, which are two to three times slower, load 0.85",
            _fixed(_traffic(0.85), replicas=_UNEVEN),
        ),
        (
            "random-hardware",
            "4 to 8 replicas on devices drawn from the catalogue for each seed, load 0.85",
            _random_hardware,
        ),
        (
            "wide-16",
            "steady-chat on 16 replicas",
            _fixed(_traffic(0.85, requests=2 * NUM_REQUESTS), replicas=16),
        ),
        (
            "wide-64",
            "steady-chat on 64 replicas",
            _fixed(_traffic(0.85, requests=8 * NUM_REQUESTS), replicas=64),
        ),
        (
            "straggler",
            "one of 4 replicas runs 3 times slower in the middle third, load 0.7",
            _fixed(_traffic(0.7), events=_STRAGGLER),
        ),
        (
            "failure",
            "one of 4 replicas dies at a third of the run, is back at two thirds, load 0.7",
            _fixed(_traffic(0.7), events=_FAILURE),
        ),
        (
            "multi-turn",
            "chats of 4.6 turns on 8 replicas, each with all said before, load 1.8",
            _shared(1.8, _CHAT, _lognormal(150, 350), 2 * NUM_REQUESTS, replicas=8),
        ),
        (
            "shared-system-prompt",
            "one system prompt of 2,548 tokens, questions of 7,252, output 430, load 0.9",
            _shared(0.9, _ONE_PROMPT, _lognormal(7252, 430, 0.3)),
        ),
        (
            "agents",
            "tool loops of 8 steps, 3 s apart, 8 kinds of agents on 16 replicas, load 2.0",
            _shared(2.0, _AGENTS, _lognormal(600, 180), 3 * NUM_REQUESTS, replicas=16),
        ),
        (
            "rag",
            "questions about 3 of 1,000 documents, 3 % of which make up 60 %, load 1.0",
            _shared(1.0, _RAG, _lognormal(100, 200), replicas=4),
        ),
        (
            "mooncake",
            "a sixth of Mooncake's conversations, Llama-3.1-8B on 8 replicas, load 1.1",
            _mooncake,
        ),
    )
}

# More than the cluster can serve, however it is routed; beside the others, whose means they would dominate.
SATURATED: Mapping[str, Scenario] = {
    name: Scenario(name, what, data)
    for name, what, data in (
        (
            "saturated-chat",
            "steady-chat at 1.1 of capacity for 8,000 requests, then drained",
            _fixed(_traffic(1.1)),
        ),
        (
            "saturated-memory",
            "tight-memory at 1.15 of capacity for 8,000 requests, then drained",
            _fixed(_traffic(1.15), **_TIGHT),
        ),
    )
}

UNSEEN: Mapping[str, Scenario] = {
    name: Scenario(name, what, data)
    for name, what, data in (
        (
            "summarization",
            "long documents, summaries of a few hundred tokens, load 0.85",
            _fixed(_traffic(0.85, "long-summarization")),
        ),
        (
            "large-model",
            "Llama-3-70B on 6 replicas of 4 × H100, arrivals with a CV of 2, load 0.8",
            _fixed(
                _traffic(0.8, kind="gamma", cv=2.0),
                model="Llama-3-70B",
                device="H100",
                tensor_parallel=4,
                replicas=6,
            ),
        ),
        (
            "wide-hardware",
            "16 replicas on devices drawn from the catalogue for each seed, load 0.85",
            partial(_random_hardware, fewest=16, most=16, requests=4 * NUM_REQUESTS),
        ),
        (
            "wide-failure",
            "one of 16 replicas is dead in the middle third of the run, load 0.85",
            _fixed(_traffic(0.85, requests=2 * NUM_REQUESTS), replicas=16, events=_FAILURE),
        ),
    )
}

PREFIXES = ("multi-turn", "shared-system-prompt", "agents", "rag", "mooncake")

SUITES: Mapping[str, tuple[str, ...]] = {
    "all": tuple(name for name in SCENARIOS if name not in PREFIXES),
    "prefixes": PREFIXES,
    "saturated": ("overload", *SATURATED),
    "generalisation": ("wide-16", "wide-64", "straggler", "failure", *UNSEEN),
}
