"""Our problems for gymnasium: one environment, and many at once.

    import gymnasium
    import pointsman.envs.gym  # registers

    env = gymnasium.make("pointsman/Routing-v0", scenarios=["mixed-hardware"], max_replicas=4)
    envs = gymnasium.make_vec("pointsman/Routing-v0", num_envs=64)  # one call moves all clusters
    env = gymnasium.make("pointsman/Jobs-v0", window=20, lookahead="cdf", features="original")

Keyword arguments are the fields of `envs.routing.RoutingSpec` and `envs.jobs.JobsSpec`. For thousands of
decisions a second take the vector environment; our own trainer takes the `EntityEnv`, which copies nothing.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from pointsman.envs import register_environments
from pointsman.envs.entity import Observation, Step
from pointsman.envs.jobs import JobsEnv, JobsSpec
from pointsman.envs.routing import RoutingEnv, RoutingSpec
from pointsman.errors import InputError
from pointsman.inference.space import EntitySpace
from pointsman.spec import parse_spec

register_environments()

Observed = dict[str, Any]
AnyEnv = RoutingEnv | JobsEnv

# Features are scaled to numbers near 1; this is far beyond what any cluster shows.
HIGHEST = 100.0


class GymEnv(gymnasium.Env[Observed, np.int64]):
    """One environment of an `EntityEnv`."""

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012, as gymnasium declares it

    def __init__(self, entity_env: AnyEnv) -> None:
        self.entity_env = entity_env
        self.observation_space = observation_space(entity_env.space)
        self.action_space = spaces.Discrete(entity_env.space.num_actions)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observed, dict[str, Any]]:
        super().reset(seed=seed)
        self.entity_env.group[0] = self.np_random.integers(len(self.entity_env.groups))
        self._seen = self.entity_env.reset(int(self.np_random.integers(1 << 31)))
        return _observed(self._seen, 0), self._info(self._seen)

    def step(self, action: np.int64) -> tuple[Observed, float, bool, bool, dict[str, Any]]:
        actions, is_invalid = _legal(np.asarray([action]), self._seen)
        step = self.entity_env.step(actions)
        is_over = bool(step.terminated[0] | step.truncated[0])
        # After the end, `step.observation` belongs to an episode that nobody asked for.
        self._seen = step.final_observation if is_over else step.observation
        info = self._info(self._seen) | _step_info(step, is_invalid, 0)
        return (
            _observed(self._seen, 0),
            float(step.reward[0]),
            bool(step.terminated[0] & ~step.truncated[0]),
            bool(step.truncated[0]),
            info,
        )

    def action_masks(self) -> NDArray[np.bool_]:
        """[R + 1] which actions are legal now."""
        mask: NDArray[np.bool_] = self._seen.action_mask[0].copy()
        return mask

    def _info(self, seen: Observation) -> dict[str, Any]:
        group = int(self.entity_env.group[0])
        return {"privileged": seen.privileged[0].copy(), "scenario": self.entity_env.groups[group]}


class GymVectorEnv(VectorEnv[Observed, NDArray[np.int64], NDArray[Any]]):
    """All environments of an `EntityEnv`, which step together.

    Environment i stays with scenario i modulo their number. Same-step autoreset: where an episode ended, the
    observation and `privileged` are the next episode's, `final_obs` and `final_info` hold the ended one's.
    """

    metadata: dict[str, Any] = {"render_modes": [], "autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012

    def __init__(self, entity_env: AnyEnv) -> None:
        if entity_env.num_envs < len(entity_env.groups):
            problem = f"{len(entity_env.groups)} scenarios need as many environments"
            raise InputError("num_envs", entity_env.num_envs, problem, "raise it")
        self.entity_env = entity_env
        self.num_envs = entity_env.num_envs
        self.single_observation_space = observation_space(entity_env.space)
        self.single_action_space = spaces.Discrete(entity_env.space.num_actions)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observed, dict[str, Any]]:
        super().reset(seed=seed)
        self._seen = self.entity_env.reset(int(self.np_random.integers(1 << 31)))
        return _observed(self._seen), self._with_masks(self._infos())

    def step(
        self, actions: NDArray[np.int64]
    ) -> tuple[Observed, NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any]]:
        actions, is_invalid = _legal(np.asarray(actions), self._seen)
        step = self.entity_env.step(actions)
        self._seen = step.observation
        infos = self._infos() | {
            "elapsed_s": step.elapsed_s,
            "invalid": is_invalid,
            "terms": dict(step.terms),
        }
        infos = self._with_masks(infos)
        for i in np.flatnonzero(step.terminated | step.truncated).tolist():
            final_info = _step_info(step, is_invalid, i) | {
                "privileged": step.final_observation.privileged[i].copy(),
                "scenario": infos["scenario"][i],
            }
            final = {"final_obs": _observed(step.final_observation, i), "final_info": final_info}
            infos = self._add_info(infos, final, i)
        terminated = step.terminated & ~step.truncated
        return _observed(self._seen), step.reward, terminated, step.truncated, infos

    def action_masks(self) -> NDArray[np.bool_]:
        """[N, R + 1] which actions are legal now."""
        return self._seen.action_mask.copy()

    def _infos(self) -> dict[str, Any]:
        scenarios = np.array(self.entity_env.groups, object)[self.entity_env.group]
        return {"privileged": self._seen.privileged.copy(), "scenario": scenarios}

    def _with_masks(self, infos: dict[str, Any]) -> dict[str, Any]:
        """Gymnasium wants `_key` beside `key`: which environments have it. Here all do."""
        masked = dict(infos)
        for key, value in infos.items():
            masked[key] = self._with_masks(value) if isinstance(value, dict) else value
            masked[f"_{key}"] = np.ones(self.num_envs, np.bool_)
        return masked


class GymRoutingEnv(GymEnv):
    """Place requests on the replicas of a simulated LLM serving cluster, one after another.

    Observation, a dict; R = `max_replicas`, rows beyond the cluster's own replicas are padding:

    ===========  ===============  ========================================================================
    entities     [R, F] float32   each replica: load, delays, trends, scraped gauges, speed, and what this
                                  request would meet there; padding is 0. Names, units and meanings:
                                  `routing.features.ENTITY_FEATURES`
    context      [C] float32      the request and the cluster as a whole: `CONTEXT_FEATURES`
    entity_mask  [R] int8         1 where there is a replica
    action_mask  [R + 1] int8     1 where the action is legal; never all 0
    ===========  ===============  ========================================================================

    A policy sees what a router can know: its own book-keeping and late gauges, no output lengths.

    Action, Discrete(R + 1): 0 holds the request at the router, k sends it to replica k - 1. Holding is legal
    while no replica has room, and not for ever; a replica may be down, or too small for the request. An
    illegal action is replaced by the first legal one, which serves nobody well, and info["invalid"] says so.
    `action_masks()`, which sb3-contrib calls, avoids them.

    Reward: what a second cluster under a reference policy (least-outstanding) paid for its latencies, minus
    what this one paid, from this decision to the next and on the same arrivals. Above 0 is better than the
    reference. Parts and weights: envs/rewards.py.

    End: truncated after `decisions` decisions, for it is a window of endless traffic; terminated, with a
    penalty, when far more requests have piled up than at the reference. Each episode draws its scenario, its
    traffic, and the state that some heuristic left behind to begin with.

    Info: privileged [P] float32, the true state of both clusters, for critics only (`PRIVILEGED_FEATURES`);
    scenario. After a step also elapsed_s, the simulated time to this decision; invalid; terms, the parts of
    the reward.
    """

    def __init__(self, render_mode: None = None, **settings: Any) -> None:
        """`settings`: fields of `RoutingSpec`. `render_mode`, for those who always pass one, does nothing."""
        super().__init__(RoutingEnv(parse_spec(RoutingSpec, settings, "env"), num_envs=1))


class GymRoutingVectorEnv(GymVectorEnv):
    """N of `GymRoutingEnv`; see there for what is seen, done and earned."""

    def __init__(self, num_envs: int = 1, render_mode: None = None, **settings: Any) -> None:
        super().__init__(RoutingEnv(parse_spec(RoutingSpec, settings, "env"), num_envs))


class GymJobsEnv(GymEnv):
    """Start jobs on the GPUs of a simulated cluster, one after another.

    Observation, a dict; K = `window`, rows beyond the jobs that wait are padding:

    ===========  ===============  ========================================================================
    entities     [K, F] float32   each job of the window: duration, priority, GPUs, wait, and, unless
                                  `features="original"`, what follows from them. Names, units and meanings:
                                  `jobs.observation`
    context      [C] float32      look-ahead, one number a GPU, the GPUs as a whole, queue and clock
    entity_mask  [K] int8         1 where there is a job
    action_mask  [K + 1] int8     1 where the action is legal; the first always is
    ===========  ===============  ========================================================================

    Action, Discrete(K + 1): 0 starts nothing, k the k-th job of the window; legal if it exists and enough
    GPUs are idle. An illegal action counts as 0, and info["invalid"] says so. `action_masks()`, which
    sb3-contrib calls, avoids them. Then time goes on to the next event: an arrival or a completion.

    Reward, in shares of the episode's work: work of the job that completes; minus time over horizon times the
    work that waits or runs; minus 0.05 of that for starting nothing although a job fits. At the end plus the
    share of the horizon that is left, if all jobs are done, or minus the work of those that are not. With
    deadlines (`workload={"deadline_slack": [5, 100]}`), minus the share of these that is missed.

    End: terminated when all jobs are done; truncated at the horizon or after `max_steps`.

    Info: privileged [P] float32, what only a critic may see; after a step also elapsed_s, invalid, and terms,
    the parts of the reward.
    """

    def __init__(self, render_mode: None = None, **settings: Any) -> None:
        """`settings`: fields of `JobsSpec`. `render_mode`, for those who always pass one, does nothing."""
        super().__init__(JobsEnv(parse_spec(JobsSpec, settings, "env"), num_envs=1))


class GymJobsVectorEnv(GymVectorEnv):
    """N of `GymJobsEnv`; see there for what is seen, done and earned."""

    def __init__(self, num_envs: int = 1, render_mode: None = None, **settings: Any) -> None:
        super().__init__(JobsEnv(parse_spec(JobsSpec, settings, "env"), num_envs))


def observation_space(space: EntitySpace) -> spaces.Dict:
    room = space.num_entities
    return spaces.Dict(
        {
            "entities": spaces.Box(-HIGHEST, HIGHEST, (room, len(space.entity_features)), np.float32),
            "context": spaces.Box(-HIGHEST, HIGHEST, (len(space.context_features),), np.float32),
            "entity_mask": spaces.MultiBinary(room),
            "action_mask": spaces.MultiBinary(space.num_actions),
        }
    )


def _observed(seen: Observation, i: int | slice = slice(None)) -> Observed:
    """Copies, of environment i or of all; the environment goes on writing into its own."""
    return {
        "entities": seen.entities[i].copy(),
        "context": seen.context[i].copy(),
        "entity_mask": seen.entity_mask[i].astype(np.int8),
        "action_mask": seen.action_mask[i].astype(np.int8),
    }


def _legal(actions: NDArray[Any], seen: Observation) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Illegal actions replaced by the first legal one, and which those were; both [N]."""
    is_invalid = ~seen.action_mask[np.arange(len(actions)), actions]
    return np.where(is_invalid, seen.action_mask.argmax(axis=1), actions), is_invalid


def _step_info(step: Step, is_invalid: NDArray[np.bool_], i: int) -> dict[str, Any]:
    return {
        "elapsed_s": float(step.elapsed_s[i]),
        "invalid": bool(is_invalid[i]),
        "terms": {name: float(term[i]) for name, term in step.terms.items()},
    }
