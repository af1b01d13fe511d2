"""The gRPC services of an endpoint picker: external processing for Envoy, and the health of the picker.

The protocol is that of the Gateway API Inference Extension, its docs/proposals/004-endpoint-picker-protocol.
"""

from __future__ import annotations

import asyncio
import ssl

from pointsman.router.epp.answers import more_time
from pointsman.router.epp.endpoints import Endpoints
from pointsman.router.epp.grpc import NOT_FOUND, Call, GrpcConnection, Stream
from pointsman.router.epp.pick import OVER, Pick
from pointsman.router.epp.wire import SERVICE, HealthCheckRequest, HealthCheckResponse, ProcessingRequest
from pointsman.router.http.listening import port_of
from pointsman.router.http.tls import tls_options
from pointsman.router.server import Router

LIVENESS, READINESS = "liveness", "readiness"
SERVING, NOT_SERVING = 1, 2
PROCESS = f"/{SERVICE}/Process".encode()
CHECK = b"/grpc.health.v1.Health/Check"
_SPARE_S = 5.0  # what Envoy grants a held request beyond `holding.max_hold_s`
_GOODBYE_S = 0.05


class Picker:
    def __init__(self, router: Router) -> None:
        self._router = router
        self._endpoints = Endpoints(router.registry, router.log)
        self._more_time = more_time(router.settings.holding.max_hold_s + _SPARE_S)
        self._connections: set[GrpcConnection] = set()
        self._is_open = False

    async def start(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> int:
        """-> the port, which was free to choose if 0 was given."""
        await self._endpoints.resolved()
        self._server = await asyncio.get_running_loop().create_server(
            lambda: GrpcConnection(self._call, self._connections),
            host,
            port,
            **tls_options(tls, self._router.settings.limits),
        )
        self._is_open = True
        return port_of(self._server)

    def stop(self) -> None:
        """Say that it is not ready any more; what has begun goes on until the router has drained."""
        self._is_open = False

    async def close(self) -> None:
        self._server.close()
        for connection in list(self._connections):
            connection.close()
        await asyncio.sleep(_GOODBYE_S)

    def is_serving(self, service: str) -> bool | None:
        """None: there is no such service."""
        if service == LIVENESS:
            return True
        if service not in ("", READINESS, SERVICE):
            return None
        return self._is_open and bool(self._router.registry.accepting)

    def _call(self, path: bytes, stream: Stream) -> Call | None:
        if path == PROCESS:
            return _Processing(Pick(self._router, self._endpoints), stream, self._more_time)
        return _HealthCheck(self, stream) if path == CHECK else None


class _Processing:
    """One request of a client, as long as Envoy has something to tell of it."""

    def __init__(self, pick: Pick, stream: Stream, more_time: bytes) -> None:
        self._pick = pick
        self._stream = stream
        self._more_time = more_time
        self._is_waiting = False  # its request is held, or was

    def hear(self, message: bytes) -> None:
        for answer in self._pick.hear(ProcessingRequest.FromString(message)):
            self._stream.say(answer)
        if self._pick.decided is not None and not self._is_waiting:
            self._is_waiting = True
            self._stream.say(self._more_time)
            self._pick.decided.add_done_callback(self._on_decided)
        elif self._pick.state == OVER:
            self._stream.end()

    def hung_up(self) -> None:
        self._pick.hung_up()
        self._stream.end()

    def _on_decided(self, decided: asyncio.Future[None]) -> None:
        for answer in self._pick.verdict():
            self._stream.say(answer)
        if self._pick.state == OVER:
            self._stream.end()


class _HealthCheck:
    def __init__(self, picker: Picker, stream: Stream) -> None:
        self._picker = picker
        self._stream = stream

    def hear(self, message: bytes) -> None:
        is_serving = self._picker.is_serving(HealthCheckRequest.FromString(message).service)
        if is_serving is None:
            self._stream.end(NOT_FOUND)
        else:
            response = HealthCheckResponse(status=SERVING if is_serving else NOT_SERVING)
            self._stream.say(response.SerializeToString())
            self._stream.end()

    def hung_up(self) -> None:
        pass
