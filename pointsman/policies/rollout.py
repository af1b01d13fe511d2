"""Clusters and policies together: `run`, the one compiled entry point."""

from __future__ import annotations

from pointsman.policies.kernels import EXTERNAL, choose
from pointsman.simulator.dispatch import act
from pointsman.simulator.jit import entry_point
from pointsman.simulator.loop import advance
from pointsman.simulator.state import DECISION, DONE, READY, view


@entry_point
def run(batch, first, last, policy, actions):  # type: ignore[no-untyped-def]
    """Advance clusters first..last-1 of the batch, each on its own.

    policy: a heuristic that decides inside the kernel, or EXTERNAL: then each cluster that waits for a
    decision first carries out actions[i], and runs on until the next one.
    """
    for i in range(first, last):
        sim = view(batch, i)
        cluster = sim.cluster[0]
        if cluster.status == DECISION:
            act(sim, actions[i])
        if cluster.status != DONE:
            cluster.status = READY
        while cluster.status == READY:
            advance(sim)
            if cluster.status == DECISION and policy.kind != EXTERNAL:
                act(sim, choose(sim, policy))
                cluster.status = READY
