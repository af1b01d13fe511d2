from __future__ import annotations

from pathlib import Path

import pytest

from pointsman.cli.explain import sparkline

from .conftest import Cli


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As training leaves it: an untrained network that sends to where the least is outstanding."""
    from pointsman.inference.checkpoint import NetworkSpec, save_checkpoint
    from pointsman.inference.space import EntitySpace
    from pointsman.routing.features import CONTEXT_FEATURES, ENTITY_FEATURES
    from pointsman.training.networks import build_network, to_checkpoint

    folder = tmp_path_factory.mktemp("run")
    (folder / "checkpoints").mkdir()
    spec = NetworkSpec(width=8, hint="outstanding", hint_strength=5.0, privileged_critic=False)
    network = build_network(spec, EntitySpace(4, ENTITY_FEATURES, CONTEXT_FEATURES, ()), seed=0)
    save_checkpoint(folder / "checkpoints" / "best.safetensors", to_checkpoint(network, {}))
    return folder


def test_where_it_decides_is_where_it_was_trained(cli: Cli, run: Path, tmp_path: Path) -> None:
    from dataclasses import replace

    from pointsman.inference.checkpoint import load_checkpoint, save_checkpoint

    checkpoint = load_checkpoint(run / "checkpoints" / "best.safetensors")
    path = tmp_path / "code.safetensors"
    save_checkpoint(path, replace(checkpoint, metadata={"scenarios": ["steady-code"]}))
    for arguments, scenarios in (((), ["steady-code"]), (("--scenario", "light-chat"), ["light-chat"])):
        assert cli("explain", path, *arguments, "--decisions", 8, "--json").json["scenarios"] == scenarios


def test_what_matters_comes_first(cli: Cli, run: Path) -> None:
    result = cli("explain", run, "--decisions", 64)
    assert (result.status, result.err) == (0, "")
    lines = [line.split() for line in result.out.splitlines()]
    groups = lines.index(["group", "features", "changed", "probability", "lost", "KL,", "nats"])
    features = lines.index(["feature", "changed", "probability", "lost", "KL,", "nats"])
    assert lines[groups + 2][0] == "load"
    assert lines[features + 2][0] == "outstanding"
    assert any(line[:2] == ["outstanding", "log2(1"] and line[-1].startswith("█") for line in lines if line)
    assert max(map(len, result.out.splitlines())) <= 100


def test_as_json_from_the_checkpoint_itself(cli: Cli, run: Path) -> None:
    path = run / "checkpoints" / "best.safetensors"
    arguments = ("--scenario", "mixed-hardware", "--decisions", 64, "--json")
    found = cli("explain", path, "--feature", "prompt", "--feature", "outstanding", *arguments).json
    assert found["scenarios"] == ["mixed-hardware"]
    assert found["decisions"] == 64
    assert found["features"][0]["name"] == "outstanding"
    assert 0 < found["features"][0]["changed"] <= 1
    prompt, outstanding = found["dependence"]
    assert (prompt["name"], prompt["part"]) == ("prompt", "context")
    assert len(outstanding["values"]) == len(outstanding["probability"]) == 16
    assert outstanding["probability"][0] > outstanding["probability"][-1]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["least-work"], "POLICY = 'least-work': is not a trained policy"),
        (["{run}", "--feature", "promt"], "--feature = 'promt': unknown feature; did you mean 'prompt'?"),
        (["{run}", "--scenario", "steady"], "--scenario = 'steady': unknown scenario"),
        (["{run}", "--decisions", "1"], "--decisions = 1: are too few"),
        (["{run}/nothing"], "policy = '{run}/nothing': no such file"),
    ],
)
def test_bad_input_is_one_line(cli: Cli, run: Path, arguments: list[str], error: str) -> None:
    result = cli("explain", *(argument.format(run=run) for argument in arguments))
    assert result.status == 2
    assert result.err.startswith(f"error: {error.format(run=run)}")
    assert len(result.err.splitlines()) == 1


def test_a_sparkline_starts_from_nothing() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([0.25, 0.25]) == "██"
