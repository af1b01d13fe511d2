"""Which prefixes of prompts were sent where, and so how much of a prompt a replica should have in its cache.

A prompt comes as a chain of links, each a prefix with its length in tokens. The index is a table from
prefixes to a stamp for each replica. A look-up follows the chain as long as some replica has the next link,
so it costs what the match is long, however much the index holds.

What a server has evicted is estimated without a list of what it holds. Every replica has a clock, which is
moved by the tokens that go into its cache; a stamp is the clock when the prefix was last used there, less its
own length, as servers evict the tail of a sequence first. A prefix whose stamp lies further back than the
server's memory is long is gone. In a true LRU cache, a prefix that is used again moves only those down that
were used since; the clock moves all of them, so it is moved by the share of the cache that it was deep: by
nothing if it was used just now, by all of its tokens if it was not cached.

Sets of WAYS prefixes bound the memory: a new one takes the place of the one in its set that was not used for
longest. A link in the middle of a chain may be gone while a later one is there, which says as much: a few are
passed over. There are no pointers in the table, so that several processes may write to it at once, without
locks: what they do to each other at worst is a wrong expectation, which ends with the next request.

How far the index is believed depends on how often it was right (`trust_of`): by what answers say about their
prompts, else by the servers' counters.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from fcntl import LOCK_EX, flock
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pointsman.compiled.jit import kernel
from pointsman.compiled.memory import Records, address_of, long_list
from pointsman.compiled.random import mix
from pointsman.routing.records import INDEX, NOBODY, SIGHTING, account_at, index_at, link_at, sighting_at
from pointsman.routing.signals import EXPECTED_HIT_TOKENS, KV_CAPACITY_TOKENS

Array = NDArray[Any]

WAYS = 8
LEAP = 1 << 40  # tokens: when a cache is lost its clock moves by more than any cache holds
DOUBTED_TOKENS = 2000.0  # that were right, beside what was seen of a server
MAX_MISSING = 2  # links in a row, before one that is there: others may have taken their place in the table
KEEP = 0.98  # what a report leaves of the weight of those before
NUM_BYTES = 64 << 20
NUM_COLUMNS = 64
MAX_AGE_S = 3600.0


@kernel
def set_of(index, key):
    return mix((key & 0x7FFFFFFF) ^ mix(key >> 31)) & (index.num_sets - 1)


@kernel
def find(index, key, now):
    """The place of the prefix in the table, or NOBODY."""
    keys = long_list(index.keys, index.num_sets * WAYS)
    first = set_of(index, key) * WAYS
    for e in range(first, first + WAYS):
        if keys[e] == key:
            return e if now - sighting_at(index.prefixes, e).used_at <= index.max_age_s else NOBODY
    return NOBODY


@kernel
def stamp_at(index, e, column):
    return long_list(index.stamps, index.num_sets * WAYS * index.num_columns)[e * index.num_columns + column]


@kernel
def write_stamp(index, e, column, stamp):
    long_list(index.stamps, index.num_sets * WAYS * index.num_columns)[e * index.num_columns + column] = stamp


@kernel
def take_place(index, key, now):
    """The place of the prefix, which is used now; if it had none, of the one in its set used longest ago."""
    keys = long_list(index.keys, index.num_sets * WAYS)
    first = set_of(index, key) * WAYS
    chosen = first
    for e in range(first, first + WAYS):
        if keys[e] == key:
            chosen = e
            break
        if sighting_at(index.prefixes, e).used_at < sighting_at(index.prefixes, chosen).used_at:
            chosen = e
    prefix = sighting_at(index.prefixes, chosen)
    if keys[chosen] != key:
        keys[chosen] = key
        prefix.answer_tokens = 0
        for column in range(index.num_columns):
            write_stamp(index, chosen, column, 0)
    prefix.used_at = now
    return chosen


@kernel
def clock_of(index, column):
    """Tokens that went into the cache, by all processes."""
    clocks = long_list(index.clocks, index.num_clocks * index.num_columns)
    total = 0
    for process in range(index.num_clocks):
        total += clocks[process * index.num_columns + column]
    return total


@kernel
def move_clock(index, column, num_tokens):
    clocks = long_list(index.clocks, index.num_clocks * index.num_columns)
    clocks[index.own_clock * index.num_columns + column] += num_tokens


@kernel
def trust_of(account):
    """Share of what the index expects that the server has found lately."""
    return (DOUBTED_TOKENS + account.found_tokens) / (DOUBTED_TOKENS + account.matched_tokens)


@kernel
def learn_trust(account, matched, found):
    account.matched_tokens = KEEP * account.matched_tokens + matched
    account.found_tokens = KEEP * account.found_tokens + min(found, matched)


@kernel
def expect_hits(router, signals, ask, now):
    """Fill the row of how much of the request's prompt each replica should have."""
    if router.prefixes == 0:
        return
    index = index_at(router.prefixes, 0)
    hits = signals[EXPECTED_HIT_TOKENS]
    for k in range(router.num_replicas):
        hits[k] = 0.0
    if ask.num_links == 0:
        return
    for k in range(router.num_replicas):
        account = account_at(router.accounts, k)
        if account.column != NOBODY:
            account.oldest = clock_of(index, account.column) - int(signals[KV_CAPACITY_TOKENS, k])
    before = 0.0
    e_before = NOBODY
    num_missing = 0
    for j in range(ask.num_links):
        link = link_at(ask.links, j)
        e = find(index, link.key, now)
        num_matching = 0
        if e != NOBODY:
            for k in range(router.num_replicas):
                account = account_at(router.accounts, k)
                if hits[k] == before and has_used(index, e, account):
                    hits[k] = link.tokens
                    num_matching += 1
        if num_matching > 0:
            if e_before != NOBODY:
                add_answer(router, index, hits, e_before, before)
            before = float(link.tokens)
            e_before = e
            num_missing = 0
        else:
            num_missing += 1
            if num_missing > MAX_MISSING:
                break
    if e_before != NOBODY and num_missing > 0:
        add_answer(router, index, hits, e_before, before)
    for k in range(router.num_replicas):
        if hits[k] > 0.0:
            # The last token of a prompt is always computed.
            hits[k] = trust_of(account_at(router.accounts, k)) * min(hits[k], ask.prompt_tokens - 1.0)


