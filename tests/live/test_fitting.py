"""What step times `pointsman calibrate` finds in what its probes saw."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl
import pytest

from pointsman.emulator.replica import EmulatedReplica
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
from pointsman.live.under_load import timed_answers
from pointsman.simulator.cost import cost_tables
from pointsman.simulator.plan import plan_replicas
from pointsman.simulator.steps import StepsCost
from pointsman.spec import parse_spec
from tests.simulator.factories import ROOT, make_cluster, make_workload, random_workload

from .known_times import API_S, FACTS, SCHEDULER, TRUTH, answers, decode_s, step_s, with_server

# What most GPUs are like: tokens are free up to a knee.
KNEE = {"kind": "steps", "step_s": [[1, 0.03], [128, 0.03], [2048, 0.4]], "context_s": 1e-7, "pair_s": 5e-9}


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
