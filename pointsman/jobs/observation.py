"""What a policy sees of a GPU cluster: the jobs in the window, the GPUs, the queue and the clock.

The features marked `original` are those of the published problem; `features: original` shows these alone.
Where jobs have deadlines, the others are joined by those of `DEADLINE_FEATURES`.
All the others follow from what any scheduler knows: the jobs that wait and their durations, the jobs that
run, how many jobs an episode has, and when it is cut off. What is yet to arrive only a critic may see.

Look-ahead, G numbers, by mode: `per_gpu` the time until each GPU is free; `sorted` the same, soonest first;
`cdf` the share of GPUs free by each of G evenly spaced times; `off` zeros. A policy that was trained with
another number of GPUs gets as many numbers as it knows, L: the times until 1/L, 2/L … of the GPUs are free,
the shares free by each of L times. Only `per_gpu` cannot be told in another number.
"""

from __future__ import annotations

import numpy as np

from pointsman.compiled.jit import kernel
from pointsman.compiled.memory import float_list, int_list, single_list
from pointsman.inference.space import EntitySpace, Feature
from pointsman.jobs.kernel import can_meet, fits, ideal_return, job_in, running_work, wide_and_short
from pointsman.jobs.state import NOBODY, job_at, running_at
from pointsman.jobs.table import MAX_PRIORITY, Floats

OFF, PER_GPU, SORTED, CDF = range(4)
LOOKAHEADS = {"off": OFF, "per_gpu": PER_GPU, "sorted": SORTED, "cdf": CDF}

# D is the longest duration, G the number of GPUs.
ORIGINAL_JOB_FEATURES = (
    Feature("duration", "D", "duration", "how long it runs"),
    Feature("priority", "of 10", "priority", "10 is most urgent; the reward does not know it"),
    Feature("gpus", "of G", "width", "GPUs that it needs at once"),
    Feature("wait", "of the horizon", "wait", "time since it arrived"),
)
MORE_JOB_FEATURES = (
    Feature("log_duration", "1 + log10(D) / 3", "duration", "how long it runs"),
    Feature("log_work", "1 + log10(G D) / 4", "width", "GPUs times duration"),
    Feature("missing", "of G", "fit", "idle GPUs that it still needs to start; -1 if it needs none"),
    Feature("spare", "of G", "fit", "GPUs idle once it has started; below 0 if it does not fit"),
    Feature("fills", "0 or 1", "fit", "it takes all GPUs that are idle"),
    Feature("start_in", "D", "fit", "time until enough GPUs are free, if nothing else starts"),
    Feature("outlasts_next", "-1 to 1", "fit", "its end against the next one: difference over sum"),
    Feature("outlasts_last", "-1 to 1", "fit", "its end against the last one of the running jobs"),
    Feature("wider", "share", "rank", "jobs of the window that need more GPUs"),
    Feature("longer", "share", "rank", "jobs of the window that run longer"),
)
DEADLINE_FEATURES = (
    Feature("due", "0 or 1", "deadline", "it has a deadline, and meets it if it starts now"),
    Feature(
        "slack", "-1 to 1", "deadline", "time until it must start: over itself plus the duration; none: 1"
    ),
    Feature("sooner", "share", "deadline", "jobs of the window that are due sooner"),
)
# The last of all: policies that were trained before there was such a thing do not see it, and still serve.
RULE_FEATURES = (
    Feature("rule", "-1 - score/4", "rule", "how little `wide-and-short` wants it; nothing would have 0"),
)
ORIGINAL_CLUSTER_FEATURES = (
    Feature("idle", "share", "gpus", "GPUs that are idle"),
    Feature("busy", "share", "gpus", "GPUs that are busy"),
)
MORE_CLUSTER_FEATURES = (
    Feature("running", "of G", "gpus", "jobs that run"),
    Feature("next_end", "D", "gpus", "time until the next job ends"),
    Feature("next_gpus", "of G", "gpus", "GPUs that it frees"),
    Feature("running_work", "G D", "gpus", "what the running jobs still need"),
    Feature("waiting", "log2(1 + jobs/16)", "queue", "jobs that wait"),
    Feature("beyond", "log2(1 + jobs/16)", "queue", "of these, beyond the window"),
    Feature("waiting_work", "log2(1 + G D)", "queue", "GPUs times duration of all that wait"),
    Feature("fitting", "share", "queue", "jobs of the window that fit"),
    Feature("arrived", "share", "clock", "jobs of the episode that have arrived"),
    Feature("time_left", "of the horizon", "clock", "until the episode is cut off"),
    Feature("stands_still", "0 or 1", "clock", "nothing runs or is to arrive: time moves on if a job starts"),
)
PRIVILEGED_FEATURES = (
    Feature("to_arrive", "share", "oracle", "work of the episode that is yet to arrive"),
    Feature("available", "share", "oracle", "work of the episode that waits or runs"),
    Feature("unfinished", "share", "oracle", "work of all jobs that have not ended"),
    Feature("ideal", "reward", "oracle", "return still to come if all GPUs were busy from now on"),
    Feature("next_arrival", "D", "oracle", "time until the next job arrives"),
    Feature("length", "log2(1 + D)", "oracle", "the episode's horizon"),
)

