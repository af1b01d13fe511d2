"""GPU jobs from the command line: train, evaluate, compare, explain, audit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pointsman.cli.training_source import source_of
from pointsman.errors import InputError
from pointsman.training.config import load_train_config, to_yaml

from .conftest import Cli

SMALL = ("--set", "env.workload.num_jobs=20", "--set", "env.window=6", "--set", "env.num_gpus=4")
SHORT = (
    "--set",
    "run.headroom_steps=20",
    "--set",
    "run.settle_steps=20",
    "--set",
    "env.evaluation.episodes=2",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from pointsman.cli.main import main

    folder = tmp_path_factory.mktemp("runs") / "mine"
    arguments = ["train", "--env", "jobs", "--steps", 2048, "--out", folder, *SMALL, *SHORT]
    assert main([str(argument) for argument in arguments]) == 0
    return folder


def test_training_leaves_a_run(run: Path) -> None:
    config = load_train_config(run / "config.yaml")
    assert config.env["kind"] == "jobs"
    assert config.env["num_gpus"] == 4
    header = (run / "progress.csv").read_text().splitlines()[0].split(",")
    wanted = {"invalid_frac", "noop_frac", "eval_block0_return", "eval_sjf_return", "eval_fifo_return"}
    wanted |= {f"reward/{name}" for name in ("completed", "holding", "noop", "finished", "unfinished")}
    wanted |= {"eval_random-feasible_return", "eval_min_block_return", "eval_noop_frac"}
    assert wanted <= set(header)


def test_evaluate_judges_by_returns_on_report_seeds(cli: Cli, run: Path, tmp_path: Path) -> None:
    out = tmp_path / "results"
    found = cli("evaluate", run, "--seeds", 40, "--json", "--out", out).json
    assert found["policy"] == "mine"
    assert (found["seeds"][0], len(found["seeds"])) == (1000, 40)
    assert found["env"]["window"] == 6
    assert list(found["policies"])[:2] == ["mine", "fifo"]
    assert len(found["policies"]) == 10
    mine = found["policies"]["mine"]
    assert mine["return"]["low"] < mine["return"]["mean"] < mine["return"]["high"]
    assert len(mine["blocks"]) == 2
    assert mine["worst_block"] == min(mine["blocks"])
    assert mine["means"]["invalid_frac"] == 0
    sjf = found["policies"]["sjf"]
    assert sjf["gain"]["mean"] == pytest.approx(mine["return"]["mean"] - sjf["return"]["mean"])
    assert "| mine" in (out / "table.md").read_text()
    assert sorted(path.name for path in out.iterdir()) == ["report.html", "results.json", "table.md"]


def test_evaluate_prints_a_table_that_fits(cli: Cli, run: Path) -> None:
    result = cli("evaluate", run, "--seeds", 20, "--against", "wide-and-short,sjf")
    assert (result.status, result.err) == (0, "")
    lines = result.out.splitlines()
    assert lines[0].startswith("mine ") and "sjf" in lines[0], "the answer comes first"
    header = next(row for row, line in enumerate(lines) if line.split()[:2] == ["policy", "return"])
    assert [line.split()[0] for line in lines[header + 2 : header + 5]] == ["mine", "wide-and-short", "sjf"]
    assert "Mean returns over 20 episodes (seeds 1000–1019)" in result.out
    assert max(map(len, lines)) <= 100


def test_evaluate_elsewhere_than_it_was_trained(cli: Cli, run: Path) -> None:
    """A wider window, more GPUs, all jobs at once: the network takes any number of them."""
    changes = ("--set", "window=12", "--set", "num_gpus=6", "--set", "workload.arrivals=all_at_zero")
    found = cli("evaluate", run, *changes, "--seeds", 10, "--json").json
    assert (found["env"]["window"], found["env"]["num_gpus"]) == (12, 6)
    assert found["policies"]["mine"]["means"]["invalid_frac"] == 0


def test_compare_heuristics_and_runs(cli: Cli, run: Path) -> None:
    found = cli("compare", "--env", "jobs", "--seeds", 20, "--json").json
    assert set(found["policies"]) == {
        "fifo",
        "sjf",
        "random-feasible",
        "smallest-work-first",
        "most-gpus-first",
        "wide-and-short",
        "easy-backfill",
        "best-fit",
        "priority-first",
    }
    means: dict[str, Any] = {name: one["return"]["mean"] for name, one in found["policies"].items()}
    assert max(means, key=means.__getitem__) == "wide-and-short"
    assert found["policies"]["sjf"]["gain"] is None
    settings = ("--set", "window=6", "--set", "num_gpus=4", "--set", "workload.num_jobs=20")
    arguments = ("--policies", f"{run},fifo", "--baseline", "fifo", "--seeds", 6, *settings)
    result = cli("compare", "--env", "jobs", *arguments)
    assert result.status == 0
    assert "more than fifo" in result.out
    answer, *_ = lines = result.out.splitlines()
    assert " returns most: " in answer
    header = next(row for row, line in enumerate(lines) if line.split()[:1] == ["policy"])
    assert [line.split()[0] for line in lines[header + 2 : header + 4]] == ["mine", "fifo"]


def test_heuristics_are_listed(cli: Cli) -> None:
    rows = {row["name"]: row["what"] for row in cli("policies", "--env", "jobs", "--json").json}
    assert rows["sjf"] == "the shortest that fits"
    assert "least-work" not in rows
    assert "wide-and-short" in cli("policies", "--env", "jobs").out


def test_explain_what_it_looks_at(cli: Cli, run: Path) -> None:
    found = cli("explain", run, "--decisions", 64, "--feature", "gpus", "--json").json
    assert found["scenarios"] == ["jobs"]
    assert {"duration", "width", "fit", "gpus", "queue", "clock"} <= {one["name"] for one in found["groups"]}
    assert found["dependence"][0]["part"] == "job"
    assert "How the probability of picking a job changes" in cli("explain", run, "--decisions", 64).out


def test_audit_features(cli: Cli) -> None:
    found = cli("audit-features", "--env", "jobs", "--decisions", 9000, "--json").json
    assert {one["part"] for one in found["features"]} == {"job", "context", "critic"}
    assert [one["name"] for one in found["features"] if one["flags"]] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["train", "--env", "job"],
            "--env = 'job': names no problem with a preset; known: jobs, live, routing",
        ),
        (["train", "--env", "jobs", "--preset", "quick"], "--preset = 'quick': given beside --env"),
        (["train", "--env", "jobs", "--objective", "mean"], "env.objective = 'mean': unknown key"),
        (["train", "--resume", ".", "--env", "jobs"], "--env = 'jobs': given beside --resume"),
        (["evaluate", "{run}", "--scenario", "mixed"], "--scenario = 'mixed': means nothing for jobs"),
        (["evaluate", "{run}", "--against", "lpt"], "--against = 'lpt': unknown policy; known: fifo, sjf"),
        (["evaluate", "{run}", "--against", "{run}"], "is the policy itself"),
        (["evaluate", "{run}", "--seeds", "0"], "--seeds = 0: is out of range"),
        (["evaluate", "{run}", "--set", "windows=3"], "env.windows = 3: unknown key; did you mean 'window'?"),
        (
            ["evaluate", "{run}", "--set", "num_gpus=5", "--set", "lookahead=per_gpu"],
            "mine = 5: was trained with 4 GPUs, and lookahead per_gpu tells of each by its place; train with",
        ),
        (["compare", "--env", "job"], "--env = 'job': unknown kind; did you mean 'jobs'?"),
        (["audit-features", "--env", "trains"], "--env = 'trains': unknown kind; kinds: jobs, live, routing"),
        (["compare", "--env", "jobs", "--baseline", "least-work"], "--baseline = 'least-work': unknown"),
        (
            ["compare", "--env", "jobs", "--set", "workload.trace=no.csv"],
            "trace file = 'no.csv': no such file",
        ),
        (
            ["compare", "--policies", "{run}"],
            "sees duration, priority, gpus, …': was trained for another problem; name",
        ),
        (["explain", "{run}", "--scenario", "mixed"], "means nothing for jobs"),
        (
            ["explain", "{run}", "--feature", "gpu"],
            "--feature = 'gpu': unknown feature; did you mean 'gpus'?",
        ),
        (["audit-features", "--env", "jobs", "--policies", "lpt"], "--policies = 'lpt': unknown heuristic"),
    ],
)
def test_bad_input_is_one_line(cli: Cli, run: Path, arguments: list[str], message: str) -> None:
    result = cli(*(argument.replace("{run}", str(run)) for argument in arguments))
    assert result.status == 2
    assert len(result.err.splitlines()) == 1
    assert message in result.err
    assert not result.out


def test_each_problem_has_its_preset() -> None:
    assert source_of(None, None, None) == source_of(None, None, "routing") == "quick"
    assert source_of(None, None, "jobs") == "jobs"
    with pytest.raises(InputError, match=r"CONFIG = 'a\.yaml': given beside --env"):
        source_of(Path("a.yaml"), None, "jobs")


MY_JOBS = """\
env: {kind: jobs, num_gpus: 64, workload: {max_duration_s: 86400}}
ppo: {learning_rate: {kind: piecewise, points: [[0, 0.001], [1, 0.0001]]}}
run: {minutes: 3}
"""


def test_a_file_of_your_own_builds_on_the_preset(tmp_path: Path) -> None:
    path = tmp_path / "my-jobs.yaml"
    path.write_text(MY_JOBS)
    mine, preset = load_train_config(path), load_train_config("jobs")
    assert mine.env == preset.env | {"num_gpus": 64, "workload": mine.env["workload"]}
    assert mine.env["workload"]["max_duration_s"] == 86400
    assert (mine.network, mine.exploration) == (preset.network, preset.exploration)
    assert mine.ppo == preset.ppo.model_copy(update={"learning_rate": mine.ppo.learning_rate})
    assert mine.ppo.learning_rate.value(1.0) == 0.0001
    assert mine.run == preset.run.model_copy(update={"minutes": 3.0, "steps": None})


def test_a_file_may_name_the_problem_alone(tmp_path: Path) -> None:
    path = tmp_path / "jobs.yaml"
    path.write_text("env: jobs\n")
    assert load_train_config(path) == load_train_config("jobs")


def test_a_resolved_configuration_does_not_change_with_the_preset(tmp_path: Path) -> None:
    """A run goes on with what it was begun with, whatever the preset says by then."""
    path = tmp_path / "config.yaml"
    old = load_train_config("jobs", ["exploration.temperature=2.0", "run.steps=null", "run.minutes=7"])
    path.write_text(to_yaml(old))
    assert load_train_config(path) == old


def test_a_file_for_routing_starts_from_the_defaults(tmp_path: Path) -> None:
    """Its presets are each for one kind of traffic, and none is for all."""
    path = tmp_path / "mine.yaml"
    path.write_text("env: {kind: routing, scenarios: [steady-chat]}\nrun: {minutes: 1}\n")
    assert load_train_config(path).warm_start is None


def test_routing_does_not_learn_on_from_a_policy_for_jobs(cli: Cli, run: Path, tmp_path: Path) -> None:
    small = ("run.num_envs=2", "run.headroom_steps=0", "run.workers=1", "ppo.minibatch_size=2")
    changes = (part for change in small for part in ("--set", change))
    result = cli("train", "--start-from", run, "--steps", 10, "--out", tmp_path / "mine", *changes)
    assert result.status == 2
    problem = (
        "error: run.start_from = 'a network that sees duration, priority, gpus, …': was trained for another"
    )
    assert result.err.splitlines()[-1].startswith(problem)


def test_schedulers_of_jobs_learn_on_from_one_policy(cli: Cli, run: Path, tmp_path: Path) -> None:
    both = f"{run},{run}"
    result = cli("train", "--env", "jobs", "--start-from", both, "--steps", 10, "--out", tmp_path / "mine")
    assert result.status == 2
    assert result.err.splitlines()[-1].endswith("are several, and env.kind jobs does not choose; name one")
