"""`pointsman serve`: what it refuses, and its life from the first request to SIGTERM."""

from __future__ import annotations

import asyncio
import gc
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pointsman.cli.main import main
from pointsman.errors import InputError
from pointsman.router import main as router_main
from pointsman.router.config import Settings
from pointsman.router.main import Options, serve_forever
from pointsman.router.ports import Ports
from tests.router.certificates import new_authority
from tests.router.fakes import FakeBooks, FakeDecider
from tests.router.harness import CHAT, Wire, post, run, until
from tests.router.mock import gated, mocks, ok

BAD = {
    "no server": ([], "no server is named"),
    "not a URL": (["--backend", "a:8000"], "is not a URL"),
    "two sources": (["--dns", "http://a", "--kubernetes", "b"], "given beside"),
    "no such file": (["--backends", "nowhere.yaml"], "no such file"),
    "unknown setting": (
        ["--backend", "http://a", "--set", "holding.max_hold=1"],
        "did you mean 'max_hold_s'",
    ),
    "keys that cannot be read": (["--backend", "http://a", "--api-keys", "nowhere"], "cannot be read"),
    "admin keys that cannot be read": (["--backend", "http://a", "--admin-keys", "nowhere"], "--admin-keys"),
    "a port beyond all": (["--backend", "http://a", "--port", "99999"], "--port = 99999: is not a port"),
    "an admin port beyond all": (["--backend", "http://a", "--admin-port", "99999"], "--admin-port = 99999"),
    "a negative port, several processes": (
        ["--backend", "http://a", "--port", "-1", "--workers", "2"],
        "--port = -1: is not a port",
    ),
    "a port of a server beyond all": (["--backend", "http://a:99999"], "use a port from 1 to 65535"),
    "port 0 of a server": (["--backend", "http://a:0"], "use a port from 1 to 65535"),
    "port of a service beyond all": (["--kubernetes", "b:99999"], "is not a service"),
    "port of a name beyond all": (["--dns", "http://a:99999"], "--dns = 'http://a:99999'"),
    "an endpoint": (["--backend", "http://a:1/v1/chat/completions"], "one endpoint of a server"),
    "a host name that cannot be": (["--backend", "http://a..b"], "has a host name that cannot be"),
    "a host that is none": (
        ["--backend", "http://a", "--host", "http://0.0.0.0"],
        "--host = 'http://0.0.0.0'",
    ),
    "a host that is none, several processes": (
        ["--backend", "http://a", "--host", "http://0.0.0.0", "--workers", "2"],
        "--host = 'http://0.0.0.0'",
    ),
    "an admin host that is none": (["--backend", "http://a", "--admin-host", "a b"], "--admin-host = 'a b'"),
    "a CA file that cannot be read": (
        ["--backend", "https://a", "--backend-ca", "nowhere"],
        "cannot be read",
    ),
    "a certificate that cannot be read": (["--backend", "http://a", "--tls-cert", "nowhere"], "--tls-cert"),
    "a key without a certificate": (["--backend", "http://a", "--tls-key", "nowhere"], "add --tls-cert"),
}


@pytest.mark.parametrize(("arguments", "problem"), BAD.values(), ids=BAD)
def test_bad_input_is_one_line(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *arguments]) == 2
    said = capsys.readouterr().err
    assert problem in said
    assert len(said.strip().splitlines()) == 1


@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
def test_no_admin_without_a_key_beyond_this_machine(
    host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "keys").write_text("sk-client\n")
    clients = ["--api-keys", str(tmp_path / "keys")]
    serve = ["serve", "--backend", "http://a", "--admin-host", host, "--admin-port", "0", "--port", "0"]
    for more in ([], clients):  # the keys of clients do not help
        assert main([*serve, *more]) == 2
        said = capsys.readouterr().err
        assert "--admin-host" in said and "without a key" in said and "--admin-keys FILE" in said
    monkeypatch.setenv("POINTSMAN_ADMIN_KEYS", "sk-client")
    assert main([*serve, *clients]) == 2
    said = capsys.readouterr().err
    assert "is the key of a client, too" in said and "sk-client" not in said


def test_an_admin_key_opens_the_door_beyond_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POINTSMAN_ADMIN_KEYS", "sk-admin")
    public, private, _ = Ports(admin_host="0.0.0.0").check()
    assert private.keys and not private.is_local and public.is_local and not public.keys
    assert Ports(host="localhost", admin_host="::1").check()[1].url(81) == "http://[::1]:81"


def test_a_certificate_is_for_all_that_strangers_reach_but_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POINTSMAN_ADMIN_KEYS", "sk-admin")
    ports = Ports(admin_host="0.0.0.0", tls_cert=new_authority(tmp_path).certificate("DNS:localhost"))
    public, private, _ = ports.check()
    assert public.tls is not None and private.tls is not None
    metrics, private, envoy = replace(ports, metrics_port=0).check()
    assert metrics.tls is None and private.tls is not None
    assert envoy is not None and envoy.tls is not None