NUM_ORIGINAL = len(ORIGINAL_JOB_FEATURES)
NUM_WITHOUT_DEADLINES = NUM_ORIGINAL + len(MORE_JOB_FEATURES)
NUM_WITH_DEADLINES = NUM_WITHOUT_DEADLINES + len(DEADLINE_FEATURES)
NUM_ORIGINAL_CLUSTER, NUM_MORE_CLUSTER = len(ORIGINAL_CLUSTER_FEATURES), len(MORE_CLUSTER_FEATURES)
LOOKAHEAD = "lookahead"
ABOVE_NOTHING = 4.0  # scores of wide-and-short are from -0.5 to 1; in `rule` this counts as 1


def job_space(num_lookahead: int, window: int, has_all: bool, has_deadlines: bool = False) -> EntitySpace:
    """`num_lookahead`: one for each GPU it is trained with; `has_all`: more than the original features.

    `has_deadlines`: of these, also what deadlines say.
    """
    lookahead = tuple(
        Feature(f"{LOOKAHEAD}{k}", "D; cdf: share", "gpus", "when GPUs are free; see the mode")
        for k in range(num_lookahead)
    )
    deadlines = DEADLINE_FEATURES if has_deadlines else ()
    more_features = MORE_JOB_FEATURES + deadlines + RULE_FEATURES if has_all else ()
    return EntitySpace(
        window,
        ORIGINAL_JOB_FEATURES + more_features,
        lookahead + ORIGINAL_CLUSTER_FEATURES + (MORE_CLUSTER_FEATURES if has_all else ()),
        PRIVILEGED_FEATURES,
    )


def lookahead_size(space: EntitySpace) -> int:
    """How many GPUs a policy of this space was trained with."""
    return sum(feature.name.startswith(LOOKAHEAD) for feature in space.context_features)


def sees_deadlines(space: EntitySpace) -> bool:
    return set(DEADLINE_FEATURES) <= set(space.entity_features)


def log_duration(share: Floats) -> Floats:
    return np.asarray(np.maximum(0.0, 1.0 + np.log10(share) / 3.0))


def log_work(share: Floats) -> Floats:
    return np.asarray(np.maximum(0.0, 1.0 + np.log10(share) / 4.0))


@kernel
def observe(sim, lookahead, entities, context, legal):
    """entities [K, F], context [C] float32, legal [K + 1]. Rows beyond the window's jobs become 0."""
    fill_free_in(sim)
    num_features = entities.shape[1]
    for slot in range(sim.num_window):
        job = job_in(sim, slot)
        entities[slot, 0] = job.duration_s / sim.max_duration_s
        entities[slot, 1] = job.priority / MAX_PRIORITY
        entities[slot, 2] = job.gpus / sim.num_gpus
        entities[slot, 3] = (sim.now - job.arrived_at) / sim.horizon_s
        legal[slot + 1] = fits(sim, slot)
    for slot in range(sim.num_window, sim.room):
        for j in range(num_features):
            entities[slot, j] = 0.0
        legal[slot + 1] = False
    legal[0] = True
    has_all = num_features > NUM_ORIGINAL
    size = context.shape[0] - NUM_ORIGINAL_CLUSTER - (NUM_MORE_CLUSTER if has_all else 0)
    fill_lookahead(sim, lookahead, context, size)
    context[size] = sim.num_idle / sim.num_gpus
    context[size + 1] = 1.0 - sim.num_idle / sim.num_gpus
    if has_all:
        fill_more(sim, entities, context, size + NUM_ORIGINAL_CLUSTER)
    if num_features >= NUM_WITH_DEADLINES:
        fill_deadlines(sim, entities)
    if num_features == NUM_WITHOUT_DEADLINES + 1 or num_features == NUM_WITH_DEADLINES + 1:
        for slot in range(sim.num_window):
            entities[slot, num_features - 1] = -1.0 - wide_and_short(sim, job_in(sim, slot)) / ABOVE_NOTHING


@kernel
def fill_free_in(sim):
    """free_in[k]: time until k + 1 GPUs are free, if nothing starts."""
    free_in = float_list(sim.free_in, sim.num_gpus)
    k = sim.num_idle
    for i in range(k):
        free_in[i] = 0.0
    for i in range(sim.num_running):
        one = running_at(sim.running, i)
        for _ in range(one.gpus):
            free_in[k] = one.ends_at - sim.now
            k += 1


@kernel
def fill_lookahead(sim, mode, context, size):
    """`per_gpu` wants `size` to be the number of GPUs."""
    num_gpus, longest_s = sim.num_gpus, sim.max_duration_s
    free_in = float_list(sim.free_in, num_gpus)
    gpu_job = int_list(sim.gpu_job, num_gpus)
    num_free = 0
    for k in range(size):
        context[k] = 0.0
        if mode == SORTED:
            share = ((k + 1) * num_gpus + size - 1) // size  # of the GPUs, rounded up
            context[k] = free_in[share - 1] / longest_s
        elif mode == PER_GPU and gpu_job[k] != NOBODY:
            job = job_at(sim.jobs, gpu_job[k])
            context[k] = (job.started_at + job.duration_s - sim.now) / longest_s
        elif mode == CDF:
            while num_free < num_gpus and free_in[num_free] <= longest_s * (k + 1) / size:
                num_free += 1
            context[k] = num_free / num_gpus


