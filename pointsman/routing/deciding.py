"""The decision: one function from the books, a policy and a request to an action.

Action 0 holds the request at the router, action k sends it to replica k - 1. The simulator calls
`decide_by_policy` inside its own kernel; a live router calls the entry points `decide` and `observe_now`
through a `DECIDER` record, by which several policies can work on the same books.
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np

from pointsman.compiled import jit
from pointsman.compiled.jit import kernel
from pointsman.compiled.memory import (
    byte_list,
    row_accessor,
    single_list,
    single_table,
    size_of_bytes,
    start_of_bytes,
)
from pointsman.compiled.random import next_random
from pointsman.inference.network import forward, network_at
from pointsman.routing.booking import signals_of
from pointsman.routing.features import NUM_CONTEXT_FEATURES, NUM_ENTITY_FEATURES
from pointsman.routing.hashing import LINK_BYTES
from pointsman.routing.heuristics import LEARNED, decide_by_rule
from pointsman.routing.legality import keeps_holding, prepare
from pointsman.routing.noting import note
from pointsman.routing.observation import observe, slowdown_of, usual_excess
from pointsman.routing.records import ASK, MEMORY, NEVER, policy_at, router_at
from pointsman.routing.sharing import merge_books
from pointsman.routing.signals import (
    ACCEPTING,
    DECODE_S_PER_TOKEN,
    EXPECTED_HIT_TOKENS,
    KV_CAPACITY_TOKENS,
    MAX_PROMPT_TOKENS,
    OUTSTANDING,
    PREFILL_S_PER_TOKEN,
    STEP_FLOOR_S,
    STEP_SLOW_S,
)
from pointsman.routing.streams import bring_up_to_date

entry_point = partial(jit.entry_point, keeps_gil=True)

HOLD = 0
BROKEN = -1  # the policy's numbers are no numbers
SHADOW = 1 << 20  # more than there are actions; Python is slower with numbers from 2^30 on

# A replica that is slower than calibrated stands out only where its steps are long enough to be measured.
MIN_SLOW_STEP_S = 0.005

# A policy at work on a live router's books.
DECIDER = np.dtype(
    [
        ("router", "i8"),  # [1] ROUTER
        ("policy", "i8"),  # [1] POLICY
        ("memory", MEMORY),
        ("ask", ASK),
        ("max_hold_s", "f8"),
        ("overtake_s", "f8"),
        ("merged", "i8"),  # [NUM_SIGNALS, R] f8, to add them up in
        ("noted", "i8"),  # [NUM_NOTED] f8: what the reason of the last decision is made of
        ("shadow", "i8"),  # [1] DECIDER that is asked the same on the same books; 0: none
    ],
    align=True,
)

decider_at = row_accessor(DECIDER)


@kernel
def require_room(router, memory, policy):
    """Entry points ask before a policy decides: beyond its working memory lies somebody else's."""
    if memory.num_replicas < router.num_replicas:
        raise ValueError("the policy's memory is for fewer replicas than there are")
    if policy.kind == LEARNED and policy.max_replicas < router.num_replicas:
        raise ValueError("the policy's working memory is for fewer replicas than there are")


@kernel
def decide_by_policy(router, memory, policy, ask, now):
    """The action for a request that went through `prepare`; 0 if no replica may take it; or BROKEN."""
    if policy.kind == LEARNED:
        return decide_by_network(router, memory, policy, ask, now)
    return decide_by_rule(router, memory, policy, ask, now)


@kernel
def decide_by_network(router, memory, policy, ask, now):
    """The legal action with the highest logit."""
    num_replicas = router.num_replicas
    observe(router, policy, ask, now, num_replicas, policy.entities, policy.context, policy.legal)
    entities = single_table(policy.entities, num_replicas, NUM_ENTITY_FEATURES)
    context = single_list(policy.context, NUM_CONTEXT_FEATURES)
    logits = single_list(policy.logits, num_replicas + 1)
    legal = byte_list(policy.legal, num_replicas + 1)
    forward(
        network_at(policy.network, 0), entities, context, num_replicas, policy.scratch, policy.state, logits
    )
    best = BROKEN
    for action in range(num_replicas + 1):
        if legal[action]:
            if not math.isfinite(logits[action]):
                return BROKEN
            if best < 0 or logits[action] > logits[best]:
                best = action
    return any_alike(router, memory, legal, best)


@kernel
def any_alike(router, memory, legal, action):
    """The chosen replica or, if that has nothing to do, any other like it, at random.

    Equal replicas without work differ by their past alone, to which a network always finds a reason to prefer
    one: all the traffic of a quiet hour would go there.
    """
    signals = signals_of(router)
    if action == HOLD or signals[OUTSTANDING, action - 1] != 0.0:
        return action
    usual = usual_excess(signals, router.num_replicas)
    num_alike = 1
    chosen = action
    for other in range(1, router.num_replicas + 1):
        if other == action or not legal[other] or not is_alike(signals, action - 1, other - 1):
            continue
        if not is_straggler(signals, other - 1, usual):
            num_alike += 1
            if next_random(memory) % num_alike == 0:
                chosen = other
    return chosen


