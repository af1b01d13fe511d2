"""GPU job scheduling as an environment: N clusters, each with the jobs of one episode.

A cluster has G identical GPUs. A job needs some of them at once, for a known time, and is not interrupted.

Observation: for each job of the window (the first of the queue, in order of arrival) and for the cluster the
features of `jobs.observation`; `features: original` shows those of the published problem alone.
Action: 0 starts nothing, k starts the k-th job of the window. Legal if that job exists and enough GPUs are
idle; an illegal action counts as 0 and is reported. Starting nothing is always legal. After every action the
cluster moves on by exactly one event, an arrival or a completion, if there is one.
Reward: `jobs.kernel.pay`. The return of an episode is about 0.9 at the very best; where jobs have deadlines,
each that is missed costs its share of `deadline_price`.
Episode: ends when no job waits, runs or is to arrive; cut off at the horizon (1.3 times the time that perfect
packing would take after the last arrival) or after `max_steps`. What is then unfinished is paid for at once,
so nothing comes after: such a step is truncated, as published, and terminated as well, as learning needs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator

from pointsman.envs.entity import Bools, Episode, Observation, Step
from pointsman.envs.episodes import FIRST_TRAINING_SEED, SEED_RANGE
from pointsman.errors import InputError
from pointsman.jobs.clusters import JobClusters, JobPolicyTables
from pointsman.jobs.heuristics import HEURISTICS, heuristics_for
from pointsman.jobs.observation import LOOKAHEADS, job_space
from pointsman.jobs.rollout import advise, decide_all, look, play_all
from pointsman.jobs.state import CUT_OFF, GOING_ON, MISSED, SHAPING, TERMS
from pointsman.jobs.workload import JobsWorkloadSpec, draw_jobs, has_deadlines
from pointsman.spec import Spec, parse_spec

BASELINE = "sjf"  # what most schedulers would be glad to know how to do


class JobsEvaluationSpec(Spec):
    """What the policy is judged by while it trains; see evaluation/jobs.py."""

    blocks: int = Field(default=3, ge=1, description="of selection seeds")
    episodes: int = Field(default=20, ge=1, description="of each block")


class JobsSpec(Spec):
    num_gpus: int = Field(default=8, ge=1, le=4096, description="G, GPUs of the cluster")
    window: int = Field(default=50, ge=1, le=4096, description="jobs to choose from: the first of the queue")
    workload: JobsWorkloadSpec = JobsWorkloadSpec()
    lookahead: Literal["off", "per_gpu", "sorted", "cdf"] = Field(
        default="sorted", description="how the observation tells when GPUs are free"
    )
    features: Literal["original", "full"] = Field(
        default="full", description="of the published problem, or all that a scheduler can know"
    )
    max_steps: int = Field(default=2000, ge=1, description="an episode is cut off after so many")
    horizon_slack: float = Field(
        default=1.3,
        gt=0,
        description="or at this many times the perfectly packed work after the last arrival",
    )
    noop_price: float = Field(
        default=0.05,
        description="for starting nothing although a job fits, in shares of the work that is available; "
        "below 0 it is rewarded",
    )
    deadline_price: float = Field(
        default=1.0,
        ge=0,
        description="of missing all deadlines; for one, its share. Counts where the workload has deadlines",
    )
    shaping: bool = Field(
        default=False,
        description="rewards count what perfect packing would still earn as earned already: the same best "
        "policy, and each decision is told at once what it wastes",
    )
    skip_forced: bool = Field(
        default=False,
        description="make the steps in which no job fits by itself: half of all, and nothing to learn from",
    )
    warmup_steps: int = Field(
        default=0,
        ge=0,
        description="at a reset, each environment goes through up to so many steps first, by any heuristic: "
        "else all are at the same stage of their episodes",
    )
    teachers: tuple[str, ...] = Field(
        default=("wide-and-short",), description="heuristics that a warm start imitates"
    )
    evaluation: JobsEvaluationSpec = JobsEvaluationSpec()

    @field_validator("teachers")
    @classmethod
    def _known_teachers(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if name not in HEURISTICS:
                raise InputError("env.teachers", name, "unknown heuristic", f"known: {', '.join(HEURISTICS)}")
        return names


def make_clusters(spec: JobsSpec, num_clusters: int) -> JobClusters:
    return JobClusters(
        num_clusters,
        spec.num_gpus,
        spec.window,
        spec.workload.num_jobs,
        spec.workload.max_duration_s,
        spec.max_steps,
        spec.horizon_slack,
        spec.noop_price,
        spec.deadline_price,
    )


class JobsEnv:
    """An `EntityEnv`: see the module's docstring for what is seen, done and earned."""

    def __init__(self, spec: JobsSpec, num_envs: int) -> None:
        self.spec = spec
        self.num_envs = num_envs
        self.groups: tuple[str, ...] = ("jobs",)
        self.group: NDArray[np.int64] = np.zeros(num_envs, np.int64)
        self._has_deadlines = has_deadlines(spec.workload, spec.num_gpus)
        self.space = job_space(spec.num_gpus, spec.window, spec.features == "full", self._has_deadlines)
        section = {"kind": "jobs", **spec.model_dump(mode="json")}
        self.metadata: dict[str, Any] = {"entity": "job", "env": section}
        self.teachers = spec.teachers if BASELINE in spec.teachers else (*spec.teachers, BASELINE)
        self.baseline = BASELINE
        self.set_difficulty({})
        self._lookahead = LOOKAHEADS[spec.lookahead]
        terms = {SHAPING: spec.shaping, MISSED: self._has_deadlines}
        self._terms = (*TERMS, *(name for name, is_there in terms.items() if is_there))
        self._teachers = [JobPolicyTables(name, num_envs, spec.window) for name in self.teachers]
        self._clusters = make_clusters(spec, num_envs)
        self._observation = self._empty_observation()
        self._final = self._empty_observation()
        self._rngs: list[np.random.Generator] = []

    def _empty_observation(self) -> Observation:
        count, room, space = self.num_envs, self.spec.window, self.space
        return Observation(
            entities=np.zeros((count, room, len(space.entity_features)), np.float32),
            context=np.zeros((count, len(space.context_features)), np.float32),
            entity_mask=np.zeros((count, room), np.bool_),
            action_mask=np.zeros((count, room + 1), np.bool_),
            privileged=np.zeros((count, len(space.privileged_features)), np.float32),
        )

    def set_difficulty(self, difficulty: dict[str, Any]) -> None:
        """Fields of `workload`: fewer jobs, another kind of durations or arrivals."""
        merged = self.spec.workload.model_dump() | difficulty
        workload = parse_spec(JobsWorkloadSpec, merged, "difficulty")
        most, room = workload.num_jobs, self.spec.workload.num_jobs
        if most > room:
            raise InputError("difficulty.num_jobs", most, "above env.workload.num_jobs", f"at most {room}")
        if workload.max_duration_s != self.spec.workload.max_duration_s:
            remedy = "observations are scaled by it: leave it out"
            raise InputError("difficulty.max_duration_s", workload.max_duration_s, "cannot change", remedy)
        if workload.deadline_slack is not None and not self._has_deadlines:
            remedy = "give env.workload.deadline_slack too: what is observed cannot change"
            raise InputError(
                "difficulty.deadline_slack", workload.deadline_slack, "env.workload has none", remedy
            )
        self._workload = workload

    def reset(self, seed: int) -> Observation:
        sequences = np.random.SeedSequence(seed).spawn(self.num_envs)
        self._rngs = [np.random.default_rng(sequence) for sequence in sequences]
        for i in range(self.num_envs):
            self._begin(i)
        if self.spec.warmup_steps:
            self._warm_up()
        self._look(0, self.num_envs)
        return self._observation

    def _warm_up(self) -> None:
        tables = JobPolicyTables(BASELINE, self.num_envs, self.spec.window)
        kernels = [HEURISTICS[name].kernel for name in heuristics_for(self._has_deadlines)]
        tables.rows.kind = [rng.choice(kernels) for rng in self._rngs]
        num_steps = np.array([rng.integers(self.spec.warmup_steps + 1) for rng in self._rngs])
        play_all(self._clusters.sims, tables.rows, num_steps, 0, self.num_envs)
        for i in np.flatnonzero(self._clusters.sims.status != GOING_ON).tolist():
            self._begin(i)

    def _begin(self, i: int) -> None:
        seed = FIRST_TRAINING_SEED + int(self._rngs[i].integers(SEED_RANGE))
        self._clusters.load(i, draw_jobs(self._workload, self.spec.num_gpus, seed), seed)

    def _look(self, first: int, last: int) -> None:
        look(self._clusters.sims, self._lookahead, *self._observation, first, last)

    def step(self, actions: NDArray[np.int64]) -> Step:
        sims = self._clusters.sims
        decide_all(sims, actions, self.spec.skip_forced, 0, self.num_envs)
        self._look(0, self.num_envs)
        terms = {name: sims[name].astype(np.float32) for name in self._terms}
        elapsed_s, is_illegal = sims.elapsed_s.astype(np.float32), sims.is_illegal.astype(np.bool_)
        is_over, is_cut_off = sims.status != GOING_ON, sims.status == CUT_OFF
        episodes = self._end(is_over)
        return Step(
            observation=self._observation,
            reward=np.sum(list(terms.values()), axis=0, dtype=np.float32),
            elapsed_s=elapsed_s,
            terminated=is_over,
            truncated=is_cut_off,
            final_observation=self._final,
            groups=self.group.copy(),
            terms=terms,
            is_flat=np.zeros(self.num_envs, np.bool_),
            episodes=episodes,
            is_illegal=is_illegal,
        )

    def _end(self, is_over: Bools) -> Sequence[Episode]:
        episodes = []
        for i in np.flatnonzero(is_over).tolist():
            for final, seen in zip(self._final, self._observation, strict=True):
                final[i] = seen[i]
            sim = self._clusters.sims[i]
            metrics = {
                "unfinished_jobs": float(sim.num_jobs - sim.num_completed),
                "time_used": float(sim.now / sim.horizon_s),
                "noop_frac": float(sim.num_noops / max(1, sim.num_choices)),
            }
            if self._has_deadlines:
                metrics["missed_deadlines"] = float(sim.num_missed / max(1, sim.num_deadlines))
            episodes.append(Episode(i, 0, float(sim.episode_return), int(sim.num_steps), metrics))
            self._begin(i)
            self._look(i, i + 1)
        return episodes

    def advise(self, teacher: int) -> NDArray[np.int64]:
        actions: NDArray[np.int64] = np.zeros(self.num_envs, np.int64)
        advise(self._clusters.sims, self._teachers[teacher].rows, actions, 0, self.num_envs)
        return actions


def make_env(spec: JobsSpec, num_envs: int) -> JobsEnv:
    return JobsEnv(spec, num_envs)
