"""The router's books, compiled: what it sends and what comes back, as rows of the signal table.

The simulator and the live router keep their books by these functions. The router sees what it sends, each
token that streams back, and what a scrape of the servers brings. It does not see preemptions or the servers'
queues. `router` is a ROUTER record, k a replica, i a ticket; times are of one clock that only moves forward.
"""

from __future__ import annotations

import math

from pointsman.compiled.jit import inlined, kernel
from pointsman.compiled.memory import float_list, float_table
from pointsman.routing.records import NOBODY, NUM_LENGTH_CLASSES, account_at, ticket_at
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
LEARN_LENGTH = 0.05  # weight of a finished request in the estimate of its length class


@inlined
def signals_of(router):
    """[NUM_SIGNALS, R]"""
    return float_table(router.signals, NUM_SIGNALS, router.num_replicas)


@kernel
def length_class(prompt_tokens):
    return min(NUM_LENGTH_CLASSES - 1, math.frexp(prompt_tokens)[1] - 1)


@kernel
def expected_output(router, prompt_tokens):
    return float_list(router.output_estimate, NUM_LENGTH_CLASSES)[length_class(prompt_tokens)]


@kernel
def book_sent(router, k, i, prompt_tokens, expected_tokens, now):
    signals = signals_of(router)
    account = account_at(router.accounts, k)
    ticket = ticket_at(router.tickets, i)
    ticket.replica = k
    ticket.prompt_tokens = prompt_tokens
    ticket.expected_output = int(expected_tokens)
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
    signals[PENDING_PREFILL_TOKENS, k] += prompt_tokens
    signals[EXPECTED_TOKENS, k] += ticket.expected_output
    signals[SENT_AT_SUM, k] += now


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
    signals[PENDING_PREFILL_TOKENS, k] -= ticket.prompt_tokens
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
def book_finished(router, i, num_output):
    book_over(router, i, num_output)
    cls = length_class(ticket_at(router.tickets, i).prompt_tokens)
    estimates = float_list(router.output_estimate, NUM_LENGTH_CLASSES)
    estimates[cls] += LEARN_LENGTH * (num_output - estimates[cls])


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
