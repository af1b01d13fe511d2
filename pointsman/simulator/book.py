"""The router's book-keeping: the rows of the signal table that change with every event.

The router sees what it sends, each token that streams back, and what a scrape of the servers brings. It does
not see preemptions or the servers' queues.
"""

from __future__ import annotations

import math

from pointsman.compiled.jit import kernel
from pointsman.compiled.memory import float_list, float_table, int_list
from pointsman.routing.signals import (
    ACCEPTING,
    CONTEXT_TOKENS,
    DECODE_S_PER_TOKEN,
    DECODING,
    EXPECTED_TOKENS,
    GENERATED_TOKENS,
    KV_CAPACITY_TOKENS,
    KV_USE,
    MEAN_WAIT_S,
    NUM_SIGNALS,
    OLDEST_WAIT_S,
    OUTSTANDING,
    PENDING_PREFILL_TOKENS,
    PREFILL_BACKLOG_S,
    PREFILL_S_PER_TOKEN,
    REMAINING_TOKENS,
    SCRAPE_AGE_S,
    SCRAPED_AT,
    SCRAPED_KV_USE,
    SCRAPED_RUNNING,
    SCRAPED_WAITING,
    SENT_AT_SUM,
    STEP_S,
    STEP_SLOW_S,
    TOKEN_RATE,
    TOKEN_RATE_SLOW,
    TOKEN_RATE_TREND,
    TTFT_S,
    TTFT_SLOW_S,
    TTFT_TREND_S,
    WAITING,
    WORK_S,
)
from pointsman.simulator.state import (
    NOBODY,
    NUM_LENGTH_CLASSES,
    batch_at,
    entry_at,
    replica_at,
    request_at,
)

FAST = 0.1  # weight of a new observation in the short moving averages
SLOW = 0.01  # and in the long ones
RATE_WINDOW_S = 1.0  # the token rate is averaged over about this long
RATE_SLOW_WINDOW_S = 10.0
RATE_INTERVAL_S = 0.05  # and brought up to date this often
LEARN_LENGTH = 0.05  # weight of a finished request in the estimate of its length class


@kernel
def length_class(num_prefill):
    return min(NUM_LENGTH_CLASSES - 1, math.frexp(num_prefill)[1] - 1)


@kernel
def integrate_load(sim):
    """Bring the time integrals up to now; call it before the load changes."""
    elapsed = sim.now - sim.load_since
    sim.load_since = sim.now
    if elapsed > 0.0 and sim.num_in_system > 0:
        sim.in_system_area += sim.num_in_system * elapsed
        sim.unstarted_area += sim.num_unstarted * elapsed
        sim.age_area += (sim.num_unstarted * (sim.now - 0.5 * elapsed) - sim.sum_unstarted_at) * elapsed
        sim.imbalance_area += sim.imbalance_cv * elapsed
        sim.busy_span += elapsed


@kernel
def change_outstanding(sim, k, change):
    signals = float_table(sim.signals, NUM_SIGNALS, sim.num_replicas)
    integrate_load(sim)
    before = signals[OUTSTANDING, k]
    after = before + change
    signals[OUTSTANDING, k] = after
    sim.sum_outstanding += int(change)
    sim.sum_squared_outstanding += int(after * after - before * before)
    total = sim.sum_outstanding
    if total > 0:
        # Over the replicas that could have been chosen; one that drains or is gone is not the router's doing.
        spread = sim.num_accepting * sim.sum_squared_outstanding / (total * total) - 1.0
        sim.imbalance_cv = math.sqrt(spread) if spread > 0.0 else 0.0
    else:
        sim.imbalance_cv = 0.0


@kernel
def book_sent(sim, k, i):
    signals = float_table(sim.signals, NUM_SIGNALS, sim.num_replicas)
    request = request_at(sim.requests, i)
    request.estimate = int(
        float_list(sim.output_estimate, NUM_LENGTH_CLASSES)[length_class(request.num_prefill)]
    )
    request.is_first_token_seen = 0
    change_outstanding(sim, k, 1.0)
    signals[WAITING, k] += 1.0
    signals[PENDING_PREFILL_TOKENS, k] += request.num_prefill
    signals[EXPECTED_TOKENS, k] += request.estimate
    signals[SENT_AT_SUM, k] += sim.now


@kernel
def end_wait(sim, i):
    """The request has its first token, however often it may be sent again."""
    request = request_at(sim.requests, i)
    integrate_load(sim)
    request.first_token_at = sim.now
    ttft_s = sim.now - request.arrived_at
    sim.num_unstarted -= 1
    # Nothing left of rounding errors when nobody waits.
    sim.sum_unstarted_at = sim.sum_unstarted_at - request.arrived_at if sim.num_unstarted > 0 else 0.0
    sim.num_first_tokens += 1
    sim.num_fast_first_tokens += ttft_s <= sim.slo_ttft_s
    sim.slo_excess_s += max(0.0, ttft_s - sim.slo_ttft_s)


