"""Asks the policy, and makes sure that there is always a decision.

A policy that raises, answers nonsense or is slow does not get to harm a request: least-outstanding decides in
its place. After a few failures in a row the policy is left alone for a while.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection
from time import monotonic, time
from typing import Any, NamedTuple

from pointsman.router.config import Reliability
from pointsman.router.contract import Decider, DeciderSource
from pointsman.router.logs import Log
from pointsman.router.metrics import Metrics
from pointsman.router.replicas import Registry, Replica

FALLBACK = "least-outstanding"
PROBE = "probe"
_NUM_REMEMBERED = 500
HELD = "hold"


class Asked(NamedTuple):
    """What a decision is about."""

    request_id: str
    prompt_tokens: int
    waited_s: float
    queue_size: int  # requests at the router, this one included
    session: int


class Decision(NamedTuple):
    at: float
    by: str
    replica: str
    asked: Asked

    def as_json(self) -> dict[str, Any]:
        about = self._asdict() | self.asked._asdict()
        del about["asked"]
        return about


class Chooser:
    def __init__(
        self,
        registry: Registry,
        source: DeciderSource,
        policy: str,
        shadow: str | None,
        settings: Reliability,
        metrics: Metrics,
        log: Log,
    ) -> None:
        self._registry = registry
        self._source = source
        self._settings = settings
        self._metrics = metrics
        self._log = log
        self._num_failures = 0
        self._suspended_until = -math.inf
        self._has_said = False
        self.on_switch: list[Callable[[str], None]] = []
        self._decider: Decider = source(policy)
        self.policy = policy
        self.shadow = shadow
        self._shadow: Decider | None = source(shadow) if shadow is not None else None
        self._last: deque[tuple[float, str, str, Asked]] = deque(maxlen=_NUM_REMEMBERED)

    def switch(self, policy: str) -> None:
        """From the next decision on; what is wrong with the new policy shows before the old one goes."""
        self._decider = self._source(policy)
        self.policy = policy
        self._num_failures = 0
        self._suspended_until = -math.inf
        self._has_said = False
        self._log.event("policy switched", policy=policy)
        for listener in self.on_switch:
            listener(policy)

    @property
    def last(self) -> list[Decision]:
        """The oldest first."""
        return [Decision(*one) for one in self._last]

    def choose(self, asked: Asked, excluded: Collection[int], *, must_send: bool) -> Replica | None:
        """None: hold it. At least one replica must be neither excluded nor out of service."""
        started = monotonic()
        by = self.policy
        replica: Replica | None = None
        if started < self._suspended_until:
            problem: str | None = "suspended"
        else:
            replica, problem = self._ask(self._decider, asked, started, excluded)
            took_s = monotonic() - started
            self._metrics.decision_s.observe(took_s)
            if took_s > self._settings.max_decision_s:
                problem = problem or "slow"
            if problem is not None:
                self._failed(problem, started)
            elif self._num_failures or self._has_said:
                self._succeeded()
        if problem is not None or (replica is None and must_send):
            by = FALLBACK
            replica = self._registry.least_outstanding(excluded)
            self._metrics.fallbacks[problem or "held too long"] += 1
        if self._shadow is not None:
            self._ask_shadow(self._shadow, replica, asked, started, excluded)
        self._remember(asked, by, replica)
        return replica

    def probed(self, asked: Asked, replica: Replica) -> None:
        """Not a decision of the policy: the breaker of this replica is half-open."""
        self._remember(asked, PROBE, replica)

    def explain(self) -> dict[str, Any]:
        """The last decision, in the policy's own terms where it was the policy's."""
        if not self._last:
            return {}
        about = Decision(*self._last[-1]).as_json()
        if about["by"] == self.policy:
            try:
                about["why"] = self._decider.explain()
            except Exception as error:  # an explanation must not cost a request
                about["why"] = f"no explanation: {type(error).__name__}"
        return about

    def _ask(
        self, decider: Decider, asked: Asked, now: float, excluded: Collection[int]
    ) -> tuple[Replica | None, str | None]:
        """-> the replica (None: hold), and what is wrong with the answer."""
        _, prompt_tokens, waited_s, queue_size, session = asked
        try:
            action = decider.choose(prompt_tokens, waited_s, queue_size, now, excluded, session)
        except Exception as error:
            return None, f"exception {type(error).__name__}"
        if action == 0:
            return None, None
        if action != action:  # NaN
            return None, "not a number"
        replica = self._registry.by_slot.get(action - 1)
        if replica is None:
            return None, "out of range"
        if not replica.is_accepting or (excluded and replica.slot in excluded):
            return None, "replica not allowed"
        return replica, None

    def _ask_shadow(
        self,
        shadow: Decider,
        chosen: Replica | None,
        asked: Asked,
        now: float,
        excluded: Collection[int],
    ) -> None:
        replica, problem = self._ask(shadow, asked, now, excluded)
        if problem is not None:
            self._metrics.shadow_failures += 1
            return
        self._metrics.shadow_decisions[replica.name if replica is not None else HELD] += 1
        self._metrics.shadow_agreement[replica is chosen] += 1

    def _remember(self, asked: Asked, by: str, replica: Replica | None) -> None:
        name = replica.name if replica is not None else HELD
        self._metrics.decisions[by, name] += 1
        self._last.append((time(), by, name, asked))

    def _succeeded(self) -> None:
        self._num_failures = 0
        if self._has_said:
            self._has_said = False
            self._log.event("policy works again", policy=self.policy)

    def _failed(self, problem: str, now: float) -> None:
        self._num_failures += 1
        if not self._has_said:  # once, not for every request
            self._has_said = True
            self._log.event("policy failed", policy=self.policy, problem=problem, instead=FALLBACK)
        if self._num_failures >= self._settings.policy_failures:
            self._suspended_until = now + self._settings.policy_suspension_s
            self._num_failures = 0
