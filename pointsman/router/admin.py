"""The admin API, on a port of its own: replicas, policy, last decisions.

GET    /admin/replicas                        list
POST   /admin/replicas  {"url": …}            add
DELETE /admin/replicas?url=…                  remove, once its requests are answered
POST   /admin/drain     {"url": …, "drain": true}
GET    /admin/policy
POST   /admin/policy    {"policy": "default"}
GET    /admin/decisions?last=20               with an explanation of the last one
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs

from pointsman.errors import InputError
from pointsman.router.chooser import Chooser
from pointsman.router.config import Backend
from pointsman.router.downstream import ClientConnection
from pointsman.router.keys import Keys
from pointsman.router.messages import Answer, Request, json_answer, refusal
from pointsman.router.replicas import Registry
from pointsman.router.service import Job
from pointsman.spec import Spec, parse_spec

_NUM_DECISIONS = 20


class _Drain(Spec):
    url: str
    drain: bool = True


class _Switch(Spec):
    policy: str


class Admin:
    """A service of client connections, as the proxy is."""

    is_draining = False

    def __init__(self, registry: Registry, chooser: Chooser, keys: Keys) -> None:
        self._registry = registry
        self._chooser = chooser
        self._keys = keys
        self.clients: set[ClientConnection] = set()
        self._routes: dict[tuple[bytes, bytes], Callable[[dict[str, str], Any], Any]] = {
            (b"GET", b"/admin/replicas"): self._list,
            (b"POST", b"/admin/replicas"): self._add,
            (b"DELETE", b"/admin/replicas"): self._remove,
            (b"POST", b"/admin/drain"): self._drain,
            (b"GET", b"/admin/policy"): self._policy,
            (b"POST", b"/admin/policy"): self._switch,
            (b"GET", b"/admin/decisions"): self._decisions,
        }

    def screen(self, request: Request) -> Answer | None:
        # A page in the operator's browser can send requests to loopback, but not without an Origin.
        if request.get(b"origin") is not None:
            return refusal(403, "requests from web pages are not allowed")
        return self._keys.refusal(request)

    def handle(self, request: Request, client: ClientConnection) -> Job | None:
        client.answer(self._answer(request))
        return None

    def opened(self, client: ClientConnection) -> None:
        self.clients.add(client)

    def closed(self, client: ClientConnection) -> None:
        self.clients.discard(client)

    def _answer(self, request: Request) -> Answer:
        route = self._routes.get((request.method, request.path))
        if route is None:
            is_known = any(path == request.path for _, path in self._routes)
            return refusal(405 if is_known else 404, "no such admin command")
        query = {
            key: values[-1]
            for key, values in parse_qs(request.target.partition(b"?")[2].decode("latin-1")).items()
        }
        try:
            body = json.loads(request.body) if request.body else {}
            if not isinstance(body, dict):
                return refusal(400, "the body is not a JSON object")
            return json_answer(route(query, body))
        except InputError as error:
            return refusal(400, str(error))
        except (ValueError, RecursionError):
            return refusal(400, "the body is not valid JSON")

    def _list(self, query: dict[str, str], body: Any) -> Any:
        return {"replicas": [replica.as_json() for replica in self._registry]}

    def _add(self, query: dict[str, str], body: Any) -> Any:
        return self._registry.add(parse_spec(Backend, body), is_returning=True).as_json()

    def _remove(self, query: dict[str, str], body: Any) -> Any:
        self._registry.remove(query.get("url", ""))
        return self._list(query, body)

    def _drain(self, query: dict[str, str], body: Any) -> Any:
        asked = parse_spec(_Drain, body)
        self._registry.drain(asked.url, asked.drain)
        return self._registry.find(asked.url).as_json()

    def _policy(self, query: dict[str, str], body: Any) -> Any:
        return {"policy": self._chooser.policy, "shadow": self._chooser.shadow}

    def _switch(self, query: dict[str, str], body: Any) -> Any:
        self._chooser.switch(parse_spec(_Switch, body).policy)
        return self._policy(query, body)

    def _decisions(self, query: dict[str, str], body: Any) -> Any:
        text = query.get("last", str(_NUM_DECISIONS))
        if not text.isdecimal():
            raise InputError("last", text, "is not a number", "use a number of decisions")
        count = max(1, int(text))
        decisions = [decision.as_json() for decision in list(self._chooser.last)[-count:]]
        return {"decisions": decisions, "last": self._chooser.explain()}
