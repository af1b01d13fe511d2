"""Commands where extras are not installed: they work, or say in one line which extra they need."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main

from pointsman.cli.main import app
from pointsman.errors import EXTRAS

from .factories import ROOT

NOWHERE = "http://127.0.0.1:9"
LOG = "update,eval_score,entropy,approx_kl\n" + "".join(f"{i},{i},0.5,0.01\n" for i in range(40))
SMALL = ("--set", "workload.requests=60")
EVERY_PACKAGE = [package for packages in EXTRAS.values() for package in packages]

# What to call, by name: which extra each call needs (or why it fails all the same), and its arguments.
CALLS: dict[str, list[tuple[str | None, tuple[str, ...]]]] = {
    "simulate": [(None, SMALL)],
    "compare": [
        (None, ("--seeds", "1", "--policies", "least-work,default", *SMALL)),
        (None, ("--env", "jobs", "--seeds", "2", "--policies", "fifo,sjf")),
        ("vidur", ("--env", "vidur")),
    ],
    "evaluate": [
        (None, ("default", "--seeds", "1", "--against", "least-work", "--scenario", "steady-chat", *SMALL)),
        ("serve", ("default", "--live", NOWHERE, *SMALL)),
    ],
    "tune": [(None, ("--scenario", "steady-chat", "--decisions", "2000", *SMALL, "--out", "tuned.yaml"))],
    "train": [
        ("train", ("--preset", "quick", "--out", "run")),
        ("train", ("--env", "jobs", "--out", "run")),
        ("train", ("--live", NOWHERE, "--out", "run")),
    ],
    "sweep": [("train", ("--search", "network.width=32,64", "--out", "sweep"))],
    "watch": [(None, ("run",))],
    "diagnose": [(None, ("progress.csv",))],
    "report": [(None, ("run",))],
    "explain": [(None, ("default", "--decisions", "64"))],
    "audit-features": [(None, ("--env", "jobs", "--decisions", "500"))],
    "capacity": [(None, SMALL)],
    "config": [(None, ("cluster.replicas",))],
    "plan": [(None, ("--seeds", "1", "--policies", "least-outstanding", *SMALL))],
    "serve": [("serve", ("--backend", NOWHERE))],
    "epp": [("epp", ("--backend", NOWHERE))],
    "emulate": [("serve", ("--port", "0"))],
    "doctor": [("serve", ("--backend", NOWHERE))],
    "demo-serve": [("serve", ())],
    "calibrate": [
        ("serve", ("--url", NOWHERE)),
        ("has no column first_token_at", ("--traffic", "arrivals.csv")),
    ],
    "profile": [("train", ())],
    "scenarios": [(None, ())],
    "policies": [(None, ()), (None, ("--env", "jobs"))],
    "hardware": [(None, ())],
}

HIDDEN = """
import contextlib, io, json, sys, traceback

class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in hidden:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

hidden, calls = json.loads(sys.argv[1])
sys.meta_path.insert(0, Hide())
from pointsman.cli.main import main

for call in calls:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main(call)
        except BaseException:
            status = traceback.format_exc()
    print(json.dumps([status, err.getvalue()]))
"""


def results_without(packages: list[str], calls: list[list[str]], folder: Path) -> list[list[Any]]:
    """Status (or traceback) and what was said, of each call."""
    command = [sys.executable, "-c", HIDDEN, json.dumps([packages, calls])]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "progress.csv").write_text(LOG)
    (tmp_path / "arrivals.csv").write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n0,1,1\n")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "progress.csv").write_text(LOG)
    (tmp_path / "run" / "config.yaml").write_text("env: routing\nrun: {steps: 40}\n")
    for path in [*(tmp_path / "run").iterdir(), tmp_path / "run"]:
        os.utime(path, (0, 0))  # else `watch` waits whether more comes
    return tmp_path


def test_every_command_is_called() -> None:
    assert set(CALLS) == set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


def test_every_command_works_or_names_its_extra(folder: Path) -> None:
    cases = [(extra, [name, *rest]) for name, calls in CALLS.items() for extra, rest in calls]
    found = results_without(EVERY_PACKAGE, [call for _, call in cases], folder)
    for (extra, call), (status, err) in zip(cases, found, strict=True):
        if extra is None:
            assert status == 0, (call, status, err)
        else:
            assert status == 2, (call, status, err)
            if extra not in EXTRAS:
                assert extra in err
                continue
            assert err.endswith(f"is not installed; pip install 'pointsman[{extra}]'\n"), (call, err)
            assert err.count("\n") == 1


def test_a_run_without_tensorboard_is_refused_before_it_begins(folder: Path) -> None:
    ((status, err),) = results_without(["tensorboard"], [["train", "--preset", "quick"]], folder)
    assert (status, err) == (
        2,
        "error: package = 'tensorboard': is not installed; pip install 'pointsman[train]'\n",
    )
    assert not (folder / "runs").exists()
