"""The router's book-keeping: the rows of the signal table that change with every event.

The router sees what it sends, each token that streams back, and what a scrape of the servers brings. It does
not see preemptions or the servers' queues.
"""

from __future__ import annotations

import math

from numba import njit

from pointsman.signals import (
    ACCEPTING,
    CONTEXT_TOKENS,
    DECODE_S_PER_TOKEN,
    DECODING,
    EXPECTED_TOKENS,
    GENERATED_TOKENS,
    KV_CAPACITY_TOKENS,
    KV_USE,
    MEAN_WAIT_S,
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
from pointsman.simulator.state import NOBODY, NUM_LENGTH_CLASSES

FAST = 0.1  # weight of a new observation in the short moving averages
SLOW = 0.01  # and in the long ones
RATE_WINDOW_S = 1.0  # the token rate is averaged over about this long
RATE_SLOW_WINDOW_S = 10.0
LEARN_LENGTH = 0.05  # weight of a finished request in the estimate of its length class


@njit
def length_class(num_prefill):  # type: ignore[no-untyped-def]
    return min(NUM_LENGTH_CLASSES - 1, int(math.log2(num_prefill)))


@njit
def integrate_load(cluster):  # type: ignore[no-untyped-def]
    """Bring the time integrals up to now; call it before the load changes."""
    elapsed = cluster.now - cluster.load_since
    cluster.load_since = cluster.now
    if elapsed > 0.0 and cluster.num_in_system > 0:
        cluster.in_system_area += cluster.num_in_system * elapsed
        cluster.imbalance_area += cluster.imbalance_cv * elapsed
        cluster.busy_span += elapsed


@njit
def change_outstanding(sim, k, change):  # type: ignore[no-untyped-def]
    cluster = sim.cluster[0]
    integrate_load(cluster)
    before = sim.signals[OUTSTANDING, k]
    after = before + change
    sim.signals[OUTSTANDING, k] = after
    cluster.sum_outstanding += int(change)
    cluster.sum_squared_outstanding += int(after * after - before * before)
    total = cluster.sum_outstanding
    if total > 0:
        # Over the replicas that could have been chosen; one that drains or is gone is not the router's doing.
        spread = cluster.num_accepting * cluster.sum_squared_outstanding / (total * total) - 1.0
        cluster.imbalance_cv = math.sqrt(spread) if spread > 0.0 else 0.0
    else:
        cluster.imbalance_cv = 0.0


@njit
def book_sent(sim, k, i):  # type: ignore[no-untyped-def]
    request = sim.requests[i]
    signals = sim.signals
    request.estimate = int(sim.output_estimate[length_class(request.num_prefill)])
    request.is_first_token_seen = 0
    change_outstanding(sim, k, 1.0)
    signals[WAITING, k] += 1.0
    signals[PENDING_PREFILL_TOKENS, k] += request.num_prefill
    signals[EXPECTED_TOKENS, k] += request.estimate
    signals[SENT_AT_SUM, k] += sim.cluster[0].now


@njit
def book_first_token(sim, k, i):  # type: ignore[no-untyped-def]
    request = sim.requests[i]
    signals = sim.signals
    now = sim.cluster[0].now
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


@njit
def book_tokens(sim, k, num_tokens):  # type: ignore[no-untyped-def]
    """Output tokens that streamed back at the end of one step."""
    signals = sim.signals
    replica = sim.replicas[k]
    signals[CONTEXT_TOKENS, k] += num_tokens
    signals[GENERATED_TOKENS, k] += num_tokens
    elapsed = sim.cluster[0].now - replica.rate_since
    if elapsed > 0.0:
        replica.rate_since = sim.cluster[0].now
        rate = num_tokens / elapsed
        signals[TOKEN_RATE, k] += elapsed / (RATE_WINDOW_S + elapsed) * (rate - signals[TOKEN_RATE, k])
        signals[TOKEN_RATE_SLOW, k] += (
            elapsed / (RATE_SLOW_WINDOW_S + elapsed) * (rate - signals[TOKEN_RATE_SLOW, k])
        )


@njit
def book_step(sim, k, interval_s):  # type: ignore[no-untyped-def]
    signals = sim.signals
    if signals[STEP_SLOW_S, k] == 0.0:
        signals[STEP_S, k] = interval_s
        signals[STEP_SLOW_S, k] = interval_s
    else:
        signals[STEP_S, k] += FAST * (interval_s - signals[STEP_S, k])
        signals[STEP_SLOW_S, k] += SLOW * (interval_s - signals[STEP_SLOW_S, k])


@njit
def book_finished(sim, k, i):  # type: ignore[no-untyped-def]
    request = sim.requests[i]
    signals = sim.signals
    signals[DECODING, k] -= 1.0
    signals[CONTEXT_TOKENS, k] -= request.num_prefill + request.num_decode
    signals[GENERATED_TOKENS, k] -= request.num_decode
    signals[EXPECTED_TOKENS, k] -= request.estimate
    change_outstanding(sim, k, -1.0)
    sim.cluster[0].num_in_system -= 1
    cls = length_class(request.num_prefill)
    sim.output_estimate[cls] += LEARN_LENGTH * (request.num_decode - sim.output_estimate[cls])


@njit
def book_lost_all(sim, k):  # type: ignore[no-untyped-def]
    """The replica is gone, and everything that was sent to it with it."""
    signals = sim.signals
    change_outstanding(sim, k, -signals[OUTSTANDING, k])
    for row in (WAITING, DECODING, PENDING_PREFILL_TOKENS, CONTEXT_TOKENS, EXPECTED_TOKENS):
        signals[row, k] = 0.0
    for row in (GENERATED_TOKENS, SENT_AT_SUM, TOKEN_RATE, TOKEN_RATE_SLOW):
        signals[row, k] = 0.0


@njit
def set_accepting(sim, k, is_accepting):  # type: ignore[no-untyped-def]
    cluster = sim.cluster[0]
    replica = sim.replicas[k]
    integrate_load(cluster)
    cluster.num_accepting += is_accepting - replica.is_accepting
    replica.is_accepting = is_accepting
    sim.signals[ACCEPTING, k] = float(is_accepting)


@njit
def update_gauges(replica):  # type: ignore[no-untyped-def]
    """What the server's own metrics say from now on."""
    replica.gauge_running = replica.num_holding
    replica.gauge_waiting = replica.num_waiting
    replica.gauge_kv_use = replica.used_blocks / replica.num_blocks


@njit
def read_gauges(sim, table, first_row):  # type: ignore[no-untyped-def]
    for k in range(sim.cluster[0].num_replicas):
        replica = sim.replicas[k]
        table[first_row, k] = replica.gauge_running
        table[first_row + 1, k] = replica.gauge_waiting
        table[first_row + 2, k] = replica.gauge_kv_use


@njit
def show_scrape(sim, scraped_at):  # type: ignore[no-untyped-def]
    for k in range(sim.cluster[0].num_replicas):
        sim.signals[SCRAPED_RUNNING, k] = sim.scraped[0, k]
        sim.signals[SCRAPED_WAITING, k] = sim.scraped[1, k]
        sim.signals[SCRAPED_KV_USE, k] = sim.scraped[2, k]
        sim.signals[SCRAPED_AT, k] = scraped_at


@njit
def show_oracle(sim):  # type: ignore[no-untyped-def]
    """Oracle mode: the router reads the servers' state of this very instant."""
    for k in range(sim.cluster[0].num_replicas):
        replica = sim.replicas[k]
        sim.signals[SCRAPED_RUNNING, k] = replica.num_holding
        sim.signals[SCRAPED_WAITING, k] = replica.num_waiting
        sim.signals[SCRAPED_KV_USE, k] = replica.used_blocks / replica.num_blocks
        sim.signals[SCRAPED_AT, k] = sim.cluster[0].now


@njit
def oldest_wait(sim, k):  # type: ignore[no-untyped-def]
    """Age of the oldest request without a first token: in the server's queue or in the middle of its prompt."""
    replica = sim.replicas[k]
    oldest = sim.cluster[0].now
    i = replica.waiting_head
    while i != NOBODY:  # recomputed requests stand at the front and had their first token long ago
        if not sim.requests[i].is_first_token_seen:
            oldest = min(oldest, sim.requests[i].dispatched_at)
            break
        i = sim.requests[i].next
    for position in range(replica.first_partial, replica.num_running):
        request = sim.requests[sim.running[k, position]]
        if not request.is_first_token_seen:
            oldest = min(oldest, request.dispatched_at)
    for slot in range(replica.num_stages):
        if sim.batches[k, slot].is_used:
            for entry in range(sim.batches[k, slot].num_entries):
                request = sim.requests[sim.entry_request[k, slot, entry]]
                if not request.is_first_token_seen:
                    oldest = min(oldest, request.dispatched_at)
    return sim.cluster[0].now - oldest


@njit
def derive_signals(sim):  # type: ignore[no-untyped-def]
    """Fill the derived rows; only policies that read them pay for it."""
    signals = sim.signals
    now = sim.cluster[0].now
    for k in range(sim.cluster[0].num_replicas):
        waiting = signals[WAITING, k]
        signals[MEAN_WAIT_S, k] = now - signals[SENT_AT_SUM, k] / waiting if waiting > 0.0 else 0.0
        signals[OLDEST_WAIT_S, k] = oldest_wait(sim, k) if waiting > 0.0 else 0.0
        booked = signals[CONTEXT_TOKENS, k] + signals[PENDING_PREFILL_TOKENS, k]
        signals[KV_USE, k] = booked / signals[KV_CAPACITY_TOKENS, k]
        remaining = max(0.0, signals[EXPECTED_TOKENS, k] - signals[GENERATED_TOKENS, k])
        signals[REMAINING_TOKENS, k] = remaining
        backlog_s = signals[PENDING_PREFILL_TOKENS, k] * signals[PREFILL_S_PER_TOKEN, k]
        signals[PREFILL_BACKLOG_S, k] = backlog_s
        signals[WORK_S, k] = backlog_s + remaining * signals[DECODE_S_PER_TOKEN, k]
        signals[TTFT_TREND_S, k] = signals[TTFT_S, k] - signals[TTFT_SLOW_S, k]
        signals[TOKEN_RATE_TREND, k] = signals[TOKEN_RATE, k] - signals[TOKEN_RATE_SLOW, k]
        signals[SCRAPE_AGE_S, k] = now - signals[SCRAPED_AT, k]
