"""What happens on a replica: batches are formed, pass through its pipeline stages, and end.

A batch is formed when fewer batches are in flight than the pipeline has stages. It queues for each stage in
turn; when it leaves the last one, its requests have their tokens.
"""

from __future__ import annotations

from pointsman.compiled.jit import kernel
from pointsman.compiled.memory import float_list, float_table, int_list, long_list
from pointsman.routing.booking import (
    book_failed,
    book_finished,
    book_first_token,
    book_step,
    book_tokens,
    signals_of,
)
from pointsman.routing.records import NOBODY, ticket_at
from pointsman.routing.signals import OUTSTANDING
from pointsman.simulator.cost import NUM_COEFFICIENTS, NUM_GRID_STEPS, stage_time, value_at
from pointsman.simulator.events import (
    BATCH_END,
    REPLICA_SCHEDULE,
    STAGE_ARRIVAL,
    STAGE_END,
    STAGE_SCHEDULE,
    USER_ARRIVAL,
    drop_first,
    encode,
    push_later,
    push_now,
    replace_first,
)
from pointsman.simulator.gauges import update_gauges
from pointsman.simulator.measures import measure_finish, measure_first_token, measure_outstanding
from pointsman.simulator.power import limited_time
from pointsman.simulator.prefixes import let_go
from pointsman.simulator.queue import give_back, wake_router
from pointsman.simulator.schedulers import form_batch, num_sequences
from pointsman.simulator.sequences import (
    append_running,
    blocks_for,
    find_first_partial,
    forget_fresh,
    integrate_kv,
    last_token_at,
    record_interval,
    set_last_token,
    start_decoding,
    stop_decoding,
)
from pointsman.simulator.state import (
    ORCA,
    VLLM_V1,
    batch_at,
    cost_at,
    entry_at,
    log_at,
    replica_at,
    request_at,
    stage_at,
)

FAR = 1 << 62  # a step that never comes


@kernel
def replica_schedule(sim, k):
    replica = replica_at(sim.replicas, k)
    if not replica.is_alive:
        return
    while replica.num_in_flight < replica.num_stages:
        slot = 0
        while batch_at(replica.batches, slot).is_used:
            slot += 1
        if not start_batch(sim, k, slot):
            return
        push_now(sim, encode(STAGE_ARRIVAL, k, 0, slot))


@kernel
def start_batch(sim, k, slot):
    """Form a batch; False if there is nothing to run."""
    replica = replica_at(sim.replicas, k)
    is_engine_idle = replica.num_running == 0
    if not form_batch(sim, k, slot):
        plan_wake(sim, k)
        return False
    batch = batch_at(replica.batches, slot)
    batch.is_used = 1
    batch.formed_at = sim.now
    batch.stage_s = batch_time(sim, k, slot)
    if replica.is_power_limited:
        batch.stage_s = limited_time(sim, k, slot, batch.stage_s)
    if is_engine_idle:
        batch.stage_s += start_time(sim, k, slot)
    replica.step_began_at = sim.now
    replica.num_in_flight += 1
    for entry in range(batch.num_entries):
        request = request_at(sim.requests, entry_at(batch.entries, entry).request)
        if request.scheduled_at < 0.0:
            request.scheduled_at = sim.now
    return True


@kernel
def plan_wake(sim, k):
    """Nothing to run: look again when the next request has come through the API server."""
    replica = replica_at(sim.replicas, k)
    if replica.num_waiting == 0 or replica.is_wake_planned:
        return
    reached_at = request_at(sim.requests, replica.waiting_head).reached_at
    if reached_at > sim.now:
        replica.is_wake_planned = 1
        push_later(sim, reached_at, encode(REPLICA_SCHEDULE, k, 0, 0))
        sim.num_live += 1


@kernel
def wake_replica(sim, k):
    sim.num_live -= 1
    replica_at(sim.replicas, k).is_wake_planned = 0
    replica_schedule(sim, k)


@kernel
def start_time(sim, k, slot):
    """What a step takes longer because no other ran while it was prepared."""
    replica = replica_at(sim.replicas, k)
    batch = batch_at(replica.batches, slot)
    cost = cost_at(sim.costs, replica.cost)
    return value_at(float_list(cost.start_s, cost.num_start_s), batch.prefill_tokens + batch.num_decodes)


