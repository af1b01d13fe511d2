"""Books that several processes of one router share, and what other routers have told it.

Every process writes a book of its own, the signal table of what it sent, into memory that all can see. Who
decides adds what the others have outstanding to its own. Nobody waits for anybody: a book has one writer, and
numbers of eight bytes are read whole. A book has a version, which is odd while it is laid out anew because
replicas came or went; whoever has read it looks again whether it still has the same.

A book may also stand for all that other routers have outstanding, as they tell it over a network.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pointsman.compiled.jit import kernel
from pointsman.compiled.memory import address_of, float_table, long_list, read_in_order
from pointsman.routing.records import NOBODY
from pointsman.routing.signals import MEASURED_ROWS, NUM_SIGNALS, SUMMED_ROWS

MAX_REPLICAS = 256
MAX_TRIES = 8  # a book changes its layout when replicas come or go: seconds apart at the least

BOOK = np.dtype(
    [
        ("version", "i8"),
        ("num_replicas", "i8"),
        ("keys", "i8", (MAX_REPLICAS,)),  # digests of the replicas' names, by column
        ("signals", "f8", (NUM_SIGNALS * MAX_REPLICAS,)),  # the first rows · num_replicas are in use
    ],
    align=True,
)
_KEYS_AT, _SIGNALS_AT = (int(BOOK.fields[name][1]) for name in ("keys", "signals"))  # type: ignore[index]
_SIZE = BOOK.itemsize


class Book(NamedTuple):
    """A copy of a book."""

    keys: NDArray[np.int64]  # [R] digests of the replicas' names
    signals: NDArray[np.float64]  # [NUM_SIGNALS, R]


class SharedBooks:
    """The books of all processes, in a file that each of them maps."""

    def __init__(self, path: Path | None, count: int) -> None:
        """The file is made by whoever comes first; without one, the books are of this process alone."""
        self.prefixes: Path | None = None  # the file of the index (prefixes.py)
        if path is None:
            self._memory = mmap.mmap(-1, count * BOOK.itemsize)
        else:
            self.prefixes = path.with_name(f"{path.name}-prefixes")
            with path.open("a+b") as file:
                file.truncate(count * BOOK.itemsize)
                self._memory = mmap.mmap(file.fileno(), count * BOOK.itemsize)
        self._table: NDArray[Any] = np.frombuffer(self._memory, BOOK)

    @property
    def address(self) -> int:
        return address_of(self._table)

    def __len__(self) -> int:
        return len(self._table)

    def clear(self, index: int) -> None:
        """What a process that is gone had outstanding is gone with it."""
        book = self._table[index : index + 1]
        book["version"] += book["version"] % 2 + 2
        book["num_replicas"] = 0

    def place(self, index: int, names: Sequence[str], signals: NDArray[Any]) -> NDArray[Any]:
        """Lay out a process's book for these replicas; -> its signals there, to be written in place."""
        return self._lay_out(index, np.array([_key(name) for name in names], np.int64), signals)

    def read(self, index: int) -> Book | None:
        """A copy of a book; None while it is laid out anew."""
        book = self._table[index]
        version, count = int(book["version"]), int(book["num_replicas"])
        keys = book["keys"][:count].copy()
        signals = book["signals"][: NUM_SIGNALS * count].reshape(NUM_SIGNALS, count).copy()
        return Book(keys, signals) if version % 2 == 0 and version == int(book["version"]) else None

    def write(self, index: int, book: Book) -> None:
        """Make a book say this; its layout changes only if its replicas do."""
        present = self._table[index]
        count = len(book.keys)
        if count != present["num_replicas"] or (present["keys"][:count] != book.keys).any():
            self._lay_out(index, book.keys, book.signals)
        else:
            present["signals"][: book.signals.size] = book.signals.ravel()

    def _lay_out(self, index: int, keys: NDArray[Any], signals: NDArray[Any]) -> NDArray[Any]:
        book = self._table[index : index + 1]
        book["version"] += 1
        book["num_replicas"] = len(keys)
        book["keys"][0, : len(keys)] = keys
        placed: NDArray[Any] = book["signals"][0, : signals.size].reshape(signals.shape)
        placed[:] = signals
        book["version"] += 1
        return placed


