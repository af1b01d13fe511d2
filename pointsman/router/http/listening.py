"""A port, and a connection for everybody who comes to it."""

from __future__ import annotations

import asyncio
import ssl

from pointsman.router.http.downstream import ClientConnection
from pointsman.router.http.limits import Limits
from pointsman.router.http.service import Service
from pointsman.router.http.tls import tls_options

_BACKLOG = 1024


async def listen(
    service: Service,
    limits: Limits,
    host: str,
    port: int,
    tls: ssl.SSLContext | None = None,
    *,
    shares_port: bool = False,
) -> asyncio.Server:
    """`port` 0: any that is free. `shares_port`: other processes listen there, too."""
    return await asyncio.get_running_loop().create_server(
        lambda: ClientConnection(service, limits),
        host,
        port,
        backlog=_BACKLOG,
        reuse_port=shares_port,
        **tls_options(tls, limits),
    )


def port_of(server: asyncio.Server) -> int:
    return int(server.sockets[0].getsockname()[1])