@kernel
def batch_time(sim, k, slot):
    replica = replica_at(sim.replicas, k)
    batch = batch_at(replica.batches, slot)
    cost = cost_at(sim.costs, replica.cost)
    return stage_time(
        cost.kind,
        float_list(cost.coefficients, NUM_COEFFICIENTS),
        float_list(cost.token_s, cost.num_token_s),
        float_list(cost.sequence_s, cost.num_sequence_s),
        float_table(cost.decode_s, cost.decode_rows, cost.decode_columns),
        float_table(cost.prefill_s, cost.prefill_rows, cost.prefill_columns),
        long_list(cost.grid, NUM_GRID_STEPS),
        batch.prefill_tokens,
        batch.num_decodes,
        batch.context_tokens,
        batch.pairs,
        num_sequences(batch),
        batch.kv_tokens,
        batch.squares,
    )


@kernel
def stage_arrival(sim, k, stage, slot):
    replica = replica_at(sim.replicas, k)
    state = stage_at(replica.stages, stage)
    int_list(state.queue, replica.num_stages)[state.num_queued] = slot
    state.num_queued += 1
    push_now(sim, encode(STAGE_SCHEDULE, k, stage, 0))


@kernel
def step_alone(sim, k):
    """End the batch of a single-stage replica and start the next, when nothing else happens at this instant.

    The same as the chain of events, without the queue: the batch's end is still the first in the heap and
    gives its place to the next one.
    """
    replica = replica_at(sim.replicas, k)
    stage = stage_at(replica.stages, 0)
    replica.busy_s += sim.now - stage.busy_since
    is_news = end_batch(sim, k, 0)
    stage.is_busy = start_batch(sim, k, 0)
    stage.busy_since = sim.now
    if stage.is_busy:
        duration = batch_at(replica.batches, 0).stage_s * replica.slowdown
        replace_first(sim, sim.now + duration, encode(STAGE_END, k, 0, 0))
    else:
        drop_first(sim)
        sim.num_live -= 1
    if is_news:
        wake_router(sim)


@kernel
def stage_schedule(sim, k, stage):
    replica = replica_at(sim.replicas, k)
    state = stage_at(replica.stages, stage)
    if state.is_busy or state.num_queued == 0:
        return
    queue = int_list(state.queue, replica.num_stages)
    slot = queue[0]
    state.num_queued -= 1
    for position in range(state.num_queued):
        queue[position] = queue[position + 1]
    state.is_busy = 1
    duration = batch_at(replica.batches, slot).stage_s * replica.slowdown
    state.busy_since = sim.now
    push_later(sim, sim.now + duration, encode(STAGE_END, k, stage, slot))
    sim.num_live += 1


@kernel
def stage_end(sim, k, stage, slot):
    replica = replica_at(sim.replicas, k)
    state = stage_at(replica.stages, stage)
    state.is_busy = 0
    replica.busy_s += (sim.now - state.busy_since) / replica.num_stages
    if replica.num_stages > 1:  # a single stage has nothing queued
        push_now(sim, encode(STAGE_SCHEDULE, k, stage, 0))
    if stage + 1 < replica.num_stages:
        push_now(sim, encode(STAGE_ARRIVAL, k, stage + 1, slot))
    else:
        push_now(sim, encode(BATCH_END, k, 0, slot))


@kernel
def batch_end(sim, k, slot):
    is_news = end_batch(sim, k, slot)
    push_now(sim, encode(REPLICA_SCHEDULE, k, 0, 0))
    # The router hears of it over the network: too late for the batch that is formed at this instant.
    if is_news:
        wake_router(sim)


@kernel
def hold_up_neighbours(sim, k):
    """Steps that run on the same card end later, by what this one took of the memory that they share."""
    j = replica_at(sim.replicas, k).next_on_card
    while j != k:
        neighbour = replica_at(sim.replicas, j)
        if stage_at(neighbour.stages, 0).is_busy:
            neighbour.owed_s += neighbour.neighbour_step_s * neighbour.slowdown
        j = neighbour.next_on_card


