"""A ledger that remembers what it was told, and policies that do as they are told."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from pointsman.routing.signals import SIGNALS

HOLD = 0


class FakeLedger:
    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        self.accepting: dict[int, bool] = {}
        self.open: dict[int, int] = {}  # handle -> slot
        self.events: list[tuple[Any, ...]] = []
        self.num_tokens: dict[int, int] = {}
        self.signals: dict[int, dict[str, float]] = {}  # by slot; 0 where nothing is said
        self._num_handles = 0

    def add(self, name: str, calibration: Mapping[str, Any] | None) -> int:
        slot = next(slot for slot in range(1000) if slot not in self.names)
        self.names[slot] = name
        return slot

    def remove(self, slot: int) -> None:
        del self.names[slot]

    def prompt_length(self, prompt_tokens: int) -> int:
        return prompt_tokens

    def set_accepting(self, slot: int, accepting: bool) -> None:
        self.accepting[slot] = accepting

    def sent(self, slot: int, prompt_tokens: int, now: float, streams: bool, session: int) -> int:
        self._num_handles += 1
        self.open[self._num_handles] = slot
        self.num_tokens[self._num_handles] = 0
        self.events.append(("sent", slot, prompt_tokens, streams))
        return self._num_handles

    def first_token(self, handle: int, now: float) -> None:
        self.num_tokens[handle] += 1
        self.events.append(("first_token", self.open[handle]))

    def tokens(self, handle: int, count: int, now: float) -> None:
        assert count > 0
        self.num_tokens[handle] += count

    def finished(self, handle: int, now: float, prompt_tokens: int | None, output_tokens: int | None) -> None:
        self.events.append(("finished", self.open.pop(handle), prompt_tokens, output_tokens))

    def failed(self, handle: int, now: float) -> None:
        self.events.append(("failed", self.open.pop(handle)))

    def scraped(
        self, slot: int, running: float | None, waiting: float | None, kv_use: float | None, now: float
    ) -> None:
        self.events.append(("scraped", slot, running, waiting, kv_use))

    def replica_signals(self, slot: int) -> dict[str, float]:
        return {signal.name: 0.0 for signal in SIGNALS} | self.signals.get(slot, {})

    def of_kind(self, kind: str) -> list[tuple[Any, ...]]:
        return [event for event in self.events if event[0] == kind]


class FakeDecider:
    """Round robin over the slots there are, unless `rule` says something else."""

    def __init__(self, ledger: FakeLedger, rule: Callable[[Collection[int]], Any] | None = None) -> None:
        self._ledger = ledger
        self._turn = -1
        self.rule = rule
        self.asked: list[tuple[int, float, int]] = []

    def choose(
        self,
        prompt_tokens: int,
        waited_s: float,
        queue_size: int,
        now: float,
        excluded: Collection[int],
        session: int,
    ) -> int:
        self.asked.append((prompt_tokens, waited_s, queue_size))
        if self.rule is not None:
            return self.rule(excluded)  # type: ignore[no-any-return]
        slots = [s for s in self._ledger.names if s not in excluded and self._ledger.accepting.get(s, True)]
        self._turn += 1
        return slots[self._turn % len(slots)] + 1 if slots else HOLD

    def explain(self) -> dict[str, Any]:
        return {"turn": self._turn, "open": len(self._ledger.open)}
