"""No kernel writes outside its arrays: they are reached by address, so nothing else would notice."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from simulator import chaos
from simulator.factories import Run, make_cluster, make_workload


@settings(max_examples=settings.default.max_examples // 3)
@given(data=st.data())
def test_whatever_happens(data: st.DataObject) -> None:
    cluster = data.draw(chaos.clusters())
    run = Run(cluster, data.draw(chaos.workloads()), data.draw(chaos.policies())).to_end()
    assert run.clusters.broken_guards() == []


def test_pipelined_orca_with_more_sequences_than_a_batch_takes() -> None:
    scheduler = {"kind": "orca", "block_size": 4, "num_blocks": 200, "max_batch_size": 4}
    scheduler |= {"max_sequence_tokens": 32, "pipeline_stages": 3}
    run = Run(make_cluster(replicas=1, scheduler=scheduler), make_workload([0.0] * 20, 4, 10)).to_end()
    assert run.clusters.broken_guards() == []


def test_replica_that_fails_often_during_one_step() -> None:
    events = []
    for n in range(1, 41):
        events += [{"at_s": n, "kind": "fail", "replica": 0}, {"at_s": n, "kind": "recover", "replica": 0}]
    cluster = make_cluster(replicas=1, cost={"kind": "linear", "a": 1000.0}, events=events)
    run = Run(cluster, make_workload([0.0])).to_end()
    assert run.requests["restarts"][0] == 40
    assert run.requests["completed_at"][0] == 40 + 10 * 1000.0
    assert run.clusters.broken_guards() == []
