from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from pointsman.experiments.objective import find_objective
from pointsman.live.costs import CostBooks
from pointsman.live.desk import Block, Desk, Question
from pointsman.live.spec import LiveSpec
from pointsman.routing.core import Request

from .factories import wait_until


class Start:
    """A starting policy that always sends to the first server."""

    small_first = 0.0

    def __init__(self) -> None:
        self.num_asked = 0
        self.legal = np.array([False, True, True])

    def observe(self, *asked: object) -> tuple[Any, Any, Any]:
        return np.zeros((2, 33), np.float32), np.zeros(16, np.float32), self.legal.copy()

    def decide(self, *asked: object) -> int:
        self.num_asked += 1
        return 1


class Office:
    """A desk, with a trainer in a thread of its own that answers by `policy`; None: not in time."""

    def __init__(
        self, policy: Callable[[Question], int | None], share: float = 0.95, patience_s: float = 1.0
    ) -> None:
        self.start = Start()
        books = CostBooks(find_objective("balanced"))
        books.add("a")
        books.add("b")
        spec = LiveSpec(share=share, patience_s=patience_s)
        self.desk = Desk(spec, books, self.start, hold_s=1.0)  # type: ignore[arg-type]
        self._policy = policy
        self._is_over = False
        self._thread = threading.Thread(target=self._answer)

    def __enter__(self) -> Office:
        self._thread.start()
        wait_until(lambda: self.is_listening)
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over = True
        self._thread.join()

    @property
    def is_listening(self) -> bool:
        return self.desk._is_listening

    def _answer(self) -> None:
        def look() -> None:
            if self._is_over:
                raise KeyboardInterrupt

        try:
            while True:
                question = self.desk.next_question(look)
                action = self._policy(question)
                if action is not None:
                    self.desk.answer(question.number, action)
        except KeyboardInterrupt:
            return

    def ask(self, now: float, excluded: Collection[int] = ()) -> int:
        """About a request that has just come."""
        return self.desk.decide(Request(100, arrived_at=now), 1, now, excluded)


def test_the_trainer_decides_its_share() -> None:
    with Office(lambda question: 2, share=0.5) as office:
        actions: Counter[int] = Counter()
        for number in range(200):
            wait_until(lambda: office.is_listening)
            actions[office.ask(float(number))] += 1
    assert 70 < actions[2] < 130 and actions[1] == office.start.num_asked


def test_a_late_answer_is_not_waited_for_and_not_used() -> None:
    has_learned = threading.Event()

    def late(question: Question) -> int:
        has_learned.wait(60)
        return 2

    with Office(late, patience_s=0.05) as office:
        started = time.monotonic()
        while office.desk.num_asked == 0:  # the first that is the trainer's
            assert office.ask(time.monotonic()) == 1
        # While it is busy nobody asks it.
        assert [office.ask(100.0 + number) for number in range(20)] == [1] * 20
        assert 0.05 <= time.monotonic() - started < 30
        assert (office.desk.num_asked, office.desk.num_late) == (1, 1)
        has_learned.set()
        wait_until(lambda: office.is_listening)
        office._policy = lambda question: 1 if question.number == 2 else 2
        while office.desk.num_asked == 1:
            assert office.ask(time.monotonic()) == 1  # not the 2 that came too late


def test_nobody_asks_the_trainer_after_a_failure() -> None:
    with Office(lambda question: 2) as office:
        assert [office.ask(float(number), excluded=(1,)) for number in range(20)] == [1] * 20
        assert office.desk.num_asked == 0


def test_a_hold_stands_until_there_is_room() -> None:
    answers = deque([0, 2])
    with Office(lambda question: answers.popleft()) as office:
        office.start.legal[0] = True
        request = Request(100, arrived_at=0.0)
        while office.desk.decide(request, 1, request.arrived_at) != 0:  # those of the control
            request = Request(100, arrived_at=request.arrived_at + 10.0)
        for waited_s in (0.1, 0.5, 0.9):  # asked again at every token of some stream
            assert office.desk.decide(request, 1, request.arrived_at + waited_s) == 0
        assert office.desk.num_asked == 1
        wait_until(lambda: office.is_listening)
        office.start.legal[0] = False
        assert office.desk.decide(request, 1, request.arrived_at + 0.95) == 2


def test_blocks_count_what_comes_after_their_first_quarter() -> None:
    block = Block(Start(), 8)  # type: ignore[arg-type]
    counted = [block.next_assignment().tally is not None for _ in range(8)]
    assert counted == [False] * 2 + [True] * 6 and block.num_left == 0
