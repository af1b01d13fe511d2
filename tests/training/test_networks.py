from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from pointsman.errors import InputError
from pointsman.training import networks
from pointsman.training.networks import (
    ILLEGAL,
    NetworkSpec,
    Output,
    PolicyNetwork,
    TensorObservation,
    build_network,
    from_checkpoint,
    to_checkpoint,
)

from .networks import KINDS, NUM_FEATURES, SYMMETRIC, make_network, make_observation, make_space


def permute(observation: TensorObservation, order: Tensor) -> TensorObservation:
    actions = torch.cat((torch.zeros(1, dtype=torch.long), order + 1))
    return observation._replace(
        entities=observation.entities[:, order],
        entity_mask=observation.entity_mask[:, order],
        action_mask=observation.action_mask[:, actions],
    )


def with_slot_numbers(observation: TensorObservation) -> TensorObservation:
    entities = observation.entities.clone()
    entities[:, :, 0] += 0.1 * torch.arange(entities.shape[1])
    return observation._replace(entities=entities)


def asymmetry(one: Output, other: Output, observation: TensorObservation, order: Tensor) -> float:
    """How far relabelling entities did more than relabel logits, as a share of the largest one."""
    legal = observation.action_mask[:, 1:]
    logits = torch.where(legal, one.logits[:, 1:], 0.0)[:, order]
    relabelled = torch.where(legal[:, order], other.logits[:, 1:], 0.0)
    errors = (logits - relabelled, one.logits[:, 0] - other.logits[:, 0], one.value - other.value)
    return max(error.abs().max().item() for error in errors) / logits.abs().max().item()


@pytest.mark.parametrize("kind", SYMMETRIC)
def test_relabelling_entities_relabels_logits_and_changes_nothing_else(kind: str) -> None:
    network = make_network(kind=kind)
    observation, order = make_observation(40, is_padded=True), torch.tensor([2, 0, 3, 1])
    permuted = permute(observation, order)
    assert asymmetry(network(observation), network(permuted), observation, order) < 1e-6
    # With the number of its slot in an entity's features, the same network is not symmetric.
    leaked = network(with_slot_numbers(observation)), network(with_slot_numbers(permuted))
    assert asymmetry(*leaked, observation, order) > 1e-3


def test_mlp_is_not_symmetric() -> None:
    network = make_network(kind="mlp")
    observation, order = make_observation(40), torch.tensor([2, 0, 3, 1])
    assert asymmetry(network(observation), network(permute(observation, order)), observation, order) > 0.1


def outputs_and_gradients(network: PolicyNetwork, observation: TensorObservation) -> list[Tensor]:
    output = network(observation)
    network.zero_grad()
    (torch.log_softmax(output.logits, -1).clamp(min=-1e3).sum() + output.value.square().sum()).backward()
    gradients = [parameter.grad.clone() for parameter in network.parameters() if parameter.grad is not None]
    return [output.logits, output.value, *gradients]


@pytest.mark.parametrize("garbage", [7.0, 1e30, float("nan"), float("inf")])
@pytest.mark.parametrize("kind", KINDS)
def test_garbage_in_padded_slots_changes_nothing(kind: str, garbage: float) -> None:
    network = make_network(kind=kind, hint="entity2", hint_strength=0.5)
    observation = make_observation(30, is_padded=True)
    entities = torch.where(observation.entity_mask[:, :, None], observation.entities, garbage)
    clean = outputs_and_gradients(network, observation)
    assert len(clean) == 2 + len(list(network.parameters()))
    for one, other in zip(
        clean, outputs_and_gradients(network, observation._replace(entities=entities)), strict=True
    ):
        assert torch.isfinite(one).all()
        assert torch.equal(one, other)


