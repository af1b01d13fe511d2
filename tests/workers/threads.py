"""Workers in threads of this process: they answer at once, and a test can look into them."""

from __future__ import annotations

import socket
import threading

from pointsman.workers.peers import LinkedProcess
from pointsman.workers.processes import serve


class ThreadWorker:
    def __init__(self, number: int) -> None:
        mine, theirs = socket.socketpair()
        threading.Thread(target=serve, args=(theirs,), daemon=True).start()
        self.peer = LinkedProcess(mine, f"worker {number}")

    def end(self) -> None:
        self.peer.link.close()


class Threads:
    """A `Launcher`."""

    def __init__(self) -> None:
        self.num_launched = 0

    def launch(self, count: int) -> list[ThreadWorker]:
        self.num_launched += count
        return [ThreadWorker(number) for number in range(1, count + 1)]
