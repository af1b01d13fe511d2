"""README and docs: every command exists with its options, every configuration is valid, and what can run here
in seconds runs, on shorter traffic.
"""

from __future__ import annotations

import ast
import importlib
import json
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import typer.main
import yaml

from pointsman.cli.main import app, main

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]

# Why a documented command is not run here.
NOT_RUN = {
    r"http://|URL|…|\bserve\b|\bemulate\b|demo-serve": "needs servers",
    r"calibrate|profile": "needs a GPU or servers",
    r"\bwatch\b": "does not end by itself",
    r"generalist|--suite all": "takes minutes or hours",
    r"--resume": "needs a run that was stopped",
    r"--ray\b": "needs Ray: tests/workers/test_ray.py does",
    r"runs/jobs|--env jobs|jobs\.csv": "tests/cli/test_jobs.py does",
    r"runs/first|train --preset quick|train mine": "the same as with runs/mine",
    r"\bsweep\b": "tests/cli/test_sweep.py does",
    r"--env vidur|runs/vidur": "needs Vidur: tests/integrations/test_vidur_problem.py does",
    r"tensorboard/PPO_1": "other people's logs",
}
SHORT = {
    "simulate": ["--set", "workload.requests=100"],
    "compare": ["--seeds", "2"],
    "plan": ["--policies", "late-binding"],
    "evaluate": ["--seeds", "2"],
    "report": ["--seeds", "2"],
    "tune": ["--decisions", "2000"],
    "explain": ["--decisions", "64"],
    "audit-features": ["--decisions", "200"],
}
SHORT["train"] = [
    part
    for change in (
        *("run.num_envs=16", "run.rollout_steps=16", "run.rollout_lifetimes=null", "run.workers=1"),
        *("run.steps=2560", "run.minutes=null", "run.settle_steps=16", "run.headroom_steps=4"),
        *("env.decisions=60", "env.warmup_requests=40", "env.evaluation.seeds=2", "network.width=8"),
        *(
            "warm_start.decisions=1024",
            "warm_start.trial_steps=32",
            "ppo.minibatch_size=128",
            "ppo.critic_first=0",
        ),
    )
    for part in ("--set", change)
]


