"""Keys, logs, metrics, recorded traffic, the admin API, and where replicas come from."""

from __future__ import annotations

import asyncio
import hmac
import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from time import monotonic
from typing import Any

import msgspec
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pointsman.errors import InputError
from pointsman.router.config import Backend
from pointsman.router.http.address import parse_url
from pointsman.router.http.downstream import ClientConnection
from pointsman.router.http.limits import Limits
from pointsman.router.http.messages import RequestHead
from pointsman.router.keys import ADMIN, CLIENT, Keys, read_keys
from pointsman.router.logs import Log, RequestLine
from pointsman.router.operations.admin import Admin
from pointsman.router.replicas.discovery import (
    Discovery,
    DnsSource,
    FileSource,
    KubernetesSource,
    SourceError,
    ready_endpoints,
)
from pointsman.router.server import port_of
from pointsman.router.telemetry.recording import RecordedRequest, Recorder, new_recording, siphash
from pointsman.routing.calibration import Estimate
from pointsman.routing.hashing import PromptHasher
from pointsman.workload.readers import read_trace
from pointsman.workload.spec import TraceFile
from tests.router.fakes import HOLD
from tests.router.harness import CHAT, Answered, Cluster, Wire, cluster, get, post, run, until
from tests.router.mock import gated, hang, mocks, ok, reset, respond, status

SECRET = "sk-very-secret"
PROMPT = "the prompt that nobody may see"


def test_only_those_with_a_key_get_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "keys").write_text(f"# of the team\n{SECRET}\n")
    monkeypatch.setenv("POINTSMAN_API_KEYS", "sk-other, sk-third")

    async def scenario() -> None:
        async with cluster(ok, keys=read_keys(tmp_path / "keys")) as c:
            for key in (SECRET, "sk-other", "sk-third"):
                assert (await c.ask(post(headers=f"authorization: Bearer {key}\r\n"))).status == 200
            for header in ("", "authorization: Bearer wrong\r\n", f"authorization: Basic {SECRET}\r\n"):
                refused = await c.ask(post(headers=header))
                assert (refused.status, refused.json["error"]["code"]) == (401, "invalid_api_key")
                assert (await c.ask(get("/v1/models", header))).status == 401
            assert (await c.ask(get("/health"))).status == 200
            assert c.num_heard == [3]
            assert all(heard.header("authorization") is None for heard in c.mocks[0].heard)

    run(scenario)


def test_a_key_for_the_servers_replaces_the_clients() -> None:
    async def scenario() -> None:
        async with cluster(ok, backend_key="sk-backend") as c:
            await c.ask(post(headers=f"authorization: Bearer {SECRET}\r\n"))
            assert c.mocks[0].heard[0].header("authorization") == "Bearer sk-backend"
        async with cluster(ok) as c:
            await c.ask(post(headers=f"authorization: Bearer {SECRET}\r\n"))
            assert c.mocks[0].heard[0].header("authorization") == f"Bearer {SECRET}"

    run(scenario)


def test_a_file_without_keys_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "keys").write_text("# nobody\n")
    monkeypatch.setenv("POINTSMAN_API_KEYS", SECRET)  # others do not make up for it
    with pytest.raises(InputError, match="holds no key"):
        read_keys(tmp_path / "keys")


def test_the_key_of_a_client_commands_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POINTSMAN_API_KEYS", "sk-client")
    monkeypatch.setenv("POINTSMAN_ADMIN_KEYS", "sk-admin, sk-night")

    def key(text: str) -> str:
        return f"authorization: Bearer {text}\r\n"

    async def scenario() -> None:
        keys, admin_keys = read_keys(None, CLIENT), read_keys(None, ADMIN)
        async with cluster(ok, keys=keys) as c, admin(c, admin_keys) as ask:
            switch = ("POST", "/admin/policy", {"policy": "other"})
            drain = ("POST", "/admin/drain", {"url": c.mocks[0].url})
            for command in (switch, drain, ("GET", "/admin/state", None)):
                refused = await ask(*command, headers=key("sk-client"))
                assert (refused.status, refused.json["error"]["message"]) == (
                    401,
                    "missing or wrong admin key",
                )
                assert (await ask(*command)).status == 401
            assert (await ask("GET", "/admin/policy", headers=key("sk-night"))).json["policy"] == "fake"
            assert (await ask(*switch, headers=key("sk-admin"))).json["policy"] == "other"
            assert (await c.ask(post(headers=key("sk-admin")))).status == 401
            assert (await c.ask(post(headers=key("sk-client")))).status == 200

    run(scenario)