@kernel
def is_alike(signals, k, other):
    """Whether two replicas have nothing to do and are of the same kind, with no less of the prompt cached."""
    if signals[EXPECTED_HIT_TOKENS, other] < signals[EXPECTED_HIT_TOKENS, k]:
        return False
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
def decide_or_hold(router, memory, policy, ask, now):
    """The action for a request that may have been held; a hold stands until there is room, or for a while."""
    if keeps_holding(router, policy, ask, now):
        return HOLD
    action = decide_by_policy(router, memory, policy, ask, now)
    if action == HOLD:
        ask.hold_until = now + policy.hold_s
    return action


@kernel
def longest_prompt(router):
    """What the largest replica that accepts requests holds."""
    signals = signals_of(router)
    largest = 1.0
    for k in range(router.num_replicas):
        if signals[ACCEPTING, k] > 0.0:
            largest = max(largest, min(signals[KV_CAPACITY_TOKENS, k], signals[MAX_PROMPT_TOKENS, k]))
    return largest


@kernel
def place(
    decider,
    router,
    prompt_tokens,
    links,
    session,
    max_tokens,
    arrived_at,
    hold_until,
    queue_size,
    now,
):
    """The request that is decided about is this one."""
    ask = decider.ask
    ask.prompt_tokens = prompt_tokens
    if prompt_tokens > router.fits_anywhere or router.num_accepting == 0:
        # It is for the server to refuse what is too long.
        ask.prompt_tokens = int(min(float(prompt_tokens), longest_prompt(router)))
    ask.session = session
    ask.max_tokens = max_tokens
    ask.seen_tokens = 0
    ask.arrived_at = arrived_at
    ask.hold_until = hold_until
    ask.links = start_of_bytes(links)
    ask.num_links = size_of_bytes(links) // LINK_BYTES
    ask.answer_key = 0
    router.queue_size = queue_size
    router.max_hold_s = decider.max_hold_s
    router.overtake_s = decider.overtake_s
    prepare(router, ask, now)


@entry_point
def decide(deciders, prompt_tokens, links, session, max_tokens, arrived_at, hold_until, queue_size, now):
    """The policy's action for a request, 0 if no replica accepts any; BROKEN if the policy is. And, SHADOW
    times as large, that of its shadow.

    deciders is an address, links are what `sized_bytes_at` gives. A hold leaves `hold_until` in the decider's
    `ask`.
    """
    decider = decider_at(deciders, 0)
    router = router_at(decider.router, 0)
    policy = policy_at(decider.policy, 0)
    require_room(router, decider.memory, policy)
    if router.num_accepting == 0:
        note(router, decider.memory, policy, decider.ask, HOLD, decider.noted)
        return HOLD
    for k in range(router.num_replicas):
        bring_up_to_date(router, k, now)
    place(
        decider,
        router,
        prompt_tokens,
        links,
        session,
        max_tokens,
        arrived_at,
        hold_until,
        queue_size,
        now,
    )
    own_signals = router.signals
    if router.num_books > 1:
        merge_books(
            own_signals,
            decider.merged,
            router.num_replicas,
            router.books,
            router.num_books,
            router.own_book,
        )
        router.signals = decider.merged
    action = decide_or_hold(router, decider.memory, policy, decider.ask, now)
    if action != BROKEN:
        note(router, decider.memory, policy, decider.ask, action, decider.noted)
    if decider.shadow != 0:
        action += SHADOW * decide_in_shadow(router, decider_at(decider.shadow, 0), decider.ask, now)
    router.signals = own_signals
    return action


@kernel
def decide_in_shadow(router, decider, ask, now):
    """What a policy would do with a request that is prepared and has not been held by it."""
    policy = policy_at(decider.policy, 0)
    require_room(router, decider.memory, policy)
    hold_until = ask.hold_until
    ask.hold_until = NEVER
    action = decide_or_hold(router, decider.memory, policy, ask, now)
    ask.hold_until = hold_until
    return action


@entry_point
def observe_now(deciders, prompt_tokens, links, arrived_at, queue_size, now, entities, context, legal):
    """Fill entities [R, F] f4, context [C] f4 and legal [R + 1] bytes, all by address, without deciding."""
    decider = decider_at(deciders, 0)
    router = router_at(decider.router, 0)
    for k in range(router.num_replicas):
        bring_up_to_date(router, k, now)
    place(decider, router, prompt_tokens, links, -1, 0, arrived_at, now, queue_size, now)
    observe(
        router,
        policy_at(decider.policy, 0),
        decider.ask,
        now,
        router.num_replicas,
        entities,
        context,
        legal,
    )
