"""The service on the public port: what is answered here, and what goes to a replica."""

from __future__ import annotations

import math
import re
import resource
import secrets
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any

import numpy as np

from pointsman.router.config import Settings
from pointsman.router.http.downstream import ClientConnection
from pointsman.router.http.messages import (
    HOP_BY_HOP,
    Answer,
    HttpRequest,
    RequestHead,
    forwarded_headers,
    json_answer,
    refusal,
)
from pointsman.router.http.service import Job, Later
from pointsman.router.keys import Keys
from pointsman.router.logs import Log
from pointsman.router.replicas.registry import Registry
from pointsman.router.requests.booked import BookedRequest
from pointsman.router.requests.decisions import DecisionMaker
from pointsman.router.requests.exchange import Exchange
from pointsman.router.requests.facts import RequestFacts, Wish, read_facts, read_wish
from pointsman.router.requests.holding import Dispatcher
from pointsman.router.telemetry.ended import MAX_ENDED, EndedRequests
from pointsman.router.telemetry.exposition import Exposition
from pointsman.router.telemetry.metrics import LATENCY_S, NO_POLICY, NO_REPLICA, Metrics
from pointsman.router.telemetry.recording import Recorder, Speed
from pointsman.routing.books import Books
from pointsman.routing.hashing import PromptHasher

_METRICS = b"/metrics"
_OPEN_PATHS = (b"/health", _METRICS)  # no key needed
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}\Z")
_OWN = frozenset(
    (
        b"host",
        b"content-length",
        b"expect",
        b"accept-encoding",  # a compressed answer could not be read for its usage
        b"x-request-id",
        b"x-pointsman-priority",
        b"x-pointsman-decision",
    )
)
_NO_LEADER = refusal(503, "the process that counts for all does not answer; ask again", "server_error")
_SAY_AGAIN_S = 10.0
_LATENCY_S = np.array(LATENCY_S, np.float64)
_PROMETHEUS = b"text/plain; version=0.0.4; charset=utf-8"


