"""The router's books, compiled: what it sends and what comes back, as rows of the signal table.

The simulator and the live router keep their books by these functions. The router sees what it sends, each
token that streams back, and what a scrape of the servers brings. It does not see preemptions or the servers'
queues. `router` is a ROUTER record, k a replica, i a ticket; times are of one clock that only moves forward.
"""

from __future__ import annotations

import math

from pointsman.compiled.jit import inlined, kernel
from pointsman.compiled.memory import float_list, float_table
from pointsman.routing.prefixes import fill_of, forget_cache, learn_trust, touch, touch_answered, trust_of
from pointsman.routing.records import NOBODY, NUM_LENGTH_CLASSES, account_at, link_at, ticket_at
from pointsman.routing.signals import (
    ACCEPTING,
    CACHE_FILL,
    CONTEXT_TOKENS,
    DECODE_S_PER_TOKEN,
    DECODING,
    EXPECTED_TOKENS,
    GENERATED_TOKENS,
    HIT_SHARE,
    KV_CAPACITY_TOKENS,
    KV_USE,
    MEAN_WAIT_S,
    NUM_SIGNALS,
    OLDEST_WAIT_S,
    OUTSTANDING,
    PENDING_CACHED_TOKENS,
    PENDING_PREFILL_TOKENS,
    PREFILL_BACKLOG_S,
    PREFILL_LOAD,
    PREFILL_S_PER_TOKEN,
    PREFILL_SHARE,
    READ_TOKENS,
    REMAINING_TOKENS,
    SCRAPE_AGE_S,
    SCRAPED_AT,
    SCRAPED_KV_USE,
    SCRAPED_RUNNING,
    SCRAPED_WAITING,
    SENT_AT_SUM,
    STEP_S,
    STEP_SLOW_S,
    SUMMED_ROWS,
    TOKEN_RATE,
    TOKEN_RATE_SLOW,
    TOKEN_RATE_TREND,
    TTFT_S,
    TTFT_SLOW_S,
    TTFT_TREND_S,
    WAITING,
    WORK_S,
)

FAST = 0.1  # weight of a new observation in the short moving averages
SLOW = 0.01  # and in the long ones
RATE_WINDOW_S = 1.0  # the token rate is averaged over about this long
RATE_SLOW_WINDOW_S = 10.0
RATE_INTERVAL_S = 0.05  # and brought up to date this often
PREFILL_WINDOW_S = 10.0  # of the share of time that prompts take
LEARN_LENGTH = 0.05  # weight of a finished request in the estimate of its length class
LEARN_HITS = 0.05  # and in the cached share of prompts
SMALL_TOKENS = 512  # of prompt and output: fewer are of size 0; each doubling is one size more
NUM_SIZES = 10
LEARN_SIZE = 0.01  # a request moves the usual size by so much, up or down


@inlined
def signals_of(router):
    """[NUM_SIGNALS, R]"""
    return float_table(router.signals, NUM_SIGNALS, router.num_replicas)


@kernel
def length_class(prompt_tokens):
    return min(NUM_LENGTH_CLASSES - 1, math.frexp(prompt_tokens)[1] - 1)


@kernel
def size_class(tokens):
    """How large a request of so many tokens is, prompt and output, from 0 to NUM_SIZES - 1."""
    return min(max(math.frexp(tokens / SMALL_TOKENS)[1], 0), NUM_SIZES - 1)


@kernel
def learn_size(router, tokens):
    """The usual size is a running median, taken in the middle of its class."""
    size = size_class(tokens) + 0.5
    if router.usual_size == 0.0:
        router.usual_size = size
    router.usual_size += LEARN_SIZE if size > router.usual_size else -LEARN_SIZE


@kernel
def expected_output(router, prompt_tokens):
    return float_list(router.output_estimate, NUM_LENGTH_CLASSES)[length_class(prompt_tokens)]


