from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from pointsman.evaluation import tune as module
from pointsman.experiments.objective import find_objective

from .conftest import Cli
from .factories import config_file
from .test_bad_input import check

SMALL = ("--decisions", 8000, "--set", "workload.requests=100")


@pytest.fixture(autouse=True)
def few_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REQUESTS_PER_SCORE", 200)


def test_a_policy_file_that_every_command_takes(cli: Cli, tmp_path: Path) -> None:
    out = tmp_path / "new" / "policy.yaml"
    result = cli("tune", "--scenario", "mixed-hardware", *SMALL, "--out", out)
    assert result.status == 0
    assert result.err == f"wrote {out}; judge it on other seeds: pointsman evaluate {out}\n"
    assert "Cost against least-outstanding: −" in result.out
    data = yaml.safe_load(out.read_text())
    assert data["policy"]["kind"] == "linear-score"
    assert data["made"]["command"].startswith("pointsman tune --scenario mixed-hardware")
    assert data["made"]["objective"]["name"] == "balanced"
    assert 0.3 < data["made"]["cost_ratio_to_least_outstanding"] < 1
    assert data["made"]["situations"] == ["mixed-hardware"]
    small = ("--set", "workload.requests=50")
    simulated = cli("simulate", *small, "--set", f"policy.kind={out}", "--json").json
    assert simulated["config"]["policy"]["weights"] == data["policy"]["weights"]
    names = ("--policies", f"random,{out}", "--seeds", 1)
    compared = cli("compare", *small, *names, "--json").json["comparisons"][0]
    assert compared["policies"][2]["weights"] == data["policy"]["weights"]
    assert cli("evaluate", out, *small, "--seeds", 1).status == 0


def test_parameters_of_a_heuristic(cli: Cli, tmp_path: Path) -> None:
    out = tmp_path / "policy.yaml"
    result = cli(
        "tune", "--policy", "load-aware", "--scenario", "rag", *SMALL[2:], "--decisions", 1, "--out", out
    )
    assert result.status == 0 and "beta" in result.out
    data = yaml.safe_load(out.read_text())
    assert data["policy"]["kind"] == "load-aware" and 0.05 <= data["policy"]["parameters"]["beta"] <= 20
    (own,) = (
        cli("simulate", "--set", "workload.requests=50", "--set", f"policy.kind={out}", "--json")
        .json["config"]["policy"]["parameters"]
        .values()
    )
    assert own == data["policy"]["parameters"]["beta"]


@pytest.mark.parametrize(
    ("policy", "problem"), [("random", "has no parameters"), ("default", "is not a heuristic")]
)
def test_what_has_no_parameters_is_refused(cli: Cli, policy: str, problem: str) -> None:
    check(cli("tune", "--policy", policy), f"--policy = {policy!r}: {problem}")


def test_json_and_the_same_bytes_again(cli: Cli, tmp_path: Path) -> None:
    first, second = (cli("tune", *SMALL, "--seed", 3, "--threads", n, "--json").json for n in (1, 2))
    for result in (first, second):
        assert result.pop("timings")["wall_s"] > 0
        result["made"].pop("command")
    assert first == second
    assert first["made"]["decisions"] > 0


def test_several_situations_and_another_objective(cli: Cli) -> None:
    scenarios = ("--scenario", "steady-chat", "--scenario", "light-chat")
    made = cli("tune", *scenarios, *SMALL, "--objective", "tail", "--json").json["made"]
    assert made["situations"] == ["steady-chat", "light-chat"]
    assert made["objective"] == find_objective("tail").model_dump(mode="json")


def test_a_limit_is_called_kept_only_where_it_is(cli: Cli, tmp_path: Path) -> None:
    """The search takes what is beyond a limit as a cost, which may be worth its while."""
    keep = ("--keep", "ttft_p99=0.001s", "--keep", "e2e_p99=1000s")
    one = ("tune", "--scenario", "light-chat", *SMALL[2:], "--decisions", 1, *keep)
    said = " ".join(cli(*one, "--out", tmp_path / "tuned.yaml").out.split())
    exceeded = yaml.safe_load((tmp_path / "tuned.yaml").read_text())["made"]["limits_exceeded_by"]
    assert list(exceeded) == ["ttft_p99"] and exceeded["ttft_p99"] > 1
    share = f"{100 * exceeded['ttft_p99']:.1f} %"
    assert f"Not kept: P99 TTFT at most 0.001 s; it is {share} longer than that." in said
    assert "Kept: P99 end-to-end at most 1000 s." in said
    two = " ".join(cli(*one, "--scenario", "steady-chat").out.split())
    assert "Not kept on 2 of 2 scenarios: P99 TTFT at most 0.001 s; on steady-chat it is" in two


