"""What routers tell each other: the columns of their books that have changed, who waits longest, and which
prompts they sent where.

A message holds whole columns, never differences: one that is lost is repaired by the next about the same
replica, at the latest by the whole book that every router sends a few times a second. Prompts are told once,
as the hashes of their prefixes; one that is lost is a cached prompt that the others do not know of, until
somebody sends it again. Times travel as ages, so that nobody needs to know anybody's clock.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterable
from typing import Annotated

import msgspec
import numpy as np
from numpy.typing import NDArray

from pointsman.routing.hashing import MAX_LINKS
from pointsman.routing.prefixes import LOST, Noted
from pointsman.routing.records import LINK
from pointsman.routing.sharing import MAX_REPLICAS, Book
from pointsman.routing.signals import (
    MEASURED_ROWS,
    NUM_SIGNALS,
    SENT_AT_SUM,
    SIGNALS,
    SUMMED_ROWS,
    WAITING,
)

ROWS = np.array(sorted((*SUMMED_ROWS, *MEASURED_ROWS)))  # those that processes share, too
# Routers that share other signals cannot understand each other.
LAYOUT = zlib.crc32(" ".join(SIGNALS[row].name for row in ROWS).encode())
MAX_FRONTS = 16

# Of a prompt: kind, number of links, age, server, tokens beyond the links, KV memory of the server; and of a
# link: key and tokens.
_PROMPT = struct.Struct("<BHfqii")
_MAX_TOKENS = 2**31 - 1
_LINK = np.dtype([("key", "<i8"), ("tokens", "<i4")])

_Age = Annotated[float, msgspec.Meta(ge=0.0)]


class Front(msgspec.Struct, array_like=True, frozen=True):
    """The first of a line of held requests."""

    priority: int
    age_s: _Age
    model: str | None
    size: int = 0  # routing/ordering.py


class Message(msgspec.Struct, array_like=True):
    router: str  # a name of its own for every start of every router
    layout: int
    sent_at: float  # of its own clock: only the router itself knows what to make of it
    is_leaving: bool = False
    is_whole: bool = False  # replicas that are not in it are gone
    num_held: int = 0
    fronts: list[Front] = []
    keys: bytes = b""  # [R] i8
    columns: bytes = b""  # [R, ROWS] f8
    prompts: bytes = b""  # that were sent, answered or lost since the last message


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Message).decode


class MessageError(Exception):
    """What came is no message of a router, or of another version of it."""


def encode(message: Message) -> bytes:
    return _encode(message)


def decode(data: bytes) -> Message:
    try:
        return _decode(data)
    except (ValueError, RecursionError) as error:  # a DecodeError is a ValueError
        raise MessageError(f"not understood ({error})") from None


def to_wire(book: Book, now: float) -> tuple[bytes, bytes]:
    """Keys and columns as bytes; sums of sending times become sums of ages."""
    signals = book.signals.copy()
    signals[SENT_AT_SUM] = signals[WAITING] * now - signals[SENT_AT_SUM]
    return book.keys.astype("<i8").tobytes(), signals[ROWS].T.astype("<f8").tobytes()


def from_wire(message: Message, now: float) -> dict[int, NDArray[np.float64]]:
    """Columns of signals by key, with times of our clock."""
    if message.layout != LAYOUT:
        raise MessageError("shares other signals: it is another version of pointsman")
    num_replicas, rest = divmod(len(message.keys), 8)
    if rest or num_replicas > MAX_REPLICAS or len(message.columns) != 8 * len(ROWS) * num_replicas:
        raise MessageError("has the wrong size")
    keys = np.frombuffer(message.keys, "<i8")
    values = np.frombuffer(message.columns, "<f8").reshape(num_replicas, len(ROWS))
    if not np.isfinite(values).all():
        raise MessageError("holds what is no number")
    columns = np.zeros((num_replicas, NUM_SIGNALS))
    columns[:, ROWS] = values
    columns[:, SENT_AT_SUM] = columns[:, WAITING] * now - columns[:, SENT_AT_SUM]
    return {int(key): column for key, column in zip(keys, columns, strict=True)}


def prompts_to_wire(noted: Iterable[Noted], now: float) -> bytes:
    parts = []
    for one in noted:
        links = np.empty(len(one.links), _LINK)
        links["key"], links["tokens"] = one.links["key"], one.links["tokens"]
        age_s = 0.0 if one.kind == LOST else max(0.0, now - one.at)
        capacity = min(one.capacity_tokens, _MAX_TOKENS)
        head = one.kind, len(links), age_s, one.server, one.num_tokens, capacity
        parts += [_PROMPT.pack(*head), links.tobytes()]
    return b"".join(parts)


def prompts_from_wire(data: bytes, now: float) -> list[Noted]:
    """What was told about prompts, with times of our clock."""
    found = []
    at = 0
    while at < len(data):
        if len(data) - at < _PROMPT.size:
            raise MessageError("has the wrong size")
        kind, num_links, age_s, server, num_tokens, capacity = _PROMPT.unpack_from(data, at)
        at += _PROMPT.size
        if num_links > MAX_LINKS or len(data) - at < num_links * _LINK.itemsize:
            raise MessageError("has the wrong size")
        links = np.zeros(num_links, LINK)
        told = np.frombuffer(data, _LINK, num_links, at)
        links["key"], links["tokens"] = told["key"], told["tokens"]
        at += told.nbytes
        is_sound = kind <= LOST and num_tokens >= 0 and 0.0 <= age_s < math.inf and (links["key"] != 0).all()
        if not is_sound or (np.diff(links["tokens"], prepend=0) < 0).any() or (capacity < 1 and kind != LOST):
            raise MessageError("tells of no prompt")
        found.append(Noted(kind, server, num_tokens, capacity, now - age_s, links))
    return found
