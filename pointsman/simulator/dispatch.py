"""The router's side of the simulation: its decisions, and planned changes to the cluster.

The router decides about the next request in its queue: the oldest, unless smaller ones go first (queue.py).
Action 0 holds it until the next event the router can see (arrival, first token, finish, scrape, timer);
action k sends it to replica k - 1. Requests behind a held one wait with it. A request that was held for
`max_hold_s` must be sent.
"""

from __future__ import annotations

from pointsman.compiled.jit import kernel
from pointsman.compiled.memory import int_list
from pointsman.routing.booking import book_accepting, book_lost_all, book_sent, signals_of
from pointsman.routing.legality import can_anyone_take, prepare
from pointsman.routing.records import NEVER, UNKNOWN
from pointsman.routing.signals import GENERATED_TOKENS, OUTSTANDING
from pointsman.simulator.events import (
    HOLD_TIMER,
    REPLICA_SCHEDULE,
    encode,
    forget_stage_ends,
    push_later,
    push_now,
)
from pointsman.simulator.gauges import update_gauges
from pointsman.simulator.measures import integrate_load, measure_arrival, measure_outstanding
from pointsman.simulator.prefixes import forget_holding, lose_cache
from pointsman.simulator.queue import find_head, give_back, pop_queue, push_queue, wake_router
from pointsman.simulator.replica import FAR
from pointsman.simulator.sequences import integrate_kv, pop_waiting, push_waiting
from pointsman.simulator.state import (
    DRAIN,
    FAIL,
    JOIN,
    SLOW,
    VLLM_V1,
    batch_at,
    entry_at,
    line_at,
    prefix_at,
    replica_at,
    request_at,
    stage_at,
)


@kernel
def arrive(sim, i):
    measure_arrival(sim, i)
    push_queue(sim, i)
    wake_router(sim)


@kernel
def fill_ask(sim):
    """The router asks about the next request in its queue; of that it knows what an API call says."""
    find_head(sim)
    request = request_at(sim.requests, sim.queue_head)
    line = line_at(sim.lines, sim.next_line)
    ask = sim.ask
    ask.arrived_at = request.arrived_at
    ask.hold_until = line.hold_until if line.held_request == sim.queue_head else NEVER
    ask.prompt_tokens = request.num_prefill
    ask.max_tokens = UNKNOWN
    ask.seen_tokens = request.seen
    ask.session = request.session
    if sim.prefixes != 0:
        prefix = prefix_at(sim.prefixes, sim.queue_head)
        ask.links = prefix.links
        ask.num_links = prefix.num_links
        ask.answer_key = prefix.answer_key
    prepare(sim.router, ask, sim.now)


@kernel
def act(sim, action):
    """Carry out a decision about the next request of the queue."""
    sim.num_decisions += 1
    if action == 0:
        line = line_at(sim.lines, sim.next_line)
        line.held_request = sim.queue_head
        line.hold_until = sim.ask.hold_until
        hold(sim)
        return
    k = action - 1
    i = pop_queue(sim)
    request = request_at(sim.requests, i)
    replica = replica_at(sim.replicas, k)
    request.replica = k
    request.limit = request.num_prefill + request.num_decode
    if request.limit > replica.max_tokens:
        # The last token is not kept, so even a prompt that fills the memory brings one.
        request.limit = max(replica.give_up_tokens, request.num_prefill + 1)
    if request.dispatched_at < 0.0 and sim.now > request.arrived_at:
        sim.num_held += 1
        sim.held_s += sim.now - request.arrived_at
    request.dispatched_at = sim.now
    replica.num_sent += 1
    replica.sum_decode += request.num_decode
    pass_api_server(sim, k, i)
    outstanding = signals_of(sim.router)[OUTSTANDING, k]
    ask = sim.ask
    book_sent(
        sim.router,
        k,
        i,
        request.num_prefill,
        ask.expected_output,
        ask.links,
        ask.num_links,
        ask.answer_key,
        sim.now,
    )
    measure_outstanding(sim, k, outstanding)
    push_waiting(sim, k, i)
    int_list(sim.touched, sim.router.num_replicas + 1)[sim.num_touched] = k
    sim.num_touched += 1
    if sim.num_touched > sim.router.num_replicas:
        compact_touched(sim)


