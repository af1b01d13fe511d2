"""What a learned policy sees: one function from the signal table and the request to numbers near 1.

The simulator and the live router both call `observe`, so what a policy was trained on is what it serves with.
The numbers, their units and their scales are declared in features.py.
"""

from __future__ import annotations

import math

import numpy as np

from pointsman.compiled.jit import kernel
from pointsman.compiled.memory import byte_list, single_list, single_table
from pointsman.routing import features
from pointsman.routing.booking import booked_tokens, derive_signals, signals_of
from pointsman.routing.features import NUM_CONTEXT_FEATURES, NUM_ENTITY_FEATURES
from pointsman.routing.legality import fill_legal, has_room
from pointsman.routing.signals import (
    ACCEPTING,
    CACHE_FILL,
    DECODE_S_PER_TOKEN,
    DECODING,
    EXPECTED_HIT_TOKENS,
    HIT_SHARE,
    KV_CAPACITY_TOKENS,
    MEAN_WAIT_S,
    OLDEST_WAIT_S,
    OUTSTANDING,
    PENDING_PREFILL_TOKENS,
    PREFILL_BACKLOG_S,
    PREFILL_S_PER_TOKEN,
    PREFILL_SHARE,
    REMAINING_TOKENS,
    SCRAPE_AGE_S,
    SCRAPED_KV_USE,
    SCRAPED_RUNNING,
    SCRAPED_WAITING,
    STEP_FLOOR_S,
    STEP_S,
    STEP_SLOW_S,
    TOKEN_RATE,
    TOKEN_RATE_SLOW,
    TOKEN_RATE_TREND,
    TTFT_S,
    TTFT_SLOW_S,
    TTFT_TREND_S,
    WAITING,
    WEIGHT,
    WORK_S,
)

# Times are compared with the service level that the policy was trained for; by default, this one.
TTFT_LIMIT_S = 2.0
STEP_LIMIT_S = 0.1

# On selection seeds, 1 to 16 moves `mixed-hardware` from mean end-to-end −15 %, P99 TTFT −36 % to −5 %, −47 %
# against least-outstanding, and hardly changes equal replicas.
OWN_WEIGHT = 8.0
# Of `gathering`. On selection seeds of `steady-chat`: −4.6 % mean end-to-end and −32 % P99 TTFT against
# least-outstanding (late-binding: −2.3 %, −39 %); a lower urgency gives up more of the tail.
URGENCY = 30.0
GATHER = 8.0
HARM = 1.5
USUAL_OUTPUT = 200.0  # tokens
MIN_SLOWDOWN = 1.5  # below, all that differs is who is prefilling


@kernel
def log2p(x):
    return math.log2(1.0 + max(0.0, x))


@kernel
def bounded_log2(x):
    return math.log2(min(64.0, max(1.0 / 64.0, x)))


@kernel
def delay_added(signals, k, prompt, output, slowdown):
    """Seconds of waiting the request adds on replica k, its own and that of those already there.

    A step with this request takes floor + others * m; each of the others' steps grows by m. The time to its
    first token counts OWN_WEIGHT times: that is the wait a user sees, and it keeps the tail short.
    """
    others = signals[OUTSTANDING, k]
    to_compute = signals[PENDING_PREFILL_TOKENS, k] + prompt - signals[EXPECTED_HIT_TOKENS, k]
    prefill_s = to_compute * signals[PREFILL_S_PER_TOKEN, k]
    step_s = signals[STEP_FLOOR_S, k] + 2.0 * others * signals[DECODE_S_PER_TOKEN, k]
    return slowdown * ((OWN_WEIGHT + others) * prefill_s + output * step_s)


