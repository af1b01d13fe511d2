"""Real books and real policies behind a real socket: the signals are what the servers have done so far."""

from __future__ import annotations

import asyncio
import io
import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from pointsman.router.config import Backend, Settings
from pointsman.router.main import live_books
from pointsman.router.server import Parts, Router
from pointsman.routing.books import FIRST_CAPACITY, Books
from pointsman.routing.decider import Decider
from pointsman.routing.signals import SIGNALS, SUM
from tests.router.harness import QUIET, Wire, post, run, until
from tests.router.mock import Heard, Mock, begin_stream, event, mocks, ok, reset, usage

OUTPUT_TOKENS = 6


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    """Compiling takes longer than a test may."""
    Decider(Books(), "default")


@dataclass
class Stream:
    """One answer of a server that sends what the test tells it to."""

    server: int
    prompt_tokens: int
    writer: asyncio.StreamWriter
    is_over: asyncio.Event = field(default_factory=asyncio.Event)
    num_tokens: int = 0
    has_begun: bool = False

    def _write(self, data: bytes) -> None:
        self.writer.write(b"%x\r\n%b\r\n" % (len(data), data))

    def begin(self) -> None:
        """The head and the role, which vLLM sends with the first token."""
        self.has_begun = True
        begin_stream(self.writer)
        self._write(event({"role": "assistant", "content": ""}))

    def send(self, num_tokens: int) -> None:
        self.num_tokens += num_tokens
        for _ in range(num_tokens):
            self._write(event({"content": "t"}))

    def end(self) -> None:
        self._write(event({}, choices=[], usage=usage(self.prompt_tokens, self.num_tokens)))
        self._write(b"data: [DONE]\n\n")
        self.writer.write(b"0\r\n\r\n")
        self.is_over.set()


@dataclass
class Town:
    """A router with real books, and servers that wait for the test."""

    router: Router
    books: Books
    port: int
    streams: list[Stream]
    wires: list[Wire]

    async def ask(self, num_prompt: int) -> Wire:
        """Send a request whose prompt the router takes for so many tokens, and wait until a server has it."""
        before = len(self.streams)
        wire = await self.send(num_prompt)
        await until(lambda: len(self.streams) > before)
        return wire

    async def send(self, num_prompt: int) -> Wire:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        content = "word" * (num_prompt - 5)  # four bytes a token; five more for a message
        body = {"model": "m", "messages": [{"role": "user", "content": content}], "stream": True}
        wire = Wire(reader, writer)
        self.wires.append(wire)
        await wire.send(post(body))
        return wire

    def signals(self) -> list[dict[str, float]]:
        return [self.books.replica_signals(slot) for slot in self.books.slots]

    async def agrees(self) -> None:
        """Wait until the books say what the servers have done; prompts are counted as the router does."""

        def expected(server: int) -> dict[str, float]:
            open_ones = [one for one in self.streams if one.server == server and not one.is_over.is_set()]
            begun = [one for one in open_ones if one.has_begun]
            generated = sum(max(1, one.num_tokens) for one in begun)
            return {
                "outstanding": len(open_ones),
                "waiting": len(open_ones) - len(begun),
                "decoding": len(begun),
                "pending_prefill_tokens": sum(one.prompt_tokens for one in open_ones if not one.has_begun),
                "generated_tokens": generated,
                "context_tokens": sum(one.prompt_tokens for one in begun) + generated,
            }

        wanted = [expected(server) for server in range(len(self.books.slots))]

        def found() -> list[dict[str, float]]:
            return [{name: one[name] for name in wanted[0]} for one in self.signals()]

        try:
            await until(lambda: found() == wanted)
        except TimeoutError:
            assert found() == wanted


