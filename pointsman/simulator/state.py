"""Everything a batch of simulated clusters knows, in flat arrays.

`Batch` holds N independent clusters: every array has a leading axis [N] and is padded to the largest
cluster. `view(batch, i)` narrows it to `Sim`, cluster i alone, without copying; all kernels work on a `Sim`.
Records (one row a request, a replica, a cluster) keep what is read together next to each other in memory;
`signals` is a table with one row a signal, because policies scan one signal over all replicas.

Letters: N clusters, R replicas, M sequences a replica may batch, G pipeline stages, B tokens a KV block.

Tokens processed are counted lazily. In a step without memory pressure every decoding request of a replica
advances by one token, so the step only increments `steps`: a decoding request has processed
`processed + steps` tokens. Which requests need a new KV block follows from that number modulo B
(`phase_count`), and the next request to finish is known in advance (`next_finish`). A step therefore costs
the same with 5 or 200 running requests.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from pointsman.signals import NUM_SIGNALS

NEVER = -1.0  # a time that has not come yet
NOBODY = -1  # a request or replica that does not exist

# Scheduler kinds.
VLLM_V1, VLLM, SARATHI, ORCA = range(4)

# What a cluster waits for when a kernel returns.
READY, DECISION, BATCH_LOG_FULL, DONE = range(4)

# Cluster events a user can plan.
SLOW, FAIL, JOIN, DRAIN = range(4)

NUM_TBT_BINS = 1536  # time-between-tokens histogram: 1 % wide bins from 10 µs to 40 s
TBT_LOWEST_S = 1e-5
TBT_LOG_WIDTH = np.log(1.01)

NUM_LENGTH_CLASSES = 24  # output lengths are estimated for each power of two of the prompt length

CLUSTER = np.dtype(
    [
        ("now", "f8"),
        ("time_limit", "f8"),
        ("status", "i4"),
        ("num_replicas", "i4"),
        ("num_requests", "i8"),
        ("num_users", "i8"),  # closed loop; 0 = open
        ("next_arrival", "i8"),
        ("next_event", "i8"),
        ("num_completed", "i8"),
        ("num_batches", "i8"),
        ("num_preemptions", "i8"),
        ("num_resent", "i8"),  # requests that came back from a failed replica
        # Events: a heap for the future, a ring for this very instant.
        ("heap_size", "i8"),
        ("ring_head", "i8"),
        ("ring_size", "i8"),
        ("next_seq", "i8"),
        # The router's queue, oldest first, linked through `requests.next`.
        ("queue_head", "i8"),
        ("queue_tail", "i8"),
        ("queue_size", "i8"),
        ("is_deciding", "i4"),
        ("is_wake_planned", "i4"),
        ("is_timer_planned", "i4"),
        ("num_touched", "i4"),
        ("num_accepting", "i4"),
        ("max_hold_s", "f8"),
        ("hold_timer_s", "f8"),
        ("scrape_interval_s", "f8"),
        ("scrape_delay_s", "f8"),
        ("is_oracle", "i4"),
        ("rng", "i8"),
        ("round_robin", "i8"),
        # Time integrals.
        ("load_since", "f8"),
        ("num_in_system", "i8"),
        ("sum_outstanding", "i8"),
        ("sum_squared_outstanding", "i8"),
        ("imbalance_cv", "f8"),
        ("in_system_area", "f8"),
        ("imbalance_area", "f8"),
        ("busy_span", "f8"),  # time with at least one request in the system
        ("held_s", "f8"),
        ("num_held", "i8"),
        ("num_decisions", "i8"),
        ("num_logged_batches", "i8"),
    ],
    align=True,
)

REPLICA = np.dtype(
    [
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
        ("cost", "i4"),
        ("is_alive", "i4"),
        ("is_accepting", "i4"),
        ("slowdown", "f8"),
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
        ("steps", "i8"),
        ("next_finish", "i8"),
        ("sum_processed", "i8"),  # of the decoding requests, without `steps`
        ("last_step_at", "f8"),
        ("num_fresh", "i4"),
        ("kv_since", "f8"),
        ("kv_area", "f8"),
        ("busy_s", "f8"),
        ("rate_since", "f8"),
        ("num_sent", "i8"),
        # What the server's own gauges say; they move when a step ends.
        ("gauge_running", "f8"),
        ("gauge_waiting", "f8"),
        ("gauge_kv_use", "f8"),
    ],
    align=True,
)

REQUEST = np.dtype(
    [
        ("arrived_at", "f8"),
        ("dispatched_at", "f8"),
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
        ("estimate", "i4"),  # output tokens the router expected when it sent the request
        ("is_decoding", "i1"),
        ("is_in_flight", "i1"),
        ("is_first_token_seen", "i1"),  # by the router, since the request was last sent
        ("is_fresh", "i1"),  # its last token did not come with a step of all decoding requests
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
    ],
    align=True,
)

STAGE = np.dtype(
    [("is_busy", "i4"), ("batch", "i4"), ("num_queued", "i4"), ("seq", "i8"), ("started_at", "f8")],
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

Array = NDArray[Any]


class Costs(NamedTuple):
    """Execution-time tables of all cost models in use, shared by all clusters; first axis = cost model."""

    kind: Array
    coefficients: Array
    token_s: Array
    sequence_s: Array
    decode_s: Array
    prefill_s: Array
    grid: Array


class Batch(NamedTuple):
    """N clusters. Shapes are those of `Sim` behind a leading [N], but for `costs`, which all share."""

    cluster: Array
    replicas: Array
    requests: Array
    events: Array
    running: Array
    fresh: Array
    phase_count: Array
    batches: Array
    entry_request: Array
    entry_tokens: Array
    stages: Array
    stage_queue: Array
    heap_time: Array
    heap_seq: Array
    heap_what: Array
    ring_seq: Array
    ring_what: Array
    signals: Array
    scraped: Array
    output_estimate: Array
    tbt_histogram: Array
    touched: Array
    credit: Array
    scratch: Array
    batch_log: Array
    costs: Costs


class Sim(NamedTuple):
    """One cluster."""

    cluster: Array  # [1] CLUSTER
    replicas: Array  # [R] REPLICA
    requests: Array  # [num_requests] REQUEST, in order of arrival
    events: Array  # [num_events] EVENT, in order of time
    running: Array  # [R, M] requests that hold memory, in scheduling order
    fresh: Array  # [R, M] decoding requests whose last token came after the last step of all
    phase_count: Array  # [R, B] decoding requests by (processed - 1) mod B
    batches: Array  # [R, G] BATCH
    entry_request: Array  # [R, G, M]
    entry_tokens: Array  # [R, G, M]
    stages: Array  # [R, G] STAGE
    stage_queue: Array  # [R, G, G] batches waiting for a stage
    heap_time: Array
    heap_seq: Array
    heap_what: Array
    ring_seq: Array
    ring_what: Array
    signals: Array  # [NUM_SIGNALS, R]
    scraped: Array  # [3, R] values on their way from the servers to the router
    output_estimate: Array  # [NUM_LENGTH_CLASSES]
    tbt_histogram: Array  # [NUM_TBT_BINS]
    touched: Array  # [R + 1] replicas that got a request in this round of decisions
    credit: Array  # [R] of the weighted round robin
    scratch: Array  # [M]
    batch_log: Array
    costs: Costs


@njit
def view(batch, i):  # type: ignore[no-untyped-def]
    """Cluster i of the batch, sharing its memory."""
    return Sim(
        batch.cluster[i],
        batch.replicas[i],
        batch.requests[i],
        batch.events[i],
        batch.running[i],
        batch.fresh[i],
        batch.phase_count[i],
        batch.batches[i],
        batch.entry_request[i],
        batch.entry_tokens[i],
        batch.stages[i],
        batch.stage_queue[i],
        batch.heap_time[i],
        batch.heap_seq[i],
        batch.heap_what[i],
        batch.ring_seq[i],
        batch.ring_what[i],
        batch.signals[i],
        batch.scraped[i],
        batch.output_estimate[i],
        batch.tbt_histogram[i],
        batch.touched[i],
        batch.credit[i],
        batch.scratch[i],
        batch.batch_log[i],
        batch.costs,
    )


class Sizes(NamedTuple):
    """How large the arrays of a batch of clusters must be."""

    num_clusters: int
    num_replicas: int
    num_requests: int
    num_events: int
    max_seqs: int
    num_stages: int
    block_size: int
    num_users: int
    batch_log: int


def allocate(sizes: Sizes, costs: Costs) -> Batch:
    n, r, m, g = sizes.num_clusters, sizes.num_replicas, sizes.max_seqs, sizes.num_stages
    # One end of stage for each stage, one timer, one scrape on its way, one arrival for each closed-loop user.
    heap = r * g + sizes.num_users + 8
    # An instant holds at most a few events for each batch in flight, plus one wake-up of the router.
    ring = 4 * r * (g + 1) + 16

    def records(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        return np.zeros(shape, dtype=dtype).view(np.recarray)

    return Batch(
        cluster=records((n, 1), CLUSTER),
        replicas=records((n, r), REPLICA),
        requests=records((n, sizes.num_requests), REQUEST),
        events=records((n, sizes.num_events), EVENT),
        running=np.zeros((n, r, m), np.int32),
        fresh=np.zeros((n, r, m), np.int32),
        phase_count=np.zeros((n, r, sizes.block_size), np.int32),
        batches=records((n, r, g), BATCH),
        entry_request=np.zeros((n, r, g, m), np.int32),
        entry_tokens=np.zeros((n, r, g, m), np.int32),
        stages=records((n, r, g), STAGE),
        stage_queue=np.zeros((n, r, g, g), np.int32),
        heap_time=np.zeros((n, heap)),
        heap_seq=np.zeros((n, heap), np.int64),
        heap_what=np.zeros((n, heap), np.int64),
        ring_seq=np.zeros((n, ring), np.int64),
        ring_what=np.zeros((n, ring), np.int64),
        signals=np.zeros((n, NUM_SIGNALS, r)),
        scraped=np.zeros((n, 3, r)),
        output_estimate=np.zeros((n, NUM_LENGTH_CLASSES)),
        tbt_histogram=np.zeros((n, NUM_TBT_BINS), np.int64),
        touched=np.zeros((n, r + 1), np.int32),
        credit=np.zeros((n, r)),
        scratch=np.zeros((n, m), np.int32),
        batch_log=records((n, sizes.batch_log), BATCH_LOG),
        costs=costs,
    )
