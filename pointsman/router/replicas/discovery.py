"""Where replicas come from when they are not named on the command line: a file, DNS, Kubernetes.

A source is asked again and again; what it says is what there is. Replicas that are no longer named finish
their requests and leave. While a source cannot be read, everything stays as it is.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from pointsman.errors import InputError, reason_of
from pointsman.router.config import Backend
from pointsman.router.http.address import Address, parse_url
from pointsman.router.http.fetching import FetchError, fetch
from pointsman.router.http.limits import Limits
from pointsman.router.http.tls import server_side_tls
from pointsman.router.http.upstream import Pool
from pointsman.router.logs import Log
from pointsman.router.replicas.registry import Registry
from pointsman.simulator.calibration import known_figures
from pointsman.spec import Spec, parse_spec, read_yaml

_SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_TIMEOUT_S = 5.0


class SourceError(Exception):
    """The source does not say, for now, what replicas there are."""


class Source(Protocol):
    async def backends(self) -> Sequence[Backend]: ...


class _BackendFile(Spec):
    """A file of servers. `pointsman calibrate` writes the other keys, for the simulator."""

    backends: list[Backend | str]
    replica: Mapping[str, Any] = {}
    measured: Mapping[str, Any] = {}


class FileSource:
    """YAML: `backends:`, a list of URLs, or of `{url: …, calibration: {…}, ca: FILE, tls_name: …}`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.read()  # what is wrong at the start is an error of the user, later it is only logged

    async def backends(self) -> Sequence[Backend]:
        try:
            return self.read()
        except InputError as error:
            raise SourceError(str(error)) from None

    def read(self) -> list[Backend]:
        named = parse_spec(
            _BackendFile, read_yaml(self._path, "backends", "--backends"), str(self._path)
        ).backends
        backends = [self._backend(one) for one in named]
        for backend in backends:
            parse_url(backend.url, f"{self._path}: backends")
            known_figures(backend.calibration)
            if backend.ca is not None:
                server_side_tls(backend.ca)
        return backends

    def _backend(self, named: Backend | str) -> Backend:
        backend = Backend(url=named) if isinstance(named, str) else named
        if backend.ca is None:
            return backend
        return backend.model_copy(update={"ca": self._path.parent / backend.ca})


class DnsSource:
    """Every address of a name is a replica, as with a headless service of Kubernetes.

    Their certificates bear the name.
    """

    def __init__(self, url: str) -> None:
        self._address = parse_url(url, "--dns")

    async def backends(self) -> Sequence[Backend]:
        loop = asyncio.get_running_loop()
        address = self._address
        try:
            found = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise SourceError(f"{address.host} cannot be resolved ({reason_of(error)})") from None
        hosts = sorted({str(entry[4][0]) for entry in found})
        return [Backend(url=_url(address, host), tls_name=address.host) for host in hosts]


