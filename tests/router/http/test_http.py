"""HTTP/1.1 as it should be, towards clients; and what is refused, with which status."""

from __future__ import annotations

import asyncio
import json
import re
import tracemalloc
from contextlib import AsyncExitStack

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.router import mock as replies
from tests.router.harness import CHAT, Cluster, Wire, cluster, get, post, run, small_wire, until
from tests.router.mock import Heard, Mock, gated, hang, ok, respond

HEAD = f"POST {CHAT} HTTP/1.1\r\nhost: router\r\ncontent-type: application/json\r\n".encode()
BODY = b'{"model": "m", "messages": []}'


def chunked(body: bytes, size: int = 7) -> bytes:
    parts = [body[i : i + size] for i in range(0, len(body), size)]
    return (
        b"".join(b"%x;note=1\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\nx-trailer: 1\r\n\r\n"
    )


def test_a_chunked_upload_arrives_with_its_length() -> None:
    async def scenario() -> None:
        async with cluster(ok) as c:
            answered = await c.ask(HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunked(BODY))
            assert answered.status == 200
            heard = c.mocks[0].heard[0]
            assert heard.body == BODY
            assert heard.header("content-length") == str(len(BODY))
            assert heard.header("x-trailer") is None

    run(scenario)


def test_a_body_in_tiny_chunks_takes_no_more_memory_than_it_has_bytes() -> None:
    """As an object for each chunk, 16 MiB of body would be 350 MB."""
    num_chunks = 200_000

    async def scenario() -> None:
        async with cluster(ok) as c, c.wire() as wire:
            head = HEAD + b"transfer-encoding: chunked\r\n\r\n"
            body = b"  " * num_chunks + BODY
            chunks = b"2\r\n  \r\n" * num_chunks + b"%x\r\n%b\r\n" % (len(BODY), BODY)
            await wire.send(head)
            await until(lambda: bool(c.router.proxy.clients))
            (client,) = c.router.proxy.clients
            tracemalloc.start()
            try:
                await wire.send(chunks)
                await until(lambda: len(client._body) == len(body))
                in_use, _ = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            assert in_use < 5 * len(body)
            await wire.send(b"0\r\n\r\n")
            assert (await wire.answer()).status == 200
            assert sum((heard.body == body) for mock in c.mocks for heard in mock.heard) == 1

    run(scenario, 60.0)


def test_a_request_may_come_byte_by_byte() -> None:
    async def scenario() -> None:
        async with cluster(ok) as c, c.wire() as wire:
            for byte in post({"model": "m", "messages": []}):
                await wire.send(bytes([byte]))
                await asyncio.sleep(0)
            assert (await wire.answer()).status == 200

    run(scenario)


def test_expect_continue_asks_for_the_body_first() -> None:
    head = HEAD + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(BODY)

    async def scenario() -> None:
        async with cluster(ok) as c, c.wire() as wire:
            for _ in range(2):
                await wire.send(head)
                assert (await wire.answer()).status == 100
                await wire.send(BODY)
                assert (await wire.answer()).status == 200
            assert c.mocks[0].heard[0].header("expect") is None

    run(scenario)


def test_expect_continue_of_a_body_that_is_too_large_gets_no_continue() -> None:
    async def scenario() -> None:
        async with cluster(ok, limits={"max_body_bytes": 10}) as c, c.wire() as wire:
            await wire.send(HEAD + b"expect: 100-continue\r\ncontent-length: 11\r\n\r\n")
            assert (await wire.answer()).status == 413
            assert await wire.is_closed()

    run(scenario)


def test_another_expectation_is_refused() -> None:
    async def scenario() -> None:
        async with cluster(ok) as c:
            assert (await c.ask(HEAD + b"expect: wonders\r\ncontent-length: 0\r\n\r\n")).status == 417

    run(scenario)


def test_expect_continue_waits_for_its_turn() -> None:
    """The interim response must not come before the answer to the request in front."""

    async def scenario() -> None:
        async with cluster(gated) as c, c.wire() as wire:
            await wire.send(post() + HEAD + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(BODY))
            await until(lambda: c.num_heard == [1])
            c.mocks[0].gate.set()
            assert (await wire.answer()).status == 200
            assert (await wire.answer()).status == 100
            await wire.send(BODY)
            assert (await wire.answer()).status == 200

    run(scenario)


def test_pipelined_requests_are_answered_in_order() -> None:
    async def slower_first(mock: Mock, request: Heard, writer: asyncio.StreamWriter) -> None:
        number = json.loads(request.body)["n"]
        await asyncio.sleep(0.03 * (3 - number))
        await replies.respond(writer, 200, b"%d" % number)

    async def scenario() -> None:
        async with cluster(slower_first, slower_first) as c, c.wire() as wire:
            await wire.send(b"".join(post({"n": n, "messages": []}) for n in range(4)) + get("/health"))
            for n in range(4):
                assert (await wire.answer()).body == b"%d" % n
            assert (await wire.answer()).json["status"] == "ok"

    run(scenario)


def test_thousands_of_pipelined_requests_do_no_harm() -> None:
    async def scenario() -> None:
        async with cluster(ok) as c, c.wire() as wire:
            await wire.send(post() + get("/health") * 3000)
            assert (await wire.answer()).status == 200
            for _ in range(3000):
                assert (await wire.answer()).status == 200

    run(scenario)


def test_a_refusal_waits_for_its_turn_too() -> None:
    async def scenario() -> None:
        async with cluster(gated) as c, c.wire() as wire:
            await wire.send(post() + b"NONSENSE\r\n\r\n")
            await until(lambda: c.num_heard == [1])
            c.mocks[0].gate.set()
            assert (await wire.answer()).status == 200
            assert (await wire.answer()).status == 400
            assert await wire.is_closed()

    run(scenario)


def test_a_half_closed_client_gets_its_answer() -> None:
    async def scenario() -> None:
        async with cluster(gated) as c, c.wire() as wire:
            await wire.send(post() + post())
            wire.writer.write_eof()
            await asyncio.sleep(0.6)  # longer than the router looks for signs of life
            c.mocks[0].gate.set()
            answers = []
            while len(answers) < 2:
                if (answered := await wire.answer()).status != 100:
                    answers.append(answered.status)
            assert answers == [200, 200]
            assert await wire.is_closed()

    run(scenario)


@pytest.mark.parametrize("is_aborted", [False, True], ids=["closes", "aborts"])
def test_a_client_that_leaves_with_a_second_request_asked_is_noticed(is_aborted: bool) -> None:
    async def scenario() -> None:
        async with cluster(hang) as c:
            async with c.wire() as wire:
                await wire.send(post() + post())
                await until(lambda: c.num_heard == [1])
                if is_aborted:
                    wire.writer.transport.abort()
            await until(lambda: c.mocks[0].num_aborted == 1)
            await until(lambda: not c.router.proxy.active)
            assert c.num_heard == [1]

    run(scenario)


def test_an_http_10_client_gets_no_chunks() -> None:
    async def scenario() -> None:
        async with cluster(ok) as c, c.wire() as wire:
            await wire.send(post(stream=True, version="1.0"))
            answered = await wire.answer()
            assert "transfer-encoding" not in answered.headers
            assert answered.headers["connection"] == "close"
            assert answered.body.endswith(b"data: [DONE]\n\n")

    run(scenario)


def test_an_http_10_client_may_stay() -> None:
    async def scenario() -> None:
        async with cluster(ok) as c, c.wire() as wire:
            for _ in range(2):
                await wire.send(post(version="1.0", headers="connection: keep-alive\r\n"))
                answered = await wire.answer()
                assert (answered.status, answered.headers["connection"]) == (200, "keep-alive")
            await wire.send(post(version="1.0"))
            assert (await wire.answer()).headers["connection"] == "close"
            assert await wire.is_closed()

    run(scenario)


def test_connection_close_is_heeded() -> None:
    async def scenario() -> None:
        async with cluster(ok) as c, c.wire() as wire:
            await wire.send(post(headers="connection: close\r\n") + post())
            assert (await wire.answer()).headers["connection"] == "close"
            assert await wire.is_closed()
            assert c.num_heard == [1]

    run(scenario)


# Of HTTP/2, as some clients make it with their first request.
OFFER = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
SMUGGLED = b"GET /smuggled HTTP/1.1\r\nhost: x\r\n\r\n"
AMBIGUOUS = {
    "length and chunks": b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunks and length": b"transfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n0\r\n\r\n",
    "two lengths": b"content-length: 5\r\ncontent-length: 6\r\n\r\nhello",
    "two equal lengths": b"content-length: 5\r\ncontent-length: 5\r\n\r\nhello",
    "list of lengths": b"content-length: 5, 5\r\n\r\nhello",
    "negative length": b"content-length: -5\r\n\r\nhello",
    "signed length": b"content-length: +5\r\n\r\nhello",
    "hexadecimal length": b"content-length: 0x5\r\n\r\nhello",
    "length too long to be true": b"content-length: 99999999999999999999999\r\n\r\nhello",
    "chunked twice": b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunked and something": b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "not chunked": b"transfer-encoding: identity\r\n\r\n",
    "xchunked": b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
    "space before the colon": b"content-length : 5\r\n\r\nhello",
    "folded header": b"x-a: 1\r\n content-length: 5\r\n\r\nhello",
    "bare line feed": b"content-length: 5\n\nhello",
    "bare carriage return": b"x-a: 1\rcontent-length: 5\r\n\r\nhello",
    "null in a header": b"x-a: \0\r\ncontent-length: 5\r\n\r\nhello",
    "bad chunk size": b"transfer-encoding: chunked\r\n\r\n5g\r\nhello\r\n0\r\n\r\n",
    "negative chunk size": b"transfer-encoding: chunked\r\n\r\n-5\r\nhello\r\n0\r\n\r\n",
    "chunk without its end": b"transfer-encoding: chunked\r\n\r\n5\r\nhelloX\r\n0\r\n\r\n",
}


@pytest.mark.parametrize("rest", AMBIGUOUS.values(), ids=AMBIGUOUS)
@pytest.mark.parametrize("offer", ["", OFFER], ids=["alone", "with an offer"])
def test_nobody_smuggles_a_request(rest: bytes, offer: str) -> None:
    async def scenario() -> None:
        async with cluster(ok) as c, c.wire() as wire:
            await wire.send(HEAD + offer.encode() + rest + SMUGGLED)
            assert (await wire.answer()).status in (400, 413, 501)
            assert await wire.is_closed()
            assert c.num_heard == [0]

    run(scenario)


REFUSED = {
    "chunks in HTTP/1.0": (
        b"POST /x HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        400,
    ),
    "no host": (b"GET /x HTTP/1.1\r\n\r\n", 400),
    "two hosts": (b"GET /x HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n", 400),
    "two keys": (get("/x", "authorization: a\r\nauthorization: b\r\n"), 400),
    "nonsense": (b"\x16\x03\x01\x02\x00\x01\x00", 400),
    "unknown method": (b"BREW /pot HTTP/1.1\r\nhost: x\r\n\r\n", 400),
    "another version": (b"GET /x HTTP/2.0\r\nhost: x\r\n\r\n", 505),
    "absolute target": (b"GET http://elsewhere/ HTTP/1.1\r\nhost: x\r\n\r\n", 400),
    "connect": (b"CONNECT elsewhere:443 HTTP/1.1\r\nhost: x\r\n\r\n", 400),
    "upgrade": (get("/x", "connection: upgrade\r\nupgrade: websocket\r\n"), 400),
    "long target": (get("/" + "x" * 9000), 414),
    "large header": (get("/x", f"x-a: {'x' * 40_000}\r\n"), 431),
    "header without end": (b"GET /x HTTP/1.1\r\nx-a: " + b"x" * 400_000, 431),
    "many headers": (get("/x", "x-a: 1\r\n" * 200), 431),
    "large body": (post(b"x" * 2000), 413),
    "large chunked body": (HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunked(b"x" * 2000, 500), 413),
    "not JSON": (post(b"{"), 400),
    "not UTF-8": (post(b'{"model": "\xff"}'), 400),
    "not an object": (post([1]), 400),
    "empty body": (post(b""), 400),
    "deeply nested": (post(b"[" * 900 + b"]" * 900), 400),
    "model of a wrong type": (post({"model": 5, "messages": []}), 400),
    "stream of a wrong type": (post({"model": "m", "messages": [], "stream": "yes"}), 400),
    "messages of a wrong type": (post({"model": "m", "messages": "hi"}), 400),
    "no messages": (post({"model": "m"}), 400),
    "no prompt": (post({"model": "m"}, "/v1/completions"), 400),
    "lone surrogate": (post(b'{"model": "m", "messages": [{"content": "\\ud800"}]}'), 400),
    "unknown model": (post({"model": "no-such", "messages": []}), 404),
    "unknown priority": (post(headers="x-pointsman-priority: urgent\r\n"), 400),
    "writing to what can only be read": (post({}, "/health"), 405),
}


@pytest.mark.parametrize(("request_bytes", "code"), REFUSED.values(), ids=REFUSED)
def test_bad_requests_get_the_right_status_and_cost_nothing(request_bytes: bytes, code: int) -> None:
    async def scenario() -> None:
        async with cluster(ok, limits={"max_body_bytes": 1900}) as c:
            answered = await c.ask(request_bytes)
            assert answered.status == code
            assert answered.json["error"]["message"]
            assert c.num_heard == [0]
            assert (await c.ask()).status == 200

    run(scenario)


def test_a_refused_upload_still_gets_to_read_its_refusal() -> None:
    """Closing at once would reset the connection under a client that is still sending."""

    async def scenario() -> None:
        async with cluster(ok, limits={"max_body_bytes": 1000}) as c, c.wire() as wire:
            await wire.send(HEAD + b"content-length: 3000000\r\n\r\n" + b"x" * 1_000_000)
            await asyncio.sleep(0.05)
            await wire.send(b"x" * 1_000_000)
            await asyncio.sleep(0.05)
            assert (await wire.answer()).status == 413

    run(scenario)


@pytest.mark.parametrize("begun", [b"GET /x HT", HEAD, HEAD + b"content-length: 9\r\n\r\nabc"])
def test_a_request_that_never_ends_is_given_up(begun: bytes) -> None:
    async def scenario() -> None:
        async with cluster(ok, limits={"request_timeout_s": 0.15}) as c, c.wire() as wire:
            await wire.send(begun)
            assert (await wire.answer()).status == 408
            assert await wire.is_closed()

    run(scenario)


def test_an_idle_client_is_closed() -> None:
    async def scenario() -> None:
        async with cluster(ok, limits={"keep_alive_s": 0.1}) as c, c.wire() as wire:
            await wire.send(post())
            assert (await wire.answer()).status == 200
            assert await wire.is_closed()

    run(scenario)


LARGE = b"x" * 60_000  # the router takes all of it, the sockets do not


async def large(mock: Mock, request: Heard, writer: asyncio.StreamWriter) -> None:
    await respond(writer, 200, LARGE)


def test_a_client_that_asks_and_does_not_read_gets_no_more_answers() -> None:
    """Else it could fill the memory of the router, without a key."""

    async def scenario() -> None:
        async with cluster(ok) as c, small_wire(c) as wire:
            num_answers = 3000
            await wire.send(get("/metrics") * num_answers)
            (client,) = c.router.proxy.clients
            await asyncio.sleep(0.2)
            assert client._transport.get_write_buffer_size() < 200_000
            for _ in range(num_answers):
                assert (await wire.answer()).status == 200
            await wire.send(get("/health"))  # and all is as before
            assert (await wire.answer()).status == 200

    run(scenario, 60.0)


@pytest.mark.parametrize("headers", ["", "connection: close\r\n"])
def test_a_client_that_takes_its_time_gets_all_of_the_last_answer(headers: str) -> None:
    async def scenario() -> None:
        async with cluster(large, limits={"keep_alive_s": 0.5}) as c, small_wire(c) as wire:
            await wire.send(post(headers=headers))
            await until(lambda: c.num_heard == [1])
            await asyncio.sleep(1.5)
            assert (await wire.answer()).body == LARGE
            assert await wire.is_closed()

    run(scenario)


@pytest.mark.parametrize("headers", ["", "connection: close\r\n"])
@pytest.mark.parametrize("is_half_closed", [False, True])
def test_a_client_that_never_reads_its_answer_is_cut_off(headers: str, is_half_closed: bool) -> None:
    async def scenario() -> None:
        limits = {"idle_timeout_s": 0.2, "keep_alive_s": 0.2}
        async with cluster(large, limits=limits) as c, small_wire(c) as wire:
            await wire.send(post(headers=headers))
            if is_half_closed:
                wire.writer.write_eof()
            await until(lambda: c.num_heard == [1])
            await until(lambda: not c.router.proxy.clients)

    run(scenario)


@pytest.mark.parametrize("step", [1, 7, 150, 10_000], ids="{} bytes at once".format)
def test_an_offer_of_http_2_is_ignored_and_the_body_is_read(step: int) -> None:
    """What Java's client and `curl --http2` send first. Each request has its own body, and no other's."""
    bodies = [{"model": "m", "messages": [{"role": "user", "content": text}]} for text in ("one", "two")]
    chunked_head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\n{OFFER}transfer-encoding: chunked\r\n\r\n".encode()
    sent = [
        get("/health", OFFER),
        post(bodies[0], headers=OFFER),
        chunked_head + chunked(json.dumps(bodies[1]).encode(), 9),
        get("/v1/models", OFFER),
        post(bodies[0]),
    ]

    async def scenario() -> None:
        async with cluster(ok) as c, c.wire() as wire:
            for _ in range(2):
                data = b"".join(sent)
                for start in range(0, len(data), step):
                    await wire.send(data[start : start + step])
                    await asyncio.sleep(0)
                assert [(await wire.answer()).status for _ in sent] == [200] * len(sent)
            heard = c.mocks[0].heard
            assert [json.loads(one.body) for one in heard] == [bodies[0], bodies[1], bodies[0]] * 2
            names = {name.lower() for one in heard for name, _ in one.headers}
            assert not names & {"upgrade", "http2-settings", "connection"}

    run(scenario)


def test_an_offer_of_http_2_hides_nothing() -> None:
    async def scenario() -> None:
        async with cluster(ok) as c:
            for headers, code in (
                (OFFER + "content-length: 3\r\n", 400),  # a second length
                (OFFER + "host: b\r\n", 400),
                (OFFER + "upgrade: websocket\r\n", 400),
                (OFFER + f"x-a: {'x' * 40_000}\r\n", 431),
            ):
                assert (await c.ask(post(headers=headers))).status == code
            async with c.wire() as wire:
                await wire.send(get("/health", OFFER.replace("Upgrade,", "Upgrade, close,")))
                assert (await wire.answer()).headers["connection"] == "close"
                assert await wire.is_closed()
            assert c.num_heard == [0]

    run(scenario)


# --- fuzzing ---

METHODS = st.sampled_from([b"GET", b"POST", b"HEAD", b"PUT", b"get", b"", b"P\0ST", b"PRI"])
TARGETS = st.one_of(st.sampled_from([b"/", CHAT.encode(), b"*", b"", b"//", b"/%00"]), st.binary(max_size=20))
NAMES = st.one_of(
    st.sampled_from([b"content-length", b"transfer-encoding", b"host", b"expect", b"connection", b"upgrade"]),
    st.binary(min_size=1, max_size=8),
)
VALUES = st.one_of(
    st.sampled_from(
        [
            b"0",
            b"3",
            b"-1",
            b"chunked",
            b"h2c",
            b"upgrade",
            b"100-continue",
            b"close",
            b"x",
            b"\xff",
            b"a\r\nb: c",
        ]
    ),
    st.binary(max_size=12),
)
HEADER_LINES = st.lists(st.tuples(NAMES, VALUES), max_size=5)
BODIES = st.one_of(
    st.binary(max_size=40),
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(max_size=5) | st.integers(),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["model", "messages", "stream", "content", "user"]), inner, max_size=4
            )
        ),
        max_leaves=8,
    ).map(lambda value: json.dumps(value).encode()),
)
LINE_ENDS = st.sampled_from([b"\r\n", b"\r\n", b"\r\n", b"\n", b"\r"])


