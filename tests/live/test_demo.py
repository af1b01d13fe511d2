from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pointsman.cli import demo
from tests.cli.conftest import Cli


def test_two_policies_are_compared(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "NUM_REQUESTS", 6)
    monkeypatch.setattr(demo, "LIVE_SEEDS", 1)
    result = cli("demo-serve")
    assert result.status == 0, result.err
    assert result.err.count("/dashboard") == 2
    for text in ("4 live servers of Llama-3.1-8B", "default", "least-outstanding", "TTFT P99"):
        assert text in result.out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_when_it_is_interrupted(number: signal.Signals) -> None:
    command = [sys.executable, "-m", "pointsman", "demo-serve"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while "least-outstanding: live page" not in process.stderr.readline():
            assert process.poll() is None
        children = _children(process.pid)
        assert len(children) == 3, "an emulator and two routers"
        process.send_signal(number)
        rest = process.communicate(timeout=60)[1]
        assert process.returncode == 130
        assert "Traceback" not in rest
    assert not [child for child in children if _is_alive(child)]


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _is_alive(pid: int) -> bool:
    """It, or another that got its number within the moment: give it one."""
    for _ in range(20):
        if not Path(f"/proc/{pid}").exists():
            return False
        time.sleep(0.05)
    return True
