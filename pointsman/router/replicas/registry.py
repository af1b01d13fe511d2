"""The replicas behind the router, and which of them may get a request now."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from time import monotonic
from typing import Any

from pointsman.errors import InputError
from pointsman.router.config import Backend, Settings
from pointsman.router.http.address import parse_url, server_url
from pointsman.router.http.upstream import Pool
from pointsman.router.replicas.breaker import HALF_OPEN, OPEN, Breaker
from pointsman.routing.books import Books
from pointsman.routing.records import NOBODY
from pointsman.simulator.calibration import known_figures

_MAX_MODELS = 1000
_MIN_SHARE = 0.05  # of a replica that has just returned


class Replica:
    def __init__(self, backend: Backend, pool: Pool, settings: Settings, slot: int) -> None:
        self.backend = backend
        self.name = backend.url
        self.slot = slot
        self.pool = pool
        self.address = pool.address
        # What a request line has on both sides of the target.
        self.before_target = b" " + self.address.prefix.encode()
        self.after_target = b" HTTP/1.1\r\nhost: %b\r\n" % self.address.netloc.encode()
        self.breaker = Breaker(settings.reliability)
        # Tickets of the requests that try it out, while the breaker is half-open, and when the last was sent.
        self.probes: set[int] = set()
        self.probed_at = 0.0
        self.num_outstanding = 0
        self.num_sent = 0
        self.is_new = False  # nobody has looked at it yet
        self.is_healthy = True
        self.is_draining = False
        self.is_leaving = False
        self.is_accepting = True
        self.models: dict[str, Any] | None = None  # None: not known yet
        self.returned_at: float | None = None
        self.num_failed_checks = 0
        self.problem: str | None = None  # of its last health check
        self.has_gauges = False  # it has told how busy it is
        self.changed_at = monotonic()
        # What other processes have of it: `numbers`, by process.
        self.elsewhere: dict[int, tuple[int, ...]] = {}

    @property
    def numbers(self) -> tuple[int, int, int]:
        """Requests outstanding, requests sent, connections, of this process."""
        return self.num_outstanding, self.num_sent, self.pool.num_open

    @property
    def all_numbers(self) -> tuple[int, int, int]:
        """The same numbers, added up over all processes."""
        outstanding, sent, connections = map(sum, zip(self.numbers, *self.elsewhere.values(), strict=True))
        return outstanding, sent, connections

    @property
    def state(self) -> str:
        if self.is_leaving or self.is_draining:
            return "draining"
        if not self.is_healthy:
            return "unhealthy"
        if self.is_new:
            return "new"
        return {OPEN: "broken", HALF_OPEN: "probing"}.get(self.breaker.state, "ready")

    def as_json(self) -> dict[str, Any]:
        outstanding, sent, connections = self.all_numbers
        return {
            "name": self.name,
            "slot": self.slot,
            "state": self.state,
            "breaker": self.breaker.state,
            "outstanding": outstanding,
            "sent": sent,
            "connections": connections,
            "models": sorted(self.models) if self.models is not None else None,
        }


class Registry:
    def __init__(self, books: Books, settings: Settings, ca: Path | None = None) -> None:
        """`ca`: of replicas that have none of their own."""
        self._books = books
        self._settings = settings
        self._ca = ca
        self.by_slot: dict[int, Replica] = {}
        self.accepting: list[Replica] = []
        self._returning: list[Replica] = []
        self.probing: list[Replica] = []
        self._without: dict[str | None, frozenset[int]] = {}  # by model, what `without` has found
        self.on_change: list[Callable[[Replica, str], None]] = []
        self.random = random.Random()

    def __iter__(self) -> Iterator[Replica]:
        return iter(list(self.by_slot.values()))

    def __len__(self) -> int:
        return len(self.by_slot)

    def find(self, name: str) -> Replica:
        for replica in self.by_slot.values():
            if replica.name == server_url(name) and not replica.is_leaving:
                return replica
        known = ", ".join(replica.name for replica in self.by_slot.values())
        raise InputError("replica", name, "is not one of ours", f"known: {known}")

    def has(self, replica: Replica) -> bool:
        """Whether it is still here: its slot may be another's by now, or nobody's."""
        return self.by_slot.get(replica.slot) is replica

    def names(self) -> set[str]:
        return {replica.name for replica in self.by_slot.values() if not replica.is_leaving}

    def add(self, backend: Backend, *, is_returning: bool = False) -> Replica:
        """`is_returning`: requests are served already. They go there once it has been looked at (`checked`):
        it may be down, or lack their models. But better there than nowhere."""
        pool = Pool(
            parse_url(backend.url, "url"), self._settings.limits, backend.ca or self._ca, backend.tls_name
        )
        if backend.url in self.names():
            raise InputError("replica", backend.url, "is there already", "name another one")
        slot = self._books.add(backend.url, known_figures(backend.calibration))
        replica = self.by_slot[slot] = Replica(backend, pool, self._settings, slot)
        if is_returning:
            replica.is_new = bool(self.accepting)
            replica.returned_at = monotonic()
        self._books.set_accepting(slot, True)
        self._changed(replica, "added")
        return replica

    def remove(self, name: str) -> None:
        """Send it nothing more; it goes when its last request is answered."""
        replica = self.find(name)
        replica.is_leaving = True
        self._changed(replica, "leaving")
        self._part(replica)

    def drain(self, name: str, is_draining: bool) -> None:
        replica = self.find(name)
        if replica.is_draining != is_draining:
            replica.is_draining = is_draining
            if not is_draining:
                replica.returned_at = monotonic()
            self._changed(replica, "draining" if is_draining else "back in service")

    # --- what happened to a replica ---

    def booked(self, replica: Replica, ticket: int, now: float) -> None:
        """It has a request more."""
        replica.num_outstanding += 1
        replica.num_sent += 1
        if self.probing and replica.breaker.state == HALF_OPEN:
            replica.probes.add(ticket)
            replica.probed_at = now

    def released(self, replica: Replica, ticket: int, has_succeeded: bool) -> None:
        """It has a request less."""
        replica.num_outstanding -= 1
        if replica.is_leaving:
            self._part(replica)
        if not replica.breaker.is_calm:
            if has_succeeded:
                self.answered(replica, ticket)
                replica.breaker.succeeded()
            replica.probes.discard(ticket)

    def answered(self, replica: Replica, ticket: int) -> None:
        """The head of a good answer is there: the rest may take minutes, and nobody has to wait for it."""
        if ticket in replica.probes:
            replica.breaker.answered()
            replica.returned_at = monotonic()
            self._changed(replica, "breaker closed")

    def failed(self, replica: Replica, now: float, ticket: int = NOBODY) -> None:
        """A request has failed there; `ticket`: if it is still booked."""
        if replica.breaker.state == HALF_OPEN and ticket not in replica.probes:
            return
        before = replica.breaker.state
        replica.breaker.failed(now)
        if replica.breaker.state != before:
            self._changed(replica, "breaker open")

    def checked(self, replica: Replica, problem: str | None) -> None:
        """The outcome of an active health check; `problem` None: it is well."""
        if not self.has(replica):
            return
        is_alive = problem is None
        replica.problem = problem
        was_new, replica.is_new = replica.is_new, False
        replica.num_failed_checks = 0 if is_alive else replica.num_failed_checks + 1
        if is_alive and not replica.is_healthy:
            replica.is_healthy = True
            replica.returned_at = monotonic()
            self._changed(replica, "healthy")
        elif replica.is_healthy and replica.num_failed_checks >= self._settings.reliability.health_failures:
            replica.is_healthy = False
            self._books.was_away(replica.slot)
            self._changed(replica, "unhealthy")
        elif was_new:
            self._changed(replica, "healthy")

    def set_models(self, replica: Replica, models: dict[str, Any]) -> None:
        if models != replica.models:
            replica.models = models
            self._without.clear()

    def tick(self, now: float) -> None:
        for replica in self:
            before = replica.breaker.state
            replica.breaker.tick(now)
            if replica.breaker.state != before:
                self._changed(replica, "breaker half-open")
            replica.pool.close_old(now)
        slow_start_s = self._settings.reliability.slow_start_s
        for replica in self._returning:
            if replica.returned_at is not None and now - replica.returned_at >= slow_start_s:
                replica.returned_at = None
        self._returning = [replica for replica in self._returning if replica.returned_at is not None]

    # --- who may get a request ---

    def serves(self, model: str) -> bool:
        """Whether some replica has the model, or may have it."""
        return any(replica.models is None or model in replica.models for replica in self.by_slot.values())

    def has_candidate(self, model: str | None, tried: Collection[int]) -> bool:
        return self.any_outside({*tried, *self.without(model)})

    def any_outside(self, excluded: Collection[int]) -> bool:
        return any(replica.slot not in excluded for replica in self.accepting)

    def to_probe(self, excluded: Collection[int]) -> Replica | None:
        """A replica whose breaker is half-open: the next request that could still go elsewhere tries it."""
        for replica in self.probing:
            if replica.slot not in excluded and self._has_other(replica, excluded):
                return replica
        return None

    def excluded(self, model: str | None, tried: Collection[int], now: float) -> Collection[int]:
        """Slots that may not get this request."""
        excluded = self._without.get(model)
        if excluded is None:
            excluded = self.without(model)
        if not tried and not self._returning and not self.probing:
            return excluded
        slots = {*excluded, *tried, *(r.slot for r in self.probing if self._is_tried_out(r, now))}
        slow_start_s = self._settings.reliability.slow_start_s
        for replica in self._returning:
            share = (now - (replica.returned_at or 0.0)) / slow_start_s if slow_start_s else 1.0
            if self.random.random() >= max(share, _MIN_SHARE) and self._has_other(replica, slots):
                slots.add(replica.slot)
        return slots

    def without(self, model: str | None) -> frozenset[int]:
        """Slots of replicas that do not serve the model; None: any model will do."""
        found = self._without.get(model)
        if found is None:
            if len(self._without) > _MAX_MODELS:  # clients may ask for any name
                self._without.clear()
            found = self._without[model] = frozenset(
                slot
                for slot, replica in self.by_slot.items()
                if model is not None and replica.models is not None and model not in replica.models
            )
        return found

    def share_a_replica(self, model: str | None, other: str | None) -> bool:
        """Whether some replica serves both models."""
        if model == other:
            return True
        without = self.without(model) | self.without(other)
        return any(slot not in without for slot in self.by_slot)

    def least_outstanding(self, excluded: Collection[int]) -> Replica | None:
        """Ties are broken at random: the first of equals would get everything at low load."""
        candidates = [replica for replica in self.accepting if replica.slot not in excluded]
        if not candidates:
            return None
        least = min(replica.num_outstanding for replica in candidates)
        return self.random.choice([r for r in candidates if r.num_outstanding == least])

    def _is_tried_out(self, replica: Replica, now: float) -> bool:
        """Whether a request does that now; one that has been silent for long does not stop another."""
        return bool(replica.probes) and now - replica.probed_at < self._settings.reliability.breaker_open_s

    def _has_other(self, replica: Replica, excluded: Collection[int]) -> bool:
        return any(other is not replica and other.slot not in excluded for other in self.accepting)

    def part_with_idle(self) -> None:
        """Let go of replicas that are leaving and have nothing to do in any process."""
        for replica in self:
            if replica.is_leaving:
                self._part(replica)

    def _part(self, replica: Replica) -> None:
        if replica.all_numbers[0] == 0 and self.by_slot.pop(replica.slot, None) is not None:
            replica.pool.close()
            self._books.remove(replica.slot)
            self._changed(replica, "removed")

    def _changed(self, replica: Replica, what: str) -> None:
        is_present = replica.slot in self.by_slot
        is_accepting = is_present and replica.state in ("ready", "probing")
        if is_present and is_accepting != replica.is_accepting:
            self._books.set_accepting(replica.slot, is_accepting)
        replica.is_accepting = is_accepting
        if replica.breaker.state != HALF_OPEN:
            replica.probes.clear()
        replica.changed_at = monotonic()
        self._without.clear()
        self.accepting = [r for r in self.by_slot.values() if r.is_accepting]
        self.probing = [r for r in self.accepting if r.breaker.state == HALF_OPEN]
        self._returning = [r for r in self.by_slot.values() if r.returned_at is not None]
        for listener in self.on_change:
            listener(replica, what)
