"""`pointsman calibrate` against emulated servers, whose truth is known."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import yaml

from pointsman.cli.calibrate import calibrate
from pointsman.emulator.engine import load_engine
from pointsman.emulator.replica import EmulatedReplica
from pointsman.errors import InputError
from pointsman.live import probing
from pointsman.live.fitting import description, fit_probes
from pointsman.live.least_squares import nonnegative
from pointsman.live.probing import (
    Decode,
    Facts,
    Idle,
    Joined,
    Mixed,
    Probe,
    ProbeAnswer,
    Prober,
    Server,
)
from pointsman.live.traffic import fit_server, fit_traffic, read_traffic
from pointsman.live.under_load import timed_answers
from pointsman.router.replicas.discovery import FileSource
from pointsman.router.telemetry.recording import Recorder, Speed, new_recording
from pointsman.simulator.cost import cost_tables
from pointsman.simulator.plan import ReplicaPlan, plan_replicas
from pointsman.simulator.steps import StepsCost
from pointsman.spec import parse_spec
from pointsman.workload import Workload
from tests.router.ended import Over, ended
from tests.simulator.factories import ROOT, Run, make_cluster, make_workload, random_workload

TRUTH = {"kind": "linear", "a": 0.015, "b": 8e-5, "c": 4e-4, "d": 2e-7, "e": 5e-9}
SCHEDULER = {"kind": "vllm-v1", "num_blocks": 4000, "max_num_seqs": 12, "max_num_batched_tokens": 2048}
# What most GPUs are like: tokens are free up to a knee.
KNEE = {"kind": "steps", "step_s": [[1, 0.03], [128, 0.03], [2048, 0.4]], "context_s": 1e-7, "pair_s": 5e-9}
API_S = 0.012
FACTS = Facts("m", 4096, 16, 4000)


def truth(is_async: bool) -> ReplicaPlan:
    scheduler = SCHEDULER | {"async_scheduling": is_async, "api_s": API_S}
    return plan_replicas(make_cluster(replicas=1, scheduler=scheduler, cost=TRUTH))[0]


def step_s(num_prompt: int, num_decodes: int, context: float = 0.0) -> float:
    a, b, c, d, e = (float(TRUTH[name]) for name in "abcde")  # type: ignore[arg-type]
    return a + b * num_prompt + c * num_decodes + d * num_decodes * context + e * num_prompt**2 / 2


def decode_s(plan: ReplicaPlan, num_decodes: int, context: int) -> float:
    return plan.costs.stage_s(
        num_decodes=num_decodes, context_tokens=num_decodes * context, num_seqs=num_decodes
    )


def knee_step_s(num_prompt: int, num_decodes: int, context: float = 0.0) -> float:
    tables = cost_tables(parse_spec(StepsCost, KNEE), None)
    context_tokens = round(num_decodes * context)
    return tables.stage_s(num_prompt, num_decodes, context_tokens, pairs=num_prompt**2 / 2)


def made_probes(
    is_async: bool, rng: np.random.Generator, noise: float = 0.01, step_s: Callable[..., float] = step_s
) -> list[Probe]:
    """What a prober would see of a server with these costs and a budget of 2,048 tokens a step.

    `noise` is the standard deviation of times, as a share; 1 on average, with more slow ones than fast ones.
    """
    probes: list[Probe] = []

    def noisy(seconds: float) -> float:
        return seconds * float(rng.gamma(noise**-2, noise**2))

    for num_prompt in (16, 64, 128, 256, 512, 1024, 2000):
        for num_seqs in (1, 4, 12):
            probes.append(Idle(num_prompt, noisy(API_S + step_s(num_prompt, 0))))
            probes.append(Decode(num_seqs, num_prompt, noisy(step_s(0, num_seqs, num_prompt))))
            plain, mixed = step_s(0, num_seqs, 100), step_s(num_prompt, num_seqs, 100)
            waited = float(rng.uniform(0, plain)) + (plain if is_async else 0.0)
            ttft_s = noisy(API_S + waited + mixed)
            meanwhile = 3 if is_async else 2
            probes.append(Joined(num_seqs, 100, num_prompt, ttft_s, mixed - plain, plain, meanwhile))
    return probes


@pytest.mark.parametrize("is_async", [False, True])
def test_the_fit_finds_what_the_probes_were_made_of(is_async: bool) -> None:
    fit = fit_probes(made_probes(is_async, np.random.default_rng(1)), FACTS, None)
    cluster = description("http://s", FACTS, fit, None, 12)["replica"]
    plan = plan_replicas(make_cluster(replicas=[cluster]))[0]
    for num_decodes, context in ((1, 100), (8, 500), (12, 2000)):
        found = decode_s(plan, num_decodes, context)
        assert found == pytest.approx(step_s(0, num_decodes, context), rel=0.04)
    for num_prompt in (64, 700, 1800):
        found = plan.costs.stage_s(num_prompt, pairs=num_prompt**2 / 2)
        assert found == pytest.approx(step_s(num_prompt, 0), rel=0.04)
    assert fit.server.async_scheduling == is_async
    assert fit.server.api_s == pytest.approx(API_S, rel=0.1)
    assert fit.residual < 0.03
    assert 0 < fit.errors["prefill_s_per_token"] < 0.2


def test_noise_does_not_make_times_shorter() -> None:
    """Fits of errors relative to what was measured are about noise squared too short: 15 % here."""
    rng = np.random.default_rng(1)
    fit = fit_probes([one for _ in range(20) for one in made_probes(False, rng, noise=0.4)], FACTS, None)
    tables = cost_tables(fit.cost, None)
    for num_decodes, context in ((1, 100), (4, 500), (12, 1000)):
        found = tables.stage_s(
            num_decodes=num_decodes, context_tokens=num_decodes * context, num_seqs=num_decodes
        )
        assert found == pytest.approx(step_s(0, num_decodes, context), rel=0.06)
    for num_prompt in (256, 1024):
        found = fit.server.api_s + fit.server.api_s_per_token * num_prompt
        found += tables.stage_s(num_prompt, pairs=num_prompt**2 / 2)
        assert found == pytest.approx(API_S + step_s(num_prompt, 0), rel=0.06)


def test_tokens_are_not_taken_for_pairs_of_them() -> None:
    """Four prompts in one step have the tokens of a long one, but not its pairs."""
    rng = np.random.default_rng(1)
    fits = []
    for _ in range(10):
        probes = [
            replace(one, held_up_s=one.held_up_s * float(rng.gamma(25, 1 / 25)))
            if isinstance(one, Joined)
            else one
            for one in made_probes(False, rng, noise=0.2)
        ]
        fits.append(fit_probes(probes, FACTS, None))
    found = [cost_tables(fit.cost, None).stage_s(2000, pairs=4 * 500**2 / 2) for fit in fits]
    true_s = step_s(2000, 0) - 5e-9 * (2000**2 - 4 * 500**2) / 2
    assert min(found) > 0.75 * true_s


def loaded(slower: float, is_async: bool = True, api_s: float = API_S) -> list[Mixed]:
    """Answers of a server whose steps take `slower` times as long while requests come and go."""
    cost = {"kind": "linear"} | {name: slower * float(TRUTH[name]) for name in "abcde"}  # type: ignore[arg-type]
    loads = [
        (clients, random_workload(150, per_s, mean_tokens=200.0)) for clients, per_s in ((8, 3.0), (1, 0.5))
    ]
    return answers(cost, is_async, api_s, loads)


def answers(
    cost: dict[str, Any], is_async: bool, api_s: float, loads: Sequence[tuple[int, Workload]]
) -> list[Mixed]:
    """For each load what is taken for the number of clients, and the requests."""
    scheduler = SCHEDULER | {"max_num_seqs": 64, "async_scheduling": is_async, "api_s": api_s}
    mixed: list[Mixed] = []
    for num_clients, workload in loads:
        requests = Run(make_cluster(replicas=1, scheduler=scheduler, cost=cost), workload).to_end().requests
        began_at = mixed[-1].sent_at + 1000 if mixed else 0.0
        mixed += [
            Mixed(
                num_clients,
                began_at + one.arrived_at,
                int(one.num_prefill),
                int(one.num_decode),
                began_at + one.first_token_at,
                began_at + one.completed_at,
            )
            for one in requests
        ]
    return mixed


@pytest.mark.parametrize("is_async", [False, True])
def test_prompts_that_join_in_the_same_step_are_counted_together(is_async: bool) -> None:
    """One by one, each of them would seem to be free: the stretch behind the knee came out 40 % too long."""
    probes = made_probes(is_async, np.random.default_rng(1), step_s=knee_step_s)
    rng = np.random.default_rng(2)
    arrived_at = np.sort(np.repeat(3.0 * np.arange(20), 12) + rng.uniform(0, 0.4, 240))
    bursts = make_workload(arrived_at, rng.integers(32, 400, 240), rng.integers(8, 64, 240))
    loads = ((12, bursts), (8, random_workload(150, 3.0, mean_tokens=200.0)))
    fit = fit_probes([*probes, *answers(KNEE, is_async, API_S, loads)], FACTS, 64)
    tables = cost_tables(fit.cost, None)
    for num_prompt in (64, 128, 256, 700, 1800):
        found = tables.stage_s(num_prompt, pairs=num_prompt**2 / 2)
        assert found == pytest.approx(knee_step_s(num_prompt, 0), rel=0.04)
    for num_decodes, context in ((8, 500), (64, 300), (128, 300)):
        found = tables.stage_s(num_decodes=num_decodes, context_tokens=num_decodes * context)
        assert found == pytest.approx(knee_step_s(0, num_decodes, context), rel=0.04)
    assert fit.under_load == pytest.approx(1.0, abs=0.01)
    assert fit.server.async_scheduling == is_async


def h200_probes(load: str) -> list[Probe]:
    """As of a prober of the real H200 of docs/results/gpu.md, which schedules asynchronously."""
    steps, loads = (ROOT / "benchmarks" / "gpu" / "h200" / name for name in ("steps", "loads"))
    probes: list[Probe] = [
        Decode(one["batch"], one["mean_context"], one["step_ms"] / 1e3)
        for one in pl.read_csv(steps / "decode.csv").rows(named=True)
    ]
    for one in pl.read_csv(steps / "prefill.csv").rows(named=True):
        probes.append(Idle(one["prompt"], one["ttft_ms"] / 1e3))
    for one in pl.read_csv(steps / "mixed.csv").rows(named=True):
        plain_s, ttft_s = one["plain_step_ms"] / 1e3, one["ttft_ms"] / 1e3
        held_up_s = one["step_ms"] / 1e3 - plain_s
        probes.append(Joined(one["batch"], 150, one["prompt"], ttft_s, held_up_s, plain_s, 2))
    for one in pl.read_csv(loads / f"load_{load}.csv").rows(named=True):
        lengths = one["prompt_tokens"], one["output_tokens"]
        probes.append(Mixed(1, one["arrived_at"], *lengths, one["first_token_at"], one["completed_at"]))
    return probes


@pytest.mark.parametrize("load", ["0.3", "0.6"])
def test_a_real_server_is_told_apart_by_first_tokens_that_hardly_wait(load: str) -> None:
    """In seconds, those that wait long decide, at 0.6 for the wrong one."""
    fit = fit_probes(h200_probes(load), Facts("m", 8192, 16, 57512), 1024)
    assert fit.server.async_scheduling
    assert fit.server.api_s == pytest.approx(0.0046, abs=0.001)
    assert abs(fit.simulated["ttft_mean"]) < 0.05
    assert abs(fit.simulated["e2e_mean"]) < 0.01


def test_first_tokens_that_are_read_one_after_the_other_may_be_of_one_step() -> None:
    """Also of the step that brought an answer's own first token, which is before its first step counts."""
    times = (1.0, 1.001, 1.002, 1.05, 1.0502, 1.101)  # steps of 50 ms
    mixed = [Mixed(6, 0.5, 10 * number, 8, at, 1.5) for number, at in enumerate(times)]
    joined = [one.joined for one in timed_answers(mixed, 0.05)]
    assert joined == [((30, 40), (50,))] * 3 + [((50,),)] * 2 + [()]


