"""What a clone does when it routes, judged by where it sends requests."""

from __future__ import annotations

import numpy as np
import pytest
from envs.factories import make_env

from pointsman.inference.checkpoint import NetworkSpec
from pointsman.training.networks import build_network
from pointsman.training.passes import make_pass
from pointsman.training.ranks import Ranks
from pointsman.training.warm_start import WarmStartSpec, warm_start

NUM_ENVS, NUM_REPLICAS, NUM_STEPS = 16, 4, 400


@pytest.mark.parametrize("kind", ["round-robin", "random"])
def test_a_clone_of_a_teacher_without_reasons_spreads_its_requests(kind: str) -> None:
    """Its probabilities do: whose turn it is cannot be seen, so it learns that each is as good as the others.

    Taught by one that names the same replica all the time, it would send most to the busiest.
    """
    env = make_env(NUM_ENVS, teachers=[{"kind": kind}], decisions=1000)
    network = build_network(NetworkSpec(width=16, depth=1), env.space, 0)
    spec = WarmStartSpec(decisions=12_000, learning_rate=1e-2, minibatch_size=128)
    _, metrics = warm_start(network, env, spec, 0, Ranks())
    assert metrics["clone_entropy_frac"] > 0.9
    decide = make_pass(network).policy()
    rng = np.random.default_rng(0)
    seen = env.reset(7)
    sent = np.zeros((NUM_ENVS, env.space.num_entities + 1))
    for _ in range(NUM_STEPS):
        actions = decide(seen, None, 1.0, 0.0, rng.random(NUM_ENVS)).actions
        sent[np.arange(NUM_ENVS), actions] += 1
        seen = env.step(actions).observation
    shares = sent[:, 1 : NUM_REPLICAS + 1] / sent[:, 1:].sum(axis=1, keepdims=True)
    assert np.all(np.abs(shares - 1 / NUM_REPLICAS) < 0.12), shares
