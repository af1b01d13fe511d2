"""Runs of Vidur from Python: a table of requests in, their times out.

Vidur counts its entities in class attributes, and a global scheduler finds replicas by those numbers: they
start anew with every run. One run at a time, therefore, in a process.
"""

from __future__ import annotations

import atexit
import csv
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vidur import config as vidur_config
from vidur.config.config import (
    BaseGlobalSchedulerConfig,
    BaseReplicaSchedulerConfig,
    ClusterConfig,
    MetricsConfig,
    ReplicaConfig,
    SimulationConfig,
    TraceRequestGeneratorConfig,
)
from vidur.entities.base_entity import BaseEntity
from vidur.events.base_event import BaseEvent
from vidur.simulator import Simulator
from vidur.utils.random import set_seeds

from pointsman.integrations.vidur import costs, scheduler

DATE = "2026-01-01"  # PyPI's Vidur replays one day of a trace
PYPI_COLUMNS = ("Date", "Time", "PromptTokenCount", "CompletionTokenCount")
REPOSITORY_COLUMNS = ("arrived_at", "num_prefill_tokens", "num_decode_tokens")


@dataclass(frozen=True)
class Arrival:
    arrived_at: float  # seconds
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Lifetime:
    """What became of an arrival. Times in seconds of the simulation."""

    arrived_at: float
    first_token_at: float
    completed_at: float
    num_restarts: int

    @property
    def ttft_s(self) -> float:
        return self.first_token_at - self.arrived_at

    @property
    def e2e_s(self) -> float:
        return self.completed_at - self.arrived_at


def simulator(
    arrivals: Sequence[Arrival],
    global_scheduler: BaseGlobalSchedulerConfig,
    replica_scheduler: BaseReplicaSchedulerConfig,
    *,
    num_replicas: int = 4,
    num_blocks: int | None = None,
    seed: int = 42,
) -> Simulator:
    """A simulation of Llama-3-8B on A100s, each step as long as costs.py says, ready to run.

    `num_blocks`: KV blocks of a replica; None: what Vidur's memory planner finds.
    """
    scheduler.register()
    costs.register()
    for entity in (BaseEvent, *BaseEntity.__subclasses__()):
        entity._id = 0 if entity is BaseEvent else -1
    set_seeds(seed)
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.csv"
        _write(arrivals, trace)
        config = SimulationConfig(
            seed=seed,
            cluster_config=_cluster(num_replicas, num_blocks, global_scheduler, replica_scheduler),
            request_generator_config=TraceRequestGeneratorConfig(
                trace_file=str(trace),
                prefill_scale_factor=1.0,
                time_scale_factor=1.0,
                **({"date": DATE} if is_of_pypi() else {}),
            ),
            execution_time_predictor_config=costs.ClosedFormExecutionTimePredictorConfig(),
            metrics_config=MetricsConfig(
                write_metrics=False, store_plots=False, enable_chrome_trace=False, output_dir=folder
            ),
        )
        return Simulator(config)


def run(simulation: Simulator) -> list[Lifetime]:
    """Play it to its end. -> in the order of arrival"""
    requests = [event._request for _, event in sorted(simulation._event_queue)]
    simulation.run()
    # The repository's Vidur would write its output once more when Python exits.
    atexit.unregister(simulation._write_output)
    return [Lifetime(r.arrived_at, r.prefill_completed_at, r.completed_at, r.num_restarts) for r in requests]


def _cluster(
    num_replicas: int,
    num_blocks: int | None,
    global_scheduler: BaseGlobalSchedulerConfig,
    replica_scheduler: BaseReplicaSchedulerConfig,
) -> ClusterConfig:
    cache: dict[str, Any] = {}
    if is_of_pypi():
        cache["cache_config"] = vidur_config.CacheConfig(num_blocks=num_blocks)
    else:
        replica_scheduler.num_blocks = num_blocks
    return ClusterConfig(
        num_replicas=num_replicas,
        replica_config=ReplicaConfig(
            model_name="meta-llama/Llama-3-8B" if is_of_pypi() else "meta-llama/Meta-Llama-3-8B",
            device="a100",
            network_device="a100_pairwise_nvlink",
            num_pipeline_stages=1,
            tensor_parallel_size=1,
        ),
        global_scheduler_config=global_scheduler,
        replica_scheduler_config=replica_scheduler,
        **cache,
    )


def is_of_pypi() -> bool:
    """Else of the repository, which has no configuration of the cache."""
    return hasattr(vidur_config, "CacheConfig")


def _write(arrivals: Sequence[Arrival], path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow((*PYPI_COLUMNS, *REPOSITORY_COLUMNS))
        for arrival in arrivals:
            facts = (arrival.arrived_at, arrival.prompt_tokens, arrival.output_tokens)
            rows.writerow((DATE, *facts, *facts))
