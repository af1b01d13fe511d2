"""Rollouts for tests of PPO: random observations, actions drawn by the policy, everything else random."""

from __future__ import annotations

from typing import Any

import torch

from pointsman.inference.checkpoint import NetworkSpec
from pointsman.inference.space import EntitySpace, Feature
from pointsman.training.minibatches import Batch
from pointsman.training.networks import PolicyNetwork, TensorObservation, build_network
from pointsman.training.ppo import Knobs, sample

KNOBS = Knobs(lr=1e-3)


def features(prefix: str, num: int) -> tuple[Feature, ...]:
    return tuple(Feature(f"{prefix}{i}", "1", prefix, "a number") for i in range(num))


SPACE = EntitySpace(4, features("entity", 3), features("context", 2), features("privileged", 2))


def make_network(kind: str = "pooled", seed: int = 0, sharpness: float = 150.0, **spec: Any) -> PolicyNetwork:
    """A small network whose policy is far from uniform: bugs show only where probabilities differ."""
    network = build_network(NetworkSpec(kind=kind, width=16, heads=2, **spec), SPACE, seed)  # type: ignore[arg-type]
    with torch.no_grad():
        for name, parameter in network.head.named_parameters():
            if parameter.shape[0] in (1, SPACE.num_actions) and name.endswith("weight"):
                parameter.mul_(sharpness)
    return network


def observations(num_rows: int, generator: torch.Generator) -> TensorObservation:
    num_real = torch.randint(2, SPACE.num_entities + 1, (num_rows, 1), generator=generator)
    entity_mask = torch.arange(SPACE.num_entities) < num_real
    action_mask = torch.cat((torch.rand((num_rows, 1), generator=generator) < 0.5, entity_mask), 1)
    action_mask[:, 1] &= ~action_mask[:, 0]  # some legal entity is missing too; action 2 is always legal
    return TensorObservation(
        torch.randn((num_rows, SPACE.num_entities, 3), generator=generator),
        torch.randn((num_rows, 2), generator=generator),
        entity_mask,
        action_mask,
        torch.randn((num_rows, 2), generator=generator),
    )


def make_batch(
    network: PolicyNetwork, num_steps: int = 16, num_envs: int = 8, seed: int = 1, knobs: Knobs = KNOBS
) -> Batch:
    """A rollout [T * N] of `network`; with its state, reset where random episodes begin, if it has one."""
    generator = torch.Generator().manual_seed(seed)
    rows = num_steps * num_envs
    observation = observations(rows, generator)
    is_start = torch.rand((num_steps, num_envs), generator=generator) < 0.1
    is_start[0] = True
    state = network.initial_state(num_envs)
    states, actions, logps, values = [], [], [], []
    with torch.no_grad():
        for t in range(num_steps):
            now = observation.rows(slice(t * num_envs, (t + 1) * num_envs))
            if state is not None:
                state = state.masked_fill(is_start[t, :, None], 0.0)
                states.append(state)
            logits, value, state = network(now, state)
            action, logp = sample(logits, knobs.temperature, knobs.epsilon, now.action_mask, generator)
            actions.append(action)
            logps.append(logp)
            values.append(value)
    old_values = torch.cat(values)
    return Batch(
        observation=observation,
        actions=torch.cat(actions),
        old_logp=torch.cat(logps),
        advantages=torch.randn(rows, generator=generator),
        returns=old_values + torch.randn(rows, generator=generator),
        old_values=old_values,
        groups=torch.randint(0, 3, (rows,), generator=generator),
        states=torch.cat(states) if states else None,
        is_start=is_start.flatten(),
        num_envs=num_envs,
    )
