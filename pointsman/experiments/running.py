"""Clusters run to their end, on several threads, with the same result as one by one."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from threading import Event

import numpy as np

from pointsman.compiled.memory import Records
from pointsman.experiments.threads import run_in_threads
from pointsman.routing.policy import PolicyTables
from pointsman.simulator.cluster import Clusters
from pointsman.simulator.replica import FAR
from pointsman.simulator.run import run
from pointsman.simulator.state import DONE, SIM

NUM_PROGRESS_STEPS = 100
Progress = Callable[[int], None]  # gets the number of requests finished since the last call


@cache
def load_simulator() -> None:
    """Compile the kernel, or load it from the cache, so that the next run takes only its own time."""
    run(Records(0, SIM), PolicyTables([], max_replicas=1).rows, np.zeros(0, np.int64), 0, 0)


def run_to_end(
    clusters: Clusters,
    policies: PolicyTables,
    num_threads: int = 1,
    progress: Progress | None = None,
    on_pause: Callable[[], None] | None = None,
) -> None:
    """`on_pause` is called whenever the kernel pauses, and at the end. An exception ends all clusters."""
    actions = np.zeros(len(clusters.sims), np.int64)
    is_over = Event()

    def run_one(i: int) -> None:
        sim = clusters.sims[i]
        stride = max(1, int(sim.num_requests) // NUM_PROGRESS_STEPS)
        while sim.status != DONE:
            before = int(sim.num_completed)
            sim.pause_at = before + stride if progress else FAR
            if is_over.is_set():  # asked after `pause_at` is set, which `end_early` sets last
                return
            run(clusters.sims, policies.rows, actions, i, i + 1)
            if progress:
                progress(int(sim.num_completed) - before)
            if on_pause:
                on_pause()

    def end_early() -> None:
        is_over.set()
        clusters.sims["pause_at"] = 0

    load_simulator()  # here and not in a thread: the compiler stops at Ctrl-C
    run_in_threads(run_one, len(clusters.sims), num_threads, end_early)
