"""The heuristics, compiled: each reads the signal table and the request, and names a replica.

Most are a score, lowest wins, ties at random with the run's seed. To add one: declare it here, and give it a
branch in `fill_scores`, or in `decide_by_rule` if it is no score. One without a branch raises.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from pointsman.compiled.jit import kernel
from pointsman.compiled.memory import float_list
from pointsman.compiled.random import mix, next_random
from pointsman.routing.booking import booked_tokens, derive_signals, signals_of
from pointsman.routing.legality import can_take, fits_all, has_place, has_room, is_overdue, is_worth_sending
from pointsman.routing.observation import (
    GATHER,
    HARM,
    URGENCY,
    delay_added,
    gathered_delay,
    slowdown_of,
    usual_excess,
)
from pointsman.routing.records import link_at
from pointsman.routing.signals import (
    ACCEPTING,
    CONTEXT_TOKENS,
    DECODE_S_PER_TOKEN,
    EXPECTED_HIT_TOKENS,
    EXPECTED_TOKENS,
    NUM_SIGNALS,
    OUTSTANDING,
    PENDING_PREFILL_TOKENS,
    PREFILL_S_PER_TOKEN,
    QUEUE_LENGTH,
    SCRAPED_KV_USE,
    SCRAPED_WAITING,
    WEIGHT,
)

FORBIDDEN = np.inf
NUM_DRAWS = 64  # at random, before the replicas that may take the request are searched in order
MAX_PARAMETERS = 4
EXTERNAL, LEARNED = -1, -2  # kinds of policies that are none: decided outside the kernel, or by a network


class Parameter(NamedTuple):
    """What may be tuned of a heuristic, and in which range."""

    name: str
    default: float
    lowest: float
    highest: float
    meaning: str


class Heuristic(NamedTuple):
    kind: int
    what: str
    parameters: tuple[Parameter, ...] = ()


HEURISTICS: dict[str, Heuristic] = {}


def _heuristic(name: str, what: str, *parameters: Parameter) -> int:
    """Declare the next heuristic; -> its kind. Rules find its parameters in this order."""
    kind = len(HEURISTICS)
    HEURISTICS[name] = Heuristic(kind, what, parameters)
    return kind


RANDOM = _heuristic("random", "any replica")
ROUND_ROBIN = _heuristic("round-robin", "one after the other")
WEIGHTED_ROUND_ROBIN = _heuristic("weighted-round-robin", "one after the other, faster replicas more often")
LEAST_OUTSTANDING = _heuristic("least-outstanding", "fewest requests sent and not finished")
VIDUR_LOR = _heuristic(
    "vidur-lor", "Vidur's: shortest queue on the server, ties to the lowest id (oracle signal)"
)
POWER_OF_TWO = _heuristic("power-of-two", "two at random, the one with fewer outstanding")
LEAST_TOKENS = _heuristic("least-tokens", "fewest tokens: waiting prompts and running context")
LEAST_WORK = _heuristic("least-work", "shortest estimated time to finish what it has, by its speed")
LEAST_DELAY = _heuristic(
    "least-delay", "least waiting added, for the request itself and for those already there"
)
LEAST_KV = _heuristic("least-kv", "lowest KV use by the last scrape")
SESSION_AFFINITY = _heuristic(
    "session-affinity", "a session stays on its replica; without one, least-outstanding"
)
HOLD_UNTIL_ROOM = _heuristic(
    "hold-until-room", "hold at the router until a replica has room, then least-outstanding"
)
LATE_BINDING = _heuristic(
    "late-binding", "least-delay, held at the router while no replica has room and few are held"
)
GATHERING = _heuristic(
    "gathering",
    "like late-binding, but long prompts gather where few streams are, which they would interrupt",
    Parameter("urgency", URGENCY, 1.0, 200.0, "weight of the wait for its first token"),
    Parameter("gather", GATHER, 0.0, 100.0, "how much prompts sent there lately keep streams away"),
    Parameter("harm", HARM, 0.0, 10.0, "weight of what a prompt costs the streams already there"),
)
_CACHE_THRESHOLD = Parameter(
    "cache_threshold", 0.3, 0.0, 1.0, "cached share of the prompt above which the cache decides"
)
_BALANCE_ABS = Parameter(
    "balance_abs", 64.0, 1.0, 256.0, "requests between the busiest and the idlest above which load decides"
)
_BALANCE_REL = Parameter("balance_rel", 1.5, 1.0, 4.0, "and the busiest has more than so many times as many")
CACHE_AWARE = _heuristic(
    "cache-aware",
    "SGLang's: most of the prompt cached; fewest outstanding if that is little, or loads are far apart",
    _CACHE_THRESHOLD,
    _BALANCE_ABS,
    _BALANCE_REL,
)
CACHE_AWARE_NEARBY = _heuristic(
    "cache-aware-nearby",
    "the same, but with loads far apart still most of the prompt cached, among those with few outstanding",
    _CACHE_THRESHOLD,
    _BALANCE_ABS,
    _BALANCE_REL,
)
PREFIX_HASH = _heuristic(
    "prefix-hash",
    "prompts that begin alike stay on one replica, up to a bounded load; consistent hashing",
    Parameter("prefix_tokens", 256.0, 16.0, 8192.0, "of a prompt that are compared"),
    Parameter("load_factor", 1.25, 1.0, 4.0, "times the mean of the outstanding requests is the bound"),
)
WEIGHTED_SCORER = _heuristic(
    "weighted-scorer",
    "llm-d's: weighted sum of the cached share, how short the queue is, and how free the KV memory",
    Parameter("prefix", 2.0, 0.0, 10.0, "weight of the cached share of the prompt"),
    Parameter(
        "queue", 2.0, 0.0, 10.0, "weight of the queue by the last scrape, between longest and shortest"
    ),
    Parameter("kv", 1.0, 0.0, 10.0, "weight of the free share of the KV memory by the last scrape"),
)
LOAD_AWARE = _heuristic(
    "load-aware",
    "production-stack's: cached share of the prompt less the load relative to the mean",
    Parameter("beta", 1.0, 0.05, 20.0, "price of a load twice the mean, in whole prompts cached"),
)
OVERLAP_COST = _heuristic(
    "overlap-cost",
    "Dynamo's: fewest tokens to prefill, the request's included, and tokens in memory",
    Parameter("overlap_weight", 1.0, 0.0, 20.0, "weight of tokens to prefill beside those in memory"),
    Parameter("temperature", 0.0, 0.0, 1.0, "0: always the best; above, others too, at random"),
)
LINEAR_SCORE = _heuristic("linear-score", "lowest weighted sum of signals, weights from the configuration")


@kernel
def decide_by_rule(router, memory, policy, ask, now):
    """The action of a heuristic: 0 holds, or no replica may take the request; k is replica k - 1."""
    kind = policy.kind
    if kind == RANDOM:
        return any_of(router, memory, ask) + 1
    if kind == ROUND_ROBIN:
        k = first_from(router, memory.round_robin % router.num_replicas, ask)
        if k >= 0:
            memory.round_robin = k + 1
        return k + 1
    if kind == WEIGHTED_ROUND_ROBIN:
        return smooth_round_robin(router, memory, ask) + 1
    if kind == POWER_OF_TWO:
        return less_of_two(router, memory, ask) + 1
    if kind == SESSION_AFFINITY and ask.session >= 0:
        return by_hash(router, ask, ask.session, FORBIDDEN) + 1
    if kind == PREFIX_HASH and ask.num_links > 0:
        return by_prefix(router, policy, ask) + 1
    scores = float_list(memory.scores, router.num_replicas)
    if policy.reads_derived:
        derive_signals(router, now)
    fill_scores(router, memory, policy, scores, ask)
    if not fits_all(router, ask):
        forbid(router, scores, ask)
    if not is_overdue(router, ask, now):
        if kind == HOLD_UNTIL_ROOM:
            forbid_without_room(router, policy, scores, ask)
        elif kind in (LATE_BINDING, GATHERING):
            forbid_binding_early(router, policy, scores, ask)
    return lowest(memory, scores, kind != VIDUR_LOR) + 1


@kernel
def fill_scores(router, memory, policy, scores, ask):
    """One loop for each kind, so that it stays a plain pass over rows of the table."""
    signals = signals_of(router)
    kind = policy.kind
    parameters = float_list(policy.parameters, MAX_PARAMETERS)
    if kind in (LEAST_OUTSTANDING, SESSION_AFFINITY, HOLD_UNTIL_ROOM, PREFIX_HASH):
        for k in range(router.num_replicas):
            scores[k] = signals[OUTSTANDING, k]
    elif kind == VIDUR_LOR:
        for k in range(router.num_replicas):
            scores[k] = signals[QUEUE_LENGTH, k]
    elif kind == LEAST_TOKENS:
        for k in range(router.num_replicas):
            scores[k] = signals[PENDING_PREFILL_TOKENS, k] + signals[CONTEXT_TOKENS, k]
    elif kind == LEAST_WORK:
        for k in range(router.num_replicas):
            to_compute = (
                signals[PENDING_PREFILL_TOKENS, k] + ask.prompt_tokens - signals[EXPECTED_HIT_TOKENS, k]
            )
            prefill_s = to_compute * signals[PREFILL_S_PER_TOKEN, k]
            scores[k] = prefill_s + signals[EXPECTED_TOKENS, k] * signals[DECODE_S_PER_TOKEN, k]
    elif kind in (LEAST_DELAY, LATE_BINDING):
        usual = usual_excess(signals, router.num_replicas)
        for k in range(router.num_replicas):
            slowdown = slowdown_of(signals, k, usual)
            scores[k] = delay_added(signals, k, ask.prompt_tokens, ask.expected_output, slowdown)
    elif kind == GATHERING:
        usual = usual_excess(signals, router.num_replicas)
        for k in range(router.num_replicas):
            scores[k] = gathered_delay(
                signals,
                k,
                ask.prompt_tokens,
                ask.expected_output,
                slowdown_of(signals, k, usual),
                parameters[0],
                parameters[1],
                parameters[2],
            )
    elif kind == LEAST_KV:
        for k in range(router.num_replicas):
            scores[k] = signals[SCRAPED_KV_USE, k]
    elif kind in (CACHE_AWARE, CACHE_AWARE_NEARBY):
        score_by_cache(router, signals, scores, ask, parameters, kind == CACHE_AWARE_NEARBY)
    elif kind == WEIGHTED_SCORER:
        shortest, longest = range_of(router, signals[SCRAPED_WAITING])
        for k in range(router.num_replicas):
            queue = (
                (longest - signals[SCRAPED_WAITING, k]) / (longest - shortest) if longest > shortest else 1.0
            )
            free = 1.0 - signals[SCRAPED_KV_USE, k]
            hit = signals[EXPECTED_HIT_TOKENS, k] / ask.prompt_tokens
            scores[k] = -(parameters[0] * hit + parameters[1] * queue + parameters[2] * free)
    elif kind == LOAD_AWARE:
        mean = total_outstanding(router, signals) / max(1, router.num_accepting)
        for k in range(router.num_replicas):
            load = (signals[OUTSTANDING, k] - mean) / max(1.0, mean)
            scores[k] = parameters[0] * load - signals[EXPECTED_HIT_TOKENS, k] / ask.prompt_tokens
    elif kind == OVERLAP_COST:
        for k in range(router.num_replicas):
            to_compute = (
                signals[PENDING_PREFILL_TOKENS, k] + ask.prompt_tokens - signals[EXPECTED_HIT_TOKENS, k]
            )
            scores[k] = parameters[0] * to_compute + booked_tokens(signals, k)
        if parameters[1] > 0.0:
            shake(router, memory, scores, parameters[1])
    elif kind == LINEAR_SCORE:
        weights = float_list(policy.weights, NUM_SIGNALS)
        for k in range(router.num_replicas):
            scores[k] = 0.0
        for row in range(NUM_SIGNALS):
            if weights[row] != 0.0:
                for k in range(router.num_replicas):
                    scores[k] += weights[row] * signals[row, k]
    else:
        raise ValueError("a heuristic without a score")


@kernel
def range_of(router, row):
    """[R] -> the lowest and the highest value of a replica that accepts requests."""
    signals = signals_of(router)
    lowest, highest = FORBIDDEN, -FORBIDDEN
    for k in range(router.num_replicas):
        if signals[ACCEPTING, k] > 0.0:
            lowest, highest = min(lowest, row[k]), max(highest, row[k])
    return lowest, highest


@kernel
def total_outstanding(router, signals):
    """On the replicas that accept requests."""
    total = 0.0
    for k in range(router.num_replicas):
        total += signals[OUTSTANDING, k] * signals[ACCEPTING, k]
    return total


@kernel
def score_by_cache(router, signals, scores, ask, parameters, looks_nearby):
    """Thresholds say whether the cache or the load decides; of two that are equal, the load."""
    load, hits = signals[OUTSTANDING], signals[EXPECTED_HIT_TOKENS]
    least, most = range_of(router, load)
    is_apart = most - least > parameters[1] and most > parameters[2] * least
    by_cache = range_of(router, hits)[1] > parameters[0] * ask.prompt_tokens
    if is_apart:
        by_cache = looks_nearby
    for k in range(router.num_replicas):
        scores[k] = load[k]
        if by_cache and (not is_apart or load[k] <= least + parameters[1]):
            # A token counts more than any number of requests.
            scores[k] -= 1e6 * hits[k]


@kernel
def shake(router, memory, scores, temperature):
    """Lowest of these is a draw by softmax of the scores, which are brought to a range of 1."""
    lowest, highest = range_of(router, scores)
    for k in range(router.num_replicas):
        luck = (next_random(memory) + 0.5) / 4294967296.0
        drawn = math.log(-math.log(luck))  # less a Gumbel variable
        scores[k] = drawn + (scores[k] - lowest) / max(highest - lowest, 1e-9) / temperature


@kernel
def forbid(router, scores, ask):
    for k in range(router.num_replicas):
        if not can_take(router, k, ask):
            scores[k] = FORBIDDEN


@kernel
def forbid_without_room(router, policy, scores, ask):
    """Only replicas that would start the request at once, as far as the router can tell, are left."""
    signals = signals_of(router)
    for k in range(router.num_replicas):
        if not has_room(signals, k, ask.prompt_tokens, policy):
            scores[k] = FORBIDDEN


@kernel
def forbid_binding_early(router, policy, scores, ask):
    """The request is held until some replica is worth it; never is it sent where memory is full."""
    signals = signals_of(router)
    is_held = True
    for k in range(router.num_replicas):
        if scores[k] != FORBIDDEN and is_worth_sending(router, policy, k, ask):
            is_held = False
    for k in range(router.num_replicas):
        if is_held or not has_place(signals, k, ask.prompt_tokens, policy, 1.0):
            scores[k] = FORBIDDEN


@kernel
def lowest(memory, scores, is_tie_random):
    """The replica with the lowest score, or -1 if all are forbidden."""
    num_replicas = len(scores)
    # Four minima side by side do not wait for each other; with 1,024 replicas this is what a decision costs.
    a = b = c = d = FORBIDDEN
    k = 0
    while k + 3 < num_replicas:
        a = min(a, scores[k])
        b = min(b, scores[k + 1])
        c = min(c, scores[k + 2])
        d = min(d, scores[k + 3])
        k += 4
    while k < num_replicas:
        a = min(a, scores[k])
        k += 1
    best = min(min(a, b), min(c, d))
    if best == FORBIDDEN:
        return -1
    num_ties = 0
    for k in range(num_replicas):
        num_ties += scores[k] == best
    skip = next_random(memory) % num_ties if is_tie_random and num_ties > 1 else 0
    k = 0
    while scores[k] != best or skip > 0:
        if scores[k] == best:
            skip -= 1
        k += 1
    return k


@kernel
def any_of(router, memory, ask):
    """A random replica that may take the request, or -1."""
    for _ in range(NUM_DRAWS):
        k = next_random(memory) % router.num_replicas
        if can_take(router, k, ask):
            return k
    return first_from(router, next_random(memory) % router.num_replicas, ask)


@kernel
def first_from(router, start, ask):
    """The first replica from `start` on, in a circle, that may take the request, or -1."""
    num_replicas = router.num_replicas
    for offset in range(num_replicas):
        k = (start + offset) % num_replicas
        if can_take(router, k, ask):
            return k
    return -1


@kernel
def smooth_round_robin(router, memory, ask):
    """Each replica earns its weight a turn; the richest is served and pays for the round."""
    signals = signals_of(router)
    credit = float_list(memory.credit, router.num_replicas)
    best = -1
    total = 0.0
    for k in range(router.num_replicas):
        if can_take(router, k, ask):
            credit[k] += signals[WEIGHT, k]
            total += signals[WEIGHT, k]
            if best < 0 or credit[k] > credit[best]:
                best = k
    if best >= 0:
        credit[best] -= total
    return best


@kernel
def less_of_two(router, memory, ask):
    signals = signals_of(router)
    first = any_of(router, memory, ask)
    second = any_of(router, memory, ask)
    for _ in range(NUM_DRAWS):
        if second != first:
            break
        second = any_of(router, memory, ask)
    if first < 0:
        return -1
    return second if signals[OUTSTANDING, second] < signals[OUTSTANDING, first] else first


@kernel
def by_prefix(router, policy, ask):
    """The beginning of the prompt decides, as far as the replica has not more than its share already."""
    parameters = float_list(policy.parameters, MAX_PARAMETERS)
    j = 0
    while j < ask.num_links - 1 and link_at(ask.links, j).tokens < parameters[0]:
        j += 1
    signals = signals_of(router)
    key = link_at(ask.links, j).key
    # The least loaded is always within it: requests come whole.
    total = total_outstanding(router, signals) + 1.0
    bound = math.ceil(parameters[1] * total / max(1, router.num_accepting))
    return by_hash(router, ask, mix(key & 0x7FFFFFFF) ^ mix(key >> 31), bound)


@kernel
def by_hash(router, ask, value_of_request, bound):
    """Rendezvous hashing: what has the same value stays where it is unless its own replica goes away.

    `bound`: outstanding requests, this one included; FORBIDDEN: as many as there are.
    """
    signals = signals_of(router)
    best = -1
    best_hash = -1
    for k in range(router.num_replicas):
        if can_take(router, k, ask) and signals[OUTSTANDING, k] + 1.0 <= bound:
            value = mix(int(value_of_request) * 65_537 + k * 257 + 1)
            if value > best_hash:
                best = k
                best_hash = value
    return best