@kernel
def fill_more(sim, entities, context, first):
    """What the original observation leaves to the network to find out, or does not tell.

    `first`: where it begins in the context.
    """
    num_gpus, num_jobs, longest_s = sim.num_gpus, sim.num_window, sim.max_duration_s
    free_in = float_list(sim.free_in, num_gpus)
    next_s = free_in[sim.num_idle] if sim.num_running > 0 else 0.0
    last_s = free_in[num_gpus - 1]
    num_fitting = rank(sim)
    durations = single_list(sim.durations, sim.room)
    num_wider = int_list(sim.wider, num_gpus + 1)
    for slot in range(num_jobs):
        job = job_in(sim, slot)
        is_fitting = job.gpus <= sim.num_idle
        duration = durations[slot]
        num_longer = 0
        for other in range(num_jobs):
            num_longer += durations[other] > duration
        entities[slot, 4] = job.log_duration
        entities[slot, 5] = job.log_work
        entities[slot, 6] = -1.0 if is_fitting else (job.gpus - sim.num_idle) / num_gpus
        entities[slot, 7] = (sim.num_idle - job.gpus) / num_gpus
        entities[slot, 8] = job.gpus == sim.num_idle
        entities[slot, 9] = free_in[job.gpus - 1] / longest_s
        entities[slot, 10] = (job.duration_s - next_s) / (job.duration_s + next_s)
        entities[slot, 11] = (job.duration_s - last_s) / (job.duration_s + last_s)
        entities[slot, 12] = num_wider[job.gpus] / num_jobs
        entities[slot, 13] = num_longer / num_jobs
    num_waiting = num_jobs + sim.num_arrived - sim.num_entered
    context[first] = sim.num_running / num_gpus
    context[first + 1] = next_s / longest_s
    context[first + 2] = running_at(sim.running, 0).gpus / num_gpus if sim.num_running > 0 else 0.0
    context[first + 3] = running_work(sim) / (num_gpus * longest_s)
    context[first + 4] = np.log2(1.0 + num_waiting / 16.0)
    context[first + 5] = np.log2(1.0 + (num_waiting - num_jobs) / 16.0)
    context[first + 6] = np.log2(1.0 + max(0.0, sim.waiting_work) / (num_gpus * longest_s))
    context[first + 7] = num_fitting / max(num_jobs, 1)
    context[first + 8] = sim.num_arrived / sim.num_jobs
    context[first + 9] = max(0.0, 1.0 - sim.now / sim.horizon_s)
    context[first + 10] = sim.num_running == 0 and sim.num_arrived == sim.num_jobs


@kernel
def fill_deadlines(sim, entities):
    num_jobs = sim.num_window
    due_at = float_list(sim.due_at, sim.room)
    for slot in range(num_jobs):
        job = job_in(sim, slot)
        due_at[slot] = job.deadline_at if can_meet(sim, job) else np.inf
    for slot in range(num_jobs):
        job = job_in(sim, slot)
        slack_s = job.deadline_at - sim.now - job.duration_s
        num_sooner = 0
        for other in range(num_jobs):
            num_sooner += due_at[other] < due_at[slot]
        entities[slot, 14] = due_at[slot] < np.inf
        entities[slot, 15] = slack_s / (abs(slack_s) + job.duration_s) if slack_s < np.inf else 1.0
        entities[slot, 16] = num_sooner / num_jobs


@kernel
def rank(sim):
    """Fill `durations` and `wider`, by number of GPUs how many jobs need more; returns how many fit."""
    durations = single_list(sim.durations, sim.room)
    num_wider = int_list(sim.wider, sim.num_gpus + 1)
    for k in range(sim.num_gpus + 1):
        num_wider[k] = 0
    num_fitting = 0
    for slot in range(sim.num_window):
        job = job_in(sim, slot)
        durations[slot] = job.duration_s
        num_wider[job.gpus - 1] += 1
        num_fitting += job.gpus <= sim.num_idle
    for k in range(sim.num_gpus - 1, -1, -1):
        num_wider[k] += num_wider[k + 1]
    return num_fitting


@kernel
def fill_privileged(sim, out):
    total, longest_s = sim.total_work, sim.max_duration_s
    next_arrival_s = 0.0
    if sim.num_arrived < sim.num_jobs:
        next_arrival_s = job_at(sim.jobs, sim.num_arrived).arrived_at - sim.now
    out[0] = max(0.0, 1.0 - sim.arrived_work / total)
    out[1] = (sim.waiting_work + running_work(sim)) / total
    out[2] = 1.0 - sim.completed_work / total
    out[3] = ideal_return(sim)
    out[4] = next_arrival_s / longest_s
    out[5] = np.log2(1.0 + sim.horizon_s / longest_s)
