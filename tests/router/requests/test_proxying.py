"""The data path: what arrives is what was sent, in both directions."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.router import mock as replies
from tests.router.harness import CHAT, cluster, get, post, run, until
from tests.router.mock import Flood, Heard, Mock, ok, raw


@pytest.mark.parametrize(
    "path", [CHAT, "/v1/completions", "/v1/embeddings", "/v1/responses", "/tokenize", "/v1/rerank?x=1"]
)
def test_a_post_goes_through_unchanged(path: str) -> None:
    async def scenario() -> None:
        async with cluster(ok) as c:
            sent = {"model": "m", "messages": [], "prompt": "ü", "input": ["a", "b"], "extra": [1.5, None]}
            answered = await c.ask(post(sent, path, "x-custom: some value\r\n"))
            assert answered.status == 200
            assert answered.json["id"] == f"from-{c.mocks[0].port}"
            heard = c.mocks[0].heard[0]
            assert heard.target == path
            assert json.loads(heard.body) == sent
            assert heard.header("x-custom") == "some value"
            assert heard.header("host") == f"127.0.0.1:{c.mocks[0].port}"

    run(scenario)


def test_hop_by_hop_headers_stop_here_in_both_directions() -> None:
    reply = (
        b"HTTP/1.1 200 OK\r\nconnection: keep-alive, x-private\r\nx-private: 1\r\nkeep-alive: timeout=5\r\n"
        b"proxy-authenticate: Basic\r\nx-public: 2\r\ncontent-length: 2\r\n\r\nok"
    )
    headers = "connection: keep-alive, x-secret\r\nx-secret: 1\r\nte: trailers\r\nkeep-alive: 3\r\n"
    headers += "proxy-authorization: x\r\n"

    async def scenario() -> None:
        async with cluster(raw(reply, closes=False)) as c:
            answered = await c.ask(post(headers=headers))
            assert answered.headers["x-public"] == "2"
            for name in ("connection", "x-private", "keep-alive", "proxy-authenticate"):
                assert name not in answered.headers
            for name in ("connection", "x-secret", "te", "keep-alive", "proxy-authorization"):
                assert c.mocks[0].heard[0].header(name) is None

    run(scenario)


def test_connections_to_a_replica_are_reused() -> None:
    async def scenario() -> None:
        async with cluster(ok) as c:
            before = c.mocks[0].num_connections  # of the first health check
            async with c.wire() as wire:
                for _ in range(5):
                    await wire.send(post())
                    assert (await wire.answer()).status == 200
            assert c.mocks[0].num_connections == before + 1

    run(scenario)


def test_idle_connections_are_closed_before_the_server_would() -> None:
    async def scenario() -> None:
        async with cluster(ok, limits={"upstream_keep_alive_s": 0.05}) as c:
            await c.ask()
            pool = c.router.registry.find(c.mocks[0].url).pool
            assert pool.num_open == 1
            await until(lambda: pool.num_open == 0)

    run(scenario)


def test_a_stream_comes_piece_by_piece_and_complete() -> None:
    """Each event must be with the client before the server sends the next."""

    async def step_by_step(mock: Mock, request: Heard, writer: asyncio.StreamWriter) -> None:
        replies.begin_stream(writer)
        for i in range(3):
            one = replies.event({"content": f"t{i}"})
            writer.write(b"%x\r\n%b\r\n" % (len(one), one))
            await mock.gate.wait()
            mock.gate.clear()
        writer.write(b"0\r\n\r\n")

    async def scenario() -> None:
        async with cluster(step_by_step) as c, c.wire() as wire:
            await wire.send(post(stream=True))
            head = await wire.reader.readuntil(b"\r\n\r\n")
            assert b"transfer-encoding: chunked" in head
            for i in range(3):
                event = replies.event({"content": f"t{i}"})
                expected = b"%x\r\n%b\r\n" % (len(event), event)
                assert await wire.reader.readexactly(len(expected)) == expected
                c.mocks[0].gate.set()
            assert await wire.reader.readexactly(5) == b"0\r\n\r\n"

    run(scenario)


def test_sockets_on_both_sides_send_at_once() -> None:
    """Without TCP_NODELAY a token may wait 40 ms for an acknowledgement."""
    import socket

    async def scenario() -> None:
        async with cluster(replies.gated) as c, c.wire() as wire:
            await wire.send(post())
            await until(lambda: c.num_heard == [1])
            client = next(iter(c.router.proxy.clients))
            exchange = next(iter(c.router.proxy.active))
            assert exchange._connection is not None
            for transport in (client._transport, exchange._connection._transport):
                sock = transport.get_extra_info("socket")
                assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            c.mocks[0].gate.set()
            await wire.answer()

    run(scenario)


def test_a_slow_reader_slows_the_server_down() -> None:
    """Back-pressure: the router must not collect the answer in its memory."""
    flood = Flood(192)  # the kernel's buffers hold 32 MiB a socket at most

    async def scenario() -> None:
        async with cluster(flood) as c, c.wire() as wire:
            wire.writer.transport.pause_reading()  # type: ignore[attr-defined]
            await wire.send(post())
            await flood.until_it_stops()
            assert flood.sent < flood.size // 2
            wire.writer.transport.resume_reading()  # type: ignore[attr-defined]
            assert len((await wire.answer()).body) == flood.size

    run(scenario)


def test_a_client_that_never_reads_is_cut_off() -> None:
    async def scenario() -> None:
        async with cluster(Flood(64), limits={"idle_timeout_s": 0.2}) as c, c.wire() as wire:
            wire.writer.transport.pause_reading()  # type: ignore[attr-defined]
            await wire.send(post())
            await until(lambda: c.num_heard == [1])
            await until(lambda: not c.router.proxy.clients)
            assert c.router.metrics.cancelled == 1

    run(scenario)


@pytest.mark.parametrize("is_streaming", [False, True])
def test_a_client_that_hangs_up_cancels_the_work(is_streaming: bool) -> None:
    async def endless(mock: Mock, request: Heard, writer: asyncio.StreamWriter) -> None:
        if is_streaming:
            replies.begin_stream(writer)
        while True:
            if is_streaming:
                writer.write(b"5\r\ndata:\r\n")
            await asyncio.sleep(0.01)

    async def scenario() -> None:
        async with cluster(endless) as c:
            async with c.wire() as wire:
                await wire.send(post(stream=is_streaming))
                await until(lambda: c.num_heard == [1])
            await until(lambda: c.mocks[0].num_aborted == 1)
            assert c.books.of_kind("failed") == [("failed", 0)]
            assert not c.router.registry.find(c.mocks[0].url).num_outstanding

    run(scenario)


def test_head_204_and_304_have_no_body() -> None:
    async def scenario() -> None:
        async with (
            cluster(raw(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n", closes=False)) as c,
            c.wire() as wire,
        ):
            for _ in range(2):
                await wire.send(get("/version", method="HEAD"))
                answered = await wire.answer("HEAD")
                assert (answered.status, answered.headers["content-length"]) == (200, "5")
            for code in (204, 304):
                c.mocks[0].behaviour = raw(b"HTTP/1.1 %d Nothing\r\n\r\n" % code, closes=False)
                await wire.send(post())
                assert (await wire.answer()).status == code
            c.mocks[0].behaviour = ok
            await wire.send(post())
            assert (await wire.answer()).status == 200

    run(scenario)


def test_interim_responses_of_a_server_are_not_the_answer() -> None:
    interim = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n"
    reply = interim + b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"

    async def scenario() -> None:
        async with cluster(raw(reply, closes=False)) as c:
            answered = await c.ask()
            assert (answered.status, answered.body) == (200, b"ok")
            assert "link" not in answered.headers

    run(scenario)


def test_an_answer_that_ends_with_its_connection() -> None:
    async def scenario() -> None:
        async with cluster(raw(b"HTTP/1.1 200 OK\r\n\r\nuntil the end")) as c:
            answered = await c.ask()
            assert answered.headers["transfer-encoding"] == "chunked"
            assert (answered.body, answered.is_whole) == (b"until the end", True)

    run(scenario)


def test_trailers_of_an_answer_are_dropped() -> None:
    reply = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nx-trailer: 1\r\n\r\n"

    async def scenario() -> None:
        async with cluster(raw(reply, closes=False)) as c, c.wire() as wire:
            for _ in range(2):
                await wire.send(post())
                answered = await wire.answer()
                assert (answered.body, answered.is_whole) == (b"ok", True)

    run(scenario)


@pytest.mark.parametrize("asks_for_usage", [True, False])
def test_a_stream_is_counted_for_the_books(asks_for_usage: bool) -> None:
    async def scenario() -> None:
        async with cluster(ok) as c:
            body = {"model": "m", "messages": [{"role": "user", "content": "x" * 400}], "stream": True}
            if asks_for_usage:
                body["stream_options"] = {"include_usage": True}
            answered = await c.ask(post(body))
            assert answered.body.endswith(b"data: [DONE]\n\n")
            (_, slot, prompt_tokens, streams), *_ = c.books.of_kind("sent")
            assert (slot, streams) == (0, True)
            assert 100 <= prompt_tokens <= 110
            assert len(c.books.of_kind("first_token")) == 1
            # The chunk with the usage looks like a token until it is read, at the end.
            assert c.books.num_tokens[1] == replies.NUM_CHUNKS + asks_for_usage
            expected = (7, replies.NUM_CHUNKS) if asks_for_usage else (None, None)
            assert c.books.of_kind("finished") == [("finished", 0, *expected)]

    run(scenario)


def test_usage_of_a_plain_answer_reaches_the_books() -> None:
    async def scenario() -> None:
        async with cluster(ok) as c:
            await c.ask()
            assert c.books.of_kind("finished") == [("finished", 0, 7, replies.NUM_CHUNKS)]
            assert not c.books.of_kind("first_token")

    run(scenario)


def test_text_that_looks_like_usage_is_not() -> None:
    body = json.dumps(
        {"usage": {"prompt_tokens": 3, "completion_tokens": 4}, "text": '"usage": {"prompt_tokens": 99'}
    )

    async def reply(mock: Mock, request: Heard, writer: asyncio.StreamWriter) -> None:
        await replies.respond(writer, 200, body.encode())

    async def scenario() -> None:
        async with cluster(reply) as c:
            await c.ask()
            assert c.books.of_kind("finished") == [("finished", 0, 3, 4)]

    run(scenario)


def test_models_of_all_replicas_are_merged_and_requests_go_where_theirs_is() -> None:
    async def scenario() -> None:
        async with cluster(ok, ok) as c:
            c.mocks[0].models, c.mocks[1].models = ("a", "m"), ("b", "m")
            for replica in c.router.registry:
                await c.router.watch._read_models(replica)
            answered = await c.ask(get("/v1/models"))
            assert sorted(model["id"] for model in answered.json["data"]) == ["a", "b", "m"]
            for model in ("a", "b", "b", "b"):
                assert (await c.ask(post({"model": model, "messages": []}))).status == 200
            assert c.num_heard == [1, 3]
            unknown = await c.ask(post({"model": "c", "messages": []}))
            assert (unknown.status, unknown.json["error"]["code"]) == (404, "model_not_found")

    run(scenario)


@pytest.mark.parametrize(
    ("prompt", "count"),
    [([5, 6, 7] * 100, 300), ([[1, 2], [3]], 3), ("text of twenty bytes", 6), (["two", "texts"], None)],
)
def test_prompts_of_token_ids_are_counted_not_estimated(prompt: Any, count: int | None) -> None:
    """Whatever the correction of estimates says at the time."""

    async def scenario() -> None:
        async with cluster(ok) as c:
            c.books.prompt_length = lambda estimate: 2 * estimate  # type: ignore[method-assign]
            await c.ask(post({"model": "m", "prompt": prompt}, "/v1/completions"))
            ((_, _, prompt_tokens, _),) = c.books.of_kind("sent")
            is_text = not isinstance(prompt[0], int | list)
            assert count is None or prompt_tokens == (2 * count if is_text else count)

    run(scenario)
