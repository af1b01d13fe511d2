"""The requests held at the router: who is asked about next, and who is refused when there are too many.

Requests that may go to the same replicas stand in one line: as in the simulator, the policy decides about the
one in front, and those behind wait with it. In front is the highest priority, and within it the oldest, or
the one whose turn it is by its size, if the policy or `overtake_s` has it so (routing/ordering.py). Where
models are served by different replicas, a held request stops nobody of another model. Held requests are
decided anew when something the policy can see has changed (a first token, an end, a scrape, a replica that
comes or goes), and at least every second.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection
from time import monotonic
from typing import NamedTuple, Protocol

from pointsman.router.config import Holding
from pointsman.router.http.messages import Answer, overloaded, refusal, unavailable
from pointsman.router.replicas.registry import Registry, Replica
from pointsman.router.requests.decisions import DecisionMaker, Placed
from pointsman.router.requests.facts import PRIORITIES
from pointsman.router.telemetry.metrics import Metrics
from pointsman.routing.books import Books
from pointsman.routing.ordering import Order


class Waiting(Placed, Protocol):
    """A request that needs a replica."""

    model: str | None
    priority: int
    size: int  # 0, until it is compared with others
    tried: Collection[int]

    def send(self, replica: Replica) -> None: ...

    def refuse(self, answer: Answer) -> None: ...


class FirstInLine(NamedTuple):
    """The first of a model's requests, of one priority."""

    priority: int
    arrived_at: float
    model: str | None
    size: int


Line = deque[Waiting]
Lines = dict[tuple[str | None, int], Line]  # by model and size
_TURN_S = 0.05  # for a request that waits longer at another router to take the place that came free


class Elsewhere(Protocol):
    """What other routers hold."""

    num_held: int

    def goes_before(self, request: Waiting, order: Order, now: float) -> bool:
        """Whether one that is no less urgent waits there for the same replicas, and it is its turn."""


