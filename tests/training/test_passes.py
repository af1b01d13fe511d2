"""The compiled pass against plain PyTorch: what it decides, foresees, and learns."""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch

from pointsman.envs.entity import Observation
from pointsman.training import losses, passes, pooled, pooled_gradients
from pointsman.training.flat import FlatGradients
from pointsman.training.losses import Terms, behaviour_logp, entropy_of, policy_logp
from pointsman.training.minibatches import Batch, Rollout
from pointsman.training.networks import PolicyNetwork
from pointsman.training.passes import CompiledPass, PlainPass, make_pass
from pointsman.training.ppo import Knobs, PpoSpec, losses_of

from .networks import make_network, make_observation
from .twin import Minibatch, minibatch_terms

NUM = 301  # several pieces, the last of them short
ALL_KNOBS = Knobs(
    lr=1.0,
    clip=0.1,
    temperature=1.4,
    epsilon=0.1,
    entropy_coef=0.2,
    kl_coef=0.4,
    kl_ref_coef=0.3,
    imitation_coef=0.6,
)


def make_batch(network: PolicyNetwork, num: int = NUM, seed: int = 0, num_entities: int = 4) -> Batch:
    """Random decisions with everything a loss may ask for; some rows have no entity at all."""
    draw = torch.Generator().manual_seed(seed)
    seen = make_observation(num, num_entities, seed, is_padded=True)
    seen.entity_mask[::50] = False
    seen.action_mask[::50, 1:] = False
    seen.action_mask[::50, 0] = True
    seen.entities[~seen.entity_mask] = math.nan
    with torch.no_grad():
        logits = network.act(seen)[0]
    actions = torch.multinomial(logits.softmax(-1), 1, generator=draw)[:, 0]
    scalars = torch.randn((4, num), generator=draw)
    return Batch(
        observation=seen,
        actions=actions,
        old_logp=policy_logp(logits, 1.0)[torch.arange(num), actions] + 0.2 * scalars[0],
        advantages=3 * scalars[1] + 1,
        returns=scalars[2],
        old_values=scalars[3],
        groups=torch.randint(0, 3, (num,), generator=draw),
        ref_logits=torch.randn(logits.shape, generator=draw).masked_fill(~seen.action_mask, -1e9),
        teacher_actions=torch.randint(-1, num_entities + 1, (num,), generator=draw),
    )


def everything(runner: Any, rollout: Rollout, index: torch.Tensor, losses: Any) -> torch.Tensor:
    flat = FlatGradients(runner.network)
    runner.gradients(rollout, index, losses, flat)
    return flat.everything


def difference(network: PolicyNetwork, batch: Batch, spec: PpoSpec, knobs: Knobs, highest: float) -> float:
    """Largest distance of the compiled gradients from those of autograd, as a share of the largest."""
    rollout, losses = Rollout(spec, batch), losses_of(spec, knobs, highest)
    index = torch.randperm(len(batch.actions), generator=torch.Generator().manual_seed(1))[:-7]
    plain = everything(PlainPass(copy.deepcopy(network)), rollout, index, losses)
    found = everything(CompiledPass(network), rollout, index, losses)
    num_terms = len(Terms._fields)
    np.testing.assert_allclose(found[-num_terms:], plain[-num_terms:], rtol=1e-4, atol=1e-5)
    return float((found - plain)[:-num_terms].abs().max() / plain[:-num_terms].abs().max())


SPECS: list[dict[str, Any]] = [
    *({"depth": depth} for depth in (1, 2, 3)),
    {"hint": "entity2", "hint_strength": 0.5},
    {"privileged_critic": False},
]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("knobs", [Knobs(lr=1.0), ALL_KNOBS])
def test_gradients_are_those_of_autograd(spec: dict[str, Any], knobs: Knobs) -> None:
    network = make_network(**spec)
    batch = make_batch(network)
    for ppo in (
        PpoSpec(),
        PpoSpec(clip_value=0.3, normalise_advantages="group"),
        PpoSpec(normalise_advantages="none"),
    ):
        assert difference(network, batch, ppo, knobs, math.inf) < 2e-5


@pytest.mark.parametrize("name", ["entropy_coef", "kl_coef", "kl_ref_coef", "imitation_coef", "epsilon"])
def test_each_loss_alone(name: str) -> None:
    network = make_network()
    batch = dataclasses.replace(make_batch(network), advantages=torch.zeros(NUM))
    spec = PpoSpec(value_coef=0.0, normalise_advantages="none")
    knobs = Knobs(lr=1.0, **{name: 0.5})
    if name == "epsilon":
        batch, spec = make_batch(network), PpoSpec()
    assert difference(network, batch, spec, knobs, math.inf) < 2e-5


def test_guides_that_are_not_there() -> None:
    network = make_network()
    batch = dataclasses.replace(make_batch(network), ref_logits=None, teacher_actions=None)
    assert difference(network, batch, PpoSpec(), ALL_KNOBS, math.inf) < 2e-5


