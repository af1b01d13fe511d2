"""A request as the books and the counters see it, whoever carries it: an exchange of ours, or Envoy."""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING

from pointsman.router.http.messages import RETRIED_STATUSES, HttpRequest
from pointsman.router.replicas.registry import Replica
from pointsman.router.requests.facts import RequestFacts, read_usage
from pointsman.routing.core import session_number
from pointsman.routing.records import NOBODY

if TYPE_CHECKING:
    from pointsman.router.requests.proxy import Proxy

_DONE = (b"[DONE]\n\n", b"[DONE]\r\n\r\n")
EVENT_END = b"\n\n"


class BookedRequest:
    __slots__ = (
        "_last",
        "_last_but_one",
        "_num_tokens",
        "_proxy",
        "_replica",
        "_status",
        "_streams",
        "_ticket",
        "arrived_at",
        "cached_tokens",
        "decided_by",
        "first_byte_at",
        "generates",
        "held_s",
        "links",
        "max_tokens",
        "model",
        "num_retries",
        "priority",
        "prompt_tokens",
        "replica_name",
        "request",
        "request_id",
        "session",
        "session_name",
    )

    request: HttpRequest
    request_id: str
    model: str | None
    priority: int
    session_name: str | None
    session: int
    generates: bool  # text is asked for
    links: bytes  # of its prompt
    prompt_tokens: int
    max_tokens: int
    arrived_at: float
    held_s: float  # until it was sent to the server that has it; below 0 before that
    replica_name: str
    decided_by: str
    num_retries: int
    first_byte_at: float | None
    cached_tokens: int | None  # of the prompt, if the server told
    _proxy: Proxy
    _replica: Replica | None  # that has it, or has answered it
    _ticket: int  # in the books
    _streams: bool  # whether its tokens will be seen one by one
    _status: int
    _num_tokens: int  # of the answer, as far as they were counted
    _last: bytes  # of its body
    _last_but_one: bytes

    def check(self, now: float) -> None:
        """Called a few times a second."""

    def give_up(self) -> None:
        """The router stops before the answer has come."""

    def _take(self, facts: RequestFacts) -> None:
        """What is known of it from now on, with the length of its prompt as the books correct it."""
        proxy = self._proxy
        self.model, self.priority, self.max_tokens = facts.model, facts.priority, facts.max_tokens
        self.generates, self._streams = facts.generates, facts.is_stream
        estimate = facts.prompt_tokens
        self.prompt_tokens = estimate if facts.is_counted else proxy.books.prompt_length(estimate)
        hash_prompt = proxy.hash_prompt
        first_mark, second_mark = facts.marks
        self.links = b""
        if hash_prompt is not None:
            self.links = hash_prompt(facts.text, self.prompt_tokens, first_mark, second_mark)
        self.session_name = facts.session
        self.session = session_number(facts.session) if facts.session else NOBODY

    def _book(self, replica: Replica, now: float) -> None:
        self._replica, self.replica_name = replica, replica.name
        self.held_s = now - self.arrived_at
        books = self._proxy.books
        self._ticket = books.sent(replica.slot, self.prompt_tokens, now, self._streams, self.links)
        self._proxy.registry.booked(replica, self._ticket, now)

    def _count(self, data: bytes, now: float) -> None:
        """Events of the stream are tokens, but for the first of a chat (its role) and the last (`[DONE]`).

        JSON has no raw line breaks, so that an empty line is the end of an event and nothing else.
        """
        num_events = data.count(EVENT_END) or data.count(b"\r\n\r\n")
        if data.endswith(_DONE):
            num_events -= 1
        if self.first_byte_at is None:
            self.first_byte_at = now
            self._num_tokens = -1 if self.request.head.path.endswith(b"/chat/completions") else 0
            self._proxy.books.first_token(self._ticket, now)
            self._proxy.dispatcher.wake()
        num_before = self._num_tokens
        self._num_tokens = num_after = num_before + num_events
        num_more = num_events if num_before > 0 else num_after - 1  # the first is booked already
        if num_more > 0:
            self._proxy.books.tokens(self._ticket, num_more, now)

    def _tail(self) -> bytes:
        """The end of the answer, where servers tell what it took."""
        return self._last_but_one[-4096:] + self._last[-8192:]

    def _completed(self, tail: bytes) -> None:
        """All of the answer is there."""
        proxy, replica, status = self._proxy, self._replica, self._status
        now = monotonic()
        prompt_tokens, output_tokens, self.cached_tokens = read_usage(tail)
        if replica is not None:
            if status < 400:
                proxy.books.finished(self._ticket, now, prompt_tokens, output_tokens, self.cached_tokens)
            else:
                proxy.books.failed(self._ticket, now)
            proxy.registry.released(replica, self._ticket, has_succeeded=status not in RETRIED_STATUSES)
        if output_tokens is None:
            output_tokens = max(0, self._num_tokens)
        outcome = "completed" if status < 400 else "error"
        proxy.ended(self, status, outcome, prompt_tokens or self.prompt_tokens, output_tokens, now)

    def _let_go(self, now: float) -> None:
        """The books of the replica are closed without a result."""
        replica, self._replica = self._replica, None
        if replica is not None:
            self._proxy.books.failed(self._ticket, now)
            self._proxy.registry.released(replica, self._ticket, has_succeeded=False)
            self._proxy.dispatcher.wake()

    def _ended(self, status: int, outcome: str, now: float) -> None:
        """There is no complete answer."""
        self._proxy.ended(self, status, outcome, self.prompt_tokens, max(0, self._num_tokens), now)
