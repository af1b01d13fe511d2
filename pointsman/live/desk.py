"""Who decides about a request: the trainer, or the policy it started from. The router asks here.

The router's thread asks, the trainer's answers. A request waits for the trainer only while that is listening,
and at most `patience_s`; while it learns, or when it is late, the starting policy decides at once. An action
that came too late has had no effect: what follows does not depend on it, so it teaches nothing, but nothing
wrong either.

A share of the requests, drawn at random, goes to the trainer; the others are its control. In an evaluation,
blocks of requests go to one policy each.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Collection, Sequence
from random import Random
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pointsman.live.costs import CostBooks, CostTotals, Tally
from pointsman.live.spec import LiveSpec
from pointsman.routing.decider import AnyDecider, Decider, RequestToPlace
from pointsman.routing.deciding import HOLD

LOOK_S = 0.5  # whoever waits for a request looks this often whether any can come
SKIPPED = 4  # the first of so many parts of a block still feels the policy before


class Question(NamedTuple):
    """A decision that the trainer is to make."""

    number: int
    entities: NDArray[np.float32]  # [R, F]
    context: NDArray[np.float32]  # [C]
    legal: NDArray[np.bool_]  # [R + 1]
    totals: CostTotals


class Assignment(NamedTuple):
    """Who decides about a request, and where its cost is counted."""

    decider: AnyDecider | None  # None: the trainer
    tally: Tally | None


class Held(NamedTuple):
    request: RequestToPlace
    assignment: Assignment


class Block:
    """The next requests are decided by one policy."""

    def __init__(self, decider: AnyDecider, num_requests: int) -> None:
        self.tally = Tally()
        self._decider = decider
        self._num_skipped = num_requests // SKIPPED
        self.num_left = num_requests
        self._num_counted = num_requests - self._num_skipped

    def next_assignment(self) -> Assignment:
        self.num_left -= 1
        return Assignment(self._decider, self.tally if self.num_left < self._num_counted else None)


class Desk:
    """A decider of the router. What others than the router's thread may call is marked."""

    def __init__(self, spec: LiveSpec, books: CostBooks, start: Decider, hold_s: float) -> None:
        self._spec = spec
        self._books = books
        self._start = start
        self.small_first = start.small_first
        self._hold_s = hold_s
        self._rng = Random(0x5A17)
        self._questions: queue.SimpleQueue[Question] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[int, int | None]] = queue.SimpleQueue()
        self._is_listening = False
        self._number = 0
        self._held: Held | None = None
        self._blocks: deque[Block] = deque()
        self.is_closed = False  # nothing goes to the trainer any more
        self.learner, self.control = Tally(spec.window), Tally(spec.window)
        self.num_asked = self.num_late = 0

    # --- the trainer's thread ---

    def next_question(self, look: Callable[[], None]) -> Question:
        """Waits for it; `look` is called meanwhile, and may raise."""
        self._is_listening = True
        while True:
            try:
                return self._questions.get(timeout=LOOK_S)
            except queue.Empty:
                look()

    def answer(self, number: int, action: int | None) -> None:
        """Decide about a question; None: the starting policy shall."""
        self._answers.put((number, action))

    # --- the router's thread ---

    def play(self, blocks: Sequence[Block]) -> None:
        """One after the other, from the next request on."""
        self._blocks.extend(blocks)

    @property
    def is_playing(self) -> bool:
        """Whether blocks are under way, of which the last request may still be held. For any thread."""
        held = self._held
        is_held = held is not None and held.assignment.tally not in (None, self.learner, self.control)
        return bool(self._blocks) or is_held

    def kept_reason(self) -> None:
        return None

    def explain(self) -> dict[str, Any]:
        return {}

    def decide(
        self, request: RequestToPlace, queue_size: int, now: float, excluded: Collection[int] = ()
    ) -> int:
        held = self._held
        if held is not None and held.request is not request:
            held = None
        assignment = held.assignment if held is not None else self._next_assignment()
        action: int | None = None
        if assignment.decider is None:
            if not excluded:  # after a failure, and while a server comes back
                action = self._ask_trainer(request, queue_size, now, is_held=held is not None)
            if action is None:
                assignment = Assignment(self._start, None)
        if action is None:
            assert assignment.decider is not None
            action = assignment.decider.decide(request, queue_size, now, excluded)
        if action == HOLD:
            if assignment.decider is None and now >= request.hold_until:
                request.hold_until = now + self._hold_s
            self._held = Held(request, assignment)
        else:
            self._held = None
            self._books.announce(assignment.tally, request.arrived_at)
        return action

    def _next_assignment(self) -> Assignment:
        """Who decides about a request that nobody has seen yet."""
        if self._blocks:
            assignment = self._blocks[0].next_assignment()
            if self._blocks[0].num_left == 0:
                self._blocks.popleft()
            return assignment
        if self.is_closed or not self._is_listening:
            return Assignment(self._start, None)
        if self._rng.random() < self._spec.share:
            return Assignment(None, self.learner)
        return Assignment(self._start, self.control)

    def _ask_trainer(
        self, request: RequestToPlace, queue_size: int, now: float, *, is_held: bool
    ) -> int | None:
        """The trainer's action; None if it has none in time."""
        entities, context, legal = self._start.observe(request, queue_size, now)
        if is_held and legal[HOLD] and now < request.hold_until:
            return HOLD
        if self.is_closed or not self._is_listening or not legal.any():
            return None
        self._is_listening = False
        self._number += 1
        self.num_asked += 1
        self._questions.put(Question(self._number, entities, context, legal, self._books.totals(now)))
        try:
            number, action = self._answers.get(timeout=self._spec.patience_s)
            while number != self._number:  # to a question of before
                number, action = self._answers.get(timeout=self._spec.patience_s)
        except queue.Empty:
            self.num_late += 1
            return None
        if action is None or action == HOLD:
            return action
        return self._books.slots[action - 1] + 1
