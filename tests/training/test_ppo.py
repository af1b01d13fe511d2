"""One PPO update: what it refuses, when it stops, what it reports."""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from pointsman.errors import InputError
from pointsman.spec import parse_spec
from pointsman.training import ppo
from pointsman.training.flat import Adam, flat_parameters
from pointsman.training.losses import entropy_of, policy_logp
from pointsman.training.minibatches import Batch, Rollout, normalise_by_group, shuffled, shuffled_sequences
from pointsman.training.networks import PolicyNetwork
from pointsman.training.passes import make_pass
from pointsman.training.ppo import (
    DivergedError,
    Knobs,
    PpoSpec,
    RatioError,
    explained_variance,
    update,
)

from .rollouts import KNOBS, make_batch, make_network

SPEC = PpoSpec(minibatch_size=32, sequence_length=8, target_kl=None, entropy_jump_clip=None)
NAMES_IN_THE_LOG = {
    *("approx_kl_last", "approx_kl_mean", "approx_kl_max", "early_stop", "pg_loss", "v_loss", "entropy"),
    *("clip_frac", "explained_variance", "grad_norm", "lr", "ent_coef", "temperature", "kl_ref_coef"),
}


def run(
    network: PolicyNetwork,
    batch: Batch,
    spec: PpoSpec = SPEC,
    knobs: Knobs = KNOBS,
    seed: int = 0,
    **more: Any,
) -> dict[str, float]:
    generator = torch.Generator().manual_seed(seed)
    return update(spec, network, Adam(network, spec.adam_eps), batch, knobs, generator, **more)


def weights(network: PolicyNetwork) -> Tensor:
    return torch.cat([parameter.detach().flatten().clone() for parameter in network.parameters()])


def with_(spec: PpoSpec, **changes: Any) -> PpoSpec:
    return spec.model_copy(update=changes)


# Ratio 1 on the first minibatch


@pytest.mark.parametrize("kind", ["pooled", "attention", "attention+gru", "mlp"])
@pytest.mark.parametrize(
    "knobs", [KNOBS, dataclasses.replace(KNOBS, temperature=1.6), dataclasses.replace(KNOBS, epsilon=0.2)]
)
def test_the_first_ratio_is_1(kind: str, knobs: Knobs) -> None:
    """Masks, temperature, epsilon, feature scales and, through resets, the recurrent state included."""
    network = make_network(kind)
    network.observe(make_batch(network, seed=7).observation)
    batch = make_batch(network, num_steps=64, knobs=knobs)
    metrics = run(network, batch, with_(SPEC, num_epochs=1, minibatch_size=10_000), knobs)
    assert metrics["approx_kl_max"] < 1e-7
    assert set(metrics) >= NAMES_IN_THE_LOG


def drop_mask(batch: Batch, network: PolicyNetwork) -> None:
    batch.observation = batch.observation._replace(action_mask=torch.ones_like(batch.observation.action_mask))


def move_feature_scale(batch: Batch, network: PolicyNetwork) -> None:
    network.observe(batch.observation)


def forget_state(batch: Batch, network: PolicyNetwork) -> None:
    assert batch.states is not None
    batch.states = torch.zeros_like(batch.states)


def forget_resets(batch: Batch, network: PolicyNetwork) -> None:
    assert batch.is_start is not None
    batch.is_start = torch.zeros_like(batch.is_start)


def mix_environments_up(batch: Batch, network: PolicyNetwork) -> None:
    batch.num_envs //= 2


@pytest.mark.parametrize(
    ("kind", "break_it"),
    [
        ("pooled", drop_mask),
        ("pooled", move_feature_scale),
        ("attention+gru", forget_state),
        ("attention+gru", forget_resets),
        ("attention+gru", mix_environments_up),
    ],
)
def test_a_rollout_that_differs_is_refused(kind: str, break_it: Any) -> None:
    network = make_network(kind)
    batch = make_batch(network, num_steps=64)
    break_it(batch, network)
    before = weights(network)
    with pytest.raises(RatioError, match="first minibatch"):
        run(network, batch, with_(SPEC, minibatch_size=10_000))
    assert torch.equal(weights(network), before), "no step was taken"


@pytest.mark.parametrize("knobs", [Knobs(lr=1e-3, temperature=1.5), Knobs(lr=1e-3, epsilon=0.2)])
def test_a_forgotten_temperature_or_epsilon_is_refused(knobs: Knobs) -> None:
    network = make_network()
    with pytest.raises(RatioError):
        run(network, make_batch(network, knobs=knobs))


