from __future__ import annotations

import ctypes
import gc
import tracemalloc
from typing import Any

import numpy as np
import pytest
from simulator.factories import make_cluster, make_workload

from pointsman.compiled.memory import Records
from pointsman.errors import InputError
from pointsman.routing.heuristics import EXTERNAL, HEURISTICS
from pointsman.routing.policy import PolicySpec, PolicyTables, fill_memory
from pointsman.routing.records import MEMORY
from pointsman.routing.signals import NUM_SIGNALS, SIGNAL_INDEX
from pointsman.simulator.cluster import Clusters
from pointsman.simulator.plan import plan_replicas
from pointsman.simulator.run import advise, run
from pointsman.simulator.state import DONE
from pointsman.spec import parse_spec

from .learned import make_checkpoint


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ({"kind": "least-luck"}, ["policy = 'least-luck'", "did you mean"]),
        ({"kind": "linear-score"}, ["policy.weights", "outstanding"]),
        ({"kind": "linear-score", "weights": {"outstanding": 0.0}}, ["policy.weights"]),
        ({"kind": "linear-score", "weights": {"luck": 1.0}}, ["policy.weights", "luck", "outstanding"]),
        ({"kind": "random", "weights": {"outstanding": 1.0}}, ["policy.weights", "linear-score"]),
        ({"kind": "hold-until-room", "kv_limit": 0.0}, ["policy.kv_limit"]),
        ({"kind": "random", "seed": 3}, ["policy.seed", "unknown key"]),
        ({"name": "round-robin"}, ["policy.kind = None: missing", "write `kind: round-robin`"]),
        ({"kind": "random", "name": "round-robin"}, ["policy.name = 'round-robin'", "this one is random"]),
        ({"kind": "learned"}, ["policy.checkpoint", ".safetensors"]),
        ({"kind": "random", "checkpoint": "a.safetensors"}, ["policy.checkpoint", "learned"]),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(policy: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        parse_spec(PolicySpec, policy, "policy")
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_every_heuristic_says_what_it_does_in_a_line() -> None:
    assert len({heuristic.kind for heuristic in HEURISTICS.values()}) == len(HEURISTICS)
    for kind, heuristic in HEURISTICS.items():
        assert heuristic.what and "\n" not in heuristic.what, kind


def test_weights_reach_the_row_of_their_signal() -> None:
    specs = [None, PolicySpec(kind="linear-score", weights={"kv_use": 2.0, "outstanding": 1.0})]
    tables = PolicyTables(specs, max_replicas=1)
    assert tables.rows["kind"].tolist() == [EXTERNAL, HEURISTICS["linear-score"].kind]
    assert tables.rows["reads_derived"].tolist() == [0, 1]
    weights = (ctypes.c_double * NUM_SIGNALS).from_address(int(tables.rows[1].weights))
    assert weights[SIGNAL_INDEX["kv_use"]] == 2.0
    assert sum(weights) == 3.0


def test_working_memory_is_for_the_replicas_there_are() -> None:
    """Beyond its end lies somebody else's memory: a learned policy for no replicas ended in a crash."""
    with pytest.raises(ValueError, match="for 0 replicas"):
        PolicyTables([make_checkpoint()], max_replicas=0)
    cluster = make_cluster(replicas=3)
    clusters = Clusters([cluster], [plan_replicas(cluster)], [make_workload([0.0])], [0])
    actions = np.zeros(1, np.int64)
    for max_replicas in (1, 2):
        tables, memories = PolicyTables([make_checkpoint()], max_replicas), Records(1, MEMORY)
        fill_memory(memories[0], memories, 3, 1)
        with pytest.raises(ValueError, match="fewer replicas"):
            run(clusters.sims, tables.rows, actions, 0, 1)
        with pytest.raises(ValueError, match="fewer replicas"):
            advise(clusters.sims, tables.rows, memories, actions, 0, 1)
        fill_memory(memories[0], memories, max_replicas, 1)
        with pytest.raises(ValueError, match="fewer replicas"):
            rule = PolicyTables([PolicySpec()], max_replicas)
            advise(clusters.sims, rule.rows, memories, actions, 0, 1)
    run(clusters.sims, PolicyTables([make_checkpoint()], max_replicas=3).rows, actions, 0, 1)
    assert clusters.sims[0].status == DONE


def test_rows_of_tables_that_are_gone_keep_their_memory() -> None:
    checkpoint = make_checkpoint(width=256)
    num_bytes = sum(array.nbytes for array in checkpoint.arrays.values() if array.ndim == 2)
    tracemalloc.start()
    try:
        rows = PolicyTables([checkpoint], max_replicas=4).rows
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] > num_bytes
        del rows
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] < num_bytes / 4
    finally:
        tracemalloc.stop()
