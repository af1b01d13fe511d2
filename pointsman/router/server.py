"""The router as a whole: sockets, the clock, and an orderly end."""

from __future__ import annotations

import asyncio
import math
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import TextIO

from pointsman.router.config import Backend, Settings
from pointsman.router.http.listening import listen, port_of
from pointsman.router.http.service import Service
from pointsman.router.keys import Keys
from pointsman.router.logs import Log
from pointsman.router.replicas.health import HealthWatch
from pointsman.router.replicas.registry import Registry, Replica
from pointsman.router.requests.decisions import DecisionMaker
from pointsman.router.requests.holding import Dispatcher
from pointsman.router.requests.proxy import Proxy
from pointsman.router.telemetry.exposition import Exposition
from pointsman.router.telemetry.history import History
from pointsman.router.telemetry.metrics import Metrics
from pointsman.router.telemetry.recording import Recorder
from pointsman.routing.books import Books
from pointsman.routing.decider import DeciderSource

_TICK_S = 0.25
_FLUSH_S = 1.0  # for the last bytes of answers to leave


@dataclass(frozen=True)
class Parts:
    """What a router is made of, besides its settings."""

    books: Books
    deciders: DeciderSource
    log_to: TextIO
    policy: str = "default"
    shadow: str | None = None
    keys: Keys = field(default_factory=lambda: Keys([]))
    recorder: Recorder | None = None
    backend_key: str | None = None
    backend_ca: Path | None = None
    logs_requests: bool = True


class Router:
    def __init__(self, parts: Parts, settings: Settings, backends: Sequence[Backend] = ()) -> None:
        self.settings = settings
        self.books = parts.books
        self.log = Log(parts.log_to, has_requests=parts.logs_requests)
        self._metrics = Metrics()
        self.registry = Registry(parts.books, settings, parts.backend_ca)
        for backend in backends:
            self.registry.add(backend)
        self.decisions = DecisionMaker(
            self.registry,
            parts.deciders,
            parts.policy,
            parts.shadow,
            settings.reliability,
            self._metrics,
            self.log,
        )
        self.dispatcher = Dispatcher(
            parts.books, self.registry, self.decisions, settings.holding, self._metrics
        )
        key_header = (
            b"authorization: Bearer %b\r\n" % parts.backend_key.encode() if parts.backend_key else b""
        )
        self.watch = HealthWatch(
            self.registry, parts.books, settings.reliability, self.dispatcher.wake, key_header
        )
        self.proxy = Proxy(
            settings,
            parts.books,
            self.registry,
            self.decisions,
            self.dispatcher,
            self._metrics,
            Exposition(self._metrics, self.registry, parts.books, self.decisions),
            self.log,
            parts.keys,
            parts.recorder,
            parts.backend_key,
        )
        self.history = History(self._metrics, self.registry, monotonic())
        self.on_tick: list[Callable[[float], None]] = [self.proxy.tick, self.history.tick]
        self.registry.on_change.append(self._log_change)
        self.registry.on_change.append(lambda replica, what: self.metrics.follow(replica.name, what))
        self._server: asyncio.Server | None = None
        self._ticking: asyncio.Task[None] | None = None

    @property
    def metrics(self) -> Metrics:
        """The counters, up to this moment."""
        self.proxy.count()
        return self._metrics

    async def start(
        self,
        host: str,
        port: int,
        shares_port: bool = False,
        tls: ssl.SSLContext | None = None,
        service: Service | None = None,
    ) -> int:
        """Returns the port, which was free to choose if 0 was given. `service`: in place of the proxy."""
        await self.watch.check_all()
        self._server = await listen(
            service or self.proxy, self.settings.limits, host, port, tls, shares_port=shares_port
        )
        self._ticking = asyncio.get_running_loop().create_task(self._tick())
        return port_of(self._server)

    async def stop(self) -> None:
        """Take no new connections, finish what has begun, then close. What takes too long is given up."""
        proxy = self.proxy
        proxy.is_draining = True
        self.log.event("draining", requests=len(proxy.active))
        if self._server is not None:
            self._server.close()
        for client in list(proxy.clients):
            client.close_if_idle()
        give_up_at = monotonic() + self.settings.limits.drain_timeout_s
        while proxy.active and monotonic() < give_up_at:
            await asyncio.sleep(0.02)
        for exchange in list(proxy.active):
            exchange.give_up()
        await self._close()

    async def _close(self) -> None:
        self.watch.stop()
        if self._ticking is not None:
            self._ticking.cancel()
        for replica in self.registry:
            replica.pool.close()
        clients = self.proxy.clients
        for client in list(clients):
            client.close()
        flushed_by = monotonic() + _FLUSH_S
        while clients and monotonic() < flushed_by:
            await asyncio.sleep(0.005)
        for client in list(clients):
            client.abort()
        await asyncio.sleep(0)
        self.proxy.tick(monotonic())
        self.log.event("stopped")

    async def _tick(self) -> None:
        limits, hedge_after_s = self.settings.limits, self.settings.reliability.hedge_after_s
        shortest_s = min(
            limits.request_timeout_s,
            limits.first_byte_timeout_s,
            limits.idle_timeout_s,
            math.inf if hedge_after_s is None else hedge_after_s,
        )
        while True:
            await asyncio.sleep(min(_TICK_S, shortest_s / 4))
            now = monotonic()
            try:
                for listener in self.on_tick:
                    listener(now)
            except Exception as error:  # without a clock nothing would ever time out
                about = {"message": "a tick failed", "exception": error}
                asyncio.get_running_loop().call_exception_handler(about)

    def _log_change(self, replica: Replica, what: str) -> None:
        why = {"problem": replica.problem} if what == "unhealthy" else {}
        self.log.event("replica", replica=replica.name, what=what, **why)
