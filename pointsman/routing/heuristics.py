"""The heuristics, compiled: each reads the signal table and the request, and names a replica.

`choose` returns an action: 0 holds the request, k sends it to replica k - 1. Most heuristics are a score,
lowest wins, ties at random with the run's seed; adding one means adding a kind and a loop to `fill_scores`.
"""

from __future__ import annotations

import numpy as np

from pointsman.compiled.jit import kernel
from pointsman.compiled.memory import byte_list, float_list, float_table, single_list, single_table
from pointsman.inference.network import forward, network_at
from pointsman.routing.observation import (
    NUM_CONTEXT_FEATURES,
    NUM_ENTITY_FEATURES,
    delay_added,
    has_memory,
    has_room,
    is_worth_sending,
    observe,
    slowdown_of,
    usual_excess,
)
from pointsman.routing.signals import (
    CONTEXT_TOKENS,
    DECODE_S_PER_TOKEN,
    EXPECTED_TOKENS,
    NUM_SIGNALS,
    OUTSTANDING,
    PENDING_PREFILL_TOKENS,
    PREFILL_S_PER_TOKEN,
    QUEUE_LENGTH,
    SCRAPED_KV_USE,
    WEIGHT,
)
from pointsman.simulator.book import derive_signals, length_class
from pointsman.simulator.dispatch import can_take
from pointsman.simulator.state import NUM_LENGTH_CLASSES, request_at

(
    EXTERNAL,
    RANDOM,
    ROUND_ROBIN,
    WEIGHTED_ROUND_ROBIN,
    LEAST_OUTSTANDING,
    VIDUR_LOR,
    POWER_OF_TWO,
    LEAST_TOKENS,
    LEAST_WORK,
    LEAST_KV,
    SESSION_AFFINITY,
    HOLD_UNTIL_ROOM,
    LINEAR_SCORE,
    LEAST_DELAY,
    LATE_BINDING,
    LEARNED,
) = range(16)

FORBIDDEN = np.inf
NUM_DRAWS = 64  # at random, before the replicas that may take the request are searched in order


# A heuristic as the kernel wants it.
POLICY = np.dtype(
    [
        ("kind", "i8"),
        ("reads_derived", "i8"),
        ("may_hold", "i8"),  # learned, as the next
        ("hold_s", "f8"),  # a held request is decided anew when there is room, or after this
        ("kv_limit", "f8"),  # room: share of the KV memory that may be booked
        ("prefill_limit", "f8"),  # room: prompt tokens that may wait on a replica
        ("weights", "i8"),  # address of [NUM_SIGNALS] f8: linear-score
        # Learned: addresses of the network and of its working memory for this cluster.
        ("network", "i8"),
        ("max_replicas", "i8"),  # R: of the working memory
        ("entities", "i8"),  # [R, F] f4
        ("context", "i8"),  # [C] f4
        ("legal", "i8"),  # [R + 1] u1
        ("logits", "i8"),  # [R + 1] f4
        ("scratch", "i8"),  # what `forward` asks for
        ("state", "i8"),  # [W] f4: what a recurrent network remembers
    ],
    align=True,
)


@kernel
def next_random(sim):
    """xorshift32, in integers that behave alike in Python and in machine code."""
    x = sim.rng
    x ^= (x << 13) & 0xFFFFFFFF
    x ^= x >> 17
    x ^= (x << 5) & 0xFFFFFFFF
    sim.rng = x
    return x


@kernel
def require_room(sim, policy):
    """Entry points ask before a policy decides: beyond its working memory lies somebody else's."""
    if policy.kind == LEARNED and policy.max_replicas < sim.num_replicas:
        raise ValueError("the policy's working memory is for fewer replicas than the cluster has")


