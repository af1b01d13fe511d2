"""How the processes of one router keep together: the first one leads.

The leader has the admin port and looks for replicas. It tells the others which replicas and which policies
there are; they tell it about once a second what they have counted. JSON lines over a Unix socket in a
directory of their own. Without a leader the others go on as they are, and find it again when it is back.
A leader writes down what it tells them, because the command line is not all there is: servers come and go,
and policies are switched. The one that is started after it begins with that.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Collection
from contextlib import suppress
from operator import add
from pathlib import Path
from typing import Any

from pointsman.errors import InputError, reason_of
from pointsman.router.config import Backend
from pointsman.router.server import Router

_REPORT_S = 1.0
_RETRY_S = 0.2
_ANSWER_S = 5.0
_MAX_LINE = 16 << 20


class Leader:
    def __init__(
        self, router: Router, path: Path, notes: Path, found: Callable[[], Collection[str]] = tuple
    ) -> None:
        """`notes`: the file for the next leader. `found`: names of the replicas that come from a source."""
        self._router = router
        self._path = path
        self._notes = notes
        self._found = found
        self._noted = b""
        self._followers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self._is_planned = False

    def take_over(self) -> list[Backend]:
        """Begin with what the leader before this one has noted; -> the replicas that it had from a source."""
        try:
            state = json.loads(self._notes.read_bytes())
        except FileNotFoundError:  # this is the first
            return []
        adopt(self._router, state)
        return [Backend.model_validate(one["backend"]) for one in state["replicas"] if one["is_found"]]

    async def start(self) -> None:
        self._note()
        self._path.unlink(missing_ok=True)  # of a leader that is no more
        self._server = await asyncio.start_unix_server(self._hear, self._path, limit=_MAX_LINE)
        self._router.registry.on_change.append(lambda replica, what: self._plan())
        self._router.decisions.on_switch.append(self._plan)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for follower in list(self._followers):
            follower.close()

    def _plan(self) -> None:
        """Tell all, once for all that changes at the same time."""
        if not self._is_planned:
            self._is_planned = True
            asyncio.get_running_loop().call_soon(self._tell_all)

    def _tell_all(self) -> None:
        self._is_planned = False
        self._note()
        for follower in list(self._followers):
            _write(follower, {"state": self._state()})

    def _note(self) -> None:
        noted = json.dumps(self._state()).encode()
        if noted == self._noted:
            return
        try:
            partial = self._notes.with_suffix(".part")  # not on the disk: it need not outlive the machine
            partial.write_bytes(noted)
            partial.replace(self._notes)
            self._noted = noted
        except OSError as error:  # the next change tries again
            self._router.log.event("state not noted", problem=reason_of(error))

    def _state(self) -> dict[str, Any]:
        found = self._found()
        replicas = [
            {
                "backend": one.backend.model_dump(mode="json"),
                "is_draining": one.is_draining,
                "is_found": one.name in found,
            }
            for one in self._router.registry
            if not one.is_leaving
        ]
        decisions = self._router.decisions
        return {"policy": decisions.policy, "shadow": decisions.shadow, "replicas": replicas}

    async def _hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Listen to one follower until it is gone."""
        index: int | None = None
        self._followers.add(writer)
        _write(writer, {"state": self._state()})
        try:
            while line := await reader.readline():
                said = json.loads(line)
                if "counts" in said:
                    index = int(said["index"])
                    self._add(index, said)
                else:
                    text = self._router.proxy.exposition_text().decode()
                    _write(writer, {"metrics": text})
        except (ConnectionError, ValueError):
            pass
        finally:
            self._followers.discard(writer)
            writer.close()
            if index is not None:
                self._forget(index)

    def _add(self, index: int, said: dict[str, Any]) -> None:
        router = self._router
        router.metrics.add(said["counts"])
        router.metrics.elsewhere[index] = said["now"]
        for replica in router.registry:
            replica.elsewhere[index] = (0, 0, 0)
        for name, is_leaving, numbers in said["replicas"]:
            same = [replica for replica in router.registry if replica.name == name]
            # Where a server is back before its old requests have ended, there are two of its name.
            same.sort(key=lambda replica: replica.is_leaving != is_leaving)
            for replica in same[:1]:
                replica.elsewhere[index] = tuple(map(add, replica.elsewhere[index], numbers))
        router.registry.part_with_idle()

    def _forget(self, index: int) -> None:
        self._router.metrics.elsewhere.pop(index, None)
        for replica in self._router.registry:
            _, num_sent, _ = replica.elsewhere.get(index, (0, 0, 0))
            replica.elsewhere[index] = (0, num_sent, 0)
        self._router.registry.part_with_idle()


