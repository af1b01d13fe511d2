"""What arrives in one pass of the event loop is read first, all of it, and then worked on in a row.

Between two system calls the processor forgets much of the way through the interpreter. What this and other
shortcuts of the data path gain is in docs/results/speed.md.
"""

from __future__ import annotations

import asyncio
from typing import Protocol
from weakref import WeakKeyDictionary


class Reader(Protocol):
    def read(self, data: bytes) -> None: ...

    def abort(self) -> None: ...


class Inbox:
    """The data of all connections that nobody has worked on yet, in the order of its arrival."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.arrived: list[tuple[Reader, bytes]] = []  # whoever adds the first calls `plan`

    def plan(self) -> None:
        """Empty it when the loop has read all that has come."""
        self._loop.call_soon(self.empty)

    def empty(self) -> None:
        """Hand everything to its reader.

        Also called when something else happens to a connection, which must not overtake its data.
        """
        arrived, self.arrived = self.arrived, []
        for reader, data in arrived:
            try:
                reader.read(data)
            except Exception as error:  # what the loop itself does
                self._loop.call_exception_handler({"message": "cannot handle data", "exception": error})
                reader.abort()


_inboxes: WeakKeyDictionary[asyncio.AbstractEventLoop, Inbox] = WeakKeyDictionary()


def running_inbox() -> Inbox:
    """The inbox of the running loop."""
    loop = asyncio.get_running_loop()
    inbox = _inboxes.get(loop)
    if inbox is None:
        inbox = _inboxes[loop] = Inbox(loop)
    return inbox
