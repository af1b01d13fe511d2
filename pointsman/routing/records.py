"""What a router remembers, in flat records that compiled code reaches by address (compiled/memory.py).

`ROUTER` is the router: the signal table and the books behind it. It has an `ACCOUNT` for each replica and a
`TICKET` for each request that it sent and that is not over. `ASK` is the request that a decision is about, as
a policy may see it: how long its answer will be is in none of these records, so nobody can look. `POLICY` is
a policy, and `MEMORY` what it keeps from one decision to the next: several can work on the same books.

Letters: R replicas, F and C features of a replica and of the context.
"""

from __future__ import annotations

import numpy as np

from pointsman.compiled.memory import row_accessor

NEVER = -1.0  # a time that has not come yet
NOBODY = -1  # a request, a replica or a session that does not exist
UNKNOWN = 0  # a limit on the output that nobody gave

NUM_LENGTH_CLASSES = 24  # output lengths are estimated for each power of two of the prompt length
INITIAL_OUTPUT_ESTIMATE = 256

ROUTER = np.dtype(
    [
        ("signals", "i8"),  # [NUM_SIGNALS, R] f8
        ("accounts", "i8"),  # [R] ACCOUNT
        ("tickets", "i8"),  # [T] TICKET
        ("output_estimate", "i8"),  # [NUM_LENGTH_CLASSES] f8
        ("prefixes", "i8"),  # [1] INDEX: which prefixes were sent where; 0: not kept
        ("num_replicas", "i8"),
        ("num_accepting", "i8"),
        ("queue_size", "i8"),  # requests at the router, the one to place among them
        ("fits_anywhere", "f8"),  # tokens; a request that needs no more may go to any replica
        ("max_hold_s", "f8"),  # after this a request must be sent
        ("overtake_s", "f8"),  # smaller ones that arrived up to so much later go first (ordering.py)
        ("small_first", "f8"),  # how much the size of a request slows down its ageing; that of the policy
        ("usual_size", "f8"),  # of the requests that were sent
        ("books", "i8"),  # of all processes and routers (sharing.py)
        ("num_books", "i8"),  # 0 or 1: nobody else's
        ("own_book", "i8"),
    ],
    align=True,
)

# What the router keeps of a replica beside its signals.
ACCOUNT = np.dtype(
    [
        # Tickets without a first token, in the order in which they were sent.
        ("waiting_head", "i8"),
        ("waiting_tail", "i8"),
        ("prefill_at", "f8"),  # up to when `prefill_load` has faded
        ("num_silent", "i8"),  # of those, how many do not stream
        ("rate_since", "f8"),
        ("rate_tokens", "i8"),  # seen since then
        # Tokens that came at one instant are booked together, as those of one step.
        ("tokens_at", "f8"),
        ("num_tokens", "i8"),
        ("last_step_at", "f8"),
        ("scraped_at", "f8"),  # when the server's gauges were last read
        # Of the steps since the last window was closed; see streams.py.
        ("stepped_at", "f8"),  # when the last step ended, or the first stream of many began
        ("window_steps", "i8"),
        ("window_s", "f8"),
        ("window_streams", "f8"),
        ("window_prompt_tokens", "f8"),
        ("read_elsewhere", "f8"),  # prompt tokens that others have seen computed, at the last step
        ("windows", "i8"),  # [NUM_WINDOWS, 4] f8: the last of them
        ("num_windows", "i8"),  # that were ever written there
        # Its prefix cache, as far as the index knows; see prefixes.py.
        ("column", "i8"),  # of the index; NOBODY: none was left
        ("oldest", "i8"),  # stamp that is still taken to be cached, when the last request was asked about
        ("matched_tokens", "f8"),  # lately, of which the index said that they are cached
        ("found_tokens", "f8"),  # and of which the server said so too
        ("num_reports", "i8"),  # answers that said how much of their prompt was cached
        ("started_tokens", "f8"),  # like matched, of requests that began since the counters were last read
        ("counted_queries", "f8"),  # the server's own counters: prompt tokens looked up in its cache
        ("counted_hits", "f8"),  # and found there
    ],
    align=True,
)

TICKET = np.dtype(
    [
        ("sent_at", "f8"),
        ("last_token_at", "f8"),
        ("assumed_start_at", "f8"),  # when a request that does not stream is taken to have its first token
        ("replica", "i4"),
        ("prompt_tokens", "i4"),
        ("expected_output", "i4"),  # when it was sent
        ("num_output", "i4"),  # tokens seen
        ("before", "i4"),  # its neighbours among the waiting
        ("after", "i4"),
        ("is_started", "i4"),  # its first token was seen, or must have come
        ("cached_tokens", "i4"),  # of its prompt, that need not be computed as far as the router can tell
        ("matched_tokens", "i4"),  # the same by the index alone, however wrong that has been lately
        ("num_links", "i4"),
        ("links", "i8"),  # as of ASK
        ("answer_key", "i8"),
    ],
    align=True,
)

