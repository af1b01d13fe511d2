"""Which prefixes prompts have in common: drawn for made-up traffic, or found in the block hashes of a trace.

Either way the result are the chains of links of a `Workload`. A link that the same requests have as the one
after it would tell nothing, and is left out; so is what only one request has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from pointsman.workload.spec import PrefixesSpec, SharedTexts
from pointsman.workload.workload import Workload

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
Lengths = Callable[[int], tuple[Ints, Ints]]  # how many -> what each adds to its prompt, output

_MAX_REDRAWS = 64
_SYSTEM, _DOCUMENT, _ANSWER, _BLOCK = (number << 40 for number in range(1, 5))  # so that keys of kinds differ


@dataclass(frozen=True)
class Chains:
    """The fields of a `Workload` that say what is shared."""

    chain_start: Longs
    chain_length: Ints
    answer_key: Longs
    link_key: Longs
    link_tokens: Ints


def extend_keys(parent: Longs | int, what: Longs) -> Longs:
    """Keys of prefixes that continue others: as good as random, and the same for the same path."""
    mixed = np.asarray(parent, np.int64).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = mixed + what.astype(np.uint64) + np.uint64(1)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    keys = (mixed ^ (mixed >> np.uint64(31))).astype(np.int64)
    return np.where(keys == 0, 1, keys)


# Made-up traffic -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sessions:
    """S sessions of together N requests. Rows: the S first turns, then the later ones, session by session."""

    num_prefill_tokens: Ints  # [N]
    num_decode_tokens: Ints  # [N]
    session: Ints  # [N]
    next_turn: Ints  # [N]
    think_s: NDArray[np.float64]  # [N]
    chains: Chains

    @property
    def num_sessions(self) -> int:
        return int(self.session.max()) + 1


def draw_sessions(spec: PrefixesSpec, num_requests: int, lengths: Lengths, rng: Generator) -> Sessions:
    """N requests; the last session may be cut short by their number."""
    num_turns = rng.geometric(1.0 / spec.turns, num_requests)
    session = np.repeat(np.arange(num_requests), num_turns)[:num_requests]  # of each request
    own, output = (tokens.astype(np.int64) for tokens in lengths(num_requests))
    num_drawn = int(session[-1]) + 1
    keys, tokens = _draw_beginnings(spec, num_drawn, rng)
    begin = tokens[:, -1] if tokens.shape[1] else np.zeros(num_drawn, np.int64)
    think_s = rng.exponential(spec.think_s, num_requests)

    # What no longer fits begins a session of its own, with the same system prompt and documents.
    turn, prompt = _grow(session, begin, own, output, spec.context_tokens)
    is_first = turn == 0
    drawn_session = session
    session = np.cumsum(is_first) - 1
    is_short = is_first & (prompt + output > spec.context_tokens)
    output = np.where(is_short, np.minimum(output, spec.context_tokens // 2), output)
    prompt = np.where(is_short, np.minimum(prompt, spec.context_tokens - output), prompt)
    return _in_table_order(drawn_session[is_first], session, turn, prompt, output, think_s, keys, tokens)


def _draw_beginnings(spec: PrefixesSpec, num_sessions: int, rng: Generator) -> tuple[Longs, Longs]:
    """Keys and lengths [S, links] of the shared texts that each session begins with."""
    keys: list[Longs] = []
    tokens: list[Longs] = []
    key, length = np.zeros(num_sessions, np.int64), np.zeros(num_sessions, np.int64)

    def add(texts: SharedTexts, which: Longs, kind: int, text_tokens: Longs) -> None:
        nonlocal key, length
        key = extend_keys(key, which + kind)
        length = length + text_tokens[which]
        keys.append(key)
        tokens.append(length)

    if spec.systems is not None:
        which = _draw_texts(spec.systems, (num_sessions, 1), rng)
        add(spec.systems, which[:, 0], _SYSTEM, _draw_text_tokens(spec.systems, rng))
    if spec.documents is not None:
        which = _draw_texts(spec.documents, (num_sessions, spec.documents.per_request), rng)
        text_tokens = _draw_text_tokens(spec.documents, rng)
        for column in which.T:
            add(spec.documents, column, _DOCUMENT, text_tokens)
    shape = (num_sessions, 0)
    return (np.stack(keys, 1), np.stack(tokens, 1)) if keys else (np.zeros(shape, np.int64),) * 2


def _draw_text_tokens(texts: SharedTexts, rng: Generator) -> Longs:
    variance = np.log1p(texts.cv**2)
    drawn = rng.lognormal(np.log(texts.tokens) - variance / 2, np.sqrt(variance), texts.count)
    return np.maximum(1, np.rint(drawn)).astype(np.int64)


def _draw_texts(texts: SharedTexts, shape: tuple[int, int], rng: Generator) -> Longs:
    """Numbers of texts by popularity, all of a row different as far as there are enough."""
    shares = np.cumsum(np.arange(1, texts.count + 1, dtype=np.float64) ** -texts.zipf)
    shares /= shares[-1]
    which = np.searchsorted(shares, rng.random(shape), side="right").astype(np.int64)
    for column in range(1, min(shape[1], texts.count)):
        for _ in range(_MAX_REDRAWS):
            is_again = (which[:, :column] == which[:, column, None]).any(axis=1)
            if not is_again.any():
                break
            again = rng.random(int(is_again.sum()))
            which[is_again, column] = np.searchsorted(shares, again, side="right")
    return which


def _grow(session: Longs, begin: Longs, own: Longs, output: Longs, limit: int) -> tuple[Longs, Longs]:
    """Turn and prompt of each request; a request that does not fit any more is a first turn again."""
    turn, prompt = np.zeros_like(own), np.zeros_like(own)
    before, num_before, last = 0, 0, -1
    for i, (k, added, answered) in enumerate(
        zip(session.tolist(), own.tolist(), output.tolist(), strict=True)
    ):
        if k != last or before + added + answered > limit:
            before, num_before, last = int(begin[k]), 0, k
        turn[i], prompt[i] = num_before, before + added
        before += added + answered
        num_before += 1
    return turn, prompt


def _in_table_order(
    drawn_session: Longs,
    session: Longs,
    turn: Longs,
    prompt: Longs,
    output: Longs,
    think_s: NDArray[np.float64],
    keys: Longs,
    tokens: Longs,
) -> Sessions:
    """From requests session by session to the rows of a `Workload`: first turns before all later ones."""
    num_requests, num_begin = len(session), keys.shape[1]
    row = np.empty(num_requests, np.int64)
    order = np.argsort(turn > 0, kind="stable")
    row[order] = np.arange(num_requests)
    has_next = np.append(turn[1:] > 0, False)
    next_turn = np.full(num_requests, -1, np.int32)
    next_turn[has_next] = row[1:][has_next[:-1]]

    # The links of a session are those of its beginning and one for each answer but the last; turn t has the
    # first
    # of them, as many as it needs.
    num_links = np.bincount(session) - 1 + num_begin
    link_start = np.cumsum(num_links) - num_links
    link_key = np.empty(int(num_links.sum()), np.int64)
    link_tokens = np.empty(len(link_key), np.int32)
    for column in range(num_begin):
        link_key[link_start + column] = keys[drawn_session, column]
        link_tokens[link_start + column] = tokens[drawn_session, column]
    answer_key = np.where(has_next, extend_keys(0, np.arange(num_requests) + _ANSWER), 0)
    answer_at = (link_start[session] + num_begin + turn)[has_next]
    link_key[answer_at], link_tokens[answer_at] = answer_key[has_next], (prompt + output)[has_next]
    chains = Chains(
        link_start[session][order],
        (num_begin + turn)[order].astype(np.int32),
        answer_key[order],
        link_key,
        link_tokens,
    )
    return Sessions(
        prompt[order].astype(np.int32),
        output[order].astype(np.int32),
        session[order].astype(np.int32),
        next_turn[order],
        think_s[order],
        chains,
    )


# Traces ----------------------------------------------------------------------------------------------------


def chains_of_blocks(hashes: Longs, counts: Longs, prompts: Ints, block_tokens: int) -> Chains:
    """Chains of N requests from the hashes of their blocks: `counts[i]` of them for request i, one after
    another.

    Two prompts are alike as far as their hashes are. The last block may be a part of one.
    """
    num_requests = len(counts)
    start = np.cumsum(counts) - counts
    owner = np.repeat(np.arange(num_requests), counts)
    depth = np.arange(len(hashes)) - start[owner]
    tokens = np.minimum((depth + 1) * block_tokens, prompts[owner])
    keys = np.zeros(len(hashes), np.int64)
    at = start[counts > 0]
    for level in range(int(depth.max(initial=-1)) + 1):
        parent = keys[at - 1] if level else 0
        keys[at] = extend_keys(parent, hashes[at] + _BLOCK)
        at = at[counts[owner[at]] > level + 1] + 1
    keys = np.where(tokens < (depth + 1) * block_tokens, extend_keys(keys, tokens), keys)

    _, inverse, num_sharing = np.unique(keys, return_inverse=True, return_counts=True)
    num_sharing = num_sharing[inverse]
    is_last = np.append(depth[1:] == 0, True)
    next_sharing = np.where(is_last, 0, np.append(num_sharing[1:], 0))
    is_link = (num_sharing > 1) & (next_sharing != num_sharing)
    length = np.bincount(owner[is_link], minlength=num_requests)
    return Chains(
        np.cumsum(length) - length,
        length.astype(np.int32),
        np.zeros(num_requests, np.int64),
        keys[is_link],
        tokens[is_link].astype(np.int32),
    )


def without_long_links(workload: Workload) -> Ints:
    """Chain lengths without the links that are longer than their prompts, which were cut."""
    length = workload.chain_length.copy()
    while True:
        last = workload.chain_start + length - 1
        is_long = length > 0
        is_long[is_long] = workload.link_tokens[last[is_long]] > workload.num_prefill_tokens[is_long]
        if not is_long.any():
            return length
        length -= is_long
