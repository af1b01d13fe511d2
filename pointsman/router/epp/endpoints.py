"""The replicas as a gateway knows them: by address and port."""

from __future__ import annotations

import ipaddress
import socket
from collections import Counter

from pointsman.router.logs import Log
from pointsman.router.replicas.registry import Registry, Replica

MAX_BROKEN_OFF = 5  # in a row; with as many clients that leave as stay, one in 32 gets there


class Endpoints:
    def __init__(self, registry: Registry, log: Log) -> None:
        self._registry = registry
        self._log = log
        self._by_slot: dict[int, str] = {}
        self._replicas: dict[str, Replica] = {}
        self._num_broken_off: Counter[int] = Counter()  # by slot, since an answer came to its end there
        for replica in registry:
            self._add(replica)
        registry.on_change.append(self._follow)

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
            endpoint = self._by_slot.pop(replica.slot)
            if self._replicas.get(endpoint) is replica:  # not one that has come back meanwhile
                del self._replicas[endpoint]

    def _add(self, replica: Replica) -> None:
        """A name is resolved once: gateways want addresses."""
        host, port = replica.address.host, replica.address.port
        try:
            ipaddress.ip_address(host)
        except ValueError:
            try:
                host = str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
            except OSError as error:
                self._log.event("replica without an address", replica=replica.name, problem=str(error))
                self._registry.drain(replica.name, True)
        endpoint = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._by_slot[replica.slot] = endpoint
        self._replicas[endpoint] = replica