class Dispatcher:
    def __init__(
        self,
        books: Books,
        registry: Registry,
        decisions: DecisionMaker,
        settings: Holding,
        metrics: Metrics,
    ) -> None:
        self._books = books
        self._registry = registry
        self._decisions = decisions
        self._settings = settings
        self._max_hold_s = settings.max_hold_s  # a field of a Spec takes long to read
        self._take_order()
        decisions.on_switch.append(self._take_order)
        self._metrics = metrics
        # By priority, and then by model: which replicas serve a model may change while its requests wait.
        self._lines: tuple[Lines, ...] = tuple({} for _ in PRIORITIES)
        self._is_wake_planned = False
        self._decided_at = 0.0
        self.num_held = 0
        self.elsewhere: Elsewhere | None = None
        self._gave_way_at: float | None = None
        registry.on_change.append(lambda replica, what: self.wake())

    def _take_order(self) -> None:
        """Take the order of held requests from the policy in charge, if it sets one."""
        settings = self._settings
        self.order = Order(settings.overtake_s, settings.max_hold_s, self._decisions.small_first)
        self._is_by_size = self.order.is_by_size

    def submit(self, request: Waiting) -> None:
        """Send it, hold it, or refuse it."""
        is_alone = self.num_held == 0 and self.elsewhere is None
        if not is_alone:
            self._measure(request)
        is_behind = self.num_held > 0 and self._is_behind(request)
        if is_behind or not self._place(request, request.arrived_at):
            if is_alone:
                self._measure(request)
            self._hold(request, is_first=False)

    def resubmit(self, request: Waiting) -> None:
        """A request that failed on a replica has waited already: it goes to the front."""
        request.size = 0
        if not self._place(request, monotonic()):
            self._hold(request, is_first=True)

    def _measure(self, request: Waiting) -> None:
        """Estimate how large a request is; needed only if it is held or not alone, and most are neither."""
        if self._is_by_size:
            request.size = self._books.size_of(request.prompt_tokens, request.max_tokens)

    def withdraw(self, request: Waiting) -> None:
        lines = self._lines[request.priority]
        line = lines.get((request.model, request.size))
        if line is not None and request in line:
            line.remove(request)
            self._count(-1)
            if not line:
                del lines[request.model, request.size]

    def wake(self) -> None:
        """Something changed. Decisions are made once for all that changes at the same time."""
        if self.num_held and not self._is_wake_planned:
            self._is_wake_planned = True
            asyncio.get_running_loop().call_soon(self._decide_again)

    def tick(self, now: float) -> None:
        if not self.num_held:
            return
        for lines in self._lines:
            for line in list(lines.values()):
                while line and now - line[0].arrived_at >= self._max_hold_s:
                    self._release(line, now)
        if now - self._decided_at >= self._settings.recheck_s:
            self._decide_again()

    def fronts(self) -> list[FirstInLine]:
        """Whose turn it is, for every priority and model."""
        turn_at = self._turns(monotonic())
        found: dict[tuple[int, str | None], FirstInLine] = {}
        for priority, lines in enumerate(self._lines):
            for line in sorted(lines.values(), key=lambda line: turn_at(line[0])):
                first = line[0]
                front = FirstInLine(priority, first.arrived_at, first.model, first.size)
                found.setdefault((priority, first.model), front)
        return list(found.values())

    def _decide_again(self) -> None:
        self._is_wake_planned = False
        self._decided_at = now = monotonic()
        stopped: set[frozenset[int]] = set()  # the lines whose first request stays, by the replicas left out
        for lines in self._lines:
            while (line := self._next_line(lines, stopped, now)) is not None:
                model = line[0].model
                if not self._release(line, now):
                    stopped.add(self._registry.without(model))

    def _next_line(self, lines: Lines, stopped: set[frozenset[int]], now: float) -> Line | None:
        """The one whose first request is next."""
        without = self._registry.without
        moving = [line for (model, _), line in lines.items() if without(model) not in stopped]
        turn_at = self._turns(now)
        return min(moving, key=lambda line: turn_at(line[0]), default=None)

    def _turns(self, now: float, num_more: int = 0) -> Callable[[Waiting], float]:
        """Whose turn comes when; `num_more` are about to be held."""
        order = self._order_now(num_more)
        return lambda request: order.turn_at(request.arrived_at, request.size, now)

    def _order_now(self, num_more: int) -> Order:
        if not self._is_by_size:
            return self.order
        num_elsewhere = self.elsewhere.num_held if self.elsewhere is not None else 0
        num_held = self.num_held + num_elsewhere + num_more
        return self.order.among(num_held, len(self._registry.accepting), self._books.usual_size)

    def _release(self, line: Line, now: float) -> bool:
        """Take the first of the line out if it can go; whether it went."""
        request = line.popleft()
        self._count(-1)
        has_gone = self._place(request, now)
        if has_gone:
            self._metrics.hold_s[self._decisions.decided_by].observe(now - request.arrived_at)
        else:
            line.appendleft(request)
            self._count(1)
        lines = self._lines[request.priority]
        key = request.model, request.size
        if not line and lines.get(key) is line:
            del lines[key]
        return has_gone

    def _is_behind(self, request: Waiting) -> bool:
        """Whether one that is more urgent waits for the same replicas, or one that is as urgent and next."""
        without = self._registry.without
        left_out = without(request.model)
        turn_at = self._turns(request.arrived_at, num_more=1)
        own_turn = turn_at(request)
        return any(
            line
            and without(model) == left_out
            and (priority < request.priority or turn_at(line[0]) <= own_turn)
            for priority, lines in enumerate(self._lines[: request.priority + 1])
            for (model, _), line in lines.items()
        )

    def _num_waiting(self, model: str | None) -> int:
        """Requests held for replicas that serve this model."""
        share = self._registry.share_a_replica
        return sum(
            len(line) for lines in self._lines for (other, _), line in lines.items() if share(model, other)
        )

    def _place(self, request: Waiting, now: float) -> bool:
        """Send or refuse the request; False: the policy holds it."""
        registry = self._registry
        excluded = registry.excluded(request.model, request.tried, now)
        if not registry.accepting or (excluded and not registry.any_outside(excluded)):
            if request.model is not None and not registry.serves(request.model):
                request.refuse(
                    refusal(404, f"the model {request.model!r} does not exist", code="model_not_found")
                )
            else:
                request.refuse(unavailable("no replica is available"))
            return True
        waited_s = now - request.arrived_at
        queue_size = 1 + self._num_waiting(request.model) if self.num_held else 1
        if self.elsewhere is not None:
            queue_size += self.elsewhere.num_held
        if registry.probing and (probed := registry.to_probe(excluded)) is not None:
            self._decisions.probed(request, now, queue_size, probed)
            request.send(probed)
            return True
        must_send = waited_s >= self._max_hold_s
        replica = self._decisions.decide(request, queue_size, excluded, must_send)
        if replica is None:
            self._gave_way_at = None
            return False
        if self.elsewhere is not None and not must_send and self._gives_way(self.elsewhere, request, now):
            return False
        self._gave_way_at = None
        request.send(replica)
        return True

    def _gives_way(self, elsewhere: Elsewhere, request: Waiting, now: float) -> bool:
        """Whether a request of another router, whose turn it is, should have the place. It gets it first;
        what it has not taken after `_TURN_S` it cannot use."""
        if not elsewhere.goes_before(request, self._order_now(num_more=1), now):
            return False
        if self._gave_way_at is None:
            self._gave_way_at = now
            asyncio.get_running_loop().call_later(_TURN_S, self.wake)
        return now - self._gave_way_at < 0.9 * _TURN_S  # timers are not exact

    def _hold(self, request: Waiting, *, is_first: bool) -> None:
        if self.num_held >= self._settings.max_held:
            evicted = self._last_below(request.priority)
            if evicted is None:
                request.refuse(self._full())
                return
            self.withdraw(evicted)
            evicted.refuse(self._full())
        if not self.num_held:
            self._decided_at = monotonic()
        line = self._lines[request.priority].setdefault((request.model, request.size), deque())
        line.appendleft(request) if is_first else line.append(request)
        self._count(1)
        self._metrics.holds += 1

    def _last_below(self, priority: int) -> Waiting | None:
        """The youngest of the least urgent, if those are less urgent than this."""
        for lines in reversed(self._lines[priority + 1 :]):
            if any(lines.values()):
                return max((line[-1] for line in lines.values() if line), key=lambda last: last.arrived_at)
        return None

    def _full(self) -> Answer:
        return overloaded(
            "too many requests are waiting at the router", round(self._settings.max_hold_s / 2) or 1
        )

    def _count(self, change: int) -> None:
        self.num_held += change
        self._metrics.num_held = self.num_held