@kernel
def gathered_delay(signals, k, prompt, output, slowdown, urgency, gather, harm):
    """Like `delay_added`, and what is to be expected of prompts that are yet to come.

    A prompt delays all streams of its replica. Where prompts gather, few streams should be, least of all long
    ones; and where few streams are, a long prompt does least harm. What already waits there does its harm
    anyway, so that only the request's own wait counts it.
    """
    others = signals[OUTSTANDING, k]
    own_s = (prompt - signals[EXPECTED_HIT_TOKENS, k]) * signals[PREFILL_S_PER_TOKEN, k]
    wait_s = signals[PENDING_PREFILL_TOKENS, k] * signals[PREFILL_S_PER_TOKEN, k] + own_s
    step_s = signals[STEP_FLOOR_S, k] + others * signals[DECODE_S_PER_TOKEN, k]
    interrupted = gather * slowdown * signals[PREFILL_SHARE, k] * output / USUAL_OUTPUT
    return slowdown * (urgency * wait_s + harm * others * own_s + output * step_s * (1.0 + interrupted))


@kernel
def step_excess(signals, k, row):
    """Measured step (row) over what calibration predicts for the sequences that decode now."""
    if signals[row, k] == 0.0:
        return 1.0
    decoding = max(1.0, signals[DECODING, k])
    return signals[row, k] / (signals[STEP_FLOOR_S, k] + (decoding - 1.0) * signals[DECODE_S_PER_TOKEN, k])


@kernel
def usual_excess(signals, num_replicas):
    """The geometric mean of `step_excess`: what calibration leaves out everywhere, prefill above all."""
    total = 0.0
    for k in range(num_replicas):
        total += math.log(step_excess(signals, k, STEP_SLOW_S))
    return math.exp(total / num_replicas)


@kernel
def slowdown_of(signals, k, usual):
    """How much slower replica k is than its calibration says; 1 unless it stands out from the others."""
    excess = step_excess(signals, k, STEP_SLOW_S) / usual
    return excess if excess > MIN_SLOWDOWN else 1.0


