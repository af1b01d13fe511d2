"""The two ways to run a network: plain PyTorch for any of them, and compiled, for `pooled`, twice as fast.

A pass acts in rollouts, says what observations are worth, and finds the gradients of minibatches. Parameters
belong to the network; a pass keeps none of its own.

Letters: B decisions, N environments, A actions, W units.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import scipy.linalg.cython_blas  # noqa: F401  what `np.dot` in a kernel calls; `use_one_thread` must find it
import torch
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits
from torch import Tensor

from pointsman.envs.entity import Observation
from pointsman.training import pooled
from pointsman.training.flat import FlatGradients, flat_parameters
from pointsman.training.losses import Losses, draw, loss_gradients
from pointsman.training.minibatches import Rollout
from pointsman.training.networks import PolicyNetwork, TensorObservation
from pointsman.training.normalisers import FeatureScale
from pointsman.training.pooled_gradients import run_gradients


class DrawnActions(NamedTuple):
    actions: NDArray[np.int64]  # [N]
    logp: NDArray[np.float32]  # [N] with which they were drawn
    greedy_actions: NDArray[np.int64]  # [N] what arg-max would have done
    state: Tensor | None  # [N, W] after them, of a network with a memory


# (seen [N, ...], state, temperature, epsilon, random numbers [N] uniform in [0, 1)) -> what to do
Policy = Callable[[Observation, Tensor | None, float, float, NDArray[np.float64]], DrawnActions]


class Pass(Protocol):
    def policy(self) -> Policy:
        """The policy as it is now; it does not follow when the parameters change."""
        ...

    def values(self, seen: TensorObservation, state: Tensor | None) -> Tensor:
        """[B] in units of `value_scale`."""
        ...

    def logits(
        self, seen: TensorObservation, state: Tensor | None, is_start: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """[T, N, A] of seen [T, N, ...], and the state after: see `PolicyNetwork.forward_sequence`."""
        ...

    def gradients(self, rollout: Rollout, index: Tensor, losses: Losses, out: FlatGradients) -> None:
        """Put those of the decisions at `index`, and the terms of their losses, into `out`."""
        ...


def use_one_thread() -> None:
    """PyTorch and BLAS: two spinning threads on shared cores collapse, and training scales by processes."""
    torch.set_num_threads(1)
    threadpool_limits(1, user_api="blas")


def make_pass(network: PolicyNetwork) -> Pass:
    is_compiled = network.spec.kind == "pooled" and network.spec.separate_critic
    return CompiledPass(network) if is_compiled else PlainPass(network)


class PlainPass:
    """Any network, by PyTorch and its autograd."""

    def __init__(self, network: PolicyNetwork) -> None:
        self.network = network

    def policy(self) -> Policy:
        return self._decide

    @torch.no_grad()
    def _decide(
        self,
        seen: Observation,
        state: Tensor | None,
        temperature: float,
        epsilon: float,
        chance: NDArray[np.float64],
    ) -> DrawnActions:
        tensors = TensorObservation.from_numpy(seen)
        logits, state = self.network.act(tensors, state)
        actions, logp = draw(logits, temperature, epsilon, tensors.action_mask, torch.from_numpy(chance))
        return DrawnActions(actions.numpy(), logp.numpy(), logits.argmax(-1).numpy(), state)

    @torch.no_grad()
    def values(self, seen: TensorObservation, state: Tensor | None) -> Tensor:
        return self.network.value(seen, state)

    @torch.no_grad()
    def logits(
        self, seen: TensorObservation, state: Tensor | None, is_start: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        output = self.network.forward_sequence(seen, state, is_start)
        return output.logits, None if output.state is None else output.state[-1]

    def gradients(self, rollout: Rollout, index: Tensor, losses: Losses, out: FlatGradients) -> None:
        output = rollout.run(self.network, index)
        slopes = loss_gradients(output, rollout.rows_at(index.flatten()), losses)
        out.everything.zero_()
        torch.autograd.backward((output.logits, output.value), (slopes.logits, slopes.values))
        out.terms.copy_(slopes.terms)


class CompiledPass:
    """`pooled` with a critic of its own, by the kernels of pooled.py."""

    def __init__(self, network: PolicyNetwork) -> None:
        self.network = network
        spec, space = network.spec, network.space
        parameters = dict(network.named_parameters())
        sizes = np.cumsum([0, *(parameter.numel() for parameter in parameters.values())]).tolist()
        begin = dict(zip(parameters, sizes, strict=False))
        self.weights = flat_parameters(network).numpy()
        self.shape = pooled.Shape(
            num_features=len(space.entity_features),
            num_context=len(space.context_features),
            num_privileged=len(space.privileged_features) if spec.privileged_critic else 0,
            width=spec.width,
            depth=spec.depth,
            hint_column=-1 if network.hint_column is None else network.hint_column,
            actor=begin["actor.layers.0.weight"],
            head=begin["head.of_entity.weight"],
            critic=begin["critic.layers.0.weight"],
            value=begin["value_scale.output.weight"],
        )
        shapes = (
            parameter.shape if parameter.dim() == 2 else (1, parameter.numel())
            for parameter in parameters.values()
        )
        self.matrices = np.array([(at, *shape) for at, shape in zip(sizes, shapes, strict=False)], np.int64)

    def policy(self) -> Policy:
        turned, scales = self._turned(), pooled.Scales(*(array.copy() for array in self._scales()))

        def decide(
            seen: Observation,
            state: Tensor | None,
            temperature: float,
            epsilon: float,
            chance: NDArray[np.float64],
        ) -> DrawnActions:
            num = len(chance)
            made = DrawnActions(
                np.empty(num, np.int64), np.empty(num, np.float32), np.empty(num, np.int64), None
            )
            pooled.run_decisions(seen, scales, self.shape, turned, temperature, epsilon, chance, *made[:3])
            return made

        return decide

    def values(self, seen: TensorObservation, state: Tensor | None) -> Tensor:
        values = torch.empty(len(seen.context))
        pooled.run_values(_arrays(seen), self._scales(), self.shape, self._turned(), values.numpy())
        return values

    def logits(
        self, seen: TensorObservation, state: Tensor | None, is_start: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        logits = torch.empty_like(seen.action_mask, dtype=torch.float32)
        flat = logits.flatten(0, 1).numpy()
        pooled.run_logits(_arrays(seen.flatten()), self._scales(), self.shape, self._turned(), flat)
        return logits, None

    def gradients(self, rollout: Rollout, index: Tensor, losses: Losses, out: FlatGradients) -> None:
        run_gradients(
            _arrays(rollout.observation),
            rollout.rows,
            self._scales(),
            self.shape,
            self.weights,
            self.matrices,
            index.numpy(),
            rollout.is_scaled_by_minibatch,
            losses,
            out.gradients.numpy(),
            out.terms.numpy(),
        )

    def _turned(self) -> NDArray[np.float32]:
        turned = np.empty_like(self.weights)
        pooled.turn(self.weights, self.matrices, turned)
        return turned

    def _scales(self) -> pooled.Scales:
        network = self.network
        return pooled.Scales(
            *_shift_and_factor(network.entity_scale),
            *_shift_and_factor(network.context_scale),
            *_shift_and_factor(network.privileged_scale),
        )


def _arrays(seen: TensorObservation) -> Observation:
    return Observation(*(tensor.contiguous().numpy() for tensor in seen))


def _shift_and_factor(scale: FeatureScale) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    return scale.shift.numpy(), scale.factor.numpy()
