"""Where replicas come from: a file, DNS, Kubernetes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from pointsman.errors import InputError
from pointsman.router.config import Backend
from pointsman.router.http.address import parse_url
from pointsman.router.replicas.discovery import (
    Discovery,
    DnsSource,
    FileSource,
    KubernetesSource,
    SourceError,
    ready_endpoints,
)
from tests.router.harness import cluster, run, until
from tests.router.mock import mocks, ok, respond


def test_a_file_is_followed_as_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "backends.yaml"

    def write(*urls: str) -> None:
        path.write_text("backends:\n" + "".join(f"- {url}\n" for url in urls))

    async def scenario() -> None:
        async with cluster(ok) as c, mocks(ok, ok) as (second, third):
            write(second.url)
            discovery = Discovery(FileSource(path), c.router.registry, c.router.log, 0.02)
            following = asyncio.ensure_future(discovery.run())
            await until(lambda: c.router.registry.names() == {c.mocks[0].url, second.url})
            write(third.url)
            await until(lambda: c.router.registry.names() == {c.mocks[0].url, third.url})
            path.write_text("backends: [")
            await until(lambda: any(line["event"] == "discovery failed" for line in c.logged()))
            await asyncio.sleep(0.1)
            assert c.router.registry.names() == {c.mocks[0].url, third.url}
            assert len([line for line in c.logged() if line["event"] == "discovery failed"]) == 1
            path.write_text(f"backends:\n- url: {third.url}\n  calibration: {{kv_capacity_tokens: 5000}}\n")
            await until(lambda: any(r.backend.calibration for r in c.router.registry))
            following.cancel()

    run(scenario)


def test_a_backend_that_makes_no_sense_does_not_end_the_looking(tmp_path: Path) -> None:
    path = tmp_path / "backends.yaml"

    async def scenario() -> None:
        async with cluster(ok) as c, mocks(ok, ok) as (second, third):
            path.write_text(f"backends:\n- {second.url}\n")
            discovery = Discovery(FileSource(path), c.router.registry, c.router.log, 0.02)
            following = asyncio.ensure_future(discovery.run())
            await until(lambda: second.url in c.router.registry.names())
            path.write_text(f"backends:\n- url: {third.url}\n  calibration: {{nonsense: 1}}\n")
            await until(lambda: any(line["event"] == "discovery failed" for line in c.logged()))
            assert second.url in c.router.registry.names()  # all is as it was
            path.write_text(f"backends:\n- {third.url}\n")
            await until(lambda: c.router.registry.names() == {c.mocks[0].url, third.url})
            following.cancel()

    run(scenario)


@pytest.mark.parametrize(
    ("url", "taken_as"),
    [
        ("http://a:8100/v1", "http://a:8100"),
        ("http://a:8100/v1/", "http://a:8100"),
        ("https://a/llm/v1", "https://a:443/llm"),
        ("http://v1", "http://v1:80"),
        ("http://a/v12/", "http://a:80/v12"),
    ],
)
def test_the_v1_that_clients_write_is_no_part_of_a_server(url: str, taken_as: str, tmp_path: Path) -> None:
    address = parse_url(url)
    assert f"{address.scheme}://{address.netloc}{address.prefix}" == taken_as
    (tmp_path / "b.yaml").write_text(f"backends: [{url}, {{url: '{url}'}}]")
    first, second = FileSource(tmp_path / "b.yaml").read()
    assert first == second and parse_url(first.url) == address


@pytest.mark.parametrize("text", ["backend: []", "backends: [ftp://x]", "backends: [{uri: http://x}]", "- x"])
def test_a_bad_file_is_refused_at_the_start(tmp_path: Path, text: str) -> None:
    (tmp_path / "b.yaml").write_text(text)
    with pytest.raises(InputError):
        FileSource(tmp_path / "b.yaml")


def test_dns_gives_all_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        answers: list[str] = ["10.0.0.2", "10.0.0.1", "10.0.0.1"]

        class Resolver:
            async def getaddrinfo(self, host: str, port: int, **kind: Any) -> Any:
                if not answers:
                    raise OSError("no such host")
                return [(2, 1, 6, "", (address, port)) for address in answers]

        monkeypatch.setattr(asyncio, "get_running_loop", Resolver)
        source = DnsSource("http://vllm.internal:8000/prefix")
        found = await source.backends()
        assert [backend.url for backend in found] == [
            "http://10.0.0.1:8000/prefix",
            "http://10.0.0.2:8000/prefix",
        ]
        answers.clear()
        with pytest.raises(SourceError):
            await source.backends()
        monkeypatch.setattr(asyncio, "get_running_loop", lambda: loop)

    run(scenario)


def slices(*endpoints: tuple[str, bool | None], port: int = 8000) -> dict[str, Any]:
    return {
        "items": [
            {
                "ports": [{"name": "http", "port": port}],
                "endpoints": [
                    {"addresses": [host], "conditions": {"ready": ready} if ready is not None else {}}
                    for host, ready in endpoints
                ],
            }
        ]
    }


def test_ready_endpoints_of_kubernetes() -> None:
    found = slices(("10.0.0.1", True), ("10.0.0.2", False), ("10.0.0.3", None), ("fd00::1", True))
    urls = [backend.url for backend in ready_endpoints(found, None)]
    assert urls == ["http://10.0.0.1:8000", "http://10.0.0.3:8000", "http://[fd00::1]:8000"]
    assert ready_endpoints(slices(("10.0.0.1", True)), 9000) == [Backend(url="http://10.0.0.1:9000")]
    assert ready_endpoints({"items": [{"ports": None, "endpoints": None}]}, None) == []


def test_endpoints_of_kubernetes_are_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text("the-token\n")
    (tmp_path / "namespace").write_text("llm")

    async def scenario() -> None:
        async with cluster(ok) as c, mocks(ok) as (api,):
            target = c.mocks[0]
            answer, code = slices(("127.0.0.1", True), port=target.port), 200

            async def behave(mock: Any, request: Any, writer: Any) -> None:
                await respond(writer, code, json.dumps(answer).encode())

            api.behaviour = behave
            monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
            monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(api.port))
            monkeypatch.setenv("KUBERNETES_SERVICE_SCHEME", "http")
            source = KubernetesSource("vllm", tmp_path)
            assert [backend.url for backend in await source.backends()] == [target.url]
            heard = api.heard[0]
            assert heard.header("authorization") == "Bearer the-token"
            assert heard.path == "/apis/discovery.k8s.io/v1/namespaces/llm/endpointslices"
            assert heard.target.endswith("labelSelector=kubernetes.io%2Fservice-name%3Dvllm")
            discovery = Discovery(source, c.router.registry, c.router.log, 0.02)
            following = asyncio.ensure_future(discovery.run())
            answer = slices(("127.0.0.1", True), ("127.0.0.2", True), port=target.port)
            await until(lambda: len(c.router.registry) == 2)
            code = 403
            await until(lambda: any("403" in str(line.get("problem")) for line in c.logged()))
            assert len(c.router.registry) == 2
            code, answer = 200, {"items": [{"ports": [{"port": 1}], "endpoints": [None]}]}
            await until(lambda: any("unexpected" in str(line.get("problem")) for line in c.logged()))
            assert len(c.router.registry) == 2
            answer = slices(("127.0.0.1", True), port=target.port)
            await until(lambda: len(c.router.registry) == 1)
            following.cancel()

    run(scenario)


def test_kubernetes_needs_a_pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(InputError, match="not inside a cluster"):
        KubernetesSource("ns/vllm", tmp_path)
    with pytest.raises(InputError, match="namespace/service:port"):
        KubernetesSource("ns/vllm:http", tmp_path)
