"""The table every routing decision is made from: one row a signal, one column a replica.

Policies see signals and nothing else. The simulator fills the table here; the live router fills the same
table, so a policy never knows which of the two it drives. Where a value comes from says how far to trust it:

- `own`: the router's book-keeping of what it sent and what came back. Exact.
- `scraped`: the servers' gauges, late by the scrape interval and its delay, and they only move when an
  engine step ends.
- `static`: known before the first request (configuration, calibration).
- `derived`: computed from the others at the time of the decision.
- `oracle`: what no router can know. Only for upper bounds and for reproducing Vidur.
"""

from __future__ import annotations

from typing import NamedTuple


class Signal(NamedTuple):
    name: str
    unit: str
    source: str
    meaning: str


SIGNALS = (
    Signal("outstanding", "requests", "own", "sent and not finished"),
    Signal("waiting", "requests", "own", "sent, first token not seen yet"),
    Signal("decoding", "requests", "own", "first token seen, not finished"),
    Signal("pending_prefill_tokens", "tokens", "own", "prompt tokens of the waiting requests"),
    Signal("context_tokens", "tokens", "own", "prompt and generated tokens of the decoding requests"),
    Signal("expected_tokens", "tokens", "own", "estimated output of the outstanding requests"),
    Signal("generated_tokens", "tokens", "own", "output seen so far of the outstanding requests"),
    Signal("sent_at_sum", "s", "own", "sum of the times at which the waiting requests were sent"),
    Signal("ttft_s", "s", "own", "moving average of the time from sending to the first token"),
    Signal("ttft_slow_s", "s", "own", "the same over a longer past"),
    Signal("step_s", "s", "own", "moving average of the time between two tokens of a stream"),
    Signal("step_slow_s", "s", "own", "the same over a longer past"),
    Signal("token_rate", "tokens/s", "own", "moving average of the output tokens seen per second"),
    Signal("token_rate_slow", "tokens/s", "own", "the same over a longer past"),
    Signal("accepting", "0 or 1", "own", "healthy and not draining"),
    Signal("scraped_running", "requests", "scraped", "requests the server says it is running"),
    Signal("scraped_waiting", "requests", "scraped", "requests the server says are queued"),
    Signal("scraped_kv_use", "share", "scraped", "KV blocks in use"),
    Signal("scraped_at", "s", "scraped", "when these values were read on the server"),
    Signal("kv_capacity_tokens", "tokens", "static", "KV memory"),
    Signal("max_prompt_tokens", "tokens", "static", "longest prompt it takes"),
    Signal("prefill_s_per_token", "s/token", "static", "calibrated: marginal time of a prompt token"),
    Signal("decode_s_per_token", "s/token", "static", "calibrated: what one more sequence adds to a step"),
    Signal("step_floor_s", "s", "static", "calibrated: time of the smallest step"),
    Signal("weight", "share", "static", "this replica's share of the cluster's capacity, mean 1"),
    Signal("mean_wait_s", "s", "derived", "mean age of the waiting requests"),
    Signal("oldest_wait_s", "s", "derived", "age of the oldest waiting request"),
    Signal("kv_use", "share", "derived", "tokens of the outstanding requests over KV memory"),
    Signal("remaining_tokens", "tokens", "derived", "estimated output still to come"),
    Signal("prefill_backlog_s", "s", "derived", "time to prefill what waits"),
    Signal("work_s", "s", "derived", "estimated time to drain everything outstanding"),
    Signal("ttft_trend_s", "s", "derived", "short minus long moving average of the time to first token"),
    Signal("token_rate_trend", "tokens/s", "derived", "short minus long moving average of the token rate"),
    Signal("scrape_age_s", "s", "derived", "age of the scraped values"),
    Signal("queue_length", "requests", "oracle", "the server's own queue at this instant"),
)

NUM_SIGNALS = len(SIGNALS)
SIGNAL_INDEX = {signal.name: index for index, signal in enumerate(SIGNALS)}
(
    OUTSTANDING,
    WAITING,
    DECODING,
    PENDING_PREFILL_TOKENS,
    CONTEXT_TOKENS,
    EXPECTED_TOKENS,
    GENERATED_TOKENS,
    SENT_AT_SUM,
    TTFT_S,
    TTFT_SLOW_S,
    STEP_S,
    STEP_SLOW_S,
    TOKEN_RATE,
    TOKEN_RATE_SLOW,
    ACCEPTING,
    SCRAPED_RUNNING,
    SCRAPED_WAITING,
    SCRAPED_KV_USE,
    SCRAPED_AT,
    KV_CAPACITY_TOKENS,
    MAX_PROMPT_TOKENS,
    PREFILL_S_PER_TOKEN,
    DECODE_S_PER_TOKEN,
    STEP_FLOOR_S,
    WEIGHT,
    MEAN_WAIT_S,
    OLDEST_WAIT_S,
    KV_USE,
    REMAINING_TOKENS,
    PREFILL_BACKLOG_S,
    WORK_S,
    TTFT_TREND_S,
    TOKEN_RATE_TREND,
    SCRAPE_AGE_S,
    QUEUE_LENGTH,
) = range(NUM_SIGNALS)