def test_against_losses_and_network_in_pytorch_alone() -> None:
    """Both passes share the compiled losses: here nothing is shared."""
    network = make_network()
    batch, spec, index = make_batch(network), PpoSpec(clip_value=0.3), torch.arange(NUM)
    rollout = Rollout(spec, batch)
    rows = rollout.rows_at(index)
    minibatch = Minibatch(*(torch.from_numpy(array) for array in rows))
    twin = copy.deepcopy(network)
    terms = minibatch_terms(spec, ALL_KNOBS, twin(batch.observation), minibatch)
    expected = torch.autograd.grad(terms["loss"], list(twin.parameters()))
    found = everything(make_pass(network), rollout, index, losses_of(spec, ALL_KNOBS))
    parts = torch.cat([part.flatten() for part in expected])
    assert float((found[: len(parts)] - parts).abs().max() / parts.abs().max()) < 2e-5
    np.testing.assert_allclose(
        found[len(parts) :], torch.stack(list(terms.values())).detach(), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("above", [-0.05, 0.05])
def test_the_entropy_bonus_ends_at_the_highest_mean_entropy(above: float) -> None:
    """The mean is known only after the last piece."""
    network = make_network()
    batch, spec = make_batch(network), PpoSpec()
    rollout, index = Rollout(spec, batch), torch.arange(NUM)
    knobs = dataclasses.replace(ALL_KNOBS, entropy_coef=2.0)
    with torch.no_grad():
        entropy = float(entropy_of(policy_logp(network(batch.observation).logits, knobs.temperature)).mean())
    assert difference(network, batch, spec, knobs, entropy + above) < 2e-5
    runner = make_pass(network)
    free = everything(runner, rollout, index, losses_of(spec, knobs))
    held = everything(runner, rollout, index, losses_of(spec, knobs, entropy + above))
    assert torch.equal(free[:-10], held[:-10]) is (above > 0)


@pytest.mark.parametrize("num_entities", [1, 3, 16, 300])
@pytest.mark.parametrize("num", [1, 60, 61])
def test_any_number_of_entities_and_decisions(num_entities: int, num: int) -> None:
    """300 entities are more than the rows of a piece."""
    network = make_network(num_entities)
    batch = make_batch(network, num + 7, num_entities=num_entities)
    assert difference(network, batch, PpoSpec(normalise_advantages="none"), ALL_KNOBS, math.inf) < 2e-5


def forget_relu(slopes: Any, out: Any, bias_gradient: Any) -> None:
    bias_gradient += slopes.sum(0)


def test_a_forgotten_relu_on_the_way_back_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels run without being compiled: slow, and open to be broken."""
    for module in (losses, pooled, pooled_gradients):
        for name, kernel in list(vars(module).items()):
            if hasattr(kernel, "py_func"):
                monkeypatch.setattr(module, name, kernel.py_func)
    monkeypatch.setattr(passes, "run_gradients", pooled_gradients.run_gradients)
    network = make_network(width=4)
    batch = make_batch(network, 20)
    assert difference(network, batch, PpoSpec(), ALL_KNOBS, math.inf) < 2e-5
    monkeypatch.setattr(pooled_gradients, "_relu_back", forget_relu)
    assert difference(network, batch, PpoSpec(), ALL_KNOBS, math.inf) > 1e-2


@pytest.mark.parametrize(("temperature", "epsilon"), [(1.0, 0.0), (0.6, 0.2)])
def test_decisions_are_those_of_the_plain_policy(temperature: float, epsilon: float) -> None:
    network = make_network(hint="entity2", hint_strength=0.5)
    seen = make_batch(network).observation
    arrays, chance = Observation(*(tensor.numpy() for tensor in seen)), np.random.default_rng(3).random(NUM)
    found, expected = (
        runner.policy()(arrays, None, temperature, epsilon, chance)
        for runner in (CompiledPass(network), PlainPass(network))
    )
    assert (found.actions == expected.actions).mean() > 0.99, "but for random numbers at the very edge"
    np.testing.assert_array_equal(found.greedy_actions, expected.greedy_actions)
    with torch.no_grad():
        logits = network.act(seen)[0]
    logp = behaviour_logp(logits, torch.from_numpy(found.actions), temperature, epsilon, seen.action_mask)
    np.testing.assert_allclose(found.logp, logp, atol=1e-5)


def test_a_policy_stays_as_it_was_when_it_was_made() -> None:
    network = make_network()
    seen = Observation(*(tensor.numpy() for tensor in make_batch(network).observation))
    runner, chance = make_pass(network), np.random.default_rng(0).random(NUM)
    policy = runner.policy()
    before = policy(seen, None, 1.0, 0.0, chance)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(1.5)
    again = policy(seen, None, 1.0, 0.0, chance)
    new = runner.policy()(seen, None, 1.0, 0.0, chance)
    np.testing.assert_array_equal(before.logp, again.logp)
    assert (before.logp != new.logp).any()


def test_values_and_logits_are_those_of_the_network() -> None:
    network = make_network()
    seen = make_batch(network, 300).observation
    rows = type(seen)(*(tensor.unflatten(0, (3, 100)) for tensor in seen))
    runner = make_pass(network)
    logits, state = runner.logits(rows, None, torch.zeros(3, 100, dtype=torch.bool))
    output = network(seen)
    assert isinstance(runner, CompiledPass) and state is None
    torch.testing.assert_close(logits.flatten(0, 1), output.logits.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(runner.values(seen, None), output.value.detach(), rtol=1e-5, atol=1e-5)


def test_only_what_it_was_written_for_is_compiled() -> None:
    assert isinstance(make_pass(make_network(separate_critic=False)), PlainPass)
    assert isinstance(make_pass(make_network(kind="attention")), PlainPass)
