"""Everything a simulated cluster knows, in flat arrays of records.

Kernels work on one `SIM` record: the cluster itself, and the addresses of its tables (see memory.py).
Records (one row a request, a replica, a batch) keep what is read together next to each other in memory. What
the router knows is a record of its own (routing/records.py), and policies get that one only.

Letters: R replicas, M sequences a replica may hold, G pipeline stages, B tokens a KV block.

Tokens processed are counted lazily. In a step without memory pressure every decoding request of a replica
advances by one token, so the step only increments `steps`: a decoding request has processed
`processed + steps` tokens. Which requests need a new KV block follows from that number modulo B
(`phase_count`), and the next request to finish is known in advance (`next_finish`). A step therefore costs
the same with 5 or 200 running requests.
"""

from __future__ import annotations

import numpy as np

from pointsman.compiled.memory import row_accessor
from pointsman.routing.records import ASK, MEMORY, ROUTER

# Scheduler kinds.
VLLM_V1, VLLM, SARATHI, ORCA = range(4)

# What a cluster waits for when a kernel returns.
READY, DECISION, PAUSED, DONE = range(4)

# Cluster events a user can plan.
SLOW, FAIL, JOIN, DRAIN = range(4)

# Histogram of the time between tokens: 64 bins for each power of two, from 2^-17 s (8 µs) to 2^7 s.
TBT_LOWEST_EXPONENT = -17
TBT_BINS_PER_OCTAVE = 64
NUM_TBT_BINS = 24 * TBT_BINS_PER_OCTAVE

SIM = np.dtype(
    [
        ("router", ROUTER),  # what the router knows; the rest it does not
        ("memory", MEMORY),  # of the policy that decides
        ("ask", ASK),  # the request it decides about
        # Tables, by address.
        ("replicas", "i8"),  # [R] REPLICA
        # [num_requests] REQUEST, in order of arrival; later turns of sessions stand behind all others.
        ("requests", "i8"),
        ("prefixes", "i8"),  # [num_requests] PREFIX; 0: nothing is shared and nothing cached
        ("next_turn", "i8"),  # [num_requests] i4: who follows when a request is finished; 0: nobody ever does
        ("events", "i8"),  # [num_events] EVENT, in order of time
        ("costs", "i8"),  # COST, shared by all clusters
        ("heap", "i8"),  # FUTURE
        ("ring", "i8"),  # [ring_capacity] INSTANT
        ("scraped", "i8"),  # [3, R] f8: values on their way from the servers to the router
        ("tbt_histogram", "i8"),  # [NUM_TBT_BINS] i8
        ("touched", "i8"),  # [R + 1] i4: replicas that got a request in this round of decisions
        ("scratch", "i8"),  # [M] i4
        ("batch_log", "i8"),  # [batch_log_capacity] BATCH_LOG
        ("ring_capacity", "i8"),
        ("num_events", "i8"),
        ("batch_log_capacity", "i8"),
        ("max_seqs", "i8"),  # M
        ("now", "f8"),
        ("stop_at", "f8"),  # time at which the kernel returns, so that two clusters can keep step
        ("status", "i4"),
        ("num_requests", "i8"),
        ("num_users", "i8"),  # closed loop; 0 = open
        ("num_later_turns", "i8"),  # requests that arrive because another one was finished
        ("is_shared", "i4"),  # prompts have prefixes in common
        ("num_own_keys", "i8"),  # given out so far
        ("next_arrival", "i8"),
        ("next_event", "i8"),
        ("num_completed", "i8"),
        ("pause_at", "i8"),  # completed requests after which the kernel returns, to show progress
        ("num_batches", "i8"),
        ("num_preemptions", "i8"),
        ("num_outgrown", "i8"),  # times that a request turned out longer than its replica's memory
        ("num_resent", "i8"),  # requests that came back to the router
        # Events: a heap for the future, a ring for this very instant.
        ("heap_size", "i8"),
        ("ring_head", "i8"),
        ("ring_size", "i8"),
        ("next_seq", "i8"),
        ("num_live", "i8"),  # events in the heap that are not timers or scrapes
        (
            "lines",
            "i8",
        ),  # [NUM_SIZES] LINE: the router's queue (routing/ordering.py), whose size is the router's
        ("next_line", "i8"),  # the one that is decided about
        ("is_ordered", "i8"),  # lines are by size, or have been
        ("queue_head", "i8"),  # and its first request
        ("is_deciding", "i4"),
        ("is_wake_planned", "i4"),
        ("is_timer_planned", "i4"),
        ("num_touched", "i4"),
        ("hold_timer_s", "f8"),
        ("scrape_interval_s", "f8"),
        ("scrape_delay_s", "f8"),
        ("is_oracle", "i4"),
        # Time integrals.
        ("load_since", "f8"),
        ("num_in_system", "i8"),
        ("sum_outstanding", "i8"),
        ("sum_squared_outstanding", "i8"),
        ("imbalance_cv", "f8"),
        ("outstanding_range", "f8"),  # max minus min, at the last observation
        ("in_system_area", "f8"),
        ("num_unstarted", "i8"),  # in the system, no token yet
        ("sum_unstarted_at", "f8"),  # of the times at which those arrived
        ("unstarted_area", "f8"),  # = sum of the times to first token
        ("age_area", "f8"),  # integral of the sum of their ages = half the sum of squares
        ("imbalance_area", "f8"),
        ("busy_span", "f8"),  # time with at least one request in the system
        ("held_s", "f8"),
        ("num_held", "i8"),
        ("num_decisions", "i8"),
        # What rewards are made of.
        ("slo_ttft_s", "f8"),
        ("slo_tpot_s", "f8"),
        ("slo_excess_s", "f8"),  # time beyond the two limits, summed over requests
        ("tail_ttft_s", "f8"),  # where the tails begin that limits are about
        ("tail_e2e_s", "f8"),
        ("ttft_excess_s", "f8"),  # time beyond them, summed over requests
        ("e2e_excess_s", "f8"),
        ("num_first_tokens", "i8"),
        ("num_fast_first_tokens", "i8"),  # within slo_ttft_s
        ("sum_e2e_s", "f8"),  # of the finished requests
        ("queued_prompt", "i8"),  # tokens of the prompts in the router's queue: for critics only, as the next
        ("num_decode_left", "i8"),  # true output still to come of what is in the system: for critics only
        ("num_logged_batches", "i8"),
    ],
    align=True,
)