def test_answers_that_come_and_go_agree_with_single_probes_where_nothing_is_shared() -> None:
    probes = made_probes(True, np.random.default_rng(1))
    fit = fit_probes([*probes, *loaded(1.0)], FACTS, None)
    assert fit.under_load == pytest.approx(1.0, abs=0.03)
    assert fit.num_probes == len(probes)
    assert all(abs(error) < 0.03 for error in fit.simulated.values())
    assert fit_probes(probes, FACTS, None).under_load is None


def test_a_server_that_is_slower_under_load_is_described_as_under_load() -> None:
    probes = made_probes(True, np.random.default_rng(1))
    fit = fit_probes([*probes, *loaded(1.3)], FACTS, None)
    assert fit.under_load == pytest.approx(1.3, abs=0.05)
    cluster = description("http://s", FACTS, fit, None, 12)
    plan = plan_replicas(make_cluster(replicas=[cluster["replica"]]))[0]
    for num_decodes in (2, 4, 8):
        found = decode_s(plan, num_decodes, 300)
        assert found == pytest.approx(1.3 * step_s(0, num_decodes, 300), rel=0.08)
    assert cluster["measured"]["under_load"] == pytest.approx(fit.under_load, rel=1e-3)


@pytest.mark.parametrize("is_async", [False, True])
def test_first_tokens_under_load_tell_the_api_servers_time_and_how_steps_are_planned(is_async: bool) -> None:
    mixed = loaded(1.0, is_async, api_s=0.03)
    fit = fit_probes([*made_probes(is_async, np.random.default_rng(1)), *mixed], FACTS, None)
    assert fit.server.async_scheduling == is_async
    assert fit.server.api_s == pytest.approx(0.03, abs=0.003)
    misled = fit_probes([*made_probes(not is_async, np.random.default_rng(1)), *mixed], FACTS, None)
    assert misled.server.async_scheduling == is_async


