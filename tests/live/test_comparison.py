from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import uvloop
from routing.learned import make_run

from pointsman.live.comparison import parts_of
from pointsman.live.servers import Scraped, imbalance, scrape
from pointsman.router.http.address import parse_url
from tests.cli.conftest import Cli

from .factories import workload

NOBODY = "http://127.0.0.1:1"
SMALL = ("--set", "workload.requests=40", "--seeds", 2)
FAST = ("--set", "workload.arrivals={kind: poisson, rate: 150}", "--set", "workload.max_tokens=600")
BAD = {
    "no server": (["default", "--live", NOBODY], "does not answer"),
    "not a URL": (["default", "--live", "localhost:8000"], "is not a URL"),
    "unknown policy": (["defualt", "--live", NOBODY], "unknown policy"),
    "unknown other policy": (["default", "--live", NOBODY, "--against", "nonsense"], "unknown policy"),
    "an oracle": (["vidur-lor", "--live", NOBODY], "which no router can"),
    "suite": (["default", "--live", NOBODY, "--suite", "all"], "--suite = 'all': given beside --live"),
    "two scenarios": (
        ["default", "--live", NOBODY, "--scenario", "mixed", "--scenario", "overload"],
        "--scenario = 'overload': given beside --live",
    ),
    "threads": (["default", "--live", NOBODY, "--threads", 2], "--threads = 2: given beside --live"),
}


@pytest.mark.parametrize(("arguments", "problem"), BAD.values(), ids=BAD)
def test_bad_input_is_one_line(cli: Cli, arguments: list[object], problem: str) -> None:
    result = cli("evaluate", *arguments)
    assert result.status == 2 and result.out == ""
    assert problem in result.err
    assert len(result.err.strip().splitlines()) == 1


def test_closed_loops_have_no_set_times(cli: Cli, servers: list[str]) -> None:
    closed = ("--set", "workload.arrivals={kind: closed, users: 3}", *SMALL)
    result = cli("evaluate", "random", "--live", servers[0], *closed)
    assert result.status == 2 and "sends requests at set times" in result.err


def test_two_policies_of_one_name(cli: Cli, servers: list[str], tmp_path: Path) -> None:
    runs = [make_run(tmp_path / parent / "mine") for parent in ("a", "b")]
    result = cli("evaluate", runs[0], "--against", runs[1], "--live", servers[0], *SMALL)
    assert result.status == 2 and "has the name of" in result.err


def cached_tokens(servers: list[str]) -> float:
    pages = [uvloop.run(scrape(parse_url(url))) for url in servers]
    return sum(page.total("vllm:prefix_cache_hits_total") for page in pages)


def test_the_same_comparison_as_on_the_simulator(cli: Cli, servers: list[str], tmp_path: Path) -> None:
    live = [part for url in servers for part in ("--live", url)]
    options = (*SMALL, *FAST, "--objective", "balanced", "--out", tmp_path / "out")
    hits = cached_tokens(servers)
    result = cli("evaluate", "default", *live, *options, "--against", "round-robin", "--json")
    assert result.status == 0, result.err
    assert "160 requests" in result.err and result.err.count("/dashboard") == 2
    results = result.json
    assert (results["policy"], results["baseline"], results["seeds"]) == (
        "default",
        "round-robin",
        [1000, 1001],
    )
    assert results == json.loads((tmp_path / "out" / "results.json").read_text())
    metrics = results["comparisons"][0]["metrics"]
    for policy in ("default", "round-robin"):
        table = metrics[policy]
        assert table["num_requests"] == [40, 40] and table["num_unfinished"] == [0, 0]
        assert min(table["ttft_mean_s"]) > 0 and min(table["tokens_per_s"]) > 0
        assert min(table["cost"]) > min(table["e2e_mean_s"])
    assert cached_tokens(servers) == hits, "each policy has prompts of its own"
    # Every request of a pair is as long for both.
    tokens = [np.multiply(one["tokens_per_s"], one["duration_s"]) for one in metrics.values()]
    assert tokens[0] == pytest.approx(tokens[1])
    assert "2 live servers of llama-3-8b, 40 requests a block" in (tmp_path / "out" / "table.md").read_text()


def test_a_recorded_trace_with_a_request_too_long(cli: Cli, servers: list[str], tmp_path: Path) -> None:
    recorded = [
        {"arrived_at": 3 + 0.01 * i, "num_prefill_tokens": tokens, "num_decode_tokens": 3, "outcome": "ok"}
        for i, tokens in enumerate((*[6] * 24, 5, 9000, 7, 8, 9, 10))  # the last fifth is sent
    ]
    (tmp_path / "traffic.jsonl").write_text("\n".join(map(json.dumps, recorded)))
    (tmp_path / "mine.yaml").write_text("workload: {trace: {path: traffic.jsonl}}\n")
    options = (tmp_path / "mine.yaml", "--seeds", 2, "--json")
    result = cli("evaluate", "random", "--live", servers[0], *options)
    assert result.status == 0, result.err
    assert "1 of 6 requests are cut to the servers' 8192 tokens" in result.err
    metrics = result.json["comparisons"][0]["metrics"]["random"]
    assert (metrics["num_requests"], metrics["num_unfinished"]) == ([3, 3], [0, 0])


def test_a_trace_is_cut_into_blocks() -> None:
    whole = workload(10, gap_s=0.5, prompt=list(range(1, 11)))
    parts = parts_of(whole, 3)
    assert [len(part) for part in parts] == [3, 3, 4]
    assert np.concatenate([part.num_prefill_tokens for part in parts]).tolist() == list(range(1, 11))
    assert [part.arrived_at.tolist() for part in parts[:2]] == [[0.0, 0.5, 1.0]] * 2


def test_a_part_of_a_trace_keeps_what_its_prompts_share() -> None:
    starts, lengths = np.array([0, 1, 3, 3]), np.array([1, 2, 0, 1], np.int32)
    keys, tokens = np.array([7, 7, 8, 7]), np.array([4, 4, 9, 4], np.int32)
    whole = replace(
        workload(4),
        chain_start=starts,
        chain_length=lengths,
        answer_key=np.zeros(4, np.int64),
        link_key=keys,
        link_tokens=tokens,
    )
    last = parts_of(whole, 2)[1]
    assert last.is_shared and (last.chain_start.tolist(), last.chain_length.tolist()) == ([3, 3], [0, 1])


def test_reading_counters() -> None:
    page = b'# HELP a b\na_total{x="1 2"} 3\na_total{x="2"} 4.5\nb 1e-3\n'
    assert Scraped(page).values("a_total") == [3.0, 4.5]
    assert Scraped(page).total("b") == 0.001
    assert Scraped(page).total("c") == 0


def test_imbalance() -> None:
    assert imbalance([2, 2, 2]) == 0
    assert imbalance([0, 4]) == 1
    assert imbalance([0, 0]) is None