@kernel
def book_first_token(sim, k, i):
    signals = float_table(sim.signals, NUM_SIGNALS, sim.num_replicas)
    request = request_at(sim.requests, i)
    now = sim.now
    request.is_first_token_seen = 1
    signals[WAITING, k] -= 1.0
    signals[DECODING, k] += 1.0
    signals[PENDING_PREFILL_TOKENS, k] -= request.num_prefill
    # Vidur's sarathi replays the rest of an evicted partial prompt as if it were output; count it as prompt.
    replayed = request.num_prefill - request.prefill
    signals[CONTEXT_TOKENS, k] += request.prefill
    signals[GENERATED_TOKENS, k] -= replayed
    signals[SENT_AT_SUM, k] -= request.dispatched_at
    ttft = now - request.dispatched_at
    if signals[TTFT_SLOW_S, k] == 0.0:
        signals[TTFT_S, k] = ttft
        signals[TTFT_SLOW_S, k] = ttft
    else:
        signals[TTFT_S, k] += FAST * (ttft - signals[TTFT_S, k])
        signals[TTFT_SLOW_S, k] += SLOW * (ttft - signals[TTFT_SLOW_S, k])


@kernel
def book_tokens(sim, k, num_tokens):
    """Output tokens that streamed back at the end of one step."""
    signals = float_table(sim.signals, NUM_SIGNALS, sim.num_replicas)
    replica = replica_at(sim.replicas, k)
    signals[CONTEXT_TOKENS, k] += num_tokens
    signals[GENERATED_TOKENS, k] += num_tokens
    sim.num_decode_left -= num_tokens
    replica.rate_tokens += num_tokens
    elapsed = sim.now - replica.rate_since
    if elapsed >= RATE_INTERVAL_S:
        rate = replica.rate_tokens / elapsed
        replica.rate_since = sim.now
        replica.rate_tokens = 0
        signals[TOKEN_RATE, k] += elapsed / (RATE_WINDOW_S + elapsed) * (rate - signals[TOKEN_RATE, k])
        signals[TOKEN_RATE_SLOW, k] += (
            elapsed / (RATE_SLOW_WINDOW_S + elapsed) * (rate - signals[TOKEN_RATE_SLOW, k])
        )


@kernel
def book_step(sim, k, interval_s):
    signals = float_table(sim.signals, NUM_SIGNALS, sim.num_replicas)
    if signals[STEP_SLOW_S, k] == 0.0:
        signals[STEP_S, k] = interval_s
        signals[STEP_SLOW_S, k] = interval_s
    else:
        signals[STEP_S, k] += FAST * (interval_s - signals[STEP_S, k])
        signals[STEP_SLOW_S, k] += SLOW * (interval_s - signals[STEP_SLOW_S, k])


@kernel
def book_finished(sim, k, i):
    signals = float_table(sim.signals, NUM_SIGNALS, sim.num_replicas)
    request = request_at(sim.requests, i)
    signals[DECODING, k] -= 1.0
    signals[CONTEXT_TOKENS, k] -= request.num_prefill + request.num_decode
    signals[GENERATED_TOKENS, k] -= request.num_decode
    signals[EXPECTED_TOKENS, k] -= request.estimate
    change_outstanding(sim, k, -1.0)
    sim.num_in_system -= 1
    sim.sum_e2e_s += sim.now - request.arrived_at
    decode_s = sim.now - request.first_token_at
    sim.slo_excess_s += max(0.0, decode_s - (request.num_decode - 1) * sim.slo_tpot_s)
    cls = length_class(request.num_prefill)
    estimates = float_list(sim.output_estimate, NUM_LENGTH_CLASSES)
    estimates[cls] += LEARN_LENGTH * (request.num_decode - estimates[cls])


@kernel
def book_lost_all(sim, k):
    """The replica is gone, and everything that was sent to it with it."""
    signals = float_table(sim.signals, NUM_SIGNALS, sim.num_replicas)
    change_outstanding(sim, k, -signals[OUTSTANDING, k])
    sim.num_decode_left += int(signals[GENERATED_TOKENS, k])
    for row in (WAITING, DECODING, PENDING_PREFILL_TOKENS, CONTEXT_TOKENS, EXPECTED_TOKENS):
        signals[row, k] = 0.0
    for row in (GENERATED_TOKENS, SENT_AT_SUM, TOKEN_RATE, TOKEN_RATE_SLOW):
        signals[row, k] = 0.0