def test_own_configuration(cli: Cli, tmp_path: Path) -> None:
    config = config_file(tmp_path, *(f"{i / 5},{100 + 50 * (i % 7)},5" for i in range(60)))
    out = tmp_path / "tuned.yaml"
    result = cli("tune", config, "--decisions", 2000, "--set", "slo.ttft_s=0.5", "--out", out)
    made = yaml.safe_load(out.read_text())["made"]
    assert (made["situations"], made["sources"]) == (["cluster"], [str(config)])
    # A trace has parts, not seeds; what is kept of it is where the policy is judged by default.
    assert made["searched"] == "requests 1 to 36 of trace.csv"
    assert made["checked"] == "requests 37 to 48 of trace.csv"
    printed = " ".join(result.out.split())
    assert "on cluster, requests 37 to 48 of trace.csv, which the search did not see." in printed
    assert "seeds" not in printed + result.err
    assert f"judge it on requests 49 to 60 of trace.csv: pointsman evaluate {out}" in result.err
    (judged,) = cli("evaluate", out, "--against", "random", "--json").json["comparisons"]
    assert judged["name"] == "cluster" and "80 to 100 % of trace.csv" in judged["what"]
    assert judged["configs"][0]["slo"]["ttft_s"] == 0.5
    config.unlink()
    gone = cli(
        "evaluate", out, "--against", "random", "--seeds", 1, "--set", "workload.requests=50", "--json"
    )
    assert gone.json["comparisons"][0]["name"] == "steady-chat"
    (warning,) = gone.json["warnings"]
    assert warning.endswith(f"was made for {config}, which is not there; judged on steady-chat instead")


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        (("--objective", "best"), ("--objective = 'best'", "tail")),
        (("--decisions", "0"), ("--decisions = 0",)),
        (("--minutes", "0"), ("--minutes = 0",)),
        (("--minutes", "nan"), ("--minutes",)),
        (("--minutes", "1", "--decisions", "5"), ("--minutes", "--decisions")),
        (("--scenario", "summarization"), ("--scenario = 'summarization'", "never tuned on")),
        (("--suite", "generalisation"), ("never tuned on",)),
        (("--scenario", "stedy-chat"), ("'steady-chat'",)),
        (("--set", "seed=3"), ("--set seed", "--seed")),
        (("--seed", "-1"), ("--seed",)),
        (("--threads", "-1"), ("--threads = -1",)),
    ],
)
def test_bad_input(cli: Cli, tmp_path: Path, arguments: tuple[str, ...], texts: tuple[str, ...]) -> None:
    check(cli("tune", *arguments, "--out", tmp_path / "new" / "policy.yaml"), *texts)
    assert list(tmp_path.iterdir()) == []


def test_outputs_are_checked_before_anything_is_simulated(cli: Cli, tmp_path: Path) -> None:
    check(cli("tune", "--out", tmp_path), "--out", "is a directory")


def test_ctrl_c_keeps_the_best_so_far(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scores, calls = module.Bench.scores, iter(range(4))

    def until_interrupted(self: module.Bench, *arguments: Any) -> Any:
        if next(calls) == 3:  # the starts, and two generations
            raise KeyboardInterrupt
        return scores(self, *arguments)

    monkeypatch.setattr(module.Bench, "scores", until_interrupted)
    out = tmp_path / "p.yaml"
    options = ("--decisions", 10_000_000, "--set", "workload.requests=100")
    result = cli("tune", *options, "--out", out)
    assert result.status == 130
    assert "Not checked: P99 TTFT" in result.out and "Kept" not in result.out
    assert result.err.endswith("interrupted: the best so far, which has not been checked yet\n")
    made = yaml.safe_load(out.read_text())["made"]
    assert (made["generations"], made["checked"]) == (2, None)
    assert made["cost_ratio_to_least_outstanding"] is None
    assert cli("simulate", *options[2:], "--set", f"policy.kind={out}").status == 0


def test_ctrl_c_leaves_nothing(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module.Bench, "scores", interrupt)
    assert cli("tune", *SMALL, "--out", tmp_path / "a" / "p.yaml").status == 130
    assert list(tmp_path.iterdir()) == []
