"""Everything a simulated GPU cluster knows, in flat records; compiled/memory.py says why by address.

The queue is in order of arrival, and a policy sees its first jobs, the window. As jobs enter the window in
that order, the rest of the queue is a range: jobs `num_entered` to `num_arrived` - 1.

Letters: J jobs of an episode, K slots of the window, G GPUs.
"""

from __future__ import annotations

import numpy as np

from pointsman.compiled.memory import row_accessor

NOBODY = -1

# How an episode stands.
GOING_ON, FINISHED, CUT_OFF = range(3)

JOB = np.dtype(
    [
        ("arrived_at", "f8"),
        ("duration_s", "f8"),
        ("gpus", "i8"),
        ("priority", "i8"),
        ("work", "f8"),  # GPU seconds
        ("started_at", "f8"),  # -1: not yet
        ("deadline_at", "f8"),  # when it should have ended; infinite without a deadline
        ("is_missed", "i8"),  # it can no longer end by then
        ("log_duration", "f4"),  # as observed
        ("log_work", "f4"),  # as observed
    ],
    align=True,
)

RUNNING = np.dtype([("ends_at", "f8"), ("gpus", "i8"), ("job", "i8")], align=True)

CLUSTER = np.dtype(
    [
        # Tables, by address.
        ("jobs", "i8"),  # [J] JOB, in order of arrival
        ("window", "i8"),  # [K] i4: jobs that may be started
        ("running", "i8"),  # [G] RUNNING, next to end first
        ("gpu_job", "i8"),  # [G] i4: who has it; NOBODY
        ("free_in", "i8"),  # [G] f8: of the observation
        ("durations", "i8"),  # [K] f4: of the observation
        ("wider", "i8"),  # [G + 1] i4: of the observation
        ("due_at", "i8"),  # [K] f8: of the observation
        ("num_jobs", "i8"),  # J
        ("room", "i8"),  # K
        ("num_gpus", "i8"),  # G
        ("max_steps", "i8"),
        ("max_duration_s", "f8"),
        ("horizon_s", "f8"),
        ("total_work", "f8"),  # GPU seconds of all J jobs
        ("noop_price", "f8"),  # see `pay`
        ("deadline_price", "f8"),  # see `pay`
        ("num_deadlines", "i8"),  # jobs that have one
        ("rng", "i8"),  # of random-feasible
        # The cluster.
        ("now", "f8"),
        ("num_idle", "i8"),  # GPUs
        ("num_running", "i8"),
        ("num_window", "i8"),
        ("num_entered", "i8"),  # jobs that have entered the window
        ("num_arrived", "i8"),
        ("num_completed", "i8"),
        ("num_steps", "i8"),
        ("waiting_work", "f8"),
        ("arrived_work", "f8"),
        ("completed_work", "f8"),
        ("status", "i8"),
        # The last decision.
        ("elapsed_s", "f8"),
        ("is_illegal", "i8"),
        ("completed", "f8"),  # terms of the reward
        ("holding", "f8"),
        ("noop", "f8"),
        ("finished", "f8"),
        ("unfinished", "f8"),
        ("missed", "f8"),
        ("shaping", "f8"),
        # The episode.
        ("episode_return", "f8"),
        ("num_missed", "i8"),  # deadlines
        ("num_choices", "i8"),  # steps at which a job could be started
        ("num_noops", "i8"),  # of these, steps that started none
        ("num_illegal", "i8"),
    ],
    align=True,
)

TERMS = ("completed", "holding", "noop", "finished", "unfinished")
MISSED = "missed"  # where jobs have deadlines
SHAPING = "shaping"

job_at = row_accessor(JOB)
running_at = row_accessor(RUNNING)
