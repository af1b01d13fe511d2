"""Several emulated servers in one process, and the port from which their faults are made."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from pydantic import Field

from pointsman.emulator.http import Listener, Reply
from pointsman.emulator.openai import error_body
from pointsman.emulator.replica import EmulatedReplica, Fault
from pointsman.errors import InputError, reason_of
from pointsman.router.http.messages import HttpRequest
from pointsman.simulator.hardware import load_catalogue
from pointsman.simulator.plan import plan_replicas
from pointsman.simulator.spec import ClusterSpec, ReplicaGroup
from pointsman.spec import Spec, parse_spec
from pointsman.workload.lengths import draw_lengths
from pointsman.workload.readers import read_trace
from pointsman.workload.spec import Lengths

NUM_DRAWN = 8192  # answers' lengths; then they come again


class EmulatorSpec(Spec):
    model: str = Field(default="Llama-3-8B", description="of the catalogue; its name is the one served")
    devices: tuple[str, ...] = Field(default=("A100-80",) * 4, min_length=1, description="one a replica")
    time_scale: float = Field(default=1.0, gt=0, description="how much faster than real time")
    lengths: Lengths = Field(description="where the lengths of answers come from")
    seed: int = Field(default=0, ge=0)
    host: str = "127.0.0.1"
    port: int = Field(default=8100, ge=0, le=65535, description="of the first replica; 0 = any")
    admin_port: int = Field(default=8099, ge=0, le=65535, description="0 = any")


class FaultSpec(Spec):
    """What is sent to /replicas/N/fault."""

    kind: Fault
    factor: float = Field(default=4.0, gt=0, description="slow: steps take this many times as long")
    for_s: float | None = Field(default=None, gt=0, description="then back to normal, wall-clock seconds")


class Emulator:
    def __init__(self, spec: EmulatorSpec) -> None:
        self.spec = spec
        groups = tuple(ReplicaGroup(device=device) for device in spec.devices)
        plans = plan_replicas(ClusterSpec(replicas=groups, model=spec.model))
        model = load_catalogue(None).model(spec.model)
        seeds = np.random.SeedSequence(spec.seed).spawn(len(plans))
        self.replicas: Sequence[EmulatedReplica] = [
            EmulatedReplica(
                f"replica {k} ({spec.devices[k]})",
                plan,
                spec.model,
                model.max_context_tokens,
                draw_lengths(spec.lengths, NUM_DRAWN, np.random.default_rng(seed), read_trace)[1],
                spec.time_scale,
                spec.host,
                spec.port + k if spec.port > 0 else 0,
            )
            for k, (plan, seed) in enumerate(zip(plans, seeds, strict=True))
        ]
        self._admin = Listener(spec.host, spec.admin_port, self._handle)
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def admin_url(self) -> str:
        return f"http://{self._admin.host}:{self._admin.port}"

    async def open(self) -> None:
        try:
            for replica in self.replicas:
                await replica.open()
            await self._admin.open()
        except OSError as error:
            self.close()
            problem = f"cannot listen on {self.spec.host} ({reason_of(error)})"
            raise InputError("--port", self.spec.port, problem, "name another port or host") from None

    def close(self) -> None:
        for replica in self.replicas:
            replica.close()
        self._admin.close()

    def _handle(self, request: HttpRequest, reply: Reply) -> None:
        """GET /replicas, POST /replicas/N/fault."""
        method, parts = request.head.method, request.head.path.decode("latin-1").strip("/").split("/")
        if method == b"GET" and parts == ["replicas"]:
            reply.json(200, [replica.state() for replica in self.replicas])
        elif method == b"POST" and parts[0] == "replicas" and parts[2:] == ["fault"]:
            self._set_fault(parts[1], request.body, reply)
        else:
            reply.json(404, error_body(404, "there are GET /replicas and POST /replicas/N/fault"))

    def _set_fault(self, number: str, body: bytes, reply: Reply) -> None:
        if not number.isdecimal() or int(number) >= len(self.replicas):
            reply.json(404, error_body(404, f"replicas are 0 to {len(self.replicas) - 1}"))
            return
        try:
            fault = parse_spec(FaultSpec, _object(body), "fault")
        except InputError as error:
            reply.json(400, error_body(400, str(error), error.field))
            return
        replica = self.replicas[int(number)]

        async def carry_out() -> None:
            await replica.set_fault(fault.kind, fault.factor, fault.for_s)
            reply.json(200, replica.state())

        task = asyncio.get_running_loop().create_task(carry_out())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _object(body: bytes) -> dict[str, Any]:
    try:
        data = json.loads(body)
    except ValueError:
        data = None
    if not isinstance(data, dict):
        raise InputError("fault", body[:40], "is not a JSON object", 'for example {"kind": "hang"}')
    return data
