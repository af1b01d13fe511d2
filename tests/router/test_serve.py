"""`pointsman serve`: what it refuses, and its life from the first request to SIGTERM."""

from __future__ import annotations

import asyncio
import io
import os
import re
import signal
from pathlib import Path

import pytest

from pointsman.cli.main import main
from pointsman.router import main as router_main
from pointsman.router.config import Settings
from pointsman.router.listening import Ports
from pointsman.router.main import Options, serve_forever
from tests.router.fakes import FakeDecider, FakeLedger
from tests.router.harness import Wire, post, run, until
from tests.router.mock import gated, mocks

BAD = {
    "no server": ([], "no server is named"),
    "not a URL": (["--backend", "a:8000"], "is not a URL"),
    "two sources": (["--dns", "http://a", "--kubernetes", "b"], "given beside"),
    "no such file": (["--backends", "nowhere.yaml"], "no such file"),
    "unknown setting": (
        ["--backend", "http://a", "--set", "holding.max_hold=1"],
        "did you mean 'max_hold_s'",
    ),
    "keys that cannot be read": (["--backend", "http://a", "--api-keys", "nowhere"], "cannot be read"),
}


@pytest.mark.parametrize(("arguments", "problem"), BAD.values(), ids=BAD)
def test_bad_input_is_one_line(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *arguments]) == 2
    said = capsys.readouterr().err
    assert problem in said
    assert len(said.strip().splitlines()) == 1


def test_settings_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--settings", "--set", "limits.max_body_bytes=77"]) == 0
    listed = capsys.readouterr().out
    assert re.search(r"limits.max_body_bytes +77 ", listed)
    assert "reliability.breaker_failures" in listed


def test_from_the_first_request_to_sigterm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = FakeLedger()
    monkeypatch.setattr(
        router_main, "live_books", lambda settings, seat: (ledger, lambda name: FakeDecider(ledger))
    )
    monkeypatch.setattr(router_main.gc, "freeze", lambda: None)
    said: list[str] = []

    async def scenario() -> None:
        async with mocks(gated) as (server,):
            options = Options(
                backends=[server.url],
                source=None,
                policy="fake",
                shadow=None,
                ports=Ports(port=0, admin_port=0),
                backend_key=None,
                backend_ca=None,
                record=tmp_path / "traffic.jsonl",
                logs_requests=True,
                settings=Settings(),
            )
            serving = asyncio.ensure_future(serve_forever(options, said.append, io.StringIO()))
            await until(lambda: len(said) == 2 or serving.done())
            port = int(said[0].split("/v1")[0].rpartition(":")[2])
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            wire = Wire(reader, writer)
            await wire.send(post())
            await until(lambda: len(server.heard) == 1)
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.05)
            assert not serving.done()
            server.gate.set()
            assert (await wire.answer()).status == 200
            await serving
            writer.close()
        assert '"outcome":"completed"' in (tmp_path / "traffic.jsonl").read_text()

    threshold = router_main.gc.get_threshold()
    try:
        run(scenario)
    finally:
        router_main.gc.set_threshold(*threshold)
