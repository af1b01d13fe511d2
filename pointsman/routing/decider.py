"""A policy at work on the books of a live router: every heuristic and any checkpoint, and why it decided so.

No PyTorch: the policies are the compiled ones that the simulator runs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pointsman.compiled.jit import direct
from pointsman.compiled.memory import address_of, array_at, sized_bytes_at
from pointsman.compiled.random import first_state
from pointsman.inference.checkpoint import load_checkpoint
from pointsman.routing import deciding
from pointsman.routing.books import Books
from pointsman.routing.deciding import HOLD, SHADOW
from pointsman.routing.features import ENTITY_FEATURES, NUM_CONTEXT_FEATURES, NUM_ENTITY_FEATURES
from pointsman.routing.heuristics import LEARNED
from pointsman.routing.noting import NUM_NOTED
from pointsman.routing.policy import HoldSpec, PolicySpec, PolicyTables, fill_changes
from pointsman.routing.reasons import Kept, Reason
from pointsman.routing.signals import ACCEPTING
from pointsman.routing.streams import record_accepting
from pointsman.spec import parse_spec

EXPLAINED = (
    "outstanding",
    "waiting",
    "pending_prefill_tokens",
    "context_tokens",
    "ttft_s",
    "step_s",
    "scraped_kv_use",
    "expected_hit_tokens",
)


class PolicyError(Exception):
    """The policy gave no usable answer; whoever asked should ask another one."""


class RequestToPlace(Protocol):
    """What a decision is about, as far as a router knows it. Times are of the router's clock."""

    prompt_tokens: int  # as `Books.prompt_length` gave them
    max_tokens: int  # of output, at most, by its client; UNKNOWN
    links: bytes  # of its prompt, as PromptHasher gave them; may be empty
    session: int  # NOBODY: none
    arrived_at: float
    hold_until: float  # written by a decision to hold; NEVER before the first


class AnyDecider(Protocol):
    """Whoever decides about requests: a policy, or one in training."""

    small_first: float  # how much the size of held requests counts in the order it wants them in: ordering.py

    def decide(self, request: RequestToPlace, queue_size: int, now: float, excluded: Collection[int]) -> int:
        """0 = hold, k = slot k - 1. `queue_size`: requests at the router, this one included."""

    def kept_reason(self) -> Kept | None:
        """Why the last decision was so: ask right after it. None: it does not say."""

    def explain(self) -> dict[str, Any]:
        """The last decision and all that was seen, for people."""


# From the name or path of a policy; raises InputError.
DeciderSource = Callable[[str], AnyDecider]