@kernel
def book_sent(router, k, i, prompt_tokens, expected_tokens, links, num_links, answer_key, now):
    """`links`, `num_links` and `answer_key` as of ASK."""
    signals = signals_of(router)
    account = account_at(router.accounts, k)
    ticket = ticket_at(router.tickets, i)
    ticket.replica = k
    ticket.prompt_tokens = prompt_tokens
    ticket.cached_tokens = ticket.matched_tokens = 0
    if router.prefixes != 0:
        book_prefixes(router, k, i, links, num_links, answer_key, now)
    ticket.expected_output = int(expected_tokens)
    learn_size(router, prompt_tokens + expected_tokens)
    ticket.num_output = 0
    ticket.sent_at = now
    ticket.is_started = 0
    ticket.before = account.waiting_tail
    ticket.after = NOBODY
    if account.waiting_tail == NOBODY:
        account.waiting_head = i
    else:
        ticket_at(router.tickets, account.waiting_tail).after = i
    account.waiting_tail = i
    signals[OUTSTANDING, k] += 1.0
    signals[WAITING, k] += 1.0
    signals[PENDING_PREFILL_TOKENS, k] += prompt_tokens - ticket.cached_tokens
    signals[PENDING_CACHED_TOKENS, k] += ticket.cached_tokens
    signals[EXPECTED_TOKENS, k] += ticket.expected_output
    signals[SENT_AT_SUM, k] += now
    signals[PREFILL_LOAD, k] *= math.exp((account.prefill_at - now) / PREFILL_WINDOW_S)
    computed_tokens = prompt_tokens - ticket.cached_tokens
    signals[PREFILL_LOAD, k] += computed_tokens * signals[PREFILL_S_PER_TOKEN, k] / PREFILL_WINDOW_S
    account.prefill_at = now


@kernel
def book_prefixes(router, k, i, links, num_links, answer_key, now):
    """The index learns where the prompt goes, and says how much of it should be there already."""
    ticket = ticket_at(router.tickets, i)
    ticket.links = links
    ticket.num_links = num_links
    ticket.answer_key = answer_key
    unshared = ticket.prompt_tokens
    if num_links > 0:
        unshared -= min(unshared, link_at(links, num_links - 1).tokens)
    capacity = signals_of(router)[KV_CAPACITY_TOKENS, k]
    matched = touch(router, k, capacity, links, num_links, unshared, now)
    ticket.matched_tokens = min(matched, ticket.prompt_tokens - 1)
    ticket.cached_tokens = int(trust_of(account_at(router.accounts, k)) * ticket.matched_tokens)


@kernel
def stop_waiting(router, i):
    """The ticket leaves the list of those without a first token."""
    signals = signals_of(router)
    ticket = ticket_at(router.tickets, i)
    account = account_at(router.accounts, ticket.replica)
    if ticket.before == NOBODY:
        account.waiting_head = ticket.after
    else:
        ticket_at(router.tickets, ticket.before).after = ticket.after
    if ticket.after == NOBODY:
        account.waiting_tail = ticket.before
    else:
        ticket_at(router.tickets, ticket.after).before = ticket.before
    k = ticket.replica
    signals[WAITING, k] -= 1.0
    signals[PENDING_PREFILL_TOKENS, k] -= ticket.prompt_tokens - ticket.cached_tokens
    signals[PENDING_CACHED_TOKENS, k] -= ticket.cached_tokens
    if account.waiting_head == NOBODY:
        signals[SENT_AT_SUM, k] = 0.0  # nothing left of rounding errors, however long the router runs
    else:
        signals[SENT_AT_SUM, k] -= ticket.sent_at


@kernel
def start(router, i, context_tokens):
    """The request decodes from now on; `context_tokens` of it were prompt."""
    signals = signals_of(router)
    ticket = ticket_at(router.tickets, i)
    k = ticket.replica
    stop_waiting(router, i)
    ticket.is_started = 1
    signals[READ_TOKENS, k] += ticket.prompt_tokens - ticket.cached_tokens
    account_at(router.accounts, k).started_tokens += ticket.matched_tokens
    signals[DECODING, k] += 1.0
    signals[CONTEXT_TOKENS, k] += context_tokens
    signals[GENERATED_TOKENS, k] -= ticket.prompt_tokens - context_tokens


@kernel
def book_first_token(router, i, context_tokens, now):
    """`context_tokens` is the length of the prompt, unless the server replays a part of it as output."""
    signals = signals_of(router)
    ticket = ticket_at(router.tickets, i)
    k = ticket.replica
    start(router, i, context_tokens)
    ttft_s = now - ticket.sent_at
    if signals[TTFT_SLOW_S, k] == 0.0:
        signals[TTFT_S, k] = ttft_s
        signals[TTFT_SLOW_S, k] = ttft_s
    else:
        signals[TTFT_S, k] += FAST * (ttft_s - signals[TTFT_S, k])
        signals[TTFT_SLOW_S, k] += SLOW * (ttft_s - signals[TTFT_SLOW_S, k])