@kernel
def fill_observation(router, policy, ask, now, entities, context):
    """Fill entities [R, F] and context [C]; the derived signals are up to date.

    Returns the range of the outstanding requests over the replicas that accept any.
    """
    signals = signals_of(router)
    num_replicas = router.num_replicas
    prompt = float(ask.prompt_tokens)
    output = ask.expected_output
    waited_s = now - ask.arrived_at
    ttft_limit_s, step_limit_s = policy.ttft_limit_s, policy.step_limit_s
    best = best_measured = best_gathered = np.inf
    usual = usual_excess(signals, num_replicas)
    sum_outstanding = sum_squares = sum_kv = sum_backlog = sum_prefill = 0.0
    min_outstanding = min_kv = min_backlog = np.inf
    max_outstanding = 0.0
    num_room = num_accepting = scrape_age_s = best_hit = 0.0
    for k in range(num_replicas):
        outstanding = signals[OUTSTANDING, k]
        kv = booked_tokens(signals, k) / signals[KV_CAPACITY_TOKENS, k]
        sum_outstanding += outstanding
        sum_squares += outstanding * outstanding
        sum_kv += kv
        sum_backlog += signals[PREFILL_BACKLOG_S, k]
        sum_prefill += signals[PREFILL_SHARE, k]
        if signals[ACCEPTING, k] > 0.0:
            num_accepting += 1.0
            best_hit = max(best_hit, signals[EXPECTED_HIT_TOKENS, k])
            scrape_age_s = max(scrape_age_s, signals[SCRAPE_AGE_S, k])
            num_room += has_room(signals, k, prompt, policy)
            min_outstanding = min(min_outstanding, outstanding)
            max_outstanding = max(max_outstanding, outstanding)
            min_kv = min(min_kv, kv)
            min_backlog = min(min_backlog, signals[PREFILL_BACKLOG_S, k])
            slowdown = slowdown_of(signals, k, usual)
            best = min(best, delay_added(signals, k, prompt, output, slowdown))
            gathered_s = gathered_delay(signals, k, prompt, output, slowdown, URGENCY, GATHER, HARM)
            best_gathered = min(best_gathered, gathered_s)
            excess = step_excess(signals, k, STEP_S)
            best_measured = min(best_measured, delay_added(signals, k, prompt, output, excess))
    mean_outstanding = sum_outstanding / num_replicas
    mean_prefill = sum_prefill / num_replicas

    for k in range(num_replicas):
        outstanding = signals[OUTSTANDING, k]
        capacity = signals[KV_CAPACITY_TOKENS, k]
        booked = booked_tokens(signals, k) + prompt
        backlog_s = signals[PREFILL_BACKLOG_S, k]
        own_s = (prompt - signals[EXPECTED_HIT_TOKENS, k]) * signals[PREFILL_S_PER_TOKEN, k]
        predicted_s = signals[STEP_FLOOR_S, k] + outstanding * signals[DECODE_S_PER_TOKEN, k]
        slowdown = slowdown_of(signals, k, usual)
        delay_s = delay_added(signals, k, prompt, output, slowdown)
        gathered_s = gathered_delay(signals, k, prompt, output, slowdown, URGENCY, GATHER, HARM)
        excess = step_excess(signals, k, STEP_S)
        measured_s = delay_added(signals, k, prompt, output, excess)
        trend = signals[TTFT_TREND_S, k] / ttft_limit_s
        row = entities[k]
        row[features.OUTSTANDING] = log2p(outstanding / 16.0)
        row[features.WAITING] = log2p(signals[WAITING, k] / 4.0)
        row[features.OUTSTANDING_SHARE] = min(8.0, outstanding / (mean_outstanding + 1.0) - 1.0)
        row[features.KV_AFTER] = min(4.0, booked / capacity)
        row[features.KV_EXPECTED] = min(4.0, (booked + signals[REMAINING_TOKENS, k] + output) / capacity)
        row[features.BACKLOG] = log2p(backlog_s / ttft_limit_s)
        row[features.BACKLOG_AFTER] = log2p((backlog_s + own_s) / ttft_limit_s)
        row[features.OWN_PREFILL] = log2p(own_s / ttft_limit_s)
        row[features.WORK] = log2p(signals[WORK_S, k] / (10.0 * ttft_limit_s))
        row[features.MEAN_WAIT] = log2p(signals[MEAN_WAIT_S, k] / ttft_limit_s)
        row[features.OLDEST_WAIT] = log2p(signals[OLDEST_WAIT_S, k] / ttft_limit_s)
        row[features.TTFT] = log2p(signals[TTFT_S, k] / ttft_limit_s)
        row[features.TTFT_SLOW] = log2p(signals[TTFT_SLOW_S, k] / ttft_limit_s)
        row[features.STEP] = log2p(signals[STEP_S, k] / step_limit_s)
        row[features.STEP_PREDICTED] = log2p(predicted_s / step_limit_s)
        row[features.STEP_EXCESS] = bounded_log2(excess)
        row[features.STEP_EXCESS_SLOW] = bounded_log2(step_excess(signals, k, STEP_SLOW_S))
        row[features.TTFT_TREND] = math.copysign(log2p(abs(trend)), trend)
        row[features.TOKEN_RATE] = log2p(signals[TOKEN_RATE, k] / 1000.0)
        row[features.TOKEN_RATE_TREND] = signals[TOKEN_RATE_TREND, k] / (signals[TOKEN_RATE_SLOW, k] + 100.0)
        row[features.SCRAPED_RUNNING] = log2p(signals[SCRAPED_RUNNING, k] / 16.0)
        row[features.SCRAPED_WAITING] = log2p(signals[SCRAPED_WAITING, k] / 4.0)
        row[features.SCRAPED_KV_USE] = signals[SCRAPED_KV_USE, k]
        row[features.SPEED] = bounded_log2(signals[WEIGHT, k])
        row[features.PREFILL_COST] = bounded_log2(signals[PREFILL_S_PER_TOKEN, k] / 1e-4)
        row[features.DECODE_COST] = bounded_log2(signals[DECODE_S_PER_TOKEN, k] / 1e-4)
        row[features.STEP_FLOOR] = bounded_log2(signals[STEP_FLOOR_S, k] / 0.01)
        row[features.KV_CAPACITY] = bounded_log2(capacity / 65536.0)
        row[features.ACCEPTING] = signals[ACCEPTING, k]
        row[features.HAS_ROOM] = has_room(signals, k, prompt, policy)
        row[features.DELAY_RATIO] = bounded_log2(delay_s / best)
        row[features.DELAY_GAP] = min(8.0, log2p((delay_s - best) / ttft_limit_s))
        row[features.MEASURED_DELAY_RATIO] = bounded_log2(measured_s / best_measured)
        gap_s = (best_hit - signals[EXPECTED_HIT_TOKENS, k]) * signals[PREFILL_S_PER_TOKEN, k]
        row[features.HIT] = signals[EXPECTED_HIT_TOKENS, k] / prompt
        row[features.HIT_GAP] = log2p(gap_s / ttft_limit_s)
        row[features.HIT_SHARE] = signals[HIT_SHARE, k]
        row[features.CACHE_FILL] = signals[CACHE_FILL, k]
        row[features.PREFILL_SHARE] = min(4.0, signals[PREFILL_SHARE, k])
        row[features.PREFILL_SHARE_OF_MEAN] = signals[PREFILL_SHARE, k] / (mean_prefill + 0.01) - 1.0
        row[features.HARM] = log2p(outstanding * own_s / (10.0 * ttft_limit_s))
        row[features.GATHER_RATIO] = bounded_log2(gathered_s / best_gathered)
        row[features.GATHER_GAP] = min(8.0, log2p((gathered_s - best_gathered) / ttft_limit_s))

    spread = sum_squares / num_replicas - mean_outstanding * mean_outstanding
    context[features.PROMPT] = math.log2(max(1.0, prompt) / 512.0)
    context[features.EXPECTED_OUTPUT] = math.log2(max(1.0, output) / 128.0)
    context[features.WAITED] = log2p(waited_s / ttft_limit_s)
    context[features.HOLD_USED] = min(1.0, waited_s / router.max_hold_s)
    context[features.QUEUE] = log2p(router.queue_size / (8.0 * num_replicas))
    context[features.MEAN_OUTSTANDING] = log2p(mean_outstanding / 16.0)
    context[features.OUTSTANDING_CV] = math.sqrt(max(0.0, spread)) / (mean_outstanding + 1.0)
    outstanding_range = max_outstanding - min_outstanding
    context[features.OUTSTANDING_RANGE] = log2p(outstanding_range / (mean_outstanding + 1.0))
    context[features.MEAN_KV] = min(4.0, sum_kv / num_replicas)
    context[features.MIN_KV] = min(4.0, min_kv)
    context[features.MEAN_BACKLOG] = log2p(sum_backlog / num_replicas / ttft_limit_s)
    context[features.MIN_BACKLOG] = log2p(min_backlog / ttft_limit_s)
    context[features.ROOM_SHARE] = num_room / num_replicas
    context[features.ACCEPTING_SHARE] = num_accepting / num_replicas
    context[features.BEST_DELAY] = log2p(best / (10.0 * ttft_limit_s))
    context[features.SCRAPE_AGE] = log2p(scrape_age_s / TTFT_LIMIT_S)
    context[features.BEST_HIT] = best_hit / prompt
    return outstanding_range


@kernel
def observe(router, policy, ask, now, num_slots, entities_address, context_address, legal_address):
    """Fill the observation of a request to place; rows beyond the replicas there are stay as they are.

    Returns the range of the outstanding requests.
    """
    derive_signals(router, now)
    entities = single_table(entities_address, num_slots, NUM_ENTITY_FEATURES)
    context = single_list(context_address, NUM_CONTEXT_FEATURES)
    fill_legal(router, policy, ask, now, byte_list(legal_address, num_slots + 1))
    return fill_observation(router, policy, ask, now, entities, context)