def test_slow_moments_count_for_what_they_add() -> None:
    """One answer in four takes three times as long: on average, steps take half as long again."""
    mixed = [
        replace(one, ended_at=one.ended_at + (number % 4 == 0) * 2.0 * (one.ended_at - one.first_token_at))
        for number, one in enumerate(one for one in loaded(1.0) if one.num_clients == 1)
    ]
    fit = fit_probes([*made_probes(True, np.random.default_rng(1)), *mixed], FACTS, None)
    cluster = description("http://s", FACTS, fit, None, 12)["replica"]
    plan = plan_replicas(make_cluster(replicas=[cluster]))[0]
    assert decode_s(plan, 1, 300) == pytest.approx(1.5 * step_s(0, 1, 300), rel=0.15)


def with_server(plan: ReplicaPlan, test: Callable[[EmulatedReplica], Awaitable[None]]) -> None:
    load_engine()

    async def run() -> None:
        server = EmulatedReplica("s", plan, "m", 1500, np.full(8, 16, np.int32), 1.0, "127.0.0.1", 0)
        await server.open()
        try:
            await asyncio.wait_for(test(server), 60)
        finally:
            server.close()
            await asyncio.sleep(0.01)

    asyncio.run(run())


def test_a_live_server_is_calibrated_within_seconds(tmp_path: Path) -> None:
    found: dict[str, Any] = {}

    async def probe(replica: EmulatedReplica) -> None:
        server = Server(replica.url)
        prober = Prober(server, await server.facts(), max_streams=16)
        probes = await prober.run(11.0)
        fit = fit_probes(probes, prober.facts, prober.limit_seqs)
        found["file"] = description(server.url, prober.facts, fit, prober.limit_seqs, prober.num_together)

    with_server(truth(is_async=True), probe)
    path = tmp_path / "server.yaml"
    path.write_text(yaml.safe_dump(found["file"]))
    plan = plan_replicas(make_cluster(replicas=[{"description": "server.yaml"}]), tmp_path)[0]
    # The emulator shares this machine with the prober: generous, but far from another device.
    assert decode_s(plan, 8, 100) == pytest.approx(step_s(0, 8, 100), rel=0.2)
    assert plan.costs.stage_s(1024, pairs=1024**2 / 2) == pytest.approx(step_s(1024, 0), rel=0.2)
    assert plan.num_blocks == SCHEDULER["num_blocks"]
    assert plan.max_seqs == SCHEDULER["max_num_seqs"]
    # How steps are planned shows in half a step's wait, which a stalled machine hides: see the tests above.
    backend = FileSource(path).read()[0]
    assert backend.calibration is not None
    assert backend.calibration["step_floor_s"] == pytest.approx(step_s(0, 1, 1024), rel=0.2)


