"""The index of prefixes against a twin of dictionaries, and against caches that evict in true LRU order."""

from __future__ import annotations

import math
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pointsman.routing.books import Books
from pointsman.routing.core import Request
from pointsman.routing.decider import Decider
from pointsman.routing.hashing import MAX_LINKS, PromptHasher, links_of_blocks
from pointsman.routing.prefixes import (
    DOUBTED_TOKENS,
    KEEP,
    MAX_AGE_S,
    PrefixIndex,
    bytes_a_prefix,
    num_sets_in,
)
from pointsman.routing.records import LINK, NOBODY
from pointsman.routing.sharing import SharedBooks
from pointsman.routing.signals import EXPECTED_HIT_TOKENS

Chain = list[tuple[int, int]]  # key and length of each prefix

FIGURES = {"prefill_s_per_token": 1e-4, "decode_s_per_token": 1e-4, "step_floor_s": 0.01}


def chain(*path: int, tokens: int = 100) -> Chain:
    """The prefixes of a path in a tree, every step of which has so many tokens."""
    return [(hash(path[: n + 1]) or 1, tokens * (n + 1)) for n in range(len(path))]


def as_links(one: Chain) -> bytes:
    return np.array([(*link, 0) for link in one], LINK).tobytes()


def make_books(num_replicas: int = 2, capacity: float = 1000.0, **options: Any) -> Books:
    books = Books(0.0, **options)
    for k in range(num_replicas):
        books.add(f"replica {k}", FIGURES | {"kv_capacity_tokens": capacity})
    return books


class Asker:
    """Says what the index expects, through a decision like any other."""

    def __init__(self, books: Books) -> None:
        self.books = books
        self._decider = Decider(books, "least-outstanding")

    def hits(self, one: Chain, now: float, prompt_tokens: int | None = None) -> list[float]:
        prompt_tokens = one[-1][1] + 1 if prompt_tokens is None else prompt_tokens
        self._decider.decide(Request(prompt_tokens, arrived_at=now, links=as_links(one)), 1, now)
        found: list[float] = self.books.signals[EXPECTED_HIT_TOKENS].tolist()
        return found


class Twin:
    """The rule in dictionaries: a stamp for every prefix that was ever used."""

    def __init__(self, num_replicas: int, capacity: float) -> None:
        self.capacity = capacity
        self.clocks = [0] * num_replicas
        self.stamps: list[dict[int, int]] = [{} for _ in range(num_replicas)]
        self.answers: dict[int, tuple[int, int]] = {}

    def age(self, k: int, key: int) -> float:
        return self.clocks[k] - self.stamps[k][key] if key in self.stamps[k] else math.inf

    def match(self, k: int, one: Chain) -> int:
        matched, answer = 0, 0
        for key, tokens in one:
            if self.age(k, key) > self.capacity:
                return matched + answer
            matched = tokens
            by, answer = self.answers.get(key, (k, 0))
            answer = answer if by == k else 0
        return matched

    def use(self, k: int, one: Chain, new_tokens: int) -> None:
        matched = self.match(k, one)
        known = max((tokens for _, tokens in one if tokens <= matched), default=0)
        is_whole = bool(one) and known == one[-1][1]
        moved = float(new_tokens) - (0 if is_whole else matched - known)
        before = 0
        for key, tokens in one:
            moved += (tokens - before) * max(0.0, min(self.age(k, key), self.capacity)) / self.capacity
            before = tokens
        self.clocks[k] += max(0, int(moved))
        for key, tokens in one:
            self.stamps[k][key] = self.clocks[k] - tokens

    def answer(self, k: int, one: Chain, num_output: int, is_whole: bool) -> None:
        self.use(k, one, num_output)
        if one and num_output and is_whole:  # an answer follows the last link only if that is all
            self.answers[one[-1][0]] = k, num_output


PATHS = st.lists(st.integers(0, 2), min_size=0, max_size=5)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(PATHS, st.integers(0, 1), st.integers(0, 300), st.booleans(), st.sampled_from([0, 50])),
        max_size=30,
    )
)
def test_index_follows_its_rule(uses: list[tuple[list[int], int, int, bool, int]]) -> None:
    books, twin = make_books(), Twin(2, 1000.0)
    asker = Asker(books)
    for number, (path, k, num_output, is_answered, unshared) in enumerate(uses):
        one, now = chain(*path), 0.01 * number
        prompt = max(1, len(path) * 100 + unshared)
        if one:
            assert asker.hits(one, now, prompt) == [min(twin.match(r, one), prompt - 1) for r in range(2)]
        ticket = books.sent(k, prompt, now, links=as_links(one))
        twin.use(k, one, prompt - len(path) * 100)
        if is_answered:
            books.finished(ticket, now, prompt, num_output)
            twin.answer(k, one, num_output, is_whole=not unshared)


