"""What a reason (reasons.py) is made of, compiled: a few numbers of the chosen server and the next best."""

from __future__ import annotations

from pointsman.compiled.jit import kernel
from pointsman.compiled.memory import byte_list, float_list, single_list
from pointsman.routing.booking import signals_of
from pointsman.routing.heuristics import FORBIDDEN, LEARNED, PREFIX_HASH, SESSION_AFFINITY
from pointsman.routing.legality import can_take, fits_all
from pointsman.routing.records import NOBODY
from pointsman.routing.signals import (
    ACCEPTING,
    CONTEXT_TOKENS,
    DECODE_S_PER_TOKEN,
    DECODING,
    EXPECTED_HIT_TOKENS,
    KV_CAPACITY_TOKENS,
    OUTSTANDING,
    PENDING_PREFILL_TOKENS,
    PREFILL_S_PER_TOKEN,
    STEP_FLOOR_S,
    STEP_S,
    TTFT_S,
)

NUM_ABOUT = 7  # figures of a server: those of `About`
NUM_NOTED = 3 + 2 * NUM_ABOUT  # kind of policy, how many may take it, column of the other, chosen, other


@kernel
def note(router, memory, policy, ask, action, noted):
    """Write what a `Reason` is made of into noted [NUM_NOTED] f8, right after the decision; by address."""
    numbers = float_list(noted, NUM_NOTED)
    num_takers = router.num_replicas
    if not fits_all(router, ask):
        num_takers = 0
        for k in range(router.num_replicas):
            num_takers += can_take(router, k, ask)
    if action == 0:
        other = least_busy(router)
    elif policy.kind == LEARNED:
        other = next_by_logit(router, policy, action)
    elif (policy.kind == SESSION_AFFINITY and ask.session >= 0) or (
        policy.kind == PREFIX_HASH and ask.num_links > 0
    ):
        other = NOBODY
    else:
        other = next_by_score(router, memory, action)
    numbers[0] = policy.kind
    numbers[1] = num_takers
    numbers[2] = other
    for k, first in ((action - 1, 3), (other, 3 + NUM_ABOUT)):
        if k >= 0:
            write_about(router, ask, k, numbers, first)
            numbers[first + NUM_ABOUT - 1] = score_of(router, policy, memory, k)


@kernel
def score_of(router, policy, memory, k):
    """What the policy compares servers by, the lower the better."""
    if policy.kind == LEARNED:
        return -float(single_list(policy.logits, router.num_replicas + 1)[k + 1])
    return float_list(memory.scores, router.num_replicas)[k]


@kernel
def least_busy(router):
    signals = signals_of(router)
    best = NOBODY
    for k in range(router.num_replicas):
        if signals[ACCEPTING, k] > 0.0 and (
            best == NOBODY or signals[OUTSTANDING, k] < signals[OUTSTANDING, best]
        ):
            best = k
    return best


@kernel
def next_by_logit(router, policy, action):
    """The best replica but the chosen one, by the network."""
    logits = single_list(policy.logits, router.num_replicas + 1)
    legal = byte_list(policy.legal, router.num_replicas + 1)
    best = 0
    for other in range(1, router.num_replicas + 1):
        if other != action and legal[other] and (best == 0 or logits[other] > logits[best]):
            best = other
    return best - 1


@kernel
def next_by_score(router, memory, action):
    """The best replica but the chosen one; a policy that does not score leaves no numbers."""
    scores = float_list(memory.scores, router.num_replicas)
    best = NOBODY
    for other in range(router.num_replicas):
        if other != action - 1 and scores[other] < FORBIDDEN and (best < 0 or scores[other] < scores[best]):
            best = other
    return best


@kernel
def write_about(router, ask, k, numbers, first):
    signals = signals_of(router)
    booked = signals[CONTEXT_TOKENS, k] + signals[PENDING_PREFILL_TOKENS, k]
    numbers[first] = signals[OUTSTANDING, k]
    numbers[first + 1] = signals[PENDING_PREFILL_TOKENS, k] * signals[PREFILL_S_PER_TOKEN, k]
    step_s = signals[STEP_FLOOR_S, k] + signals[DECODING, k] * signals[DECODE_S_PER_TOKEN, k]
    numbers[first + 2] = signals[STEP_S, k] if signals[STEP_S, k] > 0.0 else step_s
    numbers[first + 3] = booked / signals[KV_CAPACITY_TOKENS, k]
    numbers[first + 4] = signals[TTFT_S, k]
    numbers[first + 5] = 1.0 - signals[EXPECTED_HIT_TOKENS, k] / ask.prompt_tokens
