"""The live router's books: the signal table of the simulator, filled by what the router sends and sees.

Every call says when it happened, by one clock that only moves forward (seconds; `time.monotonic` will do). A
replica has a slot from `add` to `remove`; a request has a handle from `sent` to `finished` or `failed`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pointsman.compiled.jit import direct
from pointsman.compiled.memory import address_of
from pointsman.errors import InputError
from pointsman.routing import booking
from pointsman.routing.calibration import Estimator, Figures, known_figures, pooled, typical_step_s
from pointsman.routing.sharing import MAX_REPLICAS, Books
from pointsman.routing.signals import (
    ACCEPTING,
    DECODE_S_PER_TOKEN,
    KV_CAPACITY_TOKENS,
    MAX_PROMPT_TOKENS,
    NUM_SIGNALS,
    OUTSTANDING,
    PREFILL_S_PER_TOKEN,
    SCRAPED_AT,
    SCRAPED_KV_USE,
    SCRAPED_RUNNING,
    SCRAPED_WAITING,
    SIGNALS,
    STEP_FLOOR_S,
    STEP_S,
    WEIGHT,
)
from pointsman.simulator.cluster import INITIAL_OUTPUT_ESTIMATE, NO_LIMIT_S
from pointsman.simulator.state import (
    NEVER,
    NOBODY,
    NUM_LENGTH_CLASSES,
    QUERY,
    REPLICA,
    REQUEST,
    SIM,
)

Array = NDArray[Any]

MAX_PROMPT = 2**31 - 1
FIRST_CAPACITY = 1024  # requests; doubles when it is full
RECALIBRATE_FIRST, RECALIBRATE_EVERY = 32, 256  # finished requests
RECALIBRATE_PAUSE_S = 0.5  # at least: it takes a millisecond or two
LEARN_PROMPT = 0.02  # weight of a finished request in the correction of prompt lengths
FREE, OPEN, ORPHAN = range(3)  # state of a handle; an orphan's replica was removed


class Ledger:
    def __init__(self, now: float | None = None, books: Books | None = None, index: int = 0) -> None:
        """`books`: shared with other processes; ours is the one at `index`."""
        self.books, self.index = books, index
        # Called by way of a local name: an attribute that is called takes longer to find than a method.
        self._record_sent = direct(booking.record_sent, "iiiiiibf")
        self._record_first_token = direct(booking.record_first_token, "iiif")
        self._record_tokens = direct(booking.record_tokens, "iiiif")
        self._record_finished = direct(booking.record_finished, "iiiif")
        self._record_failed = direct(booking.record_failed, "iiif")
        self._record_accepting = direct(booking.record_accepting, "iiif")
        self._now = time.monotonic() if now is None else now
        self.version = 0  # changes when addresses do
        self.prompt_scale = 1.0  # true over estimated length of prompts, by the servers' own counts
        self._num_finished = 0
        self._recalibrate_at = RECALIBRATE_FIRST
        self._recalibrated_at = -math.inf
        self._names: list[str] = []  # by row, as the next three
        self._slots: list[int] = []
        self._known: list[Figures] = []
        self._estimators: list[Estimator | None] = []
        self._rows: list[int] = []  # by slot; NOBODY = free
        self.sims = np.zeros(1, SIM).view(np.recarray)
        self._sim = self.sims[0]
        self._sim.slo_ttft_s = self._sim.slo_tpot_s = NO_LIMIT_S
        self._sim.held_request = NOBODY
        self._query = np.zeros(1, QUERY)
        self._sim.query = address_of(self._query)
        self._estimates = np.full(NUM_LENGTH_CLASSES, float(INITIAL_OUTPUT_ESTIMATE))
        self._sim.output_estimate = address_of(self._estimates)
        self._requests = np.zeros(0, REQUEST).view(np.recarray)
        self._states: list[int] = []
        # Slot, prompt and time of those that were sent to a replica where nobody waited.
        self._firsts: list[tuple[int, int, float] | None] = []
        self._free: list[int] = []
        self._grow()
        self._states[booking.TO_PLACE] = OPEN
        self._free.remove(booking.TO_PLACE)
        self.signals = np.zeros((NUM_SIGNALS, 0))
        self._replicas = np.zeros(0, REPLICA).view(np.recarray)
        self._streams = np.zeros(0, booking.STREAMS).view(np.recarray)
        self._place_tables([])

    # Replicas.

    @property
    def slots(self) -> tuple[int, ...]:
        """Of the replicas there are, in the order of the table's columns."""
        return tuple(self._slots)

    def name(self, slot: int) -> str:
        return self._names[self._rows[slot]]

    def row(self, slot: int) -> int:
        """The column of the signal table."""
        return self._rows[slot]

    def add(self, name: str, calibration: Mapping[str, Any] | None = None) -> int:
        """A new replica, which accepts requests; `calibration` as in calibration.py."""
        if self.books is not None and len(self._slots) == MAX_REPLICAS:
            problem = f"books of more than {MAX_REPLICAS} servers cannot be shared"
            raise InputError("--workers", len(self.books), problem, "use one process")
        known = known_figures(calibration)
        slot = self._rows.index(NOBODY) if NOBODY in self._rows else len(self._rows)
        if slot == len(self._rows):
            self._rows.append(NOBODY)
        row = len(self._slots)
        self._rows[slot] = row
        self._slots.append(slot)
        self._names.append(name)
        self._known.append(known)
        estimator = None if len(known) == 4 else Estimator()
        self._estimators.append(estimator)
        self._place_tables([*range(row), NOBODY])
        replica, streams = self._replicas[row], self._streams[row]
        replica.waiting_head = replica.waiting_tail = NOBODY
        replica.last_step_at = replica.rate_since = self._now
        replica.is_accepting = 1
        streams.scraped_at = streams.tokens_at = self._now
        streams.steps = 0 if estimator is None else address_of(estimator.latest_steps)
        self.signals[SCRAPED_AT, row] = self._now
        self.signals[ACCEPTING, row] = 1.0
        self._recount()
        self._calibrate()
        return slot

    def remove(self, slot: int) -> None:
        """The replica is gone; what is still open there may be finished, and counts for nothing."""
        row = self._rows[slot]
        self._rows[slot] = NOBODY
        for of_rows in (self._slots, self._names, self._known, self._estimators):
            del of_rows[row]
        for later in range(row, len(self._slots)):
            self._rows[self._slots[later]] = later
        on_row = self._replica_of == row
        for handle in np.flatnonzero(on_row):
            if self._states[handle] == OPEN and handle != booking.TO_PLACE:
                self._states[handle] = ORPHAN
        self._replica_of[self._replica_of > row] -= 1
        self._replica_of[on_row] = NOBODY
        self._place_tables([kept for kept in range(len(self._replicas)) if kept != row])
        self._recount()
        self._calibrate()

    def set_accepting(self, slot: int, accepting: bool) -> None:
        self._record_accepting(self._sims_at, self._rows[slot], int(accepting), self._now)

    # Requests.

    def prompt_length(self, prompt_tokens: int) -> int:
        """An estimated length, corrected by what the servers counted of others."""
        length = int(prompt_tokens * self.prompt_scale + 0.5)
        return 1 if length < 1 else length if length < MAX_PROMPT else MAX_PROMPT

    def sent(
        self, slot: int, prompt_tokens: int, now: float, streams: bool = True, session: int = NOBODY
    ) -> int:
        """-> the request's handle. `streams`: whether its tokens will be seen one by one.

        `prompt_tokens` as `prompt_length` gave them.
        """
        if not self._free:
            self._grow()
        handle = self._free.pop()
        row = self._rows[slot]
        self._now = now
        self._states[handle] = OPEN
        record_sent = self._record_sent
        found_nobody = record_sent(
            self._sims_at, self._streams_at, row, handle, prompt_tokens, session, streams, now
        )
        self._firsts[handle] = (slot, prompt_tokens, now) if found_nobody else None
        return handle

    def first_token(self, handle: int, now: float) -> None:
        if self._states[handle] != OPEN:
            return
        self._now = now
        self._record_first_token(self._sims_at, self._streams_at, handle, now)
        if (first := self._firsts[handle]) is not None:
            slot, prompt_tokens, sent_at = first
            row = self._rows[slot]
            estimator = self._estimators[row]
            if estimator is not None:
                estimator.saw_first_token(prompt_tokens, now - sent_at, float(self.signals[STEP_S, row]))

    def tokens(self, handle: int, count: int, now: float) -> None:
        """More tokens of a request that has its first."""
        if self._states[handle] != OPEN or count < 1:
            return
        self._now = now
        record_tokens = self._record_tokens
        record_tokens(self._sims_at, self._streams_at, handle, count, now)

    def finished(
        self, handle: int, now: float, prompt_tokens: int | None = None, output_tokens: int | None = None
    ) -> None:
        """`prompt_tokens` and `output_tokens` as the server counted them, where it did."""
        state = self._states[handle]
        if state != OPEN:
            self._close(handle)
            return
        self._states[handle] = FREE
        self._free.append(handle)
        self._now = now
        num_output = NOBODY if output_tokens is None else output_tokens
        record_finished = self._record_finished
        booked = record_finished(self._sims_at, self._streams_at, handle, num_output, now)
        if prompt_tokens:
            # What was booked had the correction in it already.
            scale = self.prompt_scale
            ratio = prompt_tokens / booked * scale
            ratio = 8.0 if ratio > 8.0 else ratio if ratio > 0.125 else 0.125
            self.prompt_scale = scale + LEARN_PROMPT * (ratio - scale)
        self._num_finished += 1
        if (
            self._num_finished >= self._recalibrate_at
            and self._is_estimating
            and now - self._recalibrated_at >= RECALIBRATE_PAUSE_S
        ):
            self._recalibrated_at = now
            self._recalibrate_at = self._num_finished + min(self._num_finished, RECALIBRATE_EVERY)
            for estimator, stream in zip(self._estimators, self._streams, strict=True):
                if estimator is not None:
                    estimator.read_steps(int(stream.num_steps))
                    estimator.forget_if_old()
            self._calibrate()

    def failed(self, handle: int, now: float) -> None:
        """Refused, broken off, or given up by its client."""
        state = self._states[handle]
        self._close(handle)
        if state == OPEN:
            self._now = now
            self._record_failed(self._sims_at, self._streams_at, handle, now)

    def scraped(
        self, slot: int, running: float | None, waiting: float | None, kv_use: float | None, now: float
    ) -> None:
        """A server's gauges, `now` = when it read them. What is missing or no number is left as it was."""
        row = self._rows[slot]
        for signal, value in (
            (SCRAPED_RUNNING, running),
            (SCRAPED_WAITING, waiting),
            (SCRAPED_KV_USE, kv_use),
        ):
            if value is not None and math.isfinite(value):
                self.signals[signal, row] = max(0.0, value)
        self.signals[SCRAPED_AT, row] = now
        self._streams[row].scraped_at = now
        estimator = self._estimators[row]
        if estimator is not None and kv_use is not None and math.isfinite(kv_use):
            # Prompts that wait on the server hold no memory yet.
            estimator.saw_gauges(self.replica_signals(slot)["context_tokens"], kv_use)

    def replica_signals(self, slot: int) -> dict[str, float]:
        """What is known of a replica, by name; derived signals as of the last decision that needed them."""
        row = self._rows[slot]
        known = {
            signal.name: float(self.signals[index, row])
            for index, signal in enumerate(SIGNALS)
            if signal.source != "oracle"
        }
        stream = self._streams[row]
        known["scraped_at"] = float(stream.scraped_at)  # in the table the books stand in for old gauges
        for name in ("context_tokens", "generated_tokens"):
            known[name] += int(stream.num_tokens)  # of the last instant, which are booked with the next
        return known

    # Tables.

    @property
    def addresses(self) -> tuple[int, int]:
        """Of the SIM record and of the replicas' streams; good until `version` changes."""
        return self._sims_at, self._streams_at

    def _close(self, handle: int) -> None:
        if self._states[handle] != FREE:
            self._states[handle] = FREE
            self._free.append(handle)

    def _grow(self) -> None:
        before = len(self._requests)
        after = max(FIRST_CAPACITY, 2 * before)
        table = np.zeros(after, REQUEST).view(np.recarray)
        table[:before] = self._requests
        table["replica"][before:] = NOBODY
        table["first_token_at"][before:] = NEVER
        self._requests = table
        # A column by itself: a field of a record takes microseconds to read.
        self._replica_of = np.asarray(table["replica"])
        self._sim.requests = address_of(table)
        self._states += [FREE] * (after - before)
        self._firsts += [None] * (after - before)
        self._free += range(after - 1, before - 1, -1)

    def _place_tables(self, rows: list[int]) -> None:
        """New tables of the replicas, made of these rows of the old; NOBODY is an empty one."""
        count = len(rows)
        signals = np.zeros((NUM_SIGNALS, count))
        replicas = np.zeros(count, REPLICA).view(np.recarray)
        streams = np.zeros(count, booking.STREAMS).view(np.recarray)
        for to, old in enumerate(rows):
            if old != NOBODY:
                signals[:, to] = self.signals[:, old]
                replicas[to] = self._replicas[old]
                streams[to] = self._streams[old]
        if self.books is not None:
            signals = self.books.place(self.index, self._names, signals)
        self.signals, self._replicas, self._streams = signals, replicas, streams
        self._sim.num_replicas = count
        self._sim.signals = address_of(signals)
        self._sim.replicas = address_of(replicas)
        self._sims_at = address_of(self.sims)
        self._streams_at = address_of(streams)
        self._is_estimating = any(one is not None for one in self._estimators)
        self.version += 1

    def _recount(self) -> None:
        outstanding = self.signals[OUTSTANDING].astype(np.int64)
        self._sim.num_accepting = int(self.signals[ACCEPTING].sum())
        self._sim.sum_outstanding = outstanding.sum()
        self._sim.sum_squared_outstanding = (outstanding**2).sum()

    def _calibrate(self) -> None:
        """Write what is known of the replicas' speed and memory into the table."""
        if not self._slots:
            return
        estimates = [one.figures() if one is not None else {} for one in self._estimators]
        figures = [found | known for found, known in zip(pooled(estimates), self._known, strict=True)]
        for row, one in enumerate(figures):
            self.signals[PREFILL_S_PER_TOKEN, row] = one["prefill_s_per_token"]
            self.signals[DECODE_S_PER_TOKEN, row] = one["decode_s_per_token"]
            self.signals[STEP_FLOOR_S, row] = one["step_floor_s"]
            self.signals[KV_CAPACITY_TOKENS, row] = one["kv_capacity_tokens"]
            self.signals[MAX_PROMPT_TOKENS, row] = one["kv_capacity_tokens"]
        speeds = np.array([1.0 / typical_step_s(one) for one in figures])
        self.signals[WEIGHT] = speeds / speeds.mean()
        self._sim.fits_anywhere = self.signals[MAX_PROMPT_TOKENS].min()