def test_a_live_server_is_probed_with_answers_that_come_and_go() -> None:
    async def probe(replica: EmulatedReplica) -> None:
        server = Server(replica.url)
        prober = Prober(server, await server.facts(), max_streams=8)
        assert "mixed" in {kind for kind, _, _ in prober._plan()[:20]}
        prober.limit_seqs = 6
        found = [one for one in await prober.mixed(8, 1000) if isinstance(one, Mixed)]
        assert len(found) >= 6  # every client at least once, more if the machine lets them
        assert {one.num_clients for one in found} == {6}
        together = timed_answers(found, step_s(0, 1))
        assert 1.5 < np.mean([one.num_seqs for one in together]) < 6  # they think for half of the time
        said_s = sum(
            one.num_steps * step_s(0, round(one.num_seqs), one.mean_context)
            + sum(step_s(prompt, 0) - step_s(0, 0) for prompts in one.joined for prompt in prompts)
            for one in together
        )
        seconds = sum(one.seconds for one in together)
        assert seconds == pytest.approx(said_s, rel=0.25)  # the emulator shares this machine with the prober

    with_server(truth(is_async=False), probe)


def test_tokens_that_were_read_all_at_once_time_no_step() -> None:
    """As of a client that waited for a core: the steps would seem to take no time at all."""

    class Late(Server):
        async def ask(self, *wanted: Any) -> ProbeAnswer:
            return ProbeAnswer(0.0, [1.0] * 40, 40)

    prober = Prober(Late("http://127.0.0.1:9"), FACTS, max_streams=4)
    assert asyncio.run(prober.decode(4, 64)) == []


