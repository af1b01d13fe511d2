"""Actor and critic: one network for every entity, so that any number of entities can be chosen from.

    x_i  = [entity_i ; context]                              scaled features
    h_i  = relu layers of x_i, the same for all i            [B, R, width]
    h_i  = relu(h_i + attention over all h)                  attention only
    g    = relu(W [mean h ; max h ; context])                [B, width]
    g    = GRU(g, state)                                     attention+gru only
    logit of entity i = w . relu(V h_i + U g) - strength * hint_i
    logit of hold     = v . g

Relabelling the entities relabels the logits and changes nothing else; padded entities enter nothing. `mlp`
has none of this: it sees one flat vector, as simple agents do, and is kept for comparison. The critic is
a second encoder whose g also sees the privileged features. Two more places compute the same without PyTorch:
`inference/network.py`, for one observation, and `training/pooled.py`, which most of training goes through.

Letters: B observations, T steps, R entities, F, C, P features of an entity, the context, privileged ones,
A = R + 1 actions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from pointsman.envs.entity import Observation
from pointsman.errors import InputError
from pointsman.inference.checkpoint import Checkpoint, NetworkSpec
from pointsman.inference.space import EntitySpace
from pointsman.training.normalisers import FeatureScale, Reduce, ValueScale, alone

__all__ = [
    "NetworkSpec",
    "Output",
    "PolicyNetwork",
    "TensorObservation",
    "build_network",
    "from_checkpoint",
    "to_checkpoint",
]

ILLEGAL = -1e9  # the logit of an illegal action: its probability is exactly 0, and no NaN comes of it
RELU_GAIN = math.sqrt(2)
POLICY_GAIN = 0.01  # near-uniform at the start


class TensorObservation(NamedTuple):
    """`envs.entity.Observation` as tensors; leading axes B, or T, B in a sequence."""

    entities: Tensor  # [B, R, F] float32
    context: Tensor  # [B, C] float32
    entity_mask: Tensor  # [B, R] bool
    action_mask: Tensor  # [B, A] bool
    privileged: Tensor  # [B, P] float32

    @classmethod
    def from_numpy(cls, observation: Observation) -> TensorObservation:
        """The tensors share the arrays' memory, which the next step overwrites."""
        return cls(*(torch.from_numpy(array) for array in observation))

    def flatten(self) -> TensorObservation:
        """[T, B, ...] -> [T * B, ...]"""
        return TensorObservation(*(tensor.flatten(0, 1) for tensor in self))

    def rows(self, index: Tensor | slice) -> TensorObservation:
        return TensorObservation(*(tensor[index] for tensor in self))


class Output(NamedTuple):
    logits: Tensor  # [B, A], illegal actions at -1e9
    value: Tensor  # [B] in units of `PolicyNetwork.value_scale`
    state: Tensor | None  # [B, width] for the next decision; None without a memory


class Inputs(NamedTuple):
    """An observation after scaling."""

    entities: Tensor  # [B, R, F + C]: each entity beside the context; padded ones are zero
    context: Tensor  # [B, C]
    mask: Tensor  # [B, R] bool


def build_network(spec: NetworkSpec, space: EntitySpace, seed: int) -> PolicyNetwork:
    """A network with fresh weights that follow from the seed alone."""
    return PolicyNetwork(spec, space, torch.Generator().manual_seed(seed))


def to_checkpoint(network: PolicyNetwork, metadata: Mapping[str, Any]) -> Checkpoint:
    """A copy of the network as it is now."""
    arrays = {name: tensor.detach().numpy().copy() for name, tensor in network.state_dict().items()}
    return Checkpoint(network.spec, network.space, arrays, metadata)


def from_checkpoint(checkpoint: Checkpoint) -> PolicyNetwork:
    """The network that was saved, critic and scales included, to train on."""
    network = build_network(checkpoint.network, checkpoint.space, seed=0)
    network.load_state_dict({name: torch.from_numpy(array) for name, array in checkpoint.arrays.items()})
    return network


