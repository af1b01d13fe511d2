"""The endpoint picker, asked over gRPC as Envoy asks it; every mode of bodies."""

from __future__ import annotations

import asyncio
import io
import json
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

pytest.importorskip("grpc_health")
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pointsman.router.config import Backend, Settings
from pointsman.router.epp.endpoints import Endpoints
from pointsman.router.epp.picker import Picker
from pointsman.router.epp.wire import (
    BUFFERED,
    FULL_DUPLEX_STREAMED,
    NONE,
    SERVICE,
    STREAMED,
    ProcessingRequest,
    ProcessingResponse,
)
from pointsman.router.server import Parts, Router
from pointsman.router.store.address import parse_store
from pointsman.router.telemetry.metrics import Sharing
from pointsman.routing.signals import EXPECTED_HIT_TOKENS
from tests.router.fakes import HOLD
from tests.router.harness import CHAT, QUIET, Cluster, cluster, post, run, until
from tests.router.mock import gated, mocks, ok
from tests.routing.asking import decide

KEY = "x-gateway-destination-endpoint"
BODY = {"model": "m", "messages": [{"role": "user", "content": "hello there"}]}


class Envoy:
    """One request, step by step."""

    def __init__(self, call: Any, request_mode: int, response_mode: int) -> None:
        self._call = call
        self._modes = request_mode, response_mode

    async def ask(
        self,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
        subset: Sequence[str] | None = None,
    ) -> None:
        """Headers, and the body as the mode says; all of it, as far as it needs no answer in between."""
        message = ProcessingRequest()
        mode = self._modes[0]
        message.protocol_config.request_body_mode, message.protocol_config.response_body_mode = self._modes
        data = json.dumps(BODY).encode() if body is None else body
        about = {":method": "POST", ":path": CHAT, "content-length": str(len(data))} | (headers or {})
        _fill(message.request_headers, about)
        if subset is not None:
            entry = message.metadata_context.filter_metadata.add(key="envoy.lb.subset_hint")
            entry.value.update({f"{KEY}-subset": list(subset)})
        await self._call.write(message)
        if mode == BUFFERED:
            assert (await self.heard()).HasField("request_headers")
        if mode in (BUFFERED, FULL_DUPLEX_STREAMED):
            pieces = [data[:10], data[10:]] if mode == FULL_DUPLEX_STREAMED else [data]
            for k, piece in enumerate(pieces):
                part = ProcessingRequest()
                part.request_body.body = piece
                part.request_body.end_of_stream = k == len(pieces) - 1
                await self._call.write(part)

    async def heard(self) -> Any:
        response = await self._call.read()
        assert response is not grpc.aio.EOF, "the picker hung up"
        return response

    async def picked(self) -> str:
        """The endpoints, which stand in the header and in the metadata."""
        response = await self.heard()
        part = response.request_body if response.HasField("request_body") else response.request_headers
        (header,) = part.response.header_mutation.set_headers
        assert header.header.key == KEY
        assert header.append_action == 2
        value = header.header.raw_value.decode()
        assert response.dynamic_metadata["envoy.lb"][KEY] == value
        if self._modes[0] == FULL_DUPLEX_STREAMED:
            echoed = (await self.heard()).request_body.response.body_mutation.streamed_response
            assert echoed.end_of_stream
            json.loads(echoed.body)
        return value

    async def answer(
        self, status: int = 200, served: str | None = None, is_end: bool = False, sse: bool = False
    ) -> None:
        message = ProcessingRequest()
        kind = "text/event-stream" if sse else "application/json"
        _fill(message.response_headers, {":status": str(status), "content-type": kind})
        message.response_headers.end_of_stream = is_end
        if served is not None:
            entry = message.metadata_context.filter_metadata.add(key="envoy.lb")
            entry.value.update({f"{KEY}-served": served})
        await self._call.write(message)
        assert (await self.heard()).HasField("response_headers")

    async def body(self, data: bytes, is_end: bool = False) -> None:
        message = ProcessingRequest()
        message.response_body.body, message.response_body.end_of_stream = data, is_end
        await self._call.write(message)
        response = await self.heard()
        assert response.HasField("response_body")
        if self._modes[1] == FULL_DUPLEX_STREAMED:
            echoed = response.response_body.response.body_mutation.streamed_response
            assert (echoed.body, echoed.end_of_stream) == (data, is_end)

    async def hang_up(self) -> None:
        await self._call.done_writing()
        while await self._call.read() is not grpc.aio.EOF:
            pass

    def cancel(self) -> None:
        self._call.cancel()


