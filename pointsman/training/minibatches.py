"""A rollout as flat tensors, and the minibatches drawn from it: each decision exactly once an epoch.

A recurrent network is trained on sequences: pieces of one environment's history, started from the state that
was stored when it acted, reset inside where an episode began.

Letters: T steps, N environments, B = T * N decisions (time first: row t * N + n), A actions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from pointsman.errors import InputError
from pointsman.training.losses import Rows
from pointsman.training.networks import TensorObservation

if TYPE_CHECKING:
    from pointsman.training.networks import Output, PolicyNetwork
    from pointsman.training.ppo import PpoSpec


@dataclass
class Batch:
    """A rollout, flat: row t * N + n is step t of environment n."""

    observation: TensorObservation  # [B, ...]
    actions: Tensor  # [B] int64
    old_logp: Tensor  # [B] of the behaviour policy
    advantages: Tensor  # [B] in any unit
    returns: Tensor  # [B] in the unit of the network's values: normalised
    old_values: Tensor  # [B] the same
    groups: Tensor | None = None  # [B] int64, for advantages normalised by group
    ref_logits: Tensor | None = None  # [B, A] of the reference policy, illegal actions at -1e9
    teacher_actions: Tensor | None = None  # [B] int64; -1 or an illegal action: no advice
    states: Tensor | None = (
        None  # [B, ...] recurrent networks: state before the decision; None: not recurrent
    )
    is_start: Tensor | None = None  # [B] bool, recurrent networks: an episode begins here
    num_envs: int = 1  # N, recurrent networks


def shuffled(num_rows: int, size: int, generator: torch.Generator) -> Sequence[Tensor]:
    """Every row once, in random order, in parts of about `size` that differ by one at most."""
    num_parts = max(1, round(num_rows / size))
    return torch.randperm(num_rows, generator=generator).tensor_split(num_parts)


def shuffled_sequences(
    num_steps: int, num_envs: int, length: int, size: int, generator: torch.Generator
) -> Sequence[Tensor]:
    """Every row once, as parts [length, M] whose columns are sequences of one environment each."""
    if num_steps % length:
        remedy = f"choose a divisor of the {num_steps} steps of a rollout"
        raise InputError("ppo.sequence_length", length, "does not divide the rollout", remedy)
    starts = torch.arange(0, num_steps * num_envs, num_envs * length).unsqueeze(-1) + torch.arange(num_envs)
    within = torch.arange(length).unsqueeze(-1) * num_envs
    parts = shuffled(starts.numel(), max(1, size // length), generator)
    return [starts.flatten().index_select(0, part) + within for part in parts]


def normalise_by_group(advantages: Tensor, groups: Tensor) -> Tensor:
    """[B] mean 0 and std 1 within each group, so that groups with large rewards don't drown the others."""
    exact = advantages.double()
    count = torch.bincount(groups).clamp(min=1)
    centred = exact - (torch.bincount(groups, exact) / count)[groups]
    std = (torch.bincount(groups, centred.square()) / count).sqrt()
    return (centred / (std[groups] + 1e-8)).float()


class Rollout:
    """A `Batch` as passes take it, and the minibatches of it."""

    def __init__(self, spec: PpoSpec, batch: Batch) -> None:
        self.spec, self.batch, self.observation = spec, batch, batch.observation
        advantages = batch.advantages.float()
        if spec.normalise_advantages == "group":
            if batch.groups is None:
                raise ValueError("advantages normalised by group need Batch.groups")
            advantages = normalise_by_group(advantages, batch.groups)
        scalars = (batch.old_logp.float(), advantages, batch.returns.float(), batch.old_values.float())
        num_actions = batch.observation.action_mask.shape[1]
        self.rows = Rows(
            batch.actions.numpy(),
            torch.stack(scalars).numpy(),
            batch.observation.action_mask.numpy(),
            np.empty((0, num_actions), np.float32) if batch.ref_logits is None else batch.ref_logits.numpy(),
            np.empty(0, np.int64) if batch.teacher_actions is None else batch.teacher_actions.numpy(),
        )

    @property
    def is_scaled_by_minibatch(self) -> bool:
        """Whether advantages are to have mean 0 and std 1 in each minibatch."""
        return self.spec.normalise_advantages == "minibatch"

    def epoch(self, generator: torch.Generator) -> Sequence[Tensor]:
        """Every decision once: [b] each, or sequences [length, M] if states were stored."""
        batch, spec = self.batch, self.spec
        if batch.states is None:
            return shuffled(len(batch.actions), spec.minibatch_size, generator)
        num_steps = len(batch.actions) // batch.num_envs
        return shuffled_sequences(
            num_steps, batch.num_envs, spec.sequence_length, spec.minibatch_size, generator
        )

    def run(self, network: PolicyNetwork, index: Tensor) -> Output:
        """What a network says of the decisions at `index`, flat; sequences are run through time."""
        batch, flat = self.batch, index.flatten()
        observation = TensorObservation(*(part.index_select(0, flat) for part in self.observation))
        if batch.states is None:
            output: Output = network(observation)
            return output
        if batch.is_start is None:
            raise ValueError("a recurrent network needs Batch.states, Batch.is_start and Batch.num_envs")
        output = network.forward_sequence(
            TensorObservation(*(part.view(*index.shape, *part.shape[1:]) for part in observation)),
            batch.states.index_select(0, index[0]),
            batch.is_start.index_select(0, flat).view(index.shape),
        )
        return output._replace(logits=output.logits.flatten(0, 1), value=output.value.flatten())

    def rows_at(self, index: Tensor) -> Rows:
        """Copies, with advantages as they are to be used."""
        at = index.numpy()
        actions, scalars, action_mask, ref_logits, teacher_actions = self.rows
        scalars = scalars[:, at]
        if self.is_scaled_by_minibatch:
            scalars[1] = (scalars[1] - scalars[1].mean()) / (scalars[1].std() + 1e-8)
        return Rows(
            actions[at],
            scalars,
            action_mask[at],
            ref_logits[at] if len(ref_logits) else ref_logits,
            teacher_actions[at] if len(teacher_actions) else teacher_actions,
        )