@kernel
def end_batch(sim, k, slot):
    """Hand out the batch's tokens; True if the router sees a first token or a finish."""
    replica = replica_at(sim.replicas, k)
    hold_up_neighbours(sim, k)
    batch = batch_at(replica.batches, slot)
    integrate_kv(sim, k)
    batch.is_used = 0
    replica.num_in_flight -= 1
    sim.num_batches += 1
    num_done = sim.num_completed + sim.num_outgrown
    num_tokens = 0
    is_step_of_all = batch.is_lazy and batch.num_decodes == replica.num_decoding
    sweeps_all = batch.is_lazy and replica.cache != 0 and has_short_answers(sim, k, slot)
    if batch.is_lazy and batch.num_decodes > 0:
        num_tokens = batch.num_decodes
        step_all(sim, k, sweeps_all)
    if is_step_of_all:
        replica.last_step_at = sim.now
    num_first_tokens = 0
    num_after_step = sim.num_completed + sim.num_outgrown
    for entry in range(batch.num_entries):
        i = entry_at(batch.entries, entry).request
        request_at(sim.requests, i).is_in_flight = 0
        if request_at(sim.requests, i).is_decoding:
            num_tokens += 1
            step_one(sim, k, i)
        else:
            ticket = ticket_at(sim.router.tickets, i)
            had_first_token = ticket.is_started
            num_tokens += prefill_step(sim, k, i, entry_at(batch.entries, entry).num_tokens, is_step_of_all)
            num_first_tokens += ticket.is_started - had_first_token
        if replica.scheduler != VLLM_V1 and is_here(sim, k, i):
            append_running(sim, k, i)
    if replica.scheduler == VLLM_V1:
        if sim.num_completed + sim.num_outgrown > (num_done if sweeps_all else num_after_step):
            sweep(sim, k)
        elif batch.num_entries > 0:
            find_first_partial(sim, k, replica.first_partial)
    if replica.api_s_per_stream > 0.0:
        replica.api_free_at = max(replica.api_free_at, sim.now) + replica.api_s_per_stream * num_tokens
    book_tokens(sim.router, k, num_tokens, sim.now)
    sim.num_decode_left -= num_tokens
    update_gauges(replica)
    if sim.num_logged_batches < sim.batch_log_capacity:
        log_batch(sim, k, slot)
    return num_first_tokens > 0 or sim.num_completed + sim.num_outgrown > num_done


@kernel
def has_short_answers(sim, k, slot):
    """Whether a request of a lazy batch ends with its first token. A cache gets blocks in the order of the
    running list, so that all who end with this batch must then be swept off it together.
    """
    batch = batch_at(replica_at(sim.replicas, k).batches, slot)
    for position in range(batch.num_entries):
        entry = entry_at(batch.entries, position)
        request = request_at(sim.requests, entry.request)
        if request.processed + entry.num_tokens + 1 == request.limit:
            return True
    return False


@kernel
def step_all(sim, k, sweeps_all):
    """Every decoding request of the replica got a token. `sweeps_all`: who ends stays on the running list."""
    replica = replica_at(sim.replicas, k)
    running = int_list(replica.running, sim.max_seqs)
    fresh = int_list(replica.fresh, sim.max_seqs)
    now = sim.now
    for position in range(replica.num_fresh):
        i = fresh[position]
        record_interval(sim, now - request_at(sim.requests, i).last_token_at, 1)
        request_at(sim.requests, i).is_fresh = 0
    num_even = replica.num_decoding - replica.num_fresh
    if num_even > 0:
        interval = now - replica.last_step_at
        record_interval(sim, interval, num_even)
        book_step(sim.router, k, interval)
    replica.num_fresh = 0
    replica.steps += 1
    replica.step_phase = (replica.step_phase if replica.step_phase > 0 else replica.block_size) - 1
    if replica.steps < replica.next_finish:
        return
    kept = 0
    replica.next_finish = FAR
    first_partial = NOBODY
    for position in range(replica.num_running):
        i = running[position]
        request = request_at(sim.requests, i)
        if not request.is_decoding:
            first_partial = kept if first_partial == NOBODY else first_partial
        else:
            steps_left = request.limit - request.processed - replica.steps
            if steps_left == 0:
                finish(sim, k, i)
                if not sweeps_all:
                    if replica.cache != 0:
                        let_go(sim, k, i, request.limit - 1, True)
                    continue
            else:
                replica.next_finish = min(replica.next_finish, replica.steps + steps_left)
        running[kept] = i
        kept += 1
    replica.num_running = kept
    replica.first_partial = kept if first_partial == NOBODY else first_partial


@kernel
def step_one(sim, k, i):
    """One decoding request got a token, others of the replica did not."""
    request = request_at(sim.requests, i)
    interval = sim.now - last_token_at(sim, k, i)
    record_interval(sim, interval, 1)
    book_step(sim.router, k, interval)
    set_last_token(sim, k, i)
    stop_decoding(sim, k, i)
    request.processed += 1
    start_decoding(sim, k, i)
    if request.processed + replica_at(sim.replicas, k).steps == request.limit:
        finish(sim, k, i)


