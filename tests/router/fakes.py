"""Books that remember what they were told, and policies that do as they are told."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from time import monotonic
from typing import Any

from pointsman.routing.calibration import Estimate
from pointsman.routing.decider import RequestToPlace
from pointsman.routing.signals import SIGNALS

HOLD = 0


class FakeBooks:
    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        self.accepting: dict[int, bool] = {}
        self.open: dict[int, int] = {}  # ticket -> slot
        self.events: list[tuple[Any, ...]] = []
        self.num_tokens: dict[int, int] = {}
        self.signals: dict[int, dict[str, float]] = {}  # by slot; 0 where nothing is said
        self.estimates: dict[int, Estimate] = {}
        self.usual_size = 9.5  # all sizes count
        self._num_tickets = 0

    def add(self, name: str, told: Mapping[str, float] | None) -> int:
        slot = next(slot for slot in range(1000) if slot not in self.names)
        self.names[slot] = name
        return slot

    def remove(self, slot: int) -> None:
        del self.names[slot]

    def prompt_length(self, prompt_tokens: int) -> int:
        return prompt_tokens

    def size_of(self, prompt_tokens: int, max_tokens: int) -> int:
        return min(max(prompt_tokens.bit_length() - 9, 0), 9)

    def set_accepting(self, slot: int, accepting: bool) -> None:
        self.accepting[slot] = accepting

    def sent(self, slot: int, prompt_tokens: int, now: float, streams: bool, links: bytes = b"") -> int:
        self._num_tickets += 1
        self.open[self._num_tickets] = slot
        self.num_tokens[self._num_tickets] = 0
        self.events.append(("sent", slot, prompt_tokens, streams))
        return self._num_tickets

    def first_token(self, ticket: int, now: float) -> None:
        self.num_tokens[ticket] += 1
        self.events.append(("first_token", self.open[ticket]))

    def tokens(self, ticket: int, count: int, now: float) -> None:
        assert count > 0
        self.num_tokens[ticket] += count

    def finished(
        self,
        ticket: int,
        now: float,
        prompt_tokens: int | None,
        output_tokens: int | None,
        cached_tokens: int | None = None,
    ) -> None:
        self.events.append(("finished", self.open.pop(ticket), prompt_tokens, output_tokens))

    def counted(self, slot: int, queries: float, hits: float) -> bool:
        return False

    def has_capacity(self, slot: int, kv_capacity_tokens: float) -> None: ...

    def was_away(self, slot: int) -> None: ...

    def failed(self, ticket: int, now: float) -> None:
        self.events.append(("failed", self.open.pop(ticket)))

    def scraped(
        self, slot: int, running: float | None, waiting: float | None, kv_use: float | None, now: float
    ) -> None:
        self.events.append(("scraped", slot, running, waiting, kv_use))

    def replica_signals(self, slot: int) -> dict[str, float]:
        now = monotonic()
        signals = {signal.name: 0.0 for signal in SIGNALS} | {"scraped_at": now, "tokens_at": now}
        return signals | self.signals.get(slot, {})

    def speeds(self, slot: int) -> tuple[float, float, float]:
        known = self.replica_signals(slot)
        return known["step_floor_s"], known["decode_s_per_token"], known["prefill_s_per_token"]

    def estimate(self, slot: int) -> Estimate:
        return self.estimates.get(slot, Estimate({}, math.inf))

    def of_kind(self, kind: str) -> list[tuple[Any, ...]]:
        return [event for event in self.events if event[0] == kind]


class FakeDecider:
    """Round robin over the slots there are, unless `rule` says something else."""

    small_first = 0.0

    def __init__(self, books: FakeBooks, rule: Callable[[Collection[int]], Any] | None = None) -> None:
        self._books = books
        self._turn = -1
        self.rule = rule
        self.asked: list[tuple[int, float, int]] = []

    def decide(self, request: RequestToPlace, queue_size: int, now: float, excluded: Collection[int]) -> int:
        self.asked.append((request.prompt_tokens, now - request.arrived_at, queue_size))
        if self.rule is not None:
            return self.rule(excluded)  # type: ignore[no-any-return]
        slots = [s for s in self._books.names if s not in excluded and self._books.accepting.get(s, True)]
        self._turn += 1
        return slots[self._turn % len(slots)] + 1 if slots else HOLD

    def kept_reason(self) -> None:
        return None

    def explain(self) -> dict[str, Any]:
        return {"turn": self._turn, "open": len(self._books.open)}