def blocks(page: Path, language: str = r"\w*") -> list[str]:
    found = re.findall(rf"^```(?:{language})\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    return [block.replace("\\\n", " ") for block in found]


def block_commands() -> list[str]:
    """Lines of code blocks that call `pointsman`, each once, in the order in which a reader meets them."""
    lines = [line for page in PAGES for block in blocks(page) for line in block.splitlines()]
    calls = (re.match(r"(?:\$ )?(?:\.venv/bin/)?(pointsman .*)", line) for line in lines)
    return list(dict.fromkeys(call[1].partition("  #")[0].strip() for call in calls if call))


def mentions() -> list[tuple[Path, str]]:
    """Commands in running text, too."""
    inline = [(page, span) for page in PAGES for span in re.findall(r"`(pointsman [^`]+)`", page.read_text())]
    return [*inline, *((PAGES[0], command) for command in block_commands())]


def test_documented_commands_and_options_exist() -> None:
    problems = []
    for page, text in mentions():
        name = text.split()[1]
        if name.startswith(("-", "KEY", "…")):
            continue
        if name not in COMMANDS:
            problems.append(f"{page.name}: no command {name!r} ({text})")
            continue
        known = {option for one in COMMANDS[name].params for option in one.opts} | {"--help"}
        asked = re.findall(r"(?<!\S)--[a-z][a-z-]*", text.partition(" | ")[0])
        problems += [f"{page.name}: {name} has no {one}" for one in asked if one not in known]
    assert problems == []
    assert len(mentions()) > 60


def test_documented_configurations_are_valid(tmp_path: Path) -> None:
    from pointsman.config import Config
    from pointsman.spec import parse_spec
    from pointsman.training.config import load_train_config

    kinds = []
    for page in PAGES:
        for block in blocks(page, "yaml"):
            data = yaml.safe_load(block)
            if "env" in data:
                path = tmp_path / "train.yaml"
                path.write_text(block)
                load_train_config(path)
                kinds.append("train")
            elif "backends" not in data:
                parse_spec(Config, {"workload": {"trace": "trace.csv"}} | data)
                kinds.append("cluster")
    assert kinds.count("cluster") >= 4 and "train" in kinds


def why_not(command: str) -> str | None:
    return next((why for pattern, why in NOT_RUN.items() if re.search(pattern, command)), None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a reader has: the files of README and docs, and their traffic."""
    folder = tmp_path_factory.mktemp("reader")
    rng = np.random.default_rng(0)
    times = np.cumsum(rng.exponential(0.05, 300)).tolist()
    sizes = list(
        zip(times, rng.integers(20, 900, 300).tolist(), rng.integers(2, 60, 300).tolist(), strict=True)
    )
    rows = [f"{1714557600 + t:.3f},{prompt},{output}" for t, prompt, output in sizes]
    (folder / "my-traffic.csv").write_text("\n".join(["created,prompt_tokens,completion_tokens", *rows]))
    names = ("arrived_at", "num_prefill_tokens", "num_decode_tokens")
    (folder / "traffic.jsonl").write_text(
        "\n".join(json.dumps(dict(zip(names, row, strict=True))) for row in sizes)
    )
    for page in PAGES:
        for block in blocks(page, "yaml"):
            named = re.match(r"# (\S+\.yaml)", block)
            if named is not None:
                (folder / named[1]).write_text(block)
    shutil.copytree(ROOT / "docs", folder / "docs")
    return folder


def test_documented_commands_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of the pages: what one command writes, the next reads."""
    from pointsman.evaluation import steady, tune

    monkeypatch.chdir(folder)
    monkeypatch.setattr(steady, "FEWEST_REQUESTS", 50)
    monkeypatch.setattr(steady, "SHORTEST_S", 0.0)
    monkeypatch.setattr(steady, "RELAXATIONS", 0.0)
    monkeypatch.setattr(tune, "REQUESTS_PER_SCORE", 200)
    failed = [one for one in block_commands() if why_not(one) is None and not does_run(one, folder)]
    assert not failed


def does_run(command: str, folder: Path) -> bool:
    _, name, *arguments = shlex.split(command.replace(" --open", ""))
    if name == "train":  # several pages train the same run
        shutil.rmtree(folder / "runs", ignore_errors=True)
    if "progress.csv" in command:
        shutil.copy(folder / "runs" / "mine" / "progress.csv", folder)
    status = main([name, *arguments, *SHORT.get(name, [])])
    return status == 0 or (name == "diagnose" and status == 1)  # 1: it found something


_AWAIT = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT


def python_blocks(name: str) -> list[str]:
    return blocks(ROOT / "docs" / name, "python")


def test_documented_python_is_python_and_imports_what_there_is() -> None:
    """All of it; what needs no servers and no extra runs below."""
    found = [(page, block) for page in PAGES for block in blocks(page, "python")]
    for page, block in found:
        code = compile(block.replace(": …", ": ..."), page.name, "exec", ast.PyCF_ONLY_AST | _AWAIT)
        for one in ast.walk(code):
            if not isinstance(one, ast.ImportFrom) or not (one.module or "").startswith("pointsman."):
                continue
            try:
                module = importlib.import_module(one.module or "")
                for alias in one.names:
                    if not hasattr(module, alias.name):
                        importlib.import_module(f"{one.module}.{alias.name}")
            except ModuleNotFoundError as error:  # of an extra that is not installed
                assert not (error.name or "").startswith("pointsman"), f"{page.name}: {error}"
    assert len(found) >= 8


def test_documented_embedding_runs(tmp_path: Path) -> None:
    names = {"body": b"x" * 3000, "replicas": ["http://a:8000", "http://b:8000"], "worker_number": 2}
    first, second = python_blocks("embedding.md")
    exec(first, names)
    assert names["replica"] in ("http://a:8000", "http://b:8000")
    exec(second.replace("/dev/shm", str(tmp_path)), names)
    assert (tmp_path / "books").exists()


def test_documented_conversion_of_a_job_log_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = {"start_time": "2017-10-03 01:00:00", "end_time": "2017-10-03 02:00:00"}
    job = {
        "submitted_time": "2017-10-03 00:59:00",
        "attempts": [{**run, "detail": [{"gpus": ["0", "1"]}, {"gpus": ["0"]}]}],
    }
    (tmp_path / "cluster_job_log").write_text(json.dumps([job, {**job, "attempts": []}]))
    (block,) = python_blocks("jobs.md")
    exec(block, {})
    lines = (tmp_path / "philly.csv").read_text().split()
    assert lines == ["submitted_at,duration_s,gpus", "2017-10-03", "00:59:00,3600.0,3"]
