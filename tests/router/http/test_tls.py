"""TLS to clients and to servers: that it is spoken, and that nobody is trusted who should not be."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from pointsman.errors import InputError
from pointsman.router.config import Backend
from pointsman.router.http.address import parse_url
from pointsman.router.http.fetching import FetchError, fetch
from pointsman.router.http.limits import Limits
from pointsman.router.http.tls import client_side_tls, server_side_tls
from pointsman.router.http.upstream import Pool
from pointsman.router.replicas.discovery import DnsSource, FileSource, KubernetesSource, ready_endpoints
from pointsman.spec import parse_spec
from tests.router.certificates import Authority, new_authority
from tests.router.harness import Wire, cluster, get, post, run, small_wire, until
from tests.router.mock import Behaviour, Flood, Mock, gated, ok, respond

LOCAL = ("DNS:localhost", "IP:127.0.0.1")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return new_authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def certificate(authority: Authority) -> Path:
    return authority.certificate(*LOCAL)


# --- clients ---


@asynccontextmanager
async def secure_wire(port: int, ca: Path) -> AsyncIterator[Wire]:
    trusting = ssl.create_default_context(cafile=ca)
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting, limit=1 << 26)
    try:
        yield Wire(reader, writer)
    finally:
        writer.close()


def test_clients_are_answered_over_tls(authority: Authority, certificate: Path) -> None:
    async def scenario() -> None:
        tls = client_side_tls(certificate, None)
        async with cluster(ok, limits={"max_body_bytes": 100_000}, tls=tls) as c:
            async with secure_wire(c.port, authority.ca) as wire:
                for _ in range(3):  # also by the head that is known
                    await wire.send(post())
                    assert (await wire.answer()).json["id"] == f"from-{c.mocks[0].port}"
                await wire.send(post(stream=True))
                assert (await wire.answer()).body.endswith(b"data: [DONE]\n\n")
                await wire.send(post(headers="connection: close\r\n"))
                assert (await wire.answer()).status == 200
                assert await wire.is_closed()
            async with secure_wire(c.port, authority.ca) as wire:  # the refusal of what is still being sent
                await wire.send(post(b"x" * 1_000_000))
                assert (await wire.answer()).status == 413
            async with c.wire() as wire:  # without TLS
                await wire.send(get("/health"))
                assert await wire.is_closed()

    run(scenario)


def test_a_client_that_leaves_is_noticed_over_tls(
    authority: Authority, certificate: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with cluster(gated, tls=client_side_tls(certificate, None)) as c:
            async with secure_wire(c.port, authority.ca) as wire:
                await wire.send(post())
                await until(lambda: len(c.mocks[0].heard) == 1)
            await until(lambda: c.mocks[0].num_aborted == 1)

    run(scenario)
    assert not caplog.records  # the loop warns of what TLS cannot do


def test_what_is_no_certificate_is_refused(authority: Authority, certificate: Path, tmp_path: Path) -> None:
    other = authority.certificate("DNS:other")
    locked = tmp_path / "locked.key"
    locked.write_text("-----BEGIN ENCRYPTED PRIVATE KEY-----\nAAAA\n-----END ENCRYPTED PRIVATE KEY-----\n")
    for cert, key, problem in (
        (tmp_path / "nowhere", None, "cannot be read"),
        (certificate, tmp_path / "nowhere", "cannot be read"),
        (authority.ca, None, "not a certificate with its key"),
        (certificate, other, "not a certificate with its key"),
        (certificate, locked, "not a certificate with its key"),
        (None, certificate, "without a certificate"),
    ):
        with pytest.raises(InputError, match=problem):
            client_side_tls(cert, key)
    with pytest.raises(InputError, match="cannot be read"):
        server_side_tls(tmp_path / "nowhere")
    (tmp_path / "empty").touch()
    with pytest.raises(InputError, match="holds no certificate"):
        server_side_tls(tmp_path / "empty")


# --- servers ---


@asynccontextmanager
async def secure_mock(certificate: Path, behaviour: Behaviour = ok) -> AsyncIterator[Mock]:
    mock = Mock(behaviour, metrics="vllm:num_requests_running 3\nvllm:num_requests_waiting 2\n")
    tls = client_side_tls(certificate, None)
    server = await asyncio.start_server(mock.serve, "127.0.0.1", 0, ssl=tls, limit=1 << 26)
    mock.port = server.sockets[0].getsockname()[1]
    try:
        yield mock
    finally:
        server.close()
        for writer in list(mock.writers):
            writer.transport.abort()
        await asyncio.sleep(0.01)


def test_servers_are_asked_checked_and_scraped_over_tls(authority: Authority, certificate: Path) -> None:
    async def scenario() -> None:
        quick = {"health_interval_s": 0.02, "scrape_interval_s": 0.02, "models_interval_s": 0.02}
        async with (
            secure_mock(certificate) as server,
            cluster(ok, reliability=quick, backend_ca=authority.ca) as c,
        ):
            replica = c.router.registry.add(Backend(url=f"https://localhost:{server.port}"))
            c.router.registry.remove(c.mocks[0].url)
            await until(lambda: replica.models is not None and bool(c.books.of_kind("scraped")))
            server.is_healthy = False
            await until(lambda: not replica.is_healthy)

    run(scenario)


def test_connections_to_servers_are_reused_over_tls(authority: Authority, certificate: Path) -> None:
    async def scenario() -> None:
        async with secure_mock(certificate) as server, cluster(ok, backend_ca=authority.ca) as c:
            c.router.registry.remove(c.mocks[0].url)
            added = c.router.registry.add(Backend(url=f"https://localhost:{server.port}"))
            await until(lambda: added.models is not None)
            num_before = server.num_connections
            for _ in range(3):
                assert (await c.ask()).json["id"] == f"from-{server.port}"
                assert (await c.ask(post(stream=True))).body.endswith(b"data: [DONE]\n\n")
            assert server.num_connections == num_before + 1

    run(scenario)


def test_a_slow_reader_slows_the_server_down_over_tls(authority: Authority, certificate: Path) -> None:
    flood = Flood(128)

    async def scenario() -> None:
        tls = client_side_tls(certificate, None)
        async with (
            secure_mock(certificate, flood) as server,
            cluster(ok, backend_ca=authority.ca, tls=tls) as c,
            secure_wire(c.port, authority.ca) as wire,
        ):
            c.router.registry.remove(c.mocks[0].url)
            c.router.registry.add(Backend(url=f"https://localhost:{server.port}"))
            wire.writer.transport.pause_reading()  # type: ignore[attr-defined]
            await wire.send(post())
            await flood.until_it_stops()
            (client,) = c.router.proxy.clients
            assert client._transport.get_write_buffer_size() < 16 << 20  # the rest is with the kernel
            assert flood.sent < flood.size
            wire.writer.transport.resume_reading()  # type: ignore[attr-defined]
            assert len((await wire.answer()).body) == flood.size

    run(scenario)


def test_a_client_that_takes_its_time_gets_all_of_the_last_answer_over_tls(
    authority: Authority, certificate: Path
) -> None:
    large = b"x" * 400_000

    async def answer(mock: Mock, request: Any, writer: asyncio.StreamWriter) -> None:
        await respond(writer, 200, large)

    async def scenario() -> None:
        trusting = ssl.create_default_context(cafile=authority.ca)
        async with (
            cluster(answer, tls=client_side_tls(certificate, None)) as c,
            small_wire(c, trusting) as wire,
        ):
            await wire.send(post(headers="connection: close\r\n"))
            await until(lambda: c.num_heard == [1])
            await asyncio.sleep(2.0)
            assert (await wire.answer()).body == large

    run(scenario)


@pytest.mark.parametrize("name", ["a..b", "x" * 64, ".", "\udc00", "a\0b"])
def test_a_name_that_no_certificate_can_have_is_refused(name: str) -> None:
    """Python's sockets raise something else than an OSError for it; its requests would never end."""
    with pytest.raises(InputError):
        parse_spec(Backend, {"url": "https://localhost", "tls_name": name})


