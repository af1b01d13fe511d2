"""The live router's decisions, compiled: the simulator's policies on the live router's books."""

from __future__ import annotations

import math

import numpy as np

from pointsman.compiled.jit import kernel
from pointsman.compiled.memory import byte_list, float_table, row_accessor, single_list
from pointsman.routing.booking import TO_PLACE, bring_up_to_date, entry_point, sim_at
from pointsman.routing.heuristics import LEARNED, POLICY, choose, next_random, require_room
from pointsman.routing.observation import keeps_holding, observe, slowdown_of, usual_excess
from pointsman.routing.sharing import merge_books
from pointsman.routing.signals import (
    ACCEPTING,
    DECODE_S_PER_TOKEN,
    KV_CAPACITY_TOKENS,
    MAX_PROMPT_TOKENS,
    NUM_SIGNALS,
    OUTSTANDING,
    PREFILL_S_PER_TOKEN,
    STEP_FLOOR_S,
    STEP_SLOW_S,
)
from pointsman.simulator.state import NOBODY, request_at

BROKEN = -1  # the policy's numbers are no numbers
SAME_REQUEST_S = 1e-6  # two decisions are about one request if it arrived at the same time

# Where a policy finds the books, and what it keeps from one decision to the next: several can share them.
TURN = np.dtype(
    [
        ("sims", "i8"),  # [1] SIM
        ("streams", "i8"),  # [R] STREAMS
        ("policies", "i8"),  # [1] POLICY
        ("rng", "i8"),
        ("round_robin", "i8"),
        ("scores", "i8"),  # [R] f8
        ("credit", "i8"),  # [R] f8
        ("max_hold_s", "f8"),
        ("held_at", "f8"),  # when the request arrived that is held
        ("held_prompt", "i8"),
        ("hold_until", "f8"),
        ("books", "i8"),  # of all processes (sharing.py)
        ("num_books", "i8"),  # 1: nobody else's
        ("own_book", "i8"),
        ("merged", "i8"),  # [signal, R] f8, to add them up in
    ],
    align=True,
)

# A replica that is slower than calibrated stands out only where its steps are long enough to be measured.
MIN_SLOW_STEP_S = 0.005

turn_at = row_accessor(TURN)
policy_at = row_accessor(POLICY)


@kernel
def ask(sim, policy, turn, request):
    """The policy's action; a hold stands until there is room, or for as long as the policy says."""
    is_held = request.num_prefill == turn.held_prompt
    is_held = is_held and abs(request.arrived_at - turn.held_at) < SAME_REQUEST_S
    sim.held_request = TO_PLACE if is_held else NOBODY
    sim.hold_until = turn.hold_until
    if policy.hold_s > 0.0 and keeps_holding(sim, policy):
        return 0
    action = choose(sim, policy)
    if action == 0:
        turn.held_at = request.arrived_at
        turn.held_prompt = request.num_prefill
        turn.hold_until = sim.now + policy.hold_s
    return action


@kernel
def is_alike(signals, k, other):
    """Whether two replicas have nothing to do and are of the same kind."""
    if signals[OUTSTANDING, k] != 0.0 or signals[OUTSTANDING, other] != 0.0:
        return False
    for row in (KV_CAPACITY_TOKENS, PREFILL_S_PER_TOKEN, DECODE_S_PER_TOKEN, STEP_FLOOR_S):
        if signals[row, k] != signals[row, other]:
            return False
    return True


@kernel
def is_straggler(signals, k, usual):
    return signals[STEP_SLOW_S, k] > MIN_SLOW_STEP_S and slowdown_of(signals, k, usual) > 1.0


@kernel
def any_alike(sim, policy, action):
    """The network's choice or, if that has nothing to do, any other like it, at random.

    Equal replicas without work differ by their past alone, to which a network always finds a reason to prefer
    one: all the traffic of a quiet hour would go there. BROKEN if a logit is not a number.
    """
    signals = float_table(sim.signals, NUM_SIGNALS, sim.num_replicas)
    logits = single_list(policy.logits, sim.num_replicas + 1)
    legal = byte_list(policy.legal, sim.num_replicas + 1)
    for other in range(sim.num_replicas + 1):
        if legal[other] and not math.isfinite(logits[other]):
            return BROKEN
    if action == 0 or signals[OUTSTANDING, action - 1] != 0.0:
        return action
    usual = usual_excess(signals, sim.num_replicas)
    num_alike = 1
    chosen = action
    for other in range(1, sim.num_replicas + 1):
        if other == action or not legal[other] or not is_alike(signals, action - 1, other - 1):
            continue
        if not is_straggler(signals, other - 1, usual):
            num_alike += 1
            if next_random(sim) % num_alike == 0:
                chosen = other
    return chosen


@kernel
def largest_prompt(sim, num_prefill):
    """The prompt, cut to what the largest replica holds: it is for the server to refuse what is too long."""
    signals = float_table(sim.signals, NUM_SIGNALS, sim.num_replicas)
    largest = 1.0
    for k in range(sim.num_replicas):
        if signals[ACCEPTING, k] > 0.0:
            largest = max(largest, min(signals[KV_CAPACITY_TOKENS, k], signals[MAX_PROMPT_TOKENS, k]))
    return int(min(float(num_prefill), largest))


@kernel
def place(sim, num_prefill, session, waited_s, queue_size, max_hold_s):
    """The request at the head of the router's queue is this one."""
    request = request_at(sim.requests, TO_PLACE)
    request.num_prefill = largest_prompt(sim, num_prefill)
    request.arrived_at = sim.now - waited_s
    request.session = session
    sim.queue_head = TO_PLACE
    sim.queue_size = queue_size
    sim.max_hold_s = max_hold_s


@entry_point
def decide(turns, num_prefill, session, waited_s, queue_size, now):
    """The policy's action for a request, 0 if no replica accepts any; BROKEN if the policy is."""
    turn = turn_at(turns, 0)
    sim = sim_at(turn.sims, 0)
    policy = policy_at(turn.policies, 0)
    require_room(sim, policy)
    sim.now = now
    if sim.num_accepting == 0:
        return 0
    for k in range(sim.num_replicas):
        bring_up_to_date(sim, turn.streams, k)
    place(sim, num_prefill, session, waited_s, queue_size, turn.max_hold_s)
    own_signals = sim.signals
    if turn.num_books > 1:
        merge_books(own_signals, turn.merged, sim.num_replicas, turn.books, turn.num_books, turn.own_book)
        sim.signals = turn.merged
    sim.scores = turn.scores
    sim.credit = turn.credit
    sim.rng = turn.rng
    sim.round_robin = turn.round_robin
    action = ask(sim, policy, turn, request_at(sim.requests, TO_PLACE))
    if policy.kind == LEARNED:
        action = any_alike(sim, policy, action)
    turn.rng = sim.rng
    turn.round_robin = sim.round_robin
    sim.signals = own_signals
    return action


@entry_point
def observe_now(turns, num_prefill, waited_s, queue_size, now, entities, context, legal):
    """Fill entities [R, F] f4, context [C] f4 and legal [R + 1] bytes, all by address, without deciding."""
    turn = turn_at(turns, 0)
    sim = sim_at(turn.sims, 0)
    sim.now = now
    for k in range(sim.num_replicas):
        bring_up_to_date(sim, turn.streams, k)
    place(sim, num_prefill, NOBODY, waited_s, queue_size, turn.max_hold_s)
    observe(sim, policy_at(turn.policies, 0), sim.num_replicas, entities, context, legal)
