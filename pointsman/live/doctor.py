"""What is wrong with a deployment, and what to do about it: this machine, the servers, the router.

Every check ends as a `Checkup`. The questions are those that the router asks (health, models, gauges), and
some that it never asks: which version runs, and what time it is there. Python's own HTTP client asks them,
so that what is found is not an opinion of the router's.
"""

from __future__ import annotations

import http.client
import json
import os
import resource
import ssl
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pointsman import __version__
from pointsman.errors import InputError, reason_of
from pointsman.inference.checkpoint import load_checkpoint
from pointsman.router.config import Backend
from pointsman.router.http.address import parse_url
from pointsman.router.http.tls import server_side_tls
from pointsman.router.keys import BACKEND_KEY, CLIENT
from pointsman.router.replicas.reports import ScrapedGauges, read_gauges, read_models
from pointsman.routing.policy import PolicySpec
from pointsman.spec import parse_spec

Level = Literal["ok", "warning", "problem"]
HERE = "this machine"
TIMEOUT_S = 5.0
MAX_ANSWER_S = 0.5  # of /health, before a server counts as slow
MIN_FILES = 4096  # of a router
MAX_CLOCK_S = 2.0  # a Date header is cut to whole seconds, and may be a second old


@dataclass(frozen=True)
class Checkup:
    subject: str  # a server, the router, or this machine
    check: str
    level: Level
    what: str
    remedy: str = ""


class Answered(NamedTuple):
    status: int
    body: bytes
    took_s: float
    ahead_s: float | None  # its clock against ours, if it says what time it is


@dataclass(frozen=True)
class ServerFacts:
    """What is compared between servers."""

    url: str
    version: str | None = None
    models: tuple[str, ...] = ()


def examine(
    backends: Sequence[Backend],
    policy: str,
    router: str | None = None,
    ca: Path | None = None,
    timeout_s: float = TIMEOUT_S,
) -> list[Checkup]:
    """Check this machine, the servers and the router; `ca` signs for whoever names no authority."""
    findings = examine_here(policy)
    with ThreadPoolExecutor(max_workers=16) as pool:
        examined = list(pool.map(lambda backend: examine_server(backend, ca, timeout_s), backends))
    for of_server, _ in examined:
        findings += of_server
    findings += compare([facts for _, facts in examined if facts is not None])
    if router is not None:
        findings += examine_router(router, ca, timeout_s)
    return findings


def examine_here(policy: str) -> list[Checkup]:
    python = ".".join(map(str, sys.version_info[:3]))
    version = Checkup(HERE, "version", "ok", f"pointsman {__version__}, Python {python}")
    return [version, _policy(policy), _files()]


def _files() -> Checkup:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if limit == resource.RLIM_INFINITY:
        return Checkup(HERE, "open files", "ok", "no limit")
    what = f"at most {limit:,}: about {limit // 2:,} streams at once"
    if limit < MIN_FILES:
        return Checkup(HERE, "open files", "warning", what, "raise it for the router: ulimit -Hn")
    return Checkup(HERE, "open files", "ok", what)


def _policy(policy: str) -> Checkup:
    try:
        spec = parse_spec(PolicySpec, {"kind": policy}, "policy")
        if spec.checkpoint is not None:
            load_checkpoint(spec.checkpoint, "policy")
    except InputError as error:
        return Checkup(HERE, "policy", "problem", f"{error.value!r} {error.problem}", error.remedy)
    return Checkup(HERE, "policy", "ok", f"{spec.label} can be read")


def examine_server(
    backend: Backend, ca: Path | None, timeout_s: float
) -> tuple[list[Checkup], ServerFacts | None]:
    """Check one server by itself; -> no facts if it does not answer."""
    url = backend.url
    ask = _Asker(url, backend.ca or ca, backend.tls_name, os.environ.get(BACKEND_KEY), timeout_s)
    try:
        health = ask("/health")
    except OSError as error:
        return [
            Checkup(url, "reachable", "problem", f"does not answer ({reason_of(error)})", _unreachable(error))
        ], None
    findings = [_health(url, health), *_clock(url, health)]
    try:
        models = ask("/v1/models")
        findings.append(_models(url, models))
        findings.append(_gauges(url, ask("/metrics")))
        version = _version(ask("/version"))
    except OSError as error:
        what = f"answered /health, then not any more ({reason_of(error)})"
        return [*findings, Checkup(url, "reachable", "problem", what, "look into its log")], None
    findings.append(_of_version(url, version))
    return findings, ServerFacts(url, version, tuple(read_models(models.body) or ()))


