"""A rollout as flat tensors, and the minibatches drawn from it: each decision exactly once an epoch.

A recurrent network is trained on sequences: pieces of one environment's history, started from the state that
was stored when it acted, reset inside where an episode began.

Letters: T steps, N environments, B = T * N decisions (time first: row t * N + n), A actions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from pointsman.errors import InputError
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


class Minibatch(NamedTuple):
    """Rows of a `Batch`, gathered; see there."""

    actions: Tensor
    scalars: Tensor  # [4, b] float32: old_logp, advantages, returns, old_values
    action_mask: Tensor
    ref_logits: Tensor | None
    teacher_actions: Tensor | None


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


class Minibatches:
    """Gathers minibatches and runs the network on them: row by row, or through time if it is recurrent."""

    def __init__(
        self, spec: PpoSpec, network: PolicyNetwork, batch: Batch, generator: torch.Generator
    ) -> None:
        self.spec, self.network, self.batch, self.generator = spec, network, batch, generator
        advantages = batch.advantages.float()
        if spec.normalise_advantages == "group":
            if batch.groups is None:
                raise ValueError("advantages normalised by group need Batch.groups")
            advantages = normalise_by_group(advantages, batch.groups)
        # One tensor, so that one kernel gathers all four.
        self.scalars = torch.stack(
            (batch.old_logp.float(), advantages, batch.returns.float(), batch.old_values.float())
        )

    def epoch(self) -> Iterator[tuple[Output, Minibatch]]:
        """What the network says of each minibatch, and its rows; in sequences if states were stored."""
        return self._single() if self.batch.states is None else self._sequences()

    def _single(self) -> Iterator[tuple[Output, Minibatch]]:
        for index in shuffled(len(self.batch.actions), self.spec.minibatch_size, self.generator):
            yield self.network(self._observation(index)), self._rows(index)

    def _sequences(self) -> Iterator[tuple[Output, Minibatch]]:
        batch, spec = self.batch, self.spec
        if batch.states is None or batch.is_start is None:
            raise ValueError("a recurrent network needs Batch.states, Batch.is_start and Batch.num_envs")
        num_steps = len(batch.actions) // batch.num_envs
        for index in shuffled_sequences(
            num_steps, batch.num_envs, spec.sequence_length, spec.minibatch_size, self.generator
        ):
            flat = index.flatten()
            observation = self._observation(flat)
            output = self.network.forward_sequence(
                TensorObservation(*(part.view(*index.shape, *part.shape[1:]) for part in observation)),
                batch.states.index_select(0, index[0]),
                batch.is_start.index_select(0, flat).view(index.shape),
            )
            logits, value = output.logits.reshape(len(flat), -1), output.value.reshape(-1)
            yield output._replace(logits=logits, value=value), self._rows(flat)

    def _observation(self, index: Tensor) -> TensorObservation:
        return TensorObservation(*(part.index_select(0, index) for part in self.batch.observation))

    def _rows(self, index: Tensor) -> Minibatch:
        batch = self.batch
        scalars = self.scalars.index_select(1, index)
        if self.spec.normalise_advantages == "minibatch":
            std, mean = torch.std_mean(scalars[1], correction=0)
            scalars[1].sub_(mean).div_(std + 1e-8)
        return Minibatch(
            batch.actions.index_select(0, index),
            scalars,
            batch.observation.action_mask.index_select(0, index),
            None if batch.ref_logits is None else batch.ref_logits.index_select(0, index),
            None if batch.teacher_actions is None else batch.teacher_actions.index_select(0, index),
        )
