"""Asks every replica from time to time: are you alive, how busy are you, which models do you serve?"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from time import monotonic
from typing import Any, NamedTuple

from pointsman.router.config import Reliability
from pointsman.router.fetching import FetchError, fetch
from pointsman.router.holding import Dispatcher
from pointsman.router.keys import BACKEND_KEY
from pointsman.router.replicas import Registry, Replica
from pointsman.routing.books import Books

_RUNNING = ("vllm:num_requests_running",)
_WAITING = ("vllm:num_requests_waiting",)
_KV_USE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")  # today's name, and the one before


class Gauges(NamedTuple):
    running: float
    waiting: float
    kv_use: float


class Watch:
    """The background tasks of all replicas: started as they come, ended as they go."""

    def __init__(
        self,
        registry: Registry,
        books: Books,
        dispatcher: Dispatcher,
        settings: Reliability,
        headers: bytes = b"",
    ) -> None:
        self._registry = registry
        self._books = books
        self._dispatcher = dispatcher
        self._settings = settings
        self._headers = headers
        self._tasks: dict[Replica, list[asyncio.Task[None]]] = {}
        self.problems: dict[str, str] = {}  # by replica, what was wrong at the first look
        registry.on_change.append(self._follow)

    async def check_all(self) -> None:
        """Once, before the first request is let in: a replica that is down should not get it."""
        replicas = list(self._registry)
        checks = (self._check(replica, is_first=True) for replica in replicas)
        lists = (self._read_models(replica) for replica in replicas)
        _, problems = await asyncio.gather(asyncio.gather(*checks), asyncio.gather(*lists))
        for replica, problem in zip(replicas, problems, strict=True):
            self._start(replica)
            if replica.problem is not None:
                self.problems[replica.name] = f"{replica.problem}; it gets requests once it is well"
            elif problem is not None:
                self.problems[replica.name] = problem

    def stop(self) -> None:
        for tasks in self._tasks.values():
            for task in tasks:
                task.cancel()
        self._tasks.clear()

    def _follow(self, replica: Replica, what: str) -> None:
        if what == "removed":
            for task in self._tasks.pop(replica, ()):
                task.cancel()
        elif what == "added" and self._tasks:
            self._start(replica)

    def _start(self, replica: Replica) -> None:
        settings = self._settings
        loop = asyncio.get_running_loop()
        self._tasks[replica] = [
            loop.create_task(_every(interval_s, ask, replica))
            for interval_s, ask in (
                (settings.health_interval_s, self._check),
                (settings.scrape_interval_s, self._scrape),
                (settings.models_interval_s, self._read_models),
            )
        ]

    async def _check(self, replica: Replica, *, is_first: bool = False) -> None:
        problem = None
        try:
            answer = await fetch(replica.pool, "/health", self._settings.health_timeout_s, self._headers)
            if answer.status >= 500:  # servers without /health answer 404
                problem = f"answers {answer.status} to /health"
        except FetchError as error:
            problem = f"does not answer ({error})"
        if is_first and problem is not None:
            replica.num_failed_checks = self._settings.health_failures
        self._registry.checked(replica, problem)

    async def _scrape(self, replica: Replica) -> None:
        try:
            answer = await fetch(replica.pool, "/metrics", self._settings.health_timeout_s, self._headers)
        except FetchError:
            return
        gauges = read_gauges(answer.body) if answer.status == 200 else None
        if gauges is not None and replica.slot in self._registry.by_slot:
            self._books.scraped(replica.slot, *gauges, monotonic())
            self._dispatcher.wake()

    async def _read_models(self, replica: Replica) -> str | None:
        """-> what is wrong with the answer."""
        try:
            answer = await fetch(replica.pool, "/v1/models", self._settings.health_timeout_s, self._headers)
        except FetchError as error:
            return f"does not list its models ({error})"
        if answer.status in (401, 403):
            return f"answers {answer.status} to /v1/models; ${BACKEND_KEY} is the key that it gets"
        models = read_models(answer.body) if answer.status == 200 else None
        if models is None:
            return (
                f"lists no models (status {answer.status} of /v1/models); is it an OpenAI-compatible server?"
            )
        self._registry.set_models(replica, models)
        return None


async def _every(interval_s: float, ask: Callable[[Replica], Awaitable[object]], replica: Replica) -> None:
    while True:
        await asyncio.sleep(interval_s)
        await ask(replica)


def read_gauges(text: bytes) -> Gauges | None:
    """From vLLM's /metrics; several engines of a server are added up, their KV use is averaged."""
    running, waiting, kv_use = (_values(text, names) for names in (_RUNNING, _WAITING, _KV_USE))
    if not running or not waiting:
        return None
    return Gauges(sum(running), sum(waiting), sum(kv_use) / len(kv_use) if kv_use else 0.0)


_LOAD_REPORT = re.compile(rb'(kv_cache_usage_perc|num_requests_waiting)"?\s*[=:]\s*([0-9.eE+-]+)')


def read_load(report: bytes) -> tuple[float | None, float | None]:
    """Waiting requests and KV use from the header `endpoint-load-metrics` (ORCA), as TEXT or JSON."""
    found: dict[bytes, float] = {}
    for name, value in _LOAD_REPORT.findall(report):
        with suppress(ValueError):
            found[name] = float(value)
    return found.get(b"num_requests_waiting"), found.get(b"kv_cache_usage_perc")


def _values(text: bytes, names: tuple[str, ...]) -> list[float]:
    for name in names:
        pattern = rb"^" + re.escape(name.encode()) + rb"(?:\{[^\n]*\})? ([0-9.eE+-]+)"
        values = [float(value) for value in re.findall(pattern, text, re.MULTILINE)]
        if values:
            return values
    return []


def read_models(body: bytes) -> dict[str, Any] | None:
    try:
        data = json.loads(body)["data"]
        return {str(model["id"]): model for model in data}
    except (ValueError, TypeError, KeyError):
        return None
