"""Replicas on one card: every step of the one makes the step that runs on the other longer.

Compared with hand-computed times, and with the rates at which the times add up.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pointsman.errors import InputError
from pointsman.simulator.plan import plan_replicas

from .factories import Run, make_cluster, make_workload

SCHEDULER = {"kind": "vllm-v1", "num_blocks": 100_000, "max_num_batched_tokens": 8192}


def group(step_s: float, neighbour_step_s: float | None = None, card: str | None = "c", **more: Any) -> Any:
    found: dict[str, Any] = {
        "cost": {"kind": "linear", "a": step_s},
        "card": card,
        "neighbour_step_s": neighbour_step_s,
    }
    return {name: value for name, value in (found | more).items() if value is not None}


def shared(*groups: Any, **cluster: Any) -> Any:
    return make_cluster(replicas=list(groups), scheduler=SCHEDULER, **cluster)


def completed(cluster: Any, arrived_at: list[float], num_steps: list[int]) -> list[float]:
    """Round-robin: the first request goes to the first replica."""
    run = Run(cluster, make_workload(arrived_at, 1, num_steps)).to_end()
    assert run.requests["replica"].tolist() == [k % cluster.num_replicas for k in range(len(arrived_at))]
    return list(map(float, run.requests["completed_at"]))


def test_a_step_that_runs_is_lengthened_by_each_that_ends_beside_it() -> None:
    """The step of 2.5 s is to end at 2.5, then at 2.76 (one ends at 1), 3.02 (at 2) and 3.28 (at 3). Then the
    fourth step of the other runs, which ends 0.5 s later than at 4.
    """
    cluster = shared(group(1.0, 0.5), group(2.5, 0.26))
    assert completed(cluster, [0.0, 0.0], [4, 1]) == pytest.approx([4.5, 3.28])


def test_a_step_that_was_lengthened_is_lengthened_again() -> None:
    """1 s, and 0.4 s for each step of 0.3 s beside it: those end at 0.3, 0.6, 0.9, 1.2, …

    1 → 1.4 (0.3) → 1.8 (0.6) → 2.2 (0.9) → 2.6 (1.2), and no fifth one ends.
    """
    cluster = shared(group(1.0, 0.4), group(0.3, 0.0))
    assert completed(cluster, [0.0, 0.0], [1, 4]) == pytest.approx([2.6, 1.2])


def test_nothing_is_owed_while_a_replica_is_idle() -> None:
    """Ten steps end before the second request comes: it takes as long as alone."""
    cluster = shared(group(0.1, 0.0), group(1.0, 0.5))
    assert completed(cluster, [0.0, 1.05], [10, 2])[1] == pytest.approx(3.05)


def test_a_replica_that_failed_owes_nothing() -> None:
    """Half a second when it fails at 1.5; after that, only for the step that ends beside it at 5."""
    events = [{"at_s": 1.5, "kind": "fail", "replica": 1}, {"at_s": 3.0, "kind": "recover", "replica": 1}]
    cluster = shared(group(1.0, 0.0), group(5.0, 0.5), events=events)
    run = Run(cluster, make_workload([0.0, 0.0, 4.0, 4.0], 1, 1)).to_end()
    assert run.requests["completed_at"] == pytest.approx([1.0, 2.5, 9.5, 5.0])


def test_rates_are_those_at_which_the_times_add_up() -> None:
    """Own steps and what the neighbours' add fill the time: step_s[k] * r[k] + own_s[k] * (other r's) = 1."""
    steps_s, beside_s = np.array([0.0065, 0.0087, 0.014]), np.array([0.0017, 0.0021, 0.0016])
    cluster = shared(*(group(step_s, extra_s) for step_s, extra_s in zip(steps_s, beside_s, strict=True)))
    num_steps = np.array([4000, 4000, 4000])
    run = Run(cluster, make_workload([0.0, 0.0, 0.0], 1, num_steps), num_logged_batches=20_000).to_end()
    log = run.clusters.batch_logs[0][: run.sim.num_logged_batches]
    table = np.tile(beside_s[:, None], 3)
    np.fill_diagonal(table, steps_s)
    rates = np.linalg.solve(table, np.ones(3))
    all_busy_until = run.requests["completed_at"].min()
    found = [
        np.sum(log["ended_at"][log["replica"] == k] <= all_busy_until) / all_busy_until for k in range(3)
    ]
    np.testing.assert_allclose(found, rates, rtol=2e-3)


def test_the_first_of_each_group_share_a_card_and_so_do_the_second() -> None:
    groups = (group(1.0, 0.5, count=2), group(1.0, 0.5, count=3), group(1.0, 0.0, card=None))
    cluster = shared(*groups)
    plans = plan_replicas(cluster)
    assert [plan.card for plan in plans] == [("c", 0), ("c", 1), ("c", 0), ("c", 1), ("c", 2), None]
    assert [plan.num_neighbours for plan in plans] == [1, 1, 1, 1, 0, 0]
    clusters = Run(cluster, make_workload([0.0])).clusters
    assert clusters.replicas[0]["next_on_card"].tolist() == [2, 3, 0, 1, 4, 5]
    # As the router is told: a step of each neighbour meanwhile.
    assert [plan.step_floor_s for plan in plans] == pytest.approx([1.5] * 4 + [1.0] * 2)


def test_a_description_says_what_a_neighbour_costs(tmp_path: Path) -> None:
    text = "replica: {cost: {kind: linear, a: 1.0}, card: c, neighbour_step_s: 0.5}\n"
    (tmp_path / "one.yaml").write_text(text)
    cluster = make_cluster(replicas=[{"description": "one.yaml"}, {"description": "one.yaml"}])
    assert [plan.step_floor_s for plan in plan_replicas(cluster, tmp_path)] == [1.5, 1.5]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"card": None}, r"neighbour_step_s = 0.5: counts for servers that share a card"),
        ({"scheduler": {"kind": "vllm-v1", "pipeline_stages": 2}}, r"card = 'c': is not simulated with 2"),
        ({"neighbour_step_s": -1.0}, r"neighbour_step_s"),
    ],
)
def test_what_makes_no_sense(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        plan_replicas(shared(group(1.0, 0.5) | change))
