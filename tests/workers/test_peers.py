"""Messages between two processes."""

from __future__ import annotations

import socket
import threading
from typing import Any, cast

import numpy as np
import pytest

from pointsman.workers.peers import LinkedProcess, WorkerError


class Hesitant:
    """A socket that takes only some bytes of a message at first, as one may when a signal comes."""

    def __init__(self, link: socket.socket, num_bytes: int) -> None:
        self.fileno, self.sendall = link.fileno, link.sendall
        self.link, self.num_bytes = link, num_bytes

    def sendmsg(self, parts: list[Any]) -> int:
        return self.link.send(b"".join(parts)[: self.num_bytes])


@pytest.mark.parametrize("num_bytes", [1, 7, 8, 9, 100, 1 << 20])
def test_messages_arrive_whole_however_they_were_cut(num_bytes: int) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender = LinkedProcess(cast(socket.socket, Hesitant(ours, num_bytes)), "sender")
        receiver = LinkedProcess(theirs, "receiver")
        sent = np.arange(100_000, dtype=np.float32)

        def send() -> None:
            sender.send({"number": num_bytes})
            sender.send_array(sent)
            sender.send_failure("that was all")

        sending = threading.Thread(target=send)
        sending.start()
        received = np.zeros_like(sent)
        assert receiver.receive() == {"number": num_bytes}
        receiver.receive_array(received)
        np.testing.assert_array_equal(received, sent)
        with pytest.raises(WorkerError, match="that was all"):
            receiver.receive_array(received)
        sending.join()