def test_who_was_refused_is_in_the_log_but_no_key() -> None:
    async def scenario() -> None:
        keys = Keys([SECRET], ADMIN.name)
        async with cluster(ok, keys=Keys([SECRET])) as c, admin(c, keys) as ask:
            await c.ask(post(path=f"{CHAT}?key={SECRET}"))
            await c.ask(post(headers="authorization: Bearer sk-mistyped\r\n", path="/v1/" + 200 * "x"))
            await ask(
                "POST", "/admin/policy", {"policy": "x"}, headers="authorization: Bearer sk-mistyped\r\n"
            )
            lines = [line for line in c.logged() if line["event"] == "refused"]
            assert [line | {"time": 0} for line in lines] == [
                {"time": 0, "event": "refused", "status": 401, "client": "127.0.0.1"} | more
                for more in (
                    {"problem": "no API key", "path": CHAT},
                    {"problem": "wrong API key", "path": "/v1/" + 96 * "x"},
                    {"problem": "wrong admin key", "path": "/admin/policy"},
                )
            ]
            assert "sk-" not in c.log.getvalue()

    run(scenario)


def test_every_key_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append(other)
        return one == other

    monkeypatch.setattr(hmac, "compare_digest", compare)
    keys, log = Keys(["a", "b", "c"]), Log(io.StringIO())
    for given, is_right in (("a", True), ("b", True), ("c", True), ("d", False)):
        head = RequestHead(b"GET", b"/", [(b"authorization", f"Bearer {given}".encode())], False, True)
        assert (keys.refusal(head, "", log) is None) == is_right
        assert len(compared) == len(set(compared)) == 3  # whichever fits, all are compared
        compared.clear()


def test_no_prompt_and_no_key_in_any_log(tmp_path: Path) -> None:
    async def scenario() -> None:
        recorder = Recorder(new_recording(tmp_path / "traffic.jsonl"))
        async with cluster(ok, reset, keys=Keys([SECRET]), recorder=recorder, backend_key="sk-backend") as c:
            key = f"authorization: Bearer {SECRET}\r\n"
            body = {"model": "m", "messages": [{"role": "user", "content": PROMPT}], "user": "session-name"}
            for _ in range(4):
                await c.ask(post(body, CHAT + f"?api_key={SECRET}", key))
            await c.ask(post(body, headers=f"authorization: Bearer {SECRET}x\r\n"))
            await c.ask(post({"model": PROMPT, "messages": []}, headers=key))
            await c.ask(post(PROMPT.encode(), headers=key))
            await c.ask(get("/metrics"))
            written = c.log.getvalue() + (await c.ask(get("/metrics"))).body.decode()
            recorder.flush()
            written += (tmp_path / "traffic.jsonl").read_text()
            written += json.dumps(c.router.decisions.explain())
            for secret in (SECRET, PROMPT, "session-name", "sk-backend"):
                assert secret not in written
        recorder.close()

    run(scenario)


