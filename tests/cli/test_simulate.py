from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pointsman.experiments import simulate as evaluation

from .conftest import Cli
from .factories import EXAMPLE, GOLDEN, config_file, read_rows

COLUMNS = [
    "request_id",
    "replica_id",
    "num_prefill_tokens",
    "num_decode_tokens",
    "arrived_at",
    "scheduled_at",
    "first_token_at",
    "completed_at",
    "num_restarts",
]
VIDUR_COLUMNS = ["prefill_completed_at" if column == "first_token_at" else column for column in COLUMNS]
SMALL = ("--set", "workload.requests=300")


def check_golden(cli: Cli, folder: Path, run: str, trace: Path, *overrides: str) -> list[dict[str, str]]:
    config = config_file(folder, config=EXAMPLE.replace("trace.csv", str(trace)))
    out = folder / "requests.csv"
    assert cli("simulate", config, *overrides, "--requests", out).status == 0
    rows = read_rows(out)
    expected = read_rows(GOLDEN / f"{run}.csv")
    assert list(rows[0]) == [*COLUMNS, "num_cached_tokens"]
    assert [list(row.values())[: len(COLUMNS)] for row in rows] == [
        [row[column] for column in VIDUR_COLUMNS] for row in expected
    ]
    return rows


def test_reproduces_a_run_of_vidur_to_the_last_digit(cli: Cli, tmp_path: Path) -> None:
    overrides = ("--set", "cluster.scheduler.kind=vllm", "--set", "policy.kind=vidur-lor")
    rows = check_golden(cli, tmp_path, "vllm_lor_4r_over", GOLDEN / "trace_over_4r.csv.gz", *overrides)
    assert {row["num_restarts"] for row in rows} > {"0"}


def test_the_documented_example_is_a_run_of_vidur(cli: Cli, tmp_path: Path) -> None:
    check_golden(cli, tmp_path, "sarathi_round_robin_4r_over", GOLDEN / "trace_over_4r.csv.gz")


def test_without_arguments_runs_a_scenario(cli: Cli) -> None:
    result = cli("simulate", *SMALL)
    assert result.status == 0
    assert result.err == ""
    for text in ("time to first token", "P99", "requests/s", "least-outstanding", "shares", "preemptions"):
        assert text in result.out


def test_json_has_every_metric_and_its_configuration(cli: Cli) -> None:
    result = cli("simulate", *SMALL, "--set", "seed=5", "--json").json
    assert result["config"]["workload"]["requests"] == 300
    assert result["config"]["seed"] == 5
    metrics = result["metrics"]
    for latency in ("ttft", "tbt", "tpot", "e2e", "queueing"):
        for part in ("mean", "p50", "p90", "p95", "p99"):
            assert metrics[f"{latency}_{part}_s"] >= 0
    for name in ("requests_per_s", "tokens_per_s", "goodput_per_s", "imbalance_cv", "kv_use_mean"):
        assert metrics[name] > 0
    assert metrics["num_unfinished"] == 0
    assert sum(replica["share"] for replica in result["replicas"]) == pytest.approx(1)
    assert result["timings"]["wall_s"] > 0


def test_what_is_not_a_number_is_null(cli: Cli) -> None:
    one_token = "workload={arrivals: {kind: poisson, rate: 5}, lengths: {kind: fixed, prompt: 9, output: 1}}"
    metrics = cli("simulate", "--set", one_token, *SMALL, "--json").json["metrics"]
    assert metrics["tpot_mean_s"] is None
    assert metrics["ttft_mean_s"] > 0
    assert "–" in cli("simulate", "--set", one_token, *SMALL).out


def test_same_seed_same_rows(cli: Cli, tmp_path: Path) -> None:
    contents = []
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        out = tmp_path / f"{name}.csv"
        assert cli("simulate", *SMALL, "--set", f"seed={seed}", "--requests", out).status == 0
        contents.append(out.read_bytes())
    assert contents[0] == contents[1] != contents[2]


def test_rows_are_in_the_order_of_the_trace(cli: Cli, tmp_path: Path) -> None:
    config = config_file(tmp_path, "5.0,10,3", "0.25,20,3", "1e-05,30,3")
    cli("simulate", config, "--requests", tmp_path / "out.csv")
    rows = read_rows(tmp_path / "out.csv")
    assert [row["request_id"] for row in rows] == ["0", "1", "2"]
    assert [row["num_prefill_tokens"] for row in rows] == ["10", "20", "30"]
    assert [row["arrived_at"] for row in rows] == ["4.99999", "0.24999", "0.0"]


def test_a_seed_given_with_set_redraws_the_hardware(cli: Cli) -> None:
    clusters = [
        cli("simulate", "--scenario", "random-hardware", *SMALL, "--set", f"seed={seed}", "--json").json
        for seed in (1, 2)
    ]
    assert clusters[0]["config"]["cluster"]["replicas"] != clusters[1]["config"]["cluster"]["replicas"]


