"""The user's own file from training to report: the same one that `compare` reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pointsman.files import digest_of

from .conftest import Cli

SMALL = (
    *("--steps", 512, "--set", "run.num_envs=16", "--set", "run.rollout_steps=16", "--set", "run.workers=1"),
    *("--set", "env.decisions=60", "--set", "env.warmup_requests=40", "--set", "warm_start.decisions=1024"),
    *("--set", "warm_start.trial_steps=32"),
    *(
        "--set",
        "run.settle_steps=16",
        "--set",
        "run.headroom_steps=4",
        "--set",
        "ppo.critic_first=0",
        "--set",
        "ppo.minibatch_size=128",
    ),
    *("--set", "network.width=8", "--set", "env.evaluation.seeds=2"),
)


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three unequal replicas and a recording of 900 requests."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    times = np.cumsum(rng.exponential(0.05, 900))
    rows = [
        json.dumps({"arrived_at": t, "num_prefill_tokens": int(p), "num_decode_tokens": int(d)})
        for t, p, d in zip(times, rng.integers(20, 3000, 900), rng.integers(1, 200, 900), strict=True)
    ]
    (tmp_path / "traffic.jsonl").write_text("\n".join(rows) + "\n")
    path = tmp_path / "mine.yaml"
    path.write_text(
        "workload: {trace: traffic.jsonl}\n"
        "cluster: {model: Llama-3.1-8B, replicas: [{device: A100-80, count: 2}, {device: A40}]}\n"
        "slo: {ttft_s: 0.5, tpot_s: 0.05}\n"
    )
    return path


def test_a_short_trace_is_judged_at_its_own_load_and_said_to_be_short(cli: Cli, mine: Path) -> None:
    """Its first block is the busiest: twice as busy as the servers could bear, and no reason to add some."""
    lines = (mine.parent / "traffic.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    for row in rows[720:750]:
        row["arrived_at"] = rows[720]["arrived_at"] + 0.1 * (row["arrived_at"] - rows[720]["arrived_at"])
    (mine.parent / "traffic.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    at = ("--set", "workload.trace.load=0.7")
    result = cli("evaluate", "least-work", mine, "--against", "least-outstanding", *at, "--json")
    (comparison,) = result.json["comparisons"]
    assert comparison["setting"]["load"] < 1
    assert not any("add servers" in line for line in result.json["verdict"]["details"])
    assert "warning: mine: the trace lasts " in result.err and "use a longer trace" in result.err
    assert any("use a longer trace" in text for text in result.json["warnings"])


def test_train_evaluate_explain_and_report_on_one_file(cli: Cli, mine: Path) -> None:
    run = mine.parent / "runs" / "mine-1"
    trained = cli("train", mine, "--preset", "quick", *SMALL)
    assert trained.status == 0, trained.err
    parts = (
        "traffic.jsonl: training by requests 1 to 540, selection by requests 541 to 720, "
        "report by requests 721 to 900"
    )
    assert parts in trained.err
    assert json.loads((run / "meta.json").read_text())["traffic"] == {str(mine): parts}
    assert "max_replicas: 3" in (run / "config.yaml").read_text()

    judged = cli("evaluate", run, "--against", "least-outstanding", "--json")
    assert judged.status == 0, judged.err
    (one,) = judged.json["comparisons"]
    assert one["name"] == "mine"
    assert "80 to 100 % of traffic.jsonl, kept for the report" in one["what"]
    named = cli("evaluate", run, "--scenario", mine, "--against", "least-outstanding", "--json").json
    assert named["comparisons"] == judged.json["comparisons"]

    assert cli("explain", run, "--decisions", 64, "--json").json["scenarios"] == [str(mine)]
    report = cli("report", run, "--seeds", 2, "--json")
    assert report.status == 0, report.err
    assert not [problem for problem in report.json["missing"] if "judgement" in problem]
    assert [one["name"] for one in report.json["results"]["comparisons"]] == ["mine"]
    page = (run / "report.html").read_text()
    assert "Means over 2 blocks of traffic.jsonl (8 replays of each)" in page
    assert "the same arrivals, those kept for the report" in page


def test_a_mix_of_files_and_scenarios(cli: Cli, mine: Path) -> None:
    other = mine.with_name("other.yaml")
    other.write_text(
        "workload: {arrivals: {kind: poisson, load: 0.7}, lengths: azure-code, requests: 100}\n"
        "cluster: {replicas: 2}\n"
    )
    out = mine.parent / "mix"
    names = (mine, other, "--scenario", "light-chat")
    trained = cli(
        "train", *names, *SMALL, "--set", "run.steps=256", "--set", "run.minutes=null", "--out", out
    )
    assert trained.status == 0, trained.err
    header = (out / "progress.csv").read_text().splitlines()[0]
    for name in ("mine", "other", "light-chat"):
        assert f"eval_cost/{name}" in header


def test_tune_searches_one_part_and_is_checked_on_another(cli: Cli, mine: Path, tmp_path: Path) -> None:
    result = cli("tune", mine, "--decisions", 4000, "--json")
    assert result.status == 0, result.err
    assert "training by requests 1 to 540" in result.err
    assert result.json["made"]["situations"] == ["mine"]


def test_a_scenario_may_be_a_file_wherever_one_is_named(cli: Cli, mine: Path) -> None:
    small = ("--set", "workload.requests=60")
    assert cli("simulate", "--scenario", mine, *small, "--json").json["config"]["slo"]["ttft_s"] == 0.5
    compared = cli("compare", "--scenario", mine, *small, "--policies", "random", "--seeds", 1, "--json")
    assert compared.json["comparisons"][0]["name"] == "mine"
    assert cli("capacity", "--scenario", mine, "--json").status == 0


def test_a_key_means_the_same_to_every_command(
    cli: Cli, mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `train` changed by --set is what it learns on, and where the policy is judged."""
    from pointsman.config import Config
    from pointsman.evaluation.problem import make_env, make_evaluate
    from pointsman.inference.checkpoint import NetworkSpec, save_checkpoint
    from pointsman.training.config import TrainConfig
    from pointsman.training.networks import build_network, to_checkpoint

    asked: list[TrainConfig] = []

    def start(config: TrainConfig, *others: object) -> None:
        asked.append(config)
        raise KeyboardInterrupt

    monkeypatch.setattr("pointsman.training.runs.start", start)
    changes = ["cluster.replicas=5", "slo.ttft_s=0.25"]
    options = [part for change in changes for part in ("--set", change)]
    assert cli("train", mine, *options, "--set", "env.decisions=10", "--out", tmp_path / "run").status == 130
    (section,) = (config.env for config in asked)
    assert section["changes"] == changes
    env = make_env(section, 1)
    assert env.metadata["traces"] == [digest_of(mine.parent / "traffic.jsonl")]
    assert env.reset(0).entity_mask.sum() == 5 and env.metadata["slo"]["ttft_s"] == 0.25
    selected = make_evaluate(section)._prepared[0].config  # type: ignore[attr-defined]
    assert selected.cluster.num_replicas == 5 and selected.slo.ttft_s == 0.25

    path = tmp_path / "policy.safetensors"
    spec = NetworkSpec(width=8, privileged_critic=False)
    save_checkpoint(path, to_checkpoint(build_network(spec, env.space, seed=0), env.metadata))
    for more, num_replicas in (((), 5), ((mine,), 3), (("--set", "cluster.replicas=4"), 4)):
        judged = cli("evaluate", path, *more, "--against", "random", "--seeds", 1, "--json")
        (one,) = judged.json["comparisons"]
        assert Config.model_validate(one["configs"][0]).cluster.num_replicas == num_replicas