class Follower:
    def __init__(self, router: Router, path: Path, index: int) -> None:
        self._router = router
        self._path = path
        self._index = index
        self._writer: asyncio.StreamWriter | None = None
        self._asked: list[asyncio.Future[str]] = []
        self.is_informed = asyncio.Event()
        router.proxy.ask_leader = self.metrics_text

    async def run(self) -> None:
        while True:
            with suppress(OSError, ValueError):
                await self._follow()
            await asyncio.sleep(_RETRY_S)

    def go_by(self, notes: Path) -> None:
        """Begin with what the last leader has noted, as there is none now."""
        with suppress(FileNotFoundError):
            adopt(self._router, json.loads(notes.read_bytes()))
            self.is_informed.set()

    async def metrics_text(self) -> bytes | None:
        """The metrics of all processes. None: there is no leader to ask, or it does not answer.

        Those of this process alone would look as if the counters had begun anew.
        """
        if self._writer is not None:
            answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            self._asked.append(answer)
            self._report(self._writer)
            _write(self._writer, {"ask": "metrics"})
            with suppress(TimeoutError, asyncio.CancelledError):
                async with asyncio.timeout(_ANSWER_S):
                    return (await answer).encode()
        return None

    async def _follow(self) -> None:
        reader, writer = await asyncio.open_unix_connection(self._path, limit=_MAX_LINE)
        self._writer = writer
        reporting = asyncio.get_running_loop().create_task(self._report_forever(writer))
        try:
            while line := await reader.readline():
                said = json.loads(line)
                if "state" in said:
                    adopt(self._router, said["state"], is_returning=self.is_informed.is_set())
                    self.is_informed.set()
                elif self._asked:
                    answer = self._asked.pop(0)
                    if not answer.done():
                        answer.set_result(said["metrics"])
        finally:
            self._writer = None
            reporting.cancel()
            writer.close()
            for answer in self._asked:
                answer.cancel()
            self._asked.clear()

    async def _report_forever(self, writer: asyncio.StreamWriter) -> None:
        while True:
            self._report(writer)
            await asyncio.sleep(_REPORT_S)

    def _report(self, writer: asyncio.StreamWriter) -> None:
        if writer.is_closing():  # what nobody hears must be counted the next time
            return
        router = self._router
        replicas = [(one.name, one.is_leaving, one.numbers) for one in router.registry]
        now = {"held": router.metrics.num_held, "clients": router.metrics.num_clients}
        counts = router.metrics.take()
        _write(writer, {"index": self._index, "counts": counts, "replicas": replicas, "now": now})


def adopt(router: Router, state: dict[str, Any], *, is_returning: bool = False) -> None:
    """Make replicas and policy what the leader says."""
    registry, decisions = router.registry, router.decisions
    told = [(Backend.model_validate(one["backend"]), one["is_draining"]) for one in state["replicas"]]
    wanted = {backend.url: backend for backend, _ in told}
    for replica in registry:
        if not replica.is_leaving and wanted.get(replica.name) != replica.backend:
            registry.remove(replica.name)
    for backend, is_draining in told:
        try:
            if backend.url not in registry.names():
                registry.add(backend, is_returning=is_returning)
            registry.drain(backend.url, is_draining)
        except InputError as error:  # its certificates may be gone: that must not cost the others
            router.log.event("replica not added", replica=backend.url, problem=str(error))
    for now, wanted_policy, switch in (
        (decisions.policy, state["policy"], decisions.switch),
        (decisions.shadow, state["shadow"], decisions.set_shadow),
    ):
        if wanted_policy != now:
            try:
                switch(wanted_policy)
            except InputError as error:
                router.log.event("policy not switched", policy=wanted_policy, problem=str(error))


def _write(writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
    if not writer.is_closing():
        writer.write(json.dumps(message).encode() + b"\n")
