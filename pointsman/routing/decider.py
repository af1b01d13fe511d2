"""Which replica a request goes to: every heuristic and any checkpoint, on the live router's books.

No PyTorch: the policies are the simulator's compiled ones.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pointsman.compiled.jit import direct
from pointsman.compiled.memory import address_of, array_at
from pointsman.inference.checkpoint import load_checkpoint
from pointsman.routing import deciding
from pointsman.routing.booking import record_accepting
from pointsman.routing.books import Ledger
from pointsman.routing.heuristics import LEARNED
from pointsman.routing.observation import ENTITY_FEATURES, NUM_CONTEXT_FEATURES, NUM_ENTITY_FEATURES
from pointsman.routing.policy import PolicySpec, PolicyTables
from pointsman.routing.signals import ACCEPTING
from pointsman.simulator.spec import HoldSpec
from pointsman.simulator.state import NOBODY
from pointsman.spec import parse_spec

HOLD = 0
EXPLAINED = (
    "outstanding",
    "waiting",
    "pending_prefill_tokens",
    "context_tokens",
    "ttft_s",
    "step_s",
    "scraped_kv_use",
)


class PolicyError(Exception):
    """The policy gave no usable answer; whoever asked should ask another one."""


class Decider:
    """One policy on the books of one router. Several deciders may share a ledger."""

    def __init__(
        self,
        ledger: Ledger,
        policy: PolicySpec | str = "default",
        seed: int = 0,
        max_hold_s: float = HoldSpec().max_hold_s,
    ) -> None:
        """`policy`: a heuristic, `default` or a path. After `max_hold_s` a request must be sent."""
        self._decide = direct(deciding.decide, "iiifif")
        self.ledger = ledger
        self.spec = parse_spec(PolicySpec, {"kind": policy}, "policy") if isinstance(policy, str) else policy
        # Read once: another file in its place is another policy.
        path = self.spec.checkpoint
        self._policy = self.spec if path is None else load_checkpoint(path, "policy.checkpoint")
        self._turns = np.zeros(1, deciding.TURN).view(np.recarray)
        self._turns_at = address_of(self._turns)
        turn = self._turns[0]
        # xorshift must not start from 0.
        turn.rng = int(np.random.SeedSequence([seed, 0xDEC1DE]).generate_state(1)[0]) | 1
        turn.max_hold_s = max_hold_s
        turn.held_at = -1.0
        self._action = HOLD
        self._version = -1
        self._fit()

    @property
    def name(self) -> str:
        return self.spec.label

    def _fit(self) -> None:
        """Working memory for the replicas there are now."""
        count = len(self.ledger.slots)
        self._tables = PolicyTables([self._policy], max(1, count))
        self._scores = np.full(count, np.nan)  # and so they stay if the policy has none
        self._credit = np.zeros(count)
        turn = self._turns[0]
        turn.scores = address_of(self._scores)
        turn.credit = address_of(self._credit)
        books = self.ledger.books
        if books is not None:
            self._merged = np.zeros_like(self.ledger.signals)
            turn.merged = address_of(self._merged)
            turn.books, turn.num_books, turn.own_book = books.address, len(books), self.ledger.index
        self._is_learned = bool(self._tables.rows[0].kind == LEARNED)
        turn.sims, turn.streams = self.ledger.addresses
        turn.policies = address_of(self._tables.rows)
        self._slots = self.ledger.slots
        self._version = self.ledger.version

    def choose(
        self,
        prompt_tokens: int,
        waited_s: float,
        queue_size: int,
        now: float,
        excluded: Collection[int] = (),
        session: int = NOBODY,
    ) -> int:
        """0 = hold, k = slot k - 1.

        `queue_size`: requests at the router, this one included. `excluded`: slots that must not be chosen.
        0 also if no replica accepts requests. Raises PolicyError if the policy's numbers are no numbers.
        """
        ledger = self.ledger
        if ledger.version != self._version:
            self._fit()
        decide = self._decide
        if excluded:
            closed = self._close(excluded, now)
            try:
                action = decide(self._turns_at, prompt_tokens, session, waited_s, queue_size, now)
            finally:
                for row in closed:
                    record_accepting(ledger.addresses[0], row, 1, now)
        else:
            action = decide(self._turns_at, prompt_tokens, session, waited_s, queue_size, now)
        if action < 0:
            raise PolicyError(f"policy {self.name}: its logits are not finite")
        self._action = action
        return self._slots[action - 1] + 1 if action > 0 else HOLD

    def _close(self, slots: Collection[int], now: float) -> list[int]:
        """Let these replicas accept nothing; -> the rows of those that did."""
        rows = [self.ledger.row(slot) for slot in slots if slot in self._slots]
        closed = [row for row in rows if self.ledger.signals[ACCEPTING, row] > 0.0]
        for row in closed:
            record_accepting(self.ledger.addresses[0], row, 0, now)
        return closed

    def observe(
        self, prompt_tokens: int, waited_s: float, queue_size: int, now: float
    ) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.bool_]]:
        """Entities [R, F], context [C] and legal actions [R + 1] as a learned policy would see them now."""
        if self.ledger.version != self._version:
            self._fit()
        count = len(self._slots)
        entities = np.zeros((count, NUM_ENTITY_FEATURES), np.float32)
        context = np.zeros(NUM_CONTEXT_FEATURES, np.float32)
        legal = np.zeros(count + 1, np.bool_)
        deciding.observe_now(
            self._turns_at,
            prompt_tokens,
            waited_s,
            queue_size,
            now,
            address_of(entities),
            address_of(context),
            address_of(legal),
        )
        return entities, context, legal

    def explain(self) -> dict[str, Any]:
        """The last decision: ask right after `choose`, before anything else is booked.

        `scores`, lowest wins, are null for replicas that may not take the request and for policies that do
        not score; a learned policy has `logits`, highest wins, and one for holding.
        """
        row = self._tables.rows[0]
        count = len(self._slots)
        replicas: list[dict[str, Any]] = []
        for slot in self._slots:
            known = self.ledger.replica_signals(slot)
            replicas.append(
                {"slot": slot, "name": self.ledger.name(slot)} | {name: known[name] for name in EXPLAINED}
            )
        explained: dict[str, Any] = {
            "policy": self.name,
            "action": HOLD if self._action == HOLD else self._slots[self._action - 1] + 1,
            "replica": None if self._action == HOLD else replicas[self._action - 1]["name"],
            "replicas": replicas,
        }
        if self._is_learned:
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
                replica["is_legal"] = bool(self.ledger.signals[ACCEPTING, column] > 0 and score != np.inf)
        return explained
