"""Which replicas may take a request, which would start it at once, and when it may wait at the router.

All of it follows from what a router knows: the prompt, the limit its client set, its own estimate of the
output, and the books. A request that turns out longer than its replica's memory is the server's problem; it
comes back with `seen_tokens`, and goes where there is more.
"""

from __future__ import annotations

import math

from pointsman.compiled.jit import kernel
from pointsman.routing.booking import booked_tokens, expected_output, signals_of
from pointsman.routing.prefixes import expect_hits
from pointsman.routing.records import UNKNOWN
from pointsman.routing.signals import (
    ACCEPTING,
    EXPECTED_HIT_TOKENS,
    EXPECTED_TOKENS,
    KV_CAPACITY_TOKENS,
    MAX_PROMPT_TOKENS,
    OUTSTANDING,
    PENDING_PREFILL_TOKENS,
    PREFILL_S_PER_TOKEN,
)

MAX_HELD = 2.0  # requests a replica
AMPLE = 0.8  # of the memory that may be booked
GROWING = 0.05  # expected output, as a share of what is booked, from which on memory must be left for it
WAITING_PROMPTS = 1.6  # below that, so many times as much may be booked


@kernel
def prepare(router, ask, now):
    """Fill what the router expects of the request; before anything else is asked about it."""
    ask.expected_output = expected_output(router, ask.prompt_tokens)
    known = float(max(ask.prompt_tokens, ask.seen_tokens + 1))
    wished = ask.prompt_tokens + (ask.expected_output if ask.max_tokens == UNKNOWN else ask.max_tokens)
    if wished > router.fits_anywhere:  # an expectation that nobody can meet must not keep it waiting
        wished = min(wished, largest_memory(router, ask))
    ask.needs_tokens = max(known, wished)
    expect_hits(router, signals_of(router), ask, now)


@kernel
def largest_memory(router, ask):
    """Tokens of KV memory, over the replicas that accept requests with such a prompt."""
    signals = signals_of(router)
    largest = 0.0
    for k in range(router.num_replicas):
        if signals[ACCEPTING, k] > 0.0 and ask.prompt_tokens <= signals[MAX_PROMPT_TOKENS, k]:
            largest = max(largest, signals[KV_CAPACITY_TOKENS, k])
    return largest


@kernel
def can_take(router, k, ask):
    """Whether replica k accepts requests, and one of this size."""
    signals = signals_of(router)
    fits = (
        ask.needs_tokens <= signals[KV_CAPACITY_TOKENS, k]
        and ask.prompt_tokens <= signals[MAX_PROMPT_TOKENS, k]
    )
    return fits and signals[ACCEPTING, k] > 0.0


@kernel
def fits_all(router, ask):
    """Whether it is plain, without a look at each, that every replica can take the request."""
    return ask.needs_tokens <= router.fits_anywhere and router.num_accepting == router.num_replicas


@kernel
def can_anyone_take(router, ask):
    """Else there is no point in asking again until a replica joins."""
    for k in range(router.num_replicas):
        if can_take(router, k, ask):
            return True
    return False


@kernel
def has_place(signals, k, prompt_tokens, policy, share):
    """Whether replica k may have one more request, and memory for its prompt, as far as the router can tell.

    `share`: of the KV memory that may be booked. Where hardly any output is to come, sequences do not grow
    into each other's memory: a prompt may wait there for some to end, and those behind it are not kept at
    the router by a prompt that fits nowhere yet.
    """
    if signals[OUTSTANDING, k] == 0.0:
        return True
    booked = booked_tokens(signals, k)
    limit = policy.kv_limit
    if signals[EXPECTED_TOKENS, k] < GROWING * booked:
        limit *= WAITING_PROMPTS
    if booked + prompt_tokens > share * limit * signals[KV_CAPACITY_TOKENS, k]:
        return False
    return signals[OUTSTANDING, k] < policy.stream_limit


@kernel
def has_room(signals, k, prompt_tokens, policy):
    """Whether replica k would start the request at once, as far as the router can tell."""
    if signals[OUTSTANDING, k] == 0.0:
        return True
    return signals[PENDING_PREFILL_TOKENS, k] < policy.prefill_limit and has_place(
        signals, k, prompt_tokens, policy, 1.0
    )


@kernel
def is_overdue(router, ask, now):
    return now - ask.arrived_at >= router.max_hold_s


@kernel
def fill_legal(router, policy, ask, now, legal):
    """legal [R + 1] bytes. Holding is legal only while no replica has room, and not for ever.

    With holding always legal, training falls into holding everything within a minute and never comes back;
    with this rule it cannot. And while a request may be held, none is bound to a replica whose memory is
    full: it would wait there too, and take the memory that running sequences grow into.
    """
    signals = signals_of(router)
    may_hold = policy.may_hold and not is_overdue(router, ask, now)
    num_takers = 0
    can_start = False
    for k in range(router.num_replicas):
        legal[k + 1] = can_take(router, k, ask)
        if legal[k + 1] and may_hold:
            legal[k + 1] = has_place(signals, k, ask.prompt_tokens, policy, 1.0)
        if legal[k + 1]:
            num_takers += 1
            if has_room(signals, k, ask.prompt_tokens, policy):
                can_start = True
    legal[0] = num_takers == 0 or (may_hold and not can_start)
    if policy.detour_s < math.inf:
        forbid_detours(router, policy, ask, legal)


@kernel
def forbid_detours(router, policy, ask, legal):
    """Leave of the legal replicas those where the first token is due soon, by what the router knows."""
    signals = signals_of(router)
    soonest_s = math.inf
    for k in range(router.num_replicas):
        if legal[k + 1]:
            soonest_s = min(soonest_s, first_token_s(signals, k, ask))
    for k in range(router.num_replicas):
        if first_token_s(signals, k, ask) > soonest_s + policy.detour_s:
            legal[k + 1] = 0


@kernel
def first_token_s(signals, k, ask):
    """Time to prefill what waits on replica k, and the request behind it."""
    tokens = signals[PENDING_PREFILL_TOKENS, k] + ask.prompt_tokens - signals[EXPECTED_HIT_TOKENS, k]
    return tokens * signals[PREFILL_S_PER_TOKEN, k]


@kernel
def is_worth_sending(router, policy, k, ask):
    """Whether a request that could be held had better go to replica k: it has room, or too many are held.

    Those behind pay for a wait that only the first gains by. Where memory is short it is not the prompts
    that make them wait, and sending more would only fill it up. And where small ones go first, they can do
    so only while they are held.
    """
    signals = signals_of(router)
    if has_room(signals, k, ask.prompt_tokens, policy):
        return True
    is_crowded = router.overtake_s == 0.0 and router.queue_size > MAX_HELD * router.num_replicas
    return is_crowded and has_place(signals, k, ask.prompt_tokens, policy, AMPLE)


@kernel
def keeps_holding(router, policy, ask, now):
    """Whether the last decision still stands: hold this request until there is room, for a while.

    Asked anew at every token that some stream finishes, a policy in training, which acts at random now and
    then, could not hold anything for long; and it would mostly be asked when nothing has changed.
    """
    if policy.hold_s <= 0.0 or now >= ask.hold_until or is_overdue(router, ask, now):
        return False
    for k in range(router.num_replicas):
        if can_take(router, k, ask) and is_worth_sending(router, policy, k, ask):
            return False
    return True
