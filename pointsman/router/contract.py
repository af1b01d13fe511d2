"""What the data path needs of the book-keeping and of the policy; nothing more passes between them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

NO_SESSION = -1


class Ledger(Protocol):
    """The signal table, kept by what the router sends and sees. Times are of `time.monotonic`."""

    def add(self, name: str, calibration: Mapping[str, Any] | None) -> int:
        """A replica joins; returns its slot."""

    def remove(self, slot: int) -> None: ...

    def set_accepting(self, slot: int, accepting: bool) -> None: ...

    def prompt_length(self, prompt_tokens: int) -> int:
        """An estimated length, corrected by what servers counted of other prompts."""

    def sent(self, slot: int, prompt_tokens: int, now: float, streams: bool, session: int) -> int:
        """Returns the handle of the request. `streams`: its tokens will be seen one by one."""

    def first_token(self, handle: int, now: float) -> None: ...

    def tokens(self, handle: int, count: int, now: float) -> None:
        """More streamed tokens, the first not among them."""

    def finished(
        self, handle: int, now: float, prompt_tokens: int | None, output_tokens: int | None
    ) -> None: ...

    def failed(self, handle: int, now: float) -> None: ...

    def scraped(
        self, slot: int, running: float | None, waiting: float | None, kv_use: float | None, now: float
    ) -> None:
        """A server's own gauges; None: it did not say."""

    def replica_signals(self, slot: int) -> dict[str, float]:
        """What is known of a replica, by the names of signals.py."""


class Decider(Protocol):
    """A policy, at work on the ledger's table."""

    def choose(
        self,
        prompt_tokens: int,
        waited_s: float,
        queue_size: int,
        now: float,
        excluded: Collection[int],
        session: int,
    ) -> int:
        """0 = hold, k = slot k - 1. `queue_size`: requests at the router, this one included."""

    def explain(self) -> dict[str, Any]:
        """The last decision, for people."""


# From the name or path of a policy; raises InputError.
DeciderSource = Callable[[str], Decider]
