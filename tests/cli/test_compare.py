from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pointsman.config import load_config
from pointsman.experiments.objective import find_objective
from pointsman.experiments.own import reordered
from pointsman.experiments.simulate import prepare, simulate

from .conftest import Cli
from .factories import config_file

SMALL = ("--set", "workload.requests=400", "--seeds", "3")
THREE = ("--policies", "round-robin,least-outstanding,least-work")


def without_timings(results: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in results.items() if key not in ("timings", "git_revision")}


def test_table_fits_100_columns(cli: Cli) -> None:
    result = cli("compare", *SMALL)
    assert result.status == 0
    assert result.err == ""
    lines = result.out.splitlines()
    assert max(map(len, lines)) <= 100
    for text in ("steady-chat", "TTFT P99", "weighted-round-robin", "baseline", "vidur-lor †"):
        assert text in result.out
    assert not any("linear-score" in line or "session-affinity" in line for line in lines)
    assert "3 seeds (1000–1002)" in " ".join(lines)


def test_cost_is_shown_where_an_objective_is_asked_for(cli: Cli, tmp_path: Path) -> None:
    result = cli("compare", *SMALL, *THREE, "--objective", "tail", "--out", tmp_path)
    assert result.status == 0
    assert max(map(len, result.out.splitlines())) <= 100
    assert any(line.startswith("policy ") and line.endswith(" cost") for line in result.out.splitlines())
    tail = find_objective("tail")
    assert tail.formula in result.out
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["objective"] == tail.model_dump(mode="json")
    assert results["comparisons"][0]["ratios"]["least-work"]["cost"]["high"] < 1
    assert " cost | within SLO |" in (tmp_path / "table.md").read_text()


def test_a_short_trace_has_no_intervals_and_more_seeds_would_not_help(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text("timestamp,prompt_tokens,completion_tokens\n1,100,20\n2,100,20\n")
    config = tmp_path / "mine.yaml"
    config.write_text("workload: {trace: trace.csv}\ncluster: {replicas: 2}\n")
    two = " ".join(cli("compare", config, *THREE).out.split())
    assert "Fewer than 6 of them: read the intervals as too narrow, or use a longer trace." in two
    assert "100% within SLO" in two and "100 %" not in two, "one way to write percents in one table"
    (tmp_path / "trace.csv").write_text("timestamp,prompt_tokens,completion_tokens\n1,100,20\n")
    one = " ".join(cli("compare", config, *THREE).out.split())
    assert "One run has no intervals, and may be luck: use a longer trace." in one
    assert "--seeds" not in two and "raise --seeds" not in one
    said = cli("compare", config, "--set", "workload.trace.load=0.5").err
    assert "'trace.csv': has one request, so there is no rate to change" in said


def test_json_is_results_json(cli: Cli, tmp_path: Path) -> None:
    printed = cli("compare", *SMALL, *THREE, "--out", tmp_path, "--json").json
    written = json.loads((tmp_path / "results.json").read_text())
    assert printed == written
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "results.json", "table.md"]
    assert written["seeds"] == [1000, 1001, 1002]
    assert written["command"].startswith("pointsman compare --set workload.requests=400")
    (comparison,) = written["comparisons"]
    assert [config["seed"] for config in comparison["configs"]] == [1000, 1001, 1002]
    assert [policy["kind"] for policy in comparison["policies"]] == THREE[1].split(",")
    for policy, metrics in comparison["metrics"].items():
        assert {"ttft_p99_s", "tbt_p99_s", "tpot_p99_s", "e2e_p99_s", "queueing_p99_s"} < set(metrics)
        assert all(len(values) == 3 for values in metrics.values())
        for metric, ratio in comparison["ratios"][policy].items():
            means = [sum(comparison["metrics"][one][metric]) for one in (policy, "least-outstanding")]
            if means[1]:
                assert ratio["ratio"] == pytest.approx(means[0] / means[1])
    ratio = comparison["ratios"]["least-work"]["ttft_mean_s"]
    assert ratio["low"] <= ratio["ratio"] <= ratio["high"] < 1


def test_same_command_same_bytes_whatever_the_threads(cli: Cli, tmp_path: Path) -> None:
    contents = []
    for name, threads in (("a", 1), ("b", 1), ("c", 2)):
        out = tmp_path / name
        cli("compare", *SMALL, "--threads", threads, "--out", out)
        results = json.loads((out / "results.json").read_text())
        del results["command"]
        contents.append(json.dumps(without_timings(results)))
    assert contents[0] == contents[1] == contents[2]


