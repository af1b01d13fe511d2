from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from training.networks import KINDS, make_network, make_observation, make_space

from pointsman import files
from pointsman.errors import InputError
from pointsman.inference import checkpoint as module
from pointsman.inference.checkpoint import (
    Checkpoint,
    NetworkSpec,
    load_checkpoint,
    save_checkpoint,
    space_from_json,
    space_to_json,
)
from pointsman.inference.space import EntitySpace, Feature
from pointsman.spec import parse_spec
from pointsman.training.networks import from_checkpoint, to_checkpoint


def make_checkpoint(**spec: Any) -> Checkpoint:
    return to_checkpoint(make_network(**spec), {"config_digest": "abc", "eval_score": -1.5})


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_checkpoint(tmp_path / "policy.safetensors", make_checkpoint())
    return tmp_path / "policy.safetensors"


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_saved_comes_back(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "policy.safetensors"
    saved = make_checkpoint(kind=kind, hint="entity1", hint_strength=0.5, depth=3)
    save_checkpoint(path, saved)
    loaded = load_checkpoint(path)
    assert loaded.network == saved.network
    assert loaded.space == saved.space
    assert loaded.metadata["eval_score"] == -1.5 and "version" in loaded.metadata
    assert loaded.arrays.keys() == saved.arrays.keys()
    for name, array in saved.arrays.items():
        np.testing.assert_array_equal(loaded.arrays[name], array)
        assert loaded.arrays[name].dtype == array.dtype
    assert [file.name for file in tmp_path.iterdir()] == ["policy.safetensors"]


def test_the_same_policy_has_the_same_bytes(tmp_path: Path, saved: Path) -> None:
    save_checkpoint(tmp_path / "again.safetensors", load_checkpoint(saved))
    save_checkpoint(tmp_path / "anew.safetensors", make_checkpoint())
    assert (tmp_path / "anew.safetensors").read_bytes() == saved.read_bytes()
    again = load_checkpoint(tmp_path / "again.safetensors")
    assert again.metadata == load_checkpoint(saved).metadata


def test_a_failed_write_leaves_the_old_file(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = saved.read_bytes()

    def full_disk(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space"):
        save_checkpoint(saved, make_checkpoint(width=32))
    assert saved.read_bytes() == before
    assert [file.name for file in saved.parent.iterdir()] == [saved.name]


def test_inference_needs_no_pytorch(saved: Path) -> None:
    script = (
        "import sys; from pathlib import Path;"
        "from pointsman.inference.checkpoint import load_checkpoint;"
        "from pointsman.inference.network import NetworkTables;"
        f"NetworkTables(load_checkpoint(Path({str(saved)!r})));"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def cut_header(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:40])


def not_safetensors(path: Path) -> None:
    path.write_text("policy: least-outstanding\n")


def empty(path: Path) -> None:
    path.write_bytes(b"")


def remove(path: Path) -> None:
    path.unlink()


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def without_header(path: Path) -> None:
    save_file({"weight": np.zeros(3, np.float32)}, path)


def edit(change: Callable[[dict[str, Any], dict[str, Any]], None]) -> Callable[[Path], None]:
    """Changes the header and the arrays of a file, past our own checks."""

    def damage(path: Path) -> None:
        arrays = load_file(path)
        data = path.read_bytes()
        size = int.from_bytes(data[:8], "little")
        header = json.loads(json.loads(data[8 : 8 + size])["__metadata__"][module.HEADER])
        change(header, arrays)
        save_file(arrays, path, {module.HEADER: json.dumps(header)})

    return damage


def wrong_shape(_: dict[str, Any], arrays: dict[str, Any]) -> None:
    arrays["head.score.weight"] = arrays["head.score.weight"][:, :-1].copy()


def wrong_type(_: dict[str, Any], arrays: dict[str, Any]) -> None:
    arrays["actor.summary.bias"] = arrays["actor.summary.bias"].astype(np.float64)


def not_a_number(_: dict[str, Any], arrays: dict[str, Any]) -> None:
    arrays["actor.layers.1.weight"][0, 0] = np.nan


def no_hint(header: dict[str, Any], _: dict[str, Any]) -> None:
    header["network"] |= {"hint": "luck", "hint_strength": 1.0}


def nested(path: Path) -> None:
    save_file(load_file(path), path, {module.HEADER: "[" * 100_000})


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (truncate, ["damaged"]),
        (cut_header, ["damaged"]),
        (empty, ["damaged"]),
        (not_safetensors, ["not a safetensors file"]),
        (remove, ["no such file"]),
        (directory, ["directory"]),
        (without_header, ["not one of Pointsman's"]),
        (edit(wrong_shape), ["head.score.weight", "float32[1, 15]", "float32[1, 16]"]),
        (edit(wrong_type), ["actor.summary.bias", "float64"]),
        (edit(not_a_number), ["actor.layers.1.weight", "finite"]),
        (edit(lambda _, arrays: arrays.pop("entity_scale.shift")), ["entity_scale.shift", "missing"]),
        (edit(lambda header, _: header["network"].update(width=32)), ["float32[32, 12]"]),
        (edit(lambda header, _: header["network"].update(luck=32)), ["network.luck", "unknown key"]),
        (edit(lambda header, _: header.update(format=2)), ["format 2", "Pointsman"]),
        (edit(lambda header, _: header.pop("space")), ["not one of Pointsman's"]),
        (edit(lambda header, _: header["space"].update(entity_features=3)), ["not one of Pointsman's"]),
        (edit(lambda header, _: header["space"].update(num_entities="many")), ["not one of Pointsman's"]),
        (edit(lambda header, _: header["space"].update(num_entities=math.inf)), ["not one of Pointsman's"]),
        (edit(lambda header, _: header.update(metadata="none")), ["not one of Pointsman's"]),
        (nested, ["not one of Pointsman's"]),
        (edit(no_hint), ["luck", "not an entity feature"]),
    ],
)
def test_what_is_no_policy_is_refused_in_one_line(
    saved: Path, damage: Callable[[Path], None], words: list[str]
) -> None:
    damage(saved)
    with pytest.raises(InputError) as caught:
        load_checkpoint(saved, "--policy")
    message = str(caught.value)
    assert message.startswith("--policy") and "\n" not in message
    for word in words:
        assert word in message


def changed(space: EntitySpace, part: str, **change: str) -> EntitySpace:
    first, *rest = getattr(space, part)
    features = (first._replace(**change), *rest)
    return dataclasses.replace(space, **{part: features})


def test_another_feature_schema_is_refused() -> None:
    space = make_space()
    checkpoint = make_checkpoint()
    checkpoint.require_space(space, "--policy")
    checkpoint.require_space(make_space(64), "--policy")  # any number of entities
    checkpoint.require_space(changed(space, "privileged_features", name="other"), "--policy")  # for critics
    checkpoint.require_space(changed(space, "entity_features", meaning="said better"), "--policy")
    swapped = dataclasses.replace(space, entity_features=space.entity_features[::-1])
    for other, words in (
        (changed(space, "entity_features", name="other"), ["entity features", "entity0", "other"]),
        (changed(space, "context_features", unit="s"), ["context features", "context0 [s]"]),
        (dataclasses.replace(space, entity_features=space.entity_features[:-1]), ["entity6", "nothing"]),
        (swapped, ["another order"]),
    ):
        with pytest.raises(InputError) as caught:
            checkpoint.require_space(other, "--policy")
        assert all(word in str(caught.value) for word in words), str(caught.value)
    with pytest.raises(InputError, match="mlp for 4 entities"):
        make_checkpoint(kind="mlp").require_space(make_space(64), "--policy")


def more_features(space: EntitySpace) -> EntitySpace:
    def of(part: str) -> tuple[Feature, ...]:
        return (*getattr(space, part), Feature(f"new_{part}", "share", "new", "not known before"))

    return dataclasses.replace(
        space, entity_features=of("entity_features"), context_features=of("context_features")
    )


def test_features_that_came_later_are_named_and_not_seen() -> None:
    space = make_space()
    wide = more_features(space)
    checkpoint = make_checkpoint()
    checkpoint.require_space(wide, "--policy")
    assert checkpoint.lacks(wide) == ["new_entity_features", "new_context_features"]
    assert checkpoint.lacks(space) == []
    with pytest.raises(InputError, match="nothing"):
        make_checkpoint(kind="mlp").require_space(wide, "--policy")


@pytest.mark.parametrize("spec", [{}, {"kind": "attention"}, {"separate_critic": False}])
def test_widened_policy_is_the_same_whatever_the_new_features_are(spec: dict[str, Any]) -> None:
    network = make_network(**spec)
    seen = make_observation(20)
    wide = more_features(network.space)
    widened = from_checkpoint(to_checkpoint(network, {}).widened(wide))
    more = seen._replace(
        entities=torch.cat([seen.entities, torch.rand(20, 4, 1)], dim=2),
        context=torch.cat([seen.context, torch.rand(20, 1)], dim=1),
    )
    for mine, theirs in zip(widened(more)[:2], network(seen)[:2], strict=True):
        np.testing.assert_allclose(mine.detach(), theirs.detach(), rtol=1e-4, atol=1e-5)


def test_a_schema_survives_json() -> None:
    space = make_space()
    assert space_from_json(json.loads(json.dumps(space_to_json(space)))) == space


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"kind": "transformer"}, ["network.kind", "pooled"]),
        ({"kind": "attention", "width": 30}, ["network.heads", "30"]),
        ({"hint_strength": 1.0}, ["network.hint", "missing"]),
        ({"width": 0}, ["network.width"]),
        ({"widht": 64}, ["network.widht", "width"]),
    ],
)
def test_a_network_that_makes_no_sense_is_refused(data: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        parse_spec(NetworkSpec, data, "network")
    assert all(word in str(caught.value) for word in words), str(caught.value)
