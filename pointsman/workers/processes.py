"""Workers: processes that do what they are sent over their link. A launcher says where they run.

Here are those of this machine; ray_actors.py has those of a Ray cluster. Both run `serve`.
"""

from __future__ import annotations

import math
import multiprocessing
import signal
import socket
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Protocol

from pointsman.workers.peers import LinkedProcess, LostWorkerError

BUFFER_BYTES = 1 << 20  # of a link; the system may allow less


class LaunchedWorker(Protocol):
    peer: LinkedProcess

    def end(self) -> None:
        """Whatever it is doing."""
        ...


class Launcher(Protocol):
    def launch(self, count: int) -> Sequence[LaunchedWorker]:
        """Start workers, named from 1 on; those that cannot be had are a `WorkerError`."""
        ...


@contextmanager
def launched(launcher: Launcher, count: int) -> Iterator[list[LinkedProcess]]:
    """Workers for as long as the block lasts."""
    workers = launcher.launch(count)
    try:
        yield [worker.peer for worker in workers]
    finally:
        for worker in workers:
            worker.end()


def serve(link: socket.socket) -> None:
    """Do `work(peer, *arguments)` for every (work, arguments) that comes, and send back what it returns.

    Until the other end is gone; then the link is closed here, too.
    """
    peer = LinkedProcess(link, "the process that the workers work for", patience_s=math.inf)
    with link, suppress(LostWorkerError):
        while True:
            try:
                work, arguments = peer.receive()
                peer.send(work(peer, *arguments))
            except LostWorkerError:
                raise
            except Exception as error:
                last = traceback.extract_tb(error.__traceback__)[-1]
                peer.send_failure(f"{type(error).__name__}: {error} ({last.filename}:{last.lineno})")


class LocalProcesses:
    """The `Launcher` of this machine."""

    def launch(self, count: int) -> list[LocalWorker]:
        return [LocalWorker(number) for number in range(1, count + 1)]


class LocalWorker:
    def __init__(self, number: int) -> None:
        context = multiprocessing.get_context("spawn")
        mine, theirs = socket.socketpair()
        for end in (mine, theirs):  # room for a message: who sends gradients need not wait for the reader
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        self._process = context.Process(target=_serve_here, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()  # or the link of a dead worker would stay open, and we would wait for it
        self.peer = LinkedProcess(mine, f"worker {number}")

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self.peer.link.close()


def _serve_here(link: socket.socket) -> None:
    """Ctrl-C reaches all processes of a terminal at once; when to stop is for the first of them to say."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    serve(link)
