"""Who gets in, who commands, and that no key or prompt is ever written down."""

from __future__ import annotations

import hmac
import io
import json
from pathlib import Path

import pytest

from pointsman.errors import InputError
from pointsman.router.http.messages import RequestHead
from pointsman.router.keys import ADMIN, CLIENT, Keys, read_keys
from pointsman.router.logs import Log
from pointsman.router.telemetry.recording import Recorder, new_recording
from tests.router.harness import CHAT, SECRET, admin, cluster, get, post, run
from tests.router.mock import ok, reset

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
