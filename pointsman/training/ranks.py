"""Data-parallel training on one machine: W processes with the same parameters and environments of their own.

Rank 0 is the process that was started; it also evaluates, writes and talks. Two collectives suffice:
`gather` (small Python values) and `average_` (float32 arrays). All ranks make the same calls in the same
order.

Why not torch.distributed: gloo takes 1.8 ms on loopback for 25,000 gradients, and leaves the
others hanging when a rank dies. Shared memory with a message each way takes 0.25 ms, sleeps while it waits,
and a closed pipe is noticed at once. Sums run over the ranks in the same order everywhere, so all ranks hold
the same bits.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

PATIENCE_S = 600.0  # an evaluation on rank 0 may take minutes; a rank that hangs longer will not come back
GRACE_S = 1.0  # for a rank to notice that rank 0 has ended
BUFFER_FLOATS = 1 << 17  # larger arrays are averaged in pieces

V = TypeVar("V")


class RankError(RuntimeError):
    """A rank is gone; the run cannot go on, but its last checkpoint can be resumed."""


class _Failure(NamedTuple):
    """What a rank sends instead of a value when it fails."""

    text: str


class Ranks:
    """One process's view of all of them."""

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        links: Sequence[Connection] = (),
        memory: Any = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.rank = rank
        self.size = size
        # Rank 0 has a link to each other rank, in order; the others have one, to rank 0.
        self._links = dict(enumerate(links, start=1)) if rank == 0 else {0: links[0]}
        self.patience_s = patience_s
        self._num_averaged = 0
        if memory is not None:
            # Two halves in turn: whoever fills one has seen everybody done with reading it the time before.
            self._halves = np.frombuffer(memory, np.float32).reshape(2, size, -1)

    def gather(self, value: V) -> list[V]:
        """The values of all ranks, in order of rank, at every rank."""
        if self.size == 1:
            return [value]
        if self.rank == 0:
            values = [value, *(self._receive(peer) for peer in self._links)]
            for peer in self._links:
                self._send(peer, values)
            return values
        self._send(0, value)
        received: list[V] = self._receive(0)
        return received

    def from_first(self, value: V) -> V:
        """Rank 0's value, at every rank."""
        return self.gather(value)[0]

    def average_(self, array: NDArray[np.float32]) -> None:
        """Replace a contiguous array by its mean over the ranks, in place."""
        if self.size == 1:
            return
        flat = array.reshape(-1)
        step = self._halves.shape[2]
        for start in range(0, len(flat), step):
            part = flat[start : start + step]
            half = self._halves[self._num_averaged % 2, :, : len(part)]
            self._num_averaged += 1
            half[self.rank] = part
            self.gather(None)
            part[:] = half[0]
            for other in half[1:]:  # np.mean takes three times as long
                part += other
            part /= self.size

    def total(self, tensor: Tensor) -> Tensor:
        """The sum of a small tensor over the ranks."""
        if self.size == 1:
            return tensor
        return tensor.new_tensor(np.sum(self.gather(tensor.numpy()), axis=0))

    def average_tensor_(self, tensor: Tensor) -> None:
        """The same of a tensor."""
        self.average_(tensor.numpy())

    def _send(self, peer: int, value: Any) -> None:
        try:
            self._links[peer].send(value)
        except OSError:
            raise self._gone(peer) from None

    def _receive(self, peer: int) -> Any:
        try:
            if not self._links[peer].poll(self.patience_s):
                raise RankError(f"training process {peer} did not answer for {self.patience_s:g} s")
            value = self._links[peer].recv()
        except (EOFError, OSError):
            raise self._gone(peer) from None
        if isinstance(value, _Failure):
            raise RankError(f"training process {peer} failed: {value.text}")
        return value

    def _gone(self, peer: int) -> RankError:
        return RankError(f"training process {peer} ended unexpectedly (killed, or out of memory)")


@contextmanager
def started(
    size: int, work: Callable[..., object], arguments: Sequence[Any] = (), patience_s: float = PATIENCE_S
) -> Iterator[Ranks]:
    """Rank 0's view, while ranks 1 to size - 1 run `work(ranks, *arguments)` in processes of their own."""
    if size == 1:
        yield Ranks()
        return
    context = multiprocessing.get_context("spawn")
    memory = context.RawArray(ctypes.c_float, 2 * size * BUFFER_FLOATS)
    links, processes = [], []
    for rank in range(1, size):
        mine, theirs = context.Pipe()
        process = context.Process(
            target=_work, args=(rank, size, theirs, memory, patience_s, work, arguments), daemon=True
        )
        process.start()
        theirs.close()  # or a dead rank's pipe would stay open, and we would wait for it
        links.append(mine)
        processes.append(process)
    try:
        yield Ranks(0, size, links, memory, patience_s)
    finally:
        for link in links:
            link.close()
        for process in processes:
            process.join(timeout=GRACE_S)
            if process.is_alive():
                process.kill()
                process.join()


def _work(
    rank: int,
    size: int,
    link: Connection,
    memory: Any,
    patience_s: float,
    work: Callable[..., object],
    arguments: Sequence[Any],
) -> None:
    """Rank 0 decides when to stop: Ctrl-C reaches all processes of a terminal at once."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        work(Ranks(rank, size, [link], memory, patience_s), *arguments)
    except RankError:
        pass  # rank 0 is gone, and has said why
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{last.filename}:{last.lineno}"
        with suppress(OSError):
            link.send(_Failure(f"{type(error).__name__}: {error} ({where})"))
