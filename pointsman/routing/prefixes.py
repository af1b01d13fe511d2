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

Routers that share what they know keep a journal of what goes into their index, which others repeat on theirs.
It is a ring: who does not read for long misses what was overwritten.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from fcntl import LOCK_EX, flock
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pointsman.compiled import jit
from pointsman.compiled.jit import kernel
from pointsman.compiled.memory import Records, address_of, float_list, long_list
from pointsman.compiled.random import mix
from pointsman.routing.hashing import MAX_LINKS
from pointsman.routing.records import (
    INDEX,
    LINK,
    NOBODY,
    SIGHTING,
    account_at,
    index_at,
    link_at,
    sighting_at,
)
from pointsman.routing.signals import EXPECTED_HIT_TOKENS, KV_CAPACITY_TOKENS

Array = NDArray[Any]
entry_point = partial(jit.entry_point, keeps_gil=True)

WAYS = 8
LEAP = 1 << 40  # tokens: when a cache is lost its clock moves by more than any cache holds
DOUBTED_TOKENS = 2000.0  # that were right, beside what was seen of a server
MAX_MISSING = 2  # links in a row, before one that is there: others may have taken their place in the table
KEEP = 0.98  # what a report leaves of the weight of those before
NUM_BYTES = 64 << 20
NUM_COLUMNS = 64
MAX_AGE_S = 3600.0

# What a journal tells of: a prompt that was sent, one that was answered, the same that ends with its last
# link, and a cache that was lost.
SENT, ANSWERED, ANSWERED_WHOLE, LOST = range(4)
JOURNAL_WORDS = 1 << 17  # a ring of 1 MiB
_HEAD_WORDS, _LINK_WORDS = 6, LINK.itemsize // 8


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
    write_journal(index, SENT, column, capacity, links, num_links, new_tokens, now)
    return use(index, column, capacity, links, num_links, new_tokens, now)


@kernel
def use(index, column, capacity, links, num_links, new_tokens, now):
    """As `touch`, of the replica of this column."""
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
    column = account_at(router.accounts, k).column
    if column == NOBODY:
        return
    index = index_at(router.prefixes, 0)
    links, num_links = ticket.links, ticket.num_links
    is_whole = num_links > 0 and link_at(links, num_links - 1).tokens >= ticket.prompt_tokens
    kind = ANSWERED_WHOLE if is_whole else ANSWERED
    write_journal(index, kind, column, capacity, links, num_links, num_output, now)
    use(index, column, capacity, links, num_links, num_output, now)
    if num_output > 0 and ticket.answer_key != 0:
        length = ticket.prompt_tokens + num_output
        e = take_place(index, ticket.answer_key, now)
        write_stamp(index, e, column, clock_of(index, column) - length)
    elif num_output > 0 and is_whole:
        keep_answer(index, column, link_at(links, num_links - 1).key, num_output, now)


@kernel
def keep_answer(index, column, key, num_output, now):
    """What the replica answered to the prompt that is this prefix."""
    prefix = sighting_at(index.prefixes, take_place(index, key, now))
    prefix.answer_tokens = num_output
    prefix.answer_column = column


@kernel
def forget_cache(router, k):
    """The server has lost its cache."""
    account = account_at(router.accounts, k)
    account.matched_tokens = account.found_tokens = account.started_tokens = 0.0
    if router.prefixes != 0 and account.column != NOBODY:
        index = index_at(router.prefixes, 0)
        write_journal(index, LOST, account.column, 0.0, 0, 0, 0, 0.0)
        forget_column(index, account.column)


@kernel
def forget_column(index, column):
    move_clock(index, column, LEAP)
    long_list(index.began, index.num_columns)[column] = clock_of(index, column)


