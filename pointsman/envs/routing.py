"""Routing as an environment: N simulated clusters, each beside a shadow that serves the same arrivals.

Observation: for each replica the features of `routing.features.ENTITY_FEATURES`, for the request to place
and the cluster as a whole `CONTEXT_FEATURES`; for critics `PRIVILEGED_FEATURES`, which no policy may see.
Action: 0 holds the request to place, k sends it to replica k - 1; which of the queued requests that is,
`hold.small_first` says (routing/ordering.py). Holding is legal only while no replica
has room (routing/legality.py says what that means), and never beyond `max_hold_s`.
Reward: envs/rewards.py. Episode: a window of endless traffic, entered somewhere in the middle: `warmup`
requests are routed by a heuristic drawn at random, good or bad, so that the policy sees states it would not
get itself into. After `decisions` decisions the window is cut off (truncated, never terminated), unless the
cluster holds so much more than its shadow that the run has gone bad.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator, model_validator

from pointsman.compiled.calls import direct_for
from pointsman.compiled.memory import Records, array_at
from pointsman.compiled.random import first_state
from pointsman.config import SloSpec
from pointsman.envs.entity import Bools, Episode, Observation, Step
from pointsman.envs.episodes import RANDOM, Difficulty, check_groups, draw
from pointsman.envs.foresight import Oracle
from pointsman.envs.limits import MIN_RECENT, LimitSpec, passed, ttft_p99_passed
from pointsman.envs.rewards import SMOOTHING_S, TERMS_OF_TOTALS, RewardSpec, Snapshot
from pointsman.envs.totals import FIELDS, RewardTotals, read_totals
from pointsman.errors import InputError
from pointsman.experiments.objective import DEFAULT_OBJECTIVE, Objective, find_objective, parse_limit
from pointsman.experiments.own import parts_text, trace_digest
from pointsman.experiments.scenarios import find_scenario, is_file, short_names
from pointsman.inference.space import EntitySpace
from pointsman.routing.features import (
    BACKLOG_AFTER,
    CONTEXT_FEATURES,
    ENTITY_FEATURES,
    OLDEST_WAIT,
    OUTSTANDING_CV,
    WAITED,
)
from pointsman.routing.ordering import SMALL_FIRST
from pointsman.routing.policy import PolicySpec, PolicyTables, fill_memory, limit_of
from pointsman.routing.records import MEMORY
from pointsman.simulator.cluster import Clusters
from pointsman.simulator.privileged import PRIVILEGED_FEATURES
from pointsman.simulator.run import advise, look, run
from pointsman.simulator.state import DECISION, SIM
from pointsman.spec import Spec, parse_spec

ROUTING_FEATURES = (*ENTITY_FEATURES, *CONTEXT_FEATURES)
RECORD = np.dtype((np.record, SIM))
FEATURE_GROUPS = tuple(dict.fromkeys(feature.group for feature in ROUTING_FEATURES))

PRICE_SMOOTHING_S = 10.0
# Of a cluster's record, by limit: where its tail begins, and the seconds beyond.
TAIL_FIELDS = {"ttft_p99": "tail_ttft_s", "e2e_p99": "tail_e2e_s"}
EXCESS_FIELDS = {"ttft_p99": "ttft_excess_s", "e2e_p99": "e2e_excess_s"}
BASELINE = "least-outstanding"  # today's router: what there must be something to gain over


class HoldRule(Spec):
    """When the policy may hold a request, and what counts as room."""

    allowed: bool = Field(default=True, description="false: every request is sent at once")
    kv_limit: float = Field(default=0.95, gt=0, description="room: share of the KV memory that may be booked")
    prefill_limit_tokens: float = Field(
        default=2048, gt=0, description="room: prompt tokens that may wait on a replica"
    )
    stream_limit: int | None = Field(
        default=None, gt=0, description="room: requests that a replica may have; absent = any number"
    )
    small_first: float | None = Field(
        default=SMALL_FIRST,
        ge=0,
        le=1,
        description="how much the size of held requests counts in their order; 0: in order of arrival; null: "
        "what is best for late-binding on this traffic, by the objective, when a run begins",
    )
    recheck_s: float = Field(
        default=1.0, ge=0, description="a held request is decided anew when there is room, or after this"
    )


class RoutingEvaluationSpec(Spec):
    """What the policy is judged by while it trains; see evaluation/routing.py."""

    scenarios: tuple[str, ...] = Field(default=(), description="empty: those it trains on")
    seeds: int = Field(default=4, ge=1, le=500, description="selection seeds, each a block")
    select: Literal["mean", "worst-block"] = Field(
        default="mean", description="what a checkpoint is chosen by: its mean, or its worst block's return"
    )


class RoutingSpec(Spec):
    scenarios: tuple[str, ...] = Field(
        default=("steady-chat",),
        description="named scenarios, configuration files, and `random` for anything; one after another",
    )
    changes: tuple[str, ...] = Field(
        default=(), description="`key=value`, applied to each of them, as `--set workload.…` gives it"
    )
    objective: str = Field(default=DEFAULT_OBJECTIVE, description="balanced, mean, tail or slo")
    reward: RewardSpec = RewardSpec()
    shadow: PolicySpec = Field(
        default=PolicySpec(kind="least-outstanding"), description="the reference policy of the reward"
    )
    teachers: tuple[PolicySpec, ...] = Field(
        default=(PolicySpec(kind="least-delay"),), description="whose decisions a warm start imitates"
    )
    max_replicas: int = Field(
        default=8, ge=1, description="room in the observation; at least what the files and `random` need"
    )
    decisions: int = Field(default=4096, ge=1, description="length of an episode")
    warmup_requests: int = Field(
        default=3000, ge=0, description="at most so many arrivals, drawn at random, come before it"
    )
    warmup_policies: tuple[str, ...] = Field(
        default=("least-outstanding", "least-delay", "hold-until-room", "random", "round-robin"),
        description="one of these routes them",
    )
    limits: LimitSpec = Field(default=LimitSpec(), description="beyond which an episode is ended as gone bad")
    hold: HoldRule = HoldRule()
    detours_s: tuple[float | None, ...] = Field(
        default=(None,),
        description="how much later than at the soonest a first token may be due [s], null = at any time; "
        "each episode draws one, and the first is what the policy is judged by and runs with",
    )
    slo: SloSpec | None = Field(
        default=None, description="what counts as good; null: what the files say, or the default"
    )
    keep: dict[str, str | float] = Field(
        default={},
        description="limits on tails, instead of the objective's: ttft_p99, e2e_p99, each a policy whose it "
        "may not exceed, a factor on late-binding's, or seconds (0.5s)",
    )
    difficulty: Difficulty = Difficulty()
    evaluation: RoutingEvaluationSpec = RoutingEvaluationSpec()
    features_off: tuple[str, ...] = Field(default=(), description="groups of features read as 0: ablation")

    @model_validator(mode="before")
    @classmethod
    def _as_large_as_needed(cls, data: Any) -> Any:
        names = data.get("scenarios") if isinstance(data, dict) else None
        changes = data.get("changes", ()) if isinstance(data, dict) else None
        if not isinstance(names, list | tuple) or not isinstance(changes, list | tuple):
            return data
        changed = [name for name in names if is_file(str(name)) or (changes and name != RANDOM)]
        needed = [find_scenario(name, changes).config(0).cluster.num_replicas for name in changed]
        if needed and data.get("max_replicas", 8) < max(needed):
            return data | {"max_replicas": max(needed)}
        return data

    @field_validator("keep")
    @classmethod
    def _known_limits(cls, keep: dict[str, str | float]) -> dict[str, str | float]:
        for metric, value in keep.items():
            parse_limit(metric, value)
        return keep

    @field_validator("detours_s")
    @classmethod
    def _no_time_before_now(cls, detours_s: tuple[float | None, ...]) -> tuple[float | None, ...]:
        if not detours_s:
            raise InputError("env.detours_s", [], "is empty", "seconds, e.g. [0.3], or [null] for no limit")
        for detour_s in detours_s:
            if detour_s is not None and not 0.0 <= detour_s < np.inf:
                raise InputError("env.detours_s", detour_s, "is not a time", "seconds, e.g. 0.3, or null")
        return detours_s

    @field_validator("features_off")
    @classmethod
    def _known_groups(cls, groups: tuple[str, ...]) -> tuple[str, ...]:
        unknown = [group for group in groups if group not in FEATURE_GROUPS]
        if unknown:
            remedy = f"known: {', '.join(FEATURE_GROUPS)}"
            raise InputError("env.features_off", unknown[0], "unknown feature group", remedy)
        return groups


def slo_of(spec: RoutingSpec) -> SloSpec:
    """What the policy is trained for: features, rewards and evaluations know one service level.

    That of the files which have one, or of the changes; scenarios of ours have none of their own.
    """
    if spec.slo is not None:
        return spec.slo
    configs = {name: find_scenario(name, spec.changes).config(0) for name in spec.scenarios if name != RANDOM}
    found = {name: config.slo for name, config in configs.items() if "slo" in config.model_fields_set}
    different = [name for name, slo in found.items() if slo != next(iter(found.values()))]
    if different:
        problem = "has another service level than the other files that are trained on"
        raise InputError("slo", different[0], problem, "set env.slo for all of them, or train on each alone")
    return next(iter(found.values()), SloSpec())


class RoutingEnv:
    """An `EntityEnv`: see the module's docstring for what is seen, done and earned."""

    def __init__(self, spec: RoutingSpec, num_envs: int) -> None:
        check_groups(spec.scenarios, spec.changes)
        self.spec = spec
        self.num_envs = num_envs
        self.groups = short_names(spec.scenarios)
        self.objective: Objective = find_objective(spec.objective, spec.keep)
        self.tails = tuple(limit.metric for limit in self.objective.limits)
        self.space = EntitySpace(spec.max_replicas, ENTITY_FEATURES, CONTEXT_FEATURES, PRIVILEGED_FEATURES)
        has_baseline = any(one.kind == BASELINE for one in spec.teachers)
        teachers = spec.teachers if has_baseline else (*spec.teachers, PolicySpec(kind=BASELINE))
        self.slo = slo_of(spec)
        self.metadata: dict[str, Any] = {
            "objective": spec.objective,
            "keep": spec.keep,
            "hold": spec.hold.model_dump(),
            "detour_s": spec.detours_s[0],
            "slo": self.slo.model_dump(),
            "scenarios": [name for name in spec.scenarios if name != RANDOM],
            "changes": list(spec.changes),
        }
        files = [name for name in spec.scenarios if is_file(name)]
        if files:
            own = {name: find_scenario(name, spec.changes) for name in files}
            self.metadata["traffic"] = {name: parts_text(one) for name, one in own.items()}
            self.metadata["traces"] = [digest for one in own.values() if (digest := trace_digest(one))]
        self.teachers = tuple(one.kind for one in teachers)
        self.baseline = BASELINE
        self.set_difficulty({})
        self.group = np.arange(num_envs) % len(self.groups)  # fixed, so that every update sees them all

        self._own = PolicyTables([None] * num_envs, spec.max_replicas)
        self._own.rows.may_hold = spec.hold.allowed
        self._own.rows.hold_s = spec.hold.recheck_s
        self._own.rows.kv_limit = spec.hold.kv_limit
        self._own.rows.prefill_limit = spec.hold.prefill_limit_tokens
        self._own.rows.stream_limit = limit_of(spec.hold.stream_limit)
        small_first = spec.hold.small_first
        self._own.rows.small_first = SMALL_FIRST if small_first is None else small_first
        self._own.rows.ttft_limit_s, self._own.rows.step_limit_s = self.slo.ttft_s, self.slo.tpot_s
        self._shadow = PolicyTables([spec.shadow] * num_envs, spec.max_replicas)
        self._teachers = [PolicyTables([one] * num_envs, spec.max_replicas) for one in teachers]
        # A teacher that takes turns or draws lots goes on from one decision to the next.
        self._memories = [Records(num_envs, MEMORY) for _ in teachers]
        for memories in self._memories:
            for memory in memories:
                fill_memory(memory, memories, spec.max_replicas, 1)
        self._own_rows, self._shadow_rows = (
            self._own.rows.view(np.ndarray),
            self._shadow.rows.view(np.ndarray),
        )
        self._oracle = Oracle(self.objective, spec.shadow, spec.max_replicas)
        warmups = [PolicySpec(kind=kind) for kind in spec.warmup_policies]
        alike = self._oracle.num_clusters
        self._warmup = [PolicyTables([one] * alike, spec.max_replicas) for one in warmups]
        self._clusters: list[Clusters | None] = [None] * num_envs
        # Plain arrays of records: a recarray takes ten times as long to look up a field.
        self._sims: NDArray[Any] = np.zeros(num_envs, RECORD)
        self._shadows: NDArray[Any] = np.zeros(num_envs, RECORD)
        self._rows = np.arange(num_envs)
        self._no_actions: NDArray[np.int64] = np.zeros(max(num_envs, alike), np.int64)
        self._observation = self._empty_observation()
        self._final = self._empty_observation()
        off = set(spec.features_off)
        self._entities_off = [i for i, feature in enumerate(ENTITY_FEATURES) if feature.group in off]
        self._context_off = [i for i, feature in enumerate(CONTEXT_FEATURES) if feature.group in off]

        self._rngs: list[np.random.Generator] = []
        self._prices = np.ones(num_envs)
        self._recent_prices = np.ones(num_envs)
        self.lifetime_s = np.ones(num_envs)  # of a request, on average
        self.mean_in_system = np.ones(num_envs)  # requests
        # What a second beyond the beginning of a tail costs at a price of 1.
        self._tail_costs = {name: np.zeros(num_envs) for name in self.tails}
        self._returns = np.zeros(num_envs)
        self._cv = np.zeros(num_envs)  # of the outstanding requests, mean of the episode
        self._turn = 0
        self._lengths = np.zeros(num_envs, np.int64)
        self._no_load = [np.full(num_envs, np.nan)] * (len(Snapshot._fields) - 2)
        self._latency_s = np.zeros(num_envs)
        self._throughput_rps = np.zeros(num_envs)

    def _empty_observation(self) -> Observation:
        count, room = self.num_envs, self.space.num_entities
        return Observation(
            entities=np.zeros((count, room, len(ENTITY_FEATURES)), np.float32),
            context=np.zeros((count, len(CONTEXT_FEATURES)), np.float32),
            entity_mask=np.zeros((count, room), np.bool_),
            action_mask=np.zeros((count, room + 1), np.bool_),
            privileged=np.zeros((count, len(PRIVILEGED_FEATURES)), np.float32),
        )

    def set_difficulty(self, difficulty: dict[str, Any]) -> None:
        merged = self.spec.difficulty.model_dump() | difficulty
        self.difficulty = parse_spec(Difficulty, merged, "difficulty")
        most, room = self.difficulty.max_replicas, self.spec.max_replicas
        if RANDOM in self.spec.scenarios and most > room:
            raise InputError("difficulty.max_replicas", most, "above env.max_replicas", f"at most {room}")
        self._weights = self.spec.reward.weights(self.objective)
        for name in ("age", "slo"):
            if name in self._weights:
                self._weights[name] *= self.difficulty.strictness

    def reset(self, seed: int) -> Observation:
        sequences = np.random.SeedSequence(seed).spawn(self.num_envs)
        self._rngs = [np.random.default_rng(sequence) for sequence in sequences]
        for i in range(self.num_envs):
            self._begin(i)
        self._look(0, self.num_envs)
        self._before = self._totals()
        return self._observation

    def _begin(self, i: int) -> None:
        """Draw a new episode for environment i, and route its first requests by a heuristic."""
        spec, rng = self.spec, self._rngs[i]
        num_warmup = int(rng.integers(spec.warmup_requests + 1))
        # One more arrival than decisions: a decision is never followed by silence.
        num_requests = num_warmup + spec.decisions + 2
        one = draw(spec.scenarios[self.group[i]], num_requests, self.difficulty, rng, spec.changes)
        if len(one.plans) > spec.max_replicas:
            raise InputError(
                "env.max_replicas", spec.max_replicas, f"an episode has {len(one.plans)} replicas", "raise it"
            )
        # All alike: the policy's, its shadow, and those that tell what is to come.
        alike = self._oracle.num_clusters
        clusters = Clusters(
            [one.config.cluster] * alike,
            [one.plans] * alike,
            [one.workload] * alike,
            [one.config.seed] * alike,
        )
        clusters.sims["slo_ttft_s"], clusters.sims["slo_tpot_s"] = self.slo.ttft_s, self.slo.tpot_s
        warmup = self._warmup[int(rng.integers(len(self._warmup)))]
        self._own.rows.detour_s[i] = limit_of(spec.detours_s[int(rng.integers(len(spec.detours_s)))])
        if num_warmup > 0:
            clusters.sims["stop_at"] = one.workload.arrived_at[num_warmup - 1]
            run(clusters.sims, warmup.rows, self._no_actions, 0, alike)
            clusters.sims["stop_at"] = np.inf
        self._clusters[i] = clusters
        for teacher, memories in enumerate(self._memories):
            memories[i].rng = first_state(one.config.seed, 0x7EAC, teacher)
            memories[i].round_robin = 0
            array_at(memories[i].credit, np.float64, spec.max_replicas)[:] = 0.0
        self._sims[i], self._shadows[i] = clusters.sims[0], clusters.sims[1]
        self._advance(i, i + 1, self._no_actions)
        self._observation.entities[i] = 0.0
        self._observation.action_mask[i] = False
        self._observation.entity_mask[i] = np.arange(spec.max_replicas) < len(one.plans)
        ahead = self._oracle.foresee(clusters, one, num_warmup, self._price)
        self.lifetime_s[i], self.mean_in_system[i] = ahead.lifetime_s, ahead.mean_in_system
        if spec.reward.scale != "none":
            self._prices[i] = self._recent_prices[i] = ahead.cost_rate
        for name, tail in ahead.tails.items():
            self._tail_costs[name][i] = ahead.cost_rate / tail.excess_rate
            for sims in (self._sims, self._shadows):
                sims[TAIL_FIELDS[name]][i] = tail.begins_s
        self._returns[i] = self._lengths[i] = self._latency_s[i] = self._throughput_rps[i] = 0.0
        self._cv[i] = 0.0

    def _advance(self, first: int, last: int, actions: NDArray[np.int64]) -> None:
        """Clusters run to their next decision, their shadows to the same time."""
        self._run(self._sims, self._own_rows, actions, first, last)
        self._shadows["stop_at"][first:last] = self._sims["now"][first:last]
        self._run(self._shadows, self._shadow_rows, self._no_actions, first, last)

    @cached_property
    def _run(self) -> Callable[..., None]:
        """Loaded when it is needed: environments are also made to be asked what they are."""
        return direct_for(run, self._sims, self._own_rows, self._no_actions, 0, 0)

    @cached_property
    def _read_totals(self) -> Callable[..., None]:
        return direct_for(read_totals, self._sims, np.empty((len(FIELDS), self.num_envs)))

    def _totals(self) -> NDArray[np.float64]:
        """[2, K, N] what has added up in clusters and in their shadows."""
        totals = np.empty((2, len(FIELDS), self.num_envs))
        self._read_totals(self._sims, totals[0])
        self._read_totals(self._shadows, totals[1])
        return totals

    @cached_property
    def _looked_at(self) -> tuple[Any, ...]:
        seen = self._observation
        filled = (seen.entities, seen.context, seen.action_mask, seen.privileged)
        return self._sims, self._own_rows, self._shadows, *filled

    @cached_property
    def _fill(self) -> Callable[..., None]:
        return direct_for(look, *self._looked_at, 0, 0)

    def _look(self, first: int, last: int) -> None:
        seen = self._observation
        self._fill(*self._looked_at, first, last)
        prices = np.maximum(self._recent_prices, self._prices)[first:last]
        seen.privileged[first:last, -1] *= self._weights.get("outstanding", 0.0) / prices
        if self.spec.features_off:
            seen.entities[first:last, :, self._entities_off] = 0.0
            seen.context[first:last, self._context_off] = 0.0

    def step(self, actions: NDArray[np.int64]) -> Step:
        actions = np.ascontiguousarray(actions, np.int64)
        # What is out of range is clipped to look it up, and illegal in any case.
        known = np.minimum(np.maximum(actions, 0), self.space.num_entities)
        is_legal = (known == actions) & self._observation.action_mask[self._rows, known]
        if not is_legal.all():
            i = int(np.argmin(is_legal))
            legal = np.flatnonzero(self._observation.action_mask[i]).tolist()
            raise InputError(f"action of environment {i}", int(actions[i]), "is not legal", f"legal: {legal}")
        self._advance(0, self.num_envs, actions)
        totals = self._totals()
        own, shadow = totals - self._before
        snapshot = self._snapshot(RewardTotals(*own), RewardTotals(*shadow))
        self._look(0, self.num_envs)
        scale = self._scale(snapshot)
        reward, terms, is_flat = self.spec.reward.evaluate(snapshot, self._weights, scale)
        tails = self._tail_terms(snapshot, scale)
        lifetime_s = self.lifetime_s.astype(np.float32)
        self._lengths += 1
        ended_by = self._limits_passed()
        terminated = np.zeros(self.num_envs, np.bool_)
        for is_beyond in ended_by.values():
            terminated |= is_beyond
        if terminated.any():
            # Ending early must not pay: the excess goes on for a while, at its present rate.
            excess = np.maximum(self._sims["num_in_system"] - self._shadows["num_in_system"], 1.0)
            reward = reward - np.where(terminated, excess * self.spec.limits.bad_end_s / scale, 0.0)
        truncated = ~terminated & (
            (self._lengths >= self.spec.decisions) | (self._sims["status"] != DECISION)
        )
        self._returns += reward
        groups = self.group.copy()
        episodes = self._end(terminated | truncated, ended_by)
        self._before = self._totals() if episodes else totals
        return Step(
            observation=self._observation,
            reward=reward.astype(np.float32),
            elapsed_s=snapshot.own.now.astype(np.float32),
            terminated=terminated,
            truncated=truncated,
            final_observation=self._final,
            groups=groups,
            terms={name: term.astype(np.float32) for name, term in terms.items()},
            is_flat=is_flat,
            episodes=episodes,
            lifetime_s=lifetime_s,
            tails={name: term.astype(np.float32) for name, term in tails.items()},
        )

    def _scale(self, snapshot: Snapshot) -> NDArray[np.float64]:
        """[N] what rewards are divided by. All of it follows from the arrivals, so no policy can move it."""
        if self.spec.reward.scale != "moment":
            return self._prices
        elapsed_s = np.maximum(snapshot.shadow.now, 1e-9)
        share = -np.expm1(-elapsed_s / PRICE_SMOOTHING_S)
        self._recent_prices += share * (self._price(snapshot.shadow) / elapsed_s - self._recent_prices)
        return np.maximum(self._recent_prices, self._prices)

    def _price(self, totals: RewardTotals) -> NDArray[np.float64]:
        """[N] the cost of what these totals count, by the objective."""
        return (
            self.objective.outstanding * totals.in_system_area
            + self.objective.waiting * totals.unstarted_area
            + self.objective.age * totals.age_area
            + self.objective.slo * totals.slo_excess_s
        )

    def _tail_terms(self, snapshot: Snapshot, scale: NDArray[np.float64]) -> dict[str, NDArray[np.float64]]:
        """[N] by limit, what was earned at a price of 1: less beyond the tail's beginning than the shadow."""
        terms = {}
        for name, tail_cost in self._tail_costs.items():
            own, shadow = (getattr(part, EXCESS_FIELDS[name]) for part in (snapshot.own, snapshot.shadow))
            terms[name] = (shadow - own) * tail_cost / scale
        return terms

    def _snapshot(self, own: RewardTotals, shadow: RewardTotals) -> Snapshot:
        if self._weights.keys() <= TERMS_OF_TOTALS:
            return Snapshot(own, shadow, *self._no_load)
        sims = self._sims
        num_replicas = sims["router"]["num_replicas"]
        mean = sims["sum_outstanding"] / num_replicas
        spread = sims["sum_squared_outstanding"] / num_replicas - mean**2
        before = self._latency_s
        weight = own.num_completed / (own.num_completed + 10.0)
        mean_e2e_s = own.sum_e2e_s / np.maximum(own.num_completed, 1.0)
        first = np.where(before == 0.0, mean_e2e_s, before)
        self._latency_s = first + weight * (mean_e2e_s - first)
        fade = np.exp(-own.now / SMOOTHING_S)
        self._throughput_rps = self._throughput_rps * fade + own.num_completed / SMOOTHING_S
        return Snapshot(
            own=own,
            shadow=shadow,
            outstanding_std=np.sqrt(np.maximum(spread, 0.0)),
            outstanding_mean=mean,
            outstanding_range=sims["outstanding_range"].copy(),
            latency_s=self._latency_s,
            latency_before_s=np.where(before == 0.0, self._latency_s, before),
            throughput_rps=self._throughput_rps,
        )

    def _limits_passed(self) -> dict[str, Bools]:
        """[N] by limit of `spec.limits`."""
        limits, sims, seen = self.spec.limits, self._sims, self._observation
        num_in_system, num_replicas = sims["num_in_system"], sims["router"]["num_replicas"]

        def oldest_s() -> NDArray[np.float64]:
            oldest = np.maximum(seen.entities[:, :, OLDEST_WAIT].max(axis=1), seen.context[:, WAITED])
            return np.asarray(self.slo.ttft_s * (np.exp2(oldest) - 1.0))

        def cv() -> NDArray[np.float64]:
            self._cv += (seen.context[:, OUTSTANDING_CV] - self._cv) / np.maximum(self._lengths, 1)
            return np.where(self._lengths >= MIN_RECENT, self._cv, 0.0)

        found = passed(
            limits,
            {
                "overhang": lambda: (num_in_system - self._shadows["num_in_system"]) / num_replicas,
                "queue": lambda: num_in_system / num_replicas,
                "wait_s": oldest_s,
                "imbalance_cv": cv,
            },
        )
        if limits.needs_requests:  # every environment in its turn: percentiles take time
            self._turn = (self._turn + 1) % self.num_envs
            clusters = self._clusters[self._turn]
            assert clusters is not None
            for name in ttft_p99_passed(limits, *clusters.requests[:2]):
                found[name] = self._rows == self._turn
        return found

    def _end(self, is_over: Bools, ended_by: dict[str, Bools]) -> Sequence[Episode]:
        episodes = []
        for i in np.flatnonzero(is_over).tolist():
            for final, seen in zip(self._final, self._observation, strict=True):
                final[i] = seen[i]
            metrics = {
                "in_system": float(self._sims["num_in_system"][i]),
                "shadow_in_system": float(self._shadows["num_in_system"][i]),
            }
            metrics |= {f"ended/{name}": 1.0 for name, is_beyond in ended_by.items() if is_beyond[i]}
            length = int(self._lengths[i])
            episodes.append(Episode(i, int(self.group[i]), float(self._returns[i]), length, metrics))
            self._begin(i)
            self._look(i, i + 1)
        return episodes

    def advise(self, teacher: int) -> NDArray[np.int64]:
        actions: NDArray[np.int64] = np.zeros(self.num_envs, np.int64)
        memories = self._memories[teacher]
        advise(self._sims, self._teachers[teacher].rows, memories, actions, 0, self.num_envs)
        # What a heuristic may not do here becomes the legal replica with the soonest first token.
        seen = self._observation
        is_legal = seen.action_mask[self._rows, actions]
        first_tokens = np.where(seen.action_mask[:, 1:], seen.entities[:, :, BACKLOG_AFTER], np.inf)
        soonest = np.where(np.isinf(first_tokens).all(axis=1), 0, first_tokens.argmin(axis=1) + 1)
        return np.where(is_legal, actions, soonest)


def make_env(spec: RoutingSpec, num_envs: int) -> RoutingEnv:
    return RoutingEnv(spec, num_envs)
