"""The replicas as a gateway knows them: by address and port."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections import Counter

from pointsman.router.logs import Log
from pointsman.router.replicas.registry import Registry, Replica

MAX_BROKEN_OFF = 5  # in a row; with as many clients that leave as stay, one in 32 gets there
RETRY_S = 2.0


class Endpoints:
    def __init__(self, registry: Registry, log: Log) -> None:
        self._registry = registry
        self._log = log
        self._by_slot: dict[int, str] = {}
        self._replicas: dict[str, Replica] = {}
        self._num_broken_off: Counter[int] = Counter()  # by slot, since an answer came to its end there
        self._resolving: dict[int, asyncio.Task[None]] = {}  # by slot: whose address is looked for
        for replica in registry:
            self._add(replica)
        registry.on_change.append(self._follow)

    async def resolved(self) -> None:
        """Wait for the names that can be resolved at once."""
        if self._resolving:
            await asyncio.wait(self._resolving.values(), timeout=RETRY_S)

    def of(self, replica: Replica) -> str:
        return self._by_slot[replica.slot]

    def find(self, endpoint: str) -> Replica | None:
        return self._replicas.get(endpoint)

    def outside(self, endpoints: list[str]) -> frozenset[int]:
        """The slots of all replicas that are none of these."""
        return frozenset(slot for slot, endpoint in self._by_slot.items() if endpoint not in endpoints)

    def listed(self, first: Replica, model: str | None, left_out: frozenset[int], count: int) -> str:
        """The one that was picked, and up to `count` others for retries: those with the least to do."""
        out = {*self._registry.without(model), *left_out, first.slot}
        others = [one for one in self._registry.accepting if one.slot not in out]
        others.sort(key=lambda one: one.num_outstanding)
        return ",".join(self._by_slot[one.slot] for one in (first, *others[:count]))

    def broke_off(self, replica: Replica) -> bool:
        """An answer has begun and not ended: the client has left, or the server has. Envoy does not say who.

        -> whether so many did in a row that it must be the server.
        """
        self._num_broken_off[replica.slot] += 1
        return self._num_broken_off[replica.slot] > MAX_BROKEN_OFF

    def came_to_its_end(self, replica: Replica) -> None:
        """An answer has come to its end: count anew."""
        self._num_broken_off[replica.slot] = 0

    def _follow(self, replica: Replica, what: str) -> None:
        if what == "added":
            self._add(replica)
        elif what == "removed":
            self._num_broken_off.pop(replica.slot, None)  # the next of this number is another
            resolving = self._resolving.pop(replica.slot, None)
            if resolving is not None:
                resolving.cancel()
            endpoint = self._by_slot.pop(replica.slot, "")
            if self._replicas.get(endpoint) is replica:  # not one that has come back meanwhile
                del self._replicas[endpoint]

    def _add(self, replica: Replica) -> None:
        """A name is resolved once: gateways want addresses. Until then nothing may go there."""
        try:
            ipaddress.ip_address(replica.address.host)
        except ValueError:
            self._registry.drain(replica.name, True)
            resolving = asyncio.get_running_loop().create_task(self._resolve(replica))
            self._resolving[replica.slot] = resolving
        else:
            self._is_at(replica, replica.address.host)

    async def _resolve(self, replica: Replica) -> None:
        host, port = replica.address.host, replica.address.port
        problem = ""
        while True:
            try:
                found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
                break
            except OSError as error:
                if str(error) != problem:  # once, not every two seconds
                    problem = str(error)
                    self._log.event("replica without an address", replica=replica.name, problem=problem)
                await asyncio.sleep(RETRY_S)
        del self._resolving[replica.slot]
        self._is_at(replica, str(found[0][4][0]))
        self._registry.drain(replica.name, False)

    def _is_at(self, replica: Replica, host: str) -> None:
        port = replica.address.port
        endpoint = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._by_slot[replica.slot] = endpoint
        self._replicas[endpoint] = replica
