"""What a trained policy looks at: which features move its choices, and in which direction.

Permutation importance: on recorded decisions a feature gets the values it had in other decisions (of all
replicas together, so that they stay comparable among each other), everything else stays. What the choice then
loses is what the feature was worth to it. Features that say nearly the same replace each other and share the
credit, so groups tell more than single ones.

Partial dependence: one feature of one replica moves, everything else stays, and the probability of sending
the request there follows. For a feature of the request or the whole cluster: that of deciding as it did.

No PyTorch: the compiled network of inference/network.py, as in serving. A recurrent one keeps the memory that
it had at each decision.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pointsman.config import SloSpec
from pointsman.envs.entity import EntityEnv
from pointsman.envs.routing import RoutingEnv, RoutingSpec
from pointsman.errors import InputError
from pointsman.inference.checkpoint import Checkpoint
from pointsman.inference.network import NetworkTables, network_logits, scratch_size
from pointsman.inference.space import EntitySpace, Feature
from pointsman.spec import parse_spec

MAX_REPLICAS = 64  # of the widest scenario
NUM_ENVS = 16
NUM_DECISIONS = 2048
NUM_DEPENDENCE_DECISIONS = 256
NUM_POINTS = 16

Floats = NDArray[np.float32]
Array = NDArray[np.float64]
Advance = Callable[[float], None]


@dataclass(frozen=True)
class RecordedDecisions:
    """D recorded decisions. R is the room for replicas; A = R + 1 actions."""

    entities: Floats  # [D, R, F]
    context: Floats  # [D, C]
    num_entities: NDArray[np.int64]  # [D]
    legal: NDArray[np.bool_]  # [D, A]
    state: Floats  # [D, W] what a recurrent network remembered before it decided

    def __len__(self) -> int:
        return len(self.context)

    def rows(self, index: Any) -> RecordedDecisions:
        arrays = (self.entities, self.context, self.num_entities, self.legal, self.state)
        return RecordedDecisions(*(array[index] for array in arrays))


class Network:
    """A checkpoint's compiled network, for many recorded decisions."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._tables = NetworkTables(checkpoint)
        self.width = int(self._tables.rows[0].width)

    def logits(self, decisions: RecordedDecisions) -> tuple[Floats, Floats]:
        """[D, A], those of missing replicas 0; and the states after each decision [D, W]."""
        rows = self._tables.rows
        room = decisions.entities.shape[1]
        scratch = np.zeros(scratch_size(rows[0], room), np.float32)
        logits = np.zeros((len(decisions), room + 1), np.float32)
        state = decisions.state.copy()
        for d, num_entities in enumerate(decisions.num_entities.tolist()):
            network_logits(
                rows, decisions.entities[d], decisions.context[d], num_entities, scratch, state[d], logits[d]
            )
        return logits, state

    def probabilities(self, decisions: RecordedDecisions) -> Array:
        """[D, A] of the legal actions; 0 of the others."""
        logits = np.where(decisions.legal, self.logits(decisions)[0].astype(np.float64), -np.inf)
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        shares: Array = weights / weights.sum(axis=1, keepdims=True)
        return shares