REPLICA = np.dtype(
    [
        ("running", "i8"),  # [M] i4: requests that hold memory, in scheduling order
        ("fresh", "i8"),  # [M] i4: decoding requests whose last token came after the last step of all
        ("phase_count", "i8"),  # [B] i4: decoding requests by (processed - 1) mod B
        ("batches", "i8"),  # [G] BATCH
        ("stages", "i8"),  # [G] STAGE
        ("cache", "i8"),  # CACHE; 0: prefixes are not cached
        ("scheduler", "i4"),
        ("num_stages", "i4"),
        ("block_size", "i4"),
        ("num_blocks", "i4"),
        ("watermark_blocks", "i4"),
        ("max_seqs", "i4"),  # sequences holding memory
        ("micro_seqs", "i4"),  # sequences in one batch
        ("max_batch_tokens", "i4"),
        ("chunk_tokens", "i4"),
        ("long_prefill_tokens", "i4"),
        ("blocks_per_seq", "i4"),  # orca reserves these
        ("max_tokens", "i4"),  # prompt and output of the longest sequence it can serve at all
        ("give_up_tokens", "i4"),  # where it gives up a longer one
        ("cost", "i4"),
        ("is_async", "i4"),  # the next step is planned while one runs
        ("api_s", "f8"),  # from the router to the engine: the API server's time for any request
        ("api_s_per_token", "f8"),  # and for each token of its prompt
        ("api_s_per_stream", "f8"),  # for each token that it hands out
        ("api_free_at", "f8"),  # when it has handed out what the steps so far brought
        ("is_alive", "i4"),
        ("is_accepting", "i4"),
        ("slowdown", "f8"),
        ("next_on_card", "i4"),  # its neighbours in a ring; itself if it has a card of its own
        ("neighbour_step_s", "f8"),  # what a step takes longer for each that a neighbour ends meanwhile
        ("owed_s", "f8"),  # by the step that runs, for steps of neighbours
        ("used_blocks", "i4"),
        ("num_holding", "i4"),  # sequences that hold KV blocks
        ("num_running", "i4"),
        ("num_decoding", "i4"),
        ("num_partial", "i4"),  # running, prompt not finished
        ("first_partial", "i4"),  # no partial stands before this index of `running`
        ("is_unsorted", "i4"),
        ("num_in_flight", "i4"),  # batches
        ("waiting_head", "i8"),
        ("waiting_tail", "i8"),
        ("num_waiting", "i8"),
        ("reached_at", "f8"),  # time at which the latest request reaches the engine
        ("is_wake_planned", "i4"),  # for a request that is on its way to an idle engine
        ("step_began_at", "f8"),  # the step that runs, or the last one
        ("sum_decode", "i8"),  # true output of what was sent there and is not over: for critics only
        ("is_power_limited", "i4"),
        ("power_w", "f8"),  # drawn at full clocks, averaged over the power limit's window
        ("power_at", "f8"),  # time up to which that is known
        ("steps", "i8"),
        ("step_phase", "i4"),  # -steps mod B: requests of this phase need a block for their next token
        ("next_finish", "i8"),
        ("sum_processed", "i8"),  # of the decoding requests, without `steps`
        ("last_step_at", "f8"),
        ("num_fresh", "i4"),
        ("kv_since", "f8"),
        ("kv_area", "f8"),
        ("busy_s", "f8"),
        ("num_sent", "i8"),
        ("prompt_tokens", "i8"),  # of the requests it began to serve
        ("hit_tokens", "i8"),  # how many of these were cached
        # What the server's own gauges say; they move when a step ends.
        ("gauge_running", "f8"),
        ("gauge_waiting", "f8"),
        ("gauge_used_blocks", "f8"),
    ],
    align=True,
)

