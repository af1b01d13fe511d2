"""The books of a live router, compiled: `booking.py`, driven by tokens as they stream in.

Between two steps of a server its streams bring a token each, at one instant or nearly so; what came at one
instant is booked together. A request that does not stream is taken to have its first token when the prompts
ahead of it must have been read. Entry points get the address of the ROUTER record.

What calibration.py learns the servers' speed from are windows: some steps in a row, how long they took, how
many streams got a token in each, and how many prompt tokens were read meanwhile. A window ends when no prompt
is waiting, so that it is known which prompts were read in it.
"""

from __future__ import annotations

from functools import partial

from pointsman.compiled import jit
from pointsman.compiled.jit import kernel
from pointsman.compiled.memory import float_table, size_of_bytes, start_of_bytes
from pointsman.routing.booking import (
    book_accepting,
    book_counters,
    book_failed,
    book_finished,
    book_first_token,
    book_lost_cache,
    book_scraped,
    book_sent,
    book_step,
    book_tokens,
    booked_tokens,
    expected_output,
    forget_tokens,
    signals_of,
    start,
)
from pointsman.routing.hashing import LINK_BYTES
from pointsman.routing.records import NEVER, NOBODY, account_at, router_at, ticket_at
from pointsman.routing.sharing import elsewhere
from pointsman.routing.signals import (
    DECODING,
    KV_CAPACITY_TOKENS,
    MEASURED_ROWS,
    OUTSTANDING,
    PENDING_PREFILL_TOKENS,
    PREFILL_S_PER_TOKEN,
    READ_TOKENS,
    STEP_FLOOR_S,
    WAITING,
)

entry_point = partial(jit.entry_point, keeps_gil=True)

SCRAPE_LIMIT_S = 5.0  # gauges older than this say nothing any more
NUM_WINDOWS = 64  # kept for calibration.py
MIN_WINDOW_STEPS, MAX_WINDOW_STEPS = 16, 256
FORGET_S = 10.0  # nor do the steps and first tokens of a replica that has had nothing to do for so long
MAX_READ_TOKENS = 65_536.0  # of prompts in a step: no server can more


@entry_point
def record_sent(routers, k, i, prompt_tokens, links, is_streaming, now):
    """Ticket i goes to replica k; -> how much of its prompt must be computed, or -1 if others wait there.

    links: [n] LINK as `sized_bytes_at` gives them; they are read again when the request is over.
    """
    router = router_at(routers, 0)
    signals = signals_of(router)
    found_nobody = signals[WAITING, k] + elsewhere(router, WAITING, k) == 0.0
    expected_tokens = expected_output(router, prompt_tokens)
    num_links = size_of_bytes(links) // LINK_BYTES
    book_sent(router, k, i, prompt_tokens, expected_tokens, start_of_bytes(links), num_links, 0, now)
    ticket = ticket_at(router.tickets, i)
    ticket.last_token_at = ticket.assumed_start_at = NEVER
    if not is_streaming:
        backlog_s = signals[PENDING_PREFILL_TOKENS, k] * signals[PREFILL_S_PER_TOKEN, k]
        ticket.assumed_start_at = now + backlog_s + signals[STEP_FLOOR_S, k]
        account_at(router.accounts, k).num_silent += 1
    return prompt_tokens - ticket.cached_tokens if found_nobody else -1


@kernel
def settle(router, k):
    """Book the tokens of the last instant at which any came."""
    account = account_at(router.accounts, k)
    if account.num_tokens > 0:
        book_tokens(router, k, account.num_tokens, account.tokens_at)
        account.num_tokens = 0


@kernel
def add_tokens(router, k, num_tokens, now):
    account = account_at(router.accounts, k)
    if account.tokens_at != now:
        settle(router, k)
        account.tokens_at = now
    account.num_tokens += num_tokens


@kernel
def add_steps(router, k, num_steps, now):
    """Steps in which every decoding stream got a token, from the end of the one before.

    Tokens of one step arrive one after the other, in any order; from step to step that cancels.
    """
    account = account_at(router.accounts, k)
    signals = signals_of(router)
    account.window_steps += num_steps
    account.window_s += now - account.stepped_at
    account.stepped_at = now
    account.window_streams += num_steps * (signals[DECODING, k] + elsewhere(router, DECODING, k))
    num_waiting = signals[WAITING, k]
    if router.num_books > 1:
        num_waiting += elsewhere(router, WAITING, k)
        read_elsewhere = elsewhere(router, READ_TOKENS, k)
        num_read = read_elsewhere - account.read_elsewhere
        account.read_elsewhere = read_elsewhere
        account.window_prompt_tokens += num_read
        if not 0.0 <= num_read <= MAX_READ_TOKENS:  # who joins or leaves does so with all they ever read
            start_window(account)
            return
    is_known = num_waiting == 0.0 and account.window_steps >= MIN_WINDOW_STEPS
    if is_known or account.window_steps >= MAX_WINDOW_STEPS:
        window = float_table(account.windows, NUM_WINDOWS, 4)[account.num_windows % NUM_WINDOWS]
        window[0] = account.window_steps
        window[1] = account.window_s
        window[2] = account.window_streams
        window[3] = account.window_prompt_tokens
        account.num_windows += 1
        start_window(account)


