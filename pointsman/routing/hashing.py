"""From a prompt to the chain of links that the index knows it by, before any tokenizer.

A link ends after every block of the text, at its end, and at the marks that the caller sets, where
other prompts are likely to part from this one or to go on from it. Its key is a hash of everything up to
there, so that equal prefixes have equal keys whatever follows. The text is read once, in four lanes of eight
bytes.

Token ids are hashed as four bytes each, which is also what a token of English text has.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import partial

import numpy as np

from pointsman.compiled import jit
from pointsman.compiled.jit import IS_INTERPRETED, direct, kernel
from pointsman.compiled.memory import address_of, byte_list, bytes_at, long_list
from pointsman.routing.records import LINK, link_at

entry_point = partial(jit.entry_point, keeps_gil=True)

BLOCK_BYTES = 512
MAX_LINKS = 4096  # of a prompt; what lies behind is nobody's prefix
LINK_BYTES = LINK.itemsize
LANE_WORDS = 4
_CHUNK_BYTES = 8 * LANE_WORDS
_FACTOR = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1

if IS_INTERPRETED:

    def fold(state: int, word: int) -> int:
        """A new state; both are signed numbers of 64 bits."""
        x = ((int(state) ^ int(word)) & _MASK) * _FACTOR & _MASK
        x ^= x >> 32
        return x - (1 << 64) if x >> 63 else x

    def word(x: int) -> int:
        """An unsigned number of 64 bits."""
        return int(x) & _MASK

else:

    @kernel
    def fold(state, word):
        """A new state; both are signed numbers of 64 bits."""
        x = np.uint64(state ^ word) * np.uint64(_FACTOR)
        return np.int64(x ^ (x >> np.uint64(32)))

    @kernel
    def word(x):
        """An unsigned number of 64 bits."""
        return np.uint64(x)


@entry_point
def hash_text(text, num_bytes, total_bytes, block_bytes, first_mark, second_mark, prompt_tokens, links):
    """Fill links, the address of [MAX_LINKS] LINK; -> how many.

    text is the address of `num_bytes`; all of it has `total_bytes` and `prompt_tokens`. Marks are lengths in
    bytes, in any order; 0 is none.
    """
    characters = byte_list(text, num_bytes)
    words = long_list(text, num_bytes // 8)
    a, b, c, d = 1, 2, 3, 4
    num_chunks = 0
    num_links = 0
    end = 0
    while end < num_bytes and num_links < MAX_LINKS:
        begin = end
        end = min(num_bytes, begin - begin % block_bytes + block_bytes)
        if begin < second_mark < end:
            end = second_mark
        if begin < first_mark < end:
            end = first_mark
        for chunk in range(num_chunks, end // _CHUNK_BYTES):
            w = chunk * LANE_WORDS
            a = fold(a, words[w])
            b = fold(b, words[w + 1])
            c = fold(c, words[w + 2])
            d = fold(d, words[w + 3])
        num_chunks = end // _CHUNK_BYTES
        key = fold(fold(fold(fold(a, b), c), d), end)
        for w in range(num_chunks * LANE_WORDS, end // 8):
            key = fold(key, words[w])
        if end % 8 > 0:
            rest = 0
            for n in range(end - end % 8, end):
                rest |= np.int64(characters[n]) << (8 * (n % 8))
            key = fold(key, rest)
        link = link_at(links, num_links)
        link.key = key if key != 0 else 1
        link.tokens = end * prompt_tokens // total_bytes
        link.end = end
        num_links += 1
    return num_links


@kernel
def siphash(message, low, high):
    """SipHash-2-4 of one word: nobody can compute it who has not the two words of the key."""
    message, length = word(message), word(8 << 56)
    v0, v1 = word(low) ^ word(0x736F6D6570736575), word(high) ^ word(0x646F72616E646F6D)
    v2, v3 = word(low) ^ word(0x6C7967656E657261), word(high) ^ word(0x7465646279746573)
    v0, v1, v2, v3 = sip_round(*sip_round(v0, v1, v2, v3 ^ message))
    v0, v1, v2, v3 = sip_round(*sip_round(v0 ^ message, v1, v2, v3 ^ length))
    v0, v1, v2, v3 = sip_round(*sip_round(v0 ^ length, v1, v2 ^ word(0xFF), v3))
    v0, v1, v2, v3 = sip_round(*sip_round(v0, v1, v2, v3))
    return v0 ^ v1 ^ v2 ^ v3


@kernel
def sip_round(v0, v1, v2, v3):
    v0 = word(v0 + v1)
    v2 = word(v2 + v3)
    v1 = rotated(v1, 13) ^ v0
    v3 = rotated(v3, 16) ^ v2
    v0 = word(rotated(v0, 32) + v3)
    v2 = word(v2 + v1)
    v1 = rotated(v1, 17) ^ v2
    v3 = rotated(v3, 21) ^ v0
    return v0, v1, rotated(v2, 32), v3


@kernel
def rotated(x, bits):
    return word(x << word(bits)) | x >> word(64 - bits)


class PromptHasher:
    """Chains of links as bytes: [n] LINK, to be kept as long as their request. For one thread."""

    def __init__(self, block_bytes: int = BLOCK_BYTES) -> None:
        self._hash = direct(hash_text, "iiiiiiii")
        self._block_bytes = block_bytes
        self._max_bytes = MAX_LINKS * block_bytes
        self._links = np.zeros(MAX_LINKS, LINK)
        self._links_at = address_of(self._links)
        self._link_bytes = self._links.view(np.uint8).data

    def of_text(self, text: bytes, prompt_tokens: int, first_mark: int = 0, second_mark: int = 0) -> bytes:
        """Marks: lengths in bytes at which a link shall end; 0 is none."""
        num_bytes = total_bytes = len(text)
        if total_bytes > self._max_bytes:
            num_bytes = self._max_bytes
        hash_text = self._hash
        num_links = hash_text(
            bytes_at(text),
            num_bytes,
            total_bytes,
            self._block_bytes,
            first_mark,
            second_mark,
            prompt_tokens,
            self._links_at,
        )
        return self._link_bytes[: num_links * LINK_BYTES].tobytes()

    def of_tokens(self, token_ids: Sequence[int]) -> bytes:
        return self.of_text(array("I", token_ids).tobytes(), len(token_ids))


def links_of_blocks(hashes: Sequence[int], block_tokens: int) -> bytes:
    """A chain of blocks that are hashed already, each by its own tokens or by all up to its end."""
    links = np.zeros(min(len(hashes), MAX_LINKS), LINK)
    links["tokens"] = block_tokens * np.arange(1, len(links) + 1)
    key = 0
    for row, one in zip(links, hashes, strict=False):
        key = hash((key, one)) or 1
        row["key"] = key
    return links.tobytes()
