"""Recorded traffic: what it shows, and that it can be read as a trace."""

from __future__ import annotations

import asyncio
import json
import resource
from pathlib import Path
from time import monotonic

import numpy as np
import pytest

from pointsman.compiled.jit import entry_point
from pointsman.errors import InputError
from pointsman.router.telemetry.recording import Recorder, Speed, new_recording
from pointsman.routing.hashing import PromptHasher, siphash
from pointsman.workload.readers import read_trace
from pointsman.workload.spec import TraceFile
from tests.router.ended import Over, ended
from tests.router.fakes import HOLD
from tests.router.harness import cluster, post, run, until
from tests.router.mock import ok, status

SPEED = Speed(0.01, 1e-4, 1e-5, None)


def add(
    recorder: Recorder, arrived_at: float, prompt_tokens: int, links: bytes, speed: Speed = SPEED
) -> None:
    over = Over(arrived_at=arrived_at, prompt_tokens=prompt_tokens, links=links)
    recorder.add(ended(over), lambda server: speed)


def test_recorded_traffic_shows_which_prompts_begin_alike(tmp_path: Path) -> None:
    """1,500 bytes in common are two full blocks, and a part of one that nobody shares."""
    recorder, hasher = Recorder(new_recording(tmp_path / "traffic.jsonl")), PromptHasher()
    for number, more in enumerate((b"one " * 200, b"other " * 200, b"")):
        text = b"word " * 300 + more
        add(recorder, monotonic() + number, len(text) // 4, hasher.of_text(text, 1, 5, 700))
    add(recorder, monotonic() + 3, 7, hasher.of_text(b"word " * 300, 1))  # 7 tokens by its server
    recorder.close()
    text = (tmp_path / "traffic.jsonl").read_text()
    assert "word" not in text
    hashes = [json.loads(line).get("block_hashes", []) for line in text.splitlines()]
    assert [len(one) for one in hashes] == [4, 5, 2, 0]
    assert hashes[0][:2] == hashes[1][:2] == hashes[2]
    assert len({*hashes[0], *hashes[1]}) == 4 + 5 - 2
    trace = read_trace(TraceFile(path=str(tmp_path / "traffic.jsonl")))
    assert trace.chain_length.tolist() == [1, 1, 1, 0]
    assert trace.link_tokens.tolist() == [256] * 3
    assert len(set(trace.link_key.tolist())) == 1


def test_every_line_has_the_hashes_of_its_own_prompt(tmp_path: Path) -> None:
    """However many lines there are: they are hashed and encoded some at a time."""
    recorder, hasher = Recorder(new_recording(tmp_path / "traffic.jsonl")), PromptHasher()
    texts = [b"%d " % number * 300 * (number % 5) for number in range(101)]
    for number, text in enumerate((*texts, *texts)):
        add(recorder, recorder._started_at + number, len(text) or 1, hasher.of_text(text, 1))
    recorder.close()
    rows = [json.loads(line) for line in (tmp_path / "traffic.jsonl").read_text().splitlines()]
    assert [round(row["arrived_at"], 3) for row in rows] == list(range(202))
    hashes = [row.get("block_hashes", []) for row in rows]
    assert [len(one) for one in hashes[:101]] == [len(text) // 512 for text in texts]
    assert hashes[:101] == hashes[101:]
    assert len({one[0] for one in hashes if one}) == sum(len(text) >= 512 for text in texts)


@entry_point
def siphash_of(message: int, low: int, high: int) -> int:
    return siphash(message, low, high)  # type: ignore[no-any-return]


def test_recorded_hashes_are_siphash_2_4() -> None:
    """The published test vector for the key 00 … 0f and the message 00 … 07."""
    (message,), (low, high) = (np.frombuffer(bytes(range(count)), np.int64).tolist() for count in (8, 16))
    assert siphash_of(message, low, high) == 0x93F5F5799A932462


def test_a_speed_is_written_where_it_has_changed(tmp_path: Path) -> None:
    recorder = Recorder(new_recording(tmp_path / "traffic.jsonl"))
    for speed in (SPEED, SPEED, SPEED._replace(step_floor_s=0.02), SPEED):
        add(recorder, monotonic(), 7, b"", speed)
    recorder.close()
    rows = [json.loads(line) for line in (tmp_path / "traffic.jsonl").read_text().splitlines()]
    assert [row.get("step_floor_s") for row in rows] == [0.01, None, 0.02, 0.01]


def test_a_disk_that_is_full_leaves_whole_lines(tmp_path: Path) -> None:
    """A line that ends in its middle, with the next one behind it, would make the recording unreadable."""
    path = tmp_path / "traffic.jsonl"
    recorder = Recorder(new_recording(path))
    for number in range(10):
        add(recorder, recorder._started_at + number, 100 + number, b"")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        recorder.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    num_written = len(path.read_text().splitlines())
    assert recorder.take_lost() == 10 - num_written > 0
    add(recorder, recorder._started_at + 20, 7, b"")
    recorder.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["num_prefill_tokens"] for line in lines] == [*range(100, 100 + num_written), 7]


def test_recorded_traffic_can_be_read_as_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "traffic.jsonl"

    async def scenario() -> None:
        recorder = Recorder(new_recording(path))
        async with cluster(ok, recorder=recorder) as c:
            for session in ("a", "b", "a", None):
                header = f"x-session-id: {session}\r\n" if session else ""
                await c.ask(post(stream=True, headers=header))
                await asyncio.sleep(0.01)
            await c.ask(post({"prompt": "how many tokens?"}, "/tokenize"))  # no text is asked for
            await c.ask(post({"input": "a vector, please"}, "/v1/embeddings"))
            c.mocks[0].behaviour = status(400)
            await c.ask()
        recorder.close()

    run(scenario)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["outcome"] for row in rows] == ["completed"] * 4 + ["error"]
    trace = read_trace(TraceFile(path=str(path)))
    assert len(trace) == 5
    assert list(trace.num_decode_tokens) == [5, 5, 5, 5, 1]
    assert trace.session[0] == trace.session[2] != trace.session[1]
    assert trace.session[3] == trace.session[4] == -1
    assert all(after > before for before, after in zip(trace.arrived_at, trace.arrived_at[1:], strict=False))
    with pytest.raises(InputError, match="exists already"):
        new_recording(path)


def test_the_time_that_the_router_held_a_request_is_recorded(tmp_path: Path) -> None:
    path = tmp_path / "traffic.jsonl"

    async def scenario() -> None:
        recorder = Recorder(new_recording(path))
        async with cluster(ok, recorder=recorder, holding={"recheck_s": 0.05}) as c:
            await c.ask()
            c.decider.rule = lambda excluded: HOLD
            asked = asyncio.create_task(c.ask())
            await until(lambda: c.router.dispatcher.num_held == 1)
            await asyncio.sleep(0.3)
            c.decider.rule = None
            await asked
        recorder.close()

    run(scenario)
    at_once, held = [json.loads(line) for line in path.read_text().splitlines()]
    assert 0 <= at_once["held_s"] < 0.1
    assert 0.3 <= held["held_s"] <= held["e2e_s"]
    assert held["ttft_s"] is None
