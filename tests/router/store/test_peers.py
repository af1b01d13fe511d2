"""What routers tell each other, and for how long it counts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from pointsman.router.store.messages import (
    LAYOUT,
    ROWS,
    Front,
    Message,
    MessageError,
    decode,
    encode,
    from_wire,
    prompts_from_wire,
    prompts_to_wire,
    to_wire,
)
from pointsman.router.store.peers import STALE_S, Peers
from pointsman.routing.ordering import Order
from pointsman.routing.prefixes import ANSWERED_WHOLE, LOST, SENT, Noted
from pointsman.routing.records import LINK
from pointsman.routing.sharing import Book
from pointsman.routing.signals import (
    ACCEPTING,
    MEASURED_ROWS,
    NUM_SIGNALS,
    OUTSTANDING,
    SENT_AT_SUM,
    SUMMED_ROWS,
    TTFT_S,
    WAITING,
)

KEYS = np.array([11, 22, 33], np.int64)


@dataclass
class Request:
    arrived_at: float
    priority: int = 1
    model: str | None = "m"
    size: int = 0


ORDER = Order(overtake_s=60.0, max_hold_s=30.0)


def book(seed: int, keys: np.ndarray = KEYS) -> Book:
    return Book(keys, np.random.default_rng(seed).uniform(1, 9, (NUM_SIGNALS, len(keys))))


def message(name: str, said: Book, now: float = 0.0, **fields: object) -> Message:
    keys, columns = to_wire(said, now)
    return Message(name, LAYOUT, now, keys=keys, columns=columns, **({"is_whole": True} | fields))


def peers() -> Peers:
    return Peers(lambda model, other: model == other)


def test_ages_survive_clocks_that_differ() -> None:
    said = book(1)
    theirs, ours = 1000.0, 7.0
    said.signals[WAITING] = [2, 0, 1]
    said.signals[SENT_AT_SUM] = [2 * theirs - 3.0, 0.0, theirs - 0.5]  # ages of 3.0 in all, and of 0.5
    columns = from_wire(decode(encode(message("one", said, theirs))), ours)
    heard = np.array([columns[int(key)] for key in KEYS]).T
    assert heard[SENT_AT_SUM] == pytest.approx([2 * ours - 3.0, 0.0, ours - 0.5])
    rest = [row for row in ROWS if row != SENT_AT_SUM]
    assert (heard[rest] == said.signals[rest]).all()
    assert (heard[ACCEPTING] == 0.0).all()  # not for others to say


def test_books_of_several_routers_are_put_together_as_those_of_processes() -> None:
    one, two = book(1), book(2, np.array([33, 44, 11], np.int64))
    one.signals[TTFT_S] = [0.0, 0.0, 3.0]
    others = peers()
    for name, said in (("one", one), ("two", two)):
        said.signals[SENT_AT_SUM] = 0.0
        said.signals[WAITING] = 0.0
        others.heard(message(name, said), 0.0)
    found = others.book(KEYS).signals
    for row in SUMMED_ROWS:
        parts = one.signals[row], [two.signals[row, 2], 0.0, two.signals[row, 0]]
        assert found[row] == pytest.approx(np.sum(parts, axis=0))
    assert found[TTFT_S].tolist() == [two.signals[TTFT_S, 2], 0.0, 3.0]
    kept = {*SUMMED_ROWS, *MEASURED_ROWS}
    assert all((found[row] == 0.0).all() for row in range(NUM_SIGNALS) if row not in kept)


def test_a_delta_changes_its_columns_and_a_whole_book_replaces_all() -> None:
    others = peers()
    first, second = book(1), book(2)
    others.heard(message("one", first), 0.0)
    part = Book(KEYS[1:2], second.signals[:, 1:2])
    others.heard(message("one", part, is_whole=False), 0.1)
    expected = [first.signals[OUTSTANDING, 0], second.signals[OUTSTANDING, 1], first.signals[OUTSTANDING, 2]]
    assert others.book(KEYS).signals[OUTSTANDING].tolist() == expected
    others.heard(message("one", part), 0.2)
    assert others.book(KEYS).signals[OUTSTANDING].tolist() == [0.0, expected[1], 0.0]


def test_a_router_that_is_silent_or_leaves_takes_its_books_along() -> None:
    others = peers()
    assert others.heard(message("one", book(1), num_held=3), 0.0)
    assert others.heard(message("two", book(2), num_held=4), 0.5)
    assert not others.heard(message("two", book(2), num_held=4), 0.6)
    assert others.num_held == 7
    assert others.forget_silent(STALE_S) == 0
    assert others.forget_silent(STALE_S + 0.1) == 1
    assert (len(others), others.num_held) == (1, 4)
    assert others.heard(Message("two", LAYOUT, 0.0, is_leaving=True), 1.0)
    assert (len(others), others.num_held) == (0, 0)
    assert (others.book(KEYS).signals == 0.0).all()


def test_nonsense_is_left_out() -> None:
    others = peers()
    said = message("one", book(1))
    wrong = [
        b"",
        b"\xc1nonsense",
        encode(said)[:-1],
        encode(message("one", book(1))).replace(b"one", b"\xff\xfe\xfd"),
    ]
    for data in wrong:
        with pytest.raises(MessageError):
            decode(data)
    broken = book(1)
    broken.signals[OUTSTANDING, 1] = np.nan
    for bad in (
        Message("one", LAYOUT + 1, 0.0, keys=said.keys, columns=said.columns),
        Message("one", LAYOUT, 0.0, keys=said.keys[:-1], columns=said.columns),
        Message("one", LAYOUT, 0.0, keys=said.keys, columns=said.columns[:-8]),
        message("one", broken),
    ):
        with pytest.raises(MessageError):
            others.heard(bad, 0.0)
    assert len(others) == 0


def test_who_waits_longest_is_known_across_routers() -> None:
    others = peers()
    others.heard(message("one", book(1), now=500.0, fronts=[Front(1, 2.0, "m")]), 100.0)  # since 98 of ours
    assert others.goes_before(Request(arrived_at=99.0), ORDER, 100.0)
    assert not others.goes_before(Request(arrived_at=97.0), ORDER, 100.0)
    assert not others.goes_before(Request(arrived_at=99.0, priority=0), ORDER, 100.0)  # more urgent
    assert others.goes_before(Request(arrived_at=97.0, priority=2), ORDER, 100.0)
    assert not others.goes_before(Request(arrived_at=99.0, model="other"), ORDER, 100.0)
    assert others.goes_before(Request(arrived_at=97.0, size=1), ORDER, 100.0)  # which counts from 107
    others.heard(message("one", book(1), now=500.0, fronts=[Front(1, 2.0, "m", 1)]), 100.0)  # from 108
    assert not others.goes_before(Request(arrived_at=99.0), ORDER, 100.0)
    assert others.goes_before(Request(arrived_at=99.0, size=2), ORDER, 100.0)
    assert others.goes_before(Request(arrived_at=99.0), ORDER, 128.0)  # it has waited for as long as it may


def prompt(kind: int = SENT, lengths: tuple[int, ...] = (100, 250), key: int = -7, **fields: object) -> Noted:
    links = np.array([(key + n, tokens, 9) for n, tokens in enumerate(lengths)], LINK)
    return Noted(kind, -3, 40, 10_000, 999.0, links)._replace(**fields)


def test_prompts_are_told_by_age_and_in_a_few_bytes_a_link() -> None:
    told = [prompt(), prompt(ANSWERED_WHOLE, (5,), at=990.0), prompt(LOST, (), capacity_tokens=0, at=0.0)]
    wire = prompts_to_wire(told, 1000.0)
    assert len(wire) == 3 * 23 + 3 * 12
    heard = prompts_from_wire(wire, 50.0)
    assert [one.at for one in heard] == [49.0, 40.0, 50.0]
    for one, other in zip(told, heard, strict=True):
        assert other._replace(at=0.0, links=0) == one._replace(at=0.0, links=0)
        assert other.links["key"].tolist() == one.links["key"].tolist()
        assert other.links["tokens"].tolist() == one.links["tokens"].tolist()


@pytest.mark.parametrize(
    "bad",
    [
        prompt(kind=9),
        prompt(num_tokens=-1),
        prompt(capacity_tokens=0),
        prompt(lengths=(250, 100)),
        prompt(lengths=(-5, 100)),
        prompt(key=-1),  # the next one has 0
        prompt(at=-np.inf),
    ],
)
def test_prompts_that_cannot_be_are_left_out(bad: Noted) -> None:
    with pytest.raises(MessageError):
        prompts_from_wire(prompts_to_wire([prompt(), bad], 1000.0), 50.0)


def test_half_a_prompt_is_left_out() -> None:
    wire = prompts_to_wire([prompt()], 1000.0)
    for size in (1, 22, 23, len(wire) - 1):
        with pytest.raises(MessageError):
            prompts_from_wire(wire[:size], 50.0)