def test_every_request_has_an_id_and_a_log_line() -> None:
    async def scenario() -> None:
        async with cluster(ok) as c:
            answered = await c.ask(post(headers="x-request-id: my-id.1\r\n"))
            assert answered.headers["x-request-id"] == c.mocks[0].heard[0].header("x-request-id") == "my-id.1"
            for bad in ("a b", "x" * 200, 'quote"'):
                answered = await c.ask(post(stream=True, headers=f"x-request-id: {bad}\r\n"))
                assert answered.headers["x-request-id"] != bad
                assert answered.headers["x-request-id"] == c.mocks[0].heard[-1].header("x-request-id")
            lines = [line for line in c.logged() if line["event"] == "request"]
            assert len({line["id"] for line in lines}) == 4
            assert lines[0]["id"] == "my-id.1"
            assert lines[0] | {"time": 0, "e2e_s": 0} == {
                "time": 0,
                "event": "request",
                "id": "my-id.1",
                "path": CHAT,
                "status": 200,
                "outcome": "completed",
                "replica": c.mocks[0].url,
                "policy": "fake",
                "ttft_s": None,
                "e2e_s": 0,
                "prompt_tokens": 7,
                "output_tokens": 5,
                "retries": 0,
            }
            assert 0 < lines[1]["ttft_s"] < lines[1]["e2e_s"]
            assert lines[1]["output_tokens"] == 5

    run(scenario)


