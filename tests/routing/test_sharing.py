"""Several processes, one set of books."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pointsman.errors import InputError
from pointsman.routing.books import Books
from pointsman.routing.decider import Decider
from pointsman.routing.sharing import MAX_REPLICAS, SharedBooks

from . import relaid
from .asking import decide


def make_all_books(path: Path, *names: str, count: int = 2) -> list[Books]:
    """As in `count` processes: each maps the file by itself."""
    all_books = [Books(0.0, SharedBooks(path / "books", count), index) for index in range(count)]
    for books in all_books:
        for name in names:
            books.add(name)
    return all_books


def test_a_process_sees_what_others_have_outstanding(tmp_path: Path) -> None:
    one, two = make_all_books(tmp_path, "a", "b")
    decider = Decider(one, "least-outstanding")
    tickets = [two.sent(0, 100, 1.0) for _ in range(3)]
    one.sent(1, 100, 1.0)
    assert {decide(decider, 100, 2.0) for _ in range(20)} == {2}  # 3 on a, 1 on b
    for ticket in tickets:
        two.finished(ticket, 3.0)
    assert {decide(decider, 100, 4.0) for _ in range(20)} == {1}
    assert one.signals[0].tolist() == [0.0, 1.0]  # its own book has its own requests only


def test_replicas_are_matched_by_name_while_they_come_and_go(tmp_path: Path) -> None:
    one, two = make_all_books(tmp_path, "a", "b")
    two.remove(0)
    slot = two.add("c")
    two.sent(1, 100, 1.0)
    for _ in range(5):
        two.sent(slot, 100, 1.0)
    decider = Decider(one, "least-outstanding")
    assert {decide(decider, 100, 2.0) for _ in range(20)} == {1}  # a: none, b: one, c: not ours


def test_what_a_dead_process_had_outstanding_is_gone(tmp_path: Path) -> None:
    one, two = make_all_books(tmp_path, "a", "b")
    decider = Decider(one, "least-outstanding")
    two.sent(0, 100, 1.0)
    assert decide(decider, 100, 2.0) == 2
    SharedBooks(tmp_path / "books", 2).clear(1)
    one.sent(1, 100, 1.0)
    assert decide(decider, 100, 2.0) == 1


def test_a_book_that_is_being_laid_out_is_left_out(tmp_path: Path) -> None:
    one, two = make_all_books(tmp_path, "a", "b")
    decider = Decider(one, "least-outstanding")
    two.sent(0, 100, 1.0)
    two.shared._table["version"][1] += 1  # type: ignore[union-attr]
    one.sent(1, 100, 1.0)
    assert decide(decider, 100, 2.0) == 1


def test_the_learned_policy_decides_by_all_books(tmp_path: Path) -> None:
    """Spread over two processes or booked by one: the same requests make the same decision."""
    alone = Books(0.0)
    for name in "abcd":
        alone.add(name)
    one, two = make_all_books(tmp_path, *"abcd")
    for n, slot in enumerate([0, 0, 0, 1, 1, 2, 2, 2, 3, 3, 3, 3]):
        for books in (alone, (one, two)[n % 2]):
            books.first_token(books.sent(slot, 500 * (slot + 1), 1.0), 1.1)
    deciders = [Decider(books, "default") for books in (alone, one, two)]
    choices = {decide(decider, 700, 1.2) for decider in deciders}
    assert len(choices) == 1


def test_too_many_servers_for_shared_books_are_refused(tmp_path: Path) -> None:
    books = Books(0.0, SharedBooks(tmp_path / "books", 2), 0)
    for n in range(MAX_REPLICAS):
        books.add(str(n))
    with pytest.raises(InputError, match="that can be shared"):
        books.add("one more")
    assert len(books.slots) == MAX_REPLICAS


def test_a_book_that_is_laid_out_anew_while_it_is_read_is_read_again() -> None:
    """Never is a number taken for another replica's; one that never holds still counts as empty."""
    done = subprocess.run(
        [sys.executable, "-W", "error", relaid.__file__],
        env=os.environ | {"NUMBA_DISABLE_JIT": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    whole = tuple(relaid.OUTSTANDING_OF.values())
    assert done.stdout.splitlines() == [
        f"{relaid.ALWAYS} (0.0, 0.0)",
        *(f"{moment} {whole}" for moment in range(relaid.NUM_LOOKS)),
    ]
