"""`pointsman plan`: goodput by policy, what one more server buys, and servers for a target."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pointsman.evaluation import goodput

from .conftest import Cli
from .factories import config_file
from .test_bad_input import check

UNEQUAL = """\
workload: {arrivals: {kind: poisson, load: 0.6}, lengths: azure-conv}
cluster: {model: Llama-3.1-8B, replicas: [{device: H100}, {device: L40S, count: 2}]}
slo: {ttft_s: 0.5, tpot_s: 0.1}
"""
QUICK = ("--policies", "round-robin,late-binding", "--seeds", 2)


@pytest.fixture(autouse=True)
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(goodput, "REQUESTS_A_REPLICA", 100)
    monkeypatch.setattr(goodput, "FEWEST_REQUESTS", 300)


@pytest.fixture
def unequal(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(UNEQUAL)
    return path


def test_answers_what_people_ask(cli: Cli, unequal: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = cli("plan", unequal, *QUICK, "--json", "--out", out)
    assert result.status == 0, result.err
    found = result.json
    assert found == json.loads((out / "results.json").read_text())
    goodputs = {name: one["goodput_rps"] for name, one in found["policies"].items()}
    capacity = cli("capacity", unequal, "--json").json["requests_per_s"]
    assert goodputs["round-robin"] < 0.9 * goodputs["late-binding"] <= 0.9 * capacity
    assert found["best"] == "late-binding"
    assert found["traffic_rps"] == pytest.approx(0.6 * capacity, rel=0.15)
    gains = {kind: one["gain_rps"]["ratio"] for kind, one in found["one_more"].items()}
    assert gains["H100"] > gains["L40S"] > 0, "a faster server buys more"
    assert found["target"]["rate_rps"] == pytest.approx(2 * found["traffic_rps"])
    more = found["target"]["more"]
    assert 0 < more["H100"] <= more["L40S"]
    assert "1 × H100 and 2 × L40S with Llama-3.1-8B serve" in found["verdict"]["sentence"]
    page, table = (out / "report.html").read_text(), (out / "table.md").read_text()
    for text in ("One more H100 buys", f"{1 + more['H100']} × H100 ({more['H100']} more)"):
        assert text in page and text in table
    assert page.count("<figure>") == 3


def test_a_rate_it_finds_is_served_in_time_and_a_higher_one_is_not(cli: Cli, unequal: Path) -> None:
    """By `simulate`, which knows nothing of the search."""
    found = cli("plan", unequal, "--policies", "late-binding", "--seeds", 1, "--json").json
    rate = found["policies"]["late-binding"]["goodput_rps"]

    def good_share(times: float) -> float:
        traffic = f"workload.arrivals={{kind: poisson, rate: {times * rate}}}"
        options = ("--set", traffic, "--set", "workload.requests=300", "--set", "seed=1000")
        options += ("--set", "policy.kind=late-binding")
        share: float = cli("simulate", unequal, *options, "--json").json["metrics"]["good_share"]
        return share

    assert good_share(0.9) >= 0.99 > good_share(1.4)


def test_a_target_that_is_met_takes_no_more(cli: Cli, unequal: Path) -> None:
    result = cli("plan", unequal, *QUICK, "--target", 4, "--json")
    assert result.json["target"]["more"]["L40S"] < 0
    printed = " ".join(cli("plan", unequal, *QUICK, "--target", 4).out.split())
    assert "For 4.00 requests/s it takes" in printed and "2 × L40S alone" in printed
    assert "leaves room for" in printed


def test_a_service_level_that_nothing_meets(cli: Cli, unequal: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = cli("plan", unequal, *QUICK, "--set", "slo.tpot_s=0.0001", "--json", "--out", out)
    assert result.status == 0
    page = (out / "report.html").read_text()
    assert page.count("<figure>") == 1 and "`" not in page.partition("<script>")[0]
    assert "cannot serve this within the service level at any rate" in result.json["verdict"]["sentence"]
    assert set(result.json["target"]["more"].values()) == {None}
    printed = cli("plan", unequal, *QUICK, "--set", "slo.tpot_s=0.0001").out
    rows = [line.split() for line in printed.splitlines()]
    assert ["round-robin", "none"] in rows and ["least-outstanding", "none", "baseline"] in rows
    assert ["1", "×", "H100", "none", "not", "enough"] in rows
    assert "█" not in printed


def test_servers_that_are_just_enough_are_named_once(cli: Cli, unequal: Path) -> None:
    found = cli("plan", unequal, *QUICK, "--json").json
    most = found["policies"]["late-binding"]["goodput_rps"]
    result = cli("plan", unequal, *QUICK, "--target", f"{0.98 * most:.3f}", "--json").json
    assert set(result["target"]["more"].values()) == {0}
    said = " ".join(result["verdict"]["details"])
    assert "it takes the servers that there are; one fewer of any kind is too few." in said
    assert "as now" not in said


def test_a_trace_is_played_faster_and_judged_by_blocks(cli: Cli, tmp_path: Path) -> None:
    config = config_file(tmp_path, *(f"{i / 5},{100 + 50 * (i % 7)},5" for i in range(60)))
    result = cli("plan", config, *QUICK)
    assert result.status == 0, result.err
    assert max(map(len, result.out.splitlines())) <= 100
    assert "60 requests are a burst, not a rate" in result.err
    printed = " ".join(result.out.split())
    assert "95 % intervals over 6 blocks of trace.csv" in printed
    assert re.search(r"The traffic of cluster, 5\.\d+ requests/s, could be \d+\.\d times as much\.", printed)


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        (("--target", "0"), ("--target = 0", "requests/s")),
        (("--share", "1.5"), ("--share = 1.5", "0.99")),
        (("--set", "seed=3"), ("--set seed", "--seeds")),
        (("--set", "workload.arrivals={kind: closed, users: 3}"), ("closed", "poisson")),
        (("--policies", "x"), ("'x'", "unknown policy")),
    ],
)
def test_bad_input(cli: Cli, tmp_path: Path, arguments: tuple[str, ...], texts: tuple[str, ...]) -> None:
    check(cli("plan", *arguments, "--out", tmp_path / "out"), *texts)
    assert not (tmp_path / "out").exists()


def test_the_baseline_is_best_where_others_serve_as_much() -> None:
    rates = {"round-robin": 10.0, "least-outstanding": 10.0, "late-binding": 9.0}
    goodputs: Any = {name: SimpleNamespace(rate_rps=rate) for name, rate in rates.items()}
    assert goodput.best_of(goodputs, "least-outstanding") == "least-outstanding"
    assert goodput.best_of(goodputs, "late-binding") == "round-robin"