@kernel
def book_tokens(router, k, num_tokens, now):
    """Output tokens that streamed back at the end of one step."""
    signals = signals_of(router)
    account = account_at(router.accounts, k)
    signals[CONTEXT_TOKENS, k] += num_tokens
    signals[GENERATED_TOKENS, k] += num_tokens
    account.rate_tokens += num_tokens
    elapsed = now - account.rate_since
    if elapsed >= RATE_INTERVAL_S:
        rate = account.rate_tokens / elapsed
        account.rate_since = now
        account.rate_tokens = 0
        signals[TOKEN_RATE, k] += elapsed / (RATE_WINDOW_S + elapsed) * (rate - signals[TOKEN_RATE, k])
        signals[TOKEN_RATE_SLOW, k] += (
            elapsed / (RATE_SLOW_WINDOW_S + elapsed) * (rate - signals[TOKEN_RATE_SLOW, k])
        )


@kernel
def book_step(router, k, step_s):
    """The time between two tokens of a stream."""
    signals = signals_of(router)
    if signals[STEP_SLOW_S, k] == 0.0:
        signals[STEP_S, k] = step_s
        signals[STEP_SLOW_S, k] = step_s
    else:
        signals[STEP_S, k] += FAST * (step_s - signals[STEP_S, k])
        signals[STEP_SLOW_S, k] += SLOW * (step_s - signals[STEP_SLOW_S, k])


@kernel
def forget_tokens(router, k, num_tokens):
    """Tokens that were booked and will come again, or never came."""
    signals = signals_of(router)
    signals[CONTEXT_TOKENS, k] -= num_tokens
    signals[GENERATED_TOKENS, k] -= num_tokens


@kernel
def book_over(router, i, num_output):
    """A request that had its first token is over, after `num_output` tokens."""
    signals = signals_of(router)
    ticket = ticket_at(router.tickets, i)
    k = ticket.replica
    signals[DECODING, k] -= 1.0
    signals[CONTEXT_TOKENS, k] -= ticket.prompt_tokens + num_output
    signals[GENERATED_TOKENS, k] -= num_output
    signals[EXPECTED_TOKENS, k] -= ticket.expected_output
    signals[OUTSTANDING, k] -= 1.0


@kernel
def book_finished(router, i, num_output, cached_tokens, now):
    """`cached_tokens`: of the prompt, found in the server's cache, if it said so; or -1."""
    book_over(router, i, num_output)
    ticket = ticket_at(router.tickets, i)
    if router.prefixes != 0:
        if cached_tokens >= 0:
            book_cached(router, i, cached_tokens)
        capacity = signals_of(router)[KV_CAPACITY_TOKENS, ticket.replica]
        touch_answered(router, ticket.replica, capacity, ticket, num_output, now)
    cls = length_class(ticket.prompt_tokens)
    estimates = float_list(router.output_estimate, NUM_LENGTH_CLASSES)
    estimates[cls] += LEARN_LENGTH * (num_output - estimates[cls])


@kernel
def book_cached(router, i, cached_tokens):
    """The server says how much of the prompt was in its cache."""
    ticket = ticket_at(router.tickets, i)
    account = account_at(router.accounts, ticket.replica)
    account.num_reports += 1
    if ticket.matched_tokens > 0:
        learn_trust(account, ticket.matched_tokens, cached_tokens)
    share = cached_tokens / ticket.prompt_tokens
    signals = signals_of(router)
    signals[HIT_SHARE, ticket.replica] += LEARN_HITS * (share - signals[HIT_SHARE, ticket.replica])


@kernel
def book_counters(router, k, queries, hits):
    """The server's own counters: prompt tokens looked up in its cache, and found there. -> whether it is new.

    They count from its start, so fewer than before mean another server. Where answers do not say what was
    cached, these do, of all requests together.
    """
    account = account_at(router.accounts, k)
    is_new = queries < account.counted_queries
    if is_new:
        book_lost_cache(router, k)
    elif queries > account.counted_queries and account.num_reports == 0:
        found = hits - account.counted_hits
        if account.started_tokens > 0.0:
            learn_trust(account, account.started_tokens, found)
        share = found / (queries - account.counted_queries)
        signals = signals_of(router)
        signals[HIT_SHARE, k] += LEARN_HITS * (share - signals[HIT_SHARE, k])
    account.started_tokens = 0.0
    account.num_reports = 0
    account.counted_queries = queries
    account.counted_hits = hits
    return is_new