@kernel
def write_journal(index, kind, column, capacity, links, num_links, num_tokens, now):
    """Write into the journal, if there is one, what goes into the index."""
    if index.journal_words == 0:
        return
    size = index.journal_words
    ring = index.journal + 8 * size * index.own_clock
    words = long_list(ring, size)
    counts = long_list(index.num_noted, index.num_clocks)
    at = counts[index.own_clock]
    words[at % size] = kind
    words[(at + 1) % size] = num_links
    words[(at + 2) % size] = long_list(index.names, index.num_columns)[column]
    words[(at + 3) % size] = num_tokens
    words[(at + 4) % size] = int(capacity)
    float_list(ring, size)[(at + 5) % size] = now
    at += _HEAD_WORDS
    if num_links > 0:
        told = long_list(links, _LINK_WORDS * num_links)
        for j in range(_LINK_WORDS * num_links):
            words[(at + j) % size] = told[j]
    counts[index.own_clock] = at + _LINK_WORDS * num_links


@entry_point
def repeat(indices, kind, column, capacity, links, num_links, num_tokens, now):
    """Do to the index what a journal tells."""
    index = index_at(indices, 0)
    if kind == LOST:
        forget_column(index, column)
        return
    use(index, column, capacity, links, num_links, num_tokens, now)
    if kind == ANSWERED_WHOLE and num_links > 0 and num_tokens > 0:
        keep_answer(index, column, link_at(links, num_links - 1).key, num_tokens, now)


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


class Noted(NamedTuple):
    """What went into an index."""

    kind: int  # SENT, ANSWERED, ANSWERED_WHOLE or LOST
    server: int  # digest of its name
    num_tokens: int  # beyond the links: of the prompt, or of the answer
    capacity_tokens: int
    at: float
    links: Array  # [n] LINK


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
        keeps_journal: bool = False,
    ) -> None:
        """`path`: the file, which is made by whoever comes first; `process`: which of them this is."""
        journal_words = JOURNAL_WORDS if keeps_journal else 0
        shapes: dict[str, tuple[tuple[int, ...], Any]] = {
            "clocks": ((num_processes, num_columns), np.int64),
            "began": ((num_columns,), np.int64),
            "names": ((num_columns,), np.int64),  # digests of the replicas'; 0 = free
            "keys": ((num_sets, WAYS), np.int64),
            "prefixes": ((num_sets, WAYS), SIGHTING),
            "stamps": ((num_sets, WAYS, num_columns), np.int64),
            "journal": ((num_processes, journal_words), np.int64),
            "num_noted": ((num_processes,), np.int64),
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
        record.journal_words = journal_words
        for name in self._tables:
            setattr(record, name, self.records.hold(self._tables[name]))
        self._process = process
        self._num_read = self._tables["num_noted"].copy()
        self._links = np.zeros(MAX_LINKS if keeps_journal else 0, LINK)  # of what is repeated

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

    def read_journal(self, max_words: int) -> list[Noted]:
        """What all processes have noted since the last call, about `max_words` of each at most."""
        found: list[Noted] = []
        counts = self._tables["num_noted"]
        for process, ring in enumerate(self._tables["journal"]):
            first, end = int(self._num_read[process]), int(counts[process])
            words = ring.take(np.arange(first, end if end - first <= len(ring) else first), mode="wrap")
            if int(counts[process]) - first > len(ring):  # some of it was overwritten
                first, words = end, words[:0]
            at = 0
            while at < min(len(words), max_words):
                kind, num_links, server, num_tokens, capacity = words[at : at + _HEAD_WORDS - 1].tolist()
                noted_at = float(words[at + _HEAD_WORDS - 1 : at + _HEAD_WORDS].view(np.float64)[0])
                begin = at + _HEAD_WORDS
                at = begin + _LINK_WORDS * num_links
                links = words[begin:at].view(LINK)
                found.append(Noted(kind, server, num_tokens, capacity, noted_at, links))
            self._num_read[process] = first + at
        return found

    def repeat(self, one: Noted) -> None:
        """What went into the index of another router goes into ours, if we know the server."""
        for column in np.flatnonzero(self._tables["names"] == one.server):
            links = self._links[: len(one.links)]
            links[:] = one.links
            repeat(
                self.address,
                one.kind,
                int(column),
                float(one.capacity_tokens),
                address_of(self._links),
                len(links),
                one.num_tokens,
                one.at,
            )

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