ASK = np.dtype(
    [
        ("arrived_at", "f8"),
        ("hold_until", "f8"),  # the last decision was to hold it: until there is room, or until then
        ("prompt_tokens", "i8"),
        ("max_tokens", "i8"),  # of output, by its client; UNKNOWN
        ("seen_tokens", "i8"),  # prompt and output it had reached where it was tried before
        ("session", "i8"),
        ("links", "i8"),  # [num_links] LINK: the prefixes of its prompt that others may share, shortest first
        ("num_links", "i8"),
        ("answer_key", "i8"),  # of the prefix that prompt and answer will make; 0: nobody continues it
        # Filled by `prepare`.
        ("expected_output", "f8"),  # by the router's estimate
        ("needs_tokens", "f8"),  # of KV memory that a replica must have to take it
    ],
    align=True,
)

# A prefix of a prompt: everything from its beginning up to some token.
LINK = np.dtype(
    [
        ("key", "i8"),  # tells it from all other prefixes, also of other lengths; never 0
        ("tokens", "i4"),  # its length
        ("end", "i4"),  # and in bytes of text, where there is one
    ],
    align=True,
)

# Which prefixes were sent where (prefixes.py): a table of `num_sets` times WAYS prefixes.
INDEX = np.dtype(
    [
        ("num_sets", "i8"),  # a power of two
        ("num_columns", "i8"),  # C: replicas that it tells apart
        ("keys", "i8"),  # [num_sets, WAYS] i8; 0 = free
        ("prefixes", "i8"),  # [num_sets, WAYS] SIGHTING
        ("stamps", "i8"),  # [num_sets, WAYS, C] i8: the clock of that column when it was last used; 0 = never
        ("clocks", "i8"),  # [num_clocks, C] i8: tokens that went into each cache, by process
        ("num_clocks", "i8"),
        ("own_clock", "i8"),  # row of the process
        ("began", "i8"),  # [C] i8: the clock when the cache was empty
        ("names", "i8"),  # [C] i8: digests of the replicas' names; 0 = free
        ("max_age_s", "f8"),  # what was not used for so long is forgotten
        # What goes into the index, for other routers: a ring of i8 for each process, which writes to its own.
        ("journal", "i8"),  # [num_clocks, journal_words] i8
        ("journal_words", "i8"),  # 0: none is kept
        ("num_noted", "i8"),  # [num_clocks] i8: words that were ever written there
    ],
    align=True,
)

SIGHTING = np.dtype(
    [
        ("used_at", "f8"),
        ("answer_tokens", "i4"),  # of the last answer to the prompt that ended here; 0: nobody saw one
        ("answer_column", "i4"),  # who gave it
    ],
    align=True,
)

POLICY = np.dtype(
    [
        ("kind", "i8"),
        ("reads_derived", "i8"),
        ("may_hold", "i8"),  # learned, as the next
        ("hold_s", "f8"),  # a held request is decided anew when there is room, or after this
        ("kv_limit", "f8"),  # room: share of the KV memory that may be booked
        ("prefill_limit", "f8"),  # room: prompt tokens that may wait on a replica
        ("stream_limit", "f8"),  # room: requests that a replica may have
        ("detour_s", "f8"),  # learned: how much later than at the soonest a first token may be expected
        ("small_first", "f8"),  # of those that hold: how much the size counts in the order (ordering.py)
        ("ttft_limit_s", "f8"),  # the service level that features of time are compared with
        ("step_limit_s", "f8"),
        ("weights", "i8"),  # address of [NUM_SIGNALS] f8: linear-score
        (
            "parameters",
            "i8",
        ),  # address of [MAX_PARAMETERS] f8: of a heuristic, in the order of its declaration
        # Learned: addresses of the network and of its working memory for this router.
        ("network", "i8"),
        ("max_replicas", "i8"),  # R: of the working memory
        ("entities", "i8"),  # [R, F] f4
        ("context", "i8"),  # [C] f4
        ("legal", "i8"),  # [R + 1] u1
        ("logits", "i8"),  # [R + 1] f4
        ("scratch", "i8"),  # what `forward` asks for
        ("state", "i8"),  # [W] f4: what a recurrent network remembers
    ],
    align=True,
)

MEMORY = np.dtype(
    [
        ("rng", "i8"),
        ("round_robin", "i8"),  # whose turn it is
        ("num_replicas", "i8"),  # R: of the two tables
        ("scores", "i8"),  # [R] f8: of the last decision
        ("credit", "i8"),  # [R] f8: of the weighted round robin
    ],
    align=True,
)

router_at = row_accessor(ROUTER)
account_at = row_accessor(ACCOUNT)
ticket_at = row_accessor(TICKET)
link_at = row_accessor(LINK)
index_at = row_accessor(INDEX)
sighting_at = row_accessor(SIGHTING)
policy_at = row_accessor(POLICY)
