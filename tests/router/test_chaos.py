"""Servers that fail in every way at random, under load: nothing is lost, answered twice, or mixed up.

benchmarks/router_chaos.py is the long version, with memory, sockets and latencies.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter

from tests.router import mock as replies
from tests.router.harness import Cluster, cluster, post, run, until
from tests.router.mock import Heard, Mock, hang, ok, raw, reset, status

NUM_CLIENTS, LOAD_S = 24, 5.0
PARTIAL = b"HTTP/1.1 200 OK\r\ncontent-length: 500\r\n\r\nhalf"


async def echo(mock: Mock, request: Heard, writer: asyncio.StreamWriter) -> None:
    """The answer carries the name of its request, streamed or plain."""
    asked = json.loads(request.body)
    name = asked["user"].encode()
    if not asked["stream"]:
        await replies.respond(writer, 200, name)
        return
    replies.begin_stream(writer)
    for _ in range(3):
        event = b"data: " + name + b"\n\n"
        writer.write(b"%x\r\n%b\r\n" % (len(event), event))
        await writer.drain()
        await asyncio.sleep(0.001)
    writer.write(b"0\r\n\r\n")


async def slow(mock: Mock, request: Heard, writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(0.05)
    await echo(mock, request, writer)


FAULTS = (status(500), status(503), reset, hang, slow, raw(PARTIAL), raw(b"garbage\r\n\r\n"), raw(b""))


def faulty(dice: random.Random) -> replies.Behaviour:
    """Good most of the time, bad for a while now and then."""
    fault, until_s = echo, 0.0

    async def behave(mock: Mock, request: Heard, writer: asyncio.StreamWriter) -> None:
        nonlocal fault, until_s
        now = time.monotonic()
        if now > until_s:
            fault = dice.choice(FAULTS) if fault is echo else echo
            until_s = now + dice.uniform(0.05, 0.4)
        await fault(mock, request, writer)

    return behave


async def client(c: Cluster, number: int, dice: random.Random, outcomes: Counter[str], end: float) -> None:
    wire = None
    serial = 0
    while time.monotonic() < end:
        serial += 1
        name = f"{number}-{serial}"
        is_stream = dice.random() < 0.5
        if wire is None:
            manager = c.wire()
            wire = await manager.__aenter__()
        await wire.send(post({"messages": [], "user": name, "stream": is_stream}))
        if dice.random() < 0.05:
            outcomes["left"] += 1
            await manager.__aexit__(None, None, None)
            wire = None
            continue
        try:
            answered = await wire.answer()
        except (asyncio.IncompleteReadError, ConnectionError):
            outcomes["no answer"] += 1
            wire = None
            continue
        outcomes[str(answered.status) if answered.is_whole else "cut"] += 1
        if answered.status == 200 and answered.is_whole:
            expected = f"data: {name}\n\n".encode() * 3 if is_stream else name.encode()
            assert answered.body == expected
        if not answered.is_whole:
            await manager.__aexit__(None, None, None)
            wire = None
    if wire is not None:
        await manager.__aexit__(None, None, None)


def test_nothing_is_lost_or_mixed_up() -> None:
    outcomes: Counter[str] = Counter()

    async def scenario() -> None:
        reliability = {
            "breaker_open_s": 0.1,
            "breaker_max_open_s": 0.3,
            "slow_start_s": 0.2,
            "health_interval_s": 0.05,
            "health_timeout_s": 0.5,
        }
        behaviours = [faulty(random.Random(seed)) for seed in range(3)]
        limits = {"first_byte_timeout_s": 0.3, "idle_timeout_s": 0.5}
        async with cluster(echo, *behaviours, reliability=reliability, limits=limits) as c:
            end = time.monotonic() + LOAD_S
            await asyncio.gather(
                *(client(c, number, random.Random(number), outcomes, end) for number in range(NUM_CLIENTS))
            )
            await until(lambda: not c.router.proxy.active)
            num_sent = sum(outcomes.values())
            # Each request ends in exactly one line of the log and one count.
            lines = [line for line in c.logged() if line["event"] == "request"]
            assert len(lines) == len({line["id"] for line in lines}) == num_sent
            assert sum(c.router.metrics.requests.values()) == num_sent
            assert outcomes["no answer"] == 0
            assert outcomes["200"] > 0.8 * num_sent
            # The books are closed, and nothing leaks.
            assert c.router.dispatcher.num_held == 0
            assert all(replica.num_outstanding == 0 for replica in c.router.registry)
            assert not c.books.open
            # Once the servers are well again, so is the service.
            for mock in c.mocks:
                mock.behaviour = ok
            await until(lambda: len(c.router.registry.accepting) == 4)
            async with c.wire() as wire:
                for _ in range(50):
                    await wire.send(post())
                    assert (await wire.answer()).status == 200
            assert c.router.metrics.retries.total() > 0

    run(scenario, timeout_s=20)