def test_nobody_is_trusted_without_a_certificate_that_fits(authority: Authority, certificate: Path) -> None:
    async def asked(server: Mock, **tls: Any) -> str:
        pool = Pool(parse_url(f"https://127.0.0.1:{server.port}"), Limits(), **tls)
        try:
            return (await fetch(pool, "/health", 2.0)).body.decode()
        except FetchError as error:
            return str(error)

    async def scenario() -> None:
        elsewhere = authority.certificate("DNS:vllm.internal")
        async with secure_mock(certificate) as here, secure_mock(elsewhere) as there:
            assert "certificate verify failed" in await asked(here)
            assert await asked(here, ca=authority.ca) == "{}"
            assert "certificate verify failed" in await asked(there, ca=authority.ca)
            assert await asked(there, ca=authority.ca, tls_name="vllm.internal") == "{}"

    run(scenario)


def test_the_file_of_servers_names_their_authority(authority: Authority, tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_bytes(authority.ca.read_bytes())
    file = tmp_path / "servers.yaml"
    file.write_text("backends: [{url: 'https://a', ca: ca.pem, tls_name: b}, 'http://c']\n")
    assert FileSource(file).read() == [
        Backend(url="https://a", ca=tmp_path / "ca.pem", tls_name="b"),
        Backend(url="http://c"),
    ]
    file.write_text("backends: [{url: 'https://a', ca: nowhere.pem}]\n")
    with pytest.raises(InputError, match="cannot be read"):
        FileSource(file)


def test_an_address_from_dns_has_the_certificate_of_the_name() -> None:
    async def scenario() -> None:
        (found, *_) = await DnsSource("https://localhost:8000").backends()
        assert found.tls_name == "localhost" and socket.gethostbyname("localhost") in found.url

    run(scenario)


def test_kubernetes_is_asked_over_tls_and_says_which_ports_are_https(
    authority: Authority, certificate: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("the-token")
    (tmp_path / "ca.crt").write_bytes(authority.ca.read_bytes())
    ports = [{"port": 8000}, {"port": 8443, "appProtocol": "https"}]
    slices = {"items": [{"ports": ports, "endpoints": [{"addresses": ["10.0.0.1"]}]}]}

    async def answer(mock: Mock, request: Any, writer: asyncio.StreamWriter) -> None:
        await respond(writer, 200, json.dumps(slices).encode())

    async def scenario() -> None:
        async with secure_mock(certificate, answer) as api:
            monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
            monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(api.port))
            (found,) = await KubernetesSource("llm/vllm:8443", tmp_path).backends()
            assert found == Backend(url="https://10.0.0.1:8443", tls_name="vllm.llm.svc")

    run(scenario)
    assert ready_endpoints(slices, None) == [Backend(url="http://10.0.0.1:8000")]
