"""Our reader of event files against TensorBoard's own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from torch.utils.tensorboard import SummaryWriter

from pointsman.diagnosis.readers import read_run
from pointsman.diagnosis.tensorboard import read_scalars
from pointsman.errors import InputError

NUM = 50


@pytest.fixture
def file(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_text("note", "not a number")
        for step in range(NUM):
            writer.add_scalar("losses/entropy", rng.normal() * 10.0 ** rng.integers(-9, 9), 1000 * step)
            writer.add_scalar("charts/SPS", 300 * step, 1000 * step)
        writer.add_histogram("weights", np.arange(4.0), 0, bins=[0.0, 2.0, 4.0])
    (path,) = tmp_path.glob("*tfevents*")
    return path


def test_the_same_numbers_as_tensorboard(file: Path) -> None:
    scalars, is_cut = read_scalars(file)
    assert not is_cut
    board = EventAccumulator(str(file)).Reload()
    assert {one.tag for one in scalars} == set(board.Tags()["scalars"])
    for tag in board.Tags()["scalars"]:
        mine = [(one.step, one.value) for one in scalars if one.tag == tag]
        assert mine == [(event.step, event.value) for event in board.Scalars(tag)]


def test_scalars_as_tensors(tmp_path: Path) -> None:
    """As TensorFlow 2 writes them: the value itself, packed, or as bytes."""
    writer = EventFileWriter(str(tmp_path))
    shape = TensorShapeProto()
    tensors = [
        TensorProto(dtype="DT_FLOAT", float_val=[0.5], tensor_shape=shape),
        TensorProto(dtype="DT_DOUBLE", double_val=[0.25], tensor_shape=shape),
        TensorProto(dtype="DT_FLOAT", tensor_content=np.float32(0.125).tobytes(), tensor_shape=shape),
        TensorProto(dtype="DT_STRING", string_val=[b"words"], tensor_shape=shape),
    ]
    for step, tensor in enumerate(tensors):
        value = Summary.Value(tag="kl", tensor=tensor)
        writer.add_event(Event(step=step, summary=Summary(value=[value])))
    writer.close()
    (path,) = tmp_path.glob("*tfevents*")
    assert [(one.step, one.value) for one in read_scalars(path)[0]] == [(0, 0.5), (1, 0.25), (2, 0.125)]


@pytest.mark.parametrize("share", [0.3, 0.5, 0.9])
def test_a_file_cut_off_gives_what_came_before(file: Path, share: float) -> None:
    whole, _ = read_scalars(file)
    data = file.read_bytes()
    file.write_bytes(data[: int(share * len(data))])
    scalars, is_cut = read_scalars(file)
    assert is_cut
    assert 0 < len(scalars) < len(whole)
    assert scalars == whole[: len(scalars)]
    assert "is cut off or damaged" in read_run(file).notes[0]


def test_damage_in_the_middle_ends_the_reading(file: Path) -> None:
    whole, _ = read_scalars(file)
    data = bytearray(file.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 64] = bytes(range(64))
    file.write_bytes(data)
    scalars, is_cut = read_scalars(file)
    assert is_cut
    assert 0 < len(scalars) < len(whole)


def test_what_is_no_event_file(tmp_path: Path) -> None:
    path = tmp_path / "events.out.tfevents.1"
    path.write_bytes(b"something else, long enough to have a header")
    with pytest.raises(InputError, match="is not an event file"):
        read_run(path)
    path.write_bytes(b"")
    with pytest.raises(InputError, match="holds no scalars"):
        read_run(path)


def test_the_later_file_of_a_resumed_run_wins(tmp_path: Path) -> None:
    with SummaryWriter(str(tmp_path), filename_suffix=".1") as writer:
        for step in range(10):
            writer.add_scalar("charts/episodic_return", 1.0, step)
    (first,) = tmp_path.glob("*tfevents*")
    first.rename(tmp_path / "events.out.tfevents.1.old")
    with SummaryWriter(str(tmp_path), filename_suffix=".2") as writer:
        for step in range(6, 12):
            writer.add_scalar("charts/episodic_return", 2.0, step)
    log = read_run(tmp_path)
    assert log.series("mean_ep_return").y.tolist() == [1.0] * 6 + [2.0] * 6


def test_a_folder_of_several_runs_has_to_be_narrowed_down(tmp_path: Path) -> None:
    for name in ("PPO_1", "PPO_2"):
        with SummaryWriter(str(tmp_path / name)) as writer:
            for step in range(12):
                writer.add_scalar("train/entropy_loss", -0.6, step)
    with pytest.raises(InputError, match="holds 2 runs; name one of them: PPO_1, PPO_2"):
        read_run(tmp_path)
    assert read_run(tmp_path / "PPO_1").kind == "Stable-Baselines3 TensorBoard"