def test_a_recurrent_rollout_without_states_is_refused() -> None:
    network = make_network("attention+gru")
    with pytest.raises(RatioError):
        run(network, dataclasses.replace(make_batch(network), states=None))


# Minibatches


@pytest.mark.parametrize(("num_rows", "size"), [(128, 32), (100, 32), (7, 32), (33, 2)])
def test_each_row_comes_once_an_epoch(num_rows: int, size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    first, second = shuffled(num_rows, size, generator), shuffled(num_rows, size, generator)
    for parts in (first, second):
        assert sorted(torch.cat(list(parts)).tolist()) == list(range(num_rows))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1, "a tiny last one would be all noise"
    assert not torch.equal(torch.cat(list(first)), torch.cat(list(second))), "in another order each time"


def test_sequences_stay_in_one_environment_and_in_order() -> None:
    num_steps, num_envs, length = 24, 5, 8
    parts = shuffled_sequences(num_steps, num_envs, length, 20, torch.Generator().manual_seed(0))
    rows = torch.cat([part.flatten() for part in parts])
    assert sorted(rows.tolist()) == list(range(num_steps * num_envs))
    for part in parts:
        assert part.shape[0] == length
        assert ((part % num_envs) == part[:1] % num_envs).all(), "never straddles environments"
        assert (part.diff(dim=0) == num_envs).all(), "one step after the other"
        assert ((part[0] // num_envs) % length == 0).all()
    with pytest.raises(InputError, match=r"ppo.sequence_length.*24"):
        shuffled_sequences(num_steps, num_envs, 7, 20, torch.Generator())


@pytest.mark.parametrize("kind", ["pooled", "attention+gru"])
def test_every_row_reaches_the_loss(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    network = make_network(kind)
    batch = make_batch(network)
    batch.returns = torch.arange(len(batch.returns)).float()  # a name for each row
    seen: list[float] = []

    runner = make_pass(network)
    gradients = runner.gradients

    def spy(rollout: Rollout, index: Tensor, *more: Any) -> None:
        seen.extend(rollout.rows.scalars[2][index.flatten()].tolist())
        gradients(rollout, index, *more)

    monkeypatch.setattr(runner, "gradients", spy)
    monkeypatch.setattr(ppo, "make_pass", lambda _: runner)
    run(network, batch, with_(SPEC, num_epochs=3))
    assert sorted(seen) == sorted(3 * batch.returns.tolist())


# Determinism and ranks


@pytest.mark.parametrize("kind", ["pooled", "attention+gru"])
def test_same_seed_same_bits(kind: str) -> None:
    def train(seed: int) -> Tensor:
        network = make_network(kind)
        optimizer, generator = Adam(network, SPEC.adam_eps), torch.Generator().manual_seed(seed)
        for step in range(3):
            update(SPEC, network, optimizer, make_batch(network, num_envs=4, seed=step), KNOBS, generator)
        return weights(network)

    first = train(0)
    assert torch.equal(first, train(0))
    assert not torch.equal(first, train(1)), "the seed of the minibatches matters"


def test_ranks_take_one_step_on_the_mean_of_their_gradients() -> None:
    """A rank whose partner found nothing to learn (gradient 0) moves as with half its gradient."""
    spec = with_(SPEC, num_epochs=1, minibatch_size=10_000, max_grad_norm=1e9, normalise_advantages="none")
    network = make_network()
    twin = copy.deepcopy(network)
    batch = make_batch(network)
    lengths: list[float] = []

    def halve(everything: Tensor) -> None:
        lengths.append(float(everything.norm()))
        everything.mul_(0.5)

    halved, whole = run(network, batch, spec, average=halve), run(twin, batch, spec)
    assert len(lengths) == 1, "one reduction a step"
    assert halved["grad_norm"] == pytest.approx(whole["grad_norm"] / 2, rel=1e-5)
    assert halved["v_loss"] == pytest.approx(whole["v_loss"] / 2, rel=1e-5), "decisions are made on means too"


# Stops and clips


def far_update(**spec: Any) -> dict[str, float]:
    network = make_network()
    knobs = dataclasses.replace(KNOBS, lr=3e-3)
    return run(network, make_batch(network, knobs=knobs), with_(SPEC, num_epochs=10, **spec), knobs)


def test_target_kl_ends_the_update() -> None:
    free, stopped = far_update(), far_update(target_kl=0.01)
    assert free["early_stop"] == 0 and free["num_steps"] == 40
    assert stopped["early_stop"] == 1 and stopped["num_steps"] < 30
    assert stopped["approx_kl_last"] == stopped["approx_kl_max"] > 0.01
    assert stopped["approx_kl_max"] < free["approx_kl_max"]


def test_a_fall_of_entropy_ends_the_update() -> None:
    """Cloning a teacher makes a policy sharper at once."""
    network = make_network(sharpness=1.0)
    batch = make_batch(network)
    batch.teacher_actions = torch.full_like(batch.actions, 2)
    knobs = dataclasses.replace(KNOBS, lr=1e-2, imitation_coef=5.0)
    free = run(copy.deepcopy(network), batch, with_(SPEC, num_epochs=10), knobs)
    stopped = run(network, batch, with_(SPEC, num_epochs=10, entropy_jump_clip=0.1), knobs)
    assert free["entropy_stop"] == 0 and free["num_steps"] == 40
    assert stopped["entropy_stop"] == 1 and stopped["num_steps"] < 20 and stopped["early_stop"] == 0
    assert stopped["entropy"] > free["entropy"]


def test_a_rise_of_entropy_switches_the_bonus_off() -> None:
    knobs = dataclasses.replace(KNOBS, lr=1e-2, entropy_coef=10.0)

    def rise(jump: float | None) -> float:
        network = make_network(sharpness=1000.0)
        batch = make_batch(network, num_steps=32, knobs=knobs)
        batch.advantages = torch.zeros_like(batch.advantages)
        spec = with_(SPEC, num_epochs=10, minibatch_size=256, entropy_jump_clip=jump)
        start = run(copy.deepcopy(network), batch, with_(spec, num_epochs=1), knobs)["entropy"]
        run(network, batch, spec, knobs)
        with torch.no_grad():
            return float(entropy_of(policy_logp(network(batch.observation).logits, 1.0)).mean()) - start

    assert rise(None) > 0.2
    assert rise(0.05) < 0.15


class Descent:
    """Steps as long as the gradient."""

    def __init__(self, network: PolicyNetwork) -> None:
        self.weights = flat_parameters(network)

    def step(self, gradients: Tensor, learning_rate: float) -> None:
        self.weights.sub_(learning_rate * gradients)


def test_long_gradients_are_cut() -> None:
    network, twin = make_network(), make_network()
    batch = make_batch(network)
    batch.returns = batch.returns + 1e4
    spec = with_(SPEC, num_epochs=1, minibatch_size=10_000)
    before = weights(network)
    knobs = dataclasses.replace(KNOBS, lr=1.0)
    metrics = update(spec, network, Descent(network), batch, knobs, torch.Generator())
    assert metrics["grad_norm"] > 100, "as it was"
    assert float((weights(network) - before).norm()) == pytest.approx(0.5, rel=1e-3)
    update(with_(spec, max_grad_norm=1e9), twin, Descent(twin), batch, knobs, torch.Generator())
    assert float((weights(twin) - before).norm()) == pytest.approx(metrics["grad_norm"], rel=1e-3)


@pytest.mark.parametrize("field", ["advantages", "returns", "old_logp", "weights"])
def test_what_is_not_finite_never_reaches_the_weights(field: str) -> None:
    network = make_network()
    batch = make_batch(network)
    if field == "weights":
        with torch.no_grad():
            network.value_scale.output.weight.fill_(math.inf)
    else:
        getattr(batch, field)[3] = math.nan
    before = weights(network)
    with pytest.raises(DivergedError, match="not finite"):
        run(network, batch, with_(SPEC, minibatch_size=10_000))
    assert torch.equal(weights(network), before)


# What is learned, and what is reported


def test_good_actions_become_likelier() -> None:
    """Whoever picks an entity with a larger first feature does better than expected."""
    network = make_network()
    optimizer, generator = Adam(network, SPEC.adam_eps), torch.Generator().manual_seed(0)
    means = []
    for seed in range(8):
        batch = make_batch(network, seed=seed)
        rows = torch.arange(len(batch.actions))
        feature = batch.observation.entities[rows, batch.actions - 1, 0]
        batch.advantages = torch.where(batch.actions > 0, feature, -1.0)
        means.append(float(batch.advantages.mean()))
        update(SPEC, network, optimizer, batch, dataclasses.replace(KNOBS, lr=5e-3), generator)
    assert means[-1] > means[0] + 0.4


@pytest.mark.parametrize(
    ("weight", "name"), [("kl_ref_coef", "kl_ref"), ("imitation_coef", "imitation_loss")]
)
def test_reference_and_teacher_pull_with_their_weight(weight: str, name: str) -> None:
    def pulled(coef: float) -> float:
        network, reference = make_network(), make_network(seed=5)
        batch = make_batch(network, num_steps=32)
        with torch.no_grad():
            batch.ref_logits = reference(batch.observation).logits
        batch.teacher_actions = batch.ref_logits.argmax(-1)
        knobs = dataclasses.replace(KNOBS, lr=1e-2, **{weight: coef})
        return run(network, batch, SPEC, knobs)[name]

    assert pulled(3.0) < 0.75 * pulled(0.0)


def test_the_kl_penalty_holds_the_policy_back() -> None:
    def kl(coef: float) -> float:
        network = make_network()
        knobs = dataclasses.replace(KNOBS, lr=1e-2, kl_coef=coef)
        return run(network, make_batch(network), with_(SPEC, num_epochs=8), knobs)["approx_kl_last"]

    assert kl(10.0) < 0.3 * kl(0.0)


def test_kl_0_to_oneself_and_entropy_of_a_near_uniform_start() -> None:
    network = make_network(sharpness=1.0)
    batch = make_batch(network)
    with torch.no_grad():
        batch.ref_logits = network(batch.observation).logits
    metrics = run(network, batch, with_(SPEC, num_epochs=1, minibatch_size=10_000))
    assert metrics["kl_ref"] == pytest.approx(0, abs=1e-9)
    assert metrics["entropy_frac"] > 0.99
    assert run(sharp := make_network(), make_batch(sharp))["entropy_frac"] < 0.95


def test_metrics_say_what_was_used_and_count_clipped_ratios() -> None:
    metrics = far_update()
    assert metrics["lr"] == 3e-3
    assert 0 < metrics["clip_frac"] < 1
    assert all(math.isfinite(value) for value in metrics.values())
    quiet = make_network()
    assert run(quiet, make_batch(quiet), knobs=dataclasses.replace(KNOBS, lr=1e-7))["clip_frac"] == 0


def test_explained_variance() -> None:
    returns = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert explained_variance(returns + 5, returns) == pytest.approx(1.0)
    assert explained_variance(torch.zeros(4), returns) == pytest.approx(0.0)
    assert explained_variance(-returns, returns) == pytest.approx(-3.0)
    assert math.isnan(explained_variance(returns, torch.ones(4)))


def test_advantages_by_group_have_one_scale() -> None:
    groups = torch.tensor([0, 2] * 50 + [3])
    advantages = torch.randn(101, generator=torch.Generator().manual_seed(0))
    advantages[groups == 2] = advantages[groups == 2] * 1000 + 50
    scaled = normalise_by_group(advantages, groups)
    for group in (0, 2):
        part = scaled[groups == group]
        assert float(part.mean()) == pytest.approx(0, abs=1e-6)
        assert float(part.std(correction=0)) == pytest.approx(1, rel=1e-5)
    assert scaled[-1] == 0, "one alone says nothing"
    assert float((advantages / advantages.std())[groups == 0].std()) < 0.01, "together, the small one drowns"


@pytest.mark.parametrize("how", ["minibatch", "group", "none"])
def test_normalised_advantages_make_the_unit_of_rewards_irrelevant(how: Any) -> None:
    def trained(unit: float) -> Tensor:
        network = make_network()
        batch = make_batch(network)
        batch.advantages = batch.advantages * unit
        run(network, batch, with_(SPEC, normalise_advantages=how))
        return weights(network)

    same = torch.allclose(trained(1.0), trained(100.0), rtol=0, atol=1e-4)
    assert same == (how != "none")


@pytest.mark.parametrize(
    ("ppo", "words"),
    [
        ({"clip_ratio": 0.0}, ["clip_ratio must stay"]),
        ({"learning_rate": {"start": 1e-3, "end": -1e-3}}, ["learning_rate must stay"]),
        ({"learning_rate": "fast"}, ["ppo.learning_rate", "number"]),
        ({"normalise_advantages": "batch"}, ["ppo.normalise_advantages", "minibatch"]),
        ({"discount": {"kind": "steps", "gamma": 1.5}}, ["ppo.discount.gamma"]),
        ({"epochs": 3}, ["ppo.epochs", "unknown key", "num_epochs"]),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(ppo: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        parse_spec(PpoSpec, ppo, "ppo")
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message
