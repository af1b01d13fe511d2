"""The admin API, on a port of its own: replicas, policy, last decisions, and the live page.

GET    /dashboard                             the live page; in a browser
GET    /admin/state                           all it shows
GET    /admin/replicas                        list
POST   /admin/replicas  {"url": …}            add
DELETE /admin/replicas?url=…                  remove, once its requests are answered
POST   /admin/drain     {"url": …, "drain": true}
GET    /admin/policy
POST   /admin/policy    {"policy": "default"}
POST   /admin/shadow    {"policy": "least-work"}, or null: none
GET    /admin/decisions?last=20               why, in a sentence each; and all that was seen for the last one
GET    /admin/decisions?request=ID            those about one request, by its x-request-id

It is a second service of the router's own HTTP server, with its limits, keys and TLS. A web framework would
be a second server beside it (aiohttp: ten packages, 15 MB, 0.25 s at every start) for ten routes.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from inspect import isawaitable
from ipaddress import ip_address
from typing import Any
from urllib.parse import parse_qs, urlsplit

from pointsman.errors import InputError
from pointsman.plain import to_json
from pointsman.router.config import Backend
from pointsman.router.http.downstream import ClientConnection
from pointsman.router.http.messages import Answer, HttpRequest, RequestHead, refusal
from pointsman.router.http.service import Job, Later
from pointsman.router.keys import Keys
from pointsman.router.operations import dashboard
from pointsman.router.server import Router
from pointsman.spec import Spec, parse_spec

_NUM_DECISIONS = 20
_MAX_DIGITS = 9
_PAGE = b"/dashboard"  # it holds no data, and a browser cannot send a key before it has the page


class _Drain(Spec):
    url: str
    drain: bool = True


class _Switch(Spec):
    policy: str


class _Shadow(Spec):
    policy: str | None


class Admin:
    """A service of client connections, as the proxy is."""

    is_draining = False

    def __init__(self, router: Router, keys: Keys) -> None:
        self._registry = router.registry
        self._watch = router.watch
        self._decisions = router.decisions
        self._dashboard = dashboard.Dashboard(router)
        self._log = router.log
        self._keys = keys
        self._switching = asyncio.Lock()
        self.clients: set[ClientConnection] = set()
        router.on_tick.append(self._tick)
        self._routes: dict[tuple[bytes, bytes], Callable[[dict[str, str], Any], Any]] = {
            (b"GET", b"/admin/replicas"): self._list,
            (b"POST", b"/admin/replicas"): self._add,
            (b"DELETE", b"/admin/replicas"): self._remove,
            (b"POST", b"/admin/drain"): self._drain,
            (b"GET", b"/admin/policy"): self._policy,
            (b"POST", b"/admin/policy"): self._switch,
            (b"POST", b"/admin/shadow"): self._set_shadow,
            (b"GET", b"/admin/decisions"): self._last_decisions,
            (b"GET", b"/admin/state"): lambda query, body: self._dashboard.state(),
            (b"GET", _PAGE): lambda query, body: dashboard.page(),
        }

    def screen(self, head: RequestHead, client: ClientConnection) -> Answer | None:
        # A page in the operator's browser can send requests to loopback, but not without an Origin.
        # One whose name resolves to loopback needs none; but then that name is the Host.
        if head.special.get(b"origin") is not None or not (self._keys or _is_address(head)):
            return refusal(403, "requests from web pages are not allowed; without a key, ask by address")
        return self._keys.refusal(head, client.address, self._log) if head.path != _PAGE else None

    def handle(self, request: HttpRequest, client: ClientConnection) -> Job:
        return Later(self._answer(request), client)

    def opened(self, client: ClientConnection) -> None:
        self.clients.add(client)

    def closed(self, client: ClientConnection) -> None:
        self.clients.discard(client)

    def _tick(self, now: float) -> None:
        for client in list(self.clients):
            client.check(now)

    async def _answer(self, request: HttpRequest) -> Answer:
        route = self._routes.get((request.head.method, request.head.path))
        if route is None:
            return self._unknown(request.head.method, request.head.path)
        query = {
            key: values[-1]
            for key, values in parse_qs(request.head.target.partition(b"?")[2].decode("latin-1")).items()
        }
        try:
            body = json.loads(request.body) if request.body else {}
        except (ValueError, RecursionError):
            return refusal(400, "the body is not valid JSON")
        if not isinstance(body, dict):
            return refusal(400, "the body is not a JSON object")
        try:
            result = route(query, body)
            if isawaitable(result):
                result = await result
            return result if isinstance(result, Answer) else _json(result)
        except InputError as error:
            return refusal(400, str(error))
        except Exception as error:  # nobody is left waiting for an answer
            self._log.event("command failed", path=request.head.path.decode("latin-1"), problem=repr(error))
            return refusal(500, "the command failed; see the log", "server_error")

    def _unknown(self, method: bytes, path: bytes) -> Answer:
        methods = [one.decode() for one, known in self._routes if known == path]
        if methods:
            said = f"{method.decode('latin-1')} is no command for this path; use {' or '.join(methods)}"
            return refusal(405, said)
        paths = ", ".join(dict.fromkeys(known.decode() for _, known in self._routes))
        return refusal(404, f"no such admin command; there are {paths}")

    def _list(self, query: dict[str, str], body: Any) -> Any:
        return {"replicas": [replica.as_json() for replica in self._registry]}

    async def _add(self, query: dict[str, str], body: Any) -> Any:
        replica = self._registry.add(parse_spec(Backend, body), is_returning=True)
        await self._watch.first_look(replica)
        return replica.as_json()

    def _remove(self, query: dict[str, str], body: Any) -> Any:
        if "url" not in query:
            raise InputError("url", None, "says which server to remove", "add ?url=http://host:port")
        self._registry.remove(query["url"])
        return self._list(query, body)

    def _drain(self, query: dict[str, str], body: Any) -> Any:
        asked = parse_spec(_Drain, body)
        self._registry.drain(asked.url, asked.drain)
        return self._registry.find(asked.url).as_json()

    def _policy(self, query: dict[str, str], body: Any) -> Any:
        return {"policy": self._decisions.policy, "shadow": self._decisions.shadow}

    async def _switch(self, query: dict[str, str], body: Any) -> Any:
        policy = parse_spec(_Switch, body).policy
        async with self._switching:  # in the order of the commands
            await asyncio.get_running_loop().run_in_executor(None, _read_ahead, policy)
            self._decisions.switch(policy)
        return self._policy(query, body)

    async def _set_shadow(self, query: dict[str, str], body: Any) -> Any:
        policy = parse_spec(_Shadow, body).policy
        async with self._switching:
            if policy is not None:
                await asyncio.get_running_loop().run_in_executor(None, _read_ahead, policy)
            self._decisions.set_shadow(policy)
        return self._policy(query, body)

    def _last_decisions(self, query: dict[str, str], body: Any) -> Any:
        if (request_id := query.get("request")) is not None:
            return {"decisions": [decision._asdict() for decision in self._decisions.find(request_id)]}
        text = query.get("last", str(_NUM_DECISIONS))
        if not text.isdecimal() or len(text) > _MAX_DIGITS:
            raise InputError("last", text, "is not a number of decisions", "use a whole number from 1")
        decisions = [decision._asdict() for decision in self._decisions.last(max(1, int(text)))]
        return {"decisions": decisions, "last": self._decisions.explain()}


def _is_address(head: RequestHead) -> bool:
    """Whether the client asks for an address, and not for a name that somebody else says is ours."""
    try:
        host = urlsplit(b"//" + head.special.get(b"host", b"localhost")).hostname or b""
        return host == b"localhost" or bool(ip_address(host.decode()))
    except ValueError:
        return False


def _json(value: Any) -> Answer:
    """Requests wait while this is written: the short way first, which knows neither NaN nor NumPy."""
    try:
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        text = to_json(value, indent=None)
    return Answer(200, text.encode())


def _read_ahead(policy: str) -> None:
    """In a thread: requests go on while the file of a policy comes from a slow disk.

    What is wrong with the policy, `switch` will say; it finds the file in the system's cache.
    """
    from pointsman.inference.checkpoint import load_checkpoint
    from pointsman.routing.policy import PolicySpec

    with suppress(InputError):
        path = parse_spec(PolicySpec, {"kind": policy}, "policy").checkpoint
        if path is not None:
            load_checkpoint(path)
