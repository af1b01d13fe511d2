"""Routers that share their books through a real Redis; where there is none, these tests are skipped."""

from __future__ import annotations

import asyncio
import io
import json
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from pointsman.router.logs import Log
from pointsman.router.requests.holding import Elsewhere, FirstInLine
from pointsman.router.store.address import parse_store
from pointsman.router.telemetry.metrics import Sharing
from pointsman.routing.books import Books
from pointsman.routing.core import Request
from pointsman.routing.decider import Decider
from pointsman.routing.hashing import PromptHasher
from pointsman.routing.ordering import Order
from pointsman.routing.sharing import SharedBooks
from pointsman.routing.signals import EXPECTED_HIT_TOKENS, OUTSTANDING
from tests.router.certificates import new_authority
from tests.router.harness import run, until
from tests.routing.asking import decide

pytest.importorskip("redis")
from pointsman.router.store.link import StoreLink
from pointsman.router.store.messages import Message

pytestmark = pytest.mark.skipif(shutil.which("redis-server") is None, reason="needs redis-server")
NAMES = ("http://a:8000", "http://b:8000")


class Store:
    """A Redis of our own, on a port that stays the same when it is started again."""

    def __init__(self, *options: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self._options = options or ("--port", str(self.port))
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = ["redis-server", "--save", "", "--bind", "127.0.0.1", *self._options]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)

    def signal(self, number: int) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@asynccontextmanager
async def store(*options: str) -> AsyncIterator[Store]:
    made = Store(*options)
    made.start()
    try:
        yield made
    finally:
        made.stop()


class Held:
    """As much of a dispatcher as a link sees."""

    def __init__(self) -> None:
        self.num_held = 0
        self.order = Order(overtake_s=0.0, max_hold_s=30.0)
        self.elsewhere: Elsewhere | None = None
        self.num_wakes = 0

    def fronts(self) -> list[FirstInLine]:
        return []

    def wake(self) -> None:
        self.num_wakes += 1