class KubernetesSource:
    """The ready endpoints of a service, from its EndpointSlices; by the pod's own service account.

    It needs the right to `list` `endpointslices` of `discovery.k8s.io` in the namespace. A port whose
    `appProtocol` is `https` is asked so; the certificate is for SERVICE.NAMESPACE.svc.
    """

    def __init__(self, service: str, account: Path = _SERVICE_ACCOUNT) -> None:
        self._given = service
        name, _, port = service.partition(":")
        namespace, slash, self._service = name.rpartition("/")
        self._port = int(port) if port.isdecimal() else None
        if not self._service or "/" in namespace or (port and not 0 < (self._port or 0) < 65536):
            raise InputError(
                "--kubernetes", service, "is not a service", "write it as namespace/service:port"
            )
        self._account = account
        if not slash:
            namespace = self._read("namespace").strip()
        self._namespace = namespace
        host = os.environ.get("KUBERNETES_SERVICE_HOST")
        if host is None:
            remedy = "run the router in a pod, or use --backends or --dns"
            raise InputError("--kubernetes", service, "this is not inside a cluster", remedy)
        api = Address(
            scheme=os.environ.get("KUBERNETES_SERVICE_SCHEME", "https"),
            host=host,
            port=int(os.environ.get("KUBERNETES_SERVICE_PORT", "443")),
            prefix="",
        )
        self._pool = Pool(api, Limits(), account / "ca.crt")

    async def backends(self) -> Sequence[Backend]:
        path = (
            f"/apis/discovery.k8s.io/v1/namespaces/{self._namespace}/endpointslices"
            f"?labelSelector=kubernetes.io%2Fservice-name%3D{self._service}"
        )
        try:
            token = self._read("token").strip()  # Kubernetes renews it from time to time
            headers = f"authorization: Bearer {token}\r\naccept: application/json\r\n".encode()
            answer = await fetch(self._pool, path, _TIMEOUT_S, headers)
        except (FetchError, InputError) as error:
            raise SourceError(f"Kubernetes API: {error}") from None
        if answer.status != 200:
            raise SourceError(f"Kubernetes API answered {answer.status}")
        try:
            tls_name = f"{self._service}.{self._namespace}.svc"
            return ready_endpoints(json.loads(answer.body), self._port, tls_name)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SourceError(f"Kubernetes API: unexpected answer ({error})") from None

    def _read(self, name: str) -> str:
        try:
            return (self._account / name).read_text(encoding="utf-8")
        except OSError as error:
            problem = f"there is no service account here ({reason_of(error)})"
            remedy = "run the router in a pod, or use --backends or --dns"
            raise InputError("--kubernetes", self._given, problem, remedy) from None


def ready_endpoints(slices: Any, port: int | None, tls_name: str | None = None) -> list[Backend]:
    """Read the ready endpoints of EndpointSlices; without a port, the first of each slice is taken."""
    urls = set()
    for one in slices["items"]:
        protocols = {entry["port"]: entry.get("appProtocol") for entry in one.get("ports") or []}
        chosen = port if port is not None else next(iter(protocols), None)
        if chosen is None:
            continue
        scheme = "https" if protocols.get(chosen) == "https" else "http"
        for endpoint in one.get("endpoints") or []:
            # Absent means unknown, which is to be read as ready.
            if endpoint.get("conditions", {}).get("ready") in (True, None):
                for host in endpoint["addresses"]:
                    urls.add(_url(Address(scheme=scheme, host=host, port=chosen, prefix=""), host))
    return [Backend(url=url, tls_name=tls_name) for url in sorted(urls)]


def _url(address: Address, host: str) -> str:
    return f"{address.scheme}://{address.model_copy(update={'host': host}).netloc}{address.prefix}"


class Discovery:
    """Makes the registry follow a source. Replicas that came from elsewhere are left alone."""

    def __init__(self, source: Source, registry: Registry, log: Log, interval_s: float) -> None:
        self._source = source
        self._registry = registry
        self._log = log
        self._interval_s = interval_s
        self._ours: dict[str, Backend] = {}
        self._problem: str | None = None

    def found(self) -> Collection[str]:
        """The names of the replicas that came from the source."""
        return self._ours.keys()

    def was_found(self, backends: Iterable[Backend]) -> None:
        """These replicas came from the source, too, but to a process that is no more."""
        self._ours |= {backend.url: backend for backend in backends}

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            try:
                await self.look(is_returning=True)
            except InputError as error:  # a backend that makes no sense
                self._say(str(error))
            except Exception as error:  # or nobody would ever look again
                self._say(f"{type(error).__name__}: {error}")

    async def look(self, *, is_returning: bool = False) -> None:
        try:
            wanted = {backend.url: backend for backend in await self._source.backends()}
        except SourceError as error:
            self._say(str(error))
            return
        present = self._registry.names()
        for name, backend in self._ours.items():
            if wanted.get(name) != backend and name in present:
                self._registry.remove(name)
        self._ours = {name: backend for name, backend in self._ours.items() if wanted.get(name) == backend}
        for name, backend in wanted.items():
            if name not in self._registry.names():
                self._registry.add(backend, is_returning=is_returning)
                self._ours[name] = backend
        self._problem = None

    def _say(self, problem: str) -> None:
        if problem != self._problem:  # once, not every two seconds
            self._problem = problem
            self._log.event("discovery failed", problem=problem)
