"""What the features of an observation look like in practice: their range, and those that say nothing.

A feature without variance is dead weight, one that sits at a bound nearly always says little, and one far
from 1 drowns the others until the network's own scaling has caught up. Rollouts of several policies, because
what varies depends on who decides: a good router never shows what overload looks like.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pointsman.envs.entity import EntityEnv, Observation
from pointsman.envs.routing import RoutingEnv, RoutingSpec
from pointsman.errors import InputError
from pointsman.inference.space import LEAD, EntitySpace, Feature
from pointsman.routing.features import CONTEXT_FEATURES, ENTITY_FEATURES
from pointsman.routing.policy import PolicySpec
from pointsman.simulator.privileged import PRIVILEGED_FEATURES
from pointsman.spec import parse_spec

# Together they move every feature that we know how to move.
SCENARIOS = (
    "steady-chat",
    "mixed-hardware",
    "random-hardware",
    "tight-memory",
    "overload",
    "straggler",
    "long-context",
)
POLICIES = ("random", "round-robin", "least-outstanding", "least-delay", "hold-until-room")
NUM_DECISIONS = 20_000

MAX_REPLICAS = 64  # of the widest scenario
FLAT_STD = 1e-6
STUCK_SHARE = 0.95
HIGHEST = 10.0  # what networks clip scaled features at

ROUTING_SPACE = EntitySpace(MAX_REPLICAS, ENTITY_FEATURES, CONTEXT_FEATURES, PRIVILEGED_FEATURES)

Advance = Callable[[float], None]


@dataclass(frozen=True)
class Audited:
    """One feature over all rollouts."""

    feature: Feature
    part: str  # replica (or another entity), context, or critic: where it stands in the observation
    low: float
    high: float
    mean: float
    std: float
    at_low: float  # share of the values that equal the lowest one seen
    at_high: float
    flat_in: tuple[str, ...]  # scenarios in which it never varies

    @property
    def flags(self) -> tuple[str, ...]:
        if not np.isfinite([self.low, self.high]).all():
            return ("not finite",)
        found = []
        if self.std <= FLAT_STD:
            found.append("dead")
        elif max(self.at_low, self.at_high) >= STUCK_SHARE:
            found.append("saturated")
        if max(abs(self.low), abs(self.high)) > HIGHEST and self.feature.name != LEAD:  # that is in rewards
            found.append("out of range")
        return tuple(found)


class Samples(NamedTuple):
    """Observations of one scenario, entity by entity and decision by decision."""

    entities: NDArray[np.float32]  # [decisions * entities, F], without padding
    context: NDArray[np.float32]  # [decisions, C]
    privileged: NDArray[np.float32]  # [decisions, P]


def audit(
    scenarios: Sequence[str] = SCENARIOS,
    policies: Sequence[str] = POLICIES,
    num_decisions: int = NUM_DECISIONS,
    seed: int = 0,
    advance: Advance | None = None,
    changes: Sequence[str] = (),
) -> list[Audited]:
    """Every feature, over `num_decisions` decisions spread evenly over scenarios and policies."""
    samples = record(scenarios, policies, num_decisions, seed, advance, changes)
    return summarise(samples)


def audit_env(
    env: EntityEnv,
    entity: str,
    policies: Sequence[str],
    num_decisions: int = NUM_DECISIONS,
    seed: int = 0,
    advance: Advance | None = None,
) -> list[Audited]:
    """The same for any problem: `policies`, the first of its teachers, decide in as many environments."""
    samples = record_in(env, policies, num_decisions, seed, advance)
    return summarise(samples, env.space, entity)


def record(
    scenarios: Sequence[str],
    policies: Sequence[str],
    num_decisions: int,
    seed: int,
    advance: Advance | None,
    changes: Sequence[str] = (),
) -> dict[str, Samples]:
    """Observations by scenario. One environment for each pair of a scenario and a policy."""
    specs = [parse_spec(PolicySpec, {"kind": name}, "policy") for name in dict.fromkeys(policies)]
    scenarios = tuple(dict.fromkeys(scenarios))
    num_envs = len(scenarios) * len(specs)
    num_steps = -(-num_decisions // num_envs)
    # Rewards are not looked at, so their scale need not be found. One more decision than we make: at the end
    # of an episode the next one would be drawn.
    spec = parse_spec(
        RoutingSpec,
        {
            "scenarios": scenarios,
            "changes": tuple(changes),
            "teachers": tuple(specs),
            "max_replicas": MAX_REPLICAS,
            "decisions": num_steps + 1,
            "reward": {"scale": "none"},
        },
        "env",
    )
    return record_in(RoutingEnv(spec, num_envs), [one.kind for one in specs], num_decisions, seed, advance)


def record_in(
    env: EntityEnv, policies: Sequence[str], num_decisions: int, seed: int, advance: Advance | None
) -> dict[str, Samples]:
    """Observations by group. `policies`: the first of the environment's teachers.

    Environment i belongs to group i % G and to policy i // G.
    """
    if num_decisions < 1:
        raise InputError("--decisions", num_decisions, "is not positive", "use some thousands")
    num_steps = -(-num_decisions // env.num_envs)
    policy_of_env = np.arange(env.num_envs) // len(env.groups)
    rows = np.arange(env.num_envs)
    kept: list[list[Samples]] = [[] for _ in env.groups]
    observation = env.reset(seed)
    group_of_env = np.arange(env.num_envs) % len(env.groups)
    for _ in range(num_steps):
        for group, parts in enumerate(kept):
            parts.append(_rows(observation, group_of_env == group))
        advice = np.array([env.advise(policy) for policy in range(len(policies))])
        observation = env.step(advice[policy_of_env, rows]).observation
        if advance:
            advance(1 / num_steps)
    return {
        name: Samples(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))
        for name, parts in zip(env.groups, kept, strict=True)
    }


def _rows(observation: Observation, envs: NDArray[np.bool_]) -> Samples:
    entities = observation.entities[envs]
    return Samples(
        entities[observation.entity_mask[envs]],
        observation.context[envs].copy(),
        observation.privileged[envs].copy(),
    )


def summarise(
    samples: dict[str, Samples], space: EntitySpace = ROUTING_SPACE, entity: str = "replica"
) -> list[Audited]:
    parts = (
        (entity, "entities", space.entity_features),
        ("context", "context", space.context_features),
        ("critic", "privileged", space.privileged_features),
    )
    return [
        _summary(feature, part, {name: getattr(one, field)[:, column] for name, one in samples.items()})
        for part, field, features in parts
        for column, feature in enumerate(features)
    ]


def _summary(feature: Feature, part: str, by_scenario: dict[str, NDArray[np.float32]]) -> Audited:
    values = np.concatenate(list(by_scenario.values())).astype(np.float64)
    low, high = float(values.min()), float(values.max())
    near = 1e-6 * max(1.0, abs(low), abs(high))
    return Audited(
        feature=feature,
        part=part,
        low=low,
        high=high,
        mean=float(values.mean()),
        std=float(values.std()),
        at_low=float(np.mean(values <= low + near)),
        at_high=float(np.mean(values >= high - near)),
        flat_in=tuple(name for name, part in by_scenario.items() if np.ptp(part) <= FLAT_STD),
    )