@kernel
def start_window(account):
    account.window_steps = 0
    account.window_s = account.window_streams = account.window_prompt_tokens = 0.0


@kernel
def end_silence(router, i):
    """The request is not among those any more whose first token will not be seen."""
    ticket = ticket_at(router.tickets, i)
    if ticket.assumed_start_at >= 0.0:
        account_at(router.accounts, ticket.replica).num_silent -= 1


@entry_point
def record_first_token(routers, i, now):
    router = router_at(routers, 0)
    ticket = ticket_at(router.tickets, i)
    ticket.last_token_at = now
    ticket.num_output = 1
    if not ticket.is_started:
        end_silence(router, i)
        account = account_at(router.accounts, ticket.replica)
        if signals_of(router)[DECODING, ticket.replica] > 0.0:
            account.window_prompt_tokens += ticket.prompt_tokens - ticket.cached_tokens
        else:  # no stream felt how long it took
            account.stepped_at = now
            account.read_elsewhere = elsewhere(router, READ_TOKENS, ticket.replica)
        book_first_token(router, i, ticket.prompt_tokens, now)
    add_tokens(router, ticket.replica, 1, now)


@entry_point
def record_tokens(routers, i, num_tokens, now):
    """More tokens of a request that has its first; they end a step, unless another stream's token has.

    All streams of a replica get a token in each step, and the average is one of steps. The token ends a new
    step if the one before it came no earlier than the last step that was booked.
    """
    router = router_at(routers, 0)
    ticket = ticket_at(router.tickets, i)
    k = ticket.replica
    account = account_at(router.accounts, k)
    if ticket.last_token_at >= account.last_step_at and now > ticket.last_token_at:
        step_s = (now - ticket.last_token_at) / num_tokens
        book_step(router, k, step_s)
        account.last_step_at = now
        add_steps(router, k, num_tokens, now)
    ticket.last_token_at = now
    ticket.num_output += num_tokens
    add_tokens(router, k, num_tokens, now)


@entry_point
def record_finished(routers, i, num_output, cached_tokens, now):
    """num_output, cached_tokens: by the server's own count, or -1. -> the length of its prompt, as booked"""
    router = router_at(routers, 0)
    ticket = ticket_at(router.tickets, i)
    k = ticket.replica
    if not ticket.is_started:  # it did not stream; nothing is learned from when it started
        end_silence(router, i)
        start(router, i, ticket.prompt_tokens)
    if num_output > ticket.num_output:
        add_tokens(router, k, num_output - ticket.num_output, now)
    elif 0 <= num_output < ticket.num_output:
        forget_tokens(router, k, ticket.num_output - num_output)
    num_output = num_output if num_output >= 0 else ticket.num_output
    book_finished(router, i, num_output, cached_tokens, now)
    return ticket.prompt_tokens


@entry_point
def record_failed(routers, i):
    router = router_at(routers, 0)
    ticket = ticket_at(router.tickets, i)
    if not ticket.is_started:
        end_silence(router, i)
    book_failed(router, i, ticket.num_output)


@entry_point
def record_accepting(routers, k, is_accepting):
    book_accepting(router_at(routers, 0), k, is_accepting)


@entry_point
def record_scraped(routers, k, running, waiting, kv_use, scraped_at):
    router = router_at(routers, 0)
    book_scraped(router, k, running, waiting, kv_use, scraped_at)
    account_at(router.accounts, k).scraped_at = scraped_at


@entry_point
def record_counters(routers, k, queries, hits):
    """-> whether the server was started anew"""
    return book_counters(router_at(routers, 0), k, queries, hits)


@entry_point
def count_elsewhere(routers, row, k):
    """What other processes and routers have of a signal that is summed up over all."""
    return elsewhere(router_at(routers, 0), row, k)


@entry_point
def record_lost_cache(routers, k):
    book_lost_cache(router_at(routers, 0), k)


@kernel
def bring_up_to_date(router, k, now):
    """What follows from the time alone: silent requests that have started, gauges too old to be used."""
    signals = signals_of(router)
    account = account_at(router.accounts, k)
    settle(router, k)
    if account.num_silent > 0:
        i = account.waiting_head
        while i != NOBODY:
            ticket = ticket_at(router.tickets, i)
            after = ticket.after
            if 0.0 <= ticket.assumed_start_at <= now:
                end_silence(router, i)
                start(router, i, ticket.prompt_tokens)
            i = after
    if signals[OUTSTANDING, k] == 0.0 and now - account.last_step_at > FORGET_S:
        # Else one hiccup would keep a replica without work, and without a chance to show that it is well.
        for row in MEASURED_ROWS:
            signals[row, k] = 0.0
    if now - account.scraped_at > SCRAPE_LIMIT_S:
        # The best guess at what the server would say; no policy has learned from gauges minutes old.
        kv_use = min(1.0, booked_tokens(signals, k) / signals[KV_CAPACITY_TOKENS, k])
        book_scraped(router, k, signals[DECODING, k], signals[WAITING, k], kv_use, now)