class Decider:
    """One policy on the books of one router. Several deciders may share the books."""

    def __init__(
        self,
        books: Books,
        policy: PolicySpec | str = "default",
        seed: int = 0,
        max_hold_s: float = HoldSpec().max_hold_s,
        overtake_s: float = HoldSpec().overtake_s,
    ) -> None:
        """`policy`: a heuristic, `default` or a path. After `max_hold_s` a request must be sent.

        `overtake_s`: more than 0 if whoever asks does so in the order of ordering.py.
        """
        self._decide = direct(deciding.decide, "iiiiiffif")
        self._noted = np.zeros(NUM_NOTED)
        self._noted_bytes = self._noted.tobytes
        self.books = books
        self.spec = parse_spec(PolicySpec, {"kind": policy}, "policy") if isinstance(policy, str) else policy
        self.name = self.spec.label
        # Read once: another file in its place is another policy.
        path = self.spec.checkpoint
        self._policy = self.spec if path is None else load_checkpoint(path, "policy.checkpoint")
        self._records = np.zeros(1, deciding.DECIDER).view(np.recarray)
        self._address = address_of(self._records)
        self._record = self._records[0]
        self._record.memory.rng = first_state(seed, 0xDEC1DE)
        self._record.max_hold_s = max_hold_s
        self._record.noted = address_of(self._noted)
        self._record.overtake_s = overtake_s
        self._action = HOLD
        self._shadow: Decider | None = None
        self.shadow_action = HOLD  # of the last decision
        self._version = -1
        self._fit()

    def take_along(self, shadow: Decider | None) -> None:
        """Ask another policy about every request, too: `shadow_action` tells. It must be on the same books.

        Both see the same, so that it is looked up once; what the shadow holds is not held.
        """
        if shadow is not None:
            shadow._fit()
        self._shadow = shadow
        self._record.shadow = 0 if shadow is None else shadow._address

    def _fit(self) -> None:
        """Working memory for the replicas there are now."""
        if self._shadow is not None:
            self._shadow._fit()
        count = len(self.books.slots)
        self._tables = PolicyTables([self._policy], max(1, count))
        fill_changes(self._tables.rows[0], self.spec)
        self._scores = np.full(count, np.nan)  # and so they stay if the policy has none
        self._credit = np.zeros(count)
        record, memory = self._record, self._record.memory
        memory.num_replicas = count
        memory.scores, memory.credit = address_of(self._scores), address_of(self._credit)
        if self.books.shared is not None:
            self._merged = np.zeros_like(self.books.signals)
            record.merged = address_of(self._merged)
        self.is_learned = bool(self._tables.rows[0].kind == LEARNED)
        record.router = self.books.address
        record.policy = address_of(self._tables.rows)
        self.small_first = float(self._tables.rows[0].small_first)
        self._slots = self.books.slots
        self._answers = (HOLD, *(slot + 1 for slot in self._slots))  # to the policy's actions
        self._names = [self.books.name(slot) for slot in self._slots]
        self._version = self.books.version

    def decide(
        self, request: RequestToPlace, queue_size: int, now: float, excluded: Collection[int] = ()
    ) -> int:
        """0 = hold, k = slot k - 1.

        `queue_size`: requests at the router, this one included. `excluded`: slots that must not be chosen.
        0 also if no replica accepts requests. Raises PolicyError if the policy's numbers are no numbers.
        """
        if self.books.version != self._version:
            self._fit()
        if excluded:
            return self._decide_without(excluded, request, queue_size, now)
        decide = self._decide
        both: int = decide(
            self._address,
            request.prompt_tokens,
            sized_bytes_at(request.links),
            request.session,
            request.max_tokens,
            request.arrived_at,
            request.hold_until,
            queue_size,
            now,
        )
        answers = self._answers
        if self._shadow is None:
            action = both
        else:
            other = (both + 1) // SHADOW  # the policy's is BROKEN or more
            action = both - other * SHADOW
            self.shadow_action = answers[other] if other > 0 else other
        self._action = action
        if action > 0:
            return answers[action]
        if action < 0:
            raise PolicyError(f"policy {self.name}: its logits are not finite")
        request.hold_until = float(self._record.ask.hold_until)
        return HOLD

    def _decide_without(
        self, excluded: Collection[int], request: RequestToPlace, queue_size: int, now: float
    ) -> int:
        """`decide`, while these accept nothing."""
        closed = self._close(excluded)
        try:
            return self.decide(request, queue_size, now)
        finally:
            for row in closed:
                record_accepting(self.books.address, row, 1)

    def _close(self, slots: Collection[int]) -> list[int]:
        """Let these replicas accept nothing; -> the rows of those that did."""
        rows = [self.books.row(slot) for slot in slots if slot in self._slots]
        closed = [row for row in rows if self.books.signals[ACCEPTING, row] > 0.0]
        for row in closed:
            record_accepting(self.books.address, row, 0)
        return closed

    def observe(
        self, request: RequestToPlace, queue_size: int, now: float
    ) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.bool_]]:
        """Entities [R, F], context [C] and legal actions [R + 1] as a learned policy would see them now."""
        if self.books.version != self._version:
            self._fit()
        count = len(self._slots)
        entities = np.zeros((count, NUM_ENTITY_FEATURES), np.float32)
        context = np.zeros(NUM_CONTEXT_FEATURES, np.float32)
        legal = np.zeros(count + 1, np.bool_)
        deciding.observe_now(
            self._address,
            request.prompt_tokens,
            sized_bytes_at(request.links),
            request.arrived_at,
            queue_size,
            now,
            address_of(entities),
            address_of(context),
            address_of(legal),
        )
        return entities, context, legal

    def reason(self) -> Reason:
        return Reason(*self.kept_reason())

    def kept_reason(self) -> Kept:
        return self.name, self._names, self._action, self._noted_bytes()

    def explain(self) -> dict[str, Any]:
        """The last decision: ask right after `decide`, before anything else is booked.

        `scores`, lowest wins, are null for replicas that may not take the request and for policies that do
        not score; a learned policy has `logits`, highest wins, and one for holding.
        """
        row = self._tables.rows[0]
        count = len(self._slots)
        replicas: list[dict[str, Any]] = []
        for slot in self._slots:
            known = self.books.replica_signals(slot)
            replicas.append(
                {"slot": slot, "name": self.books.name(slot)} | {name: known[name] for name in EXPLAINED}
            )
        explained: dict[str, Any] = {
            "policy": self.name,
            "action": self._answers[self._action],
            "replica": None if self._action == HOLD else replicas[self._action - 1]["name"],
            "replicas": replicas,
        }
        if self.is_learned:
            logits = array_at(row.logits, np.float32, count + 1)
            legal = array_at(row.legal, np.uint8, count + 1)
            entities = array_at(row.entities, np.float32, count * NUM_ENTITY_FEATURES).reshape(count, -1)
            explained["hold"] = {"logit": float(logits[0]), "is_legal": bool(legal[0])}
            for column, replica in enumerate(replicas):
                replica["logit"] = float(logits[column + 1])
                replica["is_legal"] = bool(legal[column + 1])
                replica["features"] = {
                    feature.name: round(float(value), 4)
                    for feature, value in zip(ENTITY_FEATURES, entities[column], strict=True)
                }
        else:
            for column, replica in enumerate(replicas):
                score = float(self._scores[column])
                replica["score"] = score if np.isfinite(score) else None
                replica["is_legal"] = bool(self.books.signals[ACCEPTING, column] > 0 and score != np.inf)
        return explained