@kernel
def set_accepting(sim, k, is_accepting):
    signals = float_table(sim.signals, NUM_SIGNALS, sim.num_replicas)
    replica = replica_at(sim.replicas, k)
    integrate_load(sim)
    sim.num_accepting += is_accepting - replica.is_accepting
    replica.is_accepting = is_accepting
    signals[ACCEPTING, k] = float(is_accepting)


@kernel
def update_gauges(replica):
    """What the server's own metrics say from now on."""
    replica.gauge_running = replica.num_holding
    replica.gauge_waiting = replica.num_waiting
    replica.gauge_used_blocks = replica.used_blocks


@kernel
def read_gauges(sim):
    """A scrape starts; what it reads will reach the router later."""
    scraped = float_table(sim.scraped, 3, sim.num_replicas)
    for k in range(sim.num_replicas):
        replica = replica_at(sim.replicas, k)
        scraped[0, k] = replica.gauge_running
        scraped[1, k] = replica.gauge_waiting
        scraped[2, k] = replica.gauge_used_blocks / replica.num_blocks


@kernel
def show_scrape(sim, scraped_at):
    scraped = float_table(sim.scraped, 3, sim.num_replicas)
    signals = float_table(sim.signals, NUM_SIGNALS, sim.num_replicas)
    for k in range(sim.num_replicas):
        signals[SCRAPED_RUNNING, k] = scraped[0, k]
        signals[SCRAPED_WAITING, k] = scraped[1, k]
        signals[SCRAPED_KV_USE, k] = scraped[2, k]
        signals[SCRAPED_AT, k] = scraped_at


@kernel
def show_oracle(sim):
    """Oracle mode: the router reads the servers' state of this very instant."""
    signals = float_table(sim.signals, NUM_SIGNALS, sim.num_replicas)
    for k in range(sim.num_replicas):
        replica = replica_at(sim.replicas, k)
        signals[SCRAPED_RUNNING, k] = replica.num_holding
        signals[SCRAPED_WAITING, k] = replica.num_waiting
        signals[SCRAPED_KV_USE, k] = replica.used_blocks / replica.num_blocks
        signals[SCRAPED_AT, k] = sim.now


@kernel
def oldest_wait(sim, k):
    """Age of the oldest request without a first token, queued or in the middle of its prompt."""
    replica = replica_at(sim.replicas, k)
    running = int_list(replica.running, sim.max_seqs)
    oldest = sim.now
    i = replica.waiting_head
    while i != NOBODY:  # recomputed requests stand at the front and had their first token long ago
        if not request_at(sim.requests, i).is_first_token_seen:
            oldest = min(oldest, request_at(sim.requests, i).dispatched_at)
            break
        i = request_at(sim.requests, i).next
    for position in range(replica.first_partial, replica.num_running):
        request = request_at(sim.requests, running[position])
        if not request.is_first_token_seen:
            oldest = min(oldest, request.dispatched_at)
    for slot in range(replica.num_stages):
        batch = batch_at(replica.batches, slot)
        for entry in range(batch.num_entries if batch.is_used else 0):
            request = request_at(sim.requests, entry_at(batch.entries, entry).request)
            if not request.is_first_token_seen:
                oldest = min(oldest, request.dispatched_at)
    return sim.now - oldest


@kernel
def derive_signals(sim):
    """Fill the derived rows; only policies that read them pay for it."""
    signals = float_table(sim.signals, NUM_SIGNALS, sim.num_replicas)
    now = sim.now
    for k in range(sim.num_replicas):
        waiting = signals[WAITING, k]
        signals[MEAN_WAIT_S, k] = now - signals[SENT_AT_SUM, k] / waiting if waiting > 0.0 else 0.0
        signals[OLDEST_WAIT_S, k] = oldest_wait(sim, k) if waiting > 0.0 else 0.0
        booked = signals[CONTEXT_TOKENS, k] + signals[PENDING_PREFILL_TOKENS, k]
        signals[KV_USE, k] = booked / signals[KV_CAPACITY_TOKENS, k]
        remaining = max(0.0, signals[EXPECTED_TOKENS, k] - signals[GENERATED_TOKENS, k])
        signals[REMAINING_TOKENS, k] = remaining
        backlog_s = signals[PENDING_PREFILL_TOKENS, k] * signals[PREFILL_S_PER_TOKEN, k]
        signals[PREFILL_BACKLOG_S, k] = backlog_s
        signals[WORK_S, k] = backlog_s + signals[EXPECTED_TOKENS, k] * signals[DECODE_S_PER_TOKEN, k]
        signals[TTFT_TREND_S, k] = signals[TTFT_S, k] - signals[TTFT_SLOW_S, k]
        signals[TOKEN_RATE_TREND, k] = signals[TOKEN_RATE, k] - signals[TOKEN_RATE_SLOW, k]
        signals[SCRAPE_AGE_S, k] = now - signals[SCRAPED_AT, k]
