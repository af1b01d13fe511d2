"""`pointsman report`, on a routing run of seconds and on the fake problem of tests/training."""

from __future__ import annotations

import json
import shutil
import webbrowser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from report.pages import check_page, figures_of

from pointsman.cli.main import main

from .conftest import Cli
from .test_bad_input import check

ROUTING = """\
env: {kind: routing, scenarios: [steady-chat], max_replicas: 4, decisions: 40, warmup_requests: 50,
      evaluation: {seeds: 1}}
network: {kind: attention, width: 8, depth: 1, heads: 2}
ppo: {minibatch_size: 64}
run: {seed: 1, steps: 1280, num_envs: 8, rollout_steps: 16, settle_steps: 8, headroom_steps: 8,
      evaluate_every: 5, average_updates: 2}
"""
FAKE = """\
env: {kind: training.fakes}
network: {width: 8, depth: 1}
ppo: {minibatch_size: 128}
run: {steps: 5120, num_envs: 32, rollout_steps: 16, settle_steps: 8, headroom_steps: 4, evaluate_every: 2}
"""
pytestmark = pytest.mark.xdist_group("report")  # the runs are trained once

TRAINING = ["Learning", "Exploration", "Reward", "What the policy looks at", "Time", "How to reproduce it"]


def train(config: str, folder: Path) -> Path:
    path = folder / "config.yaml"
    path.write_text(config)
    assert main(["train", str(path), "--out", str(folder / "run")]) == 0
    return folder / "run"


@pytest.fixture(scope="module")
def routing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(ROUTING, tmp_path_factory.mktemp("routing"))


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[1]))
        return train(FAKE, tmp_path_factory.mktemp("fake"))


def test_a_run_that_gained_nothing_is_not_green(cli: Cli, fake: Path, tmp_path: Path) -> None:
    """Whatever the policy it started from is worth."""
    folder = shutil.copytree(fake, tmp_path / "clone")
    evaluations = json.loads((folder / "evaluation.json").read_text())
    best = evaluations["best"] | {"update": 0, "eval_score": 5.0, "eval_mean_return": 5.0}
    best |= {f"eval_block{k}_return": 5.0 + k / 100 for k in range(4)}
    (folder / "evaluation.json").write_text(json.dumps(evaluations | {"best": best}))
    verdict = cli("report", folder, "--json").json["verdict"]
    assert verdict["tone"] == "unclear"
    assert (
        verdict["sentence"] == "Training gained nothing: the best policy of clone is the one it started from."
    )
    assert verdict["details"][0].startswith("clone beats first")


@pytest.fixture
def run(routing: Path, tmp_path: Path) -> Path:
    return shutil.copytree(routing, tmp_path / "run")


def test_the_page_of_a_routing_run(cli: Cli, run: Path, tmp_path: Path) -> None:
    figures = tmp_path / "new" / "figures"
    result = cli("report", run, "--seeds", 2, "--figures", figures, "--threads", 1)
    assert (result.status, result.err) == (0, "")
    assert result.out.startswith("run ") and f"report      {run}/report.html" in result.out
    html = (run / "report.html").read_text()
    page = check_page(html)
    compared = ["Against today's policies", "Percentiles by scenario", "Latency", "Every metric"]
    assert page.titles == ["Findings", *compared, "Load of the replicas", *TRAINING]
    assert html.index('class="verdict') < html.index("<h2>")
    assert "2 seeds (1000–1001) that nothing was trained or selected on" in html
    for title in (
        "Time to first token",
        "steady-chat, run",
        "steady-chat, least-outstanding",
        "Attention, head 2",
    ):
        assert f'aria-label="{title}"' in html
    written = sorted(path.name for path in figures.iterdir())
    assert len(written) == 2 * len(figures_of(html)) > 40
    assert "time-to-first-token.png" in written
    for path in figures.glob("*.svg"):
        ElementTree.parse(path)
    for path in figures.glob("*.png"):
        assert path.read_bytes().startswith(b"\x89PNG")


def test_a_policy_that_is_worse_is_called_worse(cli: Cli, run: Path) -> None:
    """Ten updates from random weights leave it behind the heuristics: the verdict must not flatter it."""
    result = cli("report", run, "--seeds", 4, "--json").json
    ratios = result["results"]["geometric_mean_against"]["least-outstanding"]
    headlines = ("ttft_mean_s", "ttft_p99_s", "e2e_mean_s", "e2e_p99_s", "cost")
    better = [name for name in headlines if ratios[name]["high"] < 1]
    worse = [name for name in headlines if ratios[name]["low"] > 1]
    verdict = result["verdict"]
    assert worse or better, "else this test says nothing"
    assert ("worse" in verdict["sentence"]) == bool(worse)
    assert (" beats " in verdict["sentence"]) == bool(better)
    assert verdict["tone"] != "better" or not worse
    assert Path(result["report"]).is_file() and result["results"]["seeds"] == list(range(1000, 1004))


def test_another_problem_has_its_own_evaluations(
    cli: Cli, fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))
    out = tmp_path / "results" / "report.html"
    result = cli("report", fake, "--out", out.parent, "--open")
    assert (result.status, result.err) == (0, "")
    assert opened == [out.as_uri()]
    html = out.read_text()
    assert check_page(html).titles == ["Findings", *TRAINING]
    assert "on the seeds that chose this checkpoint" in html
    assert "against first:" in html or "first: score" in html
    assert not (fake / "report.html").exists()


def test_a_run_of_another_version_still_gets_its_curves(cli: Cli, run: Path) -> None:
    path = run / "config.yaml"
    path.write_text(path.read_text().replace("objective: balanced", "objective: nosuch"))
    result = cli("report", run)
    assert result.status == 0
    assert "missing     no judgement on report seeds (" in result.out
    html = (run / "report.html").read_text()
    assert "Evaluations during training" in html and "nosuch" in html


def test_a_damaged_checkpoint_costs_only_what_needs_it(cli: Cli, run: Path) -> None:
    (run / "checkpoints" / "best.safetensors").write_bytes(b"nothing")
    result = cli("report", run)
    assert result.status == 0
    assert "missing     no judgement on report seeds (" in result.out
    assert "What the policy looks at" not in check_page((run / "report.html").read_text()).titles


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nosuch"], "RUN = 'nosuch': does not exist; name a directory that `pointsman train` made"),
        (["."], "RUN = '.': has no config.yaml, progress.csv, meta.json"),
        (["run", "--seeds", 0], "--seeds = 0: is out of range"),
        (["run", "--out", "run/config.yaml"], "--out = 'run/config.yaml/report.html': lies under a file"),
        (["run", "--figures", "run/config.yaml"], "--figures = 'run/config.yaml': is a file"),
        (["run", "--threads", -1], "--threads = -1: is negative"),
    ],
)
def test_bad_input_is_one_line(
    cli: Cli, run: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[object], message: str
) -> None:
    monkeypatch.chdir(run.parent)
    check(cli("report", *arguments), message)
    assert not (run / "report.html").exists()
