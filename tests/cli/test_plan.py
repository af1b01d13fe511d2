"""`pointsman plan`: goodput by policy, what one more server buys, and servers for a target."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pointsman.evaluation import goodput, steady

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
    monkeypatch.setattr(steady, "FEWEST_REQUESTS", 3000)
    monkeypatch.setattr(steady, "SHORTEST_S", 0.0)
    monkeypatch.setattr(steady, "RELAXATIONS", 0.0)


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
    changes = ("--set", "policy.kind=late-binding", "--set", "workload.requests=6000")
    assert good_share(cli, 0.9 * rate, unequal, *changes) >= 0.99
    assert good_share(cli, 1.15 * rate, unequal, *changes) < 0.99


def good_share(cli: Cli, rate_rps: float, *which: object, seed: int = 1000) -> float:
    traffic = f"workload.arrivals={{kind: poisson, rate: {rate_rps}}}"
    result = cli("simulate", *which, "--set", traffic, "--set", f"seed={seed}", "--json")
    share: float = result.json["metrics"]["good_share"]
    return share


def test_what_it_finds_lasts(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of 3,000 requests said 21.8/s for these, at which 50 % were in time after 45 minutes."""
    monkeypatch.undo()
    one = ("--scenario", "steady-chat", "--set", "cluster.device=H200", "--set", "cluster.replicas=1")
    found = cli("plan", *one, "--policies", "least-outstanding", "--seeds", 2, "--json").json
    goodput = found["policies"]["least-outstanding"]["goodput_rps"]
    shares = [
        good_share(cli, goodput, *one, "--set", "workload.requests=60000", seed=seed) for seed in (1000, 1001)
    ]
    assert sum(shares) / 2 > 0.98


def test_shared_prefixes_may_serve_more_than_capacity(cli: Cli) -> None:
    """The capacity with nothing cached was the bound: what went beyond it was said to be too much."""
    which = ("--scenario", "shared-system-prompt", "--set", "slo.ttft_s=10", "--policies", "late-binding")
    result = cli("plan", *which, "--seeds", 1, "--json", "--target", 1)
    one = result.json["policies"]["late-binding"]
    assert one["goodput_rps"] > 1.02 * one["capacity_rps"] and not one["is_highest_tried"]
    assert "with nothing cached" in " ".join(cli("plan", *which, "--seeds", 1, "--target", 1).out.split())


def test_wide_limits_do_not_make_a_growing_queue_good(
    cli: Cli, unequal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    wide = ("--set", "slo={ttft_s: 1000, tpot_s: 10}", "--policies", "round-robin,late-binding")
    result = cli("plan", unequal, *wide, "--seeds", 1, "--json")
    found = result.json["policies"]
    assert not found["round-robin"]["is_highest_tried"], "the slow servers get a third each"
    assert found["round-robin"]["good_shares"][-1] == 0
    best = found["late-binding"]
    assert best["is_highest_tried"] and 0.97 < best["goodput_rps"] / best["capacity_rps"] < 0.99
    assert any("highest rate tried" in line for line in result.json["verdict"]["details"])
    printed = cli("plan", unequal, *wide, "--seeds", 1).out
    (row,) = (line for line in printed.splitlines() if line.startswith("late-binding"))
    assert "highest tried" in row


def test_fewer_servers_may_do_what_more_cannot(cli: Cli, tmp_path: Path) -> None:
    """An A40 is too slow for these limits: what goes there is late. More of them are no answer."""
    path = tmp_path / "mine.yaml"
    path.write_text(
        "workload: {arrivals: {kind: poisson, rate: 10}, lengths: azure-conv}\n"
        "cluster: {model: Llama-3-8B, replicas: [{count: 2, device: H100}, {count: 1, device: A40}]}\n"
        "slo: {ttft_s: 2, tpot_s: 0.03}\n"
    )
    result = cli("plan", path, "--policies", "least-outstanding", "--seeds", 1, "--target", 5, "--json")
    assert result.json["target"]["more"]["A40"] == -1
    assert "2 × H100 alone" in " ".join(result.json["verdict"]["details"])


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
        (("--set", "workload.requests=1"), ("workload.requests = 1", "one request", "no rate to change")),
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


def test_it_names_the_traffic_that_was_set(cli: Cli, tmp_path: Path) -> None:
    trace = tmp_path / "my.csv"
    rows = [f"{i / 5},{100 + 50 * (i % 7)},5" for i in range(120)]
    trace.write_text("\n".join(["arrived_at,num_prefill_tokens,num_decode_tokens", *rows]))
    result = cli("plan", "--set", f"workload.trace={trace}", *QUICK)
    assert "The traffic of my.csv, 5.00 requests/s" in result.out
    trace.write_text("\n".join(["arrived_at,num_prefill_tokens,num_decode_tokens", *rows[:1]]))
    refused = cli("plan", "--set", f"workload.trace={trace}", *QUICK)
    assert refused.status == 2
    assert "it has one request, so there is no rate to change; use a longer trace" in refused.err
