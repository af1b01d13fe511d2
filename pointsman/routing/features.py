"""What a learned policy sees, number by number: each feature is declared here, once, with its scale.

`observation.py` computes them. Times are read as log2(1 + t / limit): 0 for nothing, 1.0 at the limit that
the service level allows, and still growing at a hundred times that. The limits here, 2 s to the first token
and 0.1 s between tokens, are those of the default service level; a policy trained for another one has its own
in their place. Output lengths enter only through the
router's own estimate.
"""

from __future__ import annotations

from pointsman.inference.space import Feature

_of_replica: list[Feature] = []
_of_context: list[Feature] = []


def _replica(name: str, unit: str, group: str, meaning: str) -> int:
    """Declare the next feature of a replica; -> its column."""
    _of_replica.append(Feature(name, unit, group, meaning))
    return len(_of_replica) - 1


def _context(name: str, unit: str, group: str, meaning: str) -> int:
    """Declare the next feature of the request and of the cluster as a whole; -> its place."""
    _of_context.append(Feature(name, unit, group, meaning))
    return len(_of_context) - 1


OUTSTANDING = _replica("outstanding", "log2(1 + requests/16)", "load", "sent and not finished")
WAITING = _replica("waiting", "log2(1 + requests/4)", "load", "no first token seen yet")
OUTSTANDING_SHARE = _replica(
    "outstanding_share", "of the mean, minus 1", "load", "outstanding against the other replicas"
)
KV_AFTER = _replica("kv_after", "share", "load", "KV memory booked with this request's prompt")
KV_EXPECTED = _replica("kv_expected", "share", "load", "the same with all expected output")
BACKLOG = _replica("backlog", "log2(1 + s/2)", "delay", "time to prefill what waits")
BACKLOG_AFTER = _replica("backlog_after", "log2(1 + s/2)", "delay", "the same with this request")
OWN_PREFILL = _replica("own_prefill", "log2(1 + s/2)", "request", "time to prefill this request")
WORK = _replica("work", "log2(1 + s/20)", "delay", "estimated time to drain everything")
MEAN_WAIT = _replica("mean_wait", "log2(1 + s/2)", "delay", "mean age of the waiting requests")
OLDEST_WAIT = _replica("oldest_wait", "log2(1 + s/2)", "delay", "age of the oldest waiting request")
TTFT = _replica("ttft", "log2(1 + s/2)", "delay", "moving average of the time to first token")
TTFT_SLOW = _replica("ttft_slow", "log2(1 + s/2)", "delay", "the same over a longer past")
STEP = _replica("step", "log2(1 + s/0.1)", "delay", "moving average of the time between tokens")
STEP_PREDICTED = _replica(
    "step_predicted", "log2(1 + s/0.1)", "delay", "the same by calibration, for today's load"
)
STEP_EXCESS = _replica(
    "step_excess", "log2 of the ratio", "trend", "measured over predicted step: shows stragglers"
)
STEP_EXCESS_SLOW = _replica("step_excess_slow", "log2 of the ratio", "trend", "the same over a longer past")
TTFT_TREND = _replica("ttft_trend", "2 s, signed log", "trend", "short minus long moving average")
TOKEN_RATE = _replica("token_rate", "log2(1 + tokens/s/1000)", "trend", "output tokens seen per second")
TOKEN_RATE_TREND = _replica(
    "token_rate_trend", "of the long average", "trend", "short minus long moving average"
)
SCRAPED_RUNNING = _replica(
    "scraped_running", "log2(1 + requests/16)", "scraped", "the server's own count, late"
)
SCRAPED_WAITING = _replica(
    "scraped_waiting", "log2(1 + requests/4)", "scraped", "the server's own queue, late"
)
SCRAPED_KV_USE = _replica("scraped_kv_use", "share", "scraped", "KV blocks in use, late")
SPEED = _replica("speed", "log2 of the mean's", "static", "capacity against the other replicas")
PREFILL_COST = _replica(
    "prefill_cost", "log2(s/token / 0.1 ms)", "static", "calibrated time of a prompt token"
)
DECODE_COST = _replica(
    "decode_cost", "log2(s/token / 0.1 ms)", "static", "calibrated time of one more sequence"
)
STEP_FLOOR = _replica("step_floor", "log2(s / 10 ms)", "static", "calibrated time of the smallest step")
KV_CAPACITY = _replica("kv_capacity", "log2(tokens / 65536)", "static", "KV memory")
ACCEPTING = _replica("accepting", "0 or 1", "static", "healthy and not draining")
HAS_ROOM = _replica(
    "has_room", "0 or 1", "load", "would start the request at once, as far as the router can tell"
)
DELAY_RATIO = _replica(
    "delay_ratio", "log2 of the best's", "hint", "waiting added here (least-delay) against the best"
)
DELAY_GAP = _replica("delay_gap", "log2(1 + s/2)", "hint", "the difference to the best")
MEASURED_DELAY_RATIO = _replica(
    "measured_delay_ratio", "log2 of the best's", "hint", "the ratio by the latest steps, noise and all"
)
# New features go to the end: policies that were trained before know the first ones.
HIT = _replica("hit", "share of the prompt", "prefix", "expected in the cache there")
HIT_GAP = _replica(
    "hit_gap", "log2(1 + s/2)", "prefix", "time to compute what the best has cached and it has not"
)
HIT_SHARE = _replica("hit_share", "share", "prefix", "of the prompts lately, found in its cache")
CACHE_FILL = _replica("cache_fill", "share", "prefix", "of its KV memory that holds something, in use or not")
PREFILL_SHARE = _replica(
    "prefill_share", "share", "prefill", "of the last ten seconds that prompts sent there took"
)
PREFILL_SHARE_OF_MEAN = _replica(
    "prefill_of_mean", "of the mean, minus 1", "prefill", "the same against the other replicas"
)
HARM = _replica("harm", "log2(1 + s/20)", "prefill", "what this prompt costs those already there, together")
GATHER_RATIO = _replica("gather_ratio", "log2 of the best's", "hint", "waiting added by `gathering`")
GATHER_GAP = _replica("gather_gap", "log2(1 + s/2)", "hint", "the difference to the best")