def links_of(text: str) -> bytes:
    return PromptHasher().of_text(text.encode(), len(text) // 4)


class OneRouter:
    def __init__(self, url: str, ca: Path | None = None, names: Sequence[str] = NAMES) -> None:
        shared = SharedBooks(None, 2)
        self.books = Books(shared=shared, keeps_journal=True)
        for name in names:
            self.books.add(name)
        self.decider = Decider(self.books, "least-outstanding")
        self.log = io.StringIO()
        self.state = Sharing()
        self.held: Any = Held()
        self.shared = shared

        def share_a_line(model: str | None, other: str | None) -> bool:
            return model == other

        self.link = StoreLink(
            parse_store(url, ca), self.books, self.held, share_a_line, self.state, Log(self.log)
        )

    def known_elsewhere(self) -> list[float]:
        book = self.shared.read(1)
        assert book is not None
        return book.signals[OUTSTANDING].tolist()

    def hits(self, text: str) -> list[float]:
        """Tokens of the prompt that each server should have, as the next decision is told."""
        links = links_of(text)
        self.decider.decide(Request(len(text) // 4, arrived_at=monotonic(), links=links), 1, monotonic())
        found: list[float] = self.books.signals[EXPECTED_HIT_TOKENS].tolist()
        return found

    def serve(self, slot: int, text: str, num_output: int) -> None:
        ticket = self.books.sent(slot, len(text) // 4, monotonic(), links=links_of(text))
        self.books.finished(ticket, monotonic(), len(text) // 4, num_output)

    def events(self) -> list[str]:
        return [json.loads(line)["event"] for line in self.log.getvalue().splitlines()]


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Not while the clock of a test runs."""
    one = OneRouter("redis://127.0.0.1/g")
    ticket = one.books.sent(0, 100, monotonic())
    decide(one.decider, 100, monotonic())
    one.books.finished(ticket, monotonic())


@asynccontextmanager
async def routers(url: str, count: int = 2, ca: Path | None = None) -> AsyncIterator[list[OneRouter]]:
    made = [OneRouter(url, ca) for _ in range(count)]
    for one in made:
        one.link.start()
    try:
        yield made
    finally:
        for one in made:
            await one.link.stop()


def test_three_routers_know_what_all_of_them_have_outstanding() -> None:
    async def scenario() -> None:
        async with store() as s, routers(f"redis://127.0.0.1:{s.port}/g", 3) as (one, two, three):
            await until(lambda: all(r.state.num_routers == 2 for r in (one, two, three)))
            tickets = [two.books.sent(0, 100, monotonic()) for _ in range(3)]
            three.books.sent(1, 100, monotonic())
            await until(lambda: one.known_elsewhere() == [3.0, 1.0])
            assert {decide(one.decider, 100, monotonic()) for _ in range(10)} == {2}
            for ticket in tickets:
                two.books.finished(ticket, monotonic())
            await until(lambda: one.known_elsewhere() == [0.0, 1.0])
            assert {decide(one.decider, 100, monotonic()) for _ in range(10)} == {1}
            assert one.held.num_wakes > 0
            assert one.books.signals[OUTSTANDING].tolist() == [0.0, 0.0]

    run(scenario)


def test_routers_of_another_name_are_strangers() -> None:
    async def scenario() -> None:
        async with (
            store() as s,
            routers(f"redis://127.0.0.1:{s.port}/g", 1) as (one,),
            routers(f"redis://127.0.0.1:{s.port}/other", 1) as (two,),
        ):
            await until(lambda: one.state.is_up and two.state.is_up)
            two.books.sent(0, 100, monotonic())
            await asyncio.sleep(0.3)
            assert one.state.num_routers == 0

    run(scenario)


@pytest.mark.parametrize("way", [signal.SIGKILL, signal.SIGSTOP])
def test_without_the_store_a_router_goes_by_its_own_books_within_a_second(way: int) -> None:
    async def scenario() -> None:
        async with store() as s, routers(f"redis://127.0.0.1:{s.port}/g") as (one, two):
            two.books.sent(0, 100, monotonic())
            await until(lambda: one.known_elsewhere() == [1.0, 0.0])
            before = one.state.num_losses  # of a machine that stalled
            s.signal(way)
            await until(lambda: one.known_elsewhere() == [0.0, 0.0], within_s=1.0)
            assert not one.state.is_up
            assert one.state.num_losses == before + 1
            assert "books not shared" in one.events()
            if way == signal.SIGKILL:
                s.stop()
                s.start()
            else:
                s.signal(signal.SIGCONT)
            await until(lambda: one.known_elsewhere() == [1.0, 0.0] and one.state.is_up, within_s=5.0)
            told = one.events()
            assert {"books shared", "router joined"} <= set(told[told.index("books not shared") :])

    run(scenario)


def test_a_router_that_dies_is_forgotten_within_a_second_and_one_that_leaves_at_once() -> None:
    async def scenario() -> None:
        async with store() as s, routers(f"redis://127.0.0.1:{s.port}/g", 3) as (one, two, three):
            await until(lambda: one.state.num_routers == 2)
            two.books.sent(0, 100, monotonic())
            three.books.sent(1, 100, monotonic())
            await until(lambda: one.known_elsewhere() == [1.0, 1.0])
            await three.link.stop()
            await until(lambda: one.known_elsewhere() == [1.0, 0.0], within_s=0.3)
            for task in two.link._running:  # dead, without a word
                task.cancel()
            await until(lambda: one.known_elsewhere() == [0.0, 0.0], within_s=1.0)
            assert one.state.is_up
            assert one.events()[-2:] == ["router left", "routers gone"]

    run(scenario)


def test_password_and_tls(tmp_path: Path) -> None:
    authority = new_authority(tmp_path)
    pem = authority.certificate("DNS:localhost")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = (
        "--port",
        "0",
        "--tls-port",
        str(port),
        "--tls-cert-file",
        str(pem),
        "--tls-key-file",
        str(pem),
    )
    options += ("--tls-ca-cert-file", str(authority.ca), "--tls-auth-clients", "no")
    options += ("--requirepass", "secret")

    async def scenario() -> None:
        async with store(*options):
            url = f"rediss://default:secret@localhost:{port}/g"
            async with routers(url, 2, authority.ca) as (one, two):
                two.books.sent(0, 100, monotonic())
                await until(lambda: one.known_elsewhere() == [1.0, 0.0])
            for wrong, ca, problem in (
                (url.replace("secret", "wrong-secret"), authority.ca, "AuthenticationError"),
                (url, None, "certificate verify failed"),
                (url.replace("localhost", "127.0.0.1"), authority.ca, "certificate verify failed"),
            ):
                async with routers(wrong, 1, ca) as (three,):
                    await until(lambda three=three: "books not shared" in three.events())
                    assert problem in three.log.getvalue()
                    assert "secret" not in three.log.getvalue()
                    assert not three.state.is_up

    run(scenario)


def test_a_router_starts_without_the_store_and_finds_it_later() -> None:
    async def scenario() -> None:
        s = Store()
        try:
            async with routers(f"redis://127.0.0.1:{s.port}/g") as (one, two):
                await asyncio.sleep(0.7)
                assert one.events() == ["books not shared"]  # once, though it has tried more often
                s.start()
                two.books.sent(0, 100, monotonic())
                await until(lambda: one.known_elsewhere() == [1.0, 0.0], within_s=5.0)
        finally:
            s.stop()

    run(scenario)


def test_a_connection_that_breaks_while_a_router_stops_does_not_keep_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A task group that fails while it is cancelled passes on its failure, and the link would try again."""

    async def break_when_cancelled(link: StoreLink, client: object) -> None:
        try:
            await asyncio.sleep(60.0)
        except asyncio.CancelledError:
            raise OSError("broken just now") from None

    monkeypatch.setattr(StoreLink, "_speak", break_when_cancelled)

    async def scenario() -> None:
        async with store() as s:
            one = OneRouter(f"redis://127.0.0.1:{s.port}/g")
            await asyncio.sleep(0.3)  # until the store is there
            one.link.start()
            await asyncio.sleep(0.3)
            await asyncio.wait_for(one.link.stop(), 3.0)

    run(scenario)


def run_undisturbed(scenario: Callable[[list[Sharing]], Awaitable[None]], timeout_s: float = 15.0) -> None:
    """Once more if it failed where the machine stalled: a router that is deaf for a moment loses its
    connection, and does not hear what others tell of prompts meanwhile. The scenario names its links.
    """
    for tries_left in (2, 1, 0):
        links: list[Sharing] = []
        try:
            run(lambda links=links: scenario(links), timeout_s)  # type: ignore[misc]
            return
        except (AssertionError, TimeoutError):
            if not tries_left or not any(link.num_losses for link in links):
                raise


def turns_of_a_chat(count: int) -> list[str]:
    """Prompts that each contain the one before and the answer to it."""
    turns = ["You are a helpful assistant. " * 40]
    for turn in range(1, count):
        turns.append(turns[-1] + f"and so he said in turn {turn}: " * 50)
    return turns


def test_a_chat_whose_turns_alternate_between_routers_is_expected_as_by_one_router() -> None:
    turns = turns_of_a_chat(12)
    sees_all = OneRouter("redis://127.0.0.1/g")
    expected = []
    for number, text in enumerate(turns):
        expected.append(sees_all.hits(text))
        sees_all.serve(number % 2, text, 300)
    assert min(expected[-1]) > 3000

    async def scenario(links: list[Sharing]) -> None:
        async with store() as s, routers(f"redis://127.0.0.1:{s.port}/g", 3) as made:
            links += [one.state for one in made]
            await until(lambda: all(one.state.num_routers == 2 for one in made))
            for number, text in enumerate(turns):
                one = made[number % 3]
                await until(lambda one=one, text=text, number=number: one.hits(text) == expected[number])
                one.serve(number % 2, text, 300)

    run_undisturbed(scenario)


def test_a_server_that_was_started_anew_is_forgotten_by_all() -> None:
    async def scenario() -> None:
        async with store() as s, routers(f"redis://127.0.0.1:{s.port}/g") as (one, two):
            await until(lambda: one.state.num_routers == 1 and two.state.num_routers == 1)
            (text,) = turns_of_a_chat(1)
            one.books.counted(0, 1000.0, 0.0)
            one.serve(0, text, 100)
            one.serve(1, text, 100)
            await until(lambda: min(two.hits(text)) > 200)
            one.books.counted(0, 10.0, 0.0)
            await until(lambda: two.hits(text)[0] == 0.0)
            assert two.hits(text)[1] > 200

    run(scenario)


def test_without_the_store_the_index_is_ones_own_and_catches_up_later() -> None:
    async def scenario() -> None:
        async with store() as s, routers(f"redis://127.0.0.1:{s.port}/g", 3) as (one, two, three):
            await until(lambda: all(r.state.num_routers == 2 for r in (one, two, three)))
            before, meanwhile = "Before that. " * 100, "Meanwhile. " * 100
            one.serve(0, before, 100)
            await until(lambda: two.hits(before)[0] > 200)
            for task in one.link._running:  # dead, but not what it told
                task.cancel()
            s.stop()
            await until(lambda: not two.state.is_up)
            three.serve(1, meanwhile, 100)
            await asyncio.sleep(0.3)
            assert two.hits(before)[0] > 200
            assert two.hits(meanwhile) == [0.0, 0.0]
            s.start()
            await until(lambda: two.hits(meanwhile)[1] > 200, within_s=5.0)

    run(scenario)


def test_a_prompt_that_could_not_be_told_is_told_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection breaks with the very message that holds it."""
    publish = StoreLink._publish
    broken: list[Message] = []

    async def break_once(link: StoreLink, client: Any, message: Message) -> None:
        if message.prompts and not broken:
            broken.append(message)
            raise ConnectionError("broken")
        await publish(link, client, message)

    monkeypatch.setattr(StoreLink, "_publish", break_once)

    async def scenario() -> None:
        async with store() as s, routers(f"redis://127.0.0.1:{s.port}/g") as (one, two):
            await until(lambda: one.state.num_routers == 1 and two.state.num_routers == 1)
            (text,) = turns_of_a_chat(1)
            one.serve(0, text, 100)
            await until(lambda: two.hits(text)[0] > 200, within_s=5.0)
            assert len(broken) == 1

    run(scenario)
