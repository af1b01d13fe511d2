"""The link of a router to the store that it shares with others (Redis or Valkey, by publish and subscribe).

Every router publishes what has changed in its books and what went into its index of prefixes, and reads what
the others publish; nothing is kept in the store, so that nothing there can be stale. A router hears itself,
too: as long as it does, the link works, and when it has not for `peers.STALE_S`, the link is lost, whatever
the sockets say. Then the router goes by its own books, says so, and tries again.

What others had outstanding is forgotten with them. What they told of prompts stays: the servers' caches are
what they were, and the index forgets by itself what is old. What happens while nobody hears it stays in the
journal of the index, as much as fits, and is told when there is somebody again.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import Any

import numpy as np
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from pointsman.router.logs import Log
from pointsman.router.requests.holding import Dispatcher, FirstInLine
from pointsman.router.store.address import StoreAddress
from pointsman.router.store.messages import (
    LAYOUT,
    MAX_FRONTS,
    ROWS,
    Front,
    Message,
    MessageError,
    decode,
    encode,
    prompts_from_wire,
    prompts_to_wire,
    to_wire,
)
from pointsman.router.store.peers import STALE_S, Peers
from pointsman.router.telemetry.metrics import Sharing
from pointsman.routing.books import Books
from pointsman.routing.prefixes import Noted
from pointsman.routing.sharing import Book, combined

SPEAK_S = 0.01  # at most so often
WHOLE_S = 0.2  # the whole book, changed or not
_MAX_NEWS_WORDS = 8192  # of each process's journal in one message
_LOOK_S = 0.1
_RETRY_S = 0.25
_PATIENCE_S = 0.5  # for an answer of the store
_GOODBYE_S = 0.2


class StoreLink:
    def __init__(
        self,
        address: StoreAddress,
        books: Books,
        dispatcher: Dispatcher,
        share_a_line: Callable[[str | None, str | None], bool],
        state: Sharing,
        log: Log,
    ) -> None:
        """The last of the shared books is kept for what others have outstanding."""
        assert books.shared is not None
        self._address = address
        self._books = books.shared
        self._index = books.index
        self._prefixes = books.prefixes
        self._dispatcher = dispatcher
        self._state = state
        self._log = log
        self._peers = Peers(share_a_line)
        self._name = secrets.token_hex(6)
        self._heard_at = -STALE_S  # ourselves
        self._problem: str | None = None  # the one that was said last
        self._misunderstood: set[str] = set()
        self._last = Book(np.zeros(0, np.int64), np.zeros((len(ROWS), 0)))  # as it was published
        self._fronts: list[FirstInLine] = []
        self._untold: list[Noted] = []  # of prompts: taken from the journal, but not yet published
        self._running: list[asyncio.Task[None]] = []
        dispatcher.elsewhere = self._peers

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._running = [loop.create_task(self._connect()), loop.create_task(self._watch())]

    async def stop(self) -> None:
        """Say goodbye, so that nobody waits for us."""
        while running := [task for task in self._running if not task.done()]:
            for task in running:  # again and again: a task group that fails while it is cancelled forgets it
                task.cancel()
            await asyncio.wait(running, timeout=_GOODBYE_S)
        with suppress(RedisError, OSError, TimeoutError):
            async with asyncio.timeout(_GOODBYE_S), self._client() as client:
                await self._publish(client, Message(self._name, LAYOUT, monotonic(), is_leaving=True))
        self._forget()

    def _client(self) -> Redis:
        return Redis(
            **self._address.client_options(),
            socket_timeout=_PATIENCE_S,
            socket_connect_timeout=_PATIENCE_S,
            retry=Retry(NoBackoff(), 0),  # we say so, and try again ourselves
        )

    async def _connect(self) -> None:
        while True:
            problem = "the connection ended"
            try:
                async with self._client() as client, client.pubsub() as channel:
                    await channel.subscribe(self._address.channel)
                    async with asyncio.TaskGroup() as tasks:
                        tasks.create_task(self._listen(channel))
                        tasks.create_task(self._speak(client))
            except* Exception as group:  # whatever it is, requests go on, by our own books
                problem = _text(group)
            self._lost(problem)
            await asyncio.sleep(_RETRY_S)

    async def _watch(self) -> None:
        """Forget who is silent; if that includes ourselves, the store is."""
        while True:
            await asyncio.sleep(_LOOK_S)
            now = monotonic()
            if self._state.is_up and now - self._heard_at > STALE_S:
                self._lost("the store is silent")
            elif num_gone := self._peers.forget_silent(now):
                self._log.event("routers gone", count=num_gone, routers=len(self._peers))
                self._changed()

    # --- what we hear ---

    async def _listen(self, channel: Any) -> None:
        while True:
            got = await channel.get_message(ignore_subscribe_messages=True, timeout=STALE_S)
            if got is not None:
                self._heard(got["data"])

    def _heard(self, data: bytes) -> None:
        now = monotonic()
        try:
            message = decode(data)
            if message.router == self._name:
                self._heard_ourselves(message, now)
                return
            has_changed = self._peers.heard(message, now)
            if self._prefixes is not None:
                for one in prompts_from_wire(message.prompts, now):
                    self._prefixes.repeat(one)
        except MessageError as error:
            if str(error) not in self._misunderstood:  # once, not a hundred times a second
                self._misunderstood.add(str(error))
                self._log.event("a message of another router is left out", problem=str(error))
            return
        if has_changed:
            what = "router left" if message.is_leaving else "router joined"
            self._log.event(what, router=message.router, routers=len(self._peers))
        self._changed()

    def _heard_ourselves(self, message: Message, now: float) -> None:
        self._heard_at = now
        self._state.delay_s = now - message.sent_at
        if not self._state.is_up:
            self._state.is_up = True
            self._problem = None
            self._log.event("books shared", store=str(self._address))

    def _lost(self, problem: str) -> None:
        if self._state.is_up:
            self._state.is_up = False
            self._state.num_losses += 1
        if problem != self._problem:
            self._problem = problem
            self._log.event("books not shared", store=str(self._address), problem=problem)
        self._forget()

    def _forget(self) -> None:
        self._peers.forget_all()
        self._changed()

    def _changed(self) -> None:
        """Bring the book of all others up to date, and decide anew about who is held."""
        own = self._books.read(self._index)
        if own is not None:
            self._books.write(len(self._books) - 1, self._peers.book(own.keys))
        self._state.num_routers = len(self._peers)
        self._dispatcher.wake()

    # --- what we say ---

    async def _speak(self, client: Redis) -> None:
        whole_at = 0.0
        while True:
            now = monotonic()
            is_whole = now >= whole_at
            message = self._news(now, is_whole)
            if message is not None:
                await self._publish(client, message)
                if message.prompts:
                    self._untold = []
                if is_whole:
                    whole_at = now + WHOLE_S
            await asyncio.sleep(SPEAK_S)

    async def _publish(self, client: Redis, message: Message) -> None:
        await client.publish(self._address.channel, encode(message))

    def _news(self, now: float, is_whole: bool) -> Message | None:
        """What has changed since we spoke last; None: nothing."""
        book = self._own_book()
        if book is None:
            return None
        fronts = self._dispatcher.fronts()[:MAX_FRONTS]
        prompts = b""
        if self._prefixes is not None and len(self._peers):
            self._untold = self._untold or self._prefixes.read_journal(_MAX_NEWS_WORDS)
            prompts = prompts_to_wire(self._untold, now)
        rows = book.signals[ROWS]
        is_same_layout = np.array_equal(book.keys, self._last.keys)
        is_whole = is_whole or not is_same_layout
        changed = np.full(len(book.keys), True)
        if not is_whole:
            changed = (rows != self._last.signals).any(axis=0)
            if not changed.any() and fronts == self._fronts and not prompts:
                return None
        self._last, self._fronts = Book(book.keys, rows), fronts
        keys, columns = to_wire(Book(book.keys[changed], book.signals[:, changed]), now)
        return Message(
            self._name,
            LAYOUT,
            now,
            is_whole=is_whole,
            num_held=self._dispatcher.num_held,
            fronts=[
                Front(front.priority, max(0.0, now - front.arrived_at), front.model, front.size)
                for front in fronts
            ],
            keys=keys,
            columns=columns,
            prompts=prompts,
        )

    def _own_book(self) -> Book | None:
        """What all processes of this router have outstanding; None while one is laid out anew."""
        books = [self._books.read(index) for index in range(len(self._books) - 1)]
        own = books[self._index]
        whole = [book for book in books if book is not None]
        return combined(whole, own.keys) if own is not None and len(whole) == len(books) else None


def _text(group: BaseExceptionGroup[Exception]) -> str:
    """The first problem, on one line. The client library's errors name the host, never a password."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