REQUEST = np.dtype(
    [
        ("arrived_at", "f8"),
        ("dispatched_at", "f8"),
        ("reached_at", "f8"),  # the engine, after the API server
        ("scheduled_at", "f8"),
        ("first_token_at", "f8"),
        ("completed_at", "f8"),
        ("last_token_at", "f8"),
        ("num_prefill", "i4"),
        ("num_decode", "i4"),
        ("prefill", "i4"),  # tokens to prefill now: grows by what was generated when a request is recomputed
        ("processed", "i4"),
        ("replica", "i4"),
        ("restarts", "i4"),
        ("session", "i4"),
        ("next", "i4"),
        ("limit", "i4"),  # prompt and output at which its replica is done with it, or gives it up
        ("seen", "i4"),  # prompt and output for which a replica was too small
        ("hit_tokens", "i4"),  # of its prompt, cached when it was scheduled for the first time
        ("is_decoding", "i1"),
        ("is_in_flight", "i1"),
        ("is_fresh", "i1"),  # its last token did not come with a step of all decoding requests
    ],
    align=True,
)

# Requests that wait at the router, oldest first, linked through `requests.next`.
LINE = np.dtype(
    [
        ("head", "i8"),
        ("tail", "i8"),
        ("held_request", "i8"),  # the head, if a policy holds it until there is room
        ("hold_until", "f8"),  # or until then
    ],
    align=True,
)

BATCH = np.dtype(
    [
        ("is_used", "i4"),
        ("is_lazy", "i4"),  # every decoding request advances; entries hold prefill chunks only
        ("num_entries", "i4"),
        ("num_decodes", "i4"),
        ("prefill_tokens", "i8"),
        ("context_tokens", "i8"),
        ("kv_tokens", "i8"),  # of the prefill chunks, each rounded up to 64
        ("pairs", "f8"),
        ("squares", "f8"),
        ("formed_at", "f8"),
        ("stage_s", "f8"),
        ("entries", "i8"),  # [M] ENTRY
    ],
    align=True,
)

ENTRY = np.dtype([("request", "i4"), ("num_tokens", "i4")], align=True)

STAGE = np.dtype(
    [
        ("queue", "i8"),  # [G] i4: batches that wait for the stage
        ("num_queued", "i4"),
        ("is_busy", "i4"),
        ("busy_since", "f8"),
    ],
    align=True,
)

# The prefixes of a request's prompt, and which blocks it holds; see prefixes.py.
PREFIX = np.dtype(
    [
        ("links", "i8"),  # [num_links] LINK: what it may share with others
        ("answer_key", "i8"),  # of the prefix that prompt and answer make; 0: nobody continues it
        ("own_key", "i8"),  # of the blocks behind the last link; 0: nobody will look for them
        ("num_links", "i4"),
        ("next_link", "i4"),  # the first with blocks that are not in `num_blocks`
        ("piece", "i4"),  # PIECE: the deepest blocks it holds that have a key
        ("num_blocks", "i4"),  # that it holds and that have a key
    ],
    align=True,
)