def _health(url: str, answer: Answered) -> Checkup:
    if answer.status >= 500:
        what = f"answers {answer.status} to /health"
        return Checkup(url, "reachable", "problem", what, "wait until it is up, or look into its log")
    if answer.took_s > MAX_ANSWER_S:
        what = f"took {answer.took_s:.2f} s to answer /health"
        remedy = "is it far away, or its API process overloaded? The router gives it 2 s"
        return Checkup(url, "reachable", "warning", what, remedy)
    return Checkup(url, "reachable", "ok", f"answers in {answer.took_s * 1000:.0f} ms")


def _models(url: str, answer: Answered) -> Checkup:
    if answer.status in (401, 403):
        remedy = f"set ${BACKEND_KEY} to the key that it wants"
        return Checkup(url, "models", "problem", f"answers {answer.status} to /v1/models", remedy)
    models = read_models(answer.body) if answer.status == 200 else None
    if not models:
        what = f"lists no models (status {answer.status} of /v1/models)"
        return Checkup(url, "models", "problem", what, "give the address of an OpenAI-compatible server")
    return Checkup(url, "models", "ok", f"serves {', '.join(models)}")


def _gauges(url: str, answer: Answered) -> Checkup:
    books = "until then the router goes by its own books alone"
    if answer.status != 200:
        what = f"answers {answer.status} to /metrics"
        return Checkup(url, "metrics", "warning", what, f"let it show its metrics; {books}")
    gauges = read_gauges(answer.body)
    if gauges is None:
        what = "shows no vllm:num_requests_running and vllm:num_requests_waiting"
        remedy = f"start it without --disable-log-stats if it is vLLM; {books}"
        return Checkup(url, "metrics", "warning", what, remedy)
    if b"cache_usage_perc" not in answer.body:
        what = "does not show how much of its KV memory is in use (vllm:kv_cache_usage_perc)"
        return Checkup(url, "metrics", "warning", what, "give kv_capacity_tokens in a file of --backends")
    return Checkup(url, "metrics", "ok", _said(gauges))


def _said(gauges: ScrapedGauges) -> str:
    return f"{gauges.running:g} running, {gauges.waiting:g} waiting, KV memory {gauges.kv_use:.0%} full"


def _clock(subject: str, answer: Answered) -> list[Checkup]:
    """Compare its clock with ours; no finding if it does not say what time it is."""
    if answer.ahead_s is None:
        return []
    if abs(answer.ahead_s) <= MAX_CLOCK_S:
        return [Checkup(subject, "clock", "ok", "agrees with ours")]
    direction = "ahead of" if answer.ahead_s > 0 else "behind"
    what = f"is {abs(answer.ahead_s):.0f} s {direction} ours"
    remedy = "run NTP on both: logs cannot be put in order, and certificates may count as expired"
    return [Checkup(subject, "clock", "warning", what, remedy)]


def _version(answer: Answered) -> str | None:
    try:
        return str(json.loads(answer.body)["version"]) if answer.status == 200 else None
    except (ValueError, KeyError, TypeError):
        return None


def _of_version(url: str, version: str | None) -> Checkup:
    if version is None:
        return Checkup(url, "version", "ok", "does not say which version it is")
    return Checkup(url, "version", "ok", version)


def compare(servers: Sequence[ServerFacts]) -> list[Checkup]:
    """Find what is wrong between servers that are well by themselves."""
    findings = []
    for url, count in Counter(facts.url for facts in servers).items():
        if count > 1:
            what = f"is named {count} times"
            findings.append(Checkup(url, "servers", "problem", what, "name each server once"))
    versions = Counter(facts.version for facts in servers if facts.version is not None)
    if len(versions) > 1:
        what = ", ".join(f"{count} of {version}" for version, count in versions.most_common())
        remedy = "finish the upgrade, or expect unequal speeds, which the router learns as traffic flows"
        findings.append(Checkup("servers", "version", "warning", f"they differ: {what}", remedy))
    models = Counter(model for facts in servers for model in facts.models)
    for model, count in models.items():
        if count < len(servers):
            what = f"{model} is served by {count} of {len(servers)}"
            remedy = "fine if it is meant so: its requests go to those alone"
            findings.append(Checkup("servers", "models", "warning", what, remedy))
    return findings


