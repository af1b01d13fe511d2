"""Batches as a Chrome trace, to look at in https://ui.perfetto.dev or chrome://tracing.

Times are microseconds. A replica is a thread of the process "cluster"; with pipeline stages, where batches
overlap, it has one thread for each batch in flight.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import IO, Any

import numpy as np

CLUSTER_PID = 0
_BATCH = (
    '{{"name":"{}","cat":"batch","ph":"X","pid":0,"tid":{},"ts":{},"dur":{},'
    '"args":{{"sequences":{},"prefill_tokens":{},"decodes":{},"kv_blocks":{}}}}}'
)


class TraceWriter:
    """Writes the file piece by piece; `close` completes it."""

    def __init__(self, file: IO[str], replica_names: Sequence[str], num_lanes: int = 1) -> None:
        """`num_lanes`: batches in flight on one replica, at most."""
        self._file = file
        self._num_lanes = num_lanes
        self._busy_until = np.zeros((len(replica_names), num_lanes))
        self.num_batches = 0
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        file.write(json.dumps(_metadata("process_name", 0, "cluster")))
        for replica, name in enumerate(replica_names):
            for lane in range(num_lanes):
                tid = self._tid(replica, lane)
                text = name if num_lanes == 1 else f"{name}, batch {lane}"
                file.write(",\n" + json.dumps(_metadata("thread_name", tid, text)))

    def _tid(self, replica: int, lane: int) -> int:
        return replica * self._num_lanes + lane

    def add(self, batches: Any) -> None:
        """`batches` [n] BATCH_LOG, those of a replica in the order in which they were formed."""
        write = self._file.write
        starts_us = np.round(batches["formed_at"] * 1e6, 3).tolist()
        # From rounded times, so that a batch never reaches into the next.
        durations_us = np.round(np.round(batches["ended_at"] * 1e6, 3) - starts_us, 3).tolist()
        columns = ("replica", "num_seqs", "prefill_tokens", "num_decodes", "used_blocks")
        rows = zip(*(batches[column].tolist() for column in columns), strict=True)
        for start_us, duration_us, row in zip(starts_us, durations_us, rows, strict=True):
            replica, num_seqs, prefill_tokens, num_decodes, used_blocks = row
            tid = self._lane(replica, start_us, start_us + duration_us)
            name = "prefill" if not num_decodes else "mixed" if prefill_tokens else "decode"
            args = (num_seqs, prefill_tokens, num_decodes, used_blocks)
            write(",\n" + _BATCH.format(name, tid, start_us, duration_us, *args))
        self.num_batches += len(batches)

    def _lane(self, replica: int, start_us: float, end_us: float) -> int:
        if self._num_lanes == 1:
            return replica
        busy_until = self._busy_until[replica]
        free = np.flatnonzero(busy_until <= start_us + 1e-3)
        lane = int(free[0]) if len(free) else int(busy_until.argmin())
        busy_until[lane] = end_us
        return self._tid(replica, lane)

    def close(self) -> None:
        self._file.write("\n]}\n")


def _metadata(kind: str, tid: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": CLUSTER_PID, "tid": tid, "args": {"name": name}}
