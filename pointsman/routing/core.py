"""The routing core as a library: for gateways that carry the bytes themselves and want our decisions.

    core = Core(policy="default", replicas=["http://a:8000", "http://b:8000"])
    request = Request(prompt_tokens=812)
    replica = core.decide(request)            # None: hold it, and ask again when something has happened
    ticket = core.sent(request, replica)
    core.first_token(ticket)
    core.tokens(ticket, 1)                    # as they stream in
    core.finished(ticket, prompt_tokens=798, output_tokens=143)   # or core.failed(ticket)
    core.scraped(replica, running=12, waiting=3, kv_use=0.41)     # if you read the servers' metrics

A core belongs to one thread; several threads take turns with a lock around `decide` and `sent` together, and
around every other call. Several processes share what they know by `SharedBooks` in a file that all of them
map: each writes its own book and reads the others', and nobody waits for anybody.

Times are seconds of a clock that only moves forward, `time.monotonic` unless `now` says otherwise.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pointsman.errors import InputError
from pointsman.routing.books import Books
from pointsman.routing.decider import Decider
from pointsman.routing.hashing import PromptHasher
from pointsman.routing.ordering import Order
from pointsman.routing.policy import HoldSpec, PolicySpec
from pointsman.routing.prefixes import NUM_BYTES
from pointsman.routing.records import NEVER, NOBODY, UNKNOWN
from pointsman.routing.sharing import SharedBooks


@dataclass(slots=True)
class Request:
    """A request that needs a replica, as far as a router knows it."""

    prompt_tokens: int  # counted, or `Core.prompt_length` of an estimate
    max_tokens: int = UNKNOWN  # of output, if its client set a limit
    session: int = NOBODY  # `session_number` of whatever names a conversation
    arrived_at: float = field(default_factory=time.monotonic)
    hold_until: float = NEVER  # written by a decision to hold
    size: int = NOBODY  # written when it is first held among others
    prompt: str | Sequence[int] | None = None  # its text or its token ids: what may be cached somewhere
    links: bytes = b""  # of the prompt: written by the first decision, or `links_of_blocks`

    def __post_init__(self) -> None:
        self.prompt_tokens = max(1, self.prompt_tokens)  # a prompt that seems empty has a token, too


def session_number(name: str) -> int:
    """A session as policies know it."""
    return zlib.crc32(name.encode()) >> 1


class Core:
    """Replicas by name, the books about them, and a policy that decides."""

    def __init__(
        self,
        policy: str | PolicySpec = "default",
        replicas: Iterable[str] | Mapping[str, Mapping[str, float] | None] = (),
        *,
        seed: int = 0,
        max_hold_s: float = HoldSpec().max_hold_s,
        overtake_s: float = HoldSpec().overtake_s,
        shared: SharedBooks | None = None,
        index: int = 0,
        prefix_bytes: int = NUM_BYTES,
        now: float | None = None,
    ) -> None:
        """`policy`: a heuristic, `default`, a run directory or a file.

        `replicas`: their names, or for each what is said of its speed and memory (calibration.FIGURES), which
        traffic corrects. `shared`: the books of all processes, ours the one at `index`.
        `prefix_bytes`: memory of the index that says which prompts were sent where; 0: none is kept.
        """
        self._books = Books(now, shared, index, prefix_bytes)
        self._hasher = PromptHasher()
        self._slots: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._tickets: dict[int, int] = {}  # those of the books, which are used again, by our own
        self._started: set[int] = set()  # our own that have their first token
        self._num_tickets = 0
        if isinstance(replicas, str):
            raise InputError("replicas", replicas, "is one name", f"write {[replicas]}")
        known = replicas if isinstance(replicas, Mapping) else dict.fromkeys(replicas)
        for name, figures in known.items():
            self.add(name, figures)
        self._seed, self._max_hold_s, self._overtake_s = seed, max_hold_s, overtake_s
        self.switch(policy)

    @property
    def policy(self) -> str:
        return self._decider.name

    def switch(self, policy: str | PolicySpec) -> None:
        """Another policy from the next decision on; the books stay."""
        self._decider = Decider(self._books, policy, self._seed, self._max_hold_s, self._overtake_s)
        self._order = Order(self._overtake_s, self._max_hold_s, self._decider.small_first)

    # Replicas.

    @property
    def replicas(self) -> tuple[str, ...]:
        return tuple(self._slots)

    def add(self, replica: str, figures: Mapping[str, float] | None = None) -> None:
        if replica in self._slots:
            raise InputError("replica", replica, "is there already", "give every replica a name of its own")
        slot = self._books.add(replica, figures)
        self._slots[replica], self._names[slot] = slot, replica

    def remove(self, replica: str) -> None:
        """It is gone. What is still open there may be finished, and counts for nothing."""
        slot = self._slot(replica)
        self._books.remove(slot)
        del self._slots[replica], self._names[slot]

    def set_accepting(self, replica: str, accepting: bool) -> None:
        """Whether it may get requests: no while it drains or does not answer."""
        self._books.set_accepting(self._slot(replica), accepting)

    # Requests.

    def prompt_length(self, estimate: int) -> int:
        """An estimated length (a quarter of the bytes of English text), corrected by what servers counted."""
        return self._books.prompt_length(estimate)

    def decide(
        self,
        request: Request,
        queue_size: int = 1,
        excluded: Collection[str] = (),
        now: float | None = None,
    ) -> str | None:
        """The replica it should go to. None: hold it for now, or no replica accepts requests.

        `queue_size`: requests at the gateway, this one included; `excluded`: replicas it must not go to,
        because it failed there or they lack its model. A held request is decided anew when something has
        happened (a first token, an end, a scrape), and at least every second.
        """
        if request.prompt is not None and not request.links:
            request.links = self._links(request.prompt, request.prompt_tokens)
        slots = [self._slot(name) for name in excluded]
        action = self._decider.decide(request, queue_size, _clock(now), slots)
        return self._names[action - 1] if action else None

    def observe(
        self, request: Request, queue_size: int = 1, now: float | None = None
    ) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.bool_]]:
        """What a learned policy sees: entities [R, F], context [C], legal actions [R + 1], 0 = hold."""
        return self._decider.observe(request, queue_size, _clock(now))

    def next_of(self, held: Iterable[Request], now: float | None = None) -> Request:
        """Which of the requests that the gateway holds to decide about next: see ordering.py.

        Of two whose turn it is at the same time, the first.
        """
        at = _clock(now)
        waiting = list(held)
        order = self._order.among(len(waiting), self._books.num_accepting, self._books.usual_size)

        def turn_at(request: Request) -> float:
            if request.size == NOBODY:
                request.size = self._books.size_of(request.prompt_tokens, request.max_tokens)
            return order.turn_at(request.arrived_at, request.size, at)

        return min(waiting, key=turn_at)

    def sent(self, request: Request, replica: str, streams: bool = True, now: float | None = None) -> int:
        """-> a ticket for this sending and no other. What is said of it after its end counts for nothing.

        `streams`: its tokens will be seen one by one.
        """
        slot = self._slot(replica)
        booked = self._books.sent(slot, request.prompt_tokens, _clock(now), streams, request.links)
        self._num_tickets += 1
        self._tickets[self._num_tickets] = booked
        return self._num_tickets

    def first_token(self, ticket: int, now: float | None = None) -> None:
        """Once for each ticket: the second time counts for nothing."""
        booked = self._booked(ticket)
        if booked is not None and ticket not in self._started:
            self._started.add(ticket)
            self._books.first_token(booked, _clock(now))

    def tokens(self, ticket: int, count: int, now: float | None = None) -> None:
        """More tokens, the first not among them."""
        booked = self._booked(ticket)
        if booked is not None:
            at = _clock(now)
            self.first_token(ticket, at)  # if nobody has said so
            self._books.tokens(booked, count, at)

    def finished(
        self,
        ticket: int,
        prompt_tokens: int | None = None,
        output_tokens: int | None = None,
        cached_tokens: int | None = None,
        now: float | None = None,
    ) -> None:
        """Tokens as the server counted them, where it did: `usage`, with `prompt_tokens_details`."""
        booked = self._close(ticket)
        if booked is not None:
            self._books.finished(booked, _clock(now), prompt_tokens, output_tokens, cached_tokens)

    def failed(self, ticket: int, now: float | None = None) -> None:
        """Refused, broken off, or given up by its client."""
        booked = self._close(ticket)
        if booked is not None:
            self._books.failed(booked, _clock(now))

    def scraped(
        self,
        replica: str,
        running: float | None = None,
        waiting: float | None = None,
        kv_use: float | None = None,
        now: float | None = None,
    ) -> None:
        """The server's own gauges, as they were at `now`; None: it did not say."""
        self._books.scraped(self._slot(replica), running, waiting, kv_use, _clock(now))

    def counted(self, replica: str, queries: float, hits: float) -> None:
        """The server's counters `vllm:prefix_cache_queries_total` and `vllm:prefix_cache_hits_total`."""
        self._books.counted(self._slot(replica), queries, hits)

    # For people.

    def signals(self, replica: str) -> dict[str, float]:
        """What is known of a replica, by the names of signals.py."""
        return self._books.replica_signals(self._slot(replica))

    def why(self) -> str:
        """The last decision in a sentence: ask right after `decide`."""
        return self._decider.reason().sentence()

    def explain(self) -> dict[str, Any]:
        """Why the last decision was made: ask right after `decide`, before anything else is booked."""
        return self._decider.explain()

    def _links(self, prompt: str | Sequence[int], prompt_tokens: int) -> bytes:
        if isinstance(prompt, str):
            return self._hasher.of_text(prompt.encode(), prompt_tokens)
        return self._hasher.of_tokens(prompt)

    def _booked(self, ticket: int) -> int | None:
        """The ticket of the books; None: the sending is over."""
        if not 0 < ticket <= self._num_tickets:
            raise InputError("ticket", ticket, "was never given", "use what `sent` returns")
        return self._tickets.get(ticket)

    def _close(self, ticket: int) -> int | None:
        booked = self._booked(ticket)
        self._tickets.pop(ticket, None)
        self._started.discard(ticket)
        return booked

    def _slot(self, replica: str) -> int:
        if replica not in self._slots:
            known = ", ".join(self._slots) or "none"
            raise InputError("replica", replica, "is not known", f"known: {known}")
        return self._slots[replica]


def _clock(now: float | None) -> float:
    return time.monotonic() if now is None else now
