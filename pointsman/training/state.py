"""What a trainer is made of, to be saved and taken up again: arrays, and plain JSON for the rest."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pointsman.training.recorded import EnvRecording
from pointsman.training.warm_start import Teachers

if TYPE_CHECKING:
    from pointsman.training.trainer import Trainer


class TrainerState(NamedTuple):
    """What a trainer is made of, as arrays and plain JSON."""

    arrays: dict[str, NDArray[Any]]
    values: dict[str, Any]


def save(trainer: Trainer) -> TrainerState:
    """Everything that resuming needs, at rank 0. All ranks must call it."""
    arrays = {f"network/{name}": tensor for name, tensor in trainer.network.state_dict().items()}
    if trainer.reference is not None:
        arrays |= {f"reference/{name}": tensor for name, tensor in trainer.reference.state_dict().items()}
    if trainer.average is not None:
        arrays |= {f"average/{name}": tensor for name, tensor in trainer.average.state_dict().items()}
    if trainer.reward_scale is not None:
        arrays["reward_scale"] = torch.from_numpy(trainer.reward_scale.squares)
    arrays |= {f"best/{name}": tensor for name, tensor in trainer.best.items()}
    arrays |= {"optimizer/mean": trainer.optimizer.mean, "optimizer/square": trainer.optimizer.square}
    values: dict[str, Any] = {
        "num_updates": trainer.num_updates,
        "optimizer_steps": trainer.optimizer.num_steps,
        "exploration": trainer.exploration.state_dict(),
        "monitor": trainer.monitor.state_dict(),
        "prices": trainer.prices.state_dict(),
        "going_back": trainer.going_back.state_dict(),
        "stage": None if trainer.curriculum is None else trainer.curriculum.index,
        "difficulty": trainer.env.difficulty,
        "evaluation": trainer.evaluation,
        "recent": trainer.recent,
        "teachers": trainer.teachers.weights.tolist(),
    }
    if trainer.num_updates % trainer.config.run.checkpoint_every:  # else environments start anew
        recording = trainer.env.recording
        mine = {"actions": np.concatenate(recording.actions)}
        if trainer.state is not None and trainer.reference_state is not None:
            mine |= {"state": trainer.state.numpy(), "reference_state": trainer.reference_state.numpy()}
        parts = trainer.ranks.gather_first((recording._replace(actions=[]), mine))
        values["recordings"] = [recording for recording, _ in parts]
        for rank, (_, theirs) in enumerate(parts):
            arrays |= {f"rank{rank}/{name}": torch.from_numpy(array) for name, array in theirs.items()}
    # What is trained on must not change what was saved: most of these values are parts of the trainer.
    return TrainerState(
        {name: tensor.numpy().copy() for name, tensor in arrays.items()}, copy.deepcopy(values)
    )


def restore(trainer: Trainer, state: TrainerState) -> None:
    """Take up where `save` was called; environments are brought to where they were."""
    arrays = {name: torch.from_numpy(array) for name, array in state.arrays.items()}
    values = state.values
    trainer.network.load_state_dict(_under(arrays, "network/"))
    if trainer.ppo.kl_reference.highest > 0:
        trainer.reference = copy.deepcopy(trainer.network).requires_grad_(False)
        trainer.reference.load_state_dict(_under(arrays, "reference/"))
    if trainer.average is not None:
        trainer.average.load_state_dict(_under(arrays, "average/"))
    if trainer.reward_scale is not None:
        trainer.reward_scale.squares = arrays["reward_scale"].numpy().copy()
        trainer.reward_scale.num_updates = values["num_updates"]
    trainer.optimizer.mean.copy_(arrays["optimizer/mean"])
    trainer.optimizer.square.copy_(arrays["optimizer/square"])
    trainer.optimizer.num_steps = values["optimizer_steps"]
    trainer.num_updates = values["num_updates"]
    trainer.exploration.load_state_dict(values["exploration"])
    trainer.monitor.load_state_dict(values["monitor"])
    trainer.prices.load_state_dict(values["prices"])
    trainer.going_back.load_state_dict(values["going_back"])
    trainer.best = _under(arrays, "best/")
    if trainer.curriculum is not None:
        trainer.curriculum.index = values["stage"]
    trainer.evaluation = values["evaluation"]
    trainer.recent = [(earned, length) for earned, length in values["recent"]]
    trainer.teachers = Teachers(values["teachers"])
    if "recordings" in values:
        mine = _under(arrays, f"rank{trainer.ranks.rank}/")
        recording = EnvRecording(*values["recordings"][trainer.ranks.rank])
        trainer.env.play(recording._replace(actions=[mine["actions"].numpy()]))
        trainer.state, trainer.reference_state = mine.get("state"), mine.get("reference_state")
    elif values["difficulty"]:
        trainer.env.set_difficulty(values["difficulty"])


def _under(arrays: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in arrays.items() if name.startswith(prefix)}
