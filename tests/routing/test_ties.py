"""Idle replicas that are alike: the simulator and the live router choose among them in the same way."""

from __future__ import annotations

import numpy as np
import pytest
from simulator.factories import Run, make_cluster, make_policy, make_workload

from pointsman.routing.books import Books
from pointsman.routing.calibration import FIGURES
from pointsman.routing.core import Request
from pointsman.routing.decider import Decider
from pointsman.routing.heuristics import HEURISTICS

NUM_REPLICAS = 4
NUM_TRIES = 400
# The two that go by number or by session draw no lots; vidur-lor reads the servers' own queues.
DRAW_LOTS = [
    kind for kind in HEURISTICS if kind not in ("round-robin", "weighted-round-robin", "vidur-lor")
] + ["default"]


def choices(kind: str) -> tuple[list[int], list[int]]:
    """What the simulator and a live router choose for the first request, from the same random states."""
    cluster = make_cluster(replicas=NUM_REPLICAS)
    policy = make_policy(kind)
    simulated, live = [], []
    books = Books(now=0.0)
    decider = Decider(books, policy)
    for seed in range(NUM_TRIES):
        run = Run(cluster, make_workload([0.0], 100, 5), policy, seed)
        if not books.slots:
            for k, plan in enumerate(run.plans):
                books.add(str(k), {name: float(getattr(plan, name)) for name in FIGURES})
            decider.decide(Request(100, arrived_at=0.0), 1, 0.0)
        decider._record.memory.rng = run.sim.memory.rng
        live.append(decider.decide(Request(100, arrived_at=0.0), 1, 0.0))
        simulated.append(int(run.to_end().requests["replica"][0]) + 1)
    return simulated, live


@pytest.mark.parametrize("kind", DRAW_LOTS)
def test_both_choose_the_same_and_each_replica_as_often(kind: str) -> None:
    simulated, live = choices(kind)
    assert simulated == live
    shares = np.bincount(simulated, minlength=NUM_REPLICAS + 1)[1:] / NUM_TRIES
    assert np.all(np.abs(shares - 1 / NUM_REPLICAS) < 0.09)
