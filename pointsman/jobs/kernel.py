"""A GPU cluster, compiled: start a job or none, move on by an event, an arrival or a completion, and pay.

One job may be started between two events. So a cluster that runs few jobs when arrivals are over never runs
more of them: each completion lets one start. What a policy has to plan is which jobs run beside each other.
"""

from __future__ import annotations

import numpy as np

from pointsman.compiled.jit import kernel
from pointsman.compiled.memory import int_list
from pointsman.jobs.state import CUT_OFF, FINISHED, GOING_ON, NOBODY, job_at, running_at


@kernel
def begin(sim):
    """The start of an episode. Nothing has arrived: a job that does at 0 is an event, as any other."""
    sim.now = 0.0
    sim.num_idle = sim.num_gpus
    sim.num_running = 0
    sim.num_window = 0
    sim.num_entered = 0
    sim.num_arrived = 0
    sim.num_completed = 0
    sim.num_steps = 0
    sim.waiting_work = 0.0
    sim.arrived_work = 0.0
    sim.completed_work = 0.0
    sim.status = GOING_ON
    sim.episode_return = 0.0
    sim.num_missed = 0
    sim.num_choices = 0
    sim.num_noops = 0
    sim.num_illegal = 0
    gpu_job = int_list(sim.gpu_job, sim.num_gpus)
    for k in range(sim.num_gpus):
        gpu_job[k] = NOBODY


@kernel
def step(sim, action):
    """Carry out an action: 0 for nothing, k for slot k - 1 of the window; an illegal one counts as 0."""
    is_legal = action == 0 or (0 < action <= sim.num_window and fits(sim, action - 1))
    starts = is_legal and action != 0
    could_start = starts or first_fitting(sim) >= 0
    sim.is_illegal = not is_legal
    if starts:
        start(sim, action - 1)
    finished_work = advance(sim)
    sim.num_steps += 1
    sim.num_choices += could_start
    sim.num_noops += could_start and not starts
    sim.num_illegal += not is_legal
    pay(sim, finished_work, could_start and not starts)


@kernel
def decide(sim, action, skips_forced):
    """A step, and if wanted all that follow in which no job can be started anyway.

    `shaping`, which is no part of the return, is how the ideal return has changed: rewards with it lead to
    the same best policy (Ng et al. 1999), and tell at once what a decision wastes.
    """
    since = sim.now
    ideal = ideal_return(sim)
    sim.completed = 0.0
    sim.holding = 0.0
    sim.noop = 0.0
    sim.finished = 0.0
    sim.unfinished = 0.0
    sim.missed = 0.0
    step(sim, action)
    is_illegal = sim.is_illegal
    while skips_forced and sim.status == GOING_ON and first_fitting(sim) < 0:
        step(sim, 0)
    sim.is_illegal = is_illegal
    sim.elapsed_s = sim.now - since
    sim.shaping = ideal_return(sim) - ideal


@kernel
def fits(sim, slot):
    """Whether enough GPUs are idle for the job in this slot."""
    return job_in(sim, slot).gpus <= sim.num_idle


@kernel
def job_in(sim, slot):
    return job_at(sim.jobs, int_list(sim.window, sim.room)[slot])


@kernel
def wide_and_short(sim, job):
    """The score of the best simple rule: wide jobs first, of those the short ones."""
    return job.gpus / sim.num_gpus - 0.5 * job.duration_s / sim.max_duration_s


@kernel
def first_fitting(sim):
    """The first slot whose job can be started; -1 if there is none."""
    for slot in range(sim.num_window):
        if fits(sim, slot):
            return slot
    return -1


@kernel
def start(sim, slot):
    window = int_list(sim.window, sim.room)
    i = window[slot]
    job = job_at(sim.jobs, i)
    sim.num_window -= 1
    for k in range(slot, sim.num_window):
        window[k] = window[k + 1]
    enter_window(sim)
    sim.waiting_work -= job.work
    job.started_at = sim.now
    sim.num_idle -= job.gpus
    gpu_job = int_list(sim.gpu_job, sim.num_gpus)
    num_left = job.gpus
    for k in range(sim.num_gpus):
        if num_left > 0 and gpu_job[k] == NOBODY:
            gpu_job[k] = i
            num_left -= 1
    insert_running(sim, i, sim.now + job.duration_s, job.gpus)


@kernel
def insert_running(sim, i, ends_at, gpus):
    """Keep `running` in the order in which jobs end; of those that end together, the first started first."""
    k = sim.num_running
    while k > 0 and running_at(sim.running, k - 1).ends_at > ends_at:
        move_running(sim, k - 1, k)
        k -= 1
    new = running_at(sim.running, k)
    new.ends_at = ends_at
    new.gpus = gpus
    new.job = i
    sim.num_running += 1


@kernel
def move_running(sim, source, target):
    one, other = running_at(sim.running, source), running_at(sim.running, target)
    other.ends_at = one.ends_at
    other.gpus = one.gpus
    other.job = one.job