@kernel
def pass_api_server(sim, k, i):
    """Note when the engine gets the request. Requests do not overtake each other on the way.

    The API server is one process. A request waits until the tokens of earlier steps are handed out, and its
    first token will be handed out behind those of the answers that stream beside it.
    """
    replica = replica_at(sim.replicas, k)
    request = request_at(sim.requests, i)
    on_the_way_s = replica.api_s + replica.api_s_per_token * request.num_prefill
    on_the_way_s += replica.api_s_per_stream * replica.num_decoding
    on_the_way_s += max(0.0, replica.api_free_at - sim.now)
    replica.reached_at = max(replica.reached_at, sim.now + on_the_way_s)
    request.reached_at = replica.reached_at


@kernel
def hold(sim):
    end_decisions(sim)
    if not sim.is_timer_planned and can_anyone_take(sim.router, sim.ask):
        sim.is_timer_planned = 1
        push_later(sim, sim.now + sim.hold_timer_s, encode(HOLD_TIMER, 0, 0, 0))


@kernel
def set_accepting(sim, k, is_accepting):
    integrate_load(sim)
    replica_at(sim.replicas, k).is_accepting = is_accepting
    book_accepting(sim.router, k, is_accepting)


@kernel
def compact_touched(sim):
    """Sort the touched replicas and drop repetitions."""
    touched = int_list(sim.touched, sim.num_touched)
    kept = 0
    for position in range(sim.num_touched):
        k = touched[position]
        hole = kept
        while hole > 0 and touched[hole - 1] > k:
            hole -= 1
        if hole > 0 and touched[hole - 1] == k:
            continue
        for later in range(kept, hole, -1):
            touched[later] = touched[later - 1]
        touched[hole] = k
        kept += 1
    sim.num_touched = kept


@kernel
def end_decisions(sim):
    sim.is_deciding = 0
    if sim.num_touched > 1:
        compact_touched(sim)
    touched = int_list(sim.touched, sim.num_touched)
    for position in range(sim.num_touched):
        push_now(sim, encode(REPLICA_SCHEDULE, touched[position], 0, 0))
    sim.num_touched = 0


@kernel
def planned_event(sim, kind, k, value):
    replica = replica_at(sim.replicas, k)
    if kind == SLOW:
        replica.slowdown = value
    elif kind == DRAIN:
        set_accepting(sim, k, 0)
    elif kind == JOIN:
        replica.is_alive = 1
        set_accepting(sim, k, 1)
        wake_router(sim)
    elif kind == FAIL and replica.is_alive:
        fail(sim, k)
        wake_router(sim)


@kernel
def fail(sim, k):
    """The replica dies. Its requests return to the router's queue and start from scratch."""
    replica = replica_at(sim.replicas, k)
    running = int_list(replica.running, sim.max_seqs)
    phase_count = int_list(replica.phase_count, replica.block_size)
    set_accepting(sim, k, 0)
    replica.is_alive = 0
    for position in range(replica.num_running):
        give_back(sim, k, running[position])
        if replica.cache != 0:
            forget_holding(prefix_at(sim.prefixes, running[position]), True)
    while replica.num_waiting > 0:
        give_back(sim, k, pop_waiting(sim, k))
    for slot in range(replica.num_stages):
        batch = batch_at(replica.batches, slot)
        if batch.is_used and replica.scheduler != VLLM_V1:  # vllm-v1 keeps them on the running list
            for entry in range(batch.num_entries):
                give_back(sim, k, entry_at(batch.entries, entry).request)
        batch.is_used = 0
        stage = stage_at(replica.stages, slot)
        if stage.is_busy:
            replica.busy_s += (sim.now - stage.busy_since) / replica.num_stages
        stage.is_busy = 0
        stage.num_queued = 0
    forget_stage_ends(sim, k)
    replica.owed_s = 0.0
    outstanding = signals_of(sim.router)[OUTSTANDING, k]
    sim.num_decode_left += int(signals_of(sim.router)[GENERATED_TOKENS, k])
    book_lost_all(sim.router, k)
    measure_outstanding(sim, k, outstanding)
    integrate_kv(sim, k)
    replica.used_blocks = 0
    if replica.cache != 0:
        lose_cache(sim, k)
    replica.num_holding = 0
    replica.num_running = 0
    replica.num_decoding = 0
    replica.num_partial = 0
    replica.first_partial = 0
    replica.num_in_flight = 0
    replica.num_fresh = 0
    replica.sum_processed = 0
    replica.next_finish = FAR
    replica.reached_at = 0.0
    replica.api_free_at = 0.0
    replica.sum_decode = 0
    for phase in range(replica.block_size):
        phase_count[phase] = 0
    update_gauges(replica)
