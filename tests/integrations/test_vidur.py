"""Our policies inside Vidur itself, of PyPI or of its repository, whichever is installed."""

from __future__ import annotations

import csv
import gzip
import logging
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from simulator.factories import ROOT, load_benchmark

pytest.importorskip("vidur")
pytestmark = pytest.mark.filterwarnings("default")  # of Vidur's own imports

from vidur.config.config import (  # noqa: E402
    LORGlobalSchedulerConfig,
    RoundRobinGlobalSchedulerConfig,
    VllmSchedulerConfig,
)

from pointsman.integrations.vidur.running import Arrival, Lifetime, is_of_pypi, run, simulator  # noqa: E402
from pointsman.integrations.vidur.scheduler import PointsmanGlobalSchedulerConfig  # noqa: E402

NAME = "vllm_lor_4r_burst"  # a reference run that stands in tests/data/golden


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def reference(name: str) -> list[dict[str, str]]:
    text = gzip.decompress((ROOT / "tests" / "data" / "golden" / f"{name}.csv.gz").read_bytes()).decode()
    return list(csv.DictReader(text.splitlines()))


def arrivals(name: str) -> list[Arrival]:
    return load_benchmark("vidur_policies").reference(name)


def play(policy: Any, trace: list[Arrival], num_blocks: int | None = None) -> list[Lifetime]:
    chosen = PointsmanGlobalSchedulerConfig(policy=policy) if isinstance(policy, str) else policy
    return run(simulator(trace, chosen, VllmSchedulerConfig(), num_blocks=num_blocks))


@pytest.mark.skipif(is_of_pypi(), reason="PyPI's fills batches by another rule")
def test_closed_form_is_that_of_the_reference_runs() -> None:
    served = play(LORGlobalSchedulerConfig(), arrivals("trace_burst"), num_blocks=2048)
    wanted = reference(NAME)
    assert [repr(float(s.completed_at)) for s in served] == [row["completed_at"] for row in wanted]
    assert [repr(float(s.first_token_at)) for s in served] == [row["prefill_completed_at"] for row in wanted]


@pytest.mark.parametrize(("trace", "num_blocks"), [("trace_mod_4r", None), ("trace_over_4r", 2048)])
def test_default_beats_what_vidur_has(trace: str, num_blocks: int | None) -> None:
    if is_of_pypi() and num_blocks is not None:
        pytest.skip("PyPI's Vidur breaks off when a request is preempted, whatever schedules")
    ours = play("default", arrivals(trace), num_blocks)
    for kind in (RoundRobinGlobalSchedulerConfig, LORGlobalSchedulerConfig):
        theirs = play(kind(), arrivals(trace), num_blocks)
        assert np.mean([s.e2e_s for s in ours]) < np.mean([s.e2e_s for s in theirs])
        ttft_p99 = [np.percentile([s.ttft_s for s in served], 99) for served in (ours, theirs)]
        assert ttft_p99[0] < ttft_p99[1]


def test_books_agree_with_the_replicas() -> None:
    """At every decision, what the books say is outstanding is what was sent there and has not completed."""
    chosen = PointsmanGlobalSchedulerConfig(policy="least-outstanding")
    simulation = simulator(arrivals("trace_mod_4r")[:300], chosen, VllmSchedulerConfig())
    scheduler, sent = simulation.scheduler, []
    schedule = scheduler.schedule

    def checked() -> list[Any]:
        open_on = Counter(str(replica) for replica, request in sent if not request.completed)
        for name in scheduler._core.replicas:
            assert scheduler._core.signals(name)["outstanding"] == open_on[name]
        placed = schedule()
        sent.extend(placed)
        return placed

    scheduler.schedule = checked
    run(simulation)
    assert len(sent) == 300
    assert all(scheduler._core.signals(name)["outstanding"] == 0 for name in scheduler._core.replicas)


def test_held_requests_are_sent_when_batches_end() -> None:
    """Forty requests at once, and none after: whoever is held has only the ends of batches to wait for."""
    trace = [Arrival(0.0, 3000, 20) for _ in range(40)]
    simulation = simulator(
        trace, PointsmanGlobalSchedulerConfig(policy="hold-until-room"), VllmSchedulerConfig()
    )
    held: list[int] = []
    schedule = simulation.scheduler.schedule

    def counted() -> list[Any]:
        placed = schedule()
        held.append(len(simulation.scheduler._request_queue))
        return placed

    simulation.scheduler.schedule = counted
    served = run(simulation)
    assert max(held) > 20
    assert all(s.completed_at > 0 for s in served)


@pytest.mark.parametrize("engine", ["vllm", None])  # None: Vidur's default
def test_vidurs_own_command_line_knows_our_policies(tmp_path: Path, engine: str | None) -> None:
    options = {
        "global_scheduler_config_type": "pointsman",
        "pointsman_global_scheduler_config_policy": "least-work",
        "execution_time_predictor_config_type": "closed_form",
        "cluster_config_num_replicas": 2,
        "replica_config_tensor_parallel_size": 1,
        "replica_config_num_pipeline_stages": 1,
        "synthetic_request_generator_config_num_requests": 16,
        "length_generator_config_type": "fixed",
        "fixed_request_length_generator_config_prefill_tokens": 200,
        "fixed_request_length_generator_config_decode_tokens": 20,
        "metrics_config_output_dir": tmp_path,
    }
    if engine is not None:
        options["replica_scheduler_config_type"] = engine
    command = [sys.executable, "-m", "pointsman.integrations.vidur", "--no-metrics_config_write_metrics"]
    command += [text for key, value in options.items() for text in (f"--{key}", str(value))]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Simulation ended at" in done.stdout + done.stderr