@kernel
def has_used(index, e, account):
    """Whether the replica used the prefix so lately that it should still be cached."""
    return account.column != NOBODY and stamp_at(index, e, account.column) >= account.oldest


@kernel
def add_answer(router, index, hits, e, before):
    """A prompt that goes on where one ended that was answered: the answer should be what comes next."""
    prefix = sighting_at(index.prefixes, e)
    if prefix.answer_tokens > 0:
        for k in range(router.num_replicas):
            if hits[k] == before and account_at(router.accounts, k).column == prefix.answer_column:
                hits[k] += prefix.answer_tokens


@kernel
def touch(router, k, capacity, links, num_links, new_tokens, now):
    """Replica k gets a prompt, with `new_tokens` that no link has; -> tokens of the links that it has."""
    column = account_at(router.accounts, k).column
    if column == NOBODY:
        return 0
    index = index_at(router.prefixes, 0)
    clock = clock_of(index, column)
    moved = float(new_tokens)
    before = matched = num_missing = 0
    answer = 0  # what followed the last link that it has
    for j in range(num_links):
        link = link_at(links, j)
        e = find(index, link.key, now)
        age = float(clock - stamp_at(index, e, column)) if e != NOBODY else np.inf
        if age > capacity:
            num_missing += 1
            age = capacity
        elif num_missing <= MAX_MISSING:
            num_missing = 0
            matched = link.tokens
            sighting = sighting_at(index.prefixes, e)
            answer = sighting.answer_tokens if sighting.answer_column == column else 0
        moved += (link.tokens - before) * max(0.0, age) / capacity
        before = link.tokens
    if num_missing > 0:
        matched += answer
        moved -= answer
    move_clock(index, column, max(0, int(moved)))
    clock = clock_of(index, column)
    for j in range(num_links):
        link = link_at(links, j)
        write_stamp(index, take_place(index, link.key, now), column, clock - link.tokens)
    return matched


@kernel
def touch_answered(router, k, capacity, ticket, num_output, now):
    """The request of the ticket is over: its prompt and its answer are what the server used last."""
    touch(router, k, capacity, ticket.links, ticket.num_links, num_output, now)
    column = account_at(router.accounts, k).column
    if column == NOBODY or num_output == 0:
        return
    index = index_at(router.prefixes, 0)
    if ticket.answer_key != 0:
        length = ticket.prompt_tokens + num_output
        e = take_place(index, ticket.answer_key, now)
        write_stamp(index, e, column, clock_of(index, column) - length)
    elif ticket.num_links > 0 and link_at(ticket.links, ticket.num_links - 1).tokens >= ticket.prompt_tokens:
        e = take_place(index, link_at(ticket.links, ticket.num_links - 1).key, now)
        prefix = sighting_at(index.prefixes, e)
        prefix.answer_tokens = num_output
        prefix.answer_column = column


