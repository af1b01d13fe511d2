"""Socket options that both sides need."""

from __future__ import annotations

import asyncio
import socket


def no_delay(transport: asyncio.BaseTransport) -> None:
    """Send small pieces at once: with Nagle's algorithm and delayed acknowledgements a token waits 40 ms."""
    sock = transport.get_extra_info("socket")
    if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
