"""`pointsman calibrate --traffic`: step times from what a router recorded."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from pointsman.cli.calibrate import calibrate
from pointsman.emulator.replica import EmulatedReplica
from pointsman.errors import InputError
from pointsman.live.traffic import fit_server, fit_traffic, read_traffic
from pointsman.router.replicas.discovery import FileSource
from pointsman.router.telemetry.recording import Recorder, Speed, new_recording
from pointsman.simulator.plan import plan_replicas
from tests.router.ended import Over, ended
from tests.simulator.factories import Run, make_cluster, random_workload

from .known_times import API_S, SCHEDULER, decode_s, truth, with_server


def test_recorded_traffic_gives_a_line(tmp_path: Path) -> None:
    cost = {"kind": "linear", "a": 0.01, "b": 1e-4, "c": 5e-4}
    run = Run(make_cluster(replicas=1, cost=cost), random_workload(600, 6.0, mean_tokens=120.0)).to_end()
    table = pl.DataFrame(
        {name: run.requests[name] for name in ("arrived_at", "first_token_at", "completed_at")}
        | {"num_prefill_tokens": run.requests["num_prefill"], "num_decode_tokens": run.requests["num_decode"]}
    )
    path = tmp_path / "traffic.jsonl"
    table.write_ndjson(path)
    (fit,) = fit_traffic(read_traffic(path))
    assert fit.cost["a"] == pytest.approx(0.01, rel=0.05)
    assert fit.cost["b"] == pytest.approx(1e-4, rel=0.1)
    assert fit.cost["c"] == pytest.approx(5e-4, rel=0.1)
    arrivals = tmp_path / "arrivals.jsonl"
    table.select("arrived_at", "num_prefill_tokens", "num_decode_tokens").write_ndjson(arrivals)
    with pytest.raises(InputError, match="alone say nothing about speed"):
        read_traffic(arrivals)


def written_traffic(path: Path, **changed: Any) -> Path:
    """Recorded requests of a server with steps of 10 ms, with other columns."""
    cost = {"kind": "linear", "a": 0.01, "b": 1e-4, "c": 5e-4}
    run = Run(make_cluster(replicas=1, cost=cost), random_workload(300, 6.0, mean_tokens=120.0)).to_end()
    columns = {name: run.requests[name] for name in ("arrived_at", "first_token_at", "completed_at")}
    columns |= {"num_prefill_tokens": run.requests["num_prefill"]}
    columns |= {"num_decode_tokens": run.requests["num_decode"]}
    table = pl.DataFrame(columns).with_columns(**changed)
    table.write_ndjson(path)
    return path


TIME_COLUMNS = ("arrived_at", "first_token_at", "completed_at")


DATED = {
    name: pl.from_epoch((1e6 * (pl.col(name) + 1.7e9)).cast(pl.Int64), "us").dt.strftime("%FT%T%.6f")
    for name in TIME_COLUMNS
}


TEXT = {name: pl.col(name).cast(pl.String) + " " for name in (*TIME_COLUMNS, "num_prefill_tokens")}


TWICE = {"prompt_tokens": pl.col("num_prefill_tokens")}


@pytest.mark.parametrize("changed", [DATED, TEXT, TWICE], ids=["dates", "text", "both names"])
def test_recorded_traffic_may_hold_dates_and_numbers_as_text(changed: Any, tmp_path: Path) -> None:
    plain, other = (
        fit_traffic(read_traffic(written_traffic(tmp_path / name, **columns)))[0]
        for name, columns in (("plain.jsonl", {}), ("other.jsonl", changed))
    )
    for name, value in plain.cost.items():
        assert other.cost[name] == pytest.approx(value, rel=1e-3)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"held_s": pl.lit("x")}, "column held_s holds 'x', which is no number"),
        ({"arrived_at": pl.lit([1.0])}, "column arrived_at holds"),
        ({"completed_at": pl.lit("2023-02-30 10:00")}, "column completed_at holds '2023-02-30 10:00'"),
        ({"outcome": pl.lit("failed")}, "none of its 300 requests was completed"),
        ({"server": pl.lit(None)}, "none of its 300 requests was completed by a server"),
        ({"first_token_at": pl.lit(None)}, "with all of its times"),
        ({"completed_at": pl.col("arrived_at") - 1}, "completed_at is before first_token_at in 300 of 300"),
        ({"first_token_at": pl.col("arrived_at") - 1}, "first_token_at is before arrived_at in 300 of 300"),
        ({"num_cached_tokens": pl.lit(100_000)}, "num_cached_tokens is more than the prompt in 300 of 300"),
        ({name: 1000 * pl.col(name) for name in TIME_COLUMNS}, "as if times were not in seconds"),
    ],
)
def test_recorded_traffic_that_cannot_be_is_refused_by_column(
    changed: Any, message: str, tmp_path: Path
) -> None:
    path = written_traffic(tmp_path / "traffic.jsonl", **changed)
    with pytest.raises(InputError, match=f"--traffic = .*{re.escape(message)}"):
        read_traffic(path)
    with pytest.raises(InputError):
        calibrate(traffic=path, out=tmp_path / "out.yaml")
    assert not (tmp_path / "out.yaml").exists()


def test_answers_that_did_not_stream_tell_nothing_of_steps(tmp_path: Path) -> None:
    path = written_traffic(tmp_path / "traffic.jsonl", completed_at=pl.col("first_token_at"))
    with pytest.raises(InputError, match="none of its answers streamed 8 tokens or more"):
        fit_traffic(read_traffic(path))


def test_what_was_cached_costs_nothing(tmp_path: Path) -> None:
    cost = {"kind": "linear", "a": 0.01, "b": 1e-4, "c": 5e-4}
    run = Run(make_cluster(replicas=1, cost=cost), random_workload(600, 6.0, mean_tokens=120.0)).to_end()
    cached = np.random.default_rng(3).integers(0, 1000, len(run.requests))
    pl.DataFrame(
        {name: run.requests[name] for name in ("arrived_at", "first_token_at", "completed_at")}
        | {"prompt_tokens": run.requests["num_prefill"] + cached, "cached_tokens": cached}
        | {"output_tokens": run.requests["num_decode"]}
    ).write_csv(tmp_path / "traffic.csv")
    (fit,) = fit_traffic(read_traffic(tmp_path / "traffic.csv"))
    assert fit.cost["b"] == pytest.approx(1e-4, rel=0.1)


def test_what_the_router_records_can_be_calibrated_by(tmp_path: Path) -> None:
    """Two servers, requests that failed, and some that did not stream."""
    path = tmp_path / "traffic.jsonl"
    recorder = Recorder(new_recording(path))
    costs = {"http://a": 0.01, "http://b": 0.02}
    for server, step_s in costs.items():
        cost = {"kind": "linear", "a": step_s, "b": 1e-4, "c": 5e-4}
        workload = random_workload(500, 4.0, mean_tokens=120.0)
        for n, one in enumerate(Run(make_cluster(replicas=1, cost=cost), workload).to_end().requests):
            is_cut = n % 50 == 0
            over = Over(
                arrived_at=recorder._started_at + float(one.arrived_at),
                prompt_tokens=int(one.num_prefill),
                output_tokens=int(one.num_decode),
                session_name="the first one" if n == 400 else None,
                outcome="cut" if is_cut else "completed",
                replica_name=server,
                ttft_s=None if is_cut else float(one.first_token_at - one.arrived_at),
                e2e_s=900.0 if is_cut else float(one.completed_at - one.arrived_at),
            )
            recorder.add(ended(over), lambda server: Speed(None, None, None, None))
    recorder.close()
    fits = fit_traffic(read_traffic(path))
    assert [fit.server for fit in fits] == list(costs)
    for fit in fits:
        assert fit.cost["a"] == pytest.approx(costs[fit.server], rel=0.1)
        assert fit.cost["b"] == pytest.approx(1e-4, rel=0.25)


@pytest.mark.parametrize("is_async", [False, True])
def test_recorded_traffic_tells_the_times_beside_the_steps(is_async: bool, tmp_path: Path) -> None:
    """By a replay, which says how far off the fit is; half of the requests are another server's."""
    rng = np.random.default_rng(4)
    scheduler = {"kind": "vllm-v1", "num_blocks": 4000, "max_num_batched_tokens": 8192}
    scheduler |= {"async_scheduling": is_async, "api_s": API_S}
    cost = {"kind": "linear", "a": 0.015, "b": 8e-5, "c": 4e-4}
    run = Run(
        make_cluster(replicas=1, scheduler=scheduler, cost=cost), random_workload(500, 4.0, mean_tokens=150.0)
    ).to_end()
    mine = {name: run.requests[name] for name in ("arrived_at", "first_token_at", "completed_at")}
    mine |= {
        "num_prefill_tokens": run.requests["num_prefill"],
        "num_decode_tokens": run.requests["num_decode"],
    }
    late_s = rng.uniform(0, 1, len(run.requests))
    other = mine | {name: mine[name] + late_s for name in ("first_token_at", "completed_at")}
    tables = [pl.DataFrame(one | {"server": name}) for one, name in ((mine, "http://a"), (other, "http://b"))]
    pl.concat(tables).write_ndjson(tmp_path / "traffic.jsonl")
    fit = fit_server(read_traffic(tmp_path / "traffic.jsonl"), "http://a", num_blocks=4000)
    assert fit.server == "http://a"
    assert fit.scheduler["async_scheduling"] == is_async
    assert fit.scheduler["api_s"] == pytest.approx(API_S, abs=0.003)
    assert fit.scheduler["num_blocks"] == 4000
    assert abs(fit.replayed["ttft_mean"]) < 0.05
    assert abs(fit.replayed["e2e_mean"]) < 0.02


