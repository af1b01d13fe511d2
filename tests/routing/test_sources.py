from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pointsman.config import load_config
from pointsman.errors import InputError
from pointsman.experiments.scenarios import find_scenario
from pointsman.inference.checkpoint import save_checkpoint
from pointsman.routing import sources
from pointsman.routing.heuristics import HEURISTICS
from pointsman.routing.policy import PolicySpec, PolicyTables
from pointsman.spec import parse_spec

from .learned import make_checkpoint, make_run

WORKLOAD = "workload: {arrivals: {kind: poisson, rate: 5}, lengths: azure-conv, requests: 20}\n"
POLICY = "policy: {kind: linear-score, weights: {outstanding: 1, kv_use: 2}}\nmade: {command: by hand}\n"


def named(kind: Any) -> PolicySpec:
    return parse_spec(PolicySpec, {"kind": str(kind)}, "policy")


@pytest.fixture
def policy_file(tmp_path: Path) -> Path:
    path = tmp_path / "tuned.yaml"
    path.write_text(POLICY)
    return path


@pytest.mark.parametrize("kind", [kind for kind in HEURISTICS if kind != "linear-score"])
def test_heuristics_are_called_by_their_names(kind: str) -> None:
    assert named(kind) == PolicySpec(kind=kind)
    assert named(kind).label == kind
    assert PolicySpec.model_validate(kind) == PolicySpec(kind=kind)


def test_a_policy_file(policy_file: Path) -> None:
    spec = named(policy_file)
    assert (spec.kind, spec.label) == ("linear-score", "tuned")
    assert spec.weights == {"outstanding": 1, "kv_use": 2}


def test_what_was_found_can_be_written_and_read_again(policy_file: Path, tmp_path: Path) -> None:
    for spec in (named(policy_file), named(make_run(tmp_path / "run"))):
        assert parse_spec(PolicySpec, spec.model_dump(mode="json"), "policy") == spec


def test_a_run_stands_for_its_best_checkpoint(tmp_path: Path) -> None:
    run = make_run(tmp_path / "first")
    best = run / "checkpoints" / "best.safetensors"
    assert named(run) == named(best)
    assert (named(run).kind, named(run).label, named(run).checkpoint) == ("learned", "first", best)
    last = named(run / "checkpoints" / "last.safetensors")
    assert last.label == "first/last" and last.checkpoint != best


def test_the_default_is_the_one_in_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "DEFAULT_CHECKPOINT", tmp_path / "default.safetensors")
    for name in sources.SHIPPED:
        with pytest.raises(InputError, match="comes without this trained policy"):
            named(name)
        path = tmp_path / f"{name}.safetensors"
        save_checkpoint(path, make_checkpoint())
        assert (named(name).label, named(name).checkpoint) == (name, path)


def test_a_trained_policy_may_be_told_how_late_a_first_token_may_be(tmp_path: Path) -> None:
    policy = named("default-mean:0.3s")
    assert (policy.label, policy.detour_s) == ("default-mean:0.3s", 0.3)
    assert policy.checkpoint == named("default-mean").checkpoint and named("default-mean").detour_s is None
    assert named(f"{make_run(tmp_path)}:1.5s").detour_s == 1.5
    assert PolicyTables([policy, named("default")], 2).rows.detour_s.tolist() == [0.3, math.inf]
    trained = replace(make_checkpoint(), metadata={"detour_s": 0.4})
    save_checkpoint(tmp_path / "trained.safetensors", trained)
    own, other = named(f"{tmp_path}/trained.safetensors"), named(f"{tmp_path}/trained.safetensors:0.7s")
    assert PolicyTables([trained, own, other], 2).rows.detour_s.tolist() == [0.4, 0.4, 0.7]
    with pytest.raises(InputError, match="only a trained policy"):
        named("late-binding:0.3s")
    with pytest.raises(InputError, match="soons is not a time"):
        named("default:soons")
    with pytest.raises(InputError, match=r"policy.detour_s.*only for a learned policy"):
        parse_spec(PolicySpec, {"kind": "random", "detour_s": 1.0}, "policy")


def test_a_file_never_takes_the_name_of_a_heuristic(tmp_path: Path) -> None:
    path = tmp_path / "random.yaml"
    path.write_text(POLICY)
    assert named(path).label == "random.yaml"