class PolicyNetwork(nn.Module):
    """See the top of the file. `act` and `value` are the two halves of `forward`."""

    hint_strength: Tensor  # []

    def __init__(self, spec: NetworkSpec, space: EntitySpace, generator: torch.Generator) -> None:
        super().__init__()
        self.spec = spec
        self.space = space
        width, num_context = spec.width, len(space.context_features)
        num_privileged = len(space.privileged_features) if spec.privileged_critic else 0
        self.entity_scale = FeatureScale(len(space.entity_features))
        self.context_scale = FeatureScale(num_context)
        self.privileged_scale = FeatureScale(len(space.privileged_features))
        self.hint_column = _hint_column(spec, space)
        strength = torch.tensor(spec.hint_strength)
        # Without a hint there is nothing to learn; the checkpoint has it all the same.
        if self.hint_column is None:
            self.register_buffer("hint_strength", strength)
        else:
            self.hint_strength = nn.Parameter(strength)

        def encoder(num_extra: int, has_attention: bool) -> Encoder | FlatEncoder:
            if spec.kind == "mlp":
                return FlatEncoder(spec, space, num_extra, generator)
            return Encoder(spec, space, num_extra, has_attention, generator)

        self.actor = encoder(num_context, has_attention=spec.kind.startswith("attention"))
        self.memory = _gru(width, generator) if spec.kind == "attention+gru" else None
        self.head = (
            FlatHead(width, space.num_actions, generator)
            if spec.kind == "mlp"
            else PolicyHead(width, generator)
        )
        self.critic = (
            encoder(num_context + num_privileged, has_attention=False) if spec.separate_critic else None
        )
        self.value_scale = ValueScale(width if spec.separate_critic else width + num_privileged)
        _initialise(self.value_scale.output, 1.0, generator)

    def forward(self, observation: TensorObservation, state: Tensor | None = None) -> Output:
        inputs = self._scale(observation)
        h, g = self.actor(inputs, inputs.context)
        state = self._remember(g, state)
        g = g if state is None else state
        return Output(self._logits(observation, h, g), self._value(observation, inputs, g), state)

    def act(
        self, observation: TensorObservation, state: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """`forward` without the value: logits [B, A] and the next state."""
        inputs = self._scale(observation)
        h, g = self.actor(inputs, inputs.context)
        state = self._remember(g, state)
        return self._logits(observation, h, g if state is None else state), state

    def value(self, observation: TensorObservation, state: Tensor | None = None) -> Tensor:
        """`forward` without the logits: [B] in units of `value_scale`."""
        inputs = self._scale(observation)
        if self.critic is not None:
            return self._value(observation, inputs, None)
        _, g = self.actor(inputs, inputs.context)
        state = self._remember(g, state)
        return self._value(observation, inputs, g if state is None else state)

    def forward_sequence(
        self, observation: TensorObservation, state: Tensor | None, is_start: Tensor
    ) -> Output:
        """T decisions in a row: observation [T, B, ...], state [B, width] before the first of them.

        is_start [T, B] bool: the decision is the first of its episode and remembers nothing. The output has
        leading axes T, B too; its state [T, B, width] is the one after each decision.
        """
        num_steps, num_rows = is_start.shape
        flat = observation.flatten()
        inputs = self._scale(flat)
        h, g = self.actor(inputs, inputs.context)
        states = None
        if self.memory is not None:
            steps = []
            for g_now, is_new in zip(g.view(num_steps, num_rows, -1), is_start, strict=True):
                if state is not None:
                    state = state.masked_fill(is_new[:, None], 0.0)
                state = self.memory(g_now, state)
                steps.append(state)
            states = torch.stack(steps)
            g = states.flatten(0, 1)
        logits = self._logits(flat, h, g).view(num_steps, num_rows, -1)
        return Output(logits, self._value(flat, inputs, g).view(num_steps, num_rows), states)

    def initial_state(self, num_rows: int) -> Tensor | None:
        """[B, width] before the first decision of an episode; None without a memory."""
        return None if self.memory is None else torch.zeros(num_rows, self.spec.width)

    def observe(self, observation: TensorObservation, reduce: Reduce = alone) -> None:
        """Add observations [B, ...] of training to the feature scales.

        Changes what `forward` returns: call it between an update and the next rollout, not within one.
        """
        self.entity_scale.update(observation.entities[observation.entity_mask], reduce)
        self.context_scale.update(observation.context, reduce)
        self.privileged_scale.update(observation.privileged, reduce)

    @property
    def last_attention(self) -> Tensor | None:
        """[B, heads, R, R] of the last forward pass: how much entity i (rows) looked at entity j."""
        attention = getattr(self.actor, "attention", None)
        return None if attention is None else attention.weights

    def _scale(self, observation: TensorObservation) -> Inputs:
        mask = observation.entity_mask
        entities = self.entity_scale(observation.entities)
        context = self.context_scale(observation.context)
        beside = context[:, None].expand(-1, mask.shape[1], -1)
        rows = torch.cat((entities, beside), -1).masked_fill(~mask[:, :, None], 0.0)
        return Inputs(rows, context, mask)

    def _remember(self, g: Tensor, state: Tensor | None) -> Tensor | None:
        return None if self.memory is None else self.memory(g, state)

    def _logits(self, observation: TensorObservation, h: Tensor, g: Tensor) -> Tensor:
        logits: Tensor = self.head(h, g)
        if self.hint_column is not None:
            hint = observation.entities[:, :, self.hint_column].masked_fill(~observation.entity_mask, 0.0)
            logits = logits - self.hint_strength * functional.pad(hint, (1, 0))
        return logits.masked_fill(~observation.action_mask, ILLEGAL)

    def _value(self, observation: TensorObservation, inputs: Inputs, g: Tensor | None) -> Tensor:
        extra = inputs.context if self.critic is not None else g
        assert extra is not None
        if self.spec.privileged_critic:
            extra = torch.cat((extra, self.privileged_scale(observation.privileged)), -1)
        if self.critic is not None:
            _, extra = self.critic(inputs, extra)
        value: Tensor = self.value_scale(extra)
        return value


class Encoder(nn.Module):
    """What is known of each entity, h, and of all of them together, g."""

    layers: Any  # nn.ModuleList of nn.Linear, whose type forgets of what

    def __init__(
        self,
        spec: NetworkSpec,
        space: EntitySpace,
        num_extra: int,
        has_attention: bool,
        generator: torch.Generator,
    ) -> None:
        """`num_extra` features, not of any entity, enter g."""
        super().__init__()
        width = spec.width
        num_inputs = len(space.entity_features) + len(space.context_features)
        sizes = [num_inputs, *[width] * spec.depth]
        self.layers = _layers(sizes, generator)
        self.attention = Attention(width, spec.heads, generator) if has_attention else None
        self.summary = _linear(2 * width + num_extra, width, RELU_GAIN, generator)

    def forward(self, inputs: Inputs, extra: Tensor) -> tuple[Tensor, Tensor]:
        """extra [B, E] -> h [B, R, width], g [B, width]. Padded entities of h are zero."""
        h = inputs.entities
        for layer in self.layers:
            h = torch.relu(layer(h))
        if self.attention is not None:
            h = torch.relu(h + self.attention(h, inputs.mask))
        h = h.masked_fill(~inputs.mask[:, :, None], 0.0)
        mean = h.sum(1) / inputs.mask.sum(1, keepdim=True).clamp(min=1)
        return h, torch.relu(self.summary(torch.cat((mean, h.amax(1), extra), -1)))


class Attention(nn.Module):
    """Each entity gathers what it needs to know of the others; padded entities are not looked at."""

    weights: Tensor | None

    def __init__(self, width: int, num_heads: int, generator: torch.Generator) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.queries_keys_values = _linear(width, 3 * width, 1.0, generator)
        self.output = _linear(width, width, 1.0, generator)
        self.weights = None

    def forward(self, h: Tensor, mask: Tensor) -> Tensor:
        """h [B, R, width], mask [B, R] -> [B, R, width]"""
        num_rows, num_entities, width = h.shape
        size = width // self.num_heads
        joint: Tensor = self.queries_keys_values(h)
        split = joint.view(num_rows, num_entities, 3, self.num_heads, size).permute(2, 0, 3, 1, 4)
        query, key, value = split  # each [B, heads, R, size]
        scores = (query @ key.transpose(-1, -2)) / math.sqrt(size)
        weights = scores.masked_fill(~mask[:, None, None], ILLEGAL).softmax(-1)
        self.weights = weights.detach()
        gathered = (weights @ value).transpose(1, 2).reshape(h.shape)
        out: Tensor = self.output(gathered)
        return out


class PolicyHead(nn.Module):
    """A logit for each entity, and one for doing nothing."""

    def __init__(self, width: int, generator: torch.Generator) -> None:
        super().__init__()
        self.of_entity = _linear(width, width, RELU_GAIN, generator)
        self.of_all = _linear(width, width, RELU_GAIN, generator, has_bias=False)
        self.score = _linear(width, 1, POLICY_GAIN, generator, has_bias=False)
        self.hold = _linear(width, 1, POLICY_GAIN, generator)

    def forward(self, h: Tensor, g: Tensor) -> Tensor:
        """h [B, R, width], g [B, width] -> [B, R + 1]"""
        hidden = torch.relu(self.of_entity(h) + self.of_all(g)[:, None])
        return torch.cat((self.hold(g), self.score(hidden).squeeze(-1)), -1)


class FlatEncoder(nn.Module):
    """All entities and the context as one vector: `mlp`."""

    layers: Any

    def __init__(
        self, spec: NetworkSpec, space: EntitySpace, num_extra: int, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.num_features = len(space.entity_features)
        sizes = [space.num_entities * self.num_features + num_extra, *[spec.width] * spec.depth]
        self.layers = _layers(sizes, generator)

    def forward(self, inputs: Inputs, extra: Tensor) -> tuple[Tensor, Tensor]:
        """-> the same vector [B, width] twice: no entity has one of its own"""
        entities = inputs.entities[:, :, : self.num_features].flatten(1)
        g = torch.cat((entities, extra), -1)
        for layer in self.layers:
            g = torch.relu(layer(g))
        return g, g


class FlatHead(nn.Module):
    def __init__(self, width: int, num_actions: int, generator: torch.Generator) -> None:
        super().__init__()
        self.output = _linear(width, num_actions, POLICY_GAIN, generator)

    def forward(self, _: Tensor, g: Tensor) -> Tensor:
        logits: Tensor = self.output(g)
        return logits


def _hint_column(spec: NetworkSpec, space: EntitySpace) -> int | None:
    names = [feature.name for feature in space.entity_features]
    if spec.hint is not None and spec.hint not in names:
        raise InputError("network.hint", spec.hint, "no such entity feature", f"known: {', '.join(names)}")
    return None if spec.hint is None else names.index(spec.hint)


def _layers(sizes: list[int], generator: torch.Generator) -> nn.ModuleList:
    return nn.ModuleList(_linear(a, b, RELU_GAIN, generator) for a, b in itertools.pairwise(sizes))


def _linear(
    num_inputs: int, num_outputs: int, gain: float, generator: torch.Generator, has_bias: bool = True
) -> nn.Linear:
    layer = nn.Linear(num_inputs, num_outputs, has_bias, "meta").to_empty(device="cpu")
    _initialise(layer, gain, generator)
    return layer


def _initialise(layer: nn.Linear, gain: float, generator: torch.Generator) -> None:
    nn.init.orthogonal_(layer.weight, gain, generator)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)


def _gru(width: int, generator: torch.Generator) -> nn.GRUCell:
    cell = nn.GRUCell(width, width, device="meta").to_empty(device="cpu")
    for weight in (cell.weight_ih, cell.weight_hh):
        for gate in weight.chunk(3):
            nn.init.orthogonal_(gate, 1.0, generator)
    for bias in (cell.bias_ih, cell.bias_hh):
        nn.init.zeros_(bias)
    # Half-open gates keep 0.5^8 of a cue over eight decisions; these keep 0.73 of it each time.
    nn.init.ones_(cell.bias_ih[width : 2 * width])
    return cell
