"""`pointsman doctor` in front of servers that are well, and of those that are not."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from emulator.serving import with_emulator

from pointsman.cli.main import main
from pointsman.emulator.cluster import Emulator
from pointsman.live.doctor import Checkup, examine
from pointsman.router.config import Backend

GAUGES = "vllm:num_requests_running 3\nvllm:num_requests_waiting 1\n"
PAGES: dict[str, tuple[int, str]] = {
    "/health": (200, ""),
    "/v1/models": (200, '{"data": [{"id": "m"}]}'),
    "/metrics": (200, GAUGES + "vllm:kv_cache_usage_perc 0.5\n"),
    "/version": (200, '{"version": "0.32.0"}'),
}


@contextmanager
def server(clock_ahead_s: float = 0.0, key: str | None = None, **pages: tuple[int, str]) -> Iterator[str]:
    """`pages`: by path without its slashes, what differs from a server that is well. -> its URL"""
    shown = {path: pages.get(path.replace("/", ""), page) for path, page in PAGES.items()}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, text = shown.get(self.path, (404, ""))
            if key is not None and self.headers["authorization"] != f"Bearer {key}":
                status, text = 401, ""
            self.send_response(status)
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def date_time_string(self, timestamp: float | None = None) -> str:
            return formatdate(time.time() + clock_ahead_s, usegmt=True)

        def log_message(self, *args: Any) -> None:
            pass

    listening = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.server_port}"
    finally:
        listening.shutdown()
        listening.server_close()
        thread.join()


def unwell(*urls: str, **options: Any) -> list[Checkup]:
    found = examine([Backend(url=url) for url in urls], options.pop("policy", "least-work"), **options)
    return [finding for finding in found if finding.level != "ok"]


def only(findings: list[Checkup]) -> tuple[str, str, str]:
    (finding,) = findings
    assert finding.remedy
    return finding.check, finding.level, finding.what


def test_nothing_is_wrong_with_servers_that_are_well() -> None:
    with server() as one, server() as other:
        assert unwell(one, other) == []


def test_emulated_servers_are_understood() -> None:
    async def look(emulator: Emulator) -> None:
        backends = [Backend(url=replica.url) for replica in emulator.replicas]
        findings = await asyncio.to_thread(examine, backends, "default")
        assert [finding for finding in findings if finding.level != "ok"] == []
        gauges = [finding.what for finding in findings if finding.check == "metrics"]
        assert gauges == ["0 running, 0 waiting, KV memory 0% full"] * 2

    with_emulator(look, devices=["A100-80", "A100-80"])


def test_a_server_that_is_not_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    check, level, what = only(unwell(f"http://127.0.0.1:{port}"))
    assert (check, level) == ("reachable", "problem")
    assert "refused" in what


def test_a_server_that_accepts_and_is_silent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        (finding,) = unwell(url, timeout_s=0.2)
    assert (finding.check, finding.level) == ("reachable", "problem")
    assert "NetworkPolicy" in finding.remedy


@pytest.mark.parametrize(
    ("said", "what"),
    [(b"", "it closes the connection without an answer"), (b"SSH-2.0-x\r\n", "what it answers is not HTTP")],
)
def test_somebody_who_speaks_something_else(said: bytes, what: str) -> None:
    """As TLS does where HTTP is spoken, and the other way round."""

    def hang_up() -> None:
        connection, _ = listening.accept()
        with connection:
            connection.recv(4096)
            connection.sendall(said)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=hang_up)
        thread.start()
        (finding,) = unwell(f"http://127.0.0.1:{listening.getsockname()[1]}")
        thread.join()
    assert finding.what == f"does not answer ({what})"
    assert "https://" in finding.remedy
    with server() as plain:
        (finding,) = unwell(plain.replace("http://", "https://"))
    assert "_ssl.c" not in finding.what
    assert "http://" in finding.remedy


@pytest.mark.parametrize(
    ("pages", "check", "level", "what"),
    [
        ({"health": (503, "")}, "reachable", "problem", "answers 503 to /health"),
        ({"v1models": (404, "")}, "models", "problem", "lists no models (status 404 of /v1/models)"),
        ({"v1models": (200, "<html>")}, "models", "problem", "lists no models (status 200 of /v1/models)"),
        ({"metrics": (404, "")}, "metrics", "warning", "answers 404 to /metrics"),
        ({"metrics": (200, "sglang:x 1\n")}, "metrics", "warning", "shows no vllm:num_requests_running"),
        ({"metrics": (200, GAUGES)}, "metrics", "warning", "does not show how much of its KV memory"),
    ],
)
def test_what_one_server_can_lack(pages: dict[str, Any], check: str, level: str, what: str) -> None:
    with server(**pages) as url:
        found_check, found_level, found = only(unwell(url))
    assert (found_check, found_level) == (check, level)
    assert found.startswith(what)


def test_a_key_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    with server(key="secret") as url:
        assert ("models", "problem") in [(one.check, one.level) for one in unwell(url)]
        monkeypatch.setenv("POINTSMAN_BACKEND_KEY", "secret")
        assert unwell(url) == []


@pytest.mark.parametrize(("ahead_s", "is_said"), [(0.0, False), (-1.0, False), (30.0, True), (-30.0, True)])
def test_clocks(ahead_s: float, is_said: bool) -> None:
    with server(clock_ahead_s=ahead_s) as url:
        found = unwell(url)
    assert [one.check for one in found] == ["clock"] * is_said
    if is_said:
        assert ("ahead of" in found[0].what) == (ahead_s > 0)


def test_servers_that_differ() -> None:
    with server() as one, server(version=(200, '{"version": "0.31.1"}')) as other:
        assert only(unwell(one, other))[:2] == ("version", "warning")
    with server() as one, server(v1models=(200, '{"data": [{"id": "m"}, {"id": "n"}]}')) as other:
        assert only(unwell(one, other)) == ("models", "warning", "n is served by 1 of 2")
    with server() as url:
        assert only(unwell(url, url)) == ("servers", "problem", "is named 2 times")


def test_a_policy_that_cannot_be_read() -> None:
    (finding,) = unwell(policy="no-such-policy")
    assert (finding.subject, finding.check, finding.level) == ("this machine", "policy", "problem")


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        ('pointsman_replica_accepting{replica="a"} 1.0\n', []),
        (
            'pointsman_replica_accepting{replica="a"} 1.0\npointsman_replica_accepting{replica="b"} 0.0\n',
            [("router", "warning", "1 of 2 servers get requests")],
        ),
        (
            'pointsman_replica_accepting{replica="a"} 0.0\n',
            [("router", "problem", "0 of 1 servers get requests")],
        ),
        (
            'pointsman_replica_accepting{replica="a"} 1.0\npointsman_fallbacks_total{reason="slow"} 4.0\n',
            [("policy", "warning", "4 decisions were taken from the policy")],
        ),
        (
            GAUGES,
            [("router", "problem", "shows none of the metrics of `pointsman serve`, or has no servers")],
        ),
    ],
)
def test_a_router(metrics: str, expected: list[tuple[str, str, str]]) -> None:
    with server(metrics=(200, metrics)) as url:
        assert [(one.check, one.level, one.what) for one in unwell(router=url)] == expected


def test_a_router_that_is_no_url(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--backend", "http://127.0.0.1:1", "--router", "nonsense"]) == 2
    assert "--router = 'nonsense': is not a URL" in capsys.readouterr().err


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    with server() as url:
        assert main(["doctor", "--backend", url]) == 0
        assert "0 to fix, 0 worth a look" in capsys.readouterr().out
        assert main(["doctor", "--backend", f"{url}/v1", "--policy", "nothing", "--json"]) == 1
        rows = json.loads(capsys.readouterr().out)
    assert [row["check"] for row in rows if row["level"] == "problem"] == ["policy"]
    assert main(["doctor", "--backend", "nowhere"]) == 2
