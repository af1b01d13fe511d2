from __future__ import annotations

from .conftest import Cli

FEW = ("--scenario", "steady-chat", "--policies", "random, least-outstanding", "--decisions", 64)


def test_every_feature_has_a_row(cli: Cli) -> None:
    from pointsman.envs.routing import ROUTING_FEATURES

    result = cli("audit-features", *FEW)
    assert (result.status, result.err) == (0, "")
    for feature in ROUTING_FEATURES:
        assert feature.name in result.out
    row = next(line for line in result.out.splitlines() if line.startswith("accepting "))
    assert row.split()[1:3] == ["replica", "1.00"]
    assert row.rstrip().endswith("1 of 1  dead")
    assert max(map(len, result.out.splitlines())) <= 100


def test_as_json(cli: Cli) -> None:
    found = cli("audit-features", *FEW, "--json").json
    assert found["scenarios"] == ["steady-chat"]
    assert found["policies"] == ["random", "least-outstanding"]
    features = {(one["part"], one["name"]): one for one in found["features"]}
    prompt = features["context", "prompt"]
    assert prompt["min"] < prompt["mean"] < prompt["max"]
    assert prompt["unit"] == "log2(tokens / 512)"
    assert prompt["flags"] == []
    assert features["replica", "accepting"]["flags"] == ["dead"]


def test_bad_input_is_one_line(cli: Cli) -> None:
    result = cli("audit-features", "--scenario", "steady-chats")
    assert result.status == 2
    assert result.err.splitlines() == [
        "error: --scenario = 'steady-chats': unknown scenario; did you mean 'steady-chat'?"
    ]
    assert cli("audit-features", "--decisions", "-1").err.startswith(
        "error: --decisions = -1: is not positive"
    )
