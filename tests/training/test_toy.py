"""Learning end to end on problems with a known answer.

One seed by default. Three: `POINTSMAN_TOY_SEEDS=3 pytest tests/training/test_toy.py` (about 10 s each).
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch

from pointsman.inference.checkpoint import NetworkSpec
from pointsman.training.advantages import StepDiscount
from pointsman.training.networks import TensorObservation, build_network
from pointsman.training.ppo import PpoSpec
from pointsman.training.schedules import constant, linear

from .toys import Recall, Servers, learn

SEEDS = range(int(os.environ.get("POINTSMAN_TOY_SEEDS", "1")))
SPEC = PpoSpec(
    learning_rate=linear(1e-2, 1e-3), minibatch_size=512, discount=StepDiscount(gamma=Servers.gamma, lam=0.95)
)
STATES, REWARDS, TRANSITIONS = Servers.model()
IS_LEGAL = np.isfinite(REWARDS)
UNIFORM = IS_LEGAL / IS_LEGAL.sum(1, keepdims=True)


def gap_closed(policy: Any) -> float:
    """Share of the way from random to the best possible, over all states."""
    random, best = Servers.values_of(UNIFORM).mean(), Servers.best_values().mean()
    return float((Servers.values_of(policy).mean() - random) / (best - random))


def learned(num_updates: int, seed: int, truncation_is_end: bool = False) -> tuple[float, float]:
    """The share closed by the arg-max policy, and how far V is off the exact values, relatively."""
    network = build_network(NetworkSpec(width=16, depth=1), Servers.space, seed)
    learn(Servers(64, seed), SPEC, network, num_updates, 32, seed, truncation_is_end)
    with torch.no_grad():
        output = network(TensorObservation.from_numpy(Servers.observe(STATES)))
    policy = output.logits.double().softmax(-1).numpy()
    exact = Servers.values_of(policy)
    values = network.value_scale.denormalise(output.value.detach().double()).numpy()
    greedy = np.eye(3)[policy.argmax(1)]
    return gap_closed(greedy), float(np.abs(values - exact).mean() / np.abs(exact).mean())


def test_the_environment_is_the_model() -> None:
    """Steps of the environment come as often, and pay as much, as the model says."""
    env = Servers(200_000, seed=0)
    before = env.queues.copy()
    actions = np.array([env.rng.choice(np.flatnonzero(row)) for row in IS_LEGAL])
    side = Servers.limit + 1
    index = before @ [side, 1]
    step = env.step(actions[index])
    np.testing.assert_array_equal(step.reward, REWARDS[index, actions[index]])
    after = np.rint(step.final.entities[:, :, 0] * Servers.limit).astype(int) @ [side, 1]
    for s in (0, 10, side * side - 1):
        counts = np.bincount(after[index == s], minlength=side * side) / (index == s).sum()
        np.testing.assert_allclose(counts, TRANSITIONS[s, actions[s]], atol=0.04)
    np.testing.assert_allclose(TRANSITIONS.sum(-1)[IS_LEGAL], 1.0)


def test_no_simple_rule_passes() -> None:
    """Join the shortest queue, the shortest expected delay, the fast one: none closes 97 %."""
    for score in (lambda q: q, lambda q: (q + 1) / Servers.rates, lambda q: np.array([0, 1])):
        policy = np.zeros_like(UNIFORM)
        for s, queues in enumerate(STATES):
            legal = np.flatnonzero(IS_LEGAL[s])
            costs = np.append(0.0, score(queues))
            policy[s, legal[costs[legal].argmin()]] = 1.0
        assert 0.85 < gap_closed(policy) < 0.965


@pytest.mark.parametrize("seed", SEEDS)
def test_ppo_finds_the_best_policy_and_its_values(seed: int) -> None:
    closed, value_error = learned(num_updates=28, seed=seed)
    assert closed >= 0.97
    assert value_error < 0.06


def test_truncation_taken_for_an_end_makes_values_wrong() -> None:
    """The policy still looks decent; the values give the bug away."""
    closed, value_error = learned(num_updates=15, seed=0, truncation_is_end=True)
    assert closed > 0.8
    assert value_error > 0.2


@pytest.mark.parametrize("seed", SEEDS)
def test_a_recurrent_policy_remembers_a_cue(seed: int) -> None:
    """Without memory, half of the answers are right at best."""
    spec = PpoSpec(
        learning_rate=constant(3e-3),
        minibatch_size=512,
        sequence_length=16,
        discount=StepDiscount(gamma=Recall.gamma, lam=0.95),
        target_kl=None,
        entropy_jump_clip=None,
    )
    width = 32
    network_spec = NetworkSpec(kind="attention+gru", width=width, depth=1, heads=1)
    network = build_network(network_spec, Recall.space, seed)
    rewards = learn(Recall(64, seed), spec, network, num_updates=20, num_steps=32, seed=seed)
    right = np.array(rewards) * (Recall.delay + 1)  # one answer in nine steps
    assert right[:3].mean() < 0.7
    assert right[-3:].mean() > 0.9