def test_every_policy_gets_the_same_arrivals(cli: Cli) -> None:
    """Round-robin first or last, alone or not: the same numbers."""
    alone, among = (
        cli("compare", *SMALL, "--policies", names, "--json").json["comparisons"][0]["metrics"]["round-robin"]
        for names in ("round-robin", "least-work,random,round-robin")
    )
    assert alone == among


def test_several_scenarios_have_a_summary(cli: Cli, tmp_path: Path) -> None:
    names = ("--scenario", "steady-chat", "--scenario", "light-chat", "--scenario", "steady-chat")
    out = tmp_path / "new" / "results"
    result = cli("compare", *names, *SMALL, *THREE, "--out", out)
    assert result.status == 0
    assert "All 2 scenarios" in result.out
    results = json.loads((out / "results.json").read_text())
    assert [one["name"] for one in results["comparisons"]] == ["steady-chat", "light-chat"]
    ratios = [one["ratios"]["least-work"]["e2e_mean_s"]["ratio"] for one in results["comparisons"]]
    mean = results["geometric_mean_ratios"]["least-work"]["e2e_mean_s"]["ratio"]
    assert mean == pytest.approx((ratios[0] * ratios[1]) ** 0.5)
    table = (out / "table.md").read_text()
    assert "## All scenarios" in table and "## light-chat" in table


def test_an_own_directory_is_replaced_file_by_file(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "table.md").write_text("old")
    assert cli("compare", *SMALL, *THREE, "--out", tmp_path).status == 0
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert "least-work" in (tmp_path / "table.md").read_text()
    assert len(list(tmp_path.iterdir())) == 4


def test_own_configuration_with_its_own_policy(cli: Cli, tmp_path: Path) -> None:
    config = tmp_path / "cluster.yaml"
    config.write_text(
        "workload: {arrivals: {kind: poisson, rate: 20}, lengths: azure-conv, requests: 300, sessions: 4}\n"
        "policy: {kind: linear-score, weights: {outstanding: 1, pending_prefill_tokens: 0.01}}\n"
    )
    (comparison,) = cli("compare", config, "--seeds", 2, "--json").json["comparisons"]
    kinds = {policy["kind"]: policy for policy in comparison["policies"]}
    assert comparison["name"] == "cluster"
    assert kinds["linear-score"]["weights"] == {"outstanding": 1, "pending_prefill_tokens": 0.01}
    assert kinds["least-work"]["weights"] == {}
    assert "session-affinity" in kinds, "the workload has sessions"


def test_the_baseline_is_always_there(cli: Cli) -> None:
    small = (*SMALL, "--policies", "least-work", "--baseline", "random", "--json")
    results = cli("compare", *small).json
    assert results["baseline"] == "random"
    assert [policy["kind"] for policy in results["comparisons"][0]["policies"]] == ["random", "least-work"]


def test_one_seed_has_no_interval(cli: Cli) -> None:
    small = ("--set", "workload.requests=300", "--seeds", 1, *THREE)
    results = cli("compare", *small, "--json").json
    ratio = results["comparisons"][0]["ratios"]["round-robin"]["ttft_mean_s"]
    assert ratio["ratio"] > 0
    assert ratio["low"] is ratio["high"] is None
    assert cli("compare", *small).status == 0


def test_intervals_of_a_trace_come_from_blocks_of_it(cli: Cli, tmp_path: Path) -> None:
    """The same trace for every seed would give intervals without width, whatever the traffic."""
    rows = [f"{i / 60:.3f},{50 + 37 * (i * i % 11)},{5 + i % 7}" for i in range(120)]
    config = config_file(tmp_path, *rows)
    result = cli("compare", config, *THREE, "--json")
    assert result.status == 0, result.err
    assert result.json["warnings"] == [] and "same for every seed" not in result.err
    (one,) = result.json["comparisons"]
    assert (one["num_blocks"], one["num_replays"]) == (6, 8)
    ratio = one["ratios"]["least-work"]["ttft_mean_s"]
    assert ratio["low"] < ratio["ratio"] < ratio["high"], "traffic that differs has an interval"
    metrics = one["metrics"]["least-work"]
    assert len(metrics["ttft_mean_s"]) == 6 and len(metrics["preemptions"]) == 1
    alone_config = load_config(config, ["policy.kind=least-work", "seed=1000"])
    first = prepare(alone_config, config.parent)
    replays = simulate([reordered(first, number) for number in range(8)])
    alone = [outcome.metrics["ttft_mean_s"] for outcome in replays]
    assert sum(metrics["ttft_mean_s"]) / 6 == pytest.approx(sum(alone) / 8), "whole runs, cut afterwards"
    assert len(set(alone)) > 1, "another order of neighbours is another run"
    printed = " ".join(cli("compare", config, *THREE).out.split())
    assert "6 blocks of trace.csv (8 replays of each)" in printed and "seeds" not in printed


