"""Asks every replica from time to time: are you alive, how busy are you, which models do you serve?"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from time import monotonic

from pointsman.router.config import Reliability
from pointsman.router.http.fetching import FetchError, OutOfFilesError, fetch
from pointsman.router.keys import BACKEND_KEY
from pointsman.router.replicas.registry import Registry, Replica
from pointsman.router.replicas.reports import read_capacity, read_counters, read_gauges, read_models
from pointsman.routing.books import Books


class HealthWatch:
    """The background tasks of all replicas: started as they come, ended as they go."""

    def __init__(
        self,
        registry: Registry,
        books: Books,
        settings: Reliability,
        wake: Callable[[], None],
        headers: bytes = b"",
    ) -> None:
        """`wake` is called when the books have changed."""
        self._registry = registry
        self._books = books
        self._settings = settings
        self._wake = wake
        self._headers = headers
        self._tasks: dict[Replica, list[asyncio.Task[None]]] = {}
        self._suspected: dict[Replica, asyncio.Task[str | None]] = {}
        self._is_watching = False
        self.problems: dict[str, str] = {}  # by replica, what was wrong at the first look
        registry.on_change.append(self._follow)

    async def check_all(self) -> None:
        """Check every replica before the first request is let in: one that is down should not get it."""
        self._is_watching = True
        replicas = list(self._registry)
        problems = await asyncio.gather(*(self._check(replica, is_first=True) for replica in replicas))
        for replica, problem in zip(replicas, problems, strict=True):
            if not self._registry.has(replica):  # removed meanwhile
                continue
            self._start(replica)
            if replica.problem is not None:
                self.problems[replica.name] = f"{replica.problem}; it gets requests once it is well"
            elif problem is not None:
                self.problems[replica.name] = problem

    def suspect(self, replica: Replica) -> None:
        """It has failed a request: look at once, and if it does not answer now, it is out."""
        if replica not in self._suspected and replica in self._tasks:
            task = asyncio.get_running_loop().create_task(self._check(replica, is_first=True))
            self._suspected[replica] = task
            task.add_done_callback(lambda task: self._suspected.pop(replica, None))

    def stop(self) -> None:
        self._is_watching = False
        for task in list(self._suspected.values()):
            task.cancel()
        for tasks in self._tasks.values():
            for task in tasks:
                task.cancel()
        self._tasks.clear()

    def _follow(self, replica: Replica, what: str) -> None:
        if what == "removed":
            for task in self._tasks.pop(replica, ()):
                task.cancel()
        elif what == "added" and self._is_watching:
            self._tasks[replica] = [asyncio.get_running_loop().create_task(self._begin(replica))]

    async def first_look(self, replica: Replica) -> None:
        """Wait until a replica that was just added has been looked at."""
        if replica.is_new and replica in self._tasks:
            await asyncio.wait(self._tasks[replica], return_when=asyncio.FIRST_COMPLETED)

    async def _begin(self, replica: Replica) -> None:
        await _look(partial(self._check, is_first=replica.is_new), replica)
        if self._registry.has(replica):
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

    async def _check(self, replica: Replica, *, is_first: bool = False) -> str | None:
        """Ask whether it is well. One that has just become so may serve other models than before.

        -> what is wrong with its list of models, if that was read.
        """
        problem = None
        try:
            answer = await fetch(replica.pool, "/health", self._settings.health_timeout_s, self._headers)
            if answer.status >= 500:  # servers without /health answer 404
                problem = f"answers {answer.status} to /health"
        except OutOfFilesError:
            return None
        except FetchError as error:
            problem = f"does not answer ({error})"
        if is_first and problem is not None:
            replica.num_failed_checks = self._settings.health_failures
        about_models = None
        if problem is None and (not replica.is_healthy or replica.models is None):
            about_models = await self._read_models(replica)
        self._registry.checked(replica, problem)
        return about_models

    async def _scrape(self, replica: Replica) -> None:
        try:
            answer = await fetch(replica.pool, "/metrics", self._settings.health_timeout_s, self._headers)
        except FetchError:
            return
        if answer.status != 200 or not self._registry.has(replica):
            return
        capacity = read_capacity(answer.body)
        if capacity is not None:
            self._books.has_capacity(replica.slot, capacity)
        counters = read_counters(answer.body)
        if counters is not None:
            self._books.counted(replica.slot, *counters)
        gauges = read_gauges(answer.body)
        if gauges is not None:
            replica.has_gauges = True
            self._books.scraped(replica.slot, *gauges, monotonic())
            self._wake()

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
        await _look(ask, replica)


async def _look(ask: Callable[[Replica], Awaitable[object]], replica: Replica) -> None:
    try:
        await ask(replica)
    except Exception as error:  # or nobody would ever look at this replica again
        about = {"message": f"a look at {replica.name} failed", "exception": error}
        asyncio.get_running_loop().call_exception_handler(about)