def test_settings_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--settings", "--set", "limits.max_body_bytes=77"]) == 0
    listed = capsys.readouterr().out
    assert re.search(r"limits.max_body_bytes +77 ", listed)
    assert "reliability.breaker_failures" in listed


def test_the_router_does_not_load_what_it_does_not_need() -> None:
    """Neither at the start nor for a server that is known by model and device."""
    program = (
        "import sys, pointsman.cli.main, pointsman.cli.serve, pointsman.router.main\n"
        "from pointsman.simulator.calibration import known_figures\n"
        "known_figures({'model': 'Llama-3-8B', 'device': 'A100-80'})\n"
        "print([name for name in ('polars', 'torch', 'pandas') if name in sys.modules])"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"


@pytest.fixture
def quick_start(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is compiled, and garbage is collected as before."""
    books = FakeBooks()
    monkeypatch.setattr(router_main, "live_books", lambda *about: (books, lambda name: FakeDecider(books)))
    monkeypatch.setattr(router_main.gc, "freeze", lambda: None)
    threshold = router_main.gc.get_threshold()
    yield
    router_main.gc.set_threshold(*threshold)


def options_for(*backends: str, record: Path | None = None) -> Options:
    return Options(
        backends=backends,
        source=None,
        policy="least-outstanding",
        shadow=None,
        ports=Ports(port=0, admin_port=0),
        backend_key=None,
        backend_ca=None,
        record=record,
        logs_requests=True,
        settings=Settings(),
    )


@pytest.mark.usefixtures("quick_start")
@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # the process ends, and its sockets
@pytest.mark.parametrize(
    ("option", "others"),
    [("port", {}), ("port", {"metrics_port": 0}), ("metrics_port", {"port": 0}), ("admin_port", {"port": 0})],
)
def test_a_port_in_use_is_named(option: str, others: dict[str, int]) -> None:
    async def scenario() -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            number = taken.getsockname()[1]
            ports = Ports(**{"admin_port": 0} | others | {option: number})
            options = replace(options_for("http://127.0.0.1:1"), ports=ports)
            named = f"--{option.replace('_', '-')} = {number}: cannot listen"
            with pytest.raises(InputError, match=named):
                await serve_forever(options, lambda line: None, io.StringIO())

    asyncio.run(scenario())
    gc.collect()  # the ports that were opened before, where the filter above holds


@pytest.mark.usefixtures("quick_start")
def test_servers_that_do_not_answer_are_named_and_the_start_goes_on() -> None:
    said: list[str] = []

    async def scenario() -> None:
        async with mocks(ok, ok) as (good, strange):
            options = options_for(f"{good.url}/v1", "http://127.0.0.1:1", f"{strange.url}/elsewhere")
            log = io.StringIO()
            serving = asyncio.ensure_future(serve_forever(options, said.append, log))
            await until(lambda: len(said) == 5 or serving.done())
            assert said[2] == (
                f"warning: {good.url}/v1 is taken as {good.url}: the paths of requests bring their own /v1"
            )
            assert re.match(r"warning: http://127.0.0.1:1 does not answer \(.*refused.*\); it gets", said[3])
            assert re.match(rf"warning: {strange.url}/elsewhere lists no models", said[4])
            port = int(said[0].split("/v1")[0].rpartition(":")[2])
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            wire = Wire(reader, writer)
            await wire.send(post())
            assert (await wire.answer()).status == 200
            assert [heard.target for heard in good.heard] == [CHAT]
            os.kill(os.getpid(), signal.SIGTERM)
            await serving
            writer.close()
        unhealthy = [json.loads(line) for line in log.getvalue().splitlines() if "unhealthy" in line]
        assert [line["replica"] for line in unhealthy] == ["http://127.0.0.1:1"]
        assert "refused" in unhealthy[0]["problem"]

    run(scenario)


@pytest.mark.usefixtures("quick_start")
def test_from_the_first_request_to_sigterm(tmp_path: Path) -> None:
    said: list[str] = []

    async def scenario() -> None:
        async with mocks(gated) as (server,):
            options = options_for(server.url, record=tmp_path / "traffic.jsonl")
            serving = asyncio.ensure_future(serve_forever(options, said.append, io.StringIO()))
            await until(lambda: len(said) == 2 or serving.done())
            port = int(said[0].split("/v1")[0].rpartition(":")[2])
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            wire = Wire(reader, writer)
            await wire.send(post())
            await until(lambda: len(server.heard) == 1)
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.05)
            assert not serving.done()
            server.gate.set()
            assert (await wire.answer()).status == 200
            await serving
            writer.close()
        assert '"outcome":"completed"' in (tmp_path / "traffic.jsonl").read_text()

    run(scenario)