def test_long_prompts_do_not_look_like_a_limit() -> None:
    """The last of eight long prompts begins when the first answer has ended, whatever the limit."""
    scheduler = SCHEDULER | {"max_num_batched_tokens": 64}
    slow = plan_replicas(make_cluster(replicas=1, scheduler=scheduler, cost={"kind": "linear", "a": 0.002}))[
        0
    ]

    async def probe(replica: EmulatedReplica) -> None:
        server = Server(replica.url)
        prober = Prober(server, await server.facts(), max_streams=8)
        await prober.decode(8, 1024)
        assert prober.num_together < 8
        assert prober.limit_seqs is None

    with_server(slow, probe)


def test_a_second_calibration_finds_nothing_cached() -> None:
    async def ask_twice(replica: EmulatedReplica) -> None:
        ttfts_s = []
        for _ in range(2):
            server = Server(replica.url)
            ttfts_s.append((await server.ask((await server.facts()).model, 1400, 1)).ttft_s)
        assert ttfts_s[1] > 0.5 * step_s(1400, 0)

    with_server(truth(is_async=False), ask_twice)


def test_what_others_do_meanwhile_is_thrown_away() -> None:
    async def probe(replica: EmulatedReplica) -> None:
        server = Server(replica.url)
        prober = Prober(server, await server.facts(), max_streams=2)
        busy = asyncio.create_task(server.ask("m", 16, 1400))
        await asyncio.sleep(0.1)
        assert not await prober._is_quiet()
        busy.cancel()
        await asyncio.gather(busy, return_exceptions=True)
        assert await prober._is_quiet()

    with_server(truth(is_async=False), probe)


def test_recorded_traffic_gives_a_line(tmp_path: Path) -> None:
    cost = {"kind": "linear", "a": 0.01, "b": 1e-4, "c": 5e-4}
    run = Run(make_cluster(replicas=1, cost=cost), random_workload(600, 6.0, mean_tokens=120.0)).to_end()
    table = pl.DataFrame(
        {name: run.requests[name] for name in ("arrived_at", "first_token_at", "completed_at")}
        | {"num_prefill_tokens": run.requests["num_prefill"], "num_decode_tokens": run.requests["num_decode"]}
    )
    path = tmp_path / "traffic.jsonl"
    table.write_ndjson(path)
    (fit,) = fit_traffic(read_traffic(path))
    assert fit.cost["a"] == pytest.approx(0.01, rel=0.05)
    assert fit.cost["b"] == pytest.approx(1e-4, rel=0.1)
    assert fit.cost["c"] == pytest.approx(5e-4, rel=0.1)
    arrivals = tmp_path / "arrivals.jsonl"
    table.select("arrived_at", "num_prefill_tokens", "num_decode_tokens").write_ndjson(arrivals)
    with pytest.raises(InputError, match="alone say nothing about speed"):
        read_traffic(arrivals)


def written_traffic(path: Path, **changed: Any) -> Path:
    """Recorded requests of a server with steps of 10 ms, with other columns."""
    cost = {"kind": "linear", "a": 0.01, "b": 1e-4, "c": 5e-4}
    run = Run(make_cluster(replicas=1, cost=cost), random_workload(300, 6.0, mean_tokens=120.0)).to_end()
    columns = {name: run.requests[name] for name in ("arrived_at", "first_token_at", "completed_at")}
    columns |= {"num_prefill_tokens": run.requests["num_prefill"]}
    columns |= {"num_decode_tokens": run.requests["num_decode"]}
    table = pl.DataFrame(columns).with_columns(**changed)
    table.write_ndjson(path)
    return path