@kernel
def forget_cache(router, k):
    """The server has lost its cache."""
    account = account_at(router.accounts, k)
    account.matched_tokens = account.found_tokens = account.started_tokens = 0.0
    if router.prefixes != 0 and account.column != NOBODY:
        index = index_at(router.prefixes, 0)
        move_clock(index, account.column, LEAP)
        long_list(index.began, index.num_columns)[account.column] = clock_of(index, account.column)


@kernel
def fill_of(router, k, capacity):
    """Share of the replica's memory that holds something."""
    account = account_at(router.accounts, k)
    if router.prefixes == 0 or account.column == NOBODY:
        return 0.0
    index = index_at(router.prefixes, 0)
    began = long_list(index.began, index.num_columns)[account.column]
    return min(1.0, (clock_of(index, account.column) - began) / capacity)


def bytes_a_prefix(num_columns: int) -> int:
    """What the table needs for each."""
    return 8 + SIGHTING.itemsize + 8 * num_columns


def num_sets_in(num_bytes: int, num_columns: int) -> int:
    """As many as fit, a power of two."""
    return 1 << max(0, (num_bytes // (WAYS * bytes_a_prefix(num_columns))).bit_length() - 1)


class PrefixIndex:
    """An index in memory of its own, or in a file that several processes map."""

    def __init__(
        self,
        num_sets: int,
        num_columns: int,
        max_age_s: float = MAX_AGE_S,
        path: Path | None = None,
        num_processes: int = 1,
        process: int = 0,
    ) -> None:
        """`path`: the file, which is made by whoever comes first; `process`: which of them this is."""
        shapes: dict[str, tuple[tuple[int, ...], Any]] = {
            "clocks": ((num_processes, num_columns), np.int64),
            "began": ((num_columns,), np.int64),
            "names": ((num_columns,), np.int64),  # digests of the replicas'; 0 = free
            "keys": ((num_sets, WAYS), np.int64),
            "prefixes": ((num_sets, WAYS), SIGHTING),
            "stamps": ((num_sets, WAYS, num_columns), np.int64),
        }
        sizes = {
            name: int(np.prod(shape)) * np.dtype(dtype).itemsize for name, (shape, dtype) in shapes.items()
        }
        self.num_bytes = sum(sizes.values())
        self._path = path
        if path is None:
            memory: Array = np.zeros(self.num_bytes, np.uint8)
        else:
            with path.open("a+b") as file:
                file.truncate(self.num_bytes)
                memory = np.frombuffer(mmap.mmap(file.fileno(), self.num_bytes), np.uint8)
        self._tables: dict[str, Array] = {}
        start = 0
        for name, (shape, dtype) in shapes.items():
            self._tables[name] = memory[start : start + sizes[name]].view(dtype).reshape(shape)
            start += sizes[name]
        self.records = Records(1, INDEX)
        record = self.records[0]
        record.num_sets, record.num_columns, record.max_age_s = num_sets, num_columns, max_age_s
        record.num_clocks, record.own_clock = num_processes, process
        for name in ("keys", "prefixes", "stamps", "clocks", "began"):
            setattr(record, name, self.records.hold(self._tables[name]))
        self._process = process

    @property
    def address(self) -> int:
        return address_of(self.records)

    def claim(self, name: str) -> int:
        """The column of the replica of this name; NOBODY if there is none left."""
        digest = _digest(name)
        names, clocks = self._tables["names"], self._tables["clocks"]
        with self._locked():
            for column in np.flatnonzero(names == digest):
                return int(column)
            for column in np.flatnonzero(names == 0):
                names[column] = digest
                clocks[self._process, column] += LEAP  # whatever was there before
                self._tables["began"][column] = clocks[:, column].sum()
                return int(column)
        return NOBODY

    def give_up(self, name: str) -> None:
        """The replica is gone; its column is for another one."""
        with self._locked():
            names = self._tables["names"]
            names[names == _digest(name)] = 0

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Columns are claimed by one process at a time."""
        if self._path is None:
            yield
            return
        with self._path.open("rb") as file:  # closing it ends the lock
            flock(file, LOCK_EX)
            yield


def _digest(name: str) -> int:
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True) or 1