@kernel
def choose(sim, policy):
    """The action for the oldest queued request; 0 if no replica may take it."""
    i = sim.queue_head
    request = request_at(sim.requests, i)
    kind = policy.kind
    if kind == RANDOM:
        return any_of(sim, i) + 1
    if kind == ROUND_ROBIN:
        k = first_from(sim, sim.round_robin % sim.num_replicas, i)
        sim.round_robin = k + 1
        return k + 1
    if kind == WEIGHTED_ROUND_ROBIN:
        return smooth_round_robin(sim, i) + 1
    if kind == POWER_OF_TWO:
        return less_of_two(sim, i) + 1
    if kind == LEARNED:
        return by_network(sim, policy)
    if kind == SESSION_AFFINITY and request.session >= 0:
        return by_session(sim, int(request.session), i) + 1
    scores = float_list(sim.scores, sim.num_replicas)
    if policy.reads_derived:
        derive_signals(sim)
    fill_scores(sim, policy, scores, request.num_prefill)
    size = request.num_prefill + request.num_decode
    if size > sim.fits_anywhere or sim.num_accepting < sim.num_replicas:
        forbid(sim, scores, i)
    is_overdue = sim.now - request.arrived_at >= sim.max_hold_s
    if not is_overdue:
        if kind == HOLD_UNTIL_ROOM:
            forbid_without_room(sim, policy, scores, request.num_prefill)
        elif kind == LATE_BINDING:
            forbid_binding_early(sim, policy, scores, request.num_prefill)
    return lowest(sim, scores, kind != VIDUR_LOR) + 1


@kernel
def by_network(sim, policy):
    """The legal action with the highest logit."""
    num_replicas = sim.num_replicas
    observe(sim, policy, num_replicas, policy.entities, policy.context, policy.legal)
    entities = single_table(policy.entities, num_replicas, NUM_ENTITY_FEATURES)
    context = single_list(policy.context, NUM_CONTEXT_FEATURES)
    logits = single_list(policy.logits, num_replicas + 1)
    legal = byte_list(policy.legal, num_replicas + 1)
    network = network_at(policy.network, 0)
    forward(network, entities, context, num_replicas, policy.scratch, policy.state, logits)
    best = -1
    for action in range(num_replicas + 1):
        if legal[action] and (best < 0 or logits[action] > logits[best]):
            best = action
    return best


@kernel
def fill_scores(sim, policy, scores, num_prefill):
    """One loop for each kind, so that it stays a plain pass over rows of the table."""
    signals = float_table(sim.signals, NUM_SIGNALS, sim.num_replicas)
    kind = policy.kind
    if kind == VIDUR_LOR:
        for k in range(sim.num_replicas):
            scores[k] = signals[QUEUE_LENGTH, k]
    elif kind == LEAST_TOKENS:
        for k in range(sim.num_replicas):
            scores[k] = signals[PENDING_PREFILL_TOKENS, k] + signals[CONTEXT_TOKENS, k]
    elif kind == LEAST_WORK:
        for k in range(sim.num_replicas):
            prefill_s = (signals[PENDING_PREFILL_TOKENS, k] + num_prefill) * signals[PREFILL_S_PER_TOKEN, k]
            scores[k] = prefill_s + signals[EXPECTED_TOKENS, k] * signals[DECODE_S_PER_TOKEN, k]
    elif kind in (LEAST_DELAY, LATE_BINDING):
        output = float_list(sim.output_estimate, NUM_LENGTH_CLASSES)[length_class(num_prefill)]
        usual = usual_excess(signals, sim.num_replicas)
        for k in range(sim.num_replicas):
            slowdown = slowdown_of(signals, k, usual)
            scores[k] = delay_added(signals, k, num_prefill, output, slowdown)
    elif kind == LEAST_KV:
        for k in range(sim.num_replicas):
            scores[k] = signals[SCRAPED_KV_USE, k]
    elif kind == LINEAR_SCORE:
        weights = float_list(policy.weights, NUM_SIGNALS)
        for k in range(sim.num_replicas):
            scores[k] = 0.0
        for row in range(NUM_SIGNALS):
            if weights[row] != 0.0:
                for k in range(sim.num_replicas):
                    scores[k] += weights[row] * signals[row, k]
    else:
        for k in range(sim.num_replicas):
            scores[k] = signals[OUTSTANDING, k]


@kernel
def forbid(sim, scores, i):
    for k in range(sim.num_replicas):
        if not can_take(sim, k, i):
            scores[k] = FORBIDDEN


