"""GPU clusters and policies together: the compiled entry points, for clusters first..last-1 of an array."""

from __future__ import annotations

from pointsman.compiled.jit import entry_point
from pointsman.compiled.random import mix
from pointsman.jobs.heuristics import decide_by_rule, require_room
from pointsman.jobs.kernel import begin, decide, step
from pointsman.jobs.observation import fill_privileged, observe
from pointsman.jobs.state import GOING_ON


@entry_point
def begin_all(clusters, first, last):
    """clusters [N] CLUSTER, their jobs filled in: to the start of the episode."""
    for i in range(first, last):
        begin(clusters[i])


@entry_point
def decide_all(clusters, actions, skips_forced, first, last):
    """actions [N]: carried out, and on to the next event, or the next at which a job can be started."""
    for i in range(first, last):
        decide(clusters[i], actions[i], skips_forced)


@entry_point
def play_all(clusters, policies, num_steps, first, last):
    """policies [N] POLICY decide until the episodes are over, or have come to a step num_steps [N]."""
    for i in range(first, last):
        sim = clusters[i]
        require_room(sim, policies[i])
        while sim.status == GOING_ON and sim.num_steps < num_steps[i]:
            step(sim, decide_by_rule(sim, policies[i]))


@entry_point
def look(clusters, lookahead, entities, context, entity_mask, legal, privileged, first, last):
    """Fill observations: entities [N, K, F], context [N, C], entity_mask [N, K], legal [N, K + 1], …"""
    for i in range(first, last):
        sim = clusters[i]
        observe(sim, lookahead, entities[i], context[i], legal[i])
        for slot in range(sim.room):
            entity_mask[i, slot] = slot < sim.num_window
        fill_privileged(sim, privileged[i])


@entry_point
def advise(clusters, policies, actions, first, last):
    """actions [N]: what each policy would do now; nothing changes. Lots are drawn anew at every step."""
    for i in range(first, last):
        sim = clusters[i]
        require_room(sim, policies[i])
        rng = sim.rng
        sim.rng = 1 + mix(rng + sim.num_steps)
        actions[i] = decide_by_rule(sim, policies[i])
        sim.rng = rng
