"""The engine against the simulator itself: requests that come one by one are served as if all were known."""

from __future__ import annotations

import math

import numpy as np
import pytest
from simulator.factories import Run, make_cluster, random_workload

from pointsman.compiled.memory import array_at
from pointsman.emulator.engine import CAPACITY, Engine
from pointsman.routing.records import LINK
from pointsman.simulator.plan import plan_replicas
from pointsman.simulator.spec import ClusterSpec
from pointsman.simulator.state import CACHE
from pointsman.workload import Workload

LITTLE_MEMORY = {"kind": "vllm-v1", "num_blocks": 40}


def serve(engine: Engine, workload: Workload) -> tuple[np.ndarray, np.ndarray]:
    """First token and end of every request, polled at each step's end."""
    first = np.full(len(workload), math.nan)
    end = np.full(len(workload), math.nan)
    num_sent = 0
    while np.isnan(end).any():
        arrival = float(workload.arrived_at[num_sent]) if num_sent < len(workload) else math.inf
        now = min(arrival, engine.next_event_at)
        for i, _, is_finished, _ in engine.advance(now):
            first[i] = now if math.isnan(first[i]) else first[i]
            end[i] = now if is_finished else end[i]
        if arrival == now:
            prompt, output = workload.num_prefill_tokens[num_sent], workload.num_decode_tokens[num_sent]
            engine.admit(num_sent, int(prompt), int(output), now)
            num_sent += 1
    return first, end


def assert_same_as_simulated(cluster: ClusterSpec, workload: Workload) -> Run:
    run = Run(cluster, workload).to_end()
    engine = Engine(plan_replicas(cluster)[0])
    first, end = serve(engine, workload)
    np.testing.assert_array_equal(end, run.requests["completed_at"])
    np.testing.assert_array_equal(first, run.requests["first_token_at"])
    assert engine.num_requests == 0 and engine.gauges == (0, 0, 0.0)
    assert engine.num_preemptions == run.sim.num_preemptions
    return run


def test_served_as_the_simulator_would() -> None:
    run = assert_same_as_simulated(make_cluster(replicas=1), random_workload(400, 12.0, seed=1))
    assert run.sim.num_preemptions == 0


def test_with_too_little_memory_too() -> None:
    """Who was preempted finds what is left of its own blocks."""
    cluster = make_cluster(replicas=1, scheduler=LITTLE_MEMORY | {"prefix_caching": True})
    run = assert_same_as_simulated(cluster, random_workload(200, 60.0, seed=2))
    assert run.sim.num_preemptions > 10


def test_requests_given_up_leave_nothing_behind() -> None:
    """Queued, in the middle of a prompt, decoding: all are given up, and the memory is free again."""
    cluster = make_cluster(
        replicas=1, scheduler=LITTLE_MEMORY | {"max_num_batched_tokens": 32, "max_num_seqs": 16}
    )
    engine = Engine(plan_replicas(cluster)[0])
    rng = np.random.default_rng(3)
    now, in_engine = 0.0, set()
    seen_waiting = seen_running = 0
    for number in range(600):
        now += float(rng.exponential(0.02))
        for progress in engine.advance(now):
            if progress.is_finished:
                in_engine.discard(progress.request)
        if in_engine and (rng.random() < 0.5 or number > 550):
            gauges = engine.gauges
            seen_waiting += gauges.waiting > 0
            seen_running += gauges.running > 0
            victim = sorted(in_engine)[int(rng.integers(len(in_engine)))]
            in_engine.discard(victim)
            engine.abort(victim, now)
        elif number <= 550:
            engine.admit(number, int(rng.integers(1, 200)), int(rng.integers(1, 100)), now)
            in_engine.add(number)
    while in_engine:
        engine.abort(in_engine.pop(), now)
    while math.isfinite(engine.next_event_at):
        assert not [one for one in engine.advance(engine.next_event_at) if one.request is not None]
    assert seen_waiting > 50 and seen_running > 100
    assert engine.num_requests == 0 and engine.gauges == (0, 0, 0.0)
    assert len(engine._free) == CAPACITY


def test_gauges_move_when_a_step_ends() -> None:
    engine = Engine(plan_replicas(make_cluster(replicas=1))[0])
    for n in range(5):
        engine.admit(n, 50, 5, 0.0)
    assert engine.gauges == (0, 0, 0.0)
    step_end = engine.next_event_at
    engine.advance(step_end - 1e-9)
    assert engine.gauges == (0, 0, 0.0)
    engine.advance(step_end)
    assert engine.gauges.running >= 1 and engine.gauges.running + engine.gauges.waiting == 5


def test_slow_steps_take_longer() -> None:
    engine = Engine(plan_replicas(make_cluster(replicas=1))[0])
    engine.admit("usual", 10, 1, 0.0)
    usual = engine.next_event_at
    engine.advance(usual)
    engine.set_slowdown(4.0)
    engine.admit("slow", 10, 1, 1.0)
    assert engine.next_event_at - 1.0 == pytest.approx(4 * usual)


def test_there_are_never_more_stretches_than_blocks() -> None:
    """Every block is a link of its own, the cache is full, and prompts take several steps."""
    num_blocks, num_links = 300, 250
    cluster = make_cluster(replicas=1, scheduler={"kind": "vllm-v1", "num_blocks": num_blocks})
    engine = Engine(plan_replicas(cluster)[0])
    cache = array_at(int(engine._replica.cache), CACHE, 1)[0]
    for number in range(4):
        links = np.zeros(num_links, LINK)
        links["key"], links["tokens"] = (
            1000 * number + np.arange(1, num_links + 1),
            16 * np.arange(1, num_links + 1),
        )
        engine.admit(number, 16 * num_links, 2, max(0.0, float(number)), links, 0)
        while engine.num_requests > 0:
            engine.advance(engine.next_event_at)
        assert cache["last_stretch"] <= num_blocks + 1
    assert cache["last_stretch"] >= num_blocks - 1, "else nothing was tried"