@kernel
def forbid_without_room(sim, policy, scores, num_prefill):
    """Only replicas that would start the request at once, as far as the router can tell, are left."""
    signals = float_table(sim.signals, NUM_SIGNALS, sim.num_replicas)
    for k in range(sim.num_replicas):
        if not has_room(signals, k, num_prefill, policy.kv_limit, policy.prefill_limit):
            scores[k] = FORBIDDEN


@kernel
def forbid_binding_early(sim, policy, scores, num_prefill):
    """The request is held until some replica is worth it; never is it sent where memory is full."""
    signals = float_table(sim.signals, NUM_SIGNALS, sim.num_replicas)
    is_held = True
    for k in range(sim.num_replicas):
        if scores[k] != FORBIDDEN and is_worth_sending(
            sim, signals, k, num_prefill, policy.kv_limit, policy.prefill_limit
        ):
            is_held = False
    for k in range(sim.num_replicas):
        if is_held or not has_memory(signals, k, num_prefill, policy.kv_limit):
            scores[k] = FORBIDDEN


@kernel
def lowest(sim, scores, is_tie_random):
    """The replica with the lowest score, or -1 if all are forbidden."""
    # Four minima side by side do not wait for each other; with 1,024 replicas this is what a decision costs.
    a = b = c = d = FORBIDDEN
    k = 0
    while k + 3 < sim.num_replicas:
        a = min(a, scores[k])
        b = min(b, scores[k + 1])
        c = min(c, scores[k + 2])
        d = min(d, scores[k + 3])
        k += 4
    while k < sim.num_replicas:
        a = min(a, scores[k])
        k += 1
    best = min(min(a, b), min(c, d))
    if best == FORBIDDEN:
        return -1
    num_ties = 0
    for k in range(sim.num_replicas):
        num_ties += scores[k] == best
    skip = next_random(sim) % num_ties if is_tie_random and num_ties > 1 else 0
    k = 0
    while scores[k] != best or skip > 0:
        if scores[k] == best:
            skip -= 1
        k += 1
    return k


@kernel
def any_of(sim, i):
    """A random replica that may take the request, or -1."""
    for _ in range(NUM_DRAWS):
        k = next_random(sim) % sim.num_replicas
        if can_take(sim, k, i):
            return k
    return first_from(sim, next_random(sim) % sim.num_replicas, i)


@kernel
def first_from(sim, start, i):
    """The first replica from `start` on, in a circle, that may take the request, or -1."""
    num_replicas = sim.num_replicas
    for offset in range(num_replicas):
        k = (start + offset) % num_replicas
        if can_take(sim, k, i):
            return k
    return -1


@kernel
def smooth_round_robin(sim, i):
    """Each replica earns its weight a turn; the richest is served and pays for the round."""
    signals = float_table(sim.signals, NUM_SIGNALS, sim.num_replicas)
    credit = float_list(sim.credit, sim.num_replicas)
    best = -1
    total = 0.0
    for k in range(sim.num_replicas):
        if can_take(sim, k, i):
            credit[k] += signals[WEIGHT, k]
            total += signals[WEIGHT, k]
            if best < 0 or credit[k] > credit[best]:
                best = k
    if best >= 0:
        credit[best] -= total
    return best


@kernel
def less_of_two(sim, i):
    signals = float_table(sim.signals, NUM_SIGNALS, sim.num_replicas)
    first = any_of(sim, i)
    second = any_of(sim, i)
    for _ in range(NUM_DRAWS):
        if second != first:
            break
        second = any_of(sim, i)
    if first < 0:
        return -1
    return second if signals[OUTSTANDING, second] < signals[OUTSTANDING, first] else first


@kernel
def by_session(sim, session, i):
    """Rendezvous hashing: a session stays where it is unless its own replica goes away."""
    best = -1
    best_hash = -1
    for k in range(sim.num_replicas):
        if can_take(sim, k, i):
            value = mix(session * 65_537 + k * 257 + 1)
            if value > best_hash:
                best = k
                best_hash = value
    return best


@kernel
def mix(x):
    """A 31-bit hash in products that stay below 2^63."""
    x &= 0x7FFFFFFF
    x = ((x >> 16) ^ x) * 0x45D9F3B & 0x7FFFFFFF
    x = ((x >> 16) ^ x) * 0x45D9F3B & 0x7FFFFFFF
    return (x >> 16) ^ x
