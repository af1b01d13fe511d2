"""The live router's books, compiled: the simulator's own book-keeping, driven by what really happens.

The signal table is that of a `SIM` record, filled by the functions of `simulator/book.py`. What the simulator
knows about its servers and a router does not (their queues, their batches) stays empty: a replica's `waiting`
list holds what the router sent and has no token of.

A request's row is its handle. `processed` counts the output tokens seen, `scheduled_at` is when a request
that does not stream is taken to have its first token. Row 0 is the request to place.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from pointsman.compiled import jit
from pointsman.compiled.jit import kernel
from pointsman.compiled.memory import float_table, row_accessor
from pointsman.routing.signals import (
    CONTEXT_TOKENS,
    DECODING,
    EXPECTED_TOKENS,
    GENERATED_TOKENS,
    KV_CAPACITY_TOKENS,
    NUM_SIGNALS,
    OUTSTANDING,
    PENDING_PREFILL_TOKENS,
    PREFILL_S_PER_TOKEN,
    SCRAPED_AT,
    SCRAPED_KV_USE,
    SCRAPED_RUNNING,
    SCRAPED_WAITING,
    SENT_AT_SUM,
    STEP_FLOOR_S,
    STEP_S,
    STEP_SLOW_S,
    TTFT_S,
    TTFT_SLOW_S,
    WAITING,
)
from pointsman.simulator.book import (
    book_finished,
    book_first_token,
    book_sent,
    book_step,
    book_tokens,
    change_outstanding,
    set_accepting,
)
from pointsman.simulator.sequences import push_waiting, remove_waiting
from pointsman.simulator.state import NEVER, NOBODY, SIM, replica_at, request_at

entry_point = partial(jit.entry_point, keeps_gil=True)

TO_PLACE = 0  # row of the request that a decision is about
SCRAPE_LIMIT_S = 5.0  # gauges older than this say nothing any more
NUM_STEPS = 256  # kept for calibration.py
FORGET_S = 10.0  # nor do the steps and first tokens of a replica that has had nothing to do for so long

# What the router keeps of a replica beside the simulator's record.
STREAMS = np.dtype(
    [
        ("tokens_at", "f8"),  # tokens that came at one instant are booked together, as those of one step
        ("num_tokens", "i8"),
        ("num_silent", "i8"),  # waiting requests that do not stream
        ("scraped_at", "f8"),  # when the server's gauges were last read
        ("steps", "i8"),  # [2, NUM_STEPS] f8: streams that decoded and length of the last steps; 0: not kept
        ("num_steps", "i8"),  # that were ever written there
    ],
    align=True,
)

sim_at = row_accessor(SIM)
streams_at = row_accessor(STREAMS)


@entry_point
def record_sent(sims, streams, k, i, num_prefill, session, is_streaming, now):
    """Request i goes to replica k; -> whether nobody waits there. sims and streams are addresses, as
    everywhere here."""
    sim = sim_at(sims, 0)
    sim.now = now
    signals = float_table(sim.signals, NUM_SIGNALS, sim.num_replicas)
    found_nobody = signals[WAITING, k] == 0.0
    request = request_at(sim.requests, i)
    request.arrived_at = request.dispatched_at = now
    request.first_token_at = request.last_token_at = request.scheduled_at = NEVER
    request.num_prefill = request.prefill = num_prefill
    request.num_decode = request.processed = 0
    request.replica = k
    request.session = session
    sim.num_in_system += 1
    if not is_streaming:
        backlog = signals[PENDING_PREFILL_TOKENS, k] + num_prefill
        prefill_s = backlog * signals[PREFILL_S_PER_TOKEN, k] + signals[STEP_FLOOR_S, k]
        request.scheduled_at = now + prefill_s
        streams_at(streams, k).num_silent += 1
    book_sent(sim, k, i)
    push_waiting(sim, k, i)
    return found_nobody


@kernel
def stop_waiting(sim, streams, k, i):
    signals = float_table(sim.signals, NUM_SIGNALS, sim.num_replicas)
    remove_waiting(sim, k, i)
    if request_at(sim.requests, i).scheduled_at >= 0.0:
        streams_at(streams, k).num_silent -= 1
    if replica_at(sim.replicas, k).num_waiting == 0:
        signals[SENT_AT_SUM, k] = 0.0  # nothing left of rounding errors, however long the router runs


@kernel
def start_silently(sim, streams, k, i):
    """The request must have its first token by now; nothing is learned from that."""
    signals = float_table(sim.signals, NUM_SIGNALS, sim.num_replicas)
    request = request_at(sim.requests, i)
    request.is_first_token_seen = 1
    signals[WAITING, k] -= 1.0
    signals[DECODING, k] += 1.0
    signals[PENDING_PREFILL_TOKENS, k] -= request.num_prefill
    signals[CONTEXT_TOKENS, k] += request.num_prefill
    signals[SENT_AT_SUM, k] -= request.dispatched_at
    stop_waiting(sim, streams, k, i)


@kernel
def settle(sim, streams, k):
    """Book the tokens of the last instant at which any came."""
    stream = streams_at(streams, k)
    if stream.num_tokens > 0:
        now = sim.now
        sim.now = stream.tokens_at
        book_tokens(sim, k, stream.num_tokens)
        sim.now = now
        stream.num_tokens = 0


@kernel
def add_tokens(sim, streams, k, num_tokens):
    stream = streams_at(streams, k)
    if stream.tokens_at != sim.now:
        settle(sim, streams, k)
        stream.tokens_at = sim.now
    stream.num_tokens += num_tokens


@kernel
def keep_step(sim, streams, k, step_s):
    stream = streams_at(streams, k)
    if stream.steps != 0:
        steps = float_table(stream.steps, 2, NUM_STEPS)
        at = stream.num_steps % NUM_STEPS
        steps[0, at] = float_table(sim.signals, NUM_SIGNALS, sim.num_replicas)[DECODING, k]
        steps[1, at] = step_s
        stream.num_steps += 1


@entry_point
def record_first_token(sims, streams, i, now):
    sim = sim_at(sims, 0)
    sim.now = now
    request = request_at(sim.requests, i)
    k = request.replica
    request.first_token_at = request.last_token_at = now
    request.processed = 1
    if not request.is_first_token_seen:
        book_first_token(sim, k, i)
        stop_waiting(sim, streams, k, i)
    add_tokens(sim, streams, k, 1)


@entry_point
def record_tokens(sims, streams, i, num_tokens, now):
    """More tokens of a request that has its first; they end a step, unless another stream's token has.

    All streams of a replica get a token in each step, and the average is one of steps. The token ends a new
    step if the one before it came no earlier than the last step that was booked.
    """
    sim = sim_at(sims, 0)
    sim.now = now
    request = request_at(sim.requests, i)
    k = request.replica
    replica = replica_at(sim.replicas, k)
    if request.last_token_at >= replica.last_step_at and now > request.last_token_at:
        step_s = (now - request.last_token_at) / num_tokens
        book_step(sim, k, step_s)
        replica.last_step_at = now
        keep_step(sim, streams, k, step_s)
    request.last_token_at = now
    request.processed += num_tokens
    add_tokens(sim, streams, k, num_tokens)


@entry_point
def record_finished(sims, streams, i, num_output, now):
    """num_output: by the server's own count, or -1. -> the length of its prompt, as booked"""
    sim = sim_at(sims, 0)
    sim.now = now
    request = request_at(sim.requests, i)
    k = request.replica
    if not request.is_first_token_seen:  # it did not stream
        start_silently(sim, streams, k, i)
    if request.first_token_at < 0.0:
        request.first_token_at = now
    if num_output > request.processed:
        add_tokens(sim, streams, k, num_output - request.processed)
    elif 0 <= num_output < request.processed:
        signals = float_table(sim.signals, NUM_SIGNALS, sim.num_replicas)
        signals[CONTEXT_TOKENS, k] += num_output - request.processed
        signals[GENERATED_TOKENS, k] += num_output - request.processed
    request.num_decode = num_output if num_output >= 0 else request.processed
    book_finished(sim, k, i)
    return request.num_prefill


