"""The capacity search (`evaluation/capacity.py`) on saturated replicas that can be worked out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from simulator.factories import make_cluster

from pointsman.experiments import capacity
from pointsman.experiments.capacity import cache_dir, capacity_rps, replica_capacities
from pointsman.simulator.plan import plan_replicas
from pointsman.spec import parse_spec
from pointsman.workload import WorkloadSpec, sample_lengths

A, B, C = 0.01, 1e-4, 2e-4


@pytest.fixture
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of this test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def lengths_spec(lengths: Any) -> WorkloadSpec:
    return parse_spec(WorkloadSpec, {"arrivals": {"kind": "poisson", "load": 0.5}, "lengths": lengths})


def fixed(prompt: int, output: int) -> WorkloadSpec:
    return lengths_spec({"kind": "fixed", "prompt": prompt, "output": output})


UNIFORM = lengths_spec(
    {"kind": "uniform", "prompt_min": 1, "prompt_max": 200, "output_min": 1, "output_max": 100}
)


def plans_for(max_num_seqs: int = 16, **group: Any) -> Any:
    scheduler = {"kind": "vllm-v1", "num_blocks": 100_000, "max_num_seqs": max_num_seqs}
    cost = {"kind": "linear", "a": A, "b": B, "c": C}
    return plan_replicas(make_cluster(replicas=[{"scheduler": scheduler, "cost": cost} | group]))


def files(home: Path) -> list[Path]:
    return sorted(path for path in home.rglob("*") if path.is_file())


def test_sequences_that_all_run_in_step(cache_home: Path) -> None:
    """16 requests start together: one step reads their prompts, nine more write the rest of ten tokens."""
    wave_s = (A + B * 16 * 5) + 9 * (A + C * 16)
    assert capacity_rps(fixed(5, 10), plans_for()) == pytest.approx(16 / wave_s, rel=1e-9)


def test_one_sequence_at_a_time(cache_home: Path) -> None:
    """Service times add up, whatever the lengths."""
    prompts, outputs = sample_lengths(UNIFORM, capacity.NUM_REQUESTS, capacity.SEED)
    service_s = A + B * prompts + (outputs - 1) * (A + C)
    found = capacity_rps(UNIFORM, plans_for(max_num_seqs=1))
    assert found == pytest.approx(1 / service_s.mean(), rel=0.02)
    finished = np.cumsum(service_s)
    assert found == pytest.approx(4800 / (finished[6400] - finished[1600]), rel=1e-9)


def test_full_batch_of_mixed_lengths(cache_home: Path) -> None:
    """In steady state 64 sequences run, and each step reads the prompts of those that take a free place."""
    prompts, outputs = sample_lengths(UNIFORM, capacity.NUM_REQUESTS, capacity.SEED)
    # A request takes part in as many steps as it has output tokens.
    per_step = 64 / outputs.mean()
    step_s = A + B * per_step * prompts.mean() + C * (64 - per_step)
    assert capacity_rps(UNIFORM, plans_for(64)) == pytest.approx(per_step / step_s, rel=0.03)


def test_capacity_adds_up_over_replicas(cache_home: Path) -> None:
    one, slow, small = plans_for(), plans_for(slowdown=2.0), plans_for(max_num_seqs=4)
    capacities = replica_capacities(UNIFORM, [*one, *one, *slow, *small])
    assert capacities[0] == capacities[1] == 2 * capacities[2]
    assert capacities[3] == replica_capacities(UNIFORM, small)[0] < 0.5 * capacities[0]
    assert capacity_rps(UNIFORM, [*one, *one, *slow, *small]) == sum(capacities)


def test_equal_replicas_are_measured_once(cache_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    saturate = capacity._saturate
    monkeypatch.setattr(capacity, "_saturate", lambda *args: calls.append(1) or saturate(*args))
    capacity_rps(UNIFORM, plans_for() * 5)
    assert len(calls) == 1 and len(files(cache_home)) == 1


def test_what_no_replica_can_hold_is_left_out(cache_home: Path) -> None:
    scheduler = {"kind": "vllm-v1", "num_blocks": 10, "max_num_seqs": 1}
    found = capacity_rps(UNIFORM, plans_for(scheduler=scheduler))
    prompts, outputs = sample_lengths(UNIFORM, capacity.NUM_REQUESTS, capacity.SEED)
    fits = prompts + outputs <= 160
    service_s = A + B * prompts[fits] + (outputs[fits] - 1) * (A + C)
    assert found == pytest.approx(1 / service_s.mean(), rel=0.02)
    assert capacity_rps(fixed(200, 100), plans_for(scheduler=scheduler)) == 0.0


def test_second_call_does_not_simulate(cache_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = capacity_rps(UNIFORM, plans_for())

    def fail(*_: Any) -> float:
        raise AssertionError("simulated again")

    monkeypatch.setattr(capacity, "_saturate", fail)
    assert capacity_rps(UNIFORM, plans_for()) == first


@pytest.mark.parametrize(
    "other",
    [
        {"slowdown": 1.5},
        {"max_num_seqs": 17},
        {"cost": {"kind": "linear", "a": A, "b": B}},
        {"scheduler": {"kind": "vllm-v1", "num_blocks": 99_999, "max_num_seqs": 16}},
        {"scheduler": {"kind": "sarathi", "num_blocks": 100_000, "max_batch_size": 16}},
    ],
    ids=lambda other: next(iter(other)),
)
def test_another_replica_is_another_entry(cache_home: Path, other: dict[str, Any]) -> None:
    capacity_rps(UNIFORM, plans_for())
    capacity_rps(UNIFORM, plans_for(**other))
    assert len(files(cache_home)) == 2


def test_other_lengths_and_another_kernel_are_other_entries(
    cache_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    capacity_rps(UNIFORM, plans_for())
    capacity_rps(fixed(5, 10), plans_for())
    assert len(files(cache_home)) == 2
    monkeypatch.setattr(capacity, "kernel_digest", lambda module: "another")
    capacity_rps(UNIFORM, plans_for())
    assert len(files(cache_home)) == 3


DAMAGED = [
    b"",
    b"{",
    b"[]",
    b"{}",
    b'{"requests_per_s": null}',
    b'{"requests_per_s": "many"}',
    b"\xff\xfe\x00",
    b'{"requests_per_s": NaN}',
    b'{"requests_per_s": -3.0}',
]


@pytest.mark.parametrize("content", DAMAGED)
def test_damaged_entry_is_found_again(cache_home: Path, content: bytes) -> None:
    first = capacity_rps(UNIFORM, plans_for())
    (path,) = files(cache_home)
    whole = path.read_bytes()
    path.write_bytes(content)
    assert capacity_rps(UNIFORM, plans_for()) == first
    assert files(cache_home) == [path] and path.read_bytes() == whole


def test_cache_that_cannot_be_written_only_costs_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "a-file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    assert capacity_rps(fixed(5, 10), plans_for()) > 0


def test_cache_home_is_respected(cache_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_dir() == cache_home / "pointsman"
    capacity_rps(fixed(5, 10), plans_for())
    assert [path.parent for path in files(cache_home)] == [cache_home / "pointsman" / "capacity"]
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(cache_home / "home"))
    assert cache_dir() == cache_home / "home" / ".cache" / "pointsman"


def test_no_test_touches_the_cache_of_the_user() -> None:
    """The fixture in conftest.py is at work where nothing is asked for."""
    assert Path.home() not in cache_dir().parents


def test_everything_fits_in_one_batch(cache_home: Path) -> None:
    scheduler = {
        "kind": "vllm-v1",
        "num_blocks": 100_000,
        "max_num_seqs": 8192,
        "max_num_batched_tokens": 8192,
    }
    assert capacity_rps(fixed(1, 5), plans_for(scheduler=scheduler)) < 1e9


@pytest.mark.usefixtures("cache_home")
def test_replicas_that_share_a_card_make_fewer_steps() -> None:
    found = {}
    for neighbour_step_s in (0.0, A):
        group = {"card": "one", "neighbour_step_s": neighbour_step_s, "cost": {"kind": "linear", "a": A}}
        found[neighbour_step_s] = replica_capacities(
            fixed(10, 10), plan_replicas(make_cluster(replicas=[group, group]))
        )
    np.testing.assert_allclose(found[0.0], 2 * np.array(found[A]), rtol=1e-9)
