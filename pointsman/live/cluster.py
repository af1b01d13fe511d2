"""Live servers behind our router, with load on them, in a thread of their own for as long as a run takes.

What is sent are the arrivals of a scenario, a configuration or a trace; when they have all been sent and
answered it starts over with the next seed. The trainer's thread talks to the desk (desk.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from time import sleep

import uvloop

from pointsman.errors import InputError
from pointsman.experiments.objective import find_objective
from pointsman.inference.checkpoint import Checkpoint, save_checkpoint
from pointsman.live.comparison import clipped_to, open_workloads
from pointsman.live.costs import CostBooks
from pointsman.live.desk import Block, Desk
from pointsman.live.guard import objection, too_many_failed
from pointsman.live.load import Load
from pointsman.live.servers import OPTION, Served, ask_servers, key_header
from pointsman.live.spec import LiveSpec
from pointsman.router.config import Backend, Reliability, Settings
from pointsman.router.http.address import Address, parse_url
from pointsman.router.http.limits import Limits
from pointsman.router.keys import BACKEND_KEY
from pointsman.router.server import Parts, Router
from pointsman.routing.decider import Decider
from pointsman.training.safety import SafetyError
from pointsman.workload import Workload

HOST = "127.0.0.1"
NUM_OUTCOMES = 200  # of the last requests, to see whether too many fail
DRAIN_S = 10.0
POLL_S = 0.05
# The desk keeps its own time, and does not wait for longer than it was told to.
RELIABILITY = Reliability(max_decision_s=5.0)


class WatchedLoad(Load):
    """Tells at once which requests failed."""

    def __init__(self, address: Address, model: str, outcomes: deque[str | None]) -> None:
        super().__init__(address, model)
        self._outcomes = outcomes

    def finished(self, row: int, now: float, num_output: int | None) -> None:
        super().finished(row, now, num_output)
        self._outcomes.append(None)

    def failed(self, row: int, why: str) -> None:
        super().failed(row, why)
        self._outcomes.append(why)


class LiveCluster:
    """`start` it, `close` it; in between `check` says whether all is well."""

    def __init__(self, spec: LiveSpec) -> None:
        if not spec.servers:
            raise InputError("env.servers", [], "nobody to train on", f"give {OPTION} http://host:port")
        self.spec = spec
        checkpoint = spec.checkpoint
        self._served: Served = uvloop.run(ask_servers(spec.servers, key_header()))
        self._first = self._workload(0)
        self.books = CostBooks(find_objective(spec.objective))
        hold_s = float(checkpoint.metadata.get("hold", {}).get("recheck_s", 1.0))
        self._start_decider = Decider(self.books, spec.start)
        self.desk = Desk(spec, self.books, self._start_decider, hold_s)
        self.outcomes: deque[str | None] = deque(maxlen=NUM_OUTCOMES)
        self._error: BaseException | None = None
        self._is_ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="router", daemon=True)

    def _workload(self, seed: int) -> Workload:
        base_dir = self.spec.config.parent if self.spec.config is not None else None
        workloads: Sequence[Workload] = open_workloads([self.spec.traffic(seed)], base_dir)
        if self._served.max_tokens is not None:
            workloads = clipped_to(workloads, self._served.max_tokens)
        return workloads[0]

    @property
    def rate_rps(self) -> float:
        """How many requests a second are sent."""
        times = self._first.arrived_at
        return len(times) / max(float(times[-1]), 1e-9)

    # --- the trainer's thread ---

    def start(self) -> None:
        self._thread.start()
        self._is_ready.wait()
        self.check()

    def close(self) -> None:
        """What has been sent is answered first, within a few seconds."""
        self.desk.is_closed = True
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._is_closing.set)
            self._thread.join()

    def check(self) -> None:
        """Raises where the run must not go on; from then on the starting policy decides alone."""
        if self._error is not None:
            raise self._error
        desk, spec = self.desk, self.spec
        problem = too_many_failed(self.outcomes, spec.max_failed)
        problem = problem or objection(desk.learner, desk.control, spec.window, spec.margin)
        if problem is not None:
            desk.is_closed = True
            raise SafetyError(problem)

    def play(self, policy: Checkpoint, num_pairs: int, num_requests: int) -> tuple[list[Block], list[Block]]:
        """Blocks of this policy, and of the one it started from, in turn; when all are over."""
        blocks: list[tuple[Block, Block]] = []

        def begin() -> None:
            with TemporaryDirectory() as folder:
                path = Path(folder) / "candidate.safetensors"
                save_checkpoint(path, policy)
                candidate = Decider(self.books, str(path))
            for number in range(num_pairs):
                pair = Block(candidate, num_requests), Block(self._start_decider, num_requests)
                blocks.append(pair)
                self.desk.play(pair if number % 2 == 0 else pair[::-1])

        self._in_router(begin)
        while self.desk.is_playing or any(block.tally.num_open for pair in blocks for block in pair):
            self.check()
            sleep(POLL_S)
        return [pair[0] for pair in blocks], [pair[1] for pair in blocks]

    def _in_router(self, function: Callable[[], None]) -> None:
        """Call it in the router's thread, which has the books to itself."""

        async def call() -> None:
            function()

        asyncio.run_coroutine_threadsafe(call(), self._loop).result()

    # --- the router's thread ---

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._serve())
        except BaseException as error:  # raised again where somebody can see it
            self._error = error
        finally:
            self._is_ready.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._is_closing = asyncio.Event()
        with Path(os.devnull).open("w", encoding="utf-8") as log:
            parts = Parts(
                books=self.books,
                deciders=lambda policy: self.desk,
                log_to=log,
                policy="training",
                backend_key=os.environ.get(BACKEND_KEY),
                logs_requests=False,
            )
            settings = Settings(reliability=RELIABILITY, limits=Limits(drain_timeout_s=DRAIN_S))
            router = Router(parts, settings, [Backend(url=url) for url in self.spec.servers])
            port = await router.start(HOST, 0)
            self._is_ready.set()
            load = WatchedLoad(parse_url(f"http://{HOST}:{port}"), self._served.model, self.outcomes)
            feeding = self._loop.create_task(self._feed(load))
            closing = self._loop.create_task(self._is_closing.wait())
            await asyncio.wait((feeding, closing), return_when=asyncio.FIRST_COMPLETED)
            closing.cancel()
            feeding.cancel()
            await router.stop()
            load.close()
            with contextlib.suppress(asyncio.CancelledError):
                await feeding

    async def _feed(self, load: Load) -> None:
        workload = self._first
        for seed in count():
            await load.replay(workload, seed)
            workload = self._workload(seed + 1)


_open: list[LiveCluster] = []


@contextmanager
def session(spec: LiveSpec) -> Iterator[None]:
    """The servers of a run, open until it is over."""
    cluster = LiveCluster(spec)
    _open.append(cluster)
    try:
        cluster.start()
        yield
    finally:
        _open.remove(cluster)
        cluster.close()


def current() -> LiveCluster:
    """The cluster of the run that is going on."""
    if not _open:
        remedy = "only `pointsman train` has them; `pointsman explain` looks at a policy on the simulator"
        raise InputError("env.kind", "live", "no servers are open", remedy)
    return _open[-1]