def test_paths_start_at_the_configuration(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_file(tmp_path, "0,10,3")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert cli("simulate", config).status == 0
    monkeypatch.chdir(tmp_path)
    workload = ("--set", "workload={trace: trace.csv}", "--set", "cluster.replicas=1")
    assert cli("simulate", *workload).status == 0


def test_profiles_and_catalogues_start_at_the_configuration(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "attention.csv").write_text("a,b\n1,2\n")
    for cluster, missing in (
        ("{cost: {kind: profile, attention: attention.csv, mlp: mlp.csv}}", "attention.csv': has no column"),
        ("{cost: {kind: profile, attention: absent.csv, mlp: mlp.csv}}", "absent.csv': cannot be read"),
        ("{catalogue: own.yaml}", "own.yaml': cannot be read"),
    ):
        config = f"workload: {{trace: trace.csv}}\ncluster: {cluster}\n"
        result = cli("simulate", config_file(tmp_path, "0,10,3", config=config))
        assert result.status == 2
        assert f"'{tmp_path}/{missing}" in result.err


@pytest.fixture
def short_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "NUM_LOGGED_BATCHES", 7)


def read_trace(path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    events = json.loads(path.read_text())["traceEvents"]
    batches = [event for event in events if event["ph"] == "X"]
    return batches, [event for event in events if event["ph"] == "M"]


@pytest.mark.usefixtures("short_log")
def test_trace_has_every_batch_of_the_run_of_vidur(cli: Cli, tmp_path: Path) -> None:
    trace = GOLDEN / "trace_over_4r.csv.gz"
    config = config_file(tmp_path, config=EXAMPLE.replace("trace.csv", str(trace)))
    overrides = ("--set", "cluster.scheduler.kind=vllm", "--set", "policy.kind=vidur-lor")
    out = tmp_path / "trace.json"
    metrics = cli("simulate", config, *overrides, "--trace-out", out, "--json").json["metrics"]
    batches, metadata = read_trace(out)
    assert len(batches) == metrics["batches"]
    names = {event["args"]["name"] for event in metadata}
    assert names == {"cluster", *(f"replica {k} (A100-80)" for k in range(4))}
    expected = read_rows(GOLDEN / "batches_vllm_lor_4r_over.csv")
    for batch, row in zip(batches, expected, strict=False):
        assert batch["tid"] == int(row["replica_id"])
        assert batch["ts"] == pytest.approx(1e6 * float(row["scheduled_at"]), abs=1e-3)
        assert batch["ts"] + batch["dur"] == pytest.approx(1e6 * float(row["completed_at"]), abs=2e-3)
        assert batch["args"] == {
            "sequences": int(row["batch_size"]),
            "prefill_tokens": int(row["num_prefill_tokens"]),
            "decodes": int(row["num_decode_tokens"]),
            "kv_blocks": int(row["allocated_blocks_after_end"]),
        }


@pytest.mark.usefixtures("short_log")
@pytest.mark.parametrize("num_stages", [1, 3])
def test_batches_on_one_line_of_the_trace_do_not_overlap(cli: Cli, tmp_path: Path, num_stages: int) -> None:
    out = tmp_path / "trace.json"
    stages = ("--set", f"cluster.scheduler.pipeline_stages={num_stages}")
    metrics = cli("simulate", *SMALL, *stages, "--trace-out", out, "--json").json["metrics"]
    batches, metadata = read_trace(out)
    assert len(batches) == metrics["batches"]
    assert len(metadata) == 1 + 4 * num_stages
    ends_us: dict[int, float] = {}
    for batch in sorted(batches, key=lambda batch: batch["ts"]):
        assert batch["ts"] >= ends_us.get(batch["tid"], 0.0) - 0.01
        ends_us[batch["tid"]] = batch["ts"] + batch["dur"]
    assert len(ends_us) == 4 * num_stages


def test_logging_batches_changes_nothing(cli: Cli, tmp_path: Path) -> None:
    plain = cli("simulate", *SMALL, "--json").json["metrics"]
    logged = cli("simulate", *SMALL, "--trace-out", tmp_path / "t.json", "--json").json["metrics"]
    assert plain == logged


def test_unfinished_requests_are_a_warning(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = evaluation.simulate

    def lose_one(*arguments: Any, **options: Any) -> Any:
        outcome = real(*arguments, **options)[0]
        outcome.requests["completed_at"][1] = -1.0
        outcome.requests["first_token_at"][1] = -1.0
        outcome.metrics["num_unfinished"] = 1.0
        return [outcome]

    monkeypatch.setattr(evaluation, "simulate", lose_one)
    out = tmp_path / "out.csv"
    result = cli("simulate", config_file(tmp_path, "0,10,3", "1,10,3"), "--requests", out)
    assert result.status == 0
    assert result.err.splitlines()[1:] == ["warning: 1 of 2 requests never finished and count in no latency"]
    row = read_rows(out)[1]
    assert row["scheduled_at"] == "1.0"
    assert row["first_token_at"] == row["completed_at"] == ""