@asynccontextmanager
async def town(policy: str, num_servers: int = 2, **settings: Any) -> AsyncIterator[Town]:
    streams: list[Stream] = []
    chosen = Settings.model_validate({"reliability": QUIET} | settings)
    books, deciders = live_books(chosen)

    async def on_command(mock: Mock, request: Heard, writer: asyncio.StreamWriter) -> None:
        content = json.loads(request.body)["messages"][0]["content"]
        stream = Stream(servers.index(mock), 5 + len(content) // 4, writer)
        streams.append(stream)
        try:
            await stream.is_over.wait()
        finally:
            stream.is_over.set()  # the router hung up

    wires: list[Wire] = []
    async with mocks(*[on_command] * num_servers) as servers:
        parts = Parts(books=books, deciders=deciders, log_to=io.StringIO(), policy=policy)
        router = Router(parts, chosen, [Backend(url=mock.url) for mock in servers])
        port = await router.start("127.0.0.1", 0)
        try:
            yield Town(router, books, port, streams, wires)
        finally:
            for wire in wires:
                wire.writer.close()
            for stream in streams:
                stream.is_over.set()
            await router.stop()


def assert_empty(books: Books) -> None:
    """Nothing is outstanding, and every ticket has come back."""
    for slot in books.slots:
        known = books.replica_signals(slot)
        left = {
            one.name: known[one.name]
            for one in SIGNALS
            if one.across == SUM
            and one.name in known
            and not one.name.startswith(("token_rate", "prefill_load", "read_tokens"))
        }
        assert left == pytest.approx(dict.fromkeys(left, 0.0), abs=1e-6)
    assert sorted(books._free) == list(range(FIRST_CAPACITY))


@pytest.mark.parametrize("policy", ["default", "least-outstanding"])
def test_signals_follow_the_streams(policy: str) -> None:
    async def scenario() -> None:
        async with town(policy) as t:
            wires = [await t.ask(num_prompt) for num_prompt in (40, 200, 90, 60)]
            await t.agrees()
            if policy == "least-outstanding":
                assert [one.server for one in t.streams].count(0) == 2
            first, second, third, fourth = t.streams
            first.begin()
            await t.agrees()
            assert t.signals()[first.server]["ttft_s"] > 0.0
            first.send(1)
            second.begin()
            second.send(3)
            await t.agrees()
            for _ in range(OUTPUT_TOKENS - 1):  # one by one; those of the others came in one piece
                await asyncio.sleep(0.01)
                first.send(1)
                await t.agrees()
            assert t.signals()[first.server]["step_s"] > 0.0
            first.end()
            assert (await wires[0].answer()).body.count(b'"content": "t"') == OUTPUT_TOKENS
            await t.agrees()
            # Clients that leave, before the first token and in the middle of a stream.
            wires[2].writer.close()
            await third.is_over.wait()
            await t.agrees()
            wires[1].writer.close()
            while not second.is_over.is_set():  # the router learns of it when it writes
                second.send(1)
                await asyncio.sleep(0.01)
            await t.agrees()
            fourth.begin()
            fourth.send(OUTPUT_TOKENS)
            fourth.end()
            assert (await wires[3].answer()).is_whole
            await until(lambda: not t.router.proxy.active)
            await t.agrees()
            assert_empty(t.books)

    run(scenario)


def test_a_policy_that_holds_lets_go_when_the_books_have_room() -> None:
    """`hold-until-room` sends nothing more to a replica while 2,048 prompt tokens wait there."""

    async def scenario() -> None:
        async with town("hold-until-room", 1, holding={"recheck_s": 60, "max_hold_s": 60}) as t:
            wires = [await t.ask(3000), await t.send(50)]
            await until(lambda: t.router.dispatcher.num_held == 1)
            await t.agrees()
            t.streams[0].begin()
            await until(lambda: len(t.streams) == 2)
            assert t.router.metrics.fallbacks.total() == 0
            t.streams[1].begin()
            for stream in t.streams:
                stream.send(OUTPUT_TOKENS)
                stream.end()
            assert [(await wire.answer()).status for wire in wires] == [200, 200]
            assert_empty(t.books)

    run(scenario)


@pytest.mark.parametrize("shadow", ["hold-until-room", "default"])
def test_a_shadow_is_counted_whoever_asks_it(shadow: str) -> None:
    """A heuristic is asked along with the policy; a network, or if the policy rests, it is asked alone."""

    async def scenario() -> None:
        async with town("least-outstanding", 2) as t:
            decisions = t.router.decisions
            decisions.set_shadow(shadow)
            for policy in ("least-outstanding", "default"):
                decisions.switch(policy)
                await t.ask(3000)
            decisions._suspended_until = math.inf
            await t.ask(100)
            metrics = t.router.metrics
            assert sum(metrics.shadow_agreement.values()) == sum(metrics.shadow_decisions.values()) == 3
            assert {name for name, _ in metrics.shadow_decisions} == {shadow}
            assert metrics.shadow_agreement[shadow, True] >= 1
            assert metrics.fallbacks == {"suspended": 1}
            decisions.set_shadow(None)
            decisions._suspended_until = -math.inf
            await t.ask(100)
            assert sum(t.router.metrics.shadow_decisions.values()) == 3

    run(scenario)


@pytest.mark.parametrize("policy", ["default", "late-binding"])
def test_books_are_empty_after_traffic_with_failures(policy: str) -> None:
    seen: set[str] = set()

    async def fail_first(mock: Mock, request: Heard, writer: asyncio.StreamWriter) -> None:
        """Every fifth request fails where it comes first."""
        name = request.header("x-request-id") or ""
        fails = int(name.partition("-")[2]) % 5 == 0 and name not in seen
        seen.add(name)
        await (reset if fails else ok)(mock, request, writer)

    async def scenario() -> None:
        settings = Settings.model_validate({"reliability": QUIET | {"breaker_failures": 1000}})
        books, deciders = live_books(settings)
        async with mocks(fail_first, fail_first, fail_first) as servers:
            parts = Parts(books=books, deciders=deciders, log_to=io.StringIO(), policy=policy)
            router = Router(parts, settings, [Backend(url=mock.url) for mock in servers])
            port = await router.start("127.0.0.1", 0)

            async def client(number: int) -> list[int]:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                wire, statuses = Wire(reader, writer), []
                for index in range(10):
                    await wire.send(post(stream=(number + index) % 2 == 0))
                    if number == 5 and index == 9:  # leaves in the middle of an answer
                        break
                    statuses.append((await wire.answer()).status)
                writer.close()
                return statuses

            try:
                answers = await asyncio.gather(*[client(number) for number in range(12)])
                assert [status for one in answers for status in one] == [200] * 119
                await until(lambda: not router.proxy.active)
                assert router.metrics.retries.total() >= 23 and router.metrics.fallbacks.total() == 0
                assert_empty(books)
            finally:
                await router.stop()

    run(scenario, timeout_s=60)
