"""Workers on a Ray cluster of several nodes, which Ray simulates on this machine."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.filterwarnings("default")  # of Ray's own imports

from ray.cluster_utils import Cluster  # noqa: E402
from training.fakes import fake_config  # noqa: E402
from training.test_sweep import Recorder  # noqa: E402

from pointsman.errors import InputError  # noqa: E402
from pointsman.training.config import TrainConfig  # noqa: E402
from pointsman.training.stopping import StopSwitch  # noqa: E402
from pointsman.training.sweep import Sweep, Trial  # noqa: E402
from pointsman.workers.processes import LocalProcesses  # noqa: E402
from pointsman.workers.ray_actors import RayActors  # noqa: E402

from .runs import NUM_UPDATES, Disturbed, assert_same, train  # noqa: E402


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head without room for workers, and two nodes for one worker each."""
    tests = str(Path(__file__).parents[1])
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = f"{tests}:{Path(tests).parent}:{before}"
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
    cluster.wait_for_nodes()
    yield cluster, nodes
    ray.shutdown()
    cluster.shutdown()
    os.environ["PYTHONPATH"] = before


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "whole"
    train(folder, LocalProcesses())
    return folder


def worker_and_node(nodes: list[Any]) -> tuple[int, Any]:
    """The process of the one worker, a child of the raylet of its node."""
    raylets = {node.all_processes["raylet"][0].process.pid: node for node in nodes}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            if parent in raylets and (path.parent / "cmdline").read_bytes().startswith(b"ray::_Actor"):
                return int(path.parent.name), raylets[parent]
    raise AssertionError("no worker runs")


def test_ray_and_local_processes_give_the_same_bytes(cluster: Any, whole: Path, tmp_path: Path) -> None:
    train(tmp_path / "run", RayActors(cluster[0].address))
    assert_same(tmp_path / "run", whole)


def test_a_sweep_trains_on_the_nodes(cluster: Any, tmp_path: Path) -> None:
    trials = [Trial(number, {"run.seed": number} if number else {}) for number in range(3)]

    def config_of(trial: Trial) -> TrainConfig:
        return fake_config(run={"seed": trial.number, "steps": 16 * 32 * 2, "evaluate_every": 1})

    made = Sweep(trials, config_of, tmp_path, {}, StopSwitch(), Recorder())
    made.run(RayActors(cluster[0].address), num_workers=2)
    assert [one.status for one in trials] == ["finished"] * 3
    assert len({one.best.score for one in trials if one.best}) == 3
    assert (tmp_path / "trials" / "02" / "checkpoints" / "best.safetensors").is_file()


def test_a_killed_worker_is_replaced(cluster: Any, whole: Path, tmp_path: Path) -> None:
    one, nodes = cluster
    show = Disturbed(3, lambda: os.kill(worker_and_node(nodes)[0], signal.SIGKILL))
    assert train(tmp_path / "run", RayActors(one.address), show).update == NUM_UPDATES
    assert len(show.said) == 1 and show.said[0].startswith("update 4: worker 1 ended unexpectedly")
    assert_same(tmp_path / "run", whole)


def test_a_node_that_dies_is_replaced_by_another(cluster: Any, whole: Path, tmp_path: Path) -> None:
    one, nodes = cluster

    def kill_node() -> None:
        """With all that runs on it, as if the power were cut."""
        pid, node = worker_and_node(nodes)
        one.remove_node(node, allow_graceful=False)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    show = Disturbed(2, kill_node)
    assert train(tmp_path / "run", RayActors(one.address), show).update == NUM_UPDATES
    assert len(show.said) == 1
    assert_same(tmp_path / "run", whole)


def test_a_ray_client_is_refused() -> None:
    with pytest.raises(InputError, match="ray job submit"):
        RayActors("ray://somewhere:10001")