def test_the_answer_comes_first(cli: Cli) -> None:
    """Which policy, how much better, how sure, at which load, and what to do next."""
    policies = ("--policies", "random,late-binding,default", "--seeds", 6, "--set", "workload.requests=1500")
    result = cli("compare", *policies, "--json")
    assert result.json["best"] in ("late-binding", "default")
    setting = result.json["comparisons"][0]["setting"]
    assert setting["load"] == pytest.approx(0.85, rel=0.1)
    assert setting["cluster"] == "4 × A100-80 with Llama-3-8B"
    lines = " ".join(cli("compare", *policies).out.split())
    assert lines.startswith(f"{result.json['best']} serves this traffic best: TTFT mean −")
    assert "of what 4 × A100-80 with Llama-3-8B can serve" in lines
    assert lines.endswith(f"serve --policy {result.json['best']} --backend URL … routes by it.")
    assert "Next: pointsman plan --scenario steady-chat --set workload.requests=1500 says" in lines


def test_it_names_the_traffic_that_was_set(cli: Cli, tmp_path: Path) -> None:
    config_file(tmp_path, *(f"{i / 5},{100 + 50 * (i % 7)},5" for i in range(60)))
    traffic = f"workload.trace={tmp_path / 'trace.csv'}"
    result = cli("compare", "--set", traffic, "--policies", "late-binding", "--seeds", 6, "--json")
    what = result.json["comparisons"][0]["what"]
    assert what == "trace.csv in place of its own traffic, on 4 × A100-80 with Llama-3-8B"


def test_warnings_are_part_of_the_result(cli: Cli, tmp_path: Path) -> None:
    config = tmp_path / "busy.yaml"
    config.write_text(
        "workload: {arrivals: {kind: poisson, rate: 300}, lengths: azure-conv, requests: 200}\n"
    )
    result = cli("compare", config, *THREE, "--seeds", 2, "--out", tmp_path / "out")
    assert f"wrote {tmp_path / 'out' / 'report.html'}" in result.err
    (warning,) = json.loads((tmp_path / "out" / "results.json").read_text())["warnings"]
    assert "above capacity" in warning and f"warning: {warning}" in result.err
    for name in ("report.html", "table.md"):
        assert f"Warning: {warning}." in (tmp_path / "out" / name).read_text()


def test_a_policy_tuned_on_a_trace_is_compared_on_what_was_kept(cli: Cli, tmp_path: Path) -> None:
    config = config_file(tmp_path, *(f"{i / 5},{100 + 50 * (i % 7)},5" for i in range(60)))
    policy = tmp_path / "tuned.yaml"
    policy.write_text(
        f"policy: {{kind: linear-score, weights: {{outstanding: 1}}}}\nmade: {{sources: ['{config}']}}\n"
    )
    (whole,) = cli("compare", config, *THREE, "--json").json["comparisons"]
    (kept,) = cli("compare", config, "--policies", f"random,{policy}", "--json").json["comparisons"]
    counts = [sum(one["metrics"]["least-outstanding"]["num_requests"]) for one in (whole, kept)]
    assert counts == [60, 12]
    assert "80 to 100 % of trace.csv" in kept["what"]


@pytest.fixture
def learned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A policy tuned on `a/cluster.yaml`, whose trace of 60 requests is `a/trace.csv`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    config = config_file(tmp_path / "a", *(f"{i / 5},{100 + 50 * (i % 7)},5" for i in range(60)))
    policy = tmp_path / "a" / "tuned.yaml"
    made = f"{{sources: ['{config}']}}"
    policy.write_text(f"policy: {{kind: linear-score, weights: {{outstanding: 1}}}}\nmade: {made}\n")
    return policy


