"""The public API: the same decisions as in the simulator, and a gateway of twenty lines that works."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from simulator.factories import Run, make_cluster, make_workload, random_workload

from pointsman.compiled.memory import Records
from pointsman.compiled.random import first_state
from pointsman.errors import InputError
from pointsman.routing.calibration import FIGURES
from pointsman.routing.core import Core, Request, session_number
from pointsman.routing.heuristics import HEURISTICS
from pointsman.routing.policy import PolicySpec, PolicyTables, fill_memory
from pointsman.routing.records import MEMORY
from pointsman.routing.sharing import SharedBooks
from pointsman.routing.signals import SCRAPED_AT, SCRAPED_KV_USE, SCRAPED_RUNNING, SCRAPED_WAITING
from pointsman.simulator.run import advise
from pointsman.workload import Workload

from .recording import FIRST_TOKEN, TOKEN, stream_of

REPOSITORY = Path(__file__).parents[2]
SEED = 3
RATE_RPS = 160.0


def spec_of(kind: str) -> PolicySpec:
    if kind == "linear-score":
        return PolicySpec(kind=kind, weights={"outstanding": 1.0, "prefill_backlog_s": 5.0, "kv_use": 2.0})
    return PolicySpec.model_validate(kind)


class Simulated(NamedTuple):
    """A run in which a policy decides inside the simulator, and what its router saw."""

    run: Run
    decisions: list[tuple[float, int, int, int, np.ndarray]]  # time, request, action, queue, scraped rows


def simulate(spec: PolicySpec, workload: Workload, overtake_s: float) -> Simulated:
    """The policy has the memory that a core of the same seed starts with."""
    cluster = make_cluster(
        replicas=[{"count": 2}, {"count": 2, "slowdown": 1.5}], hold={"overtake_s": overtake_s}
    )
    run = Run(cluster, workload, None, num_logged_batches=200_000)
    tables = PolicyTables([spec], 4)
    for name in ("may_hold", "hold_s", "kv_limit", "prefill_limit", "stream_limit", "small_first"):
        run.policies.rows[name] = tables.rows[name]
    memories = Records(1, MEMORY)
    fill_memory(memories[0], memories, 4, first_state(SEED, 0xDEC1DE))
    actions = np.zeros(1, np.int64)
    decisions = []
    for request in run.decisions():
        advise(run.clusters.sims, tables.rows, memories, actions, 0, 1)
        run.action = int(actions[0])
        scraped = run.table[[SCRAPED_RUNNING, SCRAPED_WAITING, SCRAPED_KV_USE, SCRAPED_AT]]
        queue_size = int(run.sim.router.queue_size)
        decisions.append((float(run.sim.now), request, run.action, queue_size, scraped))
    assert run.sim.num_preemptions == 0
    return Simulated(run, decisions)


def replay_by_core(simulated: Simulated, spec: PolicySpec, overtake_s: float) -> list[tuple[int, int]]:
    """(simulated action, the core's action) of every decision; both ask about the same requests."""
    run = simulated.run
    names = [f"replica {k}" for k in range(len(run.plans))]
    figures = [{name: float(getattr(plan, name)) for name in FIGURES} for plan in run.plans]
    core = Core(spec, dict(zip(names, figures, strict=True)), seed=SEED, overtake_s=overtake_s, now=0.0)
    core._books._recalibrate = lambda now: None  # type: ignore[method-assign]  # no doubts in a simulator
    requests = [
        Request(int(one.num_prefill), session=int(one.session), arrived_at=float(one.arrived_at))
        for one in run.requests
    ]
    tickets: dict[int, int] = {}
    arriving = iter(requests)
    arrival = next(arriving, None)
    held: list[Request] = []
    stream = iter(sorted(stream_of(run)))
    event = next(stream, None)
    scraped_at = 0.0
    both = []

    def arrive(until: float) -> None:
        """A gateway asks when a request comes: how large it is follows from what is known by then."""
        nonlocal arrival
        while arrival is not None and arrival.arrived_at <= until:
            held.append(arrival)
            core.next_of(held, now=arrival.arrived_at)
            arrival = next(arriving, None)

    for now, i, action, queue_size, scraped in simulated.decisions:
        while event is not None and event[0] <= now:
            at, what, j = event
            arrive(at)
            if what == FIRST_TOKEN:
                core.first_token(tickets[j], now=at)
            elif what == TOKEN:
                core.tokens(tickets[j], 1, now=at)
            else:
                core.finished(tickets[j], *map(int, run.requests[["num_prefill", "num_decode"]][j]), now=at)
            event = next(stream, None)
        if scraped[-1, 0] != scraped_at:
            scraped_at = float(scraped[-1, 0])
            for k, name in enumerate(names):
                core.scraped(name, *scraped[:-1, k].tolist(), now=scraped_at)
        arrive(now)
        assert core.next_of(held, now=now) is requests[i]
        chosen = core.decide(requests[i], queue_size, now=now)
        both.append((action, 0 if chosen is None else names.index(chosen) + 1))
        if action > 0:
            held.remove(requests[i])
            tickets[i] = core.sent(requests[i], names[action - 1], now=now)
    return both


@pytest.mark.parametrize("kind", [*(kind for kind in HEURISTICS if kind != "vidur-lor"), "default"])
def test_the_simulator_and_the_public_api_decide_alike(kind: str) -> None:
    """All but Vidur's rule, which reads the servers' own queues: a router has no such signal."""
    spec = spec_of(kind)
    workload = random_workload(300, rate_rps=RATE_RPS)
    both = replay_by_core(simulate(spec, workload, 0.0), spec, 0.0)
    assert len(both) >= 300
    assert [simulated for simulated, _ in both] == [decided for _, decided in both]
    assert len({action for action, _ in both} - {0}) > 1


@pytest.mark.parametrize("overtake_s", [0.0, 20.0])
@pytest.mark.parametrize("kind", ["hold-until-room", "late-binding", "gathering", "default"])
def test_both_take_small_requests_first(kind: str, overtake_s: float) -> None:
    rng = np.random.default_rng(SEED)
    prompts = (2.0 ** rng.uniform(6.0, 13.0, 200)).astype(int)
    workload = make_workload(np.cumsum(rng.exponential(0.02, 200)), prompts, rng.integers(1, 80, 200))
    spec = spec_of(kind).model_copy(update={"small_first": 0.0 if overtake_s else 0.4})
    if kind != "default":
        spec = spec.model_copy(update={"stream_limit": 5})
    simulated = simulate(spec, workload, overtake_s)
    both = replay_by_core(simulated, spec, overtake_s)
    assert [simulated for simulated, _ in both] == [decided for _, decided in both]
    sent = [request for _, request, action, *_ in simulated.decisions if action > 0]
    assert sum(np.diff(sent) < 0) > 20  # not in order of arrival


def test_held_until_there_is_room_and_not_for_ever() -> None:
    core = Core(
        "hold-until-room", {"a": dict.fromkeys(FIGURES, 1e-3) | {"kv_capacity_tokens": 1000.0}}, now=0.0
    )
    first, second = Request(800, arrived_at=0.0), Request(800, arrived_at=0.0)
    assert core.decide(first, now=0.0) == "a"
    ticket = core.sent(first, "a", now=0.0)
    assert core.decide(second, now=1.0) is None
    assert core.decide(second, now=59.0) is None
    assert core.decide(second, now=60.0) == "a"
    core.first_token(ticket, now=61.0)
    core.finished(ticket, 800, 1, now=61.0)
    assert core.decide(Request(800, arrived_at=61.0), now=61.0) == "a"
    assert core.signals("a")["outstanding"] == 0.0


def test_replicas_come_and_go_by_name() -> None:
    core = Core("least-outstanding", ["a", "b"])
    with pytest.raises(InputError, match="is there already"):
        core.add("a")
    request = Request(10)
    ticket = core.sent(request, "a")
    assert {core.decide(Request(10)) for _ in range(20)} == {"b"}
    assert core.decide(Request(10), excluded=["b"]) == "a"
    core.set_accepting("b", False)
    assert core.decide(Request(10)) == "a"
    core.remove("a")
    assert core.decide(Request(10)) is None  # b does not accept any
    core.failed(ticket)
    core.set_accepting("b", True)
    assert core.decide(Request(10)) == "b" and core.replicas == ("b",)
    with pytest.raises(InputError, match="known: b"):
        core.signals("a")


def test_sessions_stay_and_policies_can_be_switched() -> None:
    core = Core("session-affinity", ["a", "b", "c"])
    chosen = {core.decide(Request(10, session=session_number("user 17"))) for _ in range(20)}
    assert len(chosen) == 1
    core.switch("round-robin")
    assert [core.decide(Request(10)) for _ in range(6)] == ["a", "b", "c"] * 2
    assert core.policy == "round-robin" and core.explain()["replica"] == "c"


def test_processes_see_what_the_others_have_outstanding(tmp_path: Path) -> None:
    cores = [
        Core("least-outstanding", ["a", "b"], shared=SharedBooks(tmp_path / "books", 2), index=index)
        for index in range(2)
    ]
    cores[0].sent(Request(10), "a")
    assert {cores[1].decide(Request(10)) for _ in range(20)} == {"b"}


def test_a_gateway_of_twenty_lines(tmp_path: Path) -> None:
    """examples/gateway.py in front of emulated servers: every answer arrives whole, and once."""
    python = [sys.executable, "-u"]
    emulator = subprocess.Popen(
        [
            *python,
            "-m",
            "pointsman",
            "emulate",
            "--replicas",
            "2",
            "--port",
            "0",
            "--json",
        ],
        stdout=subprocess.PIPE,
        cwd=REPOSITORY,
    )
    try:
        servers = [one["url"].removeprefix("http://") for one in read_json(emulator)["replicas"]]
        port = unused_port()
        gateway = subprocess.Popen([*python, "examples/gateway.py", str(port), *servers], cwd=REPOSITORY)
        try:
            wait_for(port)
            with ThreadPoolExecutor(6) as pool:
                answers = list(pool.map(lambda _: ask(port), range(24)))
            assert all(b'"length"' in answer and answer.endswith(b"data: [DONE]\n\n") for answer in answers)
            assert sum(map(num_served, servers)) == 24
        finally:
            gateway.kill()
            gateway.wait()
    finally:
        emulator.terminate()
        emulator.communicate()


def read_json(process: subprocess.Popen[bytes]) -> Any:
    """What a server says of itself when it is up."""
    assert process.stdout is not None
    text = b""
    for line in process.stdout:
        text += line
        if line.startswith(b"}"):
            break
    return json.loads(text)


def unused_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def wait_for(port: int) -> None:
    for _ in range(600):
        try:
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
            return
        except OSError:
            time.sleep(0.1)
    raise TimeoutError


def ask(port: int) -> bytes:
    prompt = {"model": "llama-3-8b", "prompt": "hello " * 50}
    body = prompt | {"max_tokens": 8, "stream": True, "ignore_eos": True}
    with closing(HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        headers = {"content-type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        return connection.getresponse().read()


def num_served(server: str) -> int:
    with closing(HTTPConnection(server, timeout=10)) as connection:
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
    return int(
        sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:request_success_total"))
    )


LOAD = ("outstanding", "waiting", "decoding", "pending_prefill_tokens", "context_tokens", "generated_tokens")


def load_of(core: Core) -> dict[str, float]:
    known = core.signals("a")
    return {name: known[name] for name in LOAD if known[name]}


FIRST, MORE, FINISHED, FAILED = "first_token", "tokens", "finished", "failed"


@pytest.mark.parametrize("end", [FINISHED, FAILED])
@pytest.mark.parametrize(
    "said", [[FIRST, FIRST], [MORE], [MORE, FIRST], [FIRST, MORE, FIRST, MORE], [FIRST]], ids=" ".join
)
def test_what_is_said_twice_or_too_early_leaves_nothing_behind(said: list[str], end: str) -> None:
    core = Core("least-outstanding", ["a"])
    ticket = core.sent(Request(100), "a")
    for call in [*said, end, end, *said]:
        arguments = (5,) if call == MORE else ()
        getattr(core, call)(ticket, *arguments)
    assert load_of(core) == {}


def test_a_ticket_is_for_one_sending() -> None:
    core = Core("least-outstanding", ["a"])
    before = core.sent(Request(100), "a")
    core.finished(before)
    core.sent(Request(100), "a")
    for call in (core.failed, core.finished, core.first_token):
        call(before)
    assert load_of(core) == {"outstanding": 1, "waiting": 1, "pending_prefill_tokens": 100}
    for never in (0, -1, 99):
        with pytest.raises(InputError, match="was never given"):
            core.failed(never)


def test_one_name_is_no_list_of_names() -> None:
    with pytest.raises(InputError, match="is one name"):
        Core(replicas="http://a:8000")


def test_a_prompt_that_seems_empty_is_placed() -> None:
    core = Core("default", ["a", "b"])
    for prompt_tokens in (0, -5):
        assert core.decide(Request(prompt_tokens)) in ("a", "b")
