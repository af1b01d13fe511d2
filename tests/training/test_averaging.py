"""What a run leaves in the end, if it averages its best policies."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from pointsman.errors import InputError
from pointsman.inference.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from pointsman.spec import parse_spec
from pointsman.training.averaging import average_of_best
from pointsman.training.config import RunSpec
from pointsman.training.networks import build_network

from .fakes import FakeEnv, FakeSpec
from .test_runs import CONFIG, start


def write_policies(folder: Path, scores: list[float]) -> list[Checkpoint]:
    """One kept policy for each score."""
    made = []
    for update, score in enumerate(scores):
        space = FakeEnv(FakeSpec(), 1).space
        network = build_network(CONFIG.network, space, seed=update)
        arrays = {name: tensor.numpy() for name, tensor in network.state_dict().items()}
        metadata = {"update": update, "metrics": {"eval_score": score}}
        made.append(Checkpoint(CONFIG.network, space, arrays, metadata))
        save_checkpoint(folder / f"update-{update:06d}.safetensors", made[-1])
    return made


def test_the_best_policies_are_averaged(tmp_path: Path) -> None:
    made = write_policies(tmp_path, [0.1, 0.5, 0.2, 0.4])
    found = average_of_best(tmp_path, 2, 0.1, lambda policy: {"eval_score": 0.45})
    assert found is not None
    assert found.updates == [1, 3]
    assert found.metrics == {"eval_score": 0.45}
    for name, array in found.policy.arrays.items():
        assert array.dtype == made[1].arrays[name].dtype
        if np.issubdtype(array.dtype, np.floating):
            mean = (made[1].arrays[name].astype(float) + made[3].arrays[name]) / 2
            np.testing.assert_allclose(array, mean, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(("score", "is_taken"), [(0.31, True), (0.29, False), (0.05, False)])
def test_an_average_that_lost_what_was_gained_is_not_taken(
    tmp_path: Path, score: float, is_taken: bool
) -> None:
    write_policies(tmp_path, [0.1, 0.5, 0.5])
    found = average_of_best(tmp_path, 2, 0.1, lambda policy: {"eval_score": score})
    assert (found is not None) == is_taken


def test_too_few_policies_are_not_averaged(tmp_path: Path) -> None:
    write_policies(tmp_path, [0.1, 0.5])
    assert average_of_best(tmp_path, 3, 0.1, lambda policy: {"eval_score": 1.0}) is None


def test_a_run_leaves_the_average(tmp_path: Path) -> None:
    run = CONFIG.run.model_copy(update={"keep": 1, "average_best": 2})
    result = start(CONFIG.model_copy(update={"run": run}), tmp_path / "run")
    finished = json.loads((tmp_path / "run" / "finished.json").read_text())
    assert result.average is not None, "of this toy problem's policies the average is a good one"
    assert finished["averaged"] == result.average.updates
    left = load_checkpoint(tmp_path / "run" / "checkpoints" / "best.safetensors")
    expected = average_of_best(
        tmp_path / "run" / "checkpoints", 2, -1e9, lambda policy: result.average.metrics
    )
    assert expected is not None
    for name, array in left.arrays.items():
        assert array.tobytes() == expected.policy.arrays[name].tobytes(), name
    assert left.metadata["metrics"]["eval_score"] == result.average.metrics["eval_score"]


def test_averaging_needs_policies_that_were_kept() -> None:
    with pytest.raises(InputError, match=r"run\.keep = None: missing beside run\.average_best; give 1"):
        parse_spec(RunSpec, {"steps": 1000, "average_best": 5})