def examine_router(url: str, ca: Path | None, timeout_s: float) -> list[Checkup]:
    keys = os.environ.get(CLIENT.environment, "").split(",")
    ask = _Asker(url, ca, None, keys[0].strip() or None, timeout_s)
    try:
        health, models, metrics = ask("/health"), ask("/v1/models"), ask("/metrics")
    except OSError as error:
        return [
            Checkup(url, "router", "problem", f"does not answer ({reason_of(error)})", _unreachable(error))
        ]
    findings = [*_clock(url, health)]
    if models.status in (401, 403):
        remedy = f"set ${CLIENT.environment} to a key of a client"
        findings.append(Checkup(url, "models", "problem", f"answers {models.status} to /v1/models", remedy))
    samples = _samples(metrics.body)
    accepting = {name: value for name, value in samples.items() if "replica_accepting" in name}
    if not accepting:
        what = "shows none of the metrics of `pointsman serve`, or has no servers"
        return [*findings, Checkup(url, "router", "problem", what, "is it the address of the router?")]
    num_well = sum(value > 0 for value in accepting.values())
    what = f"{num_well} of {len(accepting)} servers get requests"
    if num_well == 0:
        findings.append(Checkup(url, "router", "problem", what, "see what is said of the servers"))
    elif num_well < len(accepting):
        findings.append(Checkup(url, "router", "warning", what, "see what is said of the servers"))
    else:
        findings.append(Checkup(url, "router", "ok", what))
    fallbacks = sum(value for name, value in samples.items() if name.startswith("pointsman_fallbacks_total"))
    if fallbacks:
        what = f"{fallbacks:g} decisions were taken from the policy"
        remedy = "look for `policy` in its log: it was too slow, or failed"
        findings.append(Checkup(url, "policy", "warning", what, remedy))
    return findings


def _samples(text: bytes) -> dict[str, float]:
    """A page of metrics -> name with labels: value"""
    samples = {}
    for line in text.decode("utf-8", "replace").splitlines():
        name, _, value = line.rpartition(" ")
        if name.startswith("pointsman_"):
            samples[name] = float(value)
    return samples


class _NoHttpError(OSError):
    """Somebody is there, but speaks something else."""


class _Asker:
    """GETs from one server, each on a connection of its own. Raises OSError where there is no answer."""

    def __init__(
        self, url: str, ca: Path | None, tls_name: str | None, key: str | None, timeout_s: float
    ) -> None:
        self._address = parse_url(url)
        self._tls = server_side_tls(ca) if self._address.scheme == "https" else None
        self._tls_name = tls_name
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._timeout_s = timeout_s

    def __call__(self, path: str) -> Answered:
        started = time.monotonic()
        connection = self._connection()
        try:
            connection.request("GET", self._address.prefix + path, headers=self._headers)
            answer = connection.getresponse()
            body = answer.read()
        except http.client.RemoteDisconnected:
            raise _NoHttpError("it closes the connection without an answer") from None
        except http.client.HTTPException:
            raise _NoHttpError("what it answers is not HTTP") from None
        finally:
            connection.close()
        return Answered(answer.status, body, time.monotonic() - started, _ahead_s(answer.getheader("date")))

    def _connection(self) -> http.client.HTTPConnection:
        address = self._address
        connection = http.client.HTTPConnection(address.host, address.port, timeout=self._timeout_s)
        if self._tls is not None:
            connection.connect()
            name = self._tls_name or address.host
            connection.sock = self._tls.wrap_socket(connection.sock, server_hostname=name)
        return connection


def _ahead_s(date: str | None) -> float | None:
    try:
        return None if date is None else parsedate_to_datetime(date).timestamp() + 0.5 - time.time()
    except ValueError:
        return None


def _unreachable(error: OSError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return "give --backend-ca FILE, or renew its certificate"
    if isinstance(error, _NoHttpError):
        return "write https:// if it speaks TLS, or correct the port"
    if isinstance(error, ssl.SSLError):
        return "write http:// if it does not speak TLS, or correct the port"
    if isinstance(error, ConnectionRefusedError):
        return "start it, or correct the port"
    if isinstance(error, TimeoutError):
        return "open the way: a firewall or a NetworkPolicy may be between"
    return "start it, or correct the address"


def as_rows(findings: Sequence[Checkup]) -> list[dict[str, Any]]:
    return [vars(finding) for finding in findings]