def record(
    checkpoint: Checkpoint,
    scenarios: Sequence[str],
    num_decisions: int = NUM_DECISIONS,
    seed: int = 0,
    where: str = "policy",
    changes: Sequence[str] = (),
) -> RecordedDecisions:
    """Decisions of the policy itself, arg-max, spread evenly over the scenarios."""
    num_envs = max(NUM_ENVS, len(scenarios))
    num_steps = -(-num_decisions // num_envs)
    is_flat = checkpoint.network.kind == "mlp"  # knows one number of replicas only
    spec = parse_spec(
        RoutingSpec,
        {
            "scenarios": tuple(scenarios),
            "changes": tuple(changes),
            "max_replicas": checkpoint.space.num_entities if is_flat else MAX_REPLICAS,
            "decisions": num_steps + 1,
            "reward": {"scale": "none"},
            "hold": {"small_first": 0.0} | checkpoint.metadata.get("hold", {}),
            "detours_s": (checkpoint.metadata.get("detour_s"),),
            "slo": checkpoint.metadata.get("slo", SloSpec()),
        },
        "env",
    )
    return record_in(RoutingEnv(spec, num_envs), checkpoint, num_decisions, seed, where)


def record_in(
    env: EntityEnv, checkpoint: Checkpoint, num_decisions: int, seed: int = 0, where: str = "policy"
) -> RecordedDecisions:
    """Record decisions in the environments of any problem."""
    checkpoint.require_space(env.space, where)
    network = Network(checkpoint)
    # Features that were added since the policy was trained stand at the end, and it does not see them.
    num_features, num_context = len(checkpoint.space.entity_features), len(checkpoint.space.context_features)
    num_steps = -(-num_decisions // env.num_envs)
    state = np.zeros((env.num_envs, network.width), np.float32)
    seen = env.reset(seed)
    kept = []
    for _ in range(num_steps):
        num_entities = seen.entity_mask.sum(axis=1)
        now = RecordedDecisions(
            seen.entities[:, :, :num_features].copy(),
            seen.context[:, :num_context].copy(),
            num_entities,
            seen.action_mask.copy(),
            state,
        )
        kept.append(now)
        logits, state = network.logits(now)
        step = env.step(np.where(now.legal, logits, -np.inf).argmax(axis=1))
        state[step.terminated | step.truncated] = 0.0
        seen = step.observation
    room = max(int(one.num_entities.max()) for one in kept)
    return RecordedDecisions(
        np.concatenate([one.entities[:, :room] for one in kept]),
        np.concatenate([one.context for one in kept]),
        np.concatenate([one.num_entities for one in kept]),
        np.concatenate([one.legal[:, : room + 1] for one in kept]),
        np.concatenate([one.state for one in kept]),
    )


class Columns(NamedTuple):
    """Where features stand in an observation."""

    entities: tuple[int, ...]
    context: tuple[int, ...]


def groups_of(space: EntitySpace) -> dict[str, Columns]:
    """The features that are permuted together, by the name of their group."""
    names = dict.fromkeys(feature.group for feature in (*space.entity_features, *space.context_features))

    def members(features: Sequence[Feature], group: str) -> tuple[int, ...]:
        return tuple(i for i, feature in enumerate(features) if feature.group == group)

    return {
        name: Columns(members(space.entity_features, name), members(space.context_features, name))
        for name in names
    }


def features_of(space: EntitySpace) -> dict[str, Columns]:
    """Each feature on its own."""
    entities = {feature.name: Columns((i,), ()) for i, feature in enumerate(space.entity_features)}
    context = {feature.name: Columns((), (i,)) for i, feature in enumerate(space.context_features)}
    assert not entities.keys() & context.keys()
    return entities | context


def require_features(space: EntitySpace, names: Sequence[str]) -> None:
    known = features_of(space)
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            remedy = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
            raise InputError("--feature", name, "unknown feature", remedy)


class Importance(NamedTuple):
    """What decisions lose when a feature, or a group of them, has the values of another decision."""

    name: str
    num_features: int
    changed: float  # share of the decisions that turn out differently
    lost: float  # of the probability of what was chosen, on average
    kl: float  # of the action probabilities, before from after [nats]


def importances(
    network: Network,
    decisions: RecordedDecisions,
    parts: Mapping[str, Columns],
    seed: int = 0,
    advance: Advance | None = None,
) -> list[Importance]:
    """How important each part is, the most important first."""
    before = network.probabilities(decisions)
    chosen = before.argmax(axis=1)
    rows = np.arange(len(decisions))
    order = permutation(decisions.num_entities, np.random.default_rng(seed))
    found = []
    for name, columns in parts.items():
        after = network.probabilities(permuted(decisions, columns, order))
        log_ratio = np.log(np.maximum(before, 1e-12) / np.maximum(after, 1e-12))
        found.append(
            Importance(
                name,
                len(columns.entities) + len(columns.context),
                changed=float(np.mean(after.argmax(axis=1) != chosen)),
                lost=float(np.mean(before[rows, chosen] - after[rows, chosen])),
                kl=float(np.mean(np.sum(before * log_ratio, axis=1))),
            )
        )
        if advance:
            advance(1 / len(parts))
    return sorted(found, key=lambda one: (-one.changed, -one.kl))


def permutation(num_entities: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
    """[D] the decision from which each one takes its values: one with as many replicas."""
    order = np.arange(len(num_entities))
    for count in np.unique(num_entities):
        rows = np.flatnonzero(num_entities == count)
        order[rows] = rng.permutation(rows)
    return order


def permuted(decisions: RecordedDecisions, columns: Columns, order: NDArray[np.int64]) -> RecordedDecisions:
    entities, context = decisions.entities.copy(), decisions.context.copy()
    for column in columns.entities:
        entities[:, :, column] = decisions.entities[order, :, column]
    for column in columns.context:
        context[:, column] = decisions.context[order, column]
    return replace(decisions, entities=entities, context=context)


class Dependence(NamedTuple):
    """Probabilities along a feature; see the top of the file."""

    feature: Feature
    part: str  # replica or what else there is to choose from, or context
    values: Array  # [K] evenly from the 1st to the 99th percentile; empty if it does not vary
    probability: Array  # [K] of sending the request there; context: of deciding as before


def dependence(
    network: Network,
    decisions: RecordedDecisions,
    space: EntitySpace,
    name: str,
    seed: int = 0,
    entity: str = "replica",
) -> Dependence:
    """How the choice depends on the feature of that name; `entity` is the word for what is chosen."""
    of_entity, of_context = features_of(space)[name]
    rng = np.random.default_rng(seed)
    is_open = decisions.legal[:, 1:].any(axis=1)
    size = min(NUM_DEPENDENCE_DECISIONS, int(is_open.sum()))
    some = decisions.rows(np.sort(rng.choice(np.flatnonzero(is_open), size, replace=False)))
    rows = np.arange(size)
    if of_entity:
        (column,) = of_entity
        feature, part = space.entity_features[column], entity
        is_there = np.arange(decisions.entities.shape[1]) < decisions.num_entities[:, None]
        values = _range(decisions.entities[is_there][:, column])
        # Any replica that may be chosen: the one that was would tell only half of the story.
        replica = (rng.random(some.legal[:, 1:].shape) * some.legal[:, 1:]).argmax(axis=1)
        action = replica + 1
    else:
        (column,) = of_context
        feature, part = space.context_features[column], "context"
        values = _range(decisions.context[:, column])
        action = network.probabilities(some).argmax(axis=1)
    probability = np.zeros(len(values))
    for k, value in enumerate(values):
        entities, context = some.entities.copy(), some.context.copy()
        if of_entity:
            entities[rows, replica, column] = value
        else:
            context[:, column] = value
        moved = network.probabilities(replace(some, entities=entities, context=context))
        probability[k] = moved[rows, action].mean()
    return Dependence(feature, part, values, probability)


def _range(seen: Floats) -> Array:
    """[K] from end to end, without the outermost values unless there is nothing else."""
    low, high = np.percentile(seen, (1, 99))
    if low == high:
        low, high = float(seen.min()), float(seen.max())
    return np.linspace(low, high, NUM_POINTS) if low < high else np.zeros(0)