def _fill(part: Any, headers: dict[str, str]) -> None:
    for name, value in headers.items():
        part.headers.headers.add(key=name, raw_value=value.encode())


class Gateway:
    def __init__(self, c: Cluster, channel: Any) -> None:
        self.cluster = c
        self.channel = channel
        self.endpoints = [mock.url.removeprefix("http://") for mock in c.mocks]

    def envoy(self, request_mode: int = FULL_DUPLEX_STREAMED, response_mode: int = STREAMED) -> Envoy:
        method = self.channel.stream_stream(
            f"/{SERVICE}/Process",
            request_serializer=ProcessingRequest.SerializeToString,
            response_deserializer=ProcessingResponse.FromString,
        )
        return Envoy(method(), request_mode, response_mode)

    async def health(self, service: str) -> int:
        stub = health_pb2_grpc.HealthStub(self.channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
        return int(answer.status)


@asynccontextmanager
async def gateway(count: int = 3, **options: Any) -> AsyncIterator[Gateway]:
    async with cluster(*[ok] * count, **options) as c:
        picker = Picker(c.router)
        port = await picker.start("127.0.0.1", 0)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            try:
                yield Gateway(c, channel)
            finally:
                picker.stop()
                await picker.close()


@pytest.mark.parametrize("request_mode", [NONE, STREAMED, BUFFERED, FULL_DUPLEX_STREAMED])
@pytest.mark.parametrize("response_mode", [NONE, STREAMED, BUFFERED, FULL_DUPLEX_STREAMED])
def test_a_request_is_picked_for_and_booked_in_every_mode(request_mode: int, response_mode: int) -> None:
    async def scenario() -> None:
        async with gateway() as g:
            books = g.cluster.books
            envoy = g.envoy(request_mode, response_mode)
            await envoy.ask()
            listed = (await envoy.picked()).split(",")
            assert sorted(listed) == sorted(g.endpoints)
            assert len(books.open) == 1
            (sent,) = books.of_kind("sent")
            assert listed[0] == g.endpoints[sent[1]]
            await envoy.answer(served=listed[0])
            if response_mode != NONE:
                usage = b'{"usage":{"prompt_tokens": 9, "completion_tokens": 5}}'
                await envoy.body(usage, is_end=True)
            await envoy.hang_up()
            await until(lambda: not books.open)
            (finished,) = books.of_kind("finished")
            assert finished[2:] == ((None, None) if response_mode == NONE else (9, 5))
            assert [line["outcome"] for line in g.cluster.logged() if line["event"] == "request"] == [
                "completed"
            ]

    run(scenario)


def test_tokens_of_a_stream_are_booked_as_they_pass() -> None:
    async def scenario() -> None:
        async with gateway() as g:
            books = g.cluster.books
            envoy = g.envoy()
            await envoy.ask(json.dumps(BODY | {"stream": True}).encode())
            await envoy.picked()
            assert books.of_kind("sent")[0][3] is True
            await envoy.answer(sse=True)
            await envoy.body(b'data: {"role"}\n\n')
            assert len(books.of_kind("first_token")) == 1
            await envoy.body(b"data: {1}\n\n")
            await envoy.body(b"data: {2}\n\ndata: {3}\n\n")
            (ticket,) = books.open
            assert books.num_tokens[ticket] == 3
            usage = b'data: {"usage":{"prompt_tokens":9,"completion_tokens":3}}\n\n'
            await envoy.body(usage + b"data: [DONE]\n\n", is_end=True)
            assert books.of_kind("finished")[0][2:] == (9, 3)

    run(scenario)


@pytest.mark.parametrize("request_id", ["r-17", "not an id"])
def test_picker_and_router_know_the_same_of_a_request(request_id: str) -> None:
    known = (
        "model",
        "priority",
        "session",
        "session_name",
        "generates",
        "prompt_tokens",
        "max_tokens",
        "links",
    )
    body = BODY | {"max_tokens": 7, "user": "somebody", "model": "m"}
    headers = {"x-pointsman-priority": "High", "x-request-id": request_id}

    async def scenario() -> None:
        async with gateway() as g:
            submitted: list[Any] = []
            submit = g.cluster.router.dispatcher.submit
            g.cluster.router.dispatcher.submit = lambda one: (submitted.append(one), submit(one))[1]  # type: ignore[method-assign]
            envoy = g.envoy()
            await envoy.ask(json.dumps(body).encode(), headers)
            await envoy.picked()
            await envoy.answer(is_end=True)
            lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
            assert (await g.cluster.ask(post(body, headers=lines))).status == 200
            picked, routed = submitted
            assert {name: getattr(picked, name) for name in known} == {
                name: getattr(routed, name) for name in known
            }
            assert (picked.priority, picked.max_tokens, picked.session_name) == (0, 7, "somebody")
            assert picked.links
            for one in submitted:
                assert (one.request_id == request_id) == (request_id == "r-17")
                assert " " not in one.request_id

    run(scenario)


def test_only_the_subset_is_picked_from() -> None:
    async def scenario() -> None:
        async with gateway() as g:
            for _ in range(5):
                envoy = g.envoy()
                await envoy.ask(subset=[g.endpoints[1]])
                assert await envoy.picked() == g.endpoints[1]
                await envoy.answer(is_end=True)
            for subset in ([], ["10.0.0.1:80"]):
                envoy = g.envoy()
                await envoy.ask(subset=subset)
                assert (await envoy.heard()).immediate_response.status.code == 503

    run(scenario)


def test_refusals_are_the_gateways_answer() -> None:
    async def scenario() -> None:
        async with gateway(holding={"max_held": 0}) as g:
            g.cluster.decider.rule = lambda excluded: HOLD
            for body, headers, status in (
                (None, None, 429),
                (b"nonsense", None, 400),
                (None, {"x-pointsman-priority": "urgent"}, 400),
            ):
                envoy = g.envoy()
                await envoy.ask(body, headers)
                said = (await envoy.heard()).immediate_response
                assert said.status.code == status
                assert "error" in json.loads(said.body)
            for replica in g.cluster.router.registry:
                g.cluster.router.registry.drain(replica.name, True)
            envoy = g.envoy()
            await envoy.ask()
            assert (await envoy.heard()).immediate_response.status.code == 503

    run(scenario)


def test_who_served_is_booked_and_who_failed_is_looked_at() -> None:
    async def scenario() -> None:
        async with gateway() as g:
            books, registry = g.cluster.books, g.cluster.router.registry
            envoy = g.envoy()
            await envoy.ask()
            first, second, *_ = (await envoy.picked()).split(",")
            dead = g.cluster.mocks[g.endpoints.index(first)]
            dead.is_healthy = False
            await envoy.answer(served=second)
            (slot,) = books.open.values()
            assert g.endpoints[slot] == second
            await envoy.body(b"{}", is_end=True)
            assert [kind for kind, *_ in books.events if kind != "scraped"] == [
                "sent",
                "failed",
                "sent",
                "finished",
            ]
            await until(lambda: len(registry.accepting) == 2)  # without waiting for the next health check
            for _ in range(6):
                envoy = g.envoy()
                await envoy.ask()
                assert first not in await envoy.picked()
                await envoy.answer(is_end=True)

    run(scenario)


def test_a_held_request_waits_and_goes_with_its_client() -> None:
    async def scenario() -> None:
        async with gateway() as g:
            dispatcher = g.cluster.router.dispatcher
            g.cluster.decider.rule = lambda excluded: HOLD
            envoy, gone = g.envoy(), g.envoy(BUFFERED)
            await envoy.ask()
            await gone.ask()
            for one in (envoy, gone):
                assert (await one.heard()).override_message_timeout.seconds > 30
            assert dispatcher.num_held == 2
            gone.cancel()
            await until(lambda: dispatcher.num_held == 1)
            g.cluster.decider.rule = None
            dispatcher.wake()
            assert (await envoy.picked()).split(",")[0] in g.endpoints
            await envoy.answer(is_end=True)

    run(scenario)


@pytest.mark.parametrize("has_answer", [False, True])
def test_a_client_that_goes_away_leaves_no_books_open(has_answer: bool) -> None:
    async def scenario() -> None:
        async with gateway() as g:
            envoy = g.envoy()
            await envoy.ask()
            await envoy.picked()
            if has_answer:
                await envoy.answer(sse=True)
                await envoy.body(b"data: {1}\n\n")
            envoy.cancel()
            await until(lambda: not g.cluster.books.open)
            assert g.cluster.books.of_kind("failed")
            assert not g.cluster.books.of_kind("finished")

    run(scenario)


def test_health_says_whether_there_is_anybody_to_pick() -> None:
    async def scenario() -> None:
        async with gateway() as g:
            for service in ("", "liveness", "readiness", SERVICE):
                assert await g.health(service) == health_pb2.HealthCheckResponse.SERVING
            for replica in g.cluster.router.registry:
                g.cluster.router.registry.drain(replica.name, True)
            await asyncio.sleep(0.05)
            not_serving = health_pb2.HealthCheckResponse.NOT_SERVING
            assert await g.health("liveness") == health_pb2.HealthCheckResponse.SERVING
            for service in ("readiness", SERVICE):
                assert await g.health(service) == not_serving

    run(scenario)


def test_long_bodies_come_back_in_pieces() -> None:
    async def scenario() -> None:
        async with gateway() as g:
            message = BODY | {"messages": [{"role": "user", "content": "x" * 200_000}]}
            data = json.dumps(message).encode()
            envoy = g.envoy()
            await envoy.ask(data)
            assert (await envoy.heard()).HasField("request_headers")
            got, is_end = b"", False
            while not is_end:
                piece = (await envoy.heard()).request_body.response.body_mutation.streamed_response
                assert len(piece.body) <= 65536
                got, is_end = got + piece.body, piece.end_of_stream
            assert got == data
            assert g.cluster.books.of_kind("sent")[0][2] > 50_000
            await envoy.answer(is_end=True)

    run(scenario)


@pytest.mark.parametrize("request_mode", [BUFFERED, FULL_DUPLEX_STREAMED])
def test_a_body_beyond_the_limit_is_refused_before_it_fills_the_memory(request_mode: int) -> None:
    async def scenario() -> None:
        async with gateway(limits={"max_body_bytes": 1000}) as g:
            envoy = g.envoy(request_mode)
            await envoy.ask(b"x" * 1001)  # the last piece of which could be a long time coming
            refused = (await envoy.heard()).immediate_response
            assert refused.status.code == 413
            await envoy.hang_up()
            assert g.cluster.books.of_kind("sent") == []

    run(scenario)


def test_a_replica_that_is_back_before_its_old_requests_have_ended_is_found() -> None:
    async def scenario() -> None:
        async with cluster(gated) as c, c.wire() as wire:
            endpoints = Endpoints(c.router.registry, c.router.log)
            (url,) = c.router.registry.names()
            await wire.send(post())
            await until(lambda: c.num_heard == [1])
            c.router.registry.remove(url)
            back = c.router.registry.add(Backend(url=url))
            c.mocks[0].gate.set()
            assert (await wire.answer()).status == 200
            assert list(c.router.registry) == [back]
            assert endpoints.find(endpoints.of(back)) is back

    run(scenario)


def test_a_name_is_resolved_when_it_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pointsman.router.epp.endpoints.RETRY_S", 0.05)

    async def scenario() -> None:
        async with cluster(ok) as c:
            loop, num_asked = asyncio.get_running_loop(), 0

            async def getaddrinfo(host: str, port: int, **kind: Any) -> Any:
                nonlocal num_asked
                num_asked += 1
                if num_asked < 3:
                    raise OSError("no such host")
                return [(2, 1, 6, "", ("10.0.0.7", port))]

            monkeypatch.setattr(loop, "getaddrinfo", getaddrinfo, raising=False)
            endpoints = Endpoints(c.router.registry, c.router.log)
            named = c.router.registry.add(Backend(url="http://vllm.internal:8000"))
            assert named not in c.router.registry.accepting
            await until(lambda: named in c.router.registry.accepting)
            assert endpoints.of(named) == "10.0.0.7:8000"
            assert num_asked == 3
            assert c.log.getvalue().count("replica without an address") == 1
            gone = c.router.registry.add(Backend(url="http://other.internal:8000"))
            c.router.registry.remove(gone.name)
            await asyncio.sleep(0.1)
            assert endpoints.find("10.0.0.7:8000") is named

    run(scenario)


@pytest.mark.skipif(shutil.which("redis-server") is None, reason="needs redis-server")
def test_a_prompt_that_another_router_sent_is_expected_where_it_went() -> None:
    pytest.importorskip("redis")
    from pointsman.router.main import live_books, store_link
    from tests.router.store.test_link import run_undisturbed, store

    settings = Settings.model_validate({"reliability": QUIET, "limits": {"drain_timeout_s": 1}})
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hello there " * 200}]})

    books, deciders = live_books(settings, None, True)  # compiled while no clock runs
    books.finished(books.sent(books.add("http://a"), 100, 0.0), 0.0)
    decide(deciders("cache-aware"), 100, 0.0)

    async def scenario(links: list[Sharing]) -> None:
        async with AsyncExitStack() as stack:
            s = await stack.enter_async_context(store())
            servers = await stack.enter_async_context(mocks(ok, ok))
            address = parse_store(f"redis://127.0.0.1:{s.port}/g")
            made = []
            for _ in range(2):
                books, deciders = live_books(settings, None, True)
                parts = Parts(books=books, deciders=deciders, log_to=io.StringIO(), policy="cache-aware")
                router = Router(parts, settings, [Backend(url=mock.url) for mock in servers])
                port = await router.start("127.0.0.1", 0)
                stack.push_async_callback(router.stop)
                link = store_link(address, router)
                link.start()
                stack.push_async_callback(link.stop)
                made.append((router, port))
                links.append(router.metrics.sharing)
            (serving, port), (picking, _) = made
            for router, _ in made:
                await until(lambda router=router: router.metrics.sharing.num_routers == 1, within_s=30)
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(post(body=body.encode()))
            await reader.readuntil(b"\r\n\r\n")
            writer.close()
            await until(lambda: not serving.proxy.active, within_s=30)
            (served,) = [k for k, mock in enumerate(servers) if mock.heard]
            picker = Picker(picking)
            stack.push_async_callback(picker.close)
            stack.callback(picker.stop)
            target = f"127.0.0.1:{await picker.start('127.0.0.1', 0)}"
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(target))
            c = Cluster(picking, None, None, servers, 0, io.StringIO())  # type: ignore[arg-type]
            assert picking.books.prefixes is not None
            known = picking.books.prefixes._tables["keys"]
            await until(lambda: bool(known.any()), within_s=30)
            envoy = Gateway(c, channel).envoy()
            await envoy.ask(body.encode())
            await envoy.picked()
            envoy.cancel()
            assert picking.books.signals[EXPECTED_HIT_TOKENS, served] > 400
            assert picking.books.signals[EXPECTED_HIT_TOKENS, 1 - served] == 0.0

    # What hears of the other router's prompts may have to be compiled in it.
    run_undisturbed(scenario, timeout_s=60)
