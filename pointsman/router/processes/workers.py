"""Several processes on one port: who starts them, and starts them again when they die.

Every worker is this command once more, with a seat in its environment. The first is started alone: what is
wrong shows once, and what has to be compiled is compiled once. The kernel spreads connections over them.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pointsman.router.ports import cannot_listen, resolve
from pointsman.router.telemetry.recording import TrafficRecording, new_recording
from pointsman.routing.sharing import SharedBooks

_SEAT = "POINTSMAN_SEAT"
_LOOK_S = 0.05
_QUICK_S = 10.0  # a worker that dies sooner is started again later and later
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.5, 30.0
_GRACE_S = 5.0  # beyond the time to drain


@dataclass(frozen=True)
class Seat:
    """What a worker needs to know of the others."""

    index: int
    count: int
    port: int
    directory: Path
    parent: int  # end of a pipe whose other end closes with the parent
    recording: TrafficRecording | None = None

    @property
    def leads(self) -> bool:
        return self.index == 0

    @property
    def books(self) -> Path:
        return self.directory / "books"

    def shared_books(self) -> SharedBooks:
        return SharedBooks(self.books, num_books(self.count))

    @property
    def leader(self) -> Path:
        return self.directory / "leader"

    @property
    def notes(self) -> Path:
        """What the leader wrote down for the next one."""
        return self.directory / "notes"

    @property
    def ready(self) -> Path:
        """Made when the worker listens."""
        return self.directory / f"ready-{self.index}"

    def to_environment(self) -> dict[str, str]:
        about: dict[str, Any] = {
            "index": self.index,
            "count": self.count,
            "port": self.port,
            "directory": str(self.directory),
            "parent": self.parent,
        }
        if self.recording is not None:
            recording = self.recording
            about["recording"] = [str(recording.path), recording.started_at, recording.salt.hex()]
        return {_SEAT: json.dumps(about)}


def num_books(count: int) -> int:
    """One for each process, and one for what other routers have outstanding."""
    return count + 1


def own_seat() -> Seat | None:
    """The seat of this process; None if it is nobody's worker."""
    if _SEAT not in os.environ:
        return None
    about = json.loads(os.environ[_SEAT])
    recording = about.pop("recording", None)
    if recording is not None:
        path, started_at, salt = recording
        recording = TrafficRecording(Path(path), started_at, bytes.fromhex(salt))
    return Seat(**(about | {"directory": Path(about["directory"])}), recording=recording)


class Worker:
    def __init__(self, seat: Seat, arguments: Sequence[str]) -> None:
        self.seat = seat
        self._command = [sys.executable, "-m", "pointsman", *arguments]
        self._pause_s = _FIRST_PAUSE_S
        self.restart_at = 0.0
        self.start()

    def start(self) -> None:
        self.seat.ready.unlink(missing_ok=True)
        environment = os.environ | self.seat.to_environment()
        self.process = subprocess.Popen(self._command, env=environment, pass_fds=[self.seat.parent])
        self._started_at = time.monotonic()

    def plan_restart(self) -> float:
        """-> in how many seconds."""
        now = time.monotonic()
        is_quick = now - self._started_at < _QUICK_S
        self._pause_s = min(_MAX_PAUSE_S, 2 * self._pause_s) if is_quick else _FIRST_PAUSE_S
        self.restart_at = now + self._pause_s
        return self._pause_s


def supervise(
    arguments: Sequence[str],
    count: int,
    host: str,
    port: int,
    record: Path | None,
    drain_s: float,
    say: Callable[[str], None],
) -> int:
    """Run `count` workers until a signal comes; -> the exit status."""
    reserved = _reserve(host, port)
    recording = new_recording(record) if record is not None else None
    parent_end, our_end = os.pipe()
    is_stopping = False

    def stop(number: int, frame: Any) -> None:
        nonlocal is_stopping
        is_stopping = True

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    with tempfile.TemporaryDirectory(prefix="pointsman-") as name:
        books = SharedBooks(Path(name) / "books", num_books(count))
        workers: list[Worker] = []
        for index in range(count):
            seat = Seat(index, count, reserved.getsockname()[1], Path(name), parent_end, recording)
            workers.append(Worker(seat, arguments))
            while not seat.ready.exists() and not is_stopping:
                status = workers[-1].process.poll()
                if status is not None:  # it has said why
                    _stop(workers, drain_s)
                    return status
                time.sleep(_LOOK_S)
        say(f"{count} processes share the port")
        while not is_stopping:
            time.sleep(_LOOK_S)
            for worker in workers:
                _look_after(worker, books, say)
        _stop(workers, drain_s)
    os.close(our_end)
    return 0


def _look_after(worker: Worker, books: SharedBooks, say: Callable[[str], None]) -> None:
    if worker.restart_at:
        if time.monotonic() >= worker.restart_at:
            worker.restart_at = 0.0
            worker.start()
    elif (status := worker.process.poll()) is not None:
        books.clear(worker.seat.index)
        if worker.seat.leads:  # it has kept the book of other routers
            books.clear(worker.seat.count)
        pause_s = worker.plan_restart()
        say(f"process {worker.seat.index} ended with status {status}: started again in {pause_s:g} s")


def _stop(workers: Sequence[Worker], drain_s: float) -> None:
    for worker in workers:
        if worker.process.poll() is None:
            worker.process.terminate()
    give_up_at = time.monotonic() + drain_s + _GRACE_S
    for worker in workers:
        try:
            worker.process.wait(max(0.0, give_up_at - time.monotonic()))
        except subprocess.TimeoutExpired:
            worker.process.kill()
            worker.process.wait()


def _reserve(host: str, port: int) -> socket.socket:
    """The port, for all workers: bound here, listened on by them."""
    resolve(host, "--host")  # refuses what is none
    family, kind, _, _, address = socket.getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    reserved = socket.socket(family, kind)
    try:
        # Another router that shares its port would share it with us, too.
        with socket.socket(family, kind) as alone:
            alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            alone.bind(address)
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(address)
    except OSError as error:
        reserved.close()
        raise cannot_listen("--port", host, port, error) from None
    return reserved