class LruCache:
    """Blocks of one server in the order in which they were used, the tail of a sequence before its head."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.used = capacity, 0
        self.blocks: OrderedDict[int, int] = OrderedDict()

    def use(self, one: Chain) -> int:
        """-> tokens that were there"""
        matched = 0
        for key, tokens in one:
            if key not in self.blocks:
                break
            matched = tokens
        before = [0, *(tokens for _, tokens in one)]
        for (key, tokens), start in reversed(list(zip(one, before, strict=False))):
            self.used += 0 if key in self.blocks else tokens - start
            self.blocks[key] = tokens - start
            self.blocks.move_to_end(key)
        while self.used > self.capacity:
            self.used -= self.blocks.popitem(last=False)[1]
        return matched


@pytest.mark.parametrize(
    ("num_sessions", "capacity"), [(30, 20_000), (60, 20_000), (120, 20_000), (60, 5_000)]
)
def test_expectations_are_those_of_a_true_lru_cache(num_sessions: int, capacity: int) -> None:
    """Chats that grow, of which some system prompts are shared, in and out of a cache that holds a part."""
    rng = np.random.default_rng(num_sessions)
    books, cache = make_books(1, float(capacity)), LruCache(capacity)
    asker = Asker(books)
    sessions = [[-1 - int(rng.integers(0, 3))] for _ in range(num_sessions)]
    expected, found, asked = [], [], 0
    for number in range(4000):
        s = min(int(rng.exponential(num_sessions / 4)), num_sessions - 1)
        if len(sessions[s]) > 12:
            sessions[s] = [-1 - int(rng.integers(0, 3))]
        sessions[s] += [number]
        one = chain(*sessions[s])
        expected.append(asker.hits(one, number)[0])
        books.sent(0, one[-1][1], number, links=as_links(one))
        found.append(cache.use(one))
        asked += one[-1][1]
    # Some of these caches hold nearly all, some next to nothing.
    assert np.sum(expected) / asked == pytest.approx(np.sum(found) / asked, abs=0.03)
    assert np.abs(np.subtract(expected, found)).sum() / asked < 0.12


def test_prompt_is_never_expected_whole() -> None:
    """Servers compute the last token."""
    books = make_books(1)
    books.sent(0, 300, 0.0, links=as_links(chain(1, 2, 3)))
    assert Asker(books).hits(chain(1, 2, 3), 0.1, prompt_tokens=300) == [299]


def test_waiting_tokens_are_those_to_compute() -> None:
    books = make_books(1)
    first = books.sent(0, 350, 0.0, links=as_links(chain(1, 2, 3)))
    second = books.sent(0, 450, 0.1, links=as_links(chain(1, 2, 4)))
    signals = books.replica_signals(0)
    assert signals["pending_prefill_tokens"] == 350 + 450 - 200
    assert signals["pending_cached_tokens"] == 200
    books.first_token(second, 0.2)
    books.failed(first, 0.3)
    signals = books.replica_signals(0)
    assert signals["pending_prefill_tokens"] == signals["pending_cached_tokens"] == 0


def test_next_turn_is_expected_to_find_the_answer() -> None:
    books = make_books(2)
    ticket = books.sent(1, 200, 0.0, links=as_links(chain(1, 2)))
    books.finished(ticket, 1.0, 200, 70)
    asker = Asker(books)
    assert asker.hits(chain(1, 2, 3), 2.0) == [0, 270]
    assert asker.hits(chain(1, 2), 2.0) == [0, 200]  # the same prompt again does not contain its answer
    assert asker.hits(chain(1, 5), 2.0) == [0, 100]


def test_trust_follows_what_servers_say() -> None:
    books = make_books(1, capacity=1e6)
    asker = Asker(books)
    books.sent(0, 1100, 0.0, links=as_links(chain(*range(10))))
    assert asker.hits(chain(*range(10)), 0.0) == [1000]
    matched = found = 0.0
    for n in range(1, 40):
        ticket = books.sent(0, 1100, n, links=as_links(chain(*range(10))))
        books.finished(ticket, n, 1100, 0, 250)
        matched, found = KEEP * matched + 1000, KEEP * found + 250
    trust = (DOUBTED_TOKENS + found) / (DOUBTED_TOKENS + matched)
    assert trust < 0.35
    assert asker.hits(chain(*range(10)), 50.0) == pytest.approx([1000 * trust])
    assert 0.15 < books.replica_signals(0)["hit_share"] < 250 / 1100


def test_trust_follows_counters_where_answers_say_nothing() -> None:
    books = make_books(1, capacity=1e6)
    for n in range(40):
        ticket = books.sent(0, 1100, n, links=as_links(chain(*range(10))))
        books.first_token(ticket, n)
        books.finished(ticket, n, 1100, 0)
        assert not books.counted(0, 1100.0 * (n + 1), 500.0 * n)
    (hits,) = Asker(books).hits(chain(*range(10)), 50.0)
    assert 480 < hits < 600


def test_server_that_counts_anew_has_lost_its_cache() -> None:
    books = make_books(2)
    asker = Asker(books)
    for k in range(2):
        books.sent(k, 300, 0.0, links=as_links(chain(1, 2, 3)))
        assert not books.counted(k, 5000.0, 100.0)
    assert books.counted(1, 20.0, 0.0)
    assert asker.hits(chain(1, 2, 3), 1.0) == [300, 0]
    books.sent(1, 300, 2.0, links=as_links(chain(1, 2)))
    assert asker.hits(chain(1, 2, 3), 3.0) == [300, 200]


def test_column_of_a_server_that_went_says_nothing_of_the_next() -> None:
    books = make_books(2)
    books.sent(1, 300, 0.0, links=as_links(chain(1, 2, 3)))
    books.remove(1)
    assert books.add("another", FIGURES | {"kv_capacity_tokens": 1000.0}) == 1
    assert Asker(books).hits(chain(1, 2, 3), 1.0) == [0, 0]


def test_age_is_forgotten() -> None:
    books = make_books(1)
    books.sent(0, 300, 0.0, links=as_links(chain(1, 2, 3)))
    asker = Asker(books)
    assert asker.hits(chain(1, 2, 3), MAX_AGE_S) == [300]
    assert asker.hits(chain(1, 2, 3), MAX_AGE_S + 1.0) == [0]


def test_memory_is_bounded_and_the_oldest_makes_room() -> None:
    num_bytes = 1 << 20
    books = make_books(1, capacity=1e9, prefix_bytes=num_bytes)
    asker = Asker(books)
    for n in range(20_000):
        books.sent(0, 100, n * 1e-3, links=as_links(chain(n)))
    index = PrefixIndex(num_sets_in(num_bytes, 64), 64)
    assert num_bytes / 2 < index.num_bytes < num_bytes + 2048
    room = 8 * num_sets_in(num_bytes, 64)
    assert room * bytes_a_prefix(64) <= num_bytes
    kept = [asker.hits(chain(n), 20.0)[0] > 0 for n in range(20_000)]
    assert sum(kept) == room
    assert all(kept[-room // 4 :])


def test_links_that_lost_their_place_are_passed_over() -> None:
    """In an index that is full, of prompts that it has room for: a hole in a chain is no end of it."""
    books = make_books(1, capacity=1e9, prefix_bytes=1 << 20)
    asker = Asker(books)
    room = 8 * num_sets_in(1 << 20, 64)
    chains = [chain(n, *range(29)) for n in range(room // 30 + 20)]
    for n, one in enumerate(chains):
        books.sent(0, one[-1][1], 0.1 * n, links=as_links(one))
    recent = chains[-room // 60 :]  # half of the room
    found = [asker.hits(one, 1000.0)[0] for one in recent]
    assert np.mean(found) > 0.97 * recent[0][-1][1]


def test_processes_share_what_they_know(tmp_path: Path) -> None:
    both = [make_books(2, shared=SharedBooks(tmp_path / "books", 2), index=index) for index in range(2)]
    both[0].sent(1, 300, 0.0, links=as_links(chain(1, 2, 3)))
    assert Asker(both[1]).hits(chain(1, 2, 4), 0.1) == [0, 200]
    for _ in range(4):  # what any process sends there takes memory
        both[1].sent(1, 300, 0.2)
    assert Asker(both[0]).hits(chain(1, 2, 4), 0.3) == [0, 0]


def test_processes_agree_on_columns(tmp_path: Path) -> None:
    def index(process: int) -> PrefixIndex:
        return PrefixIndex(1, 3, path=tmp_path / "prefixes", num_processes=2, process=process)

    one, two = index(0), index(1)
    columns = [one.claim("a"), two.claim("b"), one.claim("c"), two.claim("d")]
    assert columns == [0, 1, 2, NOBODY]
    assert two.claim("a") == 0
    one.give_up("b")
    assert two.claim("d") == 1


def test_journal_of_all_processes_makes_another_index_the_same(tmp_path: Path) -> None:
    shared = SharedBooks(tmp_path / "books", 2)
    ours = [make_books(2, 5000.0, shared=shared, index=n, keeps_journal=True) for n in range(2)]
    other = make_books(2, 5000.0, keeps_journal=True)
    rng = np.random.default_rng(1)
    for number in range(200):
        now, one = 0.1 * number, chain(*rng.integers(0, 3, rng.integers(1, 6)).tolist())
        books = ours[number % 2]
        ticket = books.sent(int(rng.integers(2)), one[-1][1] + number % 3, now, links=as_links(one))
        repeat_all(ours[0], other)
        books.finished(ticket, now, None, int(rng.integers(50)))
        if number % 50 == 49:
            books.was_away(0)
        repeat_all(ours[0], other)
        assert Asker(other).hits(one, now) == Asker(ours[0]).hits(one, now)
    other_index = other.prefixes
    assert other_index is not None
    assert other_index.read_journal(1 << 20) == []  # what was heard is not told again


def repeat_all(books: Books, other: Books) -> None:
    assert books.prefixes is not None
    assert other.prefixes is not None
    for noted in books.prefixes.read_journal(1 << 20):
        other.prefixes.repeat(noted)


def test_journal_that_nobody_reads_keeps_its_size_and_goes_on() -> None:
    books = make_books(1, keeps_journal=True)
    assert books.prefixes is not None
    long = chain(*range(1000), tokens=1)
    for number in range(100):  # 200,000 words
        books.finished(books.sent(0, 1000, 0.1 * number, links=as_links(long)), 0.1 * number)
    assert books.prefixes.read_journal(1 << 20) == []
    books.sent(0, 1000, 20.0, links=as_links(long))
    books.sent(0, 10, 21.0)
    first, second = books.prefixes.read_journal(1 << 20)
    assert first.links.tobytes() == as_links(long)
    assert (first.at, second.at, second.num_tokens) == (20.0, 21.0, 10)


def test_journal_is_read_in_pieces() -> None:
    books = make_books(1, keeps_journal=True)
    assert books.prefixes is not None
    for number in range(10):
        books.sent(0, 100, float(number), links=as_links(chain(number)))
    pieces = []
    while piece := books.prefixes.read_journal(20):
        pieces.append([one.at for one in piece])
    assert [len(piece) for piece in pieces] == [3, 3, 3, 1]
    assert [at for piece in pieces for at in piece] == list(range(10))


def links_of(text: str, *marks: int, prompt_tokens: int = 1000) -> list[tuple[int, int]]:
    links = PromptHasher().of_text(text.encode(), prompt_tokens, *marks)
    return np.frombuffer(links, LINK)[["key", "tokens"]].tolist()


TEXT = "".join(chr(97 + n * n % 26) for n in range(3000))


def test_equal_prefixes_have_equal_keys() -> None:
    one, other = links_of(TEXT), links_of(TEXT[:1100] + "!" + TEXT[1101:])
    assert len(one) == 6
    assert [a[0] == b[0] for a, b in zip(one, other, strict=True)] == [True, True, False, False, False, False]
    assert [tokens for _, tokens in one] == [170, 341, 512, 682, 853, 1000]


@given(st.integers(1, 2999), st.integers(0, 40))
@settings(max_examples=50, deadline=None)
def test_marked_prefix_is_the_prompt_that_ended_there(mark: int, more: int) -> None:
    """Whatever else is marked, and whatever follows."""
    (ended, _) = links_of(TEXT[:mark])[-1]
    assert ended in [key for key, _ in links_of(TEXT, mark, min(2999, mark + more))]
    assert ended in [key for key, _ in links_of(TEXT, max(1, mark - more), mark)]
    assert ended not in [key for key, _ in links_of(TEXT[: mark - 1] + "!" + TEXT[mark:], mark)]


def test_long_prompt_is_cut_and_every_key_is_its_own() -> None:
    links = links_of(TEXT * 1000, prompt_tokens=750_000)
    assert len(links) == MAX_LINKS
    assert len({key for key, _ in links}) == MAX_LINKS
    assert links[-1][1] == MAX_LINKS * 512 // 4


def test_token_ids_are_blocks_of_tokens() -> None:
    hasher = PromptHasher()
    links = np.frombuffer(hasher.of_tokens(list(range(300))), LINK)
    assert links["tokens"].tolist() == [128, 256, 300]
    other = np.frombuffer(hasher.of_tokens([*range(200), 7]), LINK)
    assert (links["key"][:2] == other["key"]).tolist() == [True, False]


def test_blocks_that_are_hashed_already_are_known_by_all_before_them() -> None:
    """As a gateway has them: each by its own tokens, so the same block elsewhere is another prefix."""
    books = make_books()
    asker = Decider(books, "least-outstanding")
    books.sent(0, 65, 0.0, links=links_of_blocks([7, 8, 9, 7], block_tokens=16))
    for hashes, expected in (([7, 8, 9, 7], 64), ([7, 8, 5], 32), ([8, 9, 7], 0), ([7], 16)):
        links = links_of_blocks(hashes, block_tokens=16)
        asker.decide(Request(16 * len(hashes) + 1, arrived_at=1.0, links=links), 1, 1.0)
        assert books.signals[EXPECTED_HIT_TOKENS].tolist() == [expected, 0], hashes
