"""What arrives in one turn of the loop is worked on in a row, after all of it has been read.

Between two system calls the processor has forgotten much of the way through the interpreter: a busy router
spends a quarter less on the same work if it does all the reading first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from weakref import WeakKeyDictionary


class Turn:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._call_soon = loop.call_soon
        self._on_error = loop.call_exception_handler
        self._arrived: list[tuple[Callable[[bytes], None], asyncio.Transport, bytes]] = []

    def add(self, work: Callable[[bytes], None], transport: asyncio.Transport, data: bytes) -> None:
        if not self._arrived:
            self._call_soon(self.finish)
        self._arrived.append((work, transport, data))

    def finish(self) -> None:
        """Now, because something else has happened that must not overtake the data."""
        arrived, self._arrived = self._arrived, []
        for work, transport, data in arrived:
            try:
                work(data)
            except Exception as error:  # as the loop itself would do
                transport.abort()
                self._on_error({"message": "data could not be handled", "exception": error})


_turns: WeakKeyDictionary[asyncio.AbstractEventLoop, Turn] = WeakKeyDictionary()


def this_turn() -> Turn:
    """Of the running loop."""
    loop = asyncio.get_running_loop()
    turn = _turns.get(loop)
    if turn is None:
        turn = _turns[loop] = Turn(loop)
    return turn
