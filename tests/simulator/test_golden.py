"""Runs of Vidur itself, bit for bit.

`tests/data/golden` carries some of the runs of `../shared/vidur/golden` (its README says how they were made);
where the folder is at hand, all of it is checked.
"""

from __future__ import annotations

import csv
import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from .factories import ROOT, Run, load_benchmark, make_cluster, make_workload, scheduler_of

CARRIED = ROOT / "tests" / "data" / "golden"
ALL = ROOT.parent / "shared" / "vidur" / "golden"
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


def run_names(folder: Path) -> list[str]:
    names = sorted(path.name.partition(".")[0] for path in folder.glob("*.csv*"))
    return [name for name in names if check_reference.RUN_NAME.fullmatch(name)]


def read_columns(folder: Path, name: str) -> dict[str, list[str]]:
    packed = folder / f"{name}.csv.gz"
    if packed.exists():
        text = gzip.decompress(packed.read_bytes()).decode()
    else:
        text = (folder / f"{name}.csv").read_text()
    rows = list(csv.DictReader(text.splitlines()))
    return {column: [row[column] for row in rows] for column in rows[0]}


def simulate(folder: Path, name: str) -> Run:
    trace, settings = check_reference.run_settings(name)
    columns = read_columns(folder, f"trace_{trace}")
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


def check(folder: Path, name: str) -> Run:
    run = simulate(folder, name)
    expected = read_columns(folder, name)
    assert_columns_equal(run.requests, expected, COMPARED)
    if list(folder.glob(f"batches_{name}.csv*")):
        batches = read_columns(folder, f"batches_{name}")
        count = len(batches["batch_id"])
        assert_columns_equal(run.batch_log[:count], batches, COMPARED_BATCHES)
    return run


@pytest.mark.parametrize("name", run_names(CARRIED))
def test_carried_run_is_reproduced(name: str) -> None:
    check(CARRIED, name)


def test_carried_runs_are_representative() -> None:
    names = " ".join(run_names(CARRIED))
    for part in ("vllm_", "sarathi_", "orca_", "_round_robin_", "_lor_", "_1r_", "_4r_"):
        assert part in names
    for load in ("_mod", "_over", "_tight", "_burst", "_chunk64", "_pp2"):
        assert load in names


def test_prompts_cut_short_by_eviction_are_covered() -> None:
    """Vidur's sarathi turns the rest of an evicted partial prompt into output (SEMANTICS.md)."""
    columns = read_columns(CARRIED, "sarathi_round_robin_1r_chunk64")
    final = np.array(columns["final_num_prefill_tokens"], int)
    assert np.sum(final < np.array(columns["num_prefill_tokens"], int)) == 8


@pytest.mark.skipif(not ALL.is_dir(), reason=f"{ALL} is not here")
@pytest.mark.parametrize("name", run_names(ALL))
def test_every_run_is_reproduced(name: str) -> None:
    run = check(ALL, name)
    summary = read_columns(ALL, "summary")
    if name in summary["tag"]:
        assert run.sim.num_batches == int(summary["batches"][summary["tag"].index(name)])
