"""What a client connection needs of those who answer: the proxy, the admin API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from pointsman.router.messages import Answer, Request

if TYPE_CHECKING:
    from pointsman.router.downstream import ClientConnection


class Job(Protocol):
    """What is being done about a request."""

    def cancel(self) -> None:
        """The client is gone."""

    def pause(self) -> None:
        """The client reads more slowly than we write."""

    def resume(self) -> None: ...


class Service(Protocol):
    is_draining: bool

    def screen(self, request: Request) -> Answer | None:
        """A refusal that needs no body to be read."""

    def handle(self, request: Request, client: ClientConnection) -> Job | None:
        """Answer now (None), or later (a job)."""

    def opened(self, client: ClientConnection) -> None: ...

    def closed(self, client: ClientConnection) -> None: ...