def num_compared(cli: Cli, policy: object, *arguments: object) -> tuple[float, str]:
    """How many requests a run had, and what was said of them."""
    result = cli("compare", *arguments, "--policies", f"random,{policy}", "--json")
    assert result.status == 0, result.err
    (one,) = result.json["comparisons"]
    return sum(one["metrics"]["least-outstanding"]["num_requests"]), one["what"]


def test_a_trace_is_the_same_under_whichever_name(cli: Cli, learned: Path, tmp_path: Path) -> None:
    """What a policy learned on says nothing, also where another file names it, on another cluster."""
    folder = learned.parent
    same = folder / "same.yaml"
    same.write_bytes((folder / "cluster.yaml").read_bytes())
    elsewhere = tmp_path / "elsewhere.yaml"
    elsewhere.write_text("workload: {trace: {path: copy.csv, load: 0.5}}\ncluster: {replicas: 3}\n")
    (tmp_path / "copy.csv").write_bytes((folder / "trace.csv").read_bytes())
    for arguments in ((same,), (elsewhere,), ("--set", "workload.trace=a/trace.csv")):
        num_requests, what = num_compared(cli, learned, *arguments)
        assert num_requests == 12, arguments
        assert "80 to 100 % of" in what
    other = tmp_path / "other.csv"
    other.write_text((tmp_path / "copy.csv").read_text().replace("100,5", "101,5"))
    assert num_compared(cli, learned, folder / "cluster.yaml", "--set", f"workload.trace={other}")[0] == 60


def test_a_policy_knows_its_trace_when_its_file_is_gone(cli: Cli, learned: Path) -> None:
    folder = learned.parent
    tuned = folder / "again.yaml"
    assert cli("tune", folder / "cluster.yaml", "--decisions", 1, "--out", tuned).status == 0
    (folder / "cluster.yaml").rename(folder / "renamed.yaml")
    for left in (None, "cluster: {replicas: none}\n"):  # gone, or no configuration any more
        if left is not None:
            (folder / "cluster.yaml").write_text(left)
        assert num_compared(cli, tuned, folder / "renamed.yaml")[0] == 12
    own = folder / "own.yaml"
    own.write_text("workload: {trace: trace.csv}\ncluster: {replicas: 2}\npolicy: again.yaml\n")
    assert num_compared(cli, "again", own)[0] == 12, "also where the configuration names the policy"
    assert num_compared(cli, "least-work", own)[0] == 60, "unless it is not compared"


def test_what_to_do_next_can_be_typed_as_it_is(cli: Cli, learned: Path, tmp_path: Path) -> None:
    """With the policy as it was given, not its label; with the changes that were asked for."""
    best = tmp_path / "best one.yaml"
    best.write_text(
        "policy: {kind: linear-score, weights: {outstanding: 1, pending_prefill_tokens: 0.001}}\n"
    )
    config = learned.parent / "cluster.yaml"
    change = "cluster.replicas=[{device: A100-80}, {device: A40}]"

    def next_line(*arguments: object) -> str:
        return " ".join(cli("compare", *arguments).out.split()).rpartition("Next: ")[2]

    said = next_line(config, "--policies", best, "--baseline", best, "--set", change)
    assert said.startswith(f"pointsman plan {config} --set '{change}' says how much")
    assert f"serve --policy '{best}' --backend" in said
    run = tmp_path / "runs" / "default.yaml"
    run.parent.mkdir()
    run.write_bytes(best.read_bytes())
    assert f"serve --policy {run} --backend" in next_line(config, "--policies", run, "--baseline", run)
    config.write_text(
        "workload: {trace: trace.csv}\npolicy: {kind: linear-score, weights: {outstanding: 1}}\n"
    )
    said = next_line(config, "--policies", "linear-score", "--baseline", "linear-score")
    assert "to serve by linear-score, write its `policy:` into a file of its own" in said


def test_a_failure_leaves_nothing_behind(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pointsman.report.comparison import ComparisonReport

    def fail(self: ComparisonReport) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(ComparisonReport, "html", fail)
    assert cli("compare", *SMALL, *THREE, "--out", tmp_path / "a" / "b").status == 130
    assert list(tmp_path.iterdir()) == []