class Proxy:
    TOO_LATE = "timed out"

    def __init__(
        self,
        settings: Settings,
        books: Books,
        registry: Registry,
        decisions: DecisionMaker,
        dispatcher: Dispatcher,
        metrics: Metrics,
        exposition: Exposition,
        log: Log,
        keys: Keys,
        recorder: Recorder | None = None,
        backend_key: str | None = None,
    ) -> None:
        self.settings = settings
        self.books = books
        self.registry = registry
        self.decisions = decisions
        self.dispatcher = dispatcher
        self.metrics = metrics
        self.is_draining = False
        self.ask_leader: Callable[[], Awaitable[bytes | None]] | None = None  # for metrics of all processes
        self.clients: set[ClientConnection] = set()
        self.active: set[BookedRequest] = set()
        self._ended = EndedRequests()
        self._exposition = exposition
        self._log = log
        self._keys = keys
        self._recorder = recorder
        # A key of ours is no business of the replicas.
        replaces_key = bool(keys) or backend_key is not None
        self._dropped = HOP_BY_HOP | _OWN | ({b"authorization"} if replaces_key else set())
        self._added = b"authorization: Bearer %b\r\n" % backend_key.encode() if backend_key else b""
        if settings.reliability.asks_for_load:
            self._dropped |= {b"endpoint-load-metrics-format"}
            self._added += b"endpoint-load-metrics-format: TEXT\r\n"
        is_hashed = settings.prefix_index_mib > 0 or recorder is not None
        self.hash_prompt = PromptHasher().of_text if is_hashed else None
        self._id_prefix = secrets.token_hex(4)
        self._ids = count(1)
        self._files_said_at = -math.inf
        self._local: dict[bytes, Callable[[], Answer]] = {
            b"/health": self._health,
            _METRICS: self._metrics,
            b"/v1/models": self._models,
        }

    # --- what client connections say ---

    def screen(self, head: RequestHead, client: ClientConnection) -> Answer | None:
        if not head.target.startswith(b"/"):
            return refusal(400, "the request target is not a path")
        if head.path in _OPEN_PATHS:
            return None
        answer = self._keys.refusal(head, client.address, self._log)
        if answer is not None:
            self.metrics.requests[NO_REPLICA, NO_POLICY, answer.status] += 1
        return answer

    def handle(self, request: HttpRequest, client: ClientConnection) -> Job | None:
        head = request.head
        local = self._local.get(head.path)
        if local is not None:
            if head.method not in (b"GET", b"HEAD"):
                client.answer(refusal(405, "read only").with_header(b"allow", b"GET, HEAD"))
            elif head.path == _METRICS and self.ask_leader is not None:
                return Later(self._all_metrics(self.ask_leader), client)
            else:
                client.answer(local())
            return None
        wish = head.wish
        if wish is None:
            passed_on = b"".join(forwarded_headers(head.headers, self._dropped)) + self._added
            wish = head.wish = read_wish(head, passed_on)
        facts = read_facts(wish, request.body)
        if not isinstance(facts, RequestFacts):
            self.metrics.requests[NO_REPLICA, NO_POLICY, facts.status] += 1
            client.answer(facts.with_header(b"x-request-id", self.id_of(wish).encode()))
            return None
        exchange = Exchange(self, client, request, facts)
        self.active.add(exchange)
        self.dispatcher.submit(exchange)
        return exchange

    def opened(self, client: ClientConnection) -> None:
        self.clients.add(client)
        self.metrics.num_clients += 1

    def closed(self, client: ClientConnection) -> None:
        self.clients.discard(client)
        self.metrics.num_clients -= 1

    # --- what exchanges say ---

    def id_of(self, wish: Wish) -> str:
        """The id that the client gave its request, or one of ours where that cannot be one."""
        if wish.request_id is not None and _REQUEST_ID.match(wish.request_id):
            return wish.request_id.decode()
        return f"{self._id_prefix}-{next(self._ids)}"

    def ended(
        self,
        request: BookedRequest,
        status: int,
        outcome: str,
        prompt_tokens: int,
        output_tokens: int,
        now: float,
    ) -> None:
        """The client has its answer, or will not get one.

        `count` does the rest: at the next tick, and before anybody reads the metrics.
        """
        self.active.discard(request)
        if self.dispatcher.num_held:
            self.dispatcher.wake()
        if self._ended.add(request, status, outcome, prompt_tokens, output_tokens, now) == MAX_ENDED:
            self.count()

    def is_out_of_files(self, now: float) -> None:
        """A server could not be dialled for want of a file descriptor: say so once in a while."""
        if now >= self._files_said_at + _SAY_AGAIN_S:
            self._files_said_at = now
            self._log.event("no file descriptor left", limit=resource.getrlimit(resource.RLIMIT_NOFILE)[0])

    def count(self) -> None:
        """Metrics, log and record of what has happened. After each exchange this would take twice as long as
        for some in a row."""
        self.decisions.count()
        if not len(self._ended):
            return
        ended, self._ended = self._ended, EndedRequests()
        for kind, totals in ended.tallies(_LATENCY_S):
            self.metrics.answered(kind, totals)
        self._log.requests(ended)
        if self._recorder is not None:
            self._recorder.add(ended, self._speed)

    def _speed(self, name: str) -> Speed:
        """What a replica's speed is taken to be; it may be gone."""
        replica = next((one for one in self.registry if one.name == name), None)
        if replica is None:
            return Speed(None, None, None, None)
        error = self.books.estimate(replica.slot).error
        return Speed(*self.books.speeds(replica.slot), error if math.isfinite(error) else None)

    # --- what the clock says ---

    def tick(self, now: float) -> None:
        for client in list(self.clients):
            client.check(now)
        for request in list(self.active):
            request.check(now)
        self.dispatcher.tick(now)
        self.registry.tick(now)
        self.count()
        self._log.flush()
        if self._recorder is not None:
            self._recorder.flush()
            if num_lost := self._recorder.take_lost():
                self._log.event("requests not recorded", count=num_lost)

    # --- answered here ---

    def _health(self) -> Answer:
        is_up = bool(self.registry.accepting) and not self.is_draining
        about = {"status": "ok" if is_up else "draining" if self.is_draining else "no replica"}
        return json_answer(about | {"replicas": len(self.registry.accepting)}, 200 if is_up else 503)

    def exposition_text(self) -> bytes:
        self.count()
        return self._exposition.text()

    def _metrics(self) -> Answer:
        return Answer(200, self.exposition_text(), _PROMETHEUS)

    async def _all_metrics(self, ask: Callable[[], Awaitable[bytes | None]]) -> Answer:
        text = await ask()
        return _NO_LEADER if text is None else Answer(200, text, _PROMETHEUS)

    def _models(self) -> Answer:
        """All models of all replicas, each once."""
        models: dict[str, Any] = {}
        for replica in self.registry:
            models = (replica.models or {}) | models
        return json_answer({"object": "list", "data": list(models.values())})
