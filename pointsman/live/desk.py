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

from pointsman.live.books import CostBooks, Tally, Totals
from pointsman.live.spec import LiveSpec
from pointsman.router.contract import Decider
from pointsman.routing.decider import HOLD
from pointsman.routing.decider import Decider as CompiledDecider
from pointsman.routing.deciding import SAME_REQUEST_S

LOOK_S = 0.5  # whoever waits for a request looks this often whether any can come
SKIPPED = 4  # the first of so many parts of a block still feels the policy before


class Question(NamedTuple):
    """A decision that the trainer is to make."""

    number: int
    entities: NDArray[np.float32]  # [R, F]
    context: NDArray[np.float32]  # [C]
    legal: NDArray[np.bool_]  # [R + 1]
    totals: Totals


class Turn(NamedTuple):
    """Who decides about a request, and where its cost is counted."""

    decider: Decider | None  # None: the trainer
    tally: Tally | None


class Held(NamedTuple):
    arrived_at: float
    prompt_tokens: int
    turn: Turn
    until: float  # the trainer's hold stands until then, or until there is room


class Block:
    """The next requests are decided by one policy."""

    def __init__(self, decider: Decider, num_requests: int) -> None:
        self.tally = Tally()
        self._decider = decider
        self._num_skipped = num_requests // SKIPPED
        self.num_left = num_requests
        self._num_counted = num_requests - self._num_skipped

    def turn(self) -> Turn:
        self.num_left -= 1
        return Turn(self._decider, self.tally if self.num_left < self._num_counted else None)


class Desk:
    """A `Decider` of the router. What others than the router's thread may call is marked."""

    def __init__(self, spec: LiveSpec, books: CostBooks, start: CompiledDecider, hold_s: float) -> None:
        self._spec = spec
        self._books = books
        self._start = start
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
        """None: let the starting policy decide."""
        self._answers.put((number, action))

    # --- the router's thread ---

    def play(self, blocks: Sequence[Block]) -> None:
        """One after the other, from the next request on."""
        self._blocks.extend(blocks)

    @property
    def is_playing(self) -> bool:
        """Any thread. The last request of a block may be held yet."""
        held = self._held
        is_held = held is not None and held.turn.tally not in (None, self.learner, self.control)
        return bool(self._blocks) or is_held

    def explain(self) -> dict[str, Any]:
        return {}

    def choose(
        self,
        prompt_tokens: int,
        waited_s: float,
        queue_size: int,
        now: float,
        excluded: Collection[int] = (),
        session: int = -1,
    ) -> int:
        arrived_at = now - waited_s
        asked = (prompt_tokens, waited_s, queue_size, now)
        held = self._held
        if held is not None and not (
            held.prompt_tokens == prompt_tokens and abs(held.arrived_at - arrived_at) < SAME_REQUEST_S
        ):
            held = None
        turn = held.turn if held is not None else self._next_turn()
        action: int | None = None
        if turn.decider is None:
            if not excluded:  # after a failure, and while a server comes back
                action = self._ask_trainer(asked, held)
            if action is None:
                turn = Turn(self._start, None)
        if action is None:
            assert turn.decider is not None
            action = turn.decider.choose(*asked, excluded, session)
        if action == HOLD:
            until = held.until if held is not None and now < held.until else now + self._hold_s
            self._held = Held(arrived_at, prompt_tokens, turn, until)
        else:
            self._held = None
            self._books.announce(turn.tally, arrived_at)
        return action

    def _next_turn(self) -> Turn:
        """Of a request that nobody has seen yet."""
        if self._blocks:
            turn = self._blocks[0].turn()
            if self._blocks[0].num_left == 0:
                self._blocks.popleft()
            return turn
        if self.is_closed or not self._is_listening:
            return Turn(self._start, None)
        if self._rng.random() < self._spec.share:
            return Turn(None, self.learner)
        return Turn(self._start, self.control)

    def _ask_trainer(self, asked: tuple[int, float, int, float], held: Held | None) -> int | None:
        """The trainer's action; None if it has none in time."""
        now = asked[-1]
        entities, context, legal = self._start.observe(*asked)
        if held is not None and legal[HOLD] and now < held.until:
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