@st.composite
def malformed(draw: st.DrawFn) -> bytes:
    end = draw(LINE_ENDS)
    version = draw(st.sampled_from([b"HTTP/1.1", b"HTTP/1.1", b"HTTP/1.0", b"HTTP/9.9", b""]))
    lines = [b" ".join((draw(METHODS), draw(TARGETS), version))]
    lines += [b"%b: %b" % header for header in draw(HEADER_LINES)]
    body = draw(BODIES)
    if draw(st.booleans()):
        lines += [b"host: x", b"content-length: %d" % len(body)]
    return end.join(lines) + end + end + body


async def all_answers(wire: Wire) -> list[int]:
    """Status codes of everything that comes until the connection is closed."""
    data = await wire.reader.read()
    return [int(code) for code in re.findall(rb"HTTP/1\.1 (\d{3}) ", data)]


def test_fuzzed_requests_get_a_4xx_or_pass() -> None:
    """Whatever comes: an answer or a closed connection; never a 500, never a hang, and the next one works."""

    async def one(c: Cluster, requests: list[bytes]) -> None:
        async with c.wire() as wire:
            await wire.send(b"".join(requests))
            wire.writer.write_eof()
            codes = await all_answers(wire)
        assert all(code in (100, 200, 501, 505) or 400 <= code < 500 for code in codes), codes

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        stack = AsyncExitStack()
        c = runner.run(stack.enter_async_context(cluster(ok)))

        @settings(max_examples=60)
        @given(st.lists(malformed(), min_size=1, max_size=3))
        def fuzz(requests: list[bytes]) -> None:
            runner.run(asyncio.wait_for(one(c, requests), 5))

        try:
            fuzz()
            assert runner.run(c.ask()).status == 200
        finally:
            runner.run(stack.aclose())
