"""The HTTP port of a picker."""

from __future__ import annotations

from pointsman.router.http.downstream import ClientConnection
from pointsman.router.http.messages import Answer, HttpRequest, RequestHead, refusal
from pointsman.router.http.service import Job
from pointsman.router.requests.proxy import Proxy


class StatusOnly:
    """/health and /metrics. A picker carries no requests itself."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy
        self.is_draining = False

    def screen(self, head: RequestHead, client: ClientConnection) -> Answer | None:
        if head.path not in (b"/health", b"/metrics"):
            return refusal(404, "this is an endpoint picker: here are /health and /metrics")
        return self._proxy.screen(head, client)

    def handle(self, request: HttpRequest, client: ClientConnection) -> Job | None:
        return self._proxy.handle(request, client)

    def opened(self, client: ClientConnection) -> None:
        self._proxy.opened(client)

    def closed(self, client: ClientConnection) -> None:
        self._proxy.closed(client)
