"""Requests that are over: what log, recording and metrics make of many at once is what one by one gives."""

from __future__ import annotations

import io
import json
from bisect import bisect_left
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pointsman.router.logs import Log
from pointsman.router.telemetry.ended import MAX_ENDED
from pointsman.router.telemetry.metrics import LATENCY_S, Metrics
from pointsman.router.telemetry.recording import Recorder, Speed, TrafficRecording
from pointsman.routing.hashing import PromptHasher
from tests.router.ended import Over, ended

KNOWN = [PromptHasher().of_text(b"word " * count, 1, 700) for count in (0, 10, 150, 1000)]
SECONDS = st.sampled_from([0.0, 1e-6, 0.00499, 0.005, 0.1, 1.5, 59.9999995, 1234.5]) | st.floats(0.0, 1e5)
OVER = st.builds(
    Over,
    request_id=st.sampled_from(["a-1", "x" * 128, ""]),
    path=st.sampled_from(["/v1/chat/completions", '/"\\\n', "/é"]),
    status=st.sampled_from([200, 502]),
    outcome=st.sampled_from(["completed", "cut"]),
    replica_name=st.sampled_from(["", "http://a", "http://ü"]),
    num_retries=st.integers(0, 2),
    generates=st.booleans(),
    session_name=st.sampled_from([None, "one", "other"]),
    arrived_at=SECONDS,
    held_s=st.just(-1.0) | SECONDS,
    ttft_s=st.none() | SECONDS,
    e2e_s=SECONDS,
    prompt_tokens=st.sampled_from([0, 1, 127, 128, 300, 10**12 - 1]),
    output_tokens=st.sampled_from([0, 9, 10, 12345]),
    cached_tokens=st.none() | st.integers(0, 10**6),
    links=st.sampled_from(KNOWN),
)
SPEED = Speed(0.01, 1e-4, None, 0.2)


def close_to(found: Any, true: float | None) -> bool:
    """Seconds are cut to six decimals, and differences of times are not exact."""
    return found is None if true is None else abs(found - true) <= 1.1e-6 + 1e-9 * true


@settings(max_examples=60, deadline=None)
@given(st.lists(OVER, min_size=1, max_size=20))
def test_every_log_line_says_how_its_request_ended(ones: list[Over]) -> None:
    stream = io.StringIO()
    log = Log(stream)
    log.requests(ended(*ones))
    log.flush()
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    for line, one in zip(lines, ones, strict=True):
        assert line.pop("time") > 1e9
        assert close_to(line.pop("ttft_s"), one.ttft_s)
        assert close_to(line.pop("e2e_s"), one.e2e_s)
        assert line == {
            "event": "request",
            "id": one.request_id,
            "path": one.path,
            "status": one.status,
            "outcome": one.outcome,
            "replica": one.replica_name,
            "policy": one.decided_by,
            "prompt_tokens": one.prompt_tokens,
            "output_tokens": one.output_tokens,
            "retries": one.num_retries,
        }


@settings(max_examples=60, deadline=None)
@given(st.lists(OVER, min_size=1, max_size=20))
def test_every_recorded_line_is_of_its_own_request(tmp_path_factory: Any, ones: list[Over]) -> None:
    path: Path = tmp_path_factory.mktemp("recorded") / "traffic.jsonl"
    recorder = Recorder(TrafficRecording(path, 0.0, bytes(16)))
    recorder.add(ended(*ones), lambda server: SPEED)
    recorder.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    seen: set[str] = set()
    sessions: dict[str, set[str]] = {}
    for line, one in zip(lines, (one for one in ones if one.generates), strict=True):
        assert close_to(line["arrived_at"], one.arrived_at)
        assert close_to(line["ttft_s"], one.ttft_s) and close_to(line["e2e_s"], one.e2e_s)
        assert close_to(line["held_s"], None if one.held_s < 0 else one.held_s)
        assert line["num_prefill_tokens"] == max(1, one.prompt_tokens)
        assert line["num_decode_tokens"] == max(1, one.output_tokens)
        assert (line["outcome"], line["policy"]) == (one.outcome, one.decided_by)
        assert line["server"] == (one.replica_name or None)
        assert line.get("num_cached_tokens") == one.cached_tokens
        num_bytes = [0, 50, 750, 5000][KNOWN.index(one.links)]
        assert len(line.get("block_hashes", [])) == min(num_bytes // 512, one.prompt_tokens // 128)
        is_first = one.replica_name not in seen
        seen.add(one.replica_name)
        assert ("step_floor_s" in line, "prefill_s_per_token" in line) == (is_first, False)
        assert (line["session_id"] is None) == (one.session_name is None)
        sessions.setdefault(one.session_name or "", set()).add(line["session_id"])
    assert all(len(hashes) == 1 for hashes in sessions.values())


@settings(max_examples=60, deadline=None)
@given(st.lists(OVER, min_size=1, max_size=20))
def test_metrics_count_every_request_once(ones: list[Over]) -> None:
    metrics = Metrics()
    for kind, totals in ended(*ones).tallies(np.array(LATENCY_S, np.float64)):
        metrics.answered(kind, totals)
    replicas = [(one.replica_name, one.decided_by) for one in ones]
    assert metrics.requests == Counter((*key, one.status) for key, one in zip(replicas, ones, strict=True))
    for key in set(replicas):
        alike = [one for one in ones if (one.replica_name, one.decided_by) == key]
        e2es_s = [one.arrived_at + one.e2e_s - one.arrived_at for one in alike]  # as it is measured
        counts = Counter(bisect_left(LATENCY_S, e2e_s) for e2e_s in e2es_s)
        assert metrics.e2e_s[key].counts == [counts[bucket] for bucket in range(len(LATENCY_S) + 1)]
        assert abs(metrics.e2e_s[key].total - sum(e2es_s)) <= 1e-9 * sum(e2es_s)
        assert sum(metrics.ttft_s[key].counts) == sum(one.ttft_s is not None for one in alike)
        tokens = sum(one.output_tokens for one in alike if one.generates and one.outcome == "completed")
        assert metrics.tokens[*key, "output"] == tokens


def test_there_is_room_for_as_many_as_are_kept(tmp_path: Path) -> None:
    ones = [Over(request_id=str(number), links=KNOWN[3], prompt_tokens=2000) for number in range(MAX_ENDED)]
    stream = io.StringIO()
    log = Log(stream)
    log.requests(ended(*ones))
    log.flush()
    assert [json.loads(line)["id"] for line in stream.getvalue().splitlines()] == [
        one.request_id for one in ones
    ]
    recorder = Recorder(TrafficRecording(tmp_path / "traffic.jsonl", 0.0, bytes(16)))
    recorder.add(ended(*ones), lambda server: SPEED)
    recorder.close()
    lines = (tmp_path / "traffic.jsonl").read_text().splitlines()
    assert len(lines) == MAX_ENDED and len({str(json.loads(line)["block_hashes"]) for line in lines}) == 1