@kernel
def prefill_step(sim, k, i, num_tokens, is_step_of_all):
    """Part of a prompt was processed; returns 1 if that brought the request a token."""
    replica = replica_at(sim.replicas, k)
    request = request_at(sim.requests, i)
    request.processed += num_tokens
    if request.processed < request.prefill:
        return 0
    request.processed += 1
    if replica.scheduler == VLLM_V1:
        replica.num_partial -= 1
    if not ticket_at(sim.router.tickets, i).is_started:
        book_first_token(sim.router, i, request.prefill, sim.now)
    if request.first_token_at < 0.0:
        measure_first_token(sim, i)
    else:
        record_interval(sim, sim.now - request.last_token_at, 1)
    if request.processed == request.limit:
        finish(sim, k, i)
        return 1
    start_decoding(sim, k, i)
    if is_step_of_all:
        request.last_token_at = sim.now
    else:
        set_last_token(sim, k, i)
    return 1


@kernel
def sweep(sim, k):
    """Take what finished off the running list, order kept; a cache gets the blocks in that order."""
    replica = replica_at(sim.replicas, k)
    running = int_list(replica.running, sim.max_seqs)
    kept = 0
    for position in range(replica.num_running):
        i = running[position]
        if is_here(sim, k, i):
            running[kept] = i
            kept += 1
        elif replica.cache != 0:
            let_go(sim, k, i, request_at(sim.requests, i).limit - 1, True)
    replica.num_running = kept
    find_first_partial(sim, k, 0)


@kernel
def finish(sim, k, i):
    """The replica is done with the request: it has all its tokens, or has outgrown the replica's memory."""
    replica = replica_at(sim.replicas, k)
    request = request_at(sim.requests, i)
    forget_fresh(sim, k, i)
    if request.is_decoding:
        stop_decoding(sim, k, i)
    if replica.scheduler == ORCA:
        replica.used_blocks -= replica.blocks_per_seq
    elif replica.cache == 0:
        replica.used_blocks -= blocks_for(request.limit - 1, replica.block_size)
    replica.num_holding -= 1
    replica.sum_decode -= request.num_decode
    outstanding = signals_of(sim.router)[OUTSTANDING, k]
    num_output = request.limit - request.num_prefill
    if num_output < request.num_decode:
        # The server gives up. The router sends it elsewhere, now knowing that it needs more.
        book_failed(sim.router, i, num_output)
        measure_outstanding(sim, k, outstanding)
        sim.num_decode_left += num_output
        sim.num_outgrown += 1
        request.last_token_at = sim.now
        request.seen = max(request.limit, replica.max_tokens)
        give_back(sim, k, i)
        return
    request.completed_at = sim.now
    sim.num_completed += 1
    book_finished(sim.router, i, num_output, request.hit_tokens, sim.now)
    measure_outstanding(sim, k, outstanding)
    measure_finish(sim, i)
    if sim.num_users > 0 and sim.next_arrival < sim.num_requests:
        # Closed loop: the table holds each request's pause until its user is free.
        follower = sim.next_arrival
        sim.next_arrival += 1
        pause = request_at(sim.requests, follower).arrived_at
        push_later(sim, sim.now + pause, encode(USER_ARRIVAL, follower, 0, 0))
        sim.num_live += 1
    if sim.num_later_turns > 0:
        follower = int_list(sim.next_turn, sim.num_requests)[i]
        if follower != NOBODY:
            pause = request_at(sim.requests, follower).arrived_at
            push_later(sim, sim.now + pause, encode(USER_ARRIVAL, follower, 0, 0))
            sim.num_live += 1


@kernel
def is_here(sim, k, i):
    """Whether request i is still replica k's."""
    request = request_at(sim.requests, i)
    return request.completed_at < 0.0 and request.replica == k


@kernel
def log_batch(sim, k, slot):
    replica = replica_at(sim.replicas, k)
    batch = batch_at(replica.batches, slot)
    row = log_at(sim.batch_log, sim.num_logged_batches)
    row.replica = k
    row.num_seqs = num_sequences(batch)
    row.formed_at = batch.formed_at
    row.ended_at = sim.now
    row.prefill_tokens = batch.prefill_tokens
    row.num_decodes = batch.num_decodes
    row.used_blocks = replica_at(sim.replicas, k).used_blocks
    sim.num_logged_batches += 1
