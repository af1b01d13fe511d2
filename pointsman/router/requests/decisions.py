"""Asks the policy, and makes sure that there is always a decision.

A policy that raises, answers nonsense or is slow does not get to harm a request: least-outstanding decides in
its place. After a few failures in a row the policy is left alone for a while.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Collection
from time import monotonic, time
from typing import Any, NamedTuple, Protocol

from pointsman.router.config import Reliability
from pointsman.router.logs import Log
from pointsman.router.replicas.registry import Registry, Replica
from pointsman.router.telemetry.metrics import Metrics
from pointsman.routing.decider import AnyDecider, Decider, DeciderSource, RequestToPlace
from pointsman.routing.reasons import Kept, Reason, short
from pointsman.routing.records import NEVER

FALLBACK = "least-outstanding"
PROBE = "probe"
_NUM_REMEMBERED = 500
MAX_UNCOUNTED = 256
HELD = "hold"
_NOT_ASKED = "not asked"

Why = Kept | str | None  # the policy's own, somebody else's, or none is known
Verdict = Replica | str | None  # a replica, None to hold, or what is wrong with the policy
# A `Decision` as it is kept, at a time of our clock, and what the shadow says.
Remembered = tuple[float, str, Replica | None, str, int, float, int, int, Why, Verdict]


class Placed(RequestToPlace, Protocol):
    """What a decision is about."""

    request_id: str


class Decision(NamedTuple):
    at: float
    by: str
    replica: str
    request_id: str
    prompt_tokens: int
    waited_s: float
    queue_size: int  # requests at the router, this one included
    session: int
    why: str


class DecisionMaker:
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
        self._max_decision_s = settings.max_decision_s  # a field of a Spec takes long to read
        self._metrics = metrics
        self._log = log
        self._num_failures = 0
        self._suspended_until = -math.inf
        self._has_said = False
        self.on_switch: list[Callable[[], None]] = []
        self._decider: AnyDecider = source(policy)
        self.policy = self.decided_by = policy  # the one in charge, and who made the last decision
        self.shadow = shadow
        self._shadow: AnyDecider | None = source(shadow) if shadow is not None else None
        self._pair()
        self._last: deque[Remembered] = deque(maxlen=_NUM_REMEMBERED)
        # What `count` has not counted yet.
        self._latest: list[Remembered] = []
        self._took_s: list[float] = []

    def switch(self, policy: str) -> None:
        """From the next decision on; what is wrong with the new policy shows before the old one goes."""
        decider = self._source(policy)
        self.count()
        self._decider = decider
        self._pair()
        self.policy = policy
        self._num_failures = 0
        self._suspended_until = -math.inf
        self._has_said = False
        self._log.event("policy switched", policy=policy)
        self._tell()

    def set_shadow(self, policy: str | None) -> None:
        """Who is asked beside the policy from the next decision on; None: nobody."""
        shadow = self._source(policy) if policy is not None else None
        self.count()
        self._shadow = shadow
        self._pair()
        self.shadow = policy
        self._log.event("shadow switched", policy=policy)
        self._tell()

    def _pair(self) -> None:
        """Let the policy ask its shadow, where that takes no time of its own. A network does, and it must not
        be counted as the policy's."""
        policy, shadow = self._decider, self._shadow
        self._paired: Decider | None = None
        if not isinstance(policy, Decider):
            return
        if isinstance(shadow, Decider) and not shadow.is_learned and shadow.books is policy.books:
            self._paired = policy
            policy.take_along(shadow)
        else:
            policy.take_along(None)

    @property
    def small_first(self) -> float:
        """How much the size of held requests counts in the order that the policy in charge wants them in."""
        return self._decider.small_first

    def _tell(self) -> None:
        for listener in self.on_switch:
            listener()

    @property
    def trouble(self) -> str | None:
        """What is wrong with the policy in charge."""
        if not self._has_said:
            return None
        return f"policy {self.policy} fails; {FALLBACK} decides in its place"

    def last(self, count: int = _NUM_REMEMBERED) -> list[Decision]:
        """The oldest first."""
        self.count()
        return [_as_decision(one) for one in list(self._last)[-count:]]

    def find(self, request_id: str) -> list[Decision]:
        """All that is remembered of a request: it may have been held, or sent again."""
        self.count()
        return [_as_decision(one) for one in self._last if one[3] == request_id]

    def decide(
        self, request: Placed, queue_size: int, excluded: Collection[int], must_send: bool
    ) -> Replica | None:
        """The replica that gets the request; None: it is held.

        At least one replica must be neither excluded nor out of service.
        """
        started = monotonic()
        by = self.policy
        why: Why = None
        if started < self._suspended_until:
            found: Verdict = "suspended"
        else:
            found = self._ask(self._decider, request, queue_size, started, excluded)
            took_s = monotonic() - started
            self._took_s.append(took_s)
            if took_s > self._max_decision_s and not isinstance(found, str):
                found = "slow"
            if isinstance(found, str):
                self._failed(found, started)
            elif self._num_failures or self._has_said:
                self._succeeded()
        if found is None and must_send:
            found = "held too long"
        if isinstance(found, str):
            by = FALLBACK
            self._metrics.fallbacks[found] += 1
            why = f", because {short(self.policy)} could not: {found}"
            found = self._registry.least_outstanding(excluded)
            other = self._ask_shadow(request, queue_size, started, excluded)
        else:
            try:
                why = self._decider.kept_reason()
            except Exception:  # a reason must not cost a request
                why = None
            if self._paired is not None:
                other = self._registry.by_slot.get(self._paired.shadow_action - 1)
            else:
                other = self._ask_shadow(request, queue_size, started, excluded)
        self._remember(request, started, queue_size, by, found, why, other)
        return found

    def probed(self, request: Placed, now: float, queue_size: int, replica: Replica) -> None:
        """Not a decision of the policy: the breaker of this replica is half-open."""
        why = ", which has failed before, as a trial"
        self._remember(request, now, queue_size, PROBE, replica, why, _NOT_ASKED)

    def explain(self) -> dict[str, Any]:
        """The last decision, in the policy's own terms where it was the policy's."""
        last = self.last(1)
        if not last:
            return {}
        about = last[0]._asdict()
        if about["by"] == self.policy:
            about["seen"] = self._decider.explain()
        return about

    def sentence(self) -> str:
        """Why the last decision was as it was."""
        return _as_decision((self._latest or self._last)[-1]).why

    def _ask_shadow(
        self, request: RequestToPlace, queue_size: int, now: float, excluded: Collection[int]
    ) -> Verdict:
        if self._shadow is None:
            return None
        hold_until, request.hold_until = request.hold_until, NEVER  # what the shadow holds is not held
        found = self._ask(self._shadow, request, queue_size, now, excluded)
        request.hold_until = hold_until
        return found

    def _ask(
        self,
        decider: AnyDecider,
        request: RequestToPlace,
        queue_size: int,
        now: float,
        excluded: Collection[int],
    ) -> Verdict:
        try:
            action = decider.decide(request, queue_size, now, excluded)
        except Exception as error:
            return f"exception {type(error).__name__}"
        if action == 0:
            return None
        if action != action:  # NaN
            return "not a number"
        replica = self._registry.by_slot.get(action - 1)
        if replica is None:
            return "out of range"
        if not replica.is_accepting or replica.slot in excluded:
            return "replica not allowed"
        return replica

    def _remember(
        self,
        request: Placed,
        now: float,
        queue_size: int,
        by: str,
        replica: Replica | None,
        why: Why,
        shadow: Verdict,
    ) -> None:
        latest = self._latest
        self.decided_by = by
        latest.append(
            (
                now,
                by,
                replica,
                request.request_id,
                request.prompt_tokens,
                now - request.arrived_at,
                queue_size,
                request.session,
                why,
                shadow,
            )
        )
        if len(latest) >= MAX_UNCOUNTED:
            self.count()

    def count(self) -> None:
        """Bring the metrics up to date. After each decision it would take twice as long as many in a row."""
        metrics = self._metrics
        latest, self._latest = self._latest, []
        self._last.extend(latest)
        took_s, self._took_s = self._took_s, []
        if took_s:
            metrics.decision_s[self.policy].observe_all(took_s)
        shadow = self.shadow
        alike = Counter([(one[1], one[2], one[-1]) for one in latest])
        for (by, replica, other), num in alike.items():
            metrics.decisions[by, _name(replica)] += num
            if shadow is None or other == _NOT_ASKED:
                continue
            if isinstance(other, str):
                metrics.shadow_failures[shadow] += num
            else:
                metrics.shadow_decisions[shadow, _name(other)] += num
                metrics.shadow_agreement[shadow, other is replica] += num

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


def _name(replica: Replica | None) -> str:
    return HELD if replica is None else replica.name


def _as_decision(one: Remembered) -> Decision:
    at, by, replica, request_id, prompt_tokens, waited_s, queue_size, session, why, _ = one
    if isinstance(why, tuple):
        sentence = Reason(*why).sentence()
    else:
        did = "holds the request" if replica is None else f"sent the request to {short(replica.name)}"
        sentence = f"{short(by)} {did}{why or ', without saying why'}."
    at += time() - monotonic()
    return Decision(
        at, by, _name(replica), request_id, prompt_tokens, waited_s, queue_size, session, sentence
    )
