"""What a server does beside its steps: asynchronous scheduling, API-server time, clocks under a power limit.

Compared with a plain loop over the steps of one engine, which shares no code with the simulator.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from pointsman.errors import InputError
from pointsman.simulator.hardware import Deployment, load_catalogue
from pointsman.simulator.measured import find_measured, measured_replicas
from pointsman.simulator.plan import plan_replicas
from pointsman.workload import Workload

from .factories import GOLDEN_COST, Run, assert_all_served, make_cluster, make_workload, random_workload

API = {"api_s": 0.004, "api_s_per_token": 2e-6, "api_s_per_stream": 1e-4}
POWER = {
    "limit_w": 700.0,
    "idle_w": 100.0,
    "window_s": 0.1,
    "exponent": 1.5,
    "step_j": 1.5,
    "compute_w": 1000.0,
    "context_j": 2e-5,
    "compute_s_per_token": 2e-5,
    "memory_share": 0.25,
}
STEPS = {
    "kind": "steps",
    "step_s": [[1, 0.005], [64, 0.006], [512, 0.013], [513, 0.015], [2048, 0.045]],
    "start_s": [[1, 0.0005], [512, 0.0005], [513, 0.003]],
    "sequence_s": 3e-6,
    "context_s": 3e-8,
    "pair_s": 1e-9,
}


@dataclass
class Engine:
    """One server, walked step by step: everything a request needs fits in memory."""

    cost: dict[str, Any]
    is_async: bool
    budget: int
    power_w: float = 0.0
    power_at: float = 0.0
    last_reached_at: float = 0.0
    api_free_at: float = 0.0
    reached_at: list[float] = field(default_factory=list)

    def full_s(self, num_prompt: int, num_decodes: int, context: int, pairs: float) -> float:
        if self.cost["kind"] == "linear":
            a, b, c, d, e = (self.cost[name] for name in "abcde")
            return float(a + b * num_prompt + c * num_decodes + d * context + e * pairs)
        return self._curve("step_s", num_prompt + num_decodes) + (
            self.cost["context_s"] * context + self.cost["pair_s"] * pairs
        )

    def _curve(self, name: str, tokens: int) -> float:
        points: Sequence[Sequence[float]] = self.cost[name]
        if tokens > points[-1][0] and name == "step_s":
            (x0, y0), (x1, y1) = points[-2], points[-1]
            return float(y1 + (y1 - y0) / (x1 - x0) * (tokens - x1))
        return float(np.interp(tokens, *zip(*points, strict=True)))

    def limited_s(self, full_s: float, tokens: int, context: int, pairs: float, now: float) -> float:
        power = self.cost.get("power")
        if power is None:
            return full_s

        def clock(watts: float) -> float:
            over = (watts - power["idle_w"]) / (power["limit_w"] - power["idle_w"])
            return max(1.0, over) ** (-1 / power["exponent"])

        def after(watts: float, drawn: float, seconds: float) -> float:
            return drawn + (watts - drawn) * math.exp(-seconds / power["window_s"])

        products_s = min(self._curve("step_s", tokens), power["compute_s_per_token"] * tokens)
        rest_s = self._curve("step_s", tokens) - products_s
        attention_s = self.cost["pair_s"] * pairs
        scales_s = products_s + attention_s + power["memory_share"] * rest_s
        joules = power["step_j"] + power["context_j"] * context
        joules += power["compute_w"] * (power["compute_s_per_token"] * tokens + attention_s)
        drawn = power["idle_w"] + joules / full_s
        begin = after(self.power_w, power["idle_w"], now - self.power_at)
        guess_s = full_s + scales_s / clock(begin) - scales_s
        mean_clock = (clock(begin) + clock(after(begin, drawn, guess_s))) / 2
        seconds = full_s + scales_s / mean_clock - scales_s
        self.power_w, self.power_at = after(begin, drawn, seconds), now + seconds
        return seconds

    def serve(self, workload: Workload, api: dict[str, float]) -> tuple[np.ndarray, np.ndarray]:
        """-> time of the first token and of the last, of each request."""
        prompts, outputs = workload.num_prefill_tokens, workload.num_decode_tokens
        count = len(workload)
        first, last, began = np.full(count, np.nan), np.full(count, np.nan), []
        done, produced = np.zeros(count, int), np.zeros(count, int)
        running: list[int] = []
        following, known, now, began_at = 0, 0, 0.0, 0.0

        def arrivals_until(time: float) -> None:
            """A request passes the API server behind the tokens that it still has to hand out, and its first
            token will be handed out behind one of each answer that streams meanwhile."""
            nonlocal known
            while known < count and workload.arrived_at[known] <= time:
                streams = sum(done[i] >= prompts[i] for i in running)
                way = api["api_s"] + api["api_s_per_token"] * prompts[known]
                way += api["api_s_per_stream"] * streams
                way += max(0.0, self.api_free_at - workload.arrived_at[known])
                self.last_reached_at = max(self.last_reached_at, workload.arrived_at[known] + way)
                self.reached_at.append(self.last_reached_at)
                known += 1

        while following < count or running:
            if not running and known == following:
                arrivals_until(workload.arrived_at[known])
            is_idle = not running
            if is_idle:
                now = max(now, self.reached_at[following])
                arrivals_until(now)
            planned_at = began_at if self.is_async and running else now
            budget, chunks = self.budget, []
            for i in running:
                chunks.append((i, min(budget, 1 if done[i] >= prompts[i] else prompts[i] - done[i])))
                budget -= chunks[-1][1]
            while following < known and self.reached_at[following] <= planned_at and budget > 0:
                chunks.append((following, min(budget, prompts[following])))
                budget -= chunks[-1][1]
                running.append(following)
                following += 1
            decodes = [i for i, _ in chunks if done[i] >= prompts[i]]
            context = int(sum(done[i] + produced[i] for i in decodes))
            pairs = sum(size * (done[i] + size / 2) for i, size in chunks if i not in decodes)
            num_prompt = int(sum(size for i, size in chunks if i not in decodes))
            step_s = self.full_s(num_prompt, len(decodes), context, pairs)
            step_s += self.cost.get("sequence_s", 0.0) * len(chunks)
            step_s = self.limited_s(step_s, num_prompt + len(decodes), context, pairs, now)
            if is_idle and "start_s" in self.cost:
                step_s += self._curve("start_s", num_prompt + len(decodes))
            began.append(now)
            began_at, end = now, now + step_s
            arrivals_until(np.nextafter(end, 0))
            now = end
            num_tokens = sum(done[i] + size >= prompts[i] for i, size in chunks)
            self.api_free_at = max(self.api_free_at, now) + api["api_s_per_stream"] * num_tokens
            for i, size in chunks:
                if i not in decodes:
                    done[i] += size
                if done[i] >= prompts[i]:
                    produced[i] += 1
                    if produced[i] == 1:
                        first[i] = now
                    if produced[i] == outputs[i]:
                        last[i] = now
                        running.remove(i)
        return first, last


def one_server(cost: dict[str, Any], **scheduler: Any) -> Any:
    settings = {"kind": "vllm-v1", "num_blocks": 100_000, "max_num_batched_tokens": 700} | scheduler
    return make_cluster(replicas=1, scheduler=settings, cost=cost)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("cost", ["linear", "steps", "power"])
@pytest.mark.parametrize("has_api", [False, True])
def test_a_server_is_what_a_plain_loop_says(is_async: bool, cost: str, has_api: bool) -> None:
    costs = {"linear": GOLDEN_COST, "steps": STEPS, "power": STEPS | {"power": POWER}}[cost]
    api = API if has_api else dict.fromkeys(API, 0.0)
    for seed in range(3):
        workload = random_workload(150, 30.0, seed, mean_tokens=200.0)
        cluster = one_server(costs, async_scheduling=is_async, **api)
        run = Run(cluster, workload).to_end()
        assert_all_served(run)
        first, last = Engine(costs, is_async, budget=700).serve(workload, api)
        np.testing.assert_allclose(run.requests["first_token_at"], first, rtol=1e-9)
        np.testing.assert_allclose(run.requests["completed_at"], last, rtol=1e-9)


def test_an_asynchronous_engine_plans_one_step_ahead() -> None:
    """The second request comes during the first step: it joins the third, not the second."""
    cost = {"kind": "linear", "a": 1.0}
    starts = {}
    for is_async in (False, True):
        cluster = one_server(cost, async_scheduling=is_async)
        run = Run(cluster, make_workload([0.0, 0.5], 10, 10)).to_end()
        starts[is_async] = run.requests["scheduled_at"].tolist()
    assert starts == {False: [0.0, 1.0], True: [0.0, 2.0]}


def test_an_idle_engine_takes_a_request_when_it_has_come_through_the_api_server() -> None:
    cluster = one_server({"kind": "linear", "a": 1.0}, api_s=0.25, api_s_per_token=0.01)
    run = Run(cluster, make_workload([1.0], 10, 1)).to_end()
    assert run.requests["scheduled_at"][0] == pytest.approx(1.35)
    assert run.requests["completed_at"][0] == pytest.approx(2.35)


def test_a_request_waits_until_the_api_server_has_handed_out_earlier_tokens() -> None:
    """Ten answers of two tokens, 0.3 s a token: what two steps of 1 s bring is handed out until 7 s."""
    cluster = one_server({"kind": "linear", "a": 1.0}, api_s_per_stream=0.3)
    run = Run(cluster, make_workload([0.0] * 10 + [5.5], 10, 2)).to_end()
    assert run.requests["completed_at"][:10] == pytest.approx(2.0)
    assert run.requests["scheduled_at"][10] == pytest.approx(1.0 + 20 * 0.3)


def test_a_failed_server_forgets_what_was_on_its_way() -> None:
    events = [{"at_s": 0.1, "kind": "fail", "replica": 0}, {"at_s": 0.2, "kind": "recover", "replica": 0}]
    cluster = make_cluster(
        replicas=1,
        scheduler={"kind": "vllm-v1", "num_blocks": 1000, "api_s": 5.0},
        cost={"kind": "linear", "a": 1.0},
        events=events,
    )
    run = Run(cluster, make_workload([0.0], 10, 1)).to_end()
    assert run.requests["completed_at"][0] == pytest.approx(6.2)


def test_clocks_fall_when_prompts_come_without_a_break() -> None:
    arrived = np.arange(60) * 0.04
    full = Run(one_server(STEPS), make_workload(arrived, 2000, 1)).to_end()
    limited = Run(one_server(STEPS | {"power": POWER}), make_workload(arrived, 2000, 1)).to_end()
    first, last = (run.requests["completed_at"][[0, -1]] for run in (full, limited))
    assert last[0] == pytest.approx(first[0], rel=0.1)
    assert last[1] > 1.15 * first[1]


def test_async_scheduling_is_refused_with_pipeline_stages() -> None:
    with pytest.raises(InputError, match="async_scheduling = True: is not simulated with 2 pipeline stages"):
        one_server(GOLDEN_COST, async_scheduling=True, pipeline_stages=2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step_s": [[64, 0.1], [1, 0.2]]}, "numbers of tokens do not rise"),
        ({"step_s": [[1, -0.1]]}, "holds a negative time"),
        ({"power": POWER | {"limit_w": 50.0}}, "is not above idle_w"),
    ],
)
def test_bad_step_costs(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        one_server(STEPS | change)


def test_measured_times_are_used_where_there_are_any() -> None:
    known = load_catalogue()
    for one in measured_replicas():
        assert known.device(one.device).name == one.device
        assert known.model(one.model).name == one.model

    def plan(**cluster: Any) -> Any:
        data = {"replicas": 1, "cost": {"kind": "auto"}, "scheduler": {"kind": "vllm-v1"}} | cluster
        return plan_replicas(make_cluster(**data))[0]

    measured = plan(device="H200", model="Llama-3-8B")
    assert measured.scheduler.async_scheduling and measured.scheduler.api_s > 0
    assert measured.costs.power is not None
    chosen = plan(device="H200", model="Llama-3-8B", scheduler={"kind": "vllm-v1", "api_s": 0.0})
    assert chosen.scheduler.api_s == 0.0 and chosen.scheduler.async_scheduling
    for other in (
        {"device": "H100"},
        {"device": "H200", "model": "Qwen3-8B"},
        {"device": "H200", "tensor_parallel": 2},
    ):
        assert plan(**other).costs.power is None
        assert not plan(**other).scheduler.async_scheduling
    assert plan(device="H200", cost={"kind": "roofline"}).costs.power is None
    assert find_measured(Deployment(known.device("H200"), known.model("Llama-3-8B"))) is not None