@entry_point
def record_failed(sims, streams, i, now):
    """The request is gone: refused, broken off, or given up by its client. Nothing is learned from it."""
    sim = sim_at(sims, 0)
    sim.now = now
    signals = float_table(sim.signals, NUM_SIGNALS, sim.num_replicas)
    request = request_at(sim.requests, i)
    k = request.replica
    if request.is_first_token_seen:
        signals[DECODING, k] -= 1.0
        signals[CONTEXT_TOKENS, k] -= request.num_prefill + request.processed
        signals[GENERATED_TOKENS, k] -= request.processed
    else:
        signals[WAITING, k] -= 1.0
        signals[PENDING_PREFILL_TOKENS, k] -= request.num_prefill
        signals[SENT_AT_SUM, k] -= request.dispatched_at
        stop_waiting(sim, streams, k, i)
    signals[EXPECTED_TOKENS, k] -= request.estimate
    change_outstanding(sim, k, -1.0)
    sim.num_in_system -= 1


@entry_point
def record_accepting(sims, k, is_accepting, now):
    sim = sim_at(sims, 0)
    sim.now = now
    set_accepting(sim, k, is_accepting)


@kernel
def bring_up_to_date(sim, streams, k):
    """What follows from the time alone: silent requests that have started, gauges too old to be used."""
    signals = float_table(sim.signals, NUM_SIGNALS, sim.num_replicas)
    settle(sim, streams, k)
    if streams_at(streams, k).num_silent > 0:
        i = replica_at(sim.replicas, k).waiting_head
        while i != NOBODY:
            request = request_at(sim.requests, i)
            after = request.next
            if 0.0 <= request.scheduled_at <= sim.now:
                start_silently(sim, streams, k, i)
            i = after
    if signals[OUTSTANDING, k] == 0.0 and sim.now - replica_at(sim.replicas, k).last_step_at > FORGET_S:
        # Else one hiccup would keep a replica without work, and without a chance to show that it is well.
        for row in (TTFT_S, TTFT_SLOW_S, STEP_S, STEP_SLOW_S):
            signals[row, k] = 0.0
    if sim.now - streams_at(streams, k).scraped_at > SCRAPE_LIMIT_S:
        # The best guess at what the server would say; no policy has learned from gauges minutes old.
        booked = signals[CONTEXT_TOKENS, k] + signals[PENDING_PREFILL_TOKENS, k]
        signals[SCRAPED_RUNNING, k] = signals[DECODING, k]
        signals[SCRAPED_WAITING, k] = signals[WAITING, k]
        signals[SCRAPED_KV_USE, k] = min(1.0, booked / signals[KV_CAPACITY_TOKENS, k])
        signals[SCRAPED_AT, k] = sim.now