def test_traffic_and_what_the_server_says_make_one_file(tmp_path: Path) -> None:
    """As a user whose servers share a card would do: nothing is probed."""
    cost = {"kind": "linear", "a": 0.01, "b": 1e-4, "c": 5e-4}
    run = Run(make_cluster(replicas=1, cost=cost), random_workload(300, 4.0, mean_tokens=120.0)).to_end()
    times = {name: run.requests[name] for name in ("arrived_at", "first_token_at", "completed_at")}
    table = pl.DataFrame(
        times
        | {"num_prefill_tokens": run.requests["num_prefill"], "num_decode_tokens": run.requests["num_decode"]}
    )
    traffic, out = tmp_path / "traffic.jsonl", tmp_path / "server.yaml"

    async def ask(replica: EmulatedReplica) -> None:
        def call() -> None:
            table.with_columns(server=pl.lit(replica.url + "/")).write_ndjson(traffic)
            calibrate(url=replica.url, traffic=traffic, out=out)
            table.with_columns(server=pl.lit("http://else")).write_ndjson(traffic)
            with pytest.raises(InputError, match=r"has no requests of .* but of http://else"):
                calibrate(url=replica.url, traffic=traffic)

        await asyncio.to_thread(call)

    with_server(truth(is_async=False), ask)
    plan = plan_replicas(make_cluster(replicas=[{"description": "server.yaml"}]), tmp_path)[0]
    assert plan.num_blocks == SCHEDULER["num_blocks"]
    assert decode_s(plan, 8, 100) == pytest.approx(0.01 + 8 * 5e-4, rel=0.1)
    backend = FileSource(out).read()[0]
    assert backend.calibration is not None
    assert backend.calibration["prefill_s_per_token"] == pytest.approx(1e-4, rel=0.15)


def test_what_is_no_recording_is_told_in_words(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("cluster: {replicas: 4}\n")
    with pytest.raises(InputError) as caught:
        read_traffic(path)
    assert "cannot be read as JSON lines, as its name does not end in .csv" in str(caught.value)
