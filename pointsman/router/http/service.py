"""What a client connection needs of those who answer: the proxy, the admin API."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, Protocol

from pointsman.router.http.messages import Answer, HttpRequest, RequestHead

if TYPE_CHECKING:
    from pointsman.router.http.downstream import ClientConnection


class Job(Protocol):
    """What is being done about a request."""

    def cancel(self) -> None:
        """The client is gone."""

    def pause(self) -> None:
        """The client reads more slowly than we write."""

    def resume(self) -> None: ...


class Service(Protocol):
    is_draining: bool

    def screen(self, head: RequestHead, client: ClientConnection) -> Answer | None:
        """A refusal that needs no body to be read."""

    def handle(self, request: HttpRequest, client: ClientConnection) -> Job | None:
        """Answer now (None), or later (a job)."""

    def opened(self, client: ClientConnection) -> None: ...

    def closed(self, client: ClientConnection) -> None: ...


class Later:
    """The job of an answer that takes a while to work out."""

    def __init__(self, answer: Coroutine[Any, Any, Answer], client: ClientConnection) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(answer, client))

    async def _run(self, answer: Coroutine[Any, Any, Answer], client: ClientConnection) -> None:
        client.answer(await answer)

    def cancel(self) -> None:
        self._task.cancel()

    def pause(self) -> None: ...

    def resume(self) -> None: ...