def combined(books: Iterable[Book], keys: NDArray[np.int64]) -> Book:
    """One book about the replicas of these keys, as `add_book` would put them together."""
    signals = np.zeros((NUM_SIGNALS, len(keys)))
    summed, measured = np.array(SUMMED_ROWS), np.array(MEASURED_ROWS)
    for book in books:
        _, ours, theirs = np.intersect1d(keys, book.keys, assume_unique=True, return_indices=True)
        signals[np.ix_(summed, ours)] += book.signals[np.ix_(summed, theirs)]
        known = signals[np.ix_(measured, ours)]
        taken_over = np.where(known == 0.0, book.signals[np.ix_(measured, theirs)], known)
        signals[np.ix_(measured, ours)] = taken_over
    return Book(keys, signals)


def _key(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little", signed=True)


@kernel
def column_of(keys, num_replicas, key, first):
    """Mostly it is in the same place everywhere."""
    for step in range(num_replicas):
        k = (first + step) % num_replicas
        if keys[k] == key:
            return k
    return NOBODY


@kernel
def add_book(own_keys, theirs, signals, num_replicas):
    """Add what another process has outstanding; take over what it has measured and we have not.

    -> whether the book was the same one all the while. One that is being laid out anew counts as empty.
    """
    version = read_in_order(theirs)
    count = long_list(theirs, 2)[1]
    if version % 2 == 1 or not 0 < count <= MAX_REPLICAS:
        return version == read_in_order(theirs)
    keys = long_list(theirs + _KEYS_AT, count)
    others = float_table(theirs + _SIGNALS_AT, NUM_SIGNALS, count)
    for j in range(count):
        k = column_of(own_keys, num_replicas, keys[j], j)
        if k != NOBODY:
            for row in SUMMED_ROWS:
                signals[row, k] += others[row, j]
            for row in MEASURED_ROWS:
                if signals[row, k] == 0.0:
                    signals[row, k] = others[row, j]
    return version == read_in_order(theirs)


@kernel
def elsewhere(router, row, k):
    """What the books of all others say of the replica, summed up. One that is laid out anew says nothing."""
    total = 0.0
    if router.num_books > 1:
        key = long_list(router.books + router.own_book * _SIZE + _KEYS_AT, router.num_replicas)[k]
        for book in range(router.num_books):
            theirs = router.books + book * _SIZE
            version, count = read_in_order(theirs), long_list(theirs, 2)[1]
            if book != router.own_book and version % 2 == 0 and 0 < count <= MAX_REPLICAS:
                column = column_of(long_list(theirs + _KEYS_AT, count), count, key, k)
                if column != NOBODY:
                    total += float_table(theirs + _SIGNALS_AT, NUM_SIGNALS, count)[row, column]
    return total


@kernel
def merge_books(own_signals, merged, num_replicas, books, num_books, own_book):
    """Write the signals of all processes together into `merged`; all are addresses.

    A book that was laid out anew while it was read left a mixture of two, so it begins again; at last without
    the others, whose books do not hold still.
    """
    own = float_table(own_signals, NUM_SIGNALS, num_replicas)
    signals = float_table(merged, NUM_SIGNALS, num_replicas)
    own_keys = long_list(books + own_book * _SIZE + _KEYS_AT, num_replicas)
    for num_tries in range(MAX_TRIES + 1):
        for row in range(NUM_SIGNALS):
            for k in range(num_replicas):
                signals[row, k] = own[row, k]
        is_whole = True
        for book in range(num_books if num_tries < MAX_TRIES else 0):
            if book != own_book and not add_book(own_keys, books + book * _SIZE, signals, num_replicas):
                is_whole = False
        if is_whole:
            return
