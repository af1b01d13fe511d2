"""The `policy:` section of the configuration, and policies as compiled code wants them.

Wherever a policy is named, a heuristic's name, `default` or a path will do (sources.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from pydantic import Field, model_validator

from pointsman.compiled.memory import Records, aligned
from pointsman.errors import InputError
from pointsman.inference.checkpoint import Checkpoint, load_checkpoint
from pointsman.inference.network import NetworkTables, scratch_size
from pointsman.inference.space import EntitySpace
from pointsman.routing import heuristics
from pointsman.routing.features import (
    CONTEXT_FEATURES,
    ENTITY_FEATURES,
    NUM_CONTEXT_FEATURES,
    NUM_ENTITY_FEATURES,
)
from pointsman.routing.heuristics import HEURISTICS
from pointsman.routing.observation import STEP_LIMIT_S, TTFT_LIMIT_S
from pointsman.routing.records import POLICY
from pointsman.routing.signals import NUM_SIGNALS, SIGNAL_INDEX, SIGNALS
from pointsman.routing.sources import LEARNED, look_up
from pointsman.spec import Spec


class HoldSpec(Spec):
    """Bounds on how long the router may keep a request to itself."""

    max_hold_s: float = Field(default=60.0, ge=0, description="after this a request must be sent")
    timer_s: float = Field(
        default=0.1, gt=0, description="a held request is decided again at least this often"
    )
    overtake_s: float = Field(
        default=0.0,
        ge=0,
        description="smaller requests that arrived up to so much later go first; 0: in order of arrival",
    )


class PolicySpec(Spec):
    kind: str = Field(
        default="least-outstanding",
        description="a heuristic (see `pointsman policies`) or learned; or `default` or the path of a policy",
    )
    name: str | None = Field(default=None, description="what tables call it; absent = its kind")
    checkpoint: Path | None = Field(default=None, description="learned: a file of `pointsman train`")
    weights: dict[str, float] = Field(default={}, description="linear-score: weight of each signal")
    parameters: dict[str, float] = Field(
        default={}, description="of a heuristic that has any (see `pointsman policies`); absent = usual"
    )
    kv_limit: float = Field(
        default=0.95,
        gt=0,
        description="of those that hold: share of a replica's KV memory that may be booked",
    )
    prefill_limit_tokens: float = Field(
        default=2048,
        gt=0,
        description="of those that hold: prompt tokens that may wait on a replica",
    )
    stream_limit: int | None = Field(
        default=None,
        gt=0,
        description="of those that hold: requests that a replica may have; absent = any number",
    )
    small_first: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="of those that hold: in the order of held requests, a wait counts 2^-small_first as much "
        "with each doubling of a request's size; 0 = by arrival, as heuristics do; absent = as trained",
    )
    detour_s: float | None = Field(
        default=None,
        ge=0,
        description="learned: a request goes where its first token is due at most so much later than at the "
        "soonest [s]; the less, the shorter the tail and the longer the mean; absent = as it was trained",
    )

    @model_validator(mode="before")
    @classmethod
    def _looked_up(cls, data: Any) -> Any:
        if isinstance(data, str):
            data = {"kind": data}
        kind = data.get("kind") if isinstance(data, Mapping) else None
        if isinstance(data, Mapping) and data.get("name") is not None and "kind" not in data:
            remedy = f"write `kind: {data['name']}`; `name` is what tables call it"
            raise InputError("policy.kind", None, "missing", remedy)
        if not isinstance(kind, str) or kind in HEURISTICS or kind == LEARNED:
            return data
        return look_up(kind, tuple(HEURISTICS)) | {key: data[key] for key in data if key != "kind"}

    @property
    def label(self) -> str:
        return self.name or self.kind

    @model_validator(mode="after")
    def _name_is_its_own(self) -> Self:
        if self.name != self.kind and self.name in HEURISTICS:
            problem = f"is another policy, and this one is {self.kind}"
            raise InputError("policy.name", self.name, problem, "give it a name of its own, or leave it out")
        return self

    @model_validator(mode="after")
    def _weights_fit(self) -> Self:
        unknown = [name for name in self.weights if name not in SIGNAL_INDEX]
        if unknown:
            remedy = f"known signals: {', '.join(SIGNAL_INDEX)}"
            raise InputError("policy.weights", unknown[0], "unknown signal", remedy)
        if self.kind == "linear-score" and not any(self.weights.values()):
            raise InputError(
                "policy.weights", self.weights, "linear-score needs a weight", "for example {outstanding: 1}"
            )
        if self.kind != "linear-score" and self.weights:
            raise InputError("policy.weights", self.weights, "only for linear-score", "leave it out")
        return self

    @model_validator(mode="after")
    def _parameters_fit(self) -> Self:
        known = {one.name: one for one in HEURISTICS[self.kind].parameters} if self.kind in HEURISTICS else {}
        for name, value in self.parameters.items():
            if name not in known:
                remedy = f"known: {', '.join(known)}" if known else "leave it out"
                raise InputError("policy.parameters", name, f"{self.kind} has no such parameter", remedy)
            if not known[name].lowest <= value <= known[name].highest:
                remedy = f"from {known[name].lowest:g} to {known[name].highest:g}"
                raise InputError(f"policy.parameters.{name}", value, "out of range", remedy)
        return self

    @model_validator(mode="after")
    def _detour_fits(self) -> Self:
        if self.detour_s is not None and self.kind != LEARNED:
            raise InputError("policy.detour_s", self.detour_s, "only for a learned policy", "leave it out")
        return self

    @model_validator(mode="after")
    def _checkpoint_fits(self) -> Self:
        if (self.kind == LEARNED) != (self.checkpoint is not None):
            problem = "missing" if self.kind == LEARNED else "only for a learned policy"
            remedy = "name a .safetensors file" if self.kind == LEARNED else "leave it out"
            raise InputError("policy.checkpoint", self.checkpoint, problem, remedy)
        return self


class PolicyTables:
    """Policies as the kernel wants them: `rows` [N] POLICY, one a cluster, which hold what they point to."""

    def __init__(self, policies: Sequence[PolicySpec | Checkpoint | None], max_replicas: int) -> None:
        """For clusters of up to `max_replicas`. None is a policy outside the kernel."""
        if max_replicas < 1:
            raise ValueError(f"policies for {max_replicas} replicas")
        self._loaded: dict[Path, Checkpoint] = {}
        self._networks: dict[int, NetworkTables] = {}
        self.rows = Records(len(policies), POLICY)
        self.rows.ttft_limit_s, self.rows.step_limit_s = TTFT_LIMIT_S, STEP_LIMIT_S
        self.rows.stream_limit = self.rows.detour_s = np.inf
        for row, policy in zip(self.rows, policies, strict=True):
            if policy is None:
                row.kind = heuristics.EXTERNAL
            elif isinstance(policy, Checkpoint):
                self._fill_learned(row, policy, max_replicas)
            elif policy.checkpoint is not None:
                self._fill_learned(row, self._load(policy.checkpoint), max_replicas)
            else:
                self._fill_heuristic(row, policy)
            if isinstance(policy, PolicySpec):
                fill_changes(row, policy)

    def _load(self, path: Path) -> Checkpoint:
        if path not in self._loaded:
            self._loaded[path] = load_checkpoint(path, "policy.checkpoint")
        return self._loaded[path]

    def _fill_heuristic(self, row: Any, spec: PolicySpec) -> None:
        row.kind = HEURISTICS[spec.kind].kind
        row.reads_derived = spec.kind == "gathering"  # the share of time that prompts take
        row.kv_limit = spec.kv_limit
        row.prefill_limit = spec.prefill_limit_tokens
        row.stream_limit = limit_of(spec.stream_limit)
        parameters = np.zeros(heuristics.MAX_PARAMETERS)
        row.parameters = self.rows.hold(parameters)
        for number, one in enumerate(HEURISTICS[spec.kind].parameters):
            parameters[number] = spec.parameters.get(one.name, one.default)
        weights = np.zeros(NUM_SIGNALS)
        row.weights = self.rows.hold(weights)
        for name, weight in spec.weights.items():
            weights[SIGNAL_INDEX[name]] = weight
            row.reads_derived |= SIGNALS[SIGNAL_INDEX[name]].source == "derived"

    def _fill_learned(self, row: Any, checkpoint: Checkpoint, max_replicas: int) -> None:
        """Weights are shared by the clusters, working memory is not: clusters run on several threads."""
        if id(checkpoint) not in self._networks:
            # Others would be read as these, and too many replicas beyond the end of an mlp's arrays. Features
            # that are new since it was trained come last, and it does not read so far.
            num_slots = max(checkpoint.space.num_entities, max_replicas)
            space = EntitySpace(num_slots, ENTITY_FEATURES, CONTEXT_FEATURES, ())
            checkpoint.require_space(space, "policy")
            self._networks[id(checkpoint)] = NetworkTables(checkpoint)
        network = self._networks[id(checkpoint)]
        room = checkpoint.metadata.get("hold", {})
        row.kind = heuristics.LEARNED
        row.may_hold = room.get("allowed", True)
        row.hold_s = room.get("recheck_s", 1.0)
        row.kv_limit = room.get("kv_limit", 0.95)
        row.prefill_limit = room.get("prefill_limit_tokens", 2048.0)
        row.stream_limit = limit_of(room.get("stream_limit"))
        row.small_first = room.get("small_first", 0.0)
        row.detour_s = limit_of(checkpoint.metadata.get("detour_s"))
        slo = checkpoint.metadata.get("slo", {})
        row.ttft_limit_s = slo.get("ttft_s", TTFT_LIMIT_S)
        row.step_limit_s = slo.get("tpot_s", STEP_LIMIT_S)
        row.network = self.rows.hold(network.rows)
        row.max_replicas = max_replicas
        row.entities = self.rows.hold(np.zeros((max_replicas, NUM_ENTITY_FEATURES), np.float32))
        row.context = self.rows.hold(np.zeros(NUM_CONTEXT_FEATURES, np.float32))
        row.legal = self.rows.hold(np.zeros(max_replicas + 1, np.uint8))
        row.logits = self.rows.hold(np.zeros(max_replicas + 1, np.float32))
        scratch = np.zeros(scratch_size(network.rows[0], max_replicas), np.float32)
        row.scratch = self.rows.hold(aligned(scratch))
        row.state = self.rows.hold(np.zeros(int(network.rows[0].width), np.float32))


def rules_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """What its metadata say of how it decides, and what holds as well for whoever learns on from it."""
    names = ("hold", "detour_s", "slo")
    return {name: checkpoint.metadata[name] for name in names if name in checkpoint.metadata}


def fill_changes(row: Any, spec: PolicySpec) -> None:
    """What a configuration says of how a policy runs, whatever it was trained with."""
    if spec.detour_s is not None:
        row.detour_s = spec.detour_s
    if spec.small_first is not None:
        row.small_first = spec.small_first


def limit_of(value: float | None) -> float:
    """Where None stands for no limit."""
    return np.inf if value is None else value


def lacking(policy: PolicySpec) -> list[str]:
    """Features that are new since a learned policy was trained; it decides without them."""
    if policy.checkpoint is None:
        return []
    space = EntitySpace(1, ENTITY_FEATURES, CONTEXT_FEATURES, ())
    return load_checkpoint(policy.checkpoint, "policy.checkpoint").lacks(space)


def fill_memory(memory: Any, keeper: Records, num_replicas: int, rng: int) -> None:
    """A MEMORY record for a policy that has not decided anything yet; `keeper` keeps its tables alive."""
    memory.rng = rng
    memory.round_robin = 0
    memory.num_replicas = num_replicas
    memory.scores = keeper.hold(np.zeros(num_replicas))
    memory.credit = keeper.hold(np.zeros(num_replicas))
