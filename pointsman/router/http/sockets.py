"""Socket options that both sides need, and how many sockets there may be."""

from __future__ import annotations

import asyncio
import errno
import resource
import socket
from contextlib import suppress


def no_delay(transport: asyncio.BaseTransport) -> None:
    """Send small pieces at once: with Nagle's algorithm and delayed acknowledgements a token waits 40 ms."""
    sock = transport.get_extra_info("socket")
    if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def raise_file_limit() -> None:
    """Take all the file descriptors that we may have: a stream takes two, and the usual limit is 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):  # some systems name a hard limit that they do not grant
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def is_out_of_files(error: OSError) -> bool:
    """Whether a connection failed for want of a file descriptor: that says nothing of the server."""
    return error.errno in (errno.EMFILE, errno.ENFILE)
