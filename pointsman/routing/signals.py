"""The table every routing decision is made from: one row a signal, one column a replica.

Policies see signals and nothing else. The simulator and the live router fill the table through the same books
(booking.py), so a policy never knows which of the two it drives. Each signal is declared here, once; its row,
the documentation and the way in which several processes put their books together follow from that.

Where a value comes from says how far to trust it:

- `own`: the router's book-keeping of what it sent and what came back. Exact.
- `scraped`: the servers' gauges, late by the scrape interval and its delay, and they only move when an
  engine step ends.
- `static`: known before the first request (configuration, calibration).
- `derived`: computed from the others at the time of the decision.
- `oracle`: what no router can know. Only for upper bounds and for reproducing Vidur.
"""

from __future__ import annotations

from typing import NamedTuple

OWN, SCRAPED, STATIC, DERIVED, ORACLE = "own", "scraped", "static", "derived", "oracle"

# How the books of several processes become one: each knows a part of the sum; each measures by its own
# requests, and takes over what it has not measured; or each has all of it.
SUM, MEASURED, SAME = "sum", "measured", "same"


class Signal(NamedTuple):
    name: str
    unit: str
    source: str
    across: str
    meaning: str


_declared: list[Signal] = []


def _signal(name: str, unit: str, source: str, across: str, meaning: str) -> int:
    """Declare the next row of the table; -> its number."""
    _declared.append(Signal(name, unit, source, across, meaning))
    return len(_declared) - 1


OUTSTANDING = _signal("outstanding", "requests", OWN, SUM, "sent and not finished")
WAITING = _signal("waiting", "requests", OWN, SUM, "sent, first token not seen yet")
DECODING = _signal("decoding", "requests", OWN, SUM, "first token seen, not finished")
PENDING_PREFILL_TOKENS = _signal(
    "pending_prefill_tokens",
    "tokens",
    OWN,
    SUM,
    "prompt tokens of the waiting requests, cached ones left out",
)
PENDING_CACHED_TOKENS = _signal(
    "pending_cached_tokens", "tokens", OWN, SUM, "prompt tokens of the waiting requests that should be cached"
)
CONTEXT_TOKENS = _signal(
    "context_tokens", "tokens", OWN, SUM, "prompt and generated tokens of the decoding requests"
)
EXPECTED_TOKENS = _signal(
    "expected_tokens", "tokens", OWN, SUM, "estimated output of the outstanding requests"
)
GENERATED_TOKENS = _signal(
    "generated_tokens", "tokens", OWN, SUM, "output seen so far of the outstanding requests"
)
READ_TOKENS = _signal(
    "read_tokens", "tokens in all", OWN, SUM, "prompt tokens computed so far, of all that had a first token"
)
SENT_AT_SUM = _signal(
    "sent_at_sum", "s", OWN, SUM, "sum of the times at which the waiting requests were sent"
)
TTFT_S = _signal("ttft_s", "s", OWN, MEASURED, "moving average of the time from sending to the first token")
TTFT_SLOW_S = _signal("ttft_slow_s", "s", OWN, MEASURED, "the same over a longer past")
STEP_S = _signal("step_s", "s", OWN, MEASURED, "moving average of the time between two tokens of a stream")
STEP_SLOW_S = _signal("step_slow_s", "s", OWN, MEASURED, "the same over a longer past")
TOKEN_RATE = _signal(
    "token_rate", "tokens/s", OWN, SUM, "moving average of the output tokens seen per second"
)
TOKEN_RATE_SLOW = _signal("token_rate_slow", "tokens/s", OWN, SUM, "the same over a longer past")
HIT_SHARE = _signal(
    "hit_share", "share", OWN, MEASURED, "moving average of the cached share of prompts, by the server's word"
)
PREFILL_LOAD = _signal(
    "prefill_load", "share", OWN, SUM, "prefill time of the prompts sent lately, when the last one was sent"
)
ACCEPTING = _signal("accepting", "0 or 1", OWN, SAME, "healthy and not draining")
SCRAPED_RUNNING = _signal(
    "scraped_running", "requests", SCRAPED, SAME, "requests the server says it is running"
)
SCRAPED_WAITING = _signal("scraped_waiting", "requests", SCRAPED, SAME, "requests the server says are queued")
SCRAPED_KV_USE = _signal("scraped_kv_use", "share", SCRAPED, SAME, "KV blocks in use")
SCRAPED_AT = _signal("scraped_at", "s", SCRAPED, SAME, "when these values were read on the server")
KV_CAPACITY_TOKENS = _signal("kv_capacity_tokens", "tokens", STATIC, SAME, "KV memory")
MAX_PROMPT_TOKENS = _signal("max_prompt_tokens", "tokens", STATIC, SAME, "longest prompt it takes")
PREFILL_S_PER_TOKEN = _signal(
    "prefill_s_per_token", "s/token", STATIC, SAME, "calibrated: marginal time of a prompt token"
)
DECODE_S_PER_TOKEN = _signal(
    "decode_s_per_token", "s/token", STATIC, SAME, "calibrated: what one more sequence adds to a step"
)
STEP_FLOOR_S = _signal("step_floor_s", "s", STATIC, SAME, "calibrated: time of the smallest step")
WEIGHT = _signal("weight", "share", STATIC, SAME, "this replica's share of the cluster's capacity, mean 1")
MEAN_WAIT_S = _signal("mean_wait_s", "s", DERIVED, SAME, "mean age of the waiting requests")
OLDEST_WAIT_S = _signal("oldest_wait_s", "s", DERIVED, SAME, "age of the oldest waiting request")
KV_USE = _signal("kv_use", "share", DERIVED, SAME, "tokens of the outstanding requests over KV memory")
REMAINING_TOKENS = _signal("remaining_tokens", "tokens", DERIVED, SAME, "estimated output still to come")
PREFILL_BACKLOG_S = _signal("prefill_backlog_s", "s", DERIVED, SAME, "time to prefill what waits")
WORK_S = _signal("work_s", "s", DERIVED, SAME, "estimated time to drain everything outstanding")
PREFILL_SHARE = _signal(
    "prefill_share", "share", DERIVED, SAME, "of the last ten seconds that prompts sent there took, or take"
)
TTFT_TREND_S = _signal(
    "ttft_trend_s", "s", DERIVED, SAME, "short minus long moving average of the time to first token"
)
TOKEN_RATE_TREND = _signal(
    "token_rate_trend", "tokens/s", DERIVED, SAME, "short minus long moving average of the token rate"
)
EXPECTED_HIT_TOKENS = _signal(
    "expected_hit_tokens", "tokens", DERIVED, SAME, "of this request's prompt, that should be cached there"
)
CACHE_FILL = _signal(
    "cache_fill", "share", DERIVED, SAME, "of the KV memory that holds something, in use or not"
)
SCRAPE_AGE_S = _signal("scrape_age_s", "s", DERIVED, SAME, "age of the scraped values")
QUEUE_LENGTH = _signal("queue_length", "requests", ORACLE, SAME, "the server's own queue at this instant")

SIGNALS = tuple(_declared)
NUM_SIGNALS = len(SIGNALS)
SIGNAL_INDEX = {signal.name: row for row, signal in enumerate(SIGNALS)}
SUMMED_ROWS = tuple(row for row, signal in enumerate(SIGNALS) if signal.across == SUM)
MEASURED_ROWS = tuple(row for row, signal in enumerate(SIGNALS) if signal.across == MEASURED)
