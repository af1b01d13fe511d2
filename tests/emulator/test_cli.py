"""`pointsman emulate` as a user meets it."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import urllib.request
from typing import Any

import pytest

from pointsman.cli.main import main


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--replicas", "0"], "--replicas = 0"),
        (["--replicas", "1000000"], "give 1 to 1,000"),
        (["--devices", "a100,abacus"], "abacus"),
        (["--devices", "a100,h100", "--replicas", "3"], "names 2 for 3"),
        (["--devices", ","], "devices"),
        (["--model", "llama-0"], "llama-0"),
        (["--time-scale", "0"], "time_scale"),
        (["--lengths", "endless"], "lengths"),
        (["--port", "70000"], "--port = 70000: is not a port"),
        (["--admin-port", "70000"], "--admin-port = 70000: is not a port"),
        (["--port", "65534", "--replicas", "3"], "use one up to 65533"),
        (["--host", "no such host"], "cannot listen on no such host"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["emulate", *arguments]) == 2
    said = capsys.readouterr().err
    assert complaint in said and said.count("\n") == 1


def test_a_port_in_use_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main(["emulate", "--replicas", "1", "--port", str(taken.getsockname()[1])]) == 2
    assert "port" in capsys.readouterr().err


def test_it_serves_until_it_is_told_to_stop() -> None:
    command = [
        sys.executable,
        "-m",
        "pointsman",
        "emulate",
        "--devices",
        "a100,h100",
        "--port",
        "0",
        "--json",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            said = read_json(process)
            assert len(said["replicas"]) == 2 and said["admin"].startswith("http://127.0.0.1:")
            for replica in said["replicas"]:
                with urllib.request.urlopen(replica["url"] + "/v1/models", timeout=10) as answer:
                    assert json.load(answer)["data"][0]["id"] == said["model"]
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=20) == 0
        finally:
            process.kill()


def read_json(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    lines: list[str] = []
    while not lines or lines[-1] != "}\n":
        lines.append(process.stdout.readline())
        assert lines[-1], "it ended"
    return json.loads("".join(lines))
