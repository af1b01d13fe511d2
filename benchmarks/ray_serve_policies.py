"""Our policies as request routers of Ray Serve, against its own: same replicas, same arrivals.

Run, where Ray Serve is installed: python benchmarks/ray_serve_policies.py [--traces 3] [--requests 150]
Four emulated replicas, two of them slower: each runs steps of continuous batching that take as long as a
formula says, in real time, and answers with when its first token was ready. Prompts are of the Azure chat
trace, so some are fifty times as long as others.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray import serve
from ray.serve.config import RequestRouterConfig

from pointsman.evaluation.bootstrap import paired_ratios
from pointsman.spec import parse_spec
from pointsman.workload import build_workload
from pointsman.workload.spec import WorkloadSpec

OURS = "pointsman.integrations.ray_serve:PointsmanRequestRouter"
ROUTERS: dict[str, dict[str, Any]] = {
    "power of two": {
        "request_router_class": "ray.serve._private.request_router:PowerOfTwoChoicesRequestRouter"
    },
    "prefix affinity": {
        "request_router_class": "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router"
        ":PrefixCacheAffinityRouter"
    },
    "default": {"request_router_class": OURS, "request_router_kwargs": {"policy": "default"}},
    "least-work": {"request_router_class": OURS, "request_router_kwargs": {"policy": "least-work"}},
}
SLOWNESS = (1.0, 1.0, 2.0, 2.0)
STEP_S, PROMPT_S, STREAM_S = 0.02, 2.0e-4, 2.0e-4  # of a step, a prompt token, a request that decodes
CHUNK, MAX_RUNNING = 512, 64
METRICS = ("TTFT mean", "TTFT P99", "e2e mean", "e2e P99")


class Prompt:
    """As the prefix router of Ray Serve wants it: a request with a `prompt`."""

    def __init__(self, tokens: int, output: int, number: int) -> None:
        self.prompt = f"{number:04d}" * tokens  # four characters a token, and nothing in common
        self.tokens, self.output = tokens, output


class EmulatedReplica:
    def __init__(self, folder: str) -> None:
        self._slowness = _claim(Path(folder))
        self._waiting: list[dict[str, Any]] = []
        self._running: list[dict[str, Any]] = []
        self._loop: asyncio.Task[None] | None = None

    async def __call__(self, request: Prompt) -> dict[str, float]:
        one = {"left": request.tokens, "output": request.output, "done": asyncio.Event()}
        self._waiting.append(one)
        if self._loop is None or self._loop.done():
            self._loop = asyncio.create_task(self._run())
        await one["done"].wait()
        return {"first_token_at": one["first_token_at"]}

    def record_routing_stats(self) -> dict[str, float]:
        return {
            "running": len(self._running),
            "waiting": len(self._waiting),
            "prefill_s_per_token": PROMPT_S * self._slowness,
            "decode_s_per_token": STREAM_S * self._slowness,
            "step_floor_s": STEP_S * self._slowness,
        }

    async def _run(self) -> None:
        while self._waiting or self._running:
            while self._waiting and len(self._running) < MAX_RUNNING:
                self._running.append(self._waiting.pop(0))
            budget, decoding = CHUNK, []
            for one in self._running:
                if one["left"] > 0:
                    taken = min(budget, one["left"])
                    one["left"] -= taken
                    budget -= taken
                    one["is_prefilling"] = True
                else:
                    decoding.append(one)
            took_s = STEP_S + PROMPT_S * (CHUNK - budget) + STREAM_S * len(decoding)
            await asyncio.sleep(took_s * self._slowness)
            for one in list(self._running):
                if one["left"] > 0:
                    continue
                one.setdefault("first_token_at", time.time())
                one["output"] -= 1
                if one["output"] <= 0:
                    self._running.remove(one)
                    one["done"].set()


def _claim(folder: Path) -> float:
    """Each replica takes the first speed that nobody has."""
    for number, slowness in enumerate(SLOWNESS):
        try:
            os.close(os.open(folder / str(number), os.O_CREAT | os.O_EXCL))
            return slowness
        except FileExistsError:
            continue
    return SLOWNESS[-1]


def trace(num_requests: int, rate_rps: float, seed: int) -> list[tuple[float, Prompt]]:
    section = {
        "arrivals": {"kind": "poisson", "rate": rate_rps},
        "lengths": "azure-conv",
        "requests": num_requests,
        "max_tokens": 4096,
    }
    workload = build_workload(parse_spec(WorkloadSpec, section, "workload"), seed)
    columns = (workload.arrived_at, workload.num_prefill_tokens, workload.num_decode_tokens)
    return [
        (float(at), Prompt(int(prompt), max(1, int(output) // 4), number))
        for number, (at, prompt, output) in enumerate(zip(*columns, strict=True))
    ]


async def play(handle: Any, arrivals: list[tuple[float, Prompt]]) -> list[float]:
    started = time.time()

    async def send(at: float, prompt: Prompt) -> tuple[float, float]:
        await asyncio.sleep(max(0.0, started + at - time.time()))
        arrived = time.time()
        answer = await handle.remote(prompt)
        return answer["first_token_at"] - arrived, time.time() - arrived

    times = np.array(await asyncio.gather(*(send(at, prompt) for at, prompt in arrivals)))
    return [measure for row in times.T for measure in (row.mean(), np.percentile(row, 99))]


def measured(router: str, arrivals: list[tuple[float, Prompt]]) -> list[float]:
    config = RequestRouterConfig(request_routing_stats_period_s=1.0, **ROUTERS[router])
    with tempfile.TemporaryDirectory() as folder:
        deployment = serve.deployment(
            num_replicas=len(SLOWNESS),
            max_ongoing_requests=1000,
            ray_actor_options={"num_cpus": 0.01},
            request_router_config=config,
        )(EmulatedReplica)
        handle = serve.run(deployment.bind(folder), name=router.replace(" ", "-"), route_prefix=None)
        asyncio.run(play(handle, arrivals[:8]))  # compiled, connected
        time.sleep(3.0)  # every replica has said how fast it is
        found = asyncio.run(play(handle, arrivals))
        serve.delete(router.replace(" ", "-"))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=int, default=3)
    parser.add_argument("--requests", type=int, default=150)
    parser.add_argument("--rate", type=float, default=4.0, help="requests/s")
    parser.add_argument("--routers", default="power of two,prefix affinity,default")
    options = parser.parse_args()
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    serve.start(proxy_location="Disabled")
    routers = options.routers.split(",")
    found: dict[str, list[list[float]]] = {router: [] for router in routers}
    for seed in range(options.traces):
        for router in routers:
            found[router].append(measured(router, trace(options.requests, options.rate, seed)))
            cells = ", ".join(f"{n} {v:.3f} s" for n, v in zip(METRICS, found[router][-1], strict=True))
            print(f"trace {seed}, {router}: {cells}", flush=True)
    for router in routers[2:]:
        for other in routers[:2]:
            ratios = paired_ratios(np.array(found[router]), np.array(found[other]))
            cells = ", ".join(
                f"{name} {ratio.ratio - 1:+.1%} [{ratio.low - 1:+.1%}, {ratio.high - 1:+.1%}]"
                for name, ratio in zip(METRICS, ratios, strict=True)
            )
            print(f"{router} against {other}: {cells}", flush=True)


if __name__ == "__main__":
    main()
