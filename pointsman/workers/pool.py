"""Workers that are called like functions, from several threads."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

from pointsman.workers.peers import LostWorkerError
from pointsman.workers.processes import LaunchedWorker, Launcher

MAX_TRIES = 3  # a call that takes its worker down each time would take down all of them


class WorkerPool:
    def __init__(self, launcher: Launcher, size: int) -> None:
        self.size, self._launcher = size, launcher
        self._workers = list(launcher.launch(size))
        self._free: SimpleQueue[LaunchedWorker] = SimpleQueue()
        for worker in self._workers:
            self._free.put(worker)
        self._is_closed = False

    def call(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """`work(peer, *arguments)` in one of the workers; another one does it again if that one is lost.

        A worker is free again as soon as it has answered. With one thread more than there are workers, none
        of them waits for what is pickled here.
        """
        message = pickle.dumps((work, arguments))
        for tries_left in reversed(range(MAX_TRIES)):
            worker = self._free.get()
            try:
                peer = worker.peer
                peer.send_pickled(message)
                answer = peer.receive_pickled()
                break
            except LostWorkerError:
                if self._is_closed or tries_left == 0:
                    raise
                worker = self._replaced(worker)
            finally:
                self._free.put(worker)
        return peer.unpickled(answer)

    def _replaced(self, worker: LaunchedWorker) -> LaunchedWorker:
        worker.end()
        (new,) = self._launcher.launch(1)
        self._workers[self._workers.index(worker)] = new
        return new

    def close(self) -> None:
        """At once: calls under way fail."""
        self._is_closed = True
        for worker in self._workers:
            worker.end()


@contextmanager
def pool(launcher: Launcher, size: int) -> Iterator[WorkerPool]:
    opened = WorkerPool(launcher, size)
    try:
        yield opened
    finally:
        opened.close()
