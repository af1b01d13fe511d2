from __future__ import annotations

import json
from pathlib import Path

import pytest
from routing.learned import make_run

from pointsman.report.evaluation import METRICS

from .conftest import Cli
from .factories import config_file
from .test_bad_input import check

SMALL = ("--set", "workload.requests=200", "--seeds", 3)
AGAINST = ("--against", "least-outstanding,random")

OF_PREFIXES = ("hit_share", "work_peak")  # which prompts of these scenarios do not share


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    path = tmp_path / "tuned.yaml"
    path.write_text("policy: {kind: linear-score, weights: {outstanding: 1, pending_prefill_tokens: 0.01}}\n")
    return path


def test_every_metric_against_every_other(cli: Cli, policy: Path) -> None:
    result = cli("evaluate", policy, *SMALL, "--objective", "balanced")
    assert (result.status, result.err) == (0, "")
    assert max(map(len, result.out.splitlines())) <= 100
    for text in (
        "tuned on steady-chat",
        "least-delay",
        "late-binding",
        "3 seeds (1000–1002)",
        "balanced = e2e + ",
    ):
        assert text in " ".join(result.out.split())
    for name, header in METRICS.items():
        assert (f"\n{header} " in result.out) == (name not in OF_PREFIXES)


def test_json(cli: Cli, policy: Path, tmp_path: Path) -> None:
    results = cli("evaluate", policy, *SMALL, *AGAINST, "--json", "--out", tmp_path / "out").json
    assert results == json.loads((tmp_path / "out" / "results.json").read_text())
    assert (results["policy"], results["baseline"]) == ("tuned", "least-outstanding")
    assert results["seeds"] == [1000, 1001, 1002], "seeds nothing was tuned on"
    metrics = results["comparisons"][0]["metrics"]
    assert set(METRICS) - {"cost", *OF_PREFIXES} <= set(metrics["tuned"])
    assert metrics["tuned"]["num_unfinished"] == [0, 0, 0] and metrics["tuned"]["num_requests"] == [200] * 3
    ratio = results["against"]["random"]["steady-chat"]["ttft_mean_s"]["ratio"]
    assert ratio == pytest.approx(
        sum(metrics["tuned"]["ttft_mean_s"]) / sum(metrics["random"]["ttft_mean_s"])
    )


def test_numbers_are_those_of_compare(cli: Cli, policy: Path) -> None:
    evaluated = cli("evaluate", policy, *SMALL, *AGAINST, "--json").json["comparisons"][0]
    names = ("--policies", f"random,{policy}")
    compared = cli("compare", *SMALL, *names, "--json").json["comparisons"][0]
    assert evaluated["metrics"]["tuned"] == compared["metrics"]["tuned"]
    assert evaluated["ratios"]["tuned"] == compared["ratios"]["tuned"]


def test_a_run_directory_on_several_scenarios(cli: Cli, tmp_path: Path) -> None:
    run = make_run(tmp_path / "first-run")
    scenarios = ("--scenario", "steady-chat", "--scenario", "mixed-hardware")
    result = cli("evaluate", run, *SMALL, *AGAINST, *scenarios)
    assert result.status == 0
    assert "first-run against least-outstanding" in result.out
    assert "first-run on all 2 scenarios" in result.out
    assert max(map(len, result.out.splitlines())) <= 100


def test_suites(cli: Cli, policy: Path) -> None:
    tiny = ("--set", "workload.requests=20", "--seeds", 1, *AGAINST, "--json")
    for suite, count in (("all", 16), ("generalisation", 8)):
        results = cli("evaluate", policy, "--suite", suite, *tiny).json
        assert len(results["comparisons"]) == count
        assert results["geometric_mean_against"]["random"]["e2e_mean_s"]["ratio"] > 0


def test_own_configuration(cli: Cli, policy: Path, tmp_path: Path) -> None:
    config = config_file(tmp_path, *(f"{i},100,5" for i in range(40)))
    results = cli("evaluate", policy, config, "--seeds", 1, *AGAINST, "--json").json
    assert [one["name"] for one in results["comparisons"]] == ["cluster"]


def test_a_heuristic_against_itself_and_others(cli: Cli) -> None:
    results = cli("evaluate", "random", *SMALL, *AGAINST, "--json").json
    assert (results["policy"], list(results["against"])) == ("random", ["least-outstanding"])


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        (("least-wrok",), ("policy = 'least-wrok'", "did you mean 'least-work'?")),
        (("absent.yaml",), ("absent.yaml", "no such file")),
        (("cluster.yaml",), ("is a cluster with its traffic", "`pointsman compare cluster.yaml`")),
        (("random", "--against", "random"), ("--against = 'random'", "is the policy itself")),
        (("random", "--against", "x"), ("--against = 'x'", "unknown policy")),
        (("random", "--suite", "some"), ("--suite = 'some'", "generalisation")),
        (("random", "--suite", "all", "--scenario", "mixed"), ("--suite", "--scenario")),
        (("random", "a.yaml", "--scenario", "mixed"), ("a.yaml", "--scenario")),
        (("random", "--objective", "best"), ("--objective = 'best'", "balanced")),
        (("random", "--set", "seed=3"), ("--set seed", "--seeds")),
        (("random", "--seeds", "0"), ("--seeds = 0",)),
        ((), ("POLICY",)),
    ],
)
def test_bad_input(
    cli: Cli,
    tmp_path: Path,
    arguments: tuple[str, ...],
    texts: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("cluster.yaml").write_text("workload: {trace: traffic.csv}\n")
    small = ("--set", "workload.requests=20") if "seed=3" not in arguments else ()
    check(cli("evaluate", *arguments, *small, "--out", tmp_path / "out"), *texts)
    assert not (tmp_path / "out").exists()