def test_paths_in_a_configuration_start_at_its_folder(
    policy_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path / "run")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for text, label in (
        ("policy: {kind: tuned.yaml}", "tuned"),
        ("policy: tuned.yaml", "tuned"),
        ("policy: {kind: ./run}", "run"),
        ("policy: {kind: learned, checkpoint: run/checkpoints/best.safetensors}", "learned"),
    ):
        (tmp_path / "cluster.yaml").write_text(f"{WORKLOAD}{text}\n")
        spec = load_config(tmp_path / "cluster.yaml").policy
        assert spec.label == label
        assert spec.checkpoint is None or spec.checkpoint.exists()
    with pytest.raises(InputError, match="no such file"):
        named("tuned.yaml")  # from here


def test_paths_on_the_command_line_start_here(policy_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(policy_file.parent)
    config = find_scenario("steady-chat").config(0, ["policy.kind=tuned.yaml"])
    assert config.policy.weights == {"outstanding": 1, "kv_use": 2}


def test_a_policy_file_may_name_a_checkpoint_beside_it(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "net.safetensors", make_checkpoint())
    (tmp_path / "p.yaml").write_text("policy: {kind: learned, checkpoint: net.safetensors}\n")
    assert named(tmp_path / "p.yaml").checkpoint == tmp_path / "net.safetensors"


def test_a_policy_file_may_change_a_trained_policy(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("policy: {kind: default-mean:1s, small_first: 0.8}\n")
    found = named(tmp_path / "mine.yaml")
    assert (found.label, found.small_first, found.detour_s) == ("mine", 0.8, 1.0)
    assert found.checkpoint == sources.DEFAULT_CHECKPOINT.with_name("default-mean.safetensors")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("a: [", ["policy = ", "self.yaml", "not valid YAML"]),
        ("- 1", ["holds no keys", "policy:"]),
        (WORKLOAD, ["policy = ", "is not a policy file, but a cluster with its traffic", "pointsman tune"]),
        (WORKLOAD + POLICY, ["is not a policy file"]),
        ("policy: random", ["is not a policy file"]),
        ("policy: {kind: least-luck}", ["policy.kind", "least-luck", "unknown policy", "did you mean"]),
        ("policy: {kind: self.yaml}", ["policy.kind", "is a policy file of its own"]),
        ("policy: {kind: linear-score, weights: {luck: 1}}", ["policy.weights", "luck"]),
        ("policy: {kind: linear-score, weight: {outstanding: 1}}", ["policy.weight", "unknown key"]),
    ],
)
def test_what_is_no_policy_file(tmp_path: Path, content: str, words: list[str]) -> None:
    (tmp_path / "self.yaml").write_text(content)
    with pytest.raises(InputError) as caught:
        named(tmp_path / "self.yaml")
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("absent.yaml", ["absent.yaml", "no such file"]),
        ("absent/run", ["no such file"]),
        ("empty", ["no checkpoint in this directory", "best.safetensors"]),
        ("", ["unknown policy"]),
        ("traffic.csv", ["is a trace, not a policy", "a run"]),
        ("least-luck", ["unknown policy", "did you mean"]),
    ],
)
def test_what_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, words: list[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "traffic.csv").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError) as caught:
        named(name)
    for word in words:
        assert word in str(caught.value)


def test_a_damaged_checkpoint_is_refused_when_it_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "net.safetensors"
    path.write_bytes(b"not this")
    with pytest.raises(InputError, match=r"policy\.checkpoint.*damaged"):
        PolicyTables([named(path)], max_replicas=4)


def test_other_features_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "net.safetensors"
    other = make_checkpoint().space.entity_features[1:]
    save_checkpoint(path, make_checkpoint(entity_features=other))
    with pytest.raises(InputError, match="trained on other entity features"):
        PolicyTables([named(path)], max_replicas=4)


def test_an_mlp_takes_no_more_replicas_than_it_knows(tmp_path: Path) -> None:
    path = tmp_path / "net.safetensors"
    save_checkpoint(path, make_checkpoint(num_entities=4, kind="mlp"))
    for num_replicas in (1, 4):
        PolicyTables([named(path)], max_replicas=num_replicas)
    with pytest.raises(InputError, match="mlp for 4 entities"):
        PolicyTables([named(path)], max_replicas=5)


def test_a_checkpoint_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = named(make_run(tmp_path / "run"))
    tables = PolicyTables([spec, PolicySpec(), spec], max_replicas=4)
    assert tables.rows[0].network == tables.rows[2].network != 0
    assert tables.rows[0].scratch != tables.rows[2].scratch, "each cluster computes on its own"