@kernel
def advance(sim):
    """On to the next event, if there is one; returns the work of the job that it completes.

    Where both fall together, the completion comes first.
    """
    sim.elapsed_s = 0.0
    is_arrival = sim.num_arrived < sim.num_jobs
    if sim.num_running == 0 and not is_arrival:
        return 0.0
    at = job_at(sim.jobs, sim.num_arrived).arrived_at if is_arrival else 0.0
    if sim.num_running > 0:
        ends_at = running_at(sim.running, 0).ends_at
        if not is_arrival or ends_at <= at:
            at = ends_at
            is_arrival = False
    sim.elapsed_s = at - sim.now
    sim.now = at
    if is_arrival:
        arrive(sim)
        return 0.0
    return complete(sim)


@kernel
def arrive(sim):
    work = job_at(sim.jobs, sim.num_arrived).work
    sim.waiting_work += work
    sim.arrived_work += work
    sim.num_arrived += 1
    enter_window(sim)


@kernel
def enter_window(sim):
    """Let the next of the queue in, if there is one and room for it."""
    if sim.num_window < sim.room and sim.num_entered < sim.num_arrived:
        int_list(sim.window, sim.room)[sim.num_window] = sim.num_entered
        sim.num_window += 1
        sim.num_entered += 1


@kernel
def complete(sim):
    """The first of `running` ends; returns its work."""
    ended = running_at(sim.running, 0)
    i = ended.job
    sim.num_idle += ended.gpus
    gpu_job = int_list(sim.gpu_job, sim.num_gpus)
    for k in range(sim.num_gpus):
        if gpu_job[k] == i:
            gpu_job[k] = NOBODY
    sim.num_running -= 1
    for k in range(sim.num_running):
        move_running(sim, k + 1, k)
    sim.num_completed += 1
    work = job_at(sim.jobs, i).work
    sim.completed_work += work
    return work


@kernel
def running_work(sim):
    """GPU seconds that the running jobs still need."""
    total = 0.0
    for k in range(sim.num_running):
        one = running_at(sim.running, k)
        total += (one.ends_at - sim.now) * one.gpus
    return total


@kernel
def ideal_return(sim):
    """What the episode would still return if all GPUs were busy from now on; 0 after its end."""
    if sim.status != GOING_ON:
        return 0.0
    left = (sim.total_work - sim.arrived_work + sim.waiting_work + running_work(sim)) / sim.total_work
    # Perfectly packed, it takes this share of the horizon, and is half of itself on average meanwhile.
    packed = left * sim.total_work / (sim.num_gpus * sim.horizon_s)
    unfinished = 1.0 - sim.completed_work / sim.total_work
    return unfinished - 0.5 * packed * left + max(0.0, 1.0 - sim.now / sim.horizon_s - packed)


@kernel
def pay(sim, finished_work, is_avoidable):
    """Add to the terms of the reward, in shares of the episode's work and of its horizon.

    completed: work of the job that ended. holding: time that passed, times the work that is available,
    waiting or running, after it. noop: the available work, at a price, if nothing was started although a
    job fits. At the end, finished: time left, if all jobs are done; unfinished: work of those that are not.
    missed: deadlines that can no longer be met, in shares of all there are, at a price.
    """
    total = sim.total_work
    available = (sim.waiting_work + running_work(sim)) / total
    completed = finished_work / total
    holding = -sim.elapsed_s / sim.horizon_s * available
    noop = -sim.noop_price * available if is_avoidable else 0.0
    finished = 0.0
    unfinished = 0.0
    if sim.num_completed == sim.num_jobs:
        sim.status = FINISHED
        finished = max(0.0, 1.0 - sim.now / sim.horizon_s)
    elif sim.now >= sim.horizon_s or sim.num_steps >= sim.max_steps:
        sim.status = CUT_OFF
        unfinished = -(1.0 - sim.completed_work / total)
    missed = 0.0
    if sim.num_deadlines > 0:
        num_missed = miss_deadlines(sim)
        sim.num_missed += num_missed
        missed = -sim.deadline_price * num_missed / sim.num_deadlines
    sim.completed += completed
    sim.holding += holding
    sim.noop += noop
    sim.finished += finished
    sim.unfinished += unfinished
    sim.missed += missed
    sim.episode_return += completed + holding + noop + finished + unfinished + missed


@kernel
def miss_deadlines(sim):
    """Mark the jobs that wait and can no longer end in time; returns how many are new.

    Once a job has started, its end is known: it was marked before, or never will be. At the cut-off all that
    has not started is too late.
    """
    num_missed = 0
    if sim.status == CUT_OFF:
        for i in range(sim.num_jobs):
            num_missed += misses(sim, job_at(sim.jobs, i))
        return num_missed
    for slot in range(sim.num_window):
        num_missed += misses(sim, job_in(sim, slot))
    for i in range(sim.num_entered, sim.num_arrived):
        num_missed += misses(sim, job_at(sim.jobs, i))
    return num_missed


@kernel
def misses(sim, job):
    """Whether the job becomes too late now."""
    if job.is_missed or job.started_at >= 0.0 or job.deadline_at == np.inf:
        return False
    job.is_missed = sim.status == CUT_OFF or not can_meet(sim, job)
    return job.is_missed != 0


@kernel
def can_meet(sim, job):
    """Whether the job would end by its deadline if it started now."""
    return sim.now + job.duration_s <= job.deadline_at