TIME_COLUMNS = ("arrived_at", "first_token_at", "completed_at")
DATED = {
    name: pl.from_epoch((1e6 * (pl.col(name) + 1.7e9)).cast(pl.Int64), "us").dt.strftime("%FT%T%.6f")
    for name in TIME_COLUMNS
}
TEXT = {name: pl.col(name).cast(pl.String) + " " for name in (*TIME_COLUMNS, "num_prefill_tokens")}
TWICE = {"prompt_tokens": pl.col("num_prefill_tokens")}


@pytest.mark.parametrize("changed", [DATED, TEXT, TWICE], ids=["dates", "text", "both names"])
def test_recorded_traffic_may_hold_dates_and_numbers_as_text(changed: Any, tmp_path: Path) -> None:
    plain, other = (
        fit_traffic(read_traffic(written_traffic(tmp_path / name, **columns)))[0]
        for name, columns in (("plain.jsonl", {}), ("other.jsonl", changed))
    )
    for name, value in plain.cost.items():
        assert other.cost[name] == pytest.approx(value, rel=1e-3)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"held_s": pl.lit("x")}, "column held_s holds 'x', which is no number"),
        ({"arrived_at": pl.lit([1.0])}, "column arrived_at holds"),
        ({"completed_at": pl.lit("2023-02-30 10:00")}, "column completed_at holds '2023-02-30 10:00'"),
        ({"outcome": pl.lit("failed")}, "none of its 300 requests was completed"),
        ({"server": pl.lit(None)}, "none of its 300 requests was completed by a server"),
        ({"first_token_at": pl.lit(None)}, "with all of its times"),
        ({"completed_at": pl.col("arrived_at") - 1}, "completed_at is before first_token_at in 300 of 300"),
        ({"first_token_at": pl.col("arrived_at") - 1}, "first_token_at is before arrived_at in 300 of 300"),
        ({"num_cached_tokens": pl.lit(100_000)}, "num_cached_tokens is more than the prompt in 300 of 300"),
        ({name: 1000 * pl.col(name) for name in TIME_COLUMNS}, "as if times were not in seconds"),
    ],
)
def test_recorded_traffic_that_cannot_be_is_refused_by_column(
    changed: Any, message: str, tmp_path: Path
) -> None:
    path = written_traffic(tmp_path / "traffic.jsonl", **changed)
    with pytest.raises(InputError, match=f"--traffic = .*{re.escape(message)}"):
        read_traffic(path)
    with pytest.raises(InputError):
        calibrate(traffic=path, out=tmp_path / "out.yaml")
    assert not (tmp_path / "out.yaml").exists()


def test_answers_that_did_not_stream_tell_nothing_of_steps(tmp_path: Path) -> None:
    path = written_traffic(tmp_path / "traffic.jsonl", completed_at=pl.col("first_token_at"))
    with pytest.raises(InputError, match="none of its answers streamed 8 tokens or more"):
        fit_traffic(read_traffic(path))


def test_what_was_cached_costs_nothing(tmp_path: Path) -> None:
    cost = {"kind": "linear", "a": 0.01, "b": 1e-4, "c": 5e-4}
    run = Run(make_cluster(replicas=1, cost=cost), random_workload(600, 6.0, mean_tokens=120.0)).to_end()
    cached = np.random.default_rng(3).integers(0, 1000, len(run.requests))
    pl.DataFrame(
        {name: run.requests[name] for name in ("arrived_at", "first_token_at", "completed_at")}
        | {"prompt_tokens": run.requests["num_prefill"] + cached, "cached_tokens": cached}
        | {"output_tokens": run.requests["num_decode"]}
    ).write_csv(tmp_path / "traffic.csv")
    (fit,) = fit_traffic(read_traffic(tmp_path / "traffic.csv"))
    assert fit.cost["b"] == pytest.approx(1e-4, rel=0.1)


