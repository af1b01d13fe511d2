"""The gRPC services of an endpoint picker: external processing for Envoy, and the health of the picker.

The protocol is that of the Gateway API Inference Extension, its docs/proposals/004-endpoint-picker-protocol.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from pointsman.errors import InputError
from pointsman.router.epp.answers import more_time
from pointsman.router.epp.endpoints import Endpoints
from pointsman.router.epp.pick import OVER, Pick
from pointsman.router.epp.wire import SERVICE, ProcessingRequest
from pointsman.router.server import Router

LIVENESS, READINESS = "liveness", "readiness"
_SPARE_S = 5.0  # what Envoy grants a held request beyond `holding.max_hold_s`
_GOODBYE_S = 1.0


class Picker:
    def __init__(
        self, router: Router, host: str, port: int, tls: tuple[Path, Path | None] | None = None
    ) -> None:
        """`tls`: files of the certificate and its key; no key: it is in the same file."""
        self._router = router
        self._endpoints = Endpoints(router.registry, router.log)
        self._more_time = more_time(router.settings.holding.max_hold_s + _SPARE_S)
        self._address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._tls = tls
        self._is_open = False

    async def start(self) -> int:
        """-> the port."""
        options = [("grpc.max_receive_message_length", -1), ("grpc.so_reuseport", 0)]
        self._server = grpc.aio.server(options=options)
        process = grpc.stream_stream_rpc_method_handler(self._process, ProcessingRequest.FromString, None)
        handler = grpc.method_handlers_generic_handler(SERVICE, {"Process": process})
        self._server.add_generic_rpc_handlers((handler,))
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        try:
            port = self._listen()
        except RuntimeError:
            problem = "cannot listen"
            raise InputError("--port", self._address, problem, "name another port or address") from None
        await self._server.start()
        self._is_open = True
        self._router.registry.on_change.append(lambda replica, what: self._plan_health())
        await self._say_health()
        return port

    async def stop(self) -> None:
        """Take no new requests; those that have begun go on until the router has drained."""
        self._is_open = False
        await self._say_health()

    async def close(self) -> None:
        await self._server.stop(_GOODBYE_S)

    def _listen(self) -> int:
        if self._tls is None:
            return int(self._server.add_insecure_port(self._address))
        cert, key = self._tls
        pair = ((key or cert).read_bytes(), cert.read_bytes())
        return int(self._server.add_secure_port(self._address, grpc.ssl_server_credentials((pair,))))

    async def _process(self, requests: Any, context: Any) -> None:
        """One request of a client, as long as Envoy has something to tell of it."""
        pick = Pick(self._router, self._endpoints)
        try:
            while (message := await context.read()) is not grpc.aio.EOF:
                for answer in pick.hear(message):
                    await context.write(answer)
                if pick.decided is not None:
                    await context.write(self._more_time)
                    await pick.decided
                    pick.decided = None
                    for answer in pick.verdict():
                        await context.write(answer)
                if pick.state == OVER:
                    return
        finally:
            pick.hung_up()

    def _plan_health(self) -> None:
        self._saying = asyncio.get_running_loop().create_task(self._say_health())

    async def _say_health(self) -> None:
        is_ready = self._is_open and bool(self._router.registry.accepting)
        states = health_pb2.HealthCheckResponse
        ready = states.SERVING if is_ready else states.NOT_SERVING
        for service, state in (("", ready), (READINESS, ready), (SERVICE, ready), (LIVENESS, states.SERVING)):
            await self._health.set(service, state)
