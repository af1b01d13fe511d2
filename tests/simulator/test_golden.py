"""Runs of Vidur itself, bit for bit. The README of `tests/data/golden` says how they were made."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from .factories import ROOT, Run, load_benchmark, make_cluster, make_workload, scheduler_of

GOLDEN = ROOT / "tests" / "data" / "golden"
MAX_BATCHES = 200_000
check_reference = load_benchmark("reference_simulator") and load_benchmark("check_reference")

# Column of the golden file, field of ours.
COMPARED = (
    ("replica_id", "replica"),
    ("num_restarts", "restarts"),
    ("scheduled_at", "scheduled_at"),
    ("prefill_completed_at", "first_token_at"),
    ("completed_at", "completed_at"),
)
COMPARED_BATCHES = (
    ("replica_id", "replica"),
    ("scheduled_at", "formed_at"),
    ("completed_at", "ended_at"),
    ("batch_size", "num_seqs"),
    ("num_prefill_tokens", "prefill_tokens"),
    ("num_decode_tokens", "num_decodes"),
    ("allocated_blocks_after_end", "used_blocks"),
)


def names() -> list[str]:
    return sorted(path.name.partition(".")[0] for path in GOLDEN.glob("*.csv.gz"))


RUNS = [name for name in names() if check_reference.RUN_NAME.fullmatch(name)]


def read_columns(name: str) -> dict[str, list[str]]:
    rows = check_reference.read_csv(GOLDEN / f"{name}.csv")
    return {column: [row[column] for row in rows] for column in rows[0]}


def simulate(name: str) -> Run:
    trace, settings = check_reference.run_settings(name)
    columns = read_columns(f"trace_{trace}")
    if settings["num_blocks"] == check_reference.PLANNED_BLOCKS:
        del settings["num_blocks"]  # our planner must come to the same
    cluster = make_cluster(replicas=settings["replicas"], scheduler=scheduler_of(settings))
    workload = make_workload(
        np.array(columns["arrived_at"], np.float64),
        np.array(columns["num_prefill_tokens"], int),
        np.array(columns["num_decode_tokens"], int),
    )
    return Run(cluster, workload, settings["router"], num_logged_batches=MAX_BATCHES).to_end()


def assert_columns_equal(found: Any, expected: dict[str, list[str]], compared: Any) -> None:
    for theirs, ours in compared:
        values = np.array(expected[theirs], found[ours].dtype)
        np.testing.assert_array_equal(found[ours], values, err_msg=theirs)


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_reproduced(name: str) -> None:
    run = simulate(name)
    assert_columns_equal(run.requests, read_columns(name), COMPARED)
    if f"batches_{name}" in names():
        batches = read_columns(f"batches_{name}")
        count = len(batches["batch_id"])
        assert_columns_equal(run.batch_log[:count], batches, COMPARED_BATCHES)
    summary = read_columns("summary")
    assert run.sim.num_batches == int(summary["batches"][summary["tag"].index(name)])


def test_there_are_27_runs_of_every_kind() -> None:
    assert len(RUNS) == 27
    together = " ".join(RUNS)
    for part in ("vllm_", "sarathi_", "orca_", "_round_robin_", "_lor_", "_1r_", "_4r_"):
        assert part in together
    for load in ("_mod", "_over", "_tight", "_burst", "_cap", "_chunk64", "_pp2"):
        assert load in together


def test_prompts_cut_short_by_eviction_are_covered() -> None:
    """Vidur's sarathi turns the rest of an evicted partial prompt into output."""
    columns = read_columns("sarathi_round_robin_1r_chunk64")
    final = np.array(columns["final_num_prefill_tokens"], int)
    assert np.sum(final < np.array(columns["num_prefill_tokens"], int)) == 8
