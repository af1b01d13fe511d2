"""Clusters and policies together: `run`, the one compiled entry point."""

from __future__ import annotations

from pointsman.policies.kernels import EXTERNAL, choose
from pointsman.simulator.dispatch import act
from pointsman.simulator.jit import entry_point
from pointsman.simulator.loop import advance
from pointsman.simulator.state import DECISION, DONE, READY


@entry_point
def run(clusters, policies, actions, first, last):
    """Advance clusters first..last-1, each on its own.

    clusters: [N] SIM; policies: [N] POLICY; actions: [N]. A heuristic decides inside the kernel; with the
    policy EXTERNAL a cluster that waits for a decision carries out actions[i] and runs on to the next one.
    """
    for i in range(first, last):
        sim = clusters[i]
        policy = policies[i]
        if sim.status == DECISION:
            act(sim, actions[i])
        if sim.status != DONE:
            sim.status = READY
        while sim.status == READY:
            advance(sim)
            if sim.status == DECISION and policy.kind != EXTERNAL:
                act(sim, choose(sim, policy))
                sim.status = READY
