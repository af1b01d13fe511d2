"""The heuristics, compiled: which job of the window to start. All but `easy-backfill` start one if they can.

Most are a score, highest wins, ties to the first in the queue; adding one means adding a kind and a line to
`score`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from pointsman.compiled.jit import kernel
from pointsman.compiled.memory import array_accessor, float_list, single_list, single_table
from pointsman.compiled.random import next_random
from pointsman.inference.network import forward, network_at
from pointsman.jobs.kernel import can_meet, first_fitting, fits, job_in, wide_and_short
from pointsman.jobs.observation import fill_free_in, observe

(
    FIFO,
    SJF,
    RANDOM_FEASIBLE,
    SMALLEST_WORK,
    MOST_GPUS,
    WIDE_AND_SHORT,
    EASY_BACKFILL,
    BEST_FIT,
    PRIORITY,
    DEADLINE,
    LEARNED,
) = range(11)


class JobHeuristic(NamedTuple):
    kernel: int
    what: str


EARLIEST_DEADLINE = "earliest-deadline"
HEURISTICS: Mapping[str, JobHeuristic] = {
    "fifo": JobHeuristic(FIFO, "the first in the queue that fits"),
    "sjf": JobHeuristic(SJF, "the shortest that fits"),
    "random-feasible": JobHeuristic(RANDOM_FEASIBLE, "any that fits"),
    "smallest-work-first": JobHeuristic(SMALLEST_WORK, "the least GPUs times duration"),
    "most-gpus-first": JobHeuristic(MOST_GPUS, "the most GPUs"),
    "wide-and-short": JobHeuristic(
        WIDE_AND_SHORT, "highest share of the GPUs, minus half its duration over D"
    ),
    "easy-backfill": JobHeuristic(
        EASY_BACKFILL, "the first in the queue; while it waits, any that does not delay it"
    ),
    "best-fit": JobHeuristic(BEST_FIT, "leaves the fewest GPUs idle; of those, the longest"),
    "priority-first": JobHeuristic(PRIORITY, "the most urgent"),
    EARLIEST_DEADLINE: JobHeuristic(
        DEADLINE, "the earliest deadline that it can still meet; without one, the first in the queue"
    ),
}

# A policy as the kernel wants it.
POLICY = np.dtype(
    [
        ("kind", "i8"),
        # Learned: addresses of the network and of its working memory for this cluster.
        ("network", "i8"),
        ("lookahead", "i8"),
        ("num_features", "i8"),  # F
        ("num_context", "i8"),  # C
        ("window", "i8"),  # K: of the working memory
        ("entities", "i8"),  # [K, F] f4
        ("context", "i8"),  # [C] f4
        ("legal", "i8"),  # [K + 1] bool
        ("logits", "i8"),  # [K + 1] f4
        ("scratch", "i8"),  # what `forward` asks for
        ("state", "i8"),  # [W] f4: what a recurrent network remembers
    ],
    align=True,
)

bool_list = array_accessor(np.bool_, 1)


def heuristics_for(has_deadlines: bool) -> list[str]:
    """All that differ from each other: without deadlines, earliest-deadline is fifo."""
    return [name for name in HEURISTICS if has_deadlines or name != EARLIEST_DEADLINE]


@kernel
def require_room(sim, policy):
    """Entry points ask before a policy decides: beyond its working memory lies somebody else's."""
    if policy.kind == LEARNED and policy.window < sim.room:
        raise ValueError("the policy's working memory is for fewer jobs than the window has")


@kernel
def decide_by_rule(sim, policy):
    """The action: 0 for nothing, k for slot k - 1 of the window."""
    kind = policy.kind
    if kind == FIFO:
        return first_fitting(sim) + 1
    if kind == RANDOM_FEASIBLE:
        return any_fitting(sim) + 1
    if kind == EASY_BACKFILL:
        return backfill(sim) + 1
    if kind == LEARNED:
        return by_network(sim, policy)
    best = -1
    highest = -np.inf
    for slot in range(sim.num_window):
        if fits(sim, slot):
            value = score(sim, kind, job_in(sim, slot))
            if best < 0 or value > highest:
                highest = value
                best = slot
    return best + 1


@kernel
def score(sim, kind, job):
    if kind == SJF:
        return -job.duration_s
    if kind == SMALLEST_WORK:
        return -job.work
    if kind == MOST_GPUS:
        return float(job.gpus)
    if kind == WIDE_AND_SHORT:
        return wide_and_short(sim, job)
    if kind == BEST_FIT:
        return job.gpus + 0.5 * job.duration_s / sim.max_duration_s
    if kind == PRIORITY:
        return float(job.priority)
    return -job.deadline_at if can_meet(sim, job) else -np.inf


@kernel
def any_fitting(sim):
    num_fitting = 0
    for slot in range(sim.num_window):
        num_fitting += fits(sim, slot)
    if num_fitting == 0:
        return -1
    drawn = next_random(sim) % num_fitting
    for slot in range(sim.num_window):
        if fits(sim, slot):
            if drawn == 0:
                return slot
            drawn -= 1
    return -1


@kernel
def backfill(sim):
    """EASY (Lifka 1995): the head of the queue has a reservation for when enough GPUs are free, and no other.

    Another job may start now if it ends before that, or leaves enough GPUs for the head at that time.
    """
    if sim.num_window == 0:
        return -1
    if fits(sim, 0):
        return 0
    head = job_in(sim, 0)
    fill_free_in(sim)
    free_in = float_list(sim.free_in, sim.num_gpus)
    starts_in_s = free_in[head.gpus - 1]
    num_free = head.gpus
    while num_free < sim.num_gpus and free_in[num_free] <= starts_in_s:
        num_free += 1
    num_spare = num_free - head.gpus
    for slot in range(1, sim.num_window):
        job = job_in(sim, slot)
        if fits(sim, slot) and (job.duration_s <= starts_in_s or job.gpus <= num_spare):
            return slot
    return -1


@kernel
def by_network(sim, policy):
    """The legal action with the highest logit."""
    entities = single_table(policy.entities, sim.room, policy.num_features)
    context = single_list(policy.context, policy.num_context)
    legal = bool_list(policy.legal, sim.room + 1)
    logits = single_list(policy.logits, sim.room + 1)
    observe(sim, policy.lookahead, entities, context, legal)
    network = network_at(policy.network, 0)
    forward(network, entities, context, sim.num_window, policy.scratch, policy.state, logits)
    best = 0
    for action in range(1, sim.num_window + 1):
        if legal[action] and logits[action] > logits[best]:
            best = action
    return best