@pytest.mark.parametrize("kind", SYMMETRIC)
def test_padding_changes_nothing_and_without_the_mask_it_would(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = make_network(kind=kind)
    small = make_observation(30, 3)
    padded = small._replace(
        entities=torch.cat((small.entities, torch.full((30, 5, NUM_FEATURES), 3.0)), 1),
        entity_mask=torch.cat((small.entity_mask, torch.zeros(30, 5, dtype=torch.bool)), 1),
        action_mask=torch.cat((small.action_mask, torch.zeros(30, 5, dtype=torch.bool)), 1),
    )
    expected, found = network(small), network(padded)
    torch.testing.assert_close(found.logits[:, :4], expected.logits, rtol=0, atol=2e-6)
    torch.testing.assert_close(found.value, expected.value, rtol=0, atol=2e-6)
    unmasked = network(padded._replace(entity_mask=torch.ones(30, 8, dtype=torch.bool)))
    assert (unmasked.logits[:, :4] - expected.logits).abs().max() > 0.01
    assert (unmasked.value - expected.value).abs().max() > 0.01
    if kind == "pooled":
        return
    # Attention that looks at padded entities, though pools do not.
    attend = networks.Attention.forward
    monkeypatch.setattr(
        networks.Attention, "forward", lambda self, h, mask: attend(self, h, torch.ones_like(mask))
    )
    assert (network(padded).logits[:, :4] - expected.logits).abs().max() > 0.01


@pytest.mark.parametrize("kind", KINDS)
def test_illegal_actions_have_probability_and_gradient_zero(kind: str) -> None:
    network = make_network(kind=kind)
    observation = make_observation(30, is_padded=True)
    logits = network(observation).logits
    illegal = ~observation.action_mask
    assert (logits[illegal] == ILLEGAL).all() and (logits[~illegal].abs() < 1e3).all()
    assert (logits.softmax(-1)[illegal] == 0).all()
    network.zero_grad()
    logits[illegal].sum().backward()
    assert all((p.grad is None) or not p.grad.any() for p in network.parameters())


def share_of_uniform(network: PolicyNetwork, observation: TensorObservation) -> Tensor:
    """Entropy over that of the uniform policy on legal actions."""
    probability = network(observation).logits.softmax(-1)
    entropy = -(probability * probability.clamp(min=1e-30).log()).sum(-1)
    return entropy / observation.action_mask.sum(-1).double().log()


@pytest.mark.parametrize("kind", KINDS)
def test_a_beginner_is_near_uniform(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    observation = make_observation(100, 6, is_padded=True)
    observation = observation.rows(observation.action_mask.sum(-1) > 1)
    for seed in range(3):
        network = build_network(NetworkSpec(kind=kind), make_space(6), seed)
        assert share_of_uniform(network, observation).min() > 0.99
    monkeypatch.setattr(networks, "POLICY_GAIN", 1.0)
    eager = build_network(NetworkSpec(kind=kind), make_space(6), seed=0)
    assert share_of_uniform(eager, observation).min() < 0.9


@pytest.mark.parametrize("kind", KINDS)
def test_weights_follow_from_the_seed_alone(kind: str) -> None:
    state = torch.random.get_rng_state()
    one, same, other = (
        build_network(NetworkSpec(kind=kind), make_space(), seed).state_dict() for seed in (1, 1, 2)
    )
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["actor.layers.0.weight"], other["actor.layers.0.weight"])


@pytest.mark.parametrize("separate_critic", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_act_and_value_are_the_halves_of_forward(kind: str, separate_critic: bool) -> None:
    network = make_network(kind=kind, separate_critic=separate_critic)
    observation = make_observation(20, is_padded=True)
    state = network.initial_state(20)
    whole = network(observation, state)
    with torch.no_grad():
        logits, after = network.act(observation, state)
        value = network.value(observation, state)
    assert torch.equal(logits, whole.logits) and torch.equal(value, whole.value)
    assert (after is None and whole.state is None) or torch.equal(after, whole.state)


@pytest.mark.parametrize("separate_critic", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_only_the_critic_sees_what_is_privileged(kind: str, separate_critic: bool) -> None:
    observation = make_observation(20)
    other = observation._replace(privileged=observation.privileged + 1)
    for sees in (True, False):
        network = make_network(kind=kind, separate_critic=separate_critic, privileged_critic=sees)
        assert torch.equal(network(observation).logits, network(other).logits)
        assert torch.equal(network(observation).value, network(other).value) is not sees


def test_a_memory_in_one_go_is_a_memory_step_by_step() -> None:
    network = make_network(kind="attention+gru")
    num_steps, num_rows = 12, 5
    flat = make_observation(num_steps * num_rows, is_padded=True)
    observation = TensorObservation(*(tensor.unflatten(0, (num_steps, num_rows)) for tensor in flat))
    is_start = torch.rand(num_steps, num_rows, generator=torch.Generator().manual_seed(0)) < 0.2
    start = torch.randn(num_rows, 16, generator=torch.Generator().manual_seed(1))

    def step_by_step(resets: Tensor) -> list[Tensor]:
        state: Tensor | None = start
        logits = []
        for step in range(num_steps):
            assert state is not None
            state = torch.where(resets[step, :, None], 0.0, state)
            output = network(TensorObservation(*(tensor[step] for tensor in observation)), state)
            state = output.state
            logits.append(output.logits)
        assert state is not None
        return [torch.stack(logits), state]

    sequence = network.forward_sequence(observation, start, is_start)
    assert sequence.state is not None
    logits, last = step_by_step(is_start)
    torch.testing.assert_close(sequence.logits, logits, rtol=0, atol=1e-5)
    torch.testing.assert_close(sequence.state[-1], last, rtol=0, atol=1e-5)
    assert (sequence.logits - step_by_step(torch.zeros_like(is_start))[0]).abs().max() > 0.01


def test_without_a_memory_a_sequence_is_a_batch() -> None:
    network = make_network()
    flat = make_observation(12, is_padded=True)
    observation = TensorObservation(*(tensor.unflatten(0, (3, 4)) for tensor in flat))
    sequence = network.forward_sequence(observation, None, torch.zeros(3, 4, dtype=torch.bool))
    assert sequence.state is None and network.initial_state(4) is None
    assert torch.equal(sequence.logits.flatten(0, 1), network(flat).logits)
    assert torch.equal(sequence.value.flatten(), network(flat).value)


def twin(network: PolicyNetwork, observation: TensorObservation, row: int) -> NDArray[np.float64]:
    """The logits of `pooled` written out for one observation, one entity at a time, in float64."""
    w = {name: tensor.double().numpy() for name, tensor in network.state_dict().items()}

    def scaled(values: Tensor, name: str) -> NDArray[np.float64]:
        std = np.sqrt(w[f"{name}.square"] / w[f"{name}.count"])
        return np.clip((values.double().numpy() - w[f"{name}.mean"]) / std, -10, 10)

    def dense(x: NDArray[np.float64], name: str) -> NDArray[np.float64]:
        return w[f"{name}.weight"] @ x + w.get(f"{name}.bias", 0.0)

    context = scaled(observation.context[row], "context_scale")
    present = [k for k in range(observation.entity_mask.shape[1]) if observation.entity_mask[row, k]]
    hs = {}
    for k in present:
        h = np.concatenate((scaled(observation.entities[row, k], "entity_scale"), context))
        for layer in range(network.spec.depth):
            h = np.maximum(dense(h, f"actor.layers.{layer}"), 0)
        hs[k] = h
    mean, highest = np.mean(list(hs.values()), 0), np.max(list(hs.values()), 0)
    g = np.maximum(dense(np.concatenate((mean, highest, context)), "actor.summary"), 0)
    logits = np.full(len(observation.action_mask[row]), ILLEGAL)
    logits[0] = dense(g, "head.hold")[0]
    for k, h in hs.items():
        hidden = np.maximum(dense(h, "head.of_entity") + dense(g, "head.of_all"), 0)
        hint = w["hint_strength"] * observation.entities[row, k, 2].item()
        logits[k + 1] = dense(hidden, "head.score")[0] - hint
    return np.where(observation.action_mask[row].numpy(), logits, ILLEGAL)


@pytest.mark.parametrize("depth", [1, 3])
def test_pooled_is_what_its_formula_says(depth: int) -> None:
    network = make_network(depth=depth, hint="entity2", hint_strength=0.7)
    observation = make_observation(10, is_padded=True)
    logits = network(observation).logits.detach().numpy()
    for row in range(10):
        np.testing.assert_allclose(logits[row], twin(network, observation, row), rtol=0, atol=1e-5)


def test_a_beginner_with_a_strong_hint_follows_it() -> None:
    spec = NetworkSpec(hint="entity1", hint_strength=20.0)
    network = build_network(spec, make_space(), seed=0)
    observation = make_observation(50)
    lowest = observation.entities[:, :, 1].argmin(-1)
    assert torch.equal(network(observation).logits[:, 1:].argmax(-1), lowest)
    network(observation).logits[:, 1].sum().backward()
    expected = -observation.entities[:, 0, 1].sum()
    assert network.hint_strength.grad is not None
    torch.testing.assert_close(network.hint_strength.grad, expected)


def test_attention_can_be_looked_at() -> None:
    network = make_network(kind="attention")
    observation = make_observation(20, is_padded=True)
    network(observation)
    weights = network.last_attention
    assert weights is not None and weights.shape == (20, 2, 4, 4)
    torch.testing.assert_close(weights.sum(-1), torch.ones(20, 2, 4))
    assert (weights[(~observation.entity_mask)[:, None, None].expand(weights.shape)] == 0).all()
    assert make_network().last_attention is None


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_gives_back_the_same_network(kind: str) -> None:
    network = make_network(kind=kind)
    observation = make_observation(5)
    copy = from_checkpoint(to_checkpoint(network, {}))
    network.observe(make_observation(10, seed=9))  # the copy does not change with the original
    again = make_network(kind=kind)
    assert torch.equal(copy(observation).logits, again(observation).logits)
    assert torch.equal(copy(observation).value, again(observation).value)


def test_layers_start_orthogonal_with_the_gains_of_ppo() -> None:
    network = build_network(NetworkSpec(), make_space(), seed=0)
    weight = network.head.of_entity.weight
    torch.testing.assert_close(weight @ weight.t(), 2 * torch.eye(64), atol=1e-5, rtol=0)
    assert network.value_scale.output.weight.norm().item() == pytest.approx(1.0)
    assert network.head.score.weight.norm().item() == pytest.approx(0.01)
    assert math.isclose(network.actor.layers[0].weight.square().sum().item(), 2 * 12, rel_tol=1e-5)


def test_an_unknown_hint_is_refused() -> None:
    with pytest.raises(InputError, match=r"network\.hint = 'luck'"):
        build_network(NetworkSpec(hint="luck"), make_space(), seed=0)