def test_what_the_router_records_can_be_calibrated_by(tmp_path: Path) -> None:
    """Two servers, requests that failed, and some that did not stream."""
    path = tmp_path / "traffic.jsonl"
    recorder = Recorder(new_recording(path))
    costs = {"http://a": 0.01, "http://b": 0.02}
    for server, step_s in costs.items():
        cost = {"kind": "linear", "a": step_s, "b": 1e-4, "c": 5e-4}
        workload = random_workload(500, 4.0, mean_tokens=120.0)
        for n, one in enumerate(Run(make_cluster(replicas=1, cost=cost), workload).to_end().requests):
            is_cut = n % 50 == 0
            over = Over(
                arrived_at=recorder._started_at + float(one.arrived_at),
                prompt_tokens=int(one.num_prefill),
                output_tokens=int(one.num_decode),
                session_name="the first one" if n == 400 else None,
                outcome="cut" if is_cut else "completed",
                replica_name=server,
                ttft_s=None if is_cut else float(one.first_token_at - one.arrived_at),
                e2e_s=900.0 if is_cut else float(one.completed_at - one.arrived_at),
            )
            recorder.add(ended(over), lambda server: Speed(None, None, None, None))
    recorder.close()
    fits = fit_traffic(read_traffic(path))
    assert [fit.server for fit in fits] == list(costs)
    for fit in fits:
        assert fit.cost["a"] == pytest.approx(costs[fit.server], rel=0.1)
        assert fit.cost["b"] == pytest.approx(1e-4, rel=0.25)


@pytest.mark.parametrize("is_async", [False, True])
def test_recorded_traffic_tells_the_times_beside_the_steps(is_async: bool, tmp_path: Path) -> None:
    """By a replay, which says how far off the fit is; half of the requests are another server's."""
    rng = np.random.default_rng(4)
    scheduler = {"kind": "vllm-v1", "num_blocks": 4000, "max_num_batched_tokens": 8192}
    scheduler |= {"async_scheduling": is_async, "api_s": API_S}
    cost = {"kind": "linear", "a": 0.015, "b": 8e-5, "c": 4e-4}
    run = Run(
        make_cluster(replicas=1, scheduler=scheduler, cost=cost), random_workload(500, 4.0, mean_tokens=150.0)
    ).to_end()
    mine = {name: run.requests[name] for name in ("arrived_at", "first_token_at", "completed_at")}
    mine |= {
        "num_prefill_tokens": run.requests["num_prefill"],
        "num_decode_tokens": run.requests["num_decode"],
    }
    late_s = rng.uniform(0, 1, len(run.requests))
    other = mine | {name: mine[name] + late_s for name in ("first_token_at", "completed_at")}
    tables = [pl.DataFrame(one | {"server": name}) for one, name in ((mine, "http://a"), (other, "http://b"))]
    pl.concat(tables).write_ndjson(tmp_path / "traffic.jsonl")
    fit = fit_server(read_traffic(tmp_path / "traffic.jsonl"), "http://a", num_blocks=4000)
    assert fit.server == "http://a"
    assert fit.scheduler["async_scheduling"] == is_async
    assert fit.scheduler["api_s"] == pytest.approx(API_S, abs=0.003)
    assert fit.scheduler["num_blocks"] == 4000
    assert abs(fit.replayed["ttft_mean"]) < 0.05
    assert abs(fit.replayed["e2e_mean"]) < 0.02


def test_traffic_and_what_the_server_says_make_one_file(tmp_path: Path) -> None:
    """As a user whose servers share a card would do: nothing is probed."""
    cost = {"kind": "linear", "a": 0.01, "b": 1e-4, "c": 5e-4}
    run = Run(make_cluster(replicas=1, cost=cost), random_workload(300, 4.0, mean_tokens=120.0)).to_end()
    times = {name: run.requests[name] for name in ("arrived_at", "first_token_at", "completed_at")}
    table = pl.DataFrame(
        times
        | {"num_prefill_tokens": run.requests["num_prefill"], "num_decode_tokens": run.requests["num_decode"]}
    )
    traffic, out = tmp_path / "traffic.jsonl", tmp_path / "server.yaml"

    async def ask(replica: EmulatedReplica) -> None:
        def call() -> None:
            table.with_columns(server=pl.lit(replica.url + "/")).write_ndjson(traffic)
            calibrate(url=replica.url, traffic=traffic, out=out)
            table.with_columns(server=pl.lit("http://else")).write_ndjson(traffic)
            with pytest.raises(InputError, match=r"has no requests of .* but of http://else"):
                calibrate(url=replica.url, traffic=traffic)

        await asyncio.to_thread(call)

    with_server(truth(is_async=False), ask)
    plan = plan_replicas(make_cluster(replicas=[{"description": "server.yaml"}]), tmp_path)[0]
    assert plan.num_blocks == SCHEDULER["num_blocks"]
    assert decode_s(plan, 8, 100) == pytest.approx(0.01 + 8 * 5e-4, rel=0.1)
    backend = FileSource(out).read()[0]
    assert backend.calibration is not None
    assert backend.calibration["prefill_s_per_token"] == pytest.approx(1e-4, rel=0.15)


