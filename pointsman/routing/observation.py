"""What a learned policy sees: one function from the signal table and the request to numbers near 1.

The simulator and the live router both fill the signal table and call `fill_observation`, so what a policy was
trained on is what it serves with. Times are read as log2(1 + t / limit): 0 for nothing, 1.0 at the limit that
the service level allows, and still growing at a hundred times that. Output lengths enter only through the
router's own estimate.
"""

from __future__ import annotations

import math

import numpy as np

from pointsman.compiled.jit import kernel
from pointsman.compiled.memory import byte_list, float_list, float_table, single_list, single_table
from pointsman.inference.space import Feature
from pointsman.routing.signals import (
    ACCEPTING,
    CONTEXT_TOKENS,
    DECODE_S_PER_TOKEN,
    DECODING,
    KV_CAPACITY_TOKENS,
    MEAN_WAIT_S,
    NUM_SIGNALS,
    OLDEST_WAIT_S,
    OUTSTANDING,
    PENDING_PREFILL_TOKENS,
    PREFILL_BACKLOG_S,
    PREFILL_S_PER_TOKEN,
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
from pointsman.simulator.book import derive_signals, length_class
from pointsman.simulator.dispatch import can_take
from pointsman.simulator.state import NUM_LENGTH_CLASSES, query_at, replica_at, request_at

# Times are compared with these: the default service level of the configuration.
TTFT_LIMIT_S = 2.0
STEP_LIMIT_S = 0.1

# On selection seeds, 1 to 16 moves `mixed-hardware` from mean end-to-end −15 %, P99 TTFT −36 % to −5 %, −47 %
# against least-outstanding, and hardly changes equal replicas.
OWN_WEIGHT = 8.0
MIN_SLOWDOWN = 1.5  # below, all that differs is who is prefilling
MAX_HELD = 2.0  # requests a replica
AMPLE = 0.8  # of the memory that may be booked

ENTITY_FEATURES = (
    Feature("outstanding", "log2(1 + requests/16)", "load", "sent and not finished"),
    Feature("waiting", "log2(1 + requests/4)", "load", "no first token seen yet"),
    Feature("outstanding_share", "of the mean, minus 1", "load", "outstanding against the other replicas"),
    Feature("kv_after", "share", "load", "KV memory booked with this request's prompt"),
    Feature("kv_expected", "share", "load", "the same with all expected output"),
    Feature("backlog", "log2(1 + s/2)", "delay", "time to prefill what waits"),
    Feature("backlog_after", "log2(1 + s/2)", "delay", "the same with this request"),
    Feature("own_prefill", "log2(1 + s/2)", "request", "time to prefill this request"),
    Feature("work", "log2(1 + s/20)", "delay", "estimated time to drain everything"),
    Feature("mean_wait", "log2(1 + s/2)", "delay", "mean age of the waiting requests"),
    Feature("oldest_wait", "log2(1 + s/2)", "delay", "age of the oldest waiting request"),
    Feature("ttft", "log2(1 + s/2)", "delay", "moving average of the time to first token"),
    Feature("ttft_slow", "log2(1 + s/2)", "delay", "the same over a longer past"),
    Feature("step", "log2(1 + s/0.1)", "delay", "moving average of the time between tokens"),
    Feature("step_predicted", "log2(1 + s/0.1)", "delay", "the same by calibration, for today's load"),
    Feature("step_excess", "log2 of the ratio", "trend", "measured over predicted step: shows stragglers"),
    Feature("step_excess_slow", "log2 of the ratio", "trend", "the same over a longer past"),
    Feature("ttft_trend", "2 s, signed log", "trend", "short minus long moving average"),
    Feature("token_rate", "log2(1 + tokens/s/1000)", "trend", "output tokens seen per second"),
    Feature("token_rate_trend", "of the long average", "trend", "short minus long moving average"),
    Feature("scraped_running", "log2(1 + requests/16)", "scraped", "the server's own count, late"),
    Feature("scraped_waiting", "log2(1 + requests/4)", "scraped", "the server's own queue, late"),
    Feature("scraped_kv_use", "share", "scraped", "KV blocks in use, late"),
    Feature("speed", "log2 of the mean's", "static", "capacity against the other replicas"),
    Feature("prefill_cost", "log2(s/token / 0.1 ms)", "static", "calibrated time of a prompt token"),
    Feature("decode_cost", "log2(s/token / 0.1 ms)", "static", "calibrated time of one more sequence"),
    Feature("step_floor", "log2(s / 10 ms)", "static", "calibrated time of the smallest step"),
    Feature("kv_capacity", "log2(tokens / 65536)", "static", "KV memory"),
    Feature("accepting", "0 or 1", "static", "healthy and not draining"),
    Feature("has_room", "0 or 1", "load", "would start the request at once, as far as the router can tell"),
    Feature("delay_ratio", "log2 of the best's", "hint", "waiting added here (least-delay) against the best"),
    Feature("delay_gap", "log2(1 + s/2)", "hint", "the difference to the best"),
    Feature(
        "measured_delay_ratio", "log2 of the best's", "hint", "the ratio by the latest steps, noise and all"
    ),
)
NUM_ENTITY_FEATURES = len(ENTITY_FEATURES)

CONTEXT_FEATURES = (
    Feature("prompt", "log2(tokens / 512)", "request", "of the request to place"),
    Feature("expected_output", "log2(tokens / 128)", "request", "estimate for prompts of this length"),
    Feature("waited", "log2(1 + s/2)", "request", "time it was held so far"),
    Feature("hold_used", "share", "request", "of the longest hold allowed"),
    Feature("queue", "log2(1 + requests/8 a replica)", "global", "held at the router"),
    Feature("mean_outstanding", "log2(1 + requests/16)", "global", "a replica"),
    Feature("outstanding_cv", "share", "imbalance", "standard deviation over mean"),
    Feature("outstanding_range", "log2(1 + share)", "imbalance", "max minus min, over mean"),
    Feature("mean_kv", "share", "global", "KV memory booked"),
    Feature("min_kv", "share", "global", "of the emptiest replica"),
    Feature("mean_backlog", "log2(1 + s/2)", "global", "prefill backlog"),
    Feature("min_backlog", "log2(1 + s/2)", "global", "of the freest replica"),
    Feature("room_share", "share", "global", "replicas with room for this request"),
    Feature("accepting_share", "share", "global", "replicas that accept requests"),
    Feature("best_delay", "log2(1 + s/20)", "hint", "waiting added at the best replica"),
    Feature("scrape_age", "log2(1 + s/2)", "scraped", "age of the scraped values"),
)
NUM_CONTEXT_FEATURES = len(CONTEXT_FEATURES)


@kernel
def log2p(x):
    return math.log2(1.0 + max(0.0, x))


@kernel
def bounded_log2(x):
    return math.log2(min(64.0, max(1.0 / 64.0, x)))


@kernel
def has_memory(signals, k, num_prefill, kv_limit):
    """Whether replica k has KV memory for the request's prompt, as far as the router can tell."""
    if signals[OUTSTANDING, k] == 0.0:
        return True
    booked = signals[CONTEXT_TOKENS, k] + signals[PENDING_PREFILL_TOKENS, k] + num_prefill
    return booked <= kv_limit * signals[KV_CAPACITY_TOKENS, k]


@kernel
def has_room(signals, k, num_prefill, kv_limit, prefill_limit):
    """Whether replica k would start the request at once, as far as the router can tell."""
    if signals[OUTSTANDING, k] == 0.0:
        return True
    return signals[PENDING_PREFILL_TOKENS, k] < prefill_limit and has_memory(
        signals, k, num_prefill, kv_limit
    )


@kernel
def delay_added(signals, k, num_prefill, output, slowdown):
    """Seconds of waiting the request adds on replica k, its own and that of those already there.

    A step with this request takes floor + others * m; each of the others' steps grows by m. The time to its
    first token counts OWN_WEIGHT times: that is the wait a user sees, and it keeps the tail short.
    """
    others = signals[OUTSTANDING, k]
    prefill_s = (signals[PENDING_PREFILL_TOKENS, k] + num_prefill) * signals[PREFILL_S_PER_TOKEN, k]
    step_s = signals[STEP_FLOOR_S, k] + 2.0 * others * signals[DECODE_S_PER_TOKEN, k]
    return slowdown * ((OWN_WEIGHT + others) * prefill_s + output * step_s)


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
def fill_observation(signals, num_replicas, query, kv_limit, prefill_limit, entities, context):
    """signals [NUM_SIGNALS, R], derived rows included; fills entities [R, F] and context [C].

    Returns the range of the outstanding requests over the replicas that accept any.
    """
    prompt = query.num_prefill
    output = query.expected_output
    best = best_measured = np.inf
    usual = usual_excess(signals, num_replicas)
    sum_outstanding = sum_squares = sum_kv = sum_backlog = 0.0
    min_outstanding = min_kv = min_backlog = np.inf
    max_outstanding = 0.0
    num_room = num_accepting = 0.0
    for k in range(num_replicas):
        outstanding = signals[OUTSTANDING, k]
        booked = signals[CONTEXT_TOKENS, k] + signals[PENDING_PREFILL_TOKENS, k]
        kv = booked / signals[KV_CAPACITY_TOKENS, k]
        sum_outstanding += outstanding
        sum_squares += outstanding * outstanding
        sum_kv += kv
        sum_backlog += signals[PREFILL_BACKLOG_S, k]
        if signals[ACCEPTING, k] > 0.0:
            num_accepting += 1.0
            num_room += has_room(signals, k, prompt, kv_limit, prefill_limit)
            min_outstanding = min(min_outstanding, outstanding)
            max_outstanding = max(max_outstanding, outstanding)
            min_kv = min(min_kv, kv)
            min_backlog = min(min_backlog, signals[PREFILL_BACKLOG_S, k])
            best = min(best, delay_added(signals, k, prompt, output, slowdown_of(signals, k, usual)))
            excess = step_excess(signals, k, STEP_S)
            best_measured = min(best_measured, delay_added(signals, k, prompt, output, excess))
    mean_outstanding = sum_outstanding / num_replicas

    for k in range(num_replicas):
        outstanding = signals[OUTSTANDING, k]
        capacity = signals[KV_CAPACITY_TOKENS, k]
        booked = signals[CONTEXT_TOKENS, k] + signals[PENDING_PREFILL_TOKENS, k] + prompt
        backlog_s = signals[PREFILL_BACKLOG_S, k]
        own_s = prompt * signals[PREFILL_S_PER_TOKEN, k]
        predicted_s = signals[STEP_FLOOR_S, k] + outstanding * signals[DECODE_S_PER_TOKEN, k]
        delay_s = delay_added(signals, k, prompt, output, slowdown_of(signals, k, usual))
        excess = step_excess(signals, k, STEP_S)
        measured_s = delay_added(signals, k, prompt, output, excess)
        trend = signals[TTFT_TREND_S, k] / TTFT_LIMIT_S
        row = entities[k]
        row[0] = log2p(outstanding / 16.0)
        row[1] = log2p(signals[WAITING, k] / 4.0)
        row[2] = min(8.0, outstanding / (mean_outstanding + 1.0) - 1.0)
        row[3] = min(4.0, booked / capacity)
        row[4] = min(4.0, (booked + signals[REMAINING_TOKENS, k] + output) / capacity)
        row[5] = log2p(backlog_s / TTFT_LIMIT_S)
        row[6] = log2p((backlog_s + own_s) / TTFT_LIMIT_S)
        row[7] = log2p(own_s / TTFT_LIMIT_S)
        row[8] = log2p(signals[WORK_S, k] / (10.0 * TTFT_LIMIT_S))
        row[9] = log2p(signals[MEAN_WAIT_S, k] / TTFT_LIMIT_S)
        row[10] = log2p(signals[OLDEST_WAIT_S, k] / TTFT_LIMIT_S)
        row[11] = log2p(signals[TTFT_S, k] / TTFT_LIMIT_S)
        row[12] = log2p(signals[TTFT_SLOW_S, k] / TTFT_LIMIT_S)
        row[13] = log2p(signals[STEP_S, k] / STEP_LIMIT_S)
        row[14] = log2p(predicted_s / STEP_LIMIT_S)
        row[15] = bounded_log2(excess)
        row[16] = bounded_log2(step_excess(signals, k, STEP_SLOW_S))
        row[17] = math.copysign(log2p(abs(trend)), trend)
        row[18] = log2p(signals[TOKEN_RATE, k] / 1000.0)
        row[19] = signals[TOKEN_RATE_TREND, k] / (signals[TOKEN_RATE_SLOW, k] + 100.0)
        row[20] = log2p(signals[SCRAPED_RUNNING, k] / 16.0)
        row[21] = log2p(signals[SCRAPED_WAITING, k] / 4.0)
        row[22] = signals[SCRAPED_KV_USE, k]
        row[23] = bounded_log2(signals[WEIGHT, k])
        row[24] = bounded_log2(signals[PREFILL_S_PER_TOKEN, k] / 1e-4)
        row[25] = bounded_log2(signals[DECODE_S_PER_TOKEN, k] / 1e-4)
        row[26] = bounded_log2(signals[STEP_FLOOR_S, k] / 0.01)
        row[27] = bounded_log2(capacity / 65536.0)
        row[28] = signals[ACCEPTING, k]
        row[29] = has_room(signals, k, prompt, kv_limit, prefill_limit)
        row[30] = bounded_log2(delay_s / best)
        row[31] = min(8.0, log2p((delay_s - best) / TTFT_LIMIT_S))
        row[32] = bounded_log2(measured_s / best_measured)

    spread = sum_squares / num_replicas - mean_outstanding * mean_outstanding
    context[0] = math.log2(max(1.0, prompt) / 512.0)
    context[1] = math.log2(max(1.0, output) / 128.0)
    context[2] = log2p(query.waited_s / TTFT_LIMIT_S)
    context[3] = min(1.0, query.waited_s / query.max_hold_s)
    context[4] = log2p(query.queue_size / (8.0 * num_replicas))
    context[5] = log2p(mean_outstanding / 16.0)
    context[6] = math.sqrt(max(0.0, spread)) / (mean_outstanding + 1.0)
    context[7] = log2p((max_outstanding - min_outstanding) / (mean_outstanding + 1.0))
    context[8] = min(4.0, sum_kv / num_replicas)
    context[9] = min(4.0, min_kv)
    context[10] = log2p(sum_backlog / num_replicas / TTFT_LIMIT_S)
    context[11] = log2p(min_backlog / TTFT_LIMIT_S)
    context[12] = num_room / num_replicas
    context[13] = num_accepting / num_replicas
    context[14] = log2p(best / (10.0 * TTFT_LIMIT_S))
    context[15] = log2p(signals[SCRAPE_AGE_S, 0] / TTFT_LIMIT_S)
    return max_outstanding - min_outstanding


@kernel
def fill_query(sim, query):
    request = request_at(sim.requests, sim.queue_head)
    estimates = float_list(sim.output_estimate, NUM_LENGTH_CLASSES)
    query.num_prefill = request.num_prefill
    query.expected_output = estimates[length_class(request.num_prefill)]
    query.waited_s = sim.now - request.arrived_at
    query.max_hold_s = sim.max_hold_s
    query.queue_size = sim.queue_size


@kernel
def fill_legal(sim, policy, legal):
    """legal [R + 1] bytes. Holding is legal only while no replica has room, and not for ever.

    With holding always legal, training falls into holding everything (DESIGN.md); with this rule it cannot.
    And while a request may be held, none is bound to a replica whose memory is full: it would wait there
    too, and take the memory that running sequences grow into.
    """
    signals = float_table(sim.signals, NUM_SIGNALS, sim.num_replicas)
    i = sim.queue_head
    request = request_at(sim.requests, i)
    may_hold = policy.may_hold and sim.now - request.arrived_at < sim.max_hold_s
    num_takers = 0
    can_start = False
    for k in range(sim.num_replicas):
        legal[k + 1] = can_take(sim, k, i)
        if legal[k + 1] and may_hold:
            legal[k + 1] = has_memory(signals, k, request.num_prefill, policy.kv_limit)
        if legal[k + 1]:
            num_takers += 1
            if has_room(signals, k, request.num_prefill, policy.kv_limit, policy.prefill_limit):
                can_start = True
    legal[0] = num_takers == 0 or (may_hold and not can_start)


@kernel
def is_worth_sending(sim, signals, k, num_prefill, kv_limit, prefill_limit):
    """Whether a request that could be held had better go to replica k: it has room, or too many are held.

    Those behind pay for a wait that only the first gains by. Where memory is short it is not the prompts
    that make them wait, and sending more would only fill it up.
    """
    if has_room(signals, k, num_prefill, kv_limit, prefill_limit):
        return True
    is_crowded = sim.queue_size > MAX_HELD * sim.num_replicas
    return is_crowded and has_memory(signals, k, num_prefill, AMPLE * kv_limit)


@kernel
def keeps_holding(sim, policy):
    """Whether the last decision still stands: hold this request until there is room, for a while.

    Asked anew at every token that some stream finishes, a policy in training, which acts at random now and
    then, could not hold anything for long; and it would mostly be asked when nothing has changed.
    """
    if sim.held_request != sim.queue_head or sim.now >= sim.hold_until:
        return False
    signals = float_table(sim.signals, NUM_SIGNALS, sim.num_replicas)
    request = request_at(sim.requests, sim.queue_head)
    if sim.now - request.arrived_at >= sim.max_hold_s:
        return False
    for k in range(sim.num_replicas):
        if can_take(sim, k, sim.queue_head) and is_worth_sending(
            sim, signals, k, request.num_prefill, policy.kv_limit, policy.prefill_limit
        ):
            return False
    return True


@kernel
def observe(sim, policy, num_slots, entities_address, context_address, legal_address):
    """Fill the observation of a cluster that waits for a decision; rows beyond its replicas stay."""
    signals = float_table(sim.signals, NUM_SIGNALS, sim.num_replicas)
    derive_signals(sim)
    query = query_at(sim.query, 0)
    fill_query(sim, query)
    entities = single_table(entities_address, num_slots, NUM_ENTITY_FEATURES)
    context = single_list(context_address, NUM_CONTEXT_FEATURES)
    sim.outstanding_range = fill_observation(
        signals, sim.num_replicas, query, policy.kv_limit, policy.prefill_limit, entities, context
    )
    fill_legal(sim, policy, byte_list(legal_address, num_slots + 1))


# What a critic may know in training and no policy ever does: the true state of the cluster and of its shadow.
_PRIVILEGED = (
    Feature("in_system", "log2(1 + requests/16 a replica)", "privileged", "in the system"),
    Feature("unstarted", "log2(1 + requests/4 a replica)", "privileged", "without a first token"),
    Feature("mean_age", "log2(1 + s/2)", "privileged", "mean age of those"),
    Feature("queue", "log2(1 + requests/8 a replica)", "privileged", "held at the router"),
    Feature("used_blocks", "share", "privileged", "KV blocks in use, mean"),
    Feature("max_used_blocks", "share", "privileged", "KV blocks in use, fullest replica"),
    Feature("output_left", "log2(1 + tokens/4096 a replica)", "privileged", "true output still to come"),
    Feature("backlog", "log2(1 + s/2)", "privileged", "mean prefill backlog"),
    Feature("max_backlog", "log2(1 + s/2)", "privileged", "longest prefill backlog"),
)
NUM_OF_EACH = len(_PRIVILEGED)
PRIVILEGED_FEATURES = (
    *_PRIVILEGED,
    *(feature._replace(name=f"shadow_{feature.name}") for feature in _PRIVILEGED),
)
NUM_PRIVILEGED_FEATURES = len(PRIVILEGED_FEATURES)


@kernel
def fill_privileged(sim, privileged, which):
    """privileged [P]; which: 0 for the cluster's own part, 1 for its shadow's."""
    signals = float_table(sim.signals, NUM_SIGNALS, sim.num_replicas)
    num_replicas = sim.num_replicas
    sum_backlog_s = max_backlog_s = sum_used = max_used = 0.0
    for k in range(num_replicas):
        replica = replica_at(sim.replicas, k)
        backlog_s = signals[PENDING_PREFILL_TOKENS, k] * signals[PREFILL_S_PER_TOKEN, k]
        used = replica.used_blocks / replica.num_blocks
        sum_backlog_s += backlog_s
        max_backlog_s = max(max_backlog_s, backlog_s)
        sum_used += used
        max_used = max(max_used, used)
    age_s = sim.now - sim.sum_unstarted_at / sim.num_unstarted if sim.num_unstarted > 0 else 0.0
    start = which * NUM_OF_EACH
    privileged[start] = log2p(sim.num_in_system / (16.0 * num_replicas))
    privileged[start + 1] = log2p(sim.num_unstarted / (4.0 * num_replicas))
    privileged[start + 2] = log2p(age_s / TTFT_LIMIT_S)
    privileged[start + 3] = log2p(sim.queue_size / (8.0 * num_replicas))
    privileged[start + 4] = sum_used / num_replicas
    privileged[start + 5] = max_used
    privileged[start + 6] = log2p(sim.num_decode_left / (4096.0 * num_replicas))
    privileged[start + 7] = log2p(sum_backlog_s / num_replicas / TTFT_LIMIT_S)
    privileged[start + 8] = log2p(max_backlog_s / TTFT_LIMIT_S)
