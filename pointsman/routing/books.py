"""The books of a live router: the signal table that policies read, filled by what the router sends and sees.

Every call says when it happened, by one clock that only moves forward (seconds; `time.monotonic` will do). A
replica has a slot from `add` to `remove`; a request has a ticket from `sent` to `finished` or `failed`, and
another one if it is sent again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pointsman.compiled.jit import direct
from pointsman.compiled.memory import address_of, sized_bytes_at
from pointsman.errors import InputError
from pointsman.routing import ordering, streams
from pointsman.routing.calibration import (
    FIGURES,
    SPEEDS,
    Estimate,
    Estimator,
    Figures,
    pooled,
    typical_step_s,
)
from pointsman.routing.prefixes import NUM_BYTES, NUM_COLUMNS, PrefixIndex, num_sets_in
from pointsman.routing.records import (
    ACCOUNT,
    INITIAL_OUTPUT_ESTIMATE,
    NOBODY,
    NUM_LENGTH_CLASSES,
    ROUTER,
    TICKET,
)
from pointsman.routing.sharing import MAX_REPLICAS, SharedBooks
from pointsman.routing.signals import (
    ACCEPTING,
    CONTEXT_TOKENS,
    DECODE_S_PER_TOKEN,
    DECODING,
    KV_CAPACITY_TOKENS,
    MAX_PROMPT_TOKENS,
    NUM_SIGNALS,
    PREFILL_S_PER_TOKEN,
    SCRAPED_AT,
    SCRAPED_KV_USE,
    SCRAPED_RUNNING,
    SCRAPED_WAITING,
    SIGNALS,
    STEP_FLOOR_S,
    WEIGHT,
)

Array = NDArray[Any]

MAX_PROMPT = 2**31 - 1
FIRST_CAPACITY = 1024  # tickets; doubles when it is full
RECALIBRATE_S = 2.0  # it takes a millisecond or two
LEARN_PROMPT = 0.02  # weight of a finished request in the correction of prompt lengths
FREE, OPEN, ORPHAN = range(3)  # state of a ticket; an orphan's replica was removed


class Books:
    def __init__(
        self,
        now: float | None = None,
        shared: SharedBooks | None = None,
        index: int = 0,
        prefix_bytes: int = NUM_BYTES,
        keeps_journal: bool = False,
    ) -> None:
        """`shared`: with other processes; ours is the book at `index`.

        `prefix_bytes`: of the index of prefixes, the same in all processes; 0: none is kept.
        `keeps_journal`: what goes into the index is noted, for other routers.
        """
        self.shared, self.index = shared, index
        self.prefixes: PrefixIndex | None = None
        if prefix_bytes > 0:
            self.prefixes = _prefix_index(prefix_bytes, shared, index, keeps_journal)
        # Called by way of a local name: an attribute that is called takes longer to find than a method.
        self._record_sent = direct(streams.record_sent, "iiiiibf")
        self._record_first_token = direct(streams.record_first_token, "iif")
        self._record_tokens = direct(streams.record_tokens, "iiif")
        self._record_finished = direct(streams.record_finished, "iiiif")
        self._record_failed = direct(streams.record_failed, "ii")
        self._record_accepting = direct(streams.record_accepting, "iii")
        self._record_scraped = direct(streams.record_scraped, "iiffff")
        self._record_counters = direct(streams.record_counters, "iiff")
        self._count_elsewhere = direct(streams.count_elsewhere, "iii")
        self._expected_size = direct(ordering.expected_size, "iii")
        self._now = time.monotonic() if now is None else now
        self.version = 0  # changes when addresses do
        self.prompt_scale = 1.0  # true over estimated length of prompts, by the servers' own counts
        self._num_finished = 0
        self._recalibrated_at = -math.inf
        self._names: list[str] = []  # by row, as the next three
        self._slots: list[int] = []
        self._estimators: list[Estimator] = []
        self._found: list[Estimate] = []  # by them, at the last calibration
        self._speeds: list[tuple[float, float, float]] = []  # in the table since then
        self._rows: list[int] = []  # by slot; NOBODY = free
        self._routers = np.zeros(1, ROUTER).view(np.recarray)
        self._router = self._routers[0]
        self.address = address_of(self._routers)
        self._estimates = np.full(NUM_LENGTH_CLASSES, float(INITIAL_OUTPUT_ESTIMATE))
        self._router.output_estimate = address_of(self._estimates)
        if shared is not None:
            self._router.books, self._router.num_books = shared.address, len(shared)
            self._router.own_book = index
        self._router.prefixes = 0 if self.prefixes is None else self.prefixes.address
        self._tickets = np.zeros(0, TICKET).view(np.recarray)
        self._states: list[int] = []
        # Slot, tokens to compute and time of those that were sent to a replica where nobody waited.
        self._firsts: list[tuple[int, int, float] | None] = []
        self._links: list[bytes] = []  # of its prompt, which compiled code reads by address
        self._free: list[int] = []
        self._grow()
        self.signals = np.zeros((NUM_SIGNALS, 0))
        self._accounts = np.zeros(0, ACCOUNT).view(np.recarray)
        self._place_tables([])

    # Replicas.

    @property
    def slots(self) -> tuple[int, ...]:
        """The slots of the replicas there are, in the order of the table's columns."""
        return tuple(self._slots)

    @property
    def num_accepting(self) -> int:
        return int(self._router.num_accepting)

    @property
    def usual_size(self) -> float:
        return float(self._router.usual_size)

    def name(self, slot: int) -> str:
        return self._names[self._rows[slot]]

    def row(self, slot: int) -> int:
        """The column of the signal table."""
        return self._rows[slot]

    def add(self, name: str, told: Mapping[str, float] | None = None) -> int:
        """A new replica, which accepts requests; `told`: what is said of it, which traffic corrects."""
        if self.shared is not None and len(self._slots) == MAX_REPLICAS:
            problem = (
                f"one server more than the {MAX_REPLICAS} that can be shared between processes or routers"
            )
            raise InputError("replica", name, problem, "use one process, without --share")
        estimator = Estimator(_checked(told or {}))
        slot = self._rows.index(NOBODY) if NOBODY in self._rows else len(self._rows)
        if slot == len(self._rows):
            self._rows.append(NOBODY)
        row = len(self._slots)
        self._rows[slot] = row
        self._slots.append(slot)
        self._names.append(name)
        self._estimators.append(estimator)
        self._place_tables([*range(row), NOBODY])
        account = self._accounts[row]
        account.waiting_head = account.waiting_tail = NOBODY
        account.last_step_at = account.rate_since = account.scraped_at = account.tokens_at = self._now
        account.column = NOBODY if self.prefixes is None else self.prefixes.claim(name)
        account.windows = address_of(estimator.windows)
        self.signals[SCRAPED_AT, row] = self._now
        self.signals[ACCEPTING, row] = 1.0
        self._recount()
        self._calibrate()
        return slot

    def remove(self, slot: int) -> None:
        """The replica is gone; what is still open there may be finished, and counts for nothing."""
        row = self._rows[slot]
        if self.prefixes is not None:
            self.prefixes.give_up(self._names[row])
        self._rows[slot] = NOBODY
        for of_rows in (self._slots, self._names, self._estimators):
            del of_rows[row]
        for later in range(row, len(self._slots)):
            self._rows[self._slots[later]] = later
        on_row = self._replica_of == row
        for ticket in np.flatnonzero(on_row):
            if self._states[ticket] == OPEN:
                self._states[ticket] = ORPHAN
        self._replica_of[self._replica_of > row] -= 1
        self._replica_of[on_row] = NOBODY
        self._place_tables([kept for kept in range(len(self._accounts)) if kept != row])
        self._recount()
        self._calibrate()

    def set_accepting(self, slot: int, accepting: bool) -> None:
        self._record_accepting(self.address, self._rows[slot], int(accepting))

    # Requests.

    def prompt_length(self, prompt_tokens: int) -> int:
        """An estimated length, corrected by what the servers counted of others."""
        length = int(prompt_tokens * self.prompt_scale + 0.5)
        return length if 0 < length < MAX_PROMPT else max(1, min(MAX_PROMPT, length))

    def size_of(self, prompt_tokens: int, max_tokens: int) -> int:
        """How large a request is taken to be where small ones go first (ordering.py)."""
        return int(self._expected_size(self.address, prompt_tokens, max_tokens))

    def sent(
        self, slot: int, prompt_tokens: int, now: float, streams: bool = True, links: bytes = b""
    ) -> int:
        """-> the request's ticket. `streams`: whether its tokens will be seen one by one.

        `prompt_tokens` as `prompt_length` gave them; `links` as PromptHasher does.
        """
        if not self._free:
            self._grow()
        ticket = self._free.pop()
        self._now = now
        self._states[ticket] = OPEN
        self._links[ticket] = links
        record_sent = self._record_sent
        to_compute = record_sent(
            self.address,
            self._rows[slot],
            ticket,
            prompt_tokens,
            sized_bytes_at(links),
            streams,
            now,
        )
        self._firsts[ticket] = (slot, to_compute, now) if to_compute >= 0 else None
        return ticket

    def first_token(self, ticket: int, now: float) -> None:
        if self._states[ticket] != OPEN:
            return
        self._now = now
        record_first_token = self._record_first_token
        record_first_token(self.address, ticket, now)
        if (first := self._firsts[ticket]) is not None:
            slot, to_compute, sent_at = first
            row = self._rows[slot]
            num_decoding = float(self.signals[DECODING, row])
            if self.shared is not None:
                num_decoding += self._count_elsewhere(self.address, DECODING, row)
            self._estimators[row].saw_first_token(to_compute, now - sent_at, num_decoding)

    def tokens(self, ticket: int, count: int, now: float) -> None:
        """More tokens of a request that has its first."""
        if self._states[ticket] != OPEN or count < 1:
            return
        self._now = now
        record_tokens = self._record_tokens
        record_tokens(self.address, ticket, count, now)

    def finished(
        self,
        ticket: int,
        now: float,
        prompt_tokens: int | None = None,
        output_tokens: int | None = None,
        cached_tokens: int | None = None,
    ) -> None:
        """Tokens as the server counted them, where it did; `cached_tokens`: of the prompt."""
        state = self._states[ticket]
        if state != OPEN:
            self._close(ticket)
            return
        self._states[ticket] = FREE
        self._free.append(ticket)
        self._now = now
        num_output = NOBODY if output_tokens is None else output_tokens
        num_cached = NOBODY if cached_tokens is None else cached_tokens
        record_finished = self._record_finished
        booked = record_finished(self.address, ticket, num_output, num_cached, now)
        if prompt_tokens:
            # What was booked had the correction in it already.
            scale = self.prompt_scale
            ratio = prompt_tokens / booked * scale
            ratio = 8.0 if ratio > 8.0 else ratio if ratio > 0.125 else 0.125
            self.prompt_scale = scale + LEARN_PROMPT * (ratio - scale)
        self._num_finished += 1
        if now - self._recalibrated_at >= RECALIBRATE_S:
            self._recalibrate(now)

    def _recalibrate(self, now: float) -> None:
        self._recalibrated_at = now
        for estimator, account in zip(self._estimators, self._accounts, strict=True):
            estimator.take_news(int(account.num_windows), self._num_finished)
        self._calibrate()

    def failed(self, ticket: int, now: float) -> None:
        """Refused, broken off, or given up by its client."""
        state = self._states[ticket]
        self._close(ticket)
        if state == OPEN:
            self._now = now
            self._record_failed(self.address, ticket)

    def scraped(
        self, slot: int, running: float | None, waiting: float | None, kv_use: float | None, now: float
    ) -> None:
        """A server's gauges, `now` = when it read them. What is missing or no number is left as it was."""
        row = self._rows[slot]
        rows = SCRAPED_RUNNING, SCRAPED_WAITING, SCRAPED_KV_USE
        gauges = [
            float(self.signals[signal, row]) if value is None or not math.isfinite(value) else max(0.0, value)
            for signal, value in zip(rows, (running, waiting, kv_use), strict=True)
        ]
        self._record_scraped(self.address, row, *gauges, now)
        if kv_use is not None and math.isfinite(kv_use):
            # Prompts that wait on the server hold no memory yet.
            booked = float(self.signals[CONTEXT_TOKENS, row]) + int(self._accounts[row].num_tokens)
            booked += self._count_elsewhere(self.address, CONTEXT_TOKENS, row)
            self._estimators[row].saw_gauges(booked, kv_use)

    def estimate(self, slot: int) -> Estimate:
        """What was found out about the replica by itself; the table may have more, by others like it."""
        return self._found[self._rows[slot]]

    def speeds(self, slot: int) -> tuple[float, float, float]:
        """SPEEDS of the replica, as policies take them to be."""
        return self._speeds[self._rows[slot]]

    def has_capacity(self, slot: int, kv_capacity_tokens: float) -> None:
        """The server says how large its KV memory is. What was told of it goes first."""
        if self._estimators[self._rows[slot]].has_capacity(kv_capacity_tokens):
            self._calibrate()

    def counted(self, slot: int, queries: float, hits: float) -> bool:
        """A server's counters: prompt tokens looked up in its cache, and found; -> was it started anew?"""
        if not (math.isfinite(queries) and math.isfinite(hits)):
            return False
        row = self._rows[slot]
        is_new = bool(self._record_counters(self.address, row, queries, hits))
        if is_new:
            self._estimators[row].was_restarted()
        return is_new

    def was_away(self, slot: int) -> None:
        """The server did not answer: without counters that would tell, it may have been started anew."""
        row = self._rows[slot]
        if self._accounts[row].counted_queries == 0.0:
            streams.record_lost_cache(self.address, row)
            self._estimators[row].was_restarted()

    def replica_signals(self, slot: int) -> dict[str, float]:
        """What is known of a replica, by name; derived signals as of the last decision that needed them."""
        row = self._rows[slot]
        known = {
            signal.name: float(self.signals[index, row])
            for index, signal in enumerate(SIGNALS)
            if signal.source != "oracle"
        }
        account = self._accounts[row]
        known["scraped_at"] = float(account.scraped_at)  # in the table the books stand in for old gauges
        known["tokens_at"] = float(account.tokens_at)  # the last that came
        for name in ("context_tokens", "generated_tokens"):
            known[name] += int(account.num_tokens)  # of the last instant, which are booked with the next
        return known

    # Tables.

    def _close(self, ticket: int) -> None:
        if self._states[ticket] != FREE:
            self._states[ticket] = FREE
            self._free.append(ticket)

    def _grow(self) -> None:
        before = len(self._tickets)
        after = max(FIRST_CAPACITY, 2 * before)
        table = np.zeros(after, TICKET).view(np.recarray)
        table[:before] = self._tickets
        table["replica"][before:] = NOBODY
        self._tickets = table
        # A column by itself: a field of a record takes microseconds to read.
        self._replica_of = np.asarray(table["replica"])
        self._router.tickets = address_of(table)
        self._states += [FREE] * (after - before)
        self._firsts += [None] * (after - before)
        self._links += [b""] * (after - before)
        self._free += range(after - 1, before - 1, -1)

    def _place_tables(self, rows: list[int]) -> None:
        """New tables of the replicas, made of these rows of the old; NOBODY is an empty one."""
        count = len(rows)
        signals = np.zeros((NUM_SIGNALS, count))
        accounts = np.zeros(count, ACCOUNT).view(np.recarray)
        for to, old in enumerate(rows):
            if old != NOBODY:
                signals[:, to] = self.signals[:, old]
                accounts[to] = self._accounts[old]
        if self.shared is not None:
            signals = self.shared.place(self.index, self._names, signals)
        self.signals, self._accounts = signals, accounts
        self._router.num_replicas = count
        self._router.signals = address_of(signals)
        self._router.accounts = address_of(accounts)
        self.version += 1

    def _recount(self) -> None:
        self._router.num_accepting = int(self.signals[ACCEPTING].sum())

    def _calibrate(self) -> None:
        """Write what is known of the replicas' speed and memory into the table."""
        if not self._slots:
            return
        self._found = [one.estimate() for one in self._estimators]
        figures = pooled(self._found)
        for row, one in enumerate(figures):
            self.signals[PREFILL_S_PER_TOKEN, row] = one["prefill_s_per_token"]
            self.signals[DECODE_S_PER_TOKEN, row] = one["decode_s_per_token"]
            self.signals[STEP_FLOOR_S, row] = one["step_floor_s"]
            self.signals[KV_CAPACITY_TOKENS, row] = one["kv_capacity_tokens"]
            self.signals[MAX_PROMPT_TOKENS, row] = one["kv_capacity_tokens"]
        self._speeds = [(one[SPEEDS[0]], one[SPEEDS[1]], one[SPEEDS[2]]) for one in figures]
        speeds = np.array([1.0 / typical_step_s(one) for one in figures])
        self.signals[WEIGHT] = speeds / speeds.mean()
        self._router.fits_anywhere = self.signals[MAX_PROMPT_TOKENS].min()


def _prefix_index(
    num_bytes: int, shared: SharedBooks | None, process: int, keeps_journal: bool
) -> PrefixIndex:
    num_sets = num_sets_in(num_bytes, NUM_COLUMNS)
    if shared is None or shared.prefixes is None:
        return PrefixIndex(num_sets, NUM_COLUMNS, keeps_journal=keeps_journal)
    return PrefixIndex(
        num_sets,
        NUM_COLUMNS,
        path=shared.prefixes,
        num_processes=len(shared),
        process=process,
        keeps_journal=keeps_journal,
    )


def _checked(told: Mapping[str, float]) -> Figures:
    """Figures that are said of a replica, refused where they make no sense."""
    for name, value in told.items():
        if name not in FIGURES:
            raise InputError("calibration", name, "unknown figure", f"known: {', '.join(FIGURES)}")
        if not 0.0 < value < math.inf:
            raise InputError(f"calibration.{name}", value, "is not a positive number", "leave it out")
    return dict(told)