def values(text: bytes) -> dict[tuple[str, ...], float]:
    """Name and label values, in the order of the labels' names -> value."""
    return {
        (sample.name, *(sample.labels[label] for label in sorted(sample.labels))): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def test_log_lines_are_written_whole_a_page_at_a_time() -> None:
    """Several processes may write to one pipe: up to 4 KiB arrive in one piece."""

    class Pages(io.StringIO):
        def __init__(self) -> None:
            super().__init__()
            self.pages: list[str] = []

        def write(self, text: str) -> int:
            self.pages.append(text)
            return len(text)

    stream = Pages()
    log = Log(stream)
    line = RequestLine(1.0, "request", "id", "/v1", 200, "completed", "a", "p", None, 0.5, 1, 2, 0)
    log.requests([line] * 100)
    log.requests([msgspec.structs.replace(line, path="/" + "x" * 5000)])
    log.requests([line] * 3)
    log.flush()
    assert all(page.endswith("\n") for page in stream.pages)
    long = [page for page in stream.pages if len(page) > 4096]
    assert len(long) == 1 and "xxx" in long[0] and long[0].count("\n") == 1
    assert [json.loads(text)["id"] for text in "".join(stream.pages).splitlines()] == ["id"] * 104
    assert len(stream.pages) < 104 / 4


def test_a_full_disk_costs_lines_and_nothing_else(tmp_path: Path) -> None:
    class Disk(io.StringIO):
        is_full = False

        def write(self, text: str) -> int:
            if self.is_full:
                raise OSError(28, "No space left on device")
            return super().write(text)

    class Full(io.RawIOBase):
        def write(self, data: Any) -> int:
            raise OSError(28, "No space left on device")

    async def scenario() -> None:
        disk = Disk()
        recorder = Recorder(new_recording(tmp_path / "traffic.jsonl"))
        async with cluster(ok, limits={"first_byte_timeout_s": 0.2}, log_to=disk, recorder=recorder) as c:
            file, recorder._file = recorder._file, Full()  # type: ignore[assignment]
            disk.is_full = True
            assert (await c.ask()).status == 200
            await asyncio.sleep(0.3)  # the clock has ticked
            disk.is_full = False
            recorder._file = file
            c.mocks[0].behaviour = hang
            assert (await c.ask()).status == 504, "the clock ticks on"
            await until(lambda: "log lines lost" in disk.getvalue())
            events = {line["event"]: line for line in map(json.loads, disk.getvalue().splitlines())}
            assert events["log lines lost"]["count"] >= 2, "of the request, and of what was not recorded"
            await until(lambda: file.tell() > 0)
        recorder.close()
        recorded = (tmp_path / "traffic.jsonl").read_text().splitlines()
        assert [json.loads(line)["outcome"] for line in recorded] == ["failed"]

    run(scenario)


def test_metrics_count_what_happened() -> None:
    async def scenario() -> None:
        async with cluster(ok, status(500), shadow="other", reliability={"breaker_failures": 3}) as c:
            first, second = (mock.url for mock in c.mocks)
            for _ in range(3):
                c.decider.rule = lambda excluded: 2 if 1 not in excluded else 1
                assert (await c.ask(post(stream=True))).status == 200
            c.decider.rule = lambda excluded: 1 / 0
            assert (await c.ask()).status == 200
            await c.ask(post(b"{"))
            found = values((await c.ask(get("/metrics"))).body)
            assert found["pointsman_requests_total", "200", "fake", first] == 3
            assert found["pointsman_requests_total", "200", "least-outstanding", first] == 1
            assert found["pointsman_requests_total", "400", "", ""] == 1
            assert found["pointsman_ttft_seconds_count", "fake", first] == 3
            assert found["pointsman_request_seconds_count", "fake", first] == 3
            assert found["pointsman_request_seconds_count", "least-outstanding", first] == 1
            sums = [found[f"pointsman_{kind}_seconds_sum", "fake", first] for kind in ("ttft", "request")]
            assert 0 < sums[0] < sums[1]
            assert found["pointsman_retries_total", "status 500"] == 3
            assert found["pointsman_fallbacks_total", "exception ZeroDivisionError"] == 1
            assert found["pointsman_decisions_total", "fake", second] == 3
            assert found["pointsman_decisions_total", "fake", first] == 3
            assert found["pointsman_decisions_total", "least-outstanding", first] == 1
            assert found["pointsman_decision_seconds_count", "fake"] == 7
            assert found["pointsman_policy", "fake", "deciding"] == 1
            assert found["pointsman_policy", "other", "shadow"] == 1
            assert found["pointsman_replica_breaker_state", first] == 0
            assert found["pointsman_replica_breaker_state", second] == 2
            assert found["pointsman_replica_share", first] == pytest.approx(4 / 7)
            assert found["pointsman_replica_outstanding", first] == 0
            assert found["pointsman_tokens_total", "output", "fake", first] == 15
            shadowed = [
                found.get(("pointsman_shadow_decisions_total", "other", url), 0) for url in (first, second)
            ]
            assert sum(shadowed) == 7
            agreed = found.get(("pointsman_shadow_agreement_total", "true", "other"), 0)
            assert agreed + found.get(("pointsman_shadow_agreement_total", "false", "other"), 0) == 7
            assert found[("pointsman_clients",)] == 1

    run(scenario)


def test_a_decision_is_explained_on_request_only() -> None:
    async def scenario() -> None:
        async with cluster(ok) as c:
            assert "x-pointsman-decision" not in (await c.ask()).headers
            answered = await c.ask(post(headers="x-pointsman-decision: 1\r\nx-request-id: me\r\n"))
            url = c.mocks[0].url.removeprefix("http://")
            assert answered.headers["x-pointsman-decision"] == f"fake sent it to {url}, without saying why."
            assert c.mocks[0].heard[1].header("x-pointsman-decision") is None

    run(scenario)


def recorded(arrived_at: float, prompt_tokens: int) -> RecordedRequest:
    return RecordedRequest(
        arrived_at, prompt_tokens, 5, None, "completed", "fake", *[None] * 2, 1.0, *[None] * 4
    )


def test_recorded_traffic_shows_which_prompts_begin_alike(tmp_path: Path) -> None:
    """1,500 bytes in common are two full blocks, and a part of one that nobody shares."""
    recorder, hasher = Recorder(new_recording(tmp_path / "traffic.jsonl")), PromptHasher()
    for number, more in enumerate((b"one " * 200, b"other " * 200, b"")):
        text = b"word " * 300 + more
        recorder.add(recorded(monotonic() + number, len(text) // 4), hasher.of_text(text, 1, 5, 700))
    recorder.add(recorded(monotonic() + 3, 7), hasher.of_text(b"word " * 300, 1))  # 7 tokens by its server
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


def test_recorded_hashes_are_siphash_2_4() -> None:
    """The published test vector for the key 00 … 0f and the message 00 … 07."""
    words = np.frombuffer(bytes(range(8)), np.int64)
    assert siphash(words, bytes(range(16))).tolist() == [0x93F5F5799A932462]


def test_before_and_after_a_switch_can_be_compared() -> None:
    """Latencies and answers are counted by policy, also those of a request under way at the switch."""

    async def scenario() -> None:
        async with cluster(gated) as c, admin(c) as ask:
            under_way = asyncio.ensure_future(c.ask(post(stream=True)))
            await until(lambda: c.num_heard == [1])
            assert (await ask("POST", "/admin/policy", {"policy": "new"})).json["policy"] == "new"
            c.mocks[0].gate.set()
            await under_way
            await asyncio.gather(*(c.ask(post(stream=True)) for _ in range(2)))
            found = values((await c.ask(get("/metrics"))).body)
            url = c.mocks[0].url
            for policy, count in (("fake", 1), ("new", 2)):
                for kind in ("ttft", "request"):
                    assert found[f"pointsman_{kind}_seconds_count", policy, url] == count
                assert found["pointsman_requests_total", "200", policy, url] == count
                assert found["pointsman_decision_seconds_count", policy] == count
            assert found["pointsman_policy", "new", "deciding"] == 1
            state = (await ask("GET", "/admin/state")).json
            assert {policy: of["e2e_s"]["count"] for policy, of in state["by_policy"].items()} == {
                "fake": 1,
                "new": 2,
            }
            assert [line["policy"] for line in c.logged() if line["event"] == "request"] == [
                "fake",
                "new",
                "new",
            ]

    run(scenario)


def test_the_shadow_changes_while_requests_go_on() -> None:
    async def scenario() -> None:
        async with cluster(ok) as c, admin(c) as ask:
            await c.ask()
            assert (await ask("GET", "/admin/state")).json["shadow"] is None
            for shadow in ("one", "two"):
                told = await ask("POST", "/admin/shadow", {"policy": shadow})
                assert told.json == {"policy": "fake", "shadow": shadow}
                await c.ask()
                await c.ask()
                state = (await ask("GET", "/admin/state")).json["shadow"]
                assert (state["policy"], state["agreed"] + state["differed"]) == (shadow, 2)
            assert (await ask("POST", "/admin/shadow", {"policy": None})).json["shadow"] is None
            await c.ask()
            found = values((await c.ask(get("/metrics"))).body)
            url = c.mocks[0].url
            for shadow in ("one", "two"):
                assert found["pointsman_shadow_decisions_total", shadow, url] == 2
            assert (await ask("POST", "/admin/shadow", {})).status == 400

    run(scenario)


def test_reasons_are_kept_and_found_by_request() -> None:
    async def scenario() -> None:
        async with cluster(ok, status(500)) as c, admin(c) as ask:
            first, second = (mock.url.removeprefix("http://") for mock in c.mocks)
            c.decider.rule = lambda excluded: 2 if 1 not in excluded else 1
            await c.ask(post(headers="x-request-id: me\r\n"))
            c.decider.rule = lambda excluded: 1 / 0
            await c.ask(post(headers="x-request-id: you\r\n"))
            mine = (await ask("GET", "/admin/decisions?request=me")).json["decisions"]
            assert [one["why"] for one in mine] == [
                f"fake sent it to {url}, without saying why." for url in (second, first)
            ]
            last = (await ask("GET", "/admin/decisions?last=1")).json
            (yours,) = last["decisions"]
            assert yours["request_id"] == last["last"]["request_id"] == "you"
            assert yours["why"] == (
                f"least-outstanding sent it to {yours['replica'].removeprefix('http://')}, "
                "because fake could not: exception ZeroDivisionError."
            )
            assert (await ask("GET", "/admin/decisions?request=nobody")).json == {"decisions": []}
            assert (await ask("GET", "/admin/state")).json["last"][0]["why"] == mine[0]["why"]

    run(scenario)


def test_a_reason_that_cannot_be_given_costs_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with cluster(ok) as c:
            monkeypatch.setattr(c.decider, "reason", lambda: 1 / 0)
            answered = await c.ask(post(headers="x-pointsman-decision: 1\r\n"))
            assert answered.status == 200 and "fake sent it" in answered.headers["x-pointsman-decision"]

    run(scenario)


def test_estimates_and_their_errors_are_on_metrics_and_in_the_record(tmp_path: Path) -> None:
    path = tmp_path / "traffic.jsonl"

    async def scenario() -> None:
        recorder = Recorder(new_recording(path))
        async with cluster(ok, ok, recorder=recorder) as c:
            url = c.mocks[0].url
            figures = {"step_floor_s": 0.007, "decode_s_per_token": 6e-5, "prefill_s_per_token": 3e-5}
            errors = {"step_floor_s": 0.01, "decode_s_per_token": 0.2, "prefill_s_per_token": 0.05}
            c.books.signals[0] = figures
            c.books.estimates[0] = Estimate(figures, 0.02, "measured", errors=errors)
            c.decider.rule = lambda excluded: 1
            await c.ask(post(stream=True))
            await c.ask()
            found = values((await c.ask(get("/metrics"))).body)
            assert found["pointsman_replica_step_floor_seconds", url] == 0.007
            assert found["pointsman_replica_decode_seconds_per_token", url] == 6e-5
            assert found["pointsman_replica_prefill_seconds_per_token", url] == 3e-5
            assert found["pointsman_replica_estimate_error", "step_floor_s", url] == 0.01
            assert ("pointsman_replica_estimate_error", "step_floor_s", c.mocks[1].url) not in found
            streamed, whole = (recorder.flush(), *map(json.loads, path.read_text().splitlines()))[1:]
            assert streamed["server"] == whole["server"] == url
            assert 0 < streamed["ttft_s"] <= streamed["e2e_s"] < 5 and whole["ttft_s"] is None
            recorded = (*figures, "speed_error", "policy")
            assert [streamed[name] for name in recorded] == [*figures.values(), 0.02, "fake"]
        recorder.close()

    run(scenario)


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


# --- admin ---


@asynccontextmanager
async def admin(c: Cluster, keys: Keys | None = None) -> AsyncIterator[Any]:
    """A function that asks the admin API."""
    service = Admin(c.router, keys or Keys([]))
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: ClientConnection(service, Limits()), "127.0.0.1", 0)

    async def ask(method: str, path: str, body: Any = None, headers: str = "") -> Answered:
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(server))
        wire = Wire(reader, writer)
        data = json.dumps(body).encode() if body is not None else b""
        head = f"{method} {path} HTTP/1.1\r\nhost: x\r\n{headers}content-length: {len(data)}\r\n\r\n"
        await wire.send(head.encode() + data)
        try:
            return await wire.answer()
        finally:
            writer.close()

    try:
        yield ask
    finally:
        server.close()
        await until(lambda: not service.clients)


def test_replicas_come_and_go_under_load_without_a_failed_request() -> None:
    async def scenario() -> None:
        async with cluster(ok, ok) as c, admin(c) as ask, mocks(ok) as (third,):
            answers: list[int] = []
            is_over = False

            async def load() -> None:
                async with c.wire() as wire:
                    while not is_over:
                        await wire.send(post(stream=len(answers) % 2 == 0))
                        answers.append((await wire.answer()).status)

            clients = [asyncio.ensure_future(load()) for _ in range(8)]
            assert (await ask("POST", "/admin/replicas", {"url": third.url})).json["state"] == "ready"
            await until(lambda: len(third.heard) > 10)
            await ask("DELETE", f"/admin/replicas?url={c.mocks[0].url}")
            await until(lambda: len(c.router.registry) == 2)
            num_before = len(c.mocks[0].heard)
            assert (await ask("POST", "/admin/drain", {"url": c.mocks[1].url})).json["state"] == "draining"
            assert (await ask("POST", "/admin/policy", {"policy": "another"})).json["policy"] == "another"
            await asyncio.sleep(0.2)
            assert (await ask("POST", "/admin/drain", {"url": c.mocks[1].url, "drain": False})).status == 200
            is_over = True
            await asyncio.gather(*clients)
            assert set(answers) == {200}
            assert len(c.mocks[0].heard) == num_before
            listed = (await ask("GET", "/admin/replicas")).json["replicas"]
            assert [replica["name"] for replica in listed] == [c.mocks[1].url, third.url]
            decided = (await ask("GET", "/admin/decisions?last=3")).json
            assert [decision["by"] for decision in decided["decisions"]] == ["another"] * 3
            assert "why" in decided["last"]

    run(scenario)


def test_a_replica_is_removed_only_after_its_last_answer() -> None:
    async def scenario() -> None:
        async with cluster(gated, ok) as c:
            c.decider.rule = lambda excluded: 1
            task = asyncio.ensure_future(c.ask())
            await until(lambda: c.num_heard == [1, 0])
            c.router.registry.remove(c.mocks[0].url)
            assert 0 in c.books.names
            c.mocks[0].gate.set()
            assert (await task).status == 200
            assert 0 not in c.books.names
            assert c.router.registry.by_slot.keys() == {1}

    run(scenario)


def test_admin_refuses_what_makes_no_sense() -> None:
    async def scenario() -> None:
        async with cluster(ok) as c, admin(c, Keys([SECRET])) as ask:
            key = f"authorization: Bearer {SECRET}\r\n"
            for method, path, body, code in (
                ("POST", "/admin/replicas", {"url": "ftp://x"}, 400),
                ("POST", "/admin/replicas", {"url": c.mocks[0].url}, 400),
                ("POST", "/admin/replicas", {"urll": "x"}, 400),
                ("POST", "/admin/replicas", [1], 400),
                ("DELETE", "/admin/replicas?url=http://nobody", None, 400),
                ("POST", "/admin/drain", {"url": "http://nobody"}, 400),
                ("PUT", "/admin/drain", {}, 405),
                ("GET", "/admin/secrets", None, 404),
                ("GET", "/admin/decisions?last=x", None, 400),
            ):
                answered = await ask(method, path, body, key)
                assert answered.status == code, (path, answered.body)
            assert (await ask("GET", "/admin/replicas")).status == 401
            assert (
                await ask("GET", "/admin/replicas", headers=key + "origin: http://evil\r\n")
            ).status == 403
            assert (await ask("GET", "/admin/replicas", headers=key)).status == 200

    run(scenario)


def test_a_bad_policy_does_not_replace_a_good_one() -> None:
    async def scenario() -> None:
        async with cluster(ok) as c, admin(c) as ask:

            def refuse(name: str) -> Any:
                raise InputError("policy", name, "unknown", "name another")

            c.router.decisions._source = refuse
            assert (await ask("POST", "/admin/policy", {"policy": "nonsense"})).status == 400
            assert (await ask("GET", "/admin/policy")).json == {"policy": "fake", "shadow": None}
            assert (await c.ask()).status == 200

    run(scenario)


# --- where replicas come from ---


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


def test_a_server_is_found_by_the_url_it_was_given_by() -> None:
    async def scenario() -> None:
        async with cluster(ok) as c, admin(c) as ask:
            url = c.mocks[0].url
            assert (await ask("POST", "/admin/replicas", {"url": f"{url}/v1"})).status == 400  # there already
            assert (await ask("POST", "/admin/drain", {"url": f"{url}/v1/"})).json["name"] == url

    run(scenario)


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
            code, answer = 200, slices(("127.0.0.1", True), port=target.port)
            await until(lambda: len(c.router.registry) == 1)
            following.cancel()

    run(scenario)


def test_kubernetes_needs_a_pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(InputError, match="not inside a cluster"):
        KubernetesSource("ns/vllm", tmp_path)
    with pytest.raises(InputError, match="namespace/service:port"):
        KubernetesSource("ns/vllm:http", tmp_path)


def test_a_shadow_that_fails_harms_nobody() -> None:
    async def scenario() -> None:
        async with cluster(ok, shadow="other") as c:
            shadow = c.router.decisions._shadow
            shadow.rule = lambda excluded: 1 / 0  # type: ignore[union-attr]
            assert (await c.ask()).status == 200
            assert c.router.metrics.shadow_failures == {"other": 1}
            shadow.rule = lambda excluded: HOLD  # type: ignore[union-attr]
            assert (await c.ask()).status == 200
            assert c.router.metrics.shadow_decisions == {("other", "hold"): 1}

    run(scenario)
