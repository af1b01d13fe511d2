"""One emulated vLLM server: the simulated engine against the wall clock, behind HTTP.

The engine's time runs `time_scale` times as fast as the wall clock. Tokens are sent when the step that makes
them ends; where several steps end before the server gets to run, their tokens go out in one piece, as vLLM
does when it is busy.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pointsman import __version__
from pointsman.emulator.engine import Engine
from pointsman.emulator.http import Listener, Reply
from pointsman.emulator.metrics import CONTENT_TYPE, VllmMetrics
from pointsman.emulator.openai import ApiError, Ask, Completion, error_body, read_ask
from pointsman.emulator.prefixes import PrefixTree
from pointsman.router.http.messages import HttpRequest
from pointsman.simulator.plan import ReplicaPlan

Fault = Literal["none", "slow", "hang", "reset", "error", "die"]
ERROR_STATUS = 500
_LOAD_FORMAT = b"endpoint-load-metrics-format"
_NUM_LATE = 10_000


@dataclass(eq=False)
class Generation:
    """A completion under way."""

    ask: Ask
    reply: Reply
    answer: Completion
    num_output: int
    reason: str
    headers: Mapping[str, str]
    arrived_at: float
    num_sent: int = 0
    last_token_at: float = field(default=0.0)


class EmulatedReplica:
    """`outputs` [N]: answers are this many tokens long, in turn, unless a request says otherwise."""

    def __init__(
        self,
        name: str,
        plan: ReplicaPlan,
        model: str,
        max_model_tokens: int,
        outputs: NDArray[np.int32],
        time_scale: float,
        host: str,
        port: int,
    ) -> None:
        self.name = name
        self.model = model
        self.plan = plan
        self.fault: Fault = "none"
        self.slowdown = 1.0
        self._max_model_tokens = min(max_model_tokens, plan.max_prompt_tokens)
        self._outputs = outputs
        self._num_drawn = 0
        self._time_scale = time_scale
        self._listener = Listener(host, port, self.handle)
        self._held: list[tuple[HttpRequest, Reply]] = []  # that came while the server hung
        self._recovery: asyncio.TimerHandle | None = None
        self._routes: dict[tuple[bytes, bytes], Callable[[HttpRequest, Reply], None]] = {
            (b"POST", b"/v1/chat/completions"): self._complete,
            (b"POST", b"/v1/completions"): self._complete,
            (b"GET", b"/v1/models"): lambda _, reply: reply.json(200, self._models()),
            (b"GET", b"/metrics"): lambda _, reply: reply.whole(200, CONTENT_TYPE, self._metrics.text()),
            (b"GET", b"/health"): lambda _, reply: reply.whole(200, "text/plain", b""),
            (b"GET", b"/ping"): lambda _, reply: reply.whole(200, "text/plain", b""),
            (b"GET", b"/version"): lambda _, reply: reply.json(200, {"version": f"pointsman-{__version__}"}),
            (b"GET", b"/load"): lambda _, reply: reply.json(200, {"server_load": self._engine.num_requests}),
        }
        self._begin()

    def _begin(self) -> None:
        """A server that has just been started."""
        self._engine = Engine(self.plan)
        self._tree = PrefixTree()
        self._jobs: set[Generation] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._due_at = 0.0  # wall clock
        self._late_s: deque[float] = deque(maxlen=_NUM_LATE)  # the latest deliveries
        self._started_at = time.monotonic()
        self._frozen_at: float | None = None
        self._num_preemptions = 0
        scheduler = self.plan.scheduler
        self._metrics = VllmMetrics(
            self.model,
            lambda: self._engine.gauges,
            lambda: self._engine.cache_counts,
            scheduler.block_size,
            self.plan.num_blocks,
        )

    @property
    def url(self) -> str:
        return f"http://{self._listener.host}:{self._listener.port}"

    async def open(self) -> None:
        await self._listener.open()

    def close(self) -> None:
        if self._recovery is not None:
            self._recovery.cancel()
        self._listener.close()
        if self._timer is not None:
            self._timer.cancel()

    # Requests.

    def handle(self, request: HttpRequest, reply: Reply) -> None:
        if self.fault == "hang":
            self._held.append((request, reply))
            return
        if self.fault == "reset":
            reply.reset()
            return
        route = self._routes.get((request.head.method, request.head.path))
        if route is not None:
            route(request, reply)
        elif any(path == request.head.path for _, path in self._routes):
            reply.json(405, error_body(405, "Method Not Allowed"))
        else:
            reply.json(404, error_body(404, "Not Found"))

    def _models(self) -> dict[str, Any]:
        model = {
            "id": self.model,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "pointsman",
            "max_model_len": self._max_model_tokens,
        }
        return {"object": "list", "data": [model]}

    def _complete(self, request: HttpRequest, reply: Reply) -> None:
        if self.fault == "error":
            reply.json(ERROR_STATUS, error_body(ERROR_STATUS, "an emulated fault"))
            return
        try:
            ask = read_ask(request.head.path, request.body, self.model, self._max_model_tokens)
        except ApiError as error:
            reply.json(error.status, error_body(error.status, error.message, error.param))
            return
        if self._engine.is_full:
            reply.json(503, error_body(503, "too many requests at once"))
            return
        num_output, reason = self._length(ask)
        answer_id = uuid.uuid4().hex
        headers = self._load_header(request)
        answer = Completion(ask, answer_id, self.model, int(time.time()))
        job = Generation(ask, reply, answer, num_output, reason, headers, time.monotonic())
        self._deliver()
        links, answer_key = self._tree.place(ask.prompt, num_output)
        self._engine.admit(job, len(ask.prompt), num_output, self._now(), links, answer_key)
        self._jobs.add(job)
        self._metrics.prompt_tokens.inc(len(ask.prompt))
        reply.on_gone = lambda: self._give_up(job)
        if ask.streams:
            reply.start("text/event-stream; charset=utf-8", headers)
        self._plan_delivery()

    def _length(self, ask: Ask) -> tuple[int, str]:
        if ask.ignores_eos:
            return ask.max_tokens, "length"
        drawn = max(ask.min_tokens, int(self._outputs[self._num_drawn % len(self._outputs)]), 1)
        self._num_drawn += 1
        return (drawn, "stop") if drawn < ask.max_tokens else (ask.max_tokens, "length")

    def _load_header(self, request: HttpRequest) -> dict[str, str]:
        """vLLM's ORCA report, for those who ask for it: as of when the request came."""
        kind = request.head.special.get(_LOAD_FORMAT, b"").upper()
        gauges = self._engine.gauges
        named = {"kv_cache_usage_perc": gauges.kv_use, "num_requests_waiting": float(gauges.waiting)}
        if kind == b"TEXT":
            text = ", ".join(f"named_metrics.{name}={value}" for name, value in named.items())
            return {"endpoint-load-metrics": f"TEXT {text}"}
        if kind == b"JSON":
            return {"endpoint-load-metrics": f"JSON {json.dumps({'named_metrics': named})}"}
        return {}

    # Time.

    def _now(self) -> float:
        """The engine's time."""
        wall = time.monotonic() if self._frozen_at is None else self._frozen_at
        return (wall - self._started_at) * self._time_scale

    def _plan_delivery(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        at = self._engine.next_event_at
        if self._frozen_at is None and math.isfinite(at):
            delay_s = max(0.0, (at - self._now()) / self._time_scale)
            self._due_at = time.monotonic() + delay_s
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._wake)

    def _wake(self) -> None:
        self._timer = None
        late_s = time.monotonic() - self._due_at
        if late_s >= 0.0:  # timers are coarse: one that fires early delivers nothing
            self._late_s.append(late_s)
        self._deliver()
        self._plan_delivery()

    def _deliver(self) -> None:
        """Send the tokens of the steps that have ended."""
        wall = time.monotonic()
        for job, num_tokens, is_finished, num_cached in self._engine.advance(self._now()):
            num_new = num_tokens - job.num_sent
            self._metrics.generation_tokens.inc(num_new)
            if job.num_sent == 0:
                self._metrics.ttft_s.observe(wall - job.arrived_at)
            else:
                self._metrics.token_s.observe((wall - job.last_token_at) / num_new)
            job.last_token_at = wall
            if job.ask.streams:
                reason = job.reason if is_finished else None
                job.reply.send(job.answer.piece(job.num_sent, num_tokens, reason))
            job.num_sent = num_tokens
            if is_finished:
                self._finish(job, num_cached, wall)
        preemptions = self._engine.num_preemptions
        self._metrics.preemptions.inc(preemptions - self._num_preemptions)
        self._num_preemptions = preemptions

    def _finish(self, job: Generation, num_cached: int, wall: float) -> None:
        self._jobs.discard(job)
        self._metrics.ended(job.reason)
        self._metrics.e2e_s.observe(wall - job.arrived_at)
        job.reply.on_gone = None
        if job.ask.streams:
            job.reply.send(job.answer.last_events(job.num_output, num_cached))
            job.reply.end()
        else:
            job.reply.json(200, job.answer.whole(job.num_output, num_cached, job.reason), job.headers)

    def _give_up(self, job: Generation) -> None:
        """The client has gone: the engine is free of the request at the end of the step."""
        if job in self._jobs:
            self._jobs.discard(job)
            self._engine.abort(job, self._now())
            self._metrics.ended("abort")
            self._plan_delivery()

    # Faults.

    async def set_fault(self, fault: Fault, factor: float = 1.0, for_s: float | None = None) -> None:
        """From now on, or for so many seconds; `none` is back to normal. `factor` is for `slow`."""
        if self._recovery is not None:
            self._recovery.cancel()
            self._recovery = None
        before, self.fault = self.fault, fault
        self.slowdown = factor if fault == "slow" else 1.0
        if before == "die" and fault != "die":
            self._begin()
            await self._listener.open()
        if before == "hang" and fault != "hang":
            self._thaw()
        self._engine.set_slowdown(self.slowdown)
        if fault == "hang" and self._frozen_at is None:
            self._deliver()
            self._frozen_at = time.monotonic()
            self._plan_delivery()
        elif fault == "reset":
            self._listener.reset_all()
        elif fault == "die":
            self._jobs.clear()
            self._listener.close()
            if self._timer is not None:
                self._timer.cancel()
        if for_s is not None and fault != "none":
            loop = asyncio.get_running_loop()
            self._recovery = loop.call_later(for_s, lambda: loop.create_task(self.set_fault("none")))

    def _thaw(self) -> None:
        """The engine goes on where it stopped, and the server answers what has come since."""
        if self._frozen_at is not None:
            self._started_at += time.monotonic() - self._frozen_at
            self._frozen_at = None
        held, self._held = self._held, []
        for request, reply in held:
            if not reply.is_over:
                self.handle(request, reply)
        self._plan_delivery()

    def state(self) -> dict[str, Any]:
        gauges = self._engine.gauges
        late_s = np.percentile(self._late_s, (50, 99)) if self._late_s else (0.0, 0.0)
        return {
            "name": self.name,
            "url": self.url,
            "fault": self.fault,
            "slowdown": self.slowdown,
            "outstanding": self._engine.num_requests,
            "running": gauges.running,
            "waiting": gauges.waiting,
            "kv_use": round(gauges.kv_use, 4),
            "late_ms": {"p50": round(1000 * late_s[0], 2), "p99": round(1000 * late_s[1], 2)},
        }
