"""Clusters and policies together: the compiled entry points.

`run` moves clusters on; the others look at clusters that wait for a decision and change nothing in them.
"""

from __future__ import annotations

from pointsman.compiled.jit import entry_point, kernel
from pointsman.compiled.memory import address_of
from pointsman.routing.deciding import decide_by_policy, require_room
from pointsman.routing.heuristics import EXTERNAL
from pointsman.routing.legality import keeps_holding
from pointsman.routing.observation import observe
from pointsman.simulator.dispatch import act, hold
from pointsman.simulator.loop import advance
from pointsman.simulator.measures import integrate_load
from pointsman.simulator.privileged import fill_privileged, time_ahead
from pointsman.simulator.queue import set_order
from pointsman.simulator.state import DECISION, DONE, READY


@kernel
def carry_out(sim, policy, action):
    if action == 0:
        sim.ask.hold_until = sim.now + policy.hold_s
    act(sim, action)


@entry_point
def run(clusters, policies, actions, first, last):
    """Advance clusters first..last-1, each on its own.

    clusters: [N] SIM; policies: [N] POLICY; actions: [N]. A policy decides inside the kernel; with the policy
    EXTERNAL a cluster that waits for a decision carries out actions[i] and runs on to the next one.
    """
    for i in range(first, last):
        sim = clusters[i]
        policy = policies[i]
        require_room(sim.router, sim.memory, policy)
        set_order(sim, policy.small_first)
        if sim.status == DECISION:
            carry_out(sim, policy, actions[i])
        if sim.status != DONE:
            sim.status = READY
        while sim.status == READY:
            advance(sim)
            if sim.status == DECISION:
                if keeps_holding(sim.router, policy, sim.ask, sim.now):
                    hold(sim)
                    sim.status = READY
                elif policy.kind != EXTERNAL:
                    action = decide_by_policy(sim.router, sim.memory, policy, sim.ask, sim.now)
                    if action < 0:
                        raise ValueError("the policy's logits are not finite")
                    carry_out(sim, policy, action)
                    sim.status = READY
        integrate_load(sim)


@entry_point
def look(clusters, policies, shadows, entities, context, legal, privileged, first, last):
    """Fill the observations of clusters first..last-1.

    entities [N, R, F], context [N, C], legal [N, R + 1], privileged [N, P]; R is the room for replicas. What
    only a critic may see comes from the cluster's true state and from its shadow; the last is in seconds.
    """
    num_slots = entities.shape[1]
    for i in range(first, last):
        sim = clusters[i]
        sim.outstanding_range = observe(
            sim.router,
            policies[i],
            sim.ask,
            sim.now,
            num_slots,
            address_of(entities[i]),
            address_of(context[i]),
            address_of(legal[i]),
        )
        fill_privileged(sim, privileged[i], 0)
        fill_privileged(shadows[i], privileged[i], 1)
        privileged[i, -1] = time_ahead(shadows[i]) - time_ahead(sim)


@entry_point
def advise(clusters, policies, memories, actions, first, last):
    """actions [N]: what each policy with its memory, of memories [N], would do; clusters stay as they are."""
    for i in range(first, last):
        sim = clusters[i]
        require_room(sim.router, memories[i], policies[i])
        actions[i] = decide_by_policy(sim.router, memories[i], policies[i], sim.ask, sim.now)
