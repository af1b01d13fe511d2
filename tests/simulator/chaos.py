"""Strategies for clusters in which anything may happen, for the tests of laws and memory."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from pointsman.routing.heuristics import HEURISTICS
from pointsman.routing.policy import PolicySpec
from pointsman.simulator.spec import ClusterSpec
from pointsman.workload import Workload

from .factories import make_cluster, make_policy, make_workload

MAX_PROMPT, MAX_OUTPUT = 40, 40
LONGEST = MAX_PROMPT + MAX_OUTPUT
LAST_EVENT_S = 30.0
KINDS = ("vllm-v1", "vllm", "sarathi", "orca")


@st.composite
def replica_groups(draw: st.DrawFn, kinds: tuple[str, ...] = KINDS, is_large: bool = True) -> dict[str, Any]:
    """A replica. A large one has memory for any request, and for a block that it may keep free.

    Vidur's vllm and sarathi put a sequence to sleep that leaves none, so small ones keep some by a watermark.
    """
    kind = draw(st.sampled_from(kinds))
    num_stages = draw(st.sampled_from((1, 1, 2, 3)))
    max_seqs = draw(st.sampled_from((12, 3, 40)))
    block_size = draw(st.sampled_from((4, 16, 1, 7, 32)))
    longest = LONGEST if is_large else draw(st.integers(1, LONGEST))
    scheduler: dict[str, Any] = {
        "kind": kind,
        "block_size": block_size,
        "num_blocks": -(-longest // block_size) + 1 + draw(st.sampled_from((0, 1, 3, 8, 30, 1000))),
        "watermark": 0.5 if kind in ("vllm", "sarathi") and not is_large else 0.0,
        "pipeline_stages": num_stages,
    }
    if kind == "vllm-v1":
        scheduler["max_num_seqs"] = max_seqs
        scheduler["max_num_batched_tokens"] = max_seqs + draw(st.sampled_from((0, 20, 400)))
        scheduler["long_prefill_token_threshold"] = draw(st.sampled_from((0, 8)))
    else:
        scheduler["max_batch_size"] = max_seqs
        scheduler["chunk_size"] = draw(st.sampled_from((64, 5, 300)))
        scheduler["max_tokens_in_batch"] = LONGEST + draw(st.sampled_from((0, 100)))
        scheduler["max_sequence_tokens"] = max(longest, block_size)
    return {"scheduler": scheduler, "slowdown": draw(st.sampled_from((1.0, 1.0, 0.3, 5.0)))}


@st.composite
def event_lists(draw: st.DrawFn, num_replicas: int) -> list[dict[str, Any]]:
    """Replicas slow down, die, drain and come back; in the end all are there."""
    kinds = st.sampled_from(("fail", "slow", "recover", "drain", "join"))
    events = st.fixed_dictionaries(
        {
            "at_s": st.sampled_from((0.0, 0.5, 1.0, 1.25, 2.0, 3.0, 5.0, 8.0, 13.0, 21.0)),
            "kind": kinds,
            "replica": st.integers(0, num_replicas - 1),
            "factor": st.sampled_from((1.0, 2.0, 0.5, 10.0)),
        }
    )
    returns = [{"at_s": LAST_EVENT_S, "kind": "recover", "replica": k} for k in range(num_replicas)]
    return draw(st.lists(events, max_size=12)) + returns


@st.composite
def clusters(draw: st.DrawFn, kinds: tuple[str, ...] = KINDS) -> ClusterSpec:
    """At least one of its replicas, wherever it stands, can serve every request."""
    others = draw(st.lists(st.booleans().flatmap(lambda large: replica_groups(kinds, large)), max_size=3))
    groups = draw(st.permutations([draw(replica_groups(kinds)), *others]))
    return make_cluster(
        replicas=groups,
        cost=draw(
            st.sampled_from(
                (
                    {"kind": "linear", "a": 0.01, "b": 1e-3, "c": 1e-3, "d": 1e-5, "e": 1e-6},
                    {"kind": "linear", "a": 0.125, "b": 0.03125},
                )
            )
        ),
        events=draw(event_lists(len(groups))),
        signals={
            "scrape_interval_s": draw(st.sampled_from((0.1, 0.5))),
            "scrape_delay_s": draw(st.sampled_from((0.0, 0.05, 0.1))),
            "oracle": draw(st.booleans()),
        },
        hold={
            "max_hold_s": draw(st.sampled_from((0.0, 0.3, 5.0))),
            "timer_s": draw(st.sampled_from((0.05, 1.0))),
        },
    )


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    """Open or closed loop, with ties, bursts and sessions, long and short."""
    count = draw(st.integers(1, 80))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    num_users = draw(st.sampled_from((0, 0, 0, 1, 7)))
    pauses = draw(st.sampled_from((0.01, 0.125, 1.0))) * rng.choice((0, 0, 0, 1, 2, 9), count)
    closed = {"num_users": num_users, "think_s": pauses} if num_users else {}
    return make_workload(
        np.zeros(count) if num_users else np.cumsum(pauses),
        rng.integers(1, draw(st.sampled_from((MAX_PROMPT, MAX_PROMPT, 2))) + 1, count),
        rng.integers(1, draw(st.sampled_from((MAX_OUTPUT, MAX_OUTPUT, 2))) + 1, count),
        rng.integers(-1, 6, count),
        **closed,
    )


@st.composite
def policies(draw: st.DrawFn) -> PolicySpec:
    kind = draw(st.sampled_from(sorted(HEURISTICS)))
    if kind == "hold-until-room":
        return make_policy(kind, kv_limit=draw(st.sampled_from((0.95, 0.3, 1e-9))))
    return make_policy(kind)
