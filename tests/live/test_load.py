from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import uvloop

from pointsman.emulator.cluster import Emulator
from pointsman.experiments.metrics import latency
from pointsman.live import load as load_module
from pointsman.live.load import NEVER, Load, Replay
from pointsman.live.servers import Scraped
from pointsman.router.http.address import parse_url
from pointsman.spec import parse_spec
from pointsman.workload import Workload, build_workload
from pointsman.workload.spec import WorkloadSpec
from tests.emulator.serving import MODEL, with_emulator

from .factories import workload

Behaviour = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
TOKEN, DONE = b'data: {"choices":[]}\n\n', b"data: [DONE]\n\n"


async def replayed(url: str, what: Workload, *, is_plain: bool = False) -> Replay:
    load = Load(parse_url(url), MODEL, is_plain=is_plain)
    try:
        return await load.replay(what)
    finally:
        load.close()


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def read_request(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
    return head + await reader.readexactly(length)


@asynccontextmanager
async def serving(behaviour: Behaviour) -> AsyncIterator[str]:
    """A server that does as told with each connection."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await behaviour(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client has gone
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


def replay_on(behaviour: Behaviour, what: Workload, *, is_plain: bool = False) -> Replay:
    async def run() -> Replay:
        async with serving(behaviour) as url, asyncio.timeout(20):
            return await replayed(url, what, is_plain=is_plain)

    return uvloop.run(run())


def test_every_request_is_served_as_long_as_asked_for() -> None:
    what = workload(60, gap_s=0.005, prompt=[3, 200, 50], output=[1, 2, 30])

    async def check(emulator: Emulator) -> None:
        (replica,) = emulator.replicas
        replay = await replayed(replica.url, what)
        assert not replay.problems
        requests = replay.requests
        assert (requests["num_decode"] == what.num_decode_tokens).all()
        assert (latency(requests, "ttft") > 0).all()
        assert (latency(requests, "e2e") >= latency(requests, "ttft")).all()
        page = replica._metrics.text().decode()
        counted = next(line for line in page.splitlines() if line.startswith("vllm:prompt_tokens_total"))
        assert float(counted.split()[-1]) == what.num_prefill_tokens.sum(), "as many tokens as planned"

    with_emulator(check)


def test_nobody_waits_for_answers() -> None:
    what = workload(30, gap_s=0.01)

    async def check(emulator: Emulator) -> None:
        (replica,) = emulator.replicas
        await replica.set_fault("hang", for_s=1.0)
        replay = await replayed(replica.url, what)
        assert not replay.problems
        requests = replay.requests
        assert requests["first_token_at"].min() > requests["sent_at"].max(), "all were sent before an answer"
        assert (latency(requests, "e2e") == requests["completed_at"] - what.arrived_at).all()

    with_emulator(check)


@pytest.mark.parametrize(("fault", "reason"), [("error", "status 500"), ("reset", "connection lost")])
def test_failures_are_counted_by_reason(fault: str, reason: str) -> None:
    async def check(emulator: Emulator) -> None:
        (replica,) = emulator.replicas
        await replica.set_fault(fault)  # type: ignore[arg-type]
        replay = await replayed(replica.url, workload(5))
        assert replay.problems.total() == 5
        assert all(found.startswith(reason) for found in replay.problems)
        assert (replay.requests["completed_at"] == NEVER).all()

    with_emulator(check)


def test_no_server() -> None:
    replay = uvloop.run(replayed("http://127.0.0.1:1", workload(3)))
    assert replay.problems == Counter({"cannot connect: connection refused": 3})


def test_times_are_those_of_the_stream() -> None:
    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(HEAD)  # not yet a token
        for _ in range(3):
            await asyncio.sleep(0.1)
            writer.write(chunk(TOKEN))
        writer.write(chunk(DONE) + b"0\r\n\r\n")

    replay = replay_on(slow, workload(1))
    assert latency(replay.requests, "ttft")[0] == pytest.approx(0.1, abs=0.05)
    assert latency(replay.requests, "e2e")[0] == pytest.approx(0.3, abs=0.05)
    assert sorted(replay.gaps_s)[-2:] == pytest.approx([0.1, 0.1], abs=0.04)


def test_a_stream_that_ends_early_has_failed() -> None:
    async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(HEAD + chunk(TOKEN) + b"0\r\n\r\n")

    assert replay_on(cut, workload(2)).problems == Counter({"the stream ended early": 2})


def test_a_connection_closed_while_idle_is_no_failure() -> None:
    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(HEAD + chunk(TOKEN) + chunk(DONE) + b"0\r\n\r\n")
        await read_request(reader)  # and it is gone

    assert not replay_on(once, workload(4, gap_s=0.05)).problems


def test_what_is_never_answered_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_module, "ANSWER_TIMEOUT_S", 0.2)

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        await reader.read()

    assert replay_on(silent, workload(2)).problems == Counter({"no answer within 0.2 s": 2})


def test_sessions_are_named() -> None:
    heard: list[bytes] = []

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await read_request(reader))

    replay_on(listen, workload(1, session=7))
    replay_on(listen, workload(1))
    assert b"x-session-id: 7\r\n" in heard[0]
    assert b"x-session-id" not in heard[1]


def chats() -> Workload:
    """Sessions that begin with one of two system prompts, some of several turns, with pauses of no length."""
    section = {
        "arrivals": {"kind": "poisson", "rate": 200.0},
        "lengths": {"kind": "lognormal", "prompt_mean": 60, "output_mean": 20},
        "requests": 40,
        "prefixes": {"systems": {"count": 2, "tokens": 100}, "turns": 3, "think_s": 0},
    }
    return build_workload(parse_spec(WorkloadSpec, section, "workload"), 0)


def test_chats_go_on_with_what_was_answered_and_share_what_the_workload_says() -> None:
    what = chats()
    assert what.num_later_turns > 10

    async def check(emulator: Emulator) -> None:
        (replica,) = emulator.replicas
        replay = await replayed(replica.url, what)
        assert not replay.problems
        requests = replay.requests
        for row, later in enumerate(what.next_turn.tolist()):
            if later >= 0:
                assert requests["sent_at"][later] >= requests["completed_at"][row]
                assert requests["arrived_at"][later] == requests["completed_at"][row] + what.think_s[later]
        page = Scraped(replica._metrics.text())
        assert page.total("vllm:prefix_cache_queries_total") == what.num_prefill_tokens.sum()
        # All but the last block of every system prompt but the first of each kind, and of all that was said.
        before = what.link_tokens[what.chain_start + what.chain_length - 1]
        most, blocks = int(before.sum()), int((before // 16 * 16).sum())
        assert blocks - 2 * 112 <= page.total("vllm:prefix_cache_hits_total") <= most

    with_emulator(check)


def test_chats_asked_plainly_are_one_text_with_what_was_answered() -> None:
    what, heard = chats(), set()

    async def say_yes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            request = await read_request(reader)
            assert request.startswith(b"POST /v1/completions ")
            heard.add(json.loads(request.split(b"\r\n\r\n", 1)[1])["prompt"])
            writer.write(HEAD + chunk(b'data: {"choices":[{"text":" yes"}]}\n\n') + chunk(DONE) + chunk(b""))

    assert not replay_on(say_yes, what, is_plain=True).problems
    assert len(heard) == len(what)
    answered = tuple(text + 4 * " bot" + " yes" for text in heard)
    is_later = [text.startswith(answered) for text in heard]
    assert sum(is_later) == what.num_later_turns


def test_turns_after_a_failed_one_are_not_asked() -> None:
    what = chats()

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await read_request(reader)
            writer.write(b"HTTP/1.1 500 no\r\ncontent-length: 0\r\n\r\n")

    later = what.num_later_turns
    reasons = {"status 500": len(what) - later, "the turn before it failed": later}
    assert replay_on(refuse, what).problems == Counter(reasons)