PROMPT = _context("prompt", "log2(tokens / 512)", "request", "of the request to place")
EXPECTED_OUTPUT = _context(
    "expected_output", "log2(tokens / 128)", "request", "estimate for prompts of this length"
)
WAITED = _context("waited", "log2(1 + s/2)", "request", "time it was held so far")
HOLD_USED = _context("hold_used", "share", "request", "of the longest hold allowed")
QUEUE = _context("queue", "log2(1 + requests/8 a replica)", "global", "held at the router")
MEAN_OUTSTANDING = _context("mean_outstanding", "log2(1 + requests/16)", "global", "a replica")
OUTSTANDING_CV = _context("outstanding_cv", "share", "imbalance", "standard deviation over mean")
OUTSTANDING_RANGE = _context("outstanding_range", "log2(1 + share)", "imbalance", "max minus min, over mean")
MEAN_KV = _context("mean_kv", "share", "global", "KV memory booked")
MIN_KV = _context("min_kv", "share", "global", "of the emptiest replica")
MEAN_BACKLOG = _context("mean_backlog", "log2(1 + s/2)", "global", "prefill backlog")
MIN_BACKLOG = _context("min_backlog", "log2(1 + s/2)", "global", "of the freest replica")
ROOM_SHARE = _context("room_share", "share", "global", "replicas with room for this request")
ACCEPTING_SHARE = _context("accepting_share", "share", "global", "replicas that accept requests")
BEST_DELAY = _context("best_delay", "log2(1 + s/20)", "hint", "waiting added at the best replica")
SCRAPE_AGE = _context("scrape_age", "log2(1 + s/2)", "scraped", "age of the scraped values")
BEST_HIT = _context("best_hit", "share of the prompt", "prefix", "expected in the cache that has most of it")

ENTITY_FEATURES = tuple(_of_replica)
NUM_ENTITY_FEATURES = len(ENTITY_FEATURES)
CONTEXT_FEATURES = tuple(_of_context)
NUM_CONTEXT_FEATURES = len(CONTEXT_FEATURES)
