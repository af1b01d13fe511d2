"""JSON lines about many things at once, compiled: one line for each row of a table of numbers.

A line is a sequence of texts and numbers. Line by line in Python, with an object for each, the router spent
more on what it writes about a request than on any other part of it (docs/results/speed.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import accumulate
from struct import pack

import numpy as np
from numpy.typing import NDArray

from pointsman.compiled import jit
from pointsman.compiled.jit import direct, kernel
from pointsman.compiled.memory import address_of, byte_list, bytes_at, copy_bytes, float_table, long_list
from pointsman.routing.hashing import BLOCK_BYTES, LINK_BYTES, siphash, word
from pointsman.routing.records import link_at

entry_point = partial(jit.entry_point, keeps_gil=True)

TEXT, SHARED, OWN, ONE_OF, ONLY, INTEGER, SECONDS, KNOWN, HASHES = range(9)
GROUPED = SHARED, OWN, ONE_OF, ONLY
NUM_PARTS = 3  # of an item
NO_COLUMN = -1
MAX_NUMBER = 20  # bytes
COMMA, POINT, ZERO, CLOSING = b",.0]"
BLOCK_TOKENS = 128  # of a block, about; how long readers take it to be
NUM_DECIMALS = 6


class Lines:
    """What lines are made of, in order. Texts are ASCII."""

    def __init__(self) -> None:
        self._items: list[tuple[int, int, int]] = []  # what it is, its column, its text; or which of `groups`
        self._text = ""  # all of them
        self._ends = [0]
        self._num_groups = 0
        self._write = _compiled()  # now, not when the first line is to be written

    def text(self, text: str) -> None:
        """The same in every line."""
        self._add(TEXT, 0, text)

    def shared(self) -> None:
        """The same in every line: the only one of one of `groups`."""
        self._add_group(SHARED, 0)

    def own(self) -> None:
        """A text for each row: one of `groups`."""
        self._add_group(OWN, 0)

    def one_of(self, column: int) -> None:
        """The text that the column tells, of one of `groups`."""
        self._add_group(ONE_OF, column)

    def only_if(self, column: int) -> None:
        """No line where the text that the column tells, of one of `groups`, is empty. Comes first."""
        self._add_group(ONLY, column)

    def integer(self, column: int) -> None:
        self._add(INTEGER, column, "")

    def seconds(self, column: int) -> None:
        """Write a number with six decimals, more are cut off; below 0 it is null."""
        self._add(SECONDS, column, "null")

    def integer_if_known(self, text: str, column: int) -> None:
        """The text and the number; nothing if that is below 0."""
        self._add(KNOWN, column, text)

    def hashes(self, text: str, tokens_column: int) -> None:
        """The text, a hash for each full block of a prompt of so many tokens, and a closing bracket.

        Nothing if there is no block.
        """
        self._add(HASHES, tokens_column, text)

    def _add(self, what: int, column: int, text: str) -> None:
        self._items.append((what, column, len(self._ends) - 1))
        self._text += text
        self._ends.append(len(self._text))

    def _add_group(self, what: int, column: int) -> None:
        self._items.append((what, column, self._num_groups))
        self._num_groups += 1

    def write(
        self,
        rows: NDArray[np.float64],
        groups: Sequence[Sequence[str]],
        links: bytes = b"",
        links_column: int = NO_COLUMN,
        key: tuple[int, int] = (0, 0),
    ) -> bytes:
        """rows [N, columns]; groups: in the order of the items that have one.

        links: of the prompts of all rows, as PromptHasher gave them. `links_column`: how many bytes of them a
        row has. `key`: of the hashes, which say nothing to those who do not know it.
        """
        num_rows, num_columns = rows.shape
        texts = [text for group in groups for text in group]
        joined = (self._text + "".join(texts)).encode("ascii")
        ends = [*self._ends, *accumulate(map(len, texts), initial=len(self._text))]
        firsts = list(accumulate(map(len, groups), initial=len(self._ends)))
        parts = [
            part
            for what, column, text in self._items
            for part in (what, column, firsts[text] if what in GROUPED else text)
        ]
        # Compiled code reads these by address.
        packed_ends, packed_parts = pack(f"{len(ends)}q", *ends), pack(f"{len(parts)}q", *parts)
        longest = len(self._text) + sum([max(map(len, group)) for group in groups])
        longest += MAX_NUMBER * len(self._items)
        out = np.empty(num_rows * longest + len(links) // LINK_BYTES * MAX_NUMBER, np.uint8)
        num_bytes = self._write(
            address_of(rows),
            num_rows,
            num_columns,
            bytes_at(packed_parts),
            len(parts),
            bytes_at(joined),
            bytes_at(packed_ends),
            len(ends),
            bytes_at(links),
            links_column,
            *key,
            address_of(out),
            len(out),
        )
        return out[:num_bytes].tobytes()


@cache
def _compiled() -> Callable[..., int]:
    return direct(write_lines, "i" * 14)


@entry_point
def write_lines(
    rows,
    num_rows,
    num_columns,
    parts,
    num_parts,
    texts,
    ends,
    num_ends,
    links,
    links_column,
    low,
    high,
    out,
    max_bytes,
):
    """`Lines.write`; arrays come by address. -> how many bytes there are."""
    table = float_table(rows, num_rows, num_columns)
    parts = long_list(parts, num_parts)
    ends = long_list(ends, num_ends)
    characters = byte_list(out, max_bytes)
    at = first_link = 0
    for r in range(num_rows):
        row = table[r]
        num_links = int(row[links_column]) // LINK_BYTES if links_column >= 0 else 0
        for n in range(0, num_parts, NUM_PARTS):
            what, column, text = parts[n], parts[n + 1], parts[n + 2]
            if what == OWN:
                text += r
            elif what in (ONE_OF, ONLY):
                text += int(row[column])
            if what == ONLY:
                if ends[text + 1] == ends[text]:
                    break
            elif what <= ONE_OF:
                at = put(out, at, texts, ends, text)
            elif what == INTEGER:
                at = put_integer(characters, at, int(row[column]), 1)
            elif what == SECONDS:
                if row[column] < 0.0:
                    at = put(out, at, texts, ends, text)
                else:
                    at = put_seconds(characters, at, row[column])
            elif what == KNOWN:
                if row[column] >= 0.0:
                    at = put(out, at, texts, ends, text)
                    at = put_integer(characters, at, int(row[column]), 1)
            elif what == HASHES:
                after = put(out, at, texts, ends, text)
                most = int(row[column]) // BLOCK_TOKENS
                at = put_hashes(characters, at, after, links, first_link, num_links, most, low, high)
        first_link += num_links
    return at


@kernel
def put(out, at, texts, ends, text):
    """-> where the next goes, as all these."""
    num_bytes = ends[text + 1] - ends[text]
    copy_bytes(out + at, texts + ends[text], num_bytes)
    return at + num_bytes


@kernel
def put_integer(characters, at, value, num_digits):
    """At least so many digits; the value is not negative."""
    limit = 1
    for _ in range(num_digits):
        limit *= 10
    while value >= limit:
        limit *= 10
        num_digits += 1
    for n in range(at + num_digits - 1, at - 1, -1):
        tenth = value // 10
        characters[n] = ZERO + value - 10 * tenth
        value = tenth
    return at + num_digits


@kernel
def put_seconds(characters, at, seconds):
    value = int(seconds * 1e6)
    at = put_integer(characters, at, value // 1_000_000, 1)
    characters[at] = POINT
    return put_integer(characters, at + 1, value % 1_000_000, NUM_DECIMALS)


@kernel
def put_hashes(characters, before, at, links, first, num_links, most, low, high):
    """Hash the links that end a block, below 2^53 as JSON readers want it; -> `before` if none does."""
    count = 0
    for n in range(first, first + num_links):
        link = link_at(links, n)
        if link.end % BLOCK_BYTES == 0 and count < most:
            at = put_integer(characters, at, np.int64(siphash(link.key, low, high) >> word(11)), 1)
            characters[at] = COMMA
            at += 1
            count += 1
    if count == 0:
        return before
    characters[at - 1] = CLOSING
    return at