def test_a_suite_is_a_mix(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pointsman.experiments.scenarios import SUITES

    asked: list[tuple[str, ...]] = []

    def start(config: Any, *others: object) -> None:
        asked.append(tuple(config.env["scenarios"]))
        raise KeyboardInterrupt

    monkeypatch.setattr("pointsman.training.runs.start", start)
    assert cli("train", "--suite", "prefixes", "--out", tmp_path / "run").status == 130
    assert asked == [SUITES["prefixes"]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--set", "seed=3"), "--set seed = '3': this command has seeds of its own"),
        (("--set", "workloads.requests=3"), "workloads = {'requests': 3}: unknown key"),
        (("--scenario", "random", "--set", "slo.ttft_s=1"), "env.changes = 'slo.ttft_s=1': `random` draws"),
        (("--suite", "generalisation"), "is there to see how policies generalise, not to train on"),
        (("--suite", "all", "--scenario", "light-chat"), "--suite = 'all': given beside --scenario"),
    ],
)
def test_what_cannot_be_trained_on_is_one_line(cli: Cli, options: tuple[str, ...], message: str) -> None:
    result = cli("train", *options, *SMALL, "--out", "nowhere")
    assert result.status == 2 and message in result.err


def test_traffic_of_ones_own_learns_on_from_default() -> None:
    """Unless another beginning is asked for; scenarios of ours begin by imitating heuristics."""
    from pointsman.cli.training_source import own_preset
    from pointsman.training.config import load_train_config

    assert own_preset(None, ["mine.yaml"], []) == own_preset("quick", ["mine.yaml", "random"], []) == "own"
    assert own_preset("quick", ["mine.yaml"], ["network.width=32"]) == "quick"
    assert own_preset("generalist", ["mine.yaml"], []) == "generalist"
    assert own_preset(None, ["steady-chat"], []) is None
    config = load_train_config("own")
    assert config.run.start_from is not None and config.warm_start is None
    assert config.run.start_from.startswith("default,default-mean")
