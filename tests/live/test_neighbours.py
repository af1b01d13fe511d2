"""What a neighbour's step on the same card costs, from simulated traffic of servers with known costs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from simulator.factories import Run, make_cluster, make_workload

from pointsman.cli.calibrate import calibrate, described
from pointsman.errors import InputError
from pointsman.live.neighbours import pace_beside
from pointsman.live.probing import Facts
from pointsman.live.traffic import fit_server, read_traffic
from pointsman.router.replicas.discovery import FileSource
from pointsman.simulator.plan import plan_replicas

SERVERS = ("http://a", "http://b")
COSTS = ({"a": 0.0065, "b": 3.7e-5, "c": 8e-5}, {"a": 0.0088, "b": 8.7e-5, "c": 1.6e-4})
NEIGHBOUR_STEP_S = (0.0017, 0.0021)
SCHEDULER = {"kind": "vllm-v1", "num_blocks": 11_000, "max_num_batched_tokens": 8192}
PAUSE_S = 5.0
FACTS = Facts("m", 8192, 16, 11_000)


def record(
    path: Path,
    policies: Sequence[str] = ("least-outstanding", "default", "late-binding"),
    neighbour_step_s: Sequence[float] = NEIGHBOUR_STEP_S,
    **columns: Any,
) -> Path:
    """What a router would record of both servers: 40 s under each policy."""
    tables, began_at = [], 0.0
    groups = [
        {"cost": {"kind": "linear", **cost}, "card": "one", "neighbour_step_s": extra_s}
        for cost, extra_s in zip(COSTS, neighbour_step_s, strict=True)
    ]
    for seed, policy in enumerate(policies):
        rng = np.random.default_rng(seed)
        arrived = np.cumsum(rng.exponential(1 / 12.5, 500))
        prompts, outputs = (1 + rng.exponential(mean, 500).astype(int) for mean in (1100, 170))
        workload = make_workload(arrived, np.minimum(prompts, 8000), np.minimum(outputs, 400))
        made = Run(make_cluster(replicas=groups, scheduler=SCHEDULER), workload, policy).to_end().requests
        times = {name: made[name] + began_at for name in ("arrived_at", "first_token_at", "completed_at")}
        lengths = {f"num_{kind}_tokens": made[f"num_{kind}"] for kind in ("prefill", "decode")}
        servers = np.array(SERVERS)[made["replica"]]
        tables.append(pl.DataFrame(times | lengths | {"server": servers, "policy": policy}))
        began_at = float(times["completed_at"].max()) + PAUSE_S
    pl.concat(tables).with_columns(**columns).write_ndjson(path)
    return path


def other(server: str) -> str:
    return SERVERS[1 - SERVERS.index(server)]


def test_a_neighbours_steps_are_told_from_own_ones(tmp_path: Path) -> None:
    table = read_traffic(record(tmp_path / "traffic.jsonl"))
    for server, cost, extra_s in zip(SERVERS, COSTS, NEIGHBOUR_STEP_S, strict=True):
        fit = fit_server(table, server, [other(server)])
        assert fit.card is not None and fit.card.doubt is None
        assert fit.card.name == "http://a http://b"
        assert fit.card.neighbour_step_s == pytest.approx(extra_s, rel=0.25)
        assert fit.cost["a"] == pytest.approx(cost["a"], rel=0.05)
        assert fit.cost["b"] == pytest.approx(cost["b"], rel=0.1)
        assert fit.cost["c"] == pytest.approx(cost["c"], rel=0.15)
        assert abs(fit.replayed["e2e_mean"]) < 0.03
        # Without the neighbour all of it would be the server's own step.
        alone = fit_server(table, server)
        assert alone.card is None
        assert alone.cost["a"] > cost["a"] + 0.25 * extra_s
        # What the router is told is among them, too.
        assert fit.speeds["step_floor_s"] == pytest.approx(alone.cost["a"], rel=0.15)


def test_neighbours_that_cost_nothing_are_found_to(tmp_path: Path) -> None:
    table = read_traffic(record(tmp_path / "traffic.jsonl", neighbour_step_s=(0.0, 0.0)))
    for server in SERVERS:
        card = fit_server(table, server, [other(server)]).card
        assert card is not None and card.neighbour_step_s < 0.0002


def test_the_description_is_one_of_servers_on_one_card(tmp_path: Path) -> None:
    import yaml

    traffic = record(tmp_path / "traffic.jsonl")
    for name, server in zip("ab", SERVERS, strict=True):
        data = described(server, FACTS, traffic, [other(server)])
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(data))
    groups = [{"description": f"{name}.yaml"} for name in "ab"]
    plans = plan_replicas(make_cluster(replicas=groups), tmp_path)
    assert [plan.num_neighbours for plan in plans] == [1, 1]
    assert [plan.neighbour_step_s for plan in plans] == pytest.approx(NEIGHBOUR_STEP_S, rel=0.25)
    backend = FileSource(tmp_path / "a.yaml").read()[0]
    assert backend.calibration is not None
    assert 1.05 < backend.calibration["step_floor_s"] / COSTS[0]["a"] < 1.3


def test_one_policy_is_said_to_be_too_few(tmp_path: Path) -> None:
    traffic = record(tmp_path / "traffic.jsonl", ["least-outstanding"] * 3)
    measured = described(SERVERS[0], FACTS, traffic, [SERVERS[1]])["measured"]
    assert (
        "what a neighbour's step costs: least-outstanding alone was recorded" in measured["undetermined"][0]
    )


def test_what_traffic_cannot_tell_is_taken_as_nothing(tmp_path: Path) -> None:
    """The neighbour's answers have times that say nothing about its steps."""
    noise = pl.col("first_token_at") + np.random.default_rng(0).exponential(3.0, 1500)
    is_b = pl.col("server") == SERVERS[1]
    made_up = pl.when(is_b).then(noise).otherwise(pl.col("completed_at"))
    traffic = record(tmp_path / "traffic.jsonl", completed_at=made_up)
    data = described(SERVERS[0], FACTS, traffic, [SERVERS[1]])
    assert data["replica"]["neighbour_step_s"] == 0.0
    assert "taken as 0" in data["measured"]["undetermined"][0]