def test_a_server_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be reached"):
        asyncio.run(Server("http://127.0.0.1:9").facts())


@contextlib.asynccontextmanager
async def answering(answers: Mapping[str, str]) -> AsyncIterator[tuple[str, list[str]]]:
    """A server by the paths it answers, silent on others -> its address, and the heads of requests so far."""
    heads: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append((await reader.readuntil(b"\r\n\r\n")).decode())
        if (answer := answers.get(heads[-1].split()[1])) is not None:
            status, _, body = answer.partition(" ")
            writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode())
            await writer.drain()
        await reader.read()
        writer.close()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}", heads
    finally:
        listener.close()
        await asyncio.sleep(0.01)  # until all have seen that their clients are gone


MODELS = '200 {"data": [{"id": "m", "max_model_len": 2048}]}'


def test_the_servers_get_their_key(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with answering({"/v1/models": MODELS, "/metrics": "200 ", "/v1/completions": "401 no"}) as (
            url,
            heads,
        ):
            server = Server(url)
            assert await server.facts() == Facts("m", 2048, None, None)
            with pytest.raises(InputError, match=r"fails \(401: no\); set \$POINTSMAN_BACKEND_KEY"):
                await server.ask("m", 16, 4)
            assert len(heads) == 3
            assert all("\r\nauthorization: Bearer secret\r\n" in head for head in heads)
        async with answering({"/v1/models": "401 no"}) as (url, _):
            with pytest.raises(InputError, match=r"/v1/models answers 401; set \$POINTSMAN_BACKEND_KEY"):
                await Server(url).facts()

    monkeypatch.setenv("POINTSMAN_BACKEND_KEY", "secret")
    asyncio.run(run())


def test_a_server_that_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with answering({}) as (url, _):
            with pytest.raises(InputError, match=rf"--url = '{url}': cannot be reached \(timed out\)"):
                await Server(url).facts()
            with pytest.raises(InputError, match=rf"--url = '{url}': says nothing for 0.3 s of a completion"):
                await Server(url).ask("m", 20, 4)
        async with answering({"/v1/models": "200 {}"}) as (url, _):
            with pytest.raises(InputError, match="names no model"):
                await Server(url).facts()

    monkeypatch.setattr(probing, "GET_TIMEOUT_S", 0.1)
    monkeypatch.setattr(probing, "SILENT_S", 0.1)
    asyncio.run(asyncio.wait_for(run(), 20))


@pytest.mark.parametrize("labels", ["", '{engine="0"}'])
def test_a_busy_server_is_not_quiet(labels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        gauges = f"vllm:num_requests_running{labels} 1.0\nvllm:num_requests_waiting{labels} 2.0\n"
        async with answering({"/metrics": f"200 {gauges}"}) as (url, _):
            prober = Prober(Server(url), FACTS)
            assert (await prober.server.gauges())[:2] == (1, 2)
            assert not await prober._is_quiet()

    monkeypatch.setattr(probing, "QUIET_S", 0.2)
    asyncio.run(run())


def test_nonnegative_least_squares() -> None:
    """Against a search over all sets of columns."""
    rng = np.random.default_rng(3)
    for _ in range(20):
        table, values = rng.normal(size=(12, 4)), rng.normal(size=12)
        best = min(
            float(np.sum((table[:, chosen] @ x - values) ** 2))
            for mask in range(16)
            for chosen in [[j for j in range(4) if mask >> j & 1]]
            for x in [np.linalg.lstsq(table[:, chosen], values, rcond=None)[0] if chosen else np.zeros(0)]
            if np.all(x >= 0)
        )
        found = nonnegative(table, values)
        assert np.all(found >= 0)
        assert float(np.sum((table @ found - values) ** 2)) == pytest.approx(best)


def test_what_is_no_recording_is_told_in_words(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("cluster: {replicas: 4}\n")
    with pytest.raises(InputError) as caught:
        read_traffic(path)
    assert "cannot be read as JSON lines, as its name does not end in .csv" in str(caught.value)
