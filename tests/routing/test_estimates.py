"""What a router finds out about its servers' speed, against servers whose speed is known exactly."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest

from pointsman.routing.books import Books
from pointsman.routing.calibration import typical_step_s

TOKENS_PER_STEP = 2048


class Speed(NamedTuple):
    step_floor_s: float
    decode_s_per_token: float
    prefill_s_per_token: float


FAST = Speed(7.0e-3, 59e-6, 34e-6)  # two thirds of an H200 with an 8B model, and one third
SLOW = Speed(10.0e-3, 97e-6, 69e-6)


class Server:
    """Continuous batching with chunked prefill: a step takes what its speed says, with 5 % of noise."""

    def __init__(self, speed: Speed, rng: np.random.Generator) -> None:
        self.speed = speed
        self._rng = rng
        self.running: list[dict[str, Any]] = []
        self.waiting: list[dict[str, Any]] = []
        self.ends_at = math.inf

    def start(self, now: float) -> None:
        budget = TOKENS_PER_STEP
        self.chunk = []
        for request in self.waiting:
            taken = min(request["left"], budget)
            if taken > 0:
                request["left"] -= taken
                budget -= taken
                self.chunk.append(request)
        num_streams, num_prompt = len(self.running), TOKENS_PER_STEP - budget
        if num_streams == 0 and num_prompt == 0:
            self.ends_at = math.inf
            return
        others = max(0, num_streams - (num_prompt == 0))
        floor_s, decode_s, prefill_s = self.speed
        step_s = floor_s + decode_s * others + prefill_s * num_prompt
        self.ends_at = now + step_s * math.exp(0.05 * self._rng.normal())


def serve(
    books: Books,
    speeds: Sequence[Speed],
    rate_rps: float,
    shares: Sequence[float],
    num_requests: int,
    change: tuple[float, Speed] | None = None,
    seed: int = 0,
    told: Sequence[Speed | None] = (None, None),
    later: tuple[int, Sequence[float]] | None = None,
) -> list[tuple[float, int, list[dict[str, float]]]]:
    """Requests sent at random by `shares`; -> time, number finished and estimates, after each finish.

    `later`: from request number so-and-so on by these shares.
    """
    rng = np.random.default_rng(seed)
    servers = [Server(speed, rng) for speed in speeds]
    slots = [books.add(f"server {k}", one and one._asdict()) for k, one in enumerate(told)]
    arrivals = np.cumsum(rng.exponential(1.0 / rate_rps, num_requests))
    prompts = np.maximum(16, rng.lognormal(6.4, 1.0, num_requests)).astype(int)
    outputs = np.maximum(2, rng.lognormal(5.0, 0.8, num_requests)).astype(int)
    seen: list[tuple[float, int, list[dict[str, float]]]] = []
    num_sent = 0
    while len(seen) < num_requests:
        k = int(np.argmin([server.ends_at for server in servers]))
        arrival = arrivals[num_sent] if num_sent < num_requests else math.inf
        now = min(arrival, servers[k].ends_at)
        if change is not None and now >= change[0]:
            servers[0].speed = change[1]
        if arrival <= servers[k].ends_at:
            k = int(rng.choice(len(servers), p=later[1] if later and num_sent >= later[0] else shares))
            request = {"prompt": int(prompts[num_sent]), "left": int(prompts[num_sent]), "num_output": 0}
            request |= {
                "output": int(outputs[num_sent]),
                "ticket": books.sent(slots[k], request["prompt"], now),
            }
            num_sent += 1
            servers[k].waiting.append(request)
            if servers[k].ends_at == math.inf:
                servers[k].start(now)
            continue
        server = servers[k]
        for request in list(server.running):
            request["num_output"] += 1
            books.tokens(request["ticket"], 1, now)
            if request["num_output"] >= request["output"]:
                books.finished(request["ticket"], now, request["prompt"], request["output"])
                server.running.remove(request)
                seen.append((now, len(seen) + 1, [books.replica_signals(slot) for slot in slots]))
        for request in server.chunk:
            if request["left"] == 0:
                server.waiting.remove(request)
                request["num_output"] = 1
                books.first_token(request["ticket"], now)
                server.running.append(request)
        server.start(now)
    return seen


@pytest.mark.parametrize("rate_rps", [2.0, 6.0, 12.0, 18.0])
def test_within_ten_per_cent_after_200_requests_a_server_and_steady(rate_rps: float) -> None:
    seen = serve(Books(now=0.0), (FAST, SLOW), rate_rps, (0.6, 0.4), 900)
    for _, _, estimates in seen[500:]:
        for speed, found in zip((FAST, SLOW), estimates, strict=True):
            assert found["step_floor_s"] == pytest.approx(speed.step_floor_s, rel=0.1)
            assert found["prefill_s_per_token"] == pytest.approx(speed.prefill_s_per_token, rel=0.15)
            assert found["decode_s_per_token"] == pytest.approx(speed.decode_s_per_token, rel=0.4)
            typical_s = typical_step_s(speed._asdict())
            assert typical_step_s(found) == pytest.approx(typical_s, rel=0.1)
        assert estimates[0]["weight"] > 1.3 * estimates[1]["weight"], "unequal servers are never pooled"


def test_equal_servers_have_the_same_figures() -> None:
    """Exactly: else one of two idle equals would get all the traffic of a quiet hour."""
    seen = serve(Books(now=0.0), (FAST, FAST), 10.0, (0.5, 0.5), 600)
    for _, _, (one, other) in seen[100:]:
        for name in ("step_floor_s", "decode_s_per_token", "prefill_s_per_token", "weight"):
            assert one[name] == other[name]


def test_a_server_that_changes_is_noticed_within_half_a_minute() -> None:
    throttled = Speed(*(2.0 * figure for figure in FAST))
    seen = serve(Books(now=0.0), (FAST, FAST), 6.0, (0.5, 0.5), 900, change=(60.0, throttled))
    before = next(estimates for at, _, estimates in reversed(seen) if at < 60.0)
    after = next(estimates for at, _, estimates in seen if at >= 90.0)
    assert before[0]["weight"] == pytest.approx(1.0)
    assert after[0]["step_floor_s"] == pytest.approx(throttled.step_floor_s, rel=0.15)
    assert after[1]["step_floor_s"] == pytest.approx(FAST.step_floor_s, rel=0.1)


@pytest.mark.parametrize("is_told", [False, True])
def test_what_was_learned_stays_while_the_others_serve(is_told: bool) -> None:
    """A slow server that gets no more requests, as in a conversation that stays where its prefix is."""
    slow = times(FAST, 2.0)
    told = (FAST if is_told else None,) * 3
    books = Books(now=0.0)
    speeds, shares = (FAST, FAST, slow), (0.4, 0.4, 0.2)
    seen = serve(books, speeds, 12.0, shares, 1500, told=told, later=(300, (0.5, 0.5, 0.0)))
    slow_s = typical_step_s(slow._asdict())
    known, *_, last = (estimates[2] for _, number, estimates in seen if number > 320)
    assert typical_step_s(known) == pytest.approx(slow_s, rel=0.1)
    assert typical_step_s(last) == pytest.approx(slow_s, rel=0.1)
    assert seen[-1][2][0]["weight"] > 1.8 * last["weight"]
    assert books.estimate(2).error > 0.1 > 3 * books.estimate(0).error, "that it was long ago, is said"


def test_servers_that_answer_at_once_are_all_alike() -> None:
    """Mock servers: nothing is faster than the lowest figures."""
    instant = Speed(1e-5, 1e-8, 1e-8)
    estimates = serve(Books(now=0.0), (instant, instant), 100.0, (0.5, 0.5), 400)[-1][2]
    assert estimates[0]["weight"] == estimates[1]["weight"] == 1.0
    assert estimates[0]["step_floor_s"] == pytest.approx(2e-3)


def times(speed: Speed, factor: float) -> Speed:
    return Speed(*(factor * figure for figure in speed))


@pytest.mark.parametrize("factor", [0.5, 0.8, 1.25, 3.0])
def test_traffic_corrects_what_was_told(factor: float) -> None:
    """Before the first request the router believes it; a minute later it knows better."""
    told = (times(FAST, factor), SLOW)
    books = Books(now=0.0)
    slot = books.add("server", told[0]._asdict())
    assert books.replica_signals(slot)["step_floor_s"] == pytest.approx(factor * FAST.step_floor_s)
    assert books.estimate(slot).source == "told"
    books = Books(now=0.0)
    seen = serve(books, (FAST, SLOW), 10.0, (0.6, 0.4), 700, told=told)
    for _, _, estimates in seen[500:]:
        for speed, found in zip((FAST, SLOW), estimates, strict=True):
            assert typical_step_s(found) == pytest.approx(typical_step_s(speed._asdict()), rel=0.1)
    assert [books.estimate(slot).source for slot in (0, 1)] == ["measured", "measured"]


def test_what_was_told_stands_where_the_traffic_says_nothing() -> None:
    """A stream at a time never shows what one more of them costs."""
    told = Speed(FAST.step_floor_s, 5 * FAST.decode_s_per_token, FAST.prefill_s_per_token)
    books = Books(now=0.0)
    found = serve(books, (FAST, FAST), 0.2, (0.5, 0.5), 100, told=(told, told))[-1][2][0]
    assert found["step_floor_s"] == pytest.approx(FAST.step_floor_s, rel=0.1)
    assert found["decode_s_per_token"] == pytest.approx(told.decode_s_per_token, rel=0.25)
    errors = books.estimate(0).errors
    assert errors["decode_s_per_token"] > 5 * errors["step_floor_s"]


def test_servers_told_to_be_different_stay_so_and_equal_ones_equal() -> None:
    books = Books(now=0.0)
    told = [FAST, times(FAST, 1.05), FAST, None]
    for k, one in enumerate(told):
        books.add(f"server {k}", one and one._asdict())
    weights = [books.replica_signals(slot)["weight"] for slot in range(4)]
    assert weights[0] == weights[2] > weights[1]
    seen = serve(Books(now=0.0), (FAST, FAST), 10.0, (0.5, 0.5), 400, told=(FAST, FAST))
    assert all(one["weight"] == other["weight"] for _, _, (one, other) in seen)


def test_the_errors_say_how_far_off_the_estimates_are() -> None:
    """Over many runs the estimates are off by about their standard errors: neither bragging nor useless."""
    off: list[float] = []
    for seed in range(12):
        books = Books(now=0.0)
        serve(books, (FAST, SLOW), 10.0, (0.6, 0.4), 300, seed=seed)
        for slot, speed in enumerate((FAST, SLOW)):
            estimate = books.estimate(slot)
            for name, truth in speed._asdict().items():
                off.append((estimate.figures[name] / truth - 1) / estimate.errors[name])
    assert 0.3 < float(np.sqrt(np.mean(np.square(off)))) < 2.0


@pytest.mark.parametrize("factor", [0.5, 1.5, 2.0])
@pytest.mark.parametrize("rate_rps", [1.0, 8.0])
def test_a_change_of_a_told_server_is_noticed_within_half_a_minute(factor: float, rate_rps: float) -> None:
    changed = times(FAST, factor)
    told = (FAST, FAST)
    num_requests = int(150 * rate_rps)
    seen = serve(Books(now=0.0), told, rate_rps, (0.5, 0.5), num_requests, (60.0, changed), told=told)
    after = next(estimates for at, _, estimates in seen if at >= 90.0)
    assert typical_step_s(after[0]) == pytest.approx(typical_step_s(changed._asdict()), rel=0.15)
    assert typical_step_s(after[1]) == pytest.approx(typical_step_s(FAST._asdict()), rel=0.1)


def test_kv_memory_that_was_told_is_corrected_only_where_it_is_far_off() -> None:
    for told, found in ((400_000.0, 400_000.0), (900_000.0, 440_000.0)):
        books = Books(now=0.0)
        slot = books.add("server", {"kv_capacity_tokens": told})
        now = 0.0
        for _ in range(20):
            now += 3.0
            ticket = books.sent(slot, 44_000, now)
            books.first_token(ticket, now + 1.0)
            books.scraped(slot, 1.0, 0.0, 0.1, now + 1.5)
            books.finished(ticket, now + 2.0, 44_000, 1)
        assert books.replica_signals(slot)["kv_capacity_tokens"] == pytest.approx(found, rel=0.01)


def test_speeds_are_those_of_the_table_that_policies_read() -> None:
    """Also when a replica before it is gone, and when others are told of."""
    books = Books(now=0.0)
    slots = [books.add(f"server {k}", one._asdict()) for k, one in enumerate((FAST, SLOW, FAST))]
    books.remove(slots[0])
    books.add("another", SLOW._asdict())
    for slot in books.slots:
        known = books.replica_signals(slot)
        assert books.speeds(slot) == tuple(known[name] for name in Speed._fields)
    assert books.speeds(slots[1]) == pytest.approx(SLOW)