def test_the_pace_of_neighbours() -> None:
    """Two answers with a token each 10 and 20 ms, then nothing."""
    beside = pl.DataFrame(
        {"first_token_at": [0.0, 10.0], "completed_at": [10.0, 20.0], "num_decode_tokens": [1001, 501]}
    )
    rows = pl.DataFrame({"first_token_at": [2.0, 8.0, 12.0, 25.0], "completed_at": [6.0, 12.0, 16.0, 30.0]})
    assert pace_beside(rows, [beside]) == pytest.approx([100.0, 75.0, 50.0, 0.0], rel=0.02)
    assert pace_beside(rows, [beside, beside])[0] == pytest.approx(200.0, rel=0.02)


def test_what_the_router_held_is_not_the_servers_time(tmp_path: Path) -> None:
    """First tokens came half a second later, which the router held all requests for."""
    held_s = 0.5
    plain = read_traffic(record(tmp_path / "plain.jsonl"))
    earlier = record(tmp_path / "held.jsonl", arrived_at=pl.col("arrived_at") - held_s, held_s=held_s)
    held = read_traffic(earlier)
    np.testing.assert_allclose(held["arrived_at"], plain["arrived_at"], atol=1e-9)
    np.testing.assert_allclose(held["first_token_at"], plain["first_token_at"])


def test_neighbours_that_are_not_there(tmp_path: Path) -> None:
    traffic = record(tmp_path / "traffic.jsonl", ["round-robin"])
    with pytest.raises(InputError, match="has no requests of http://c, but of http://a, http://b"):
        described(SERVERS[0], FACTS, traffic, ["http://c"])
    with pytest.raises(InputError, match="--neighbour = 'http://b': shares the card of a server"):
        calibrate(traffic=traffic, neighbours=["http://b"])
