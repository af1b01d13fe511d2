"""Ctrl-C ends every command at once, also in the middle of compiled code that would run for minutes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from .factories import ROOT

# 10^9 steps of a server that answers one request at a time.
ENDLESS = (
    *("--set", "workload.lengths={kind: fixed, prompt: 1, output: 100000}"),
    *("--set", "workload.arrivals={kind: poisson, rate: 1}"),
    *("--set", "workload.requests=10000", "--set", "cluster.scheduler.max_num_seqs=1"),
)
COMMANDS = {
    "simulate": ("simulate", *ENDLESS),
    "compare on one thread": ("compare", *ENDLESS, "--threads", "1"),
    "compare on two threads": ("compare", *ENDLESS, "--threads", "2"),
    "tune": ("tune", *ENDLESS),
    "capacity": ("capacity", *ENDLESS[:2], *ENDLESS[-2:]),
    "evaluate": ("evaluate", "least-work", *ENDLESS),
    "compare of jobs": ("compare", "--env", "jobs", "--set", "workload.num_jobs=100000", "--seeds", "200"),
}
BUSY_S = 5.0  # of processor time: start-up takes two
MAX_SHUTDOWN_S = 1.5  # of processor time: others may use this machine, too


def processor_s(pid: int) -> float:
    """User and system time of all threads so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_ctrl_c_while_the_command_is_still_imported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from pointsman.__main__ import main

    class Impatient:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "pointsman.cli.main":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "pointsman.cli.main", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Impatient(), *sys.meta_path])
    assert main() == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_ctrl_c_ends_compiled_code(command: tuple[str, ...], tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "pointsman", *command],
        cwd=ROOT,
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},  # no capacity is remembered
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 120
        while processor_s(process.pid) < BUSY_S and time.monotonic() < deadline:
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)
        before_s = processor_s(process.pid)
        process.send_signal(signal.SIGINT)
        _, status, used = os.wait4(process.pid, 0) if _ends(process) else (0, 0, None)
    finally:
        process.kill()
    assert used is not None, "it did not end"
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 130
    assert used.ru_utime + used.ru_stime - before_s < MAX_SHUTDOWN_S
    assert process.stdout is not None and process.stderr is not None
    with process.stdout, process.stderr:
        assert process.stdout.read() == ""
        assert process.stderr.read().splitlines()[-1:] == ["interrupted"]


def _ends(process: subprocess.Popen[str]) -> bool:
    """Whether it ends within half a minute, left for `wait4` to be asked about."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        found = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is not None:
            return True
        time.sleep(0.02)
    return False