# What a replica has cached.
CACHE = np.dtype(
    [
        ("stretches", "i8"),  # [num_blocks + 2] STRETCH; none has number 0
        ("pieces", "i8"),  # [max_pieces + 1] PIECE; none has number 0
        ("buckets", "i8"),  # [num_buckets] BUCKET: the stretches by key
        ("num_buckets", "i8"),  # a power of two
        ("max_pieces", "i4"),
        ("num_pieces", "i4"),  # in use
        ("unused_stretch", "i4"),  # dropped ones, linked by `newer`; 0: none
        ("unused_piece", "i4"),  # dropped ones, linked by `above`
        ("last_stretch", "i4"),  # the highest number ever used
        ("last_piece", "i4"),
        ("oldest", "i4"),  # free stretches, linked by `older` and `newer`
        ("newest", "i4"),
        ("idle_hits", "i4"),  # blocks of the last match that nobody holds
    ],
    align=True,
)

STRETCH = np.dtype(
    [
        ("key", "i8"),  # of the link that these blocks end in; 0: blocks without a key, which are free
        ("start", "i4"),  # the first block, counted from the beginning of the prompt
        ("stop", "i4"),  # behind the last
        ("num_holders", "i4"),  # requests; 0: free
        ("previous", "i4"),  # the stretch with the blocks before it, in the hands of who computed both
        ("older", "i4"),  # in the queue of free stretches
        ("newer", "i4"),
        ("before", "i4"),  # in its bucket, in the order in which they were cached
        ("after", "i4"),
    ],
    align=True,
)

PIECE = np.dtype(
    [
        ("stretch", "i4"),  # the deepest one; the others follow by `previous`
        ("start", "i4"),  # the first block
        ("above", "i4"),  # PIECE with the blocks before those
    ],
    align=True,
)

BUCKET = np.dtype([("first", "i4"), ("last", "i4")], align=True)

FUTURE = np.dtype([("time", "f8"), ("seq", "i8"), ("what", "i8")], align=True)

INSTANT = np.dtype([("seq", "i8"), ("what", "i8")], align=True)

COST = np.dtype(
    [
        ("kind", "i8"),
        ("coefficients", "i8"),  # address of [6] f8, and so on
        ("token_s", "i8"),
        ("num_token_s", "i8"),
        ("sequence_s", "i8"),
        ("num_sequence_s", "i8"),
        ("decode_s", "i8"),
        ("decode_rows", "i8"),
        ("decode_columns", "i8"),
        ("prefill_s", "i8"),
        ("prefill_rows", "i8"),
        ("prefill_columns", "i8"),
        ("grid", "i8"),
        ("start_s", "i8"),
        ("num_start_s", "i8"),
        ("power", "i8"),  # POWER, of replicas that are limited
    ],
    align=True,
)

POWER = np.dtype(
    [
        ("window_s", "f8"),
        ("limit_w", "f8"),
        ("idle_w", "f8"),
        ("exponent", "f8"),
        ("step_j", "f8"),
        ("compute_w", "f8"),
        ("context_j", "f8"),
        ("compute_s_per_token", "f8"),
        ("memory_share", "f8"),
    ],
    align=True,
)

EVENT = np.dtype([("at", "f8"), ("kind", "i4"), ("replica", "i4"), ("value", "f8")], align=True)

BATCH_LOG = np.dtype(
    [
        ("replica", "i4"),
        ("num_seqs", "i4"),
        ("formed_at", "f8"),
        ("ended_at", "f8"),
        ("prefill_tokens", "i8"),
        ("num_decodes", "i4"),
        ("used_blocks", "i4"),
    ],
    align=True,
)

replica_at = row_accessor(REPLICA)
request_at = row_accessor(REQUEST)
line_at = row_accessor(LINE)
batch_at = row_accessor(BATCH)
entry_at = row_accessor(ENTRY)
stage_at = row_accessor(STAGE)
prefix_at = row_accessor(PREFIX)
cache_at = row_accessor(CACHE)
stretch_at = row_accessor(STRETCH)
piece_at = row_accessor(PIECE)
bucket_at = row_accessor(BUCKET)
event_at = row_accessor(EVENT)
future_at = row_accessor(FUTURE)
instant_at = row_accessor(INSTANT)
cost_at = row_accessor(COST)
power_limit_at = row_accessor(POWER)
log_at = row_accessor(BATCH_LOG)