@kernel
def book_lost_cache(router, k):
    """The server was started anew."""
    forget_cache(router, k)
    signals_of(router)[HIT_SHARE, k] = 0.0


@kernel
def book_failed(router, i, num_output):
    """The request is gone: refused, broken off, or given up by its client. Nothing is learned from it."""
    signals = signals_of(router)
    ticket = ticket_at(router.tickets, i)
    k = ticket.replica
    if ticket.is_started:
        book_over(router, i, num_output)
    else:
        stop_waiting(router, i)
        signals[EXPECTED_TOKENS, k] -= ticket.expected_output
        signals[OUTSTANDING, k] -= 1.0


@kernel
def book_lost_all(router, k):
    """The replica is gone, and everything that was sent to it with it."""
    signals = signals_of(router)
    book_lost_cache(router, k)
    for row in SUMMED_ROWS:
        signals[row, k] = 0.0
    account = account_at(router.accounts, k)
    account.waiting_head = NOBODY
    account.waiting_tail = NOBODY


@kernel
def book_accepting(router, k, is_accepting):
    signals = signals_of(router)
    router.num_accepting += is_accepting - int(signals[ACCEPTING, k])
    signals[ACCEPTING, k] = float(is_accepting)


@kernel
def book_scraped(router, k, running, waiting, kv_use, scraped_at):
    """A server's own gauges, as they were at `scraped_at`."""
    signals = signals_of(router)
    signals[SCRAPED_RUNNING, k] = running
    signals[SCRAPED_WAITING, k] = waiting
    signals[SCRAPED_KV_USE, k] = kv_use
    signals[SCRAPED_AT, k] = scraped_at


@kernel
def booked_tokens(signals, k):
    """KV memory that the outstanding requests take. Cached prefixes that nobody uses are free to take."""
    waiting = signals[PENDING_PREFILL_TOKENS, k] + signals[PENDING_CACHED_TOKENS, k]
    return signals[CONTEXT_TOKENS, k] + waiting


@kernel
def derive_signals(router, now):
    """Fill the derived rows; only policies that read them pay for it."""
    signals = signals_of(router)
    for k in range(router.num_replicas):
        waiting = signals[WAITING, k]
        signals[MEAN_WAIT_S, k] = now - signals[SENT_AT_SUM, k] / waiting if waiting > 0.0 else 0.0
        oldest = account_at(router.accounts, k).waiting_head
        signals[OLDEST_WAIT_S, k] = (
            now - ticket_at(router.tickets, oldest).sent_at if oldest != NOBODY else 0.0
        )
        signals[KV_USE, k] = booked_tokens(signals, k) / signals[KV_CAPACITY_TOKENS, k]
        signals[CACHE_FILL, k] = fill_of(router, k, signals[KV_CAPACITY_TOKENS, k])
        remaining = max(0.0, signals[EXPECTED_TOKENS, k] - signals[GENERATED_TOKENS, k])
        signals[REMAINING_TOKENS, k] = remaining
        backlog_s = signals[PENDING_PREFILL_TOKENS, k] * signals[PREFILL_S_PER_TOKEN, k]
        signals[PREFILL_BACKLOG_S, k] = backlog_s
        signals[WORK_S, k] = backlog_s + signals[EXPECTED_TOKENS, k] * signals[DECODE_S_PER_TOKEN, k]
        faded_s = now - account_at(router.accounts, k).prefill_at
        signals[PREFILL_SHARE, k] = signals[PREFILL_LOAD, k] * math.exp(-faded_s / PREFILL_WINDOW_S)
        signals[TTFT_TREND_S, k] = signals[TTFT_S, k] - signals[TTFT_SLOW_S, k]
        signals[TOKEN_RATE_TREND, k] = signals[TOKEN_RATE, k] - signals[TOKEN_RATE_SLOW, k]
        signals[SCRAPE_AGE_S, k] = now - signals[SCRAPED_AT, k]
