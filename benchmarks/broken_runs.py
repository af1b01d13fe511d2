"""Break training on purpose, many ways, and see whether `pointsman diagnose` names what was broken.

Each fault is planted in a short run of its own: most in the configuration, where a user would make the
mistake; bugs of environments and of code by wrapping them here, because the product has no switch for them.
Healthy runs stand beside them and must get a clean bill. Thresholds were set on other training seeds than
those of the tables (`--tuning` runs those). Rules were changed with the runs of the first table in sight, not
with those of the second (`--fresh`).

    .venv/bin/python benchmarks/results.py --page diagnosis --write    # the page; 20 min on one core
    .venv/bin/python benchmarks/broken_runs.py --only mask  # the faults with this in their name
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager as Context
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, cast
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from pointsman.diagnosis.findings import Diagnosis, diagnose
from pointsman.diagnosis.readers import read_run
from pointsman.envs.entity import EntityEnv, Observation, Step
from pointsman.errors import PointsmanWarning
from pointsman.evaluation.problem import make_env
from pointsman.spec import apply_override, parse_spec
from pointsman.training import runs
from pointsman.training.config import TrainConfig
from pointsman.training.exploration import Exploration
from pointsman.training.ppo import DivergedError, RatioError
from pointsman.training.safety import SafetyError
from pointsman.training.stopping import StopSwitch

# Of broken runs; of healthy ones from nothing, and after a warm start.
TUNING_SEEDS, TUNING_HEALTHY = (0, 1, 10, 11), (range(2), range(1))
SEEDS, HEALTHY_SEEDS = range(20, 22), (range(20, 30), range(20, 23))
FRESH_SEEDS, FRESH_HEALTHY = range(30, 32), (range(30, 40), range(30, 33))

# Small enough for half a minute, large enough to learn, from nothing, to beat the baseline.
CONFIG: dict[str, Any] = {
    "env": {
        "kind": "routing",
        "scenarios": ["steady-chat"],
        "max_replicas": 4,
        "shadow": {"kind": "least-delay"},
        "reward": {"scale": "moment", "terms": {"outstanding": 1, "waiting": 4, "age": 4}},
        "decisions": 1024,
        "warmup_requests": 1000,
        "evaluation": {"seeds": 4},
    },
    "network": {"kind": "pooled", "width": 64},
    "ppo": {
        "num_epochs": 3,
        "minibatch_size": 512,
        "learning_rate": {"kind": "linear", "start": 1e-3, "end": 1e-4},
    },
    "exploration": {"entropy_coef": {"kind": "linear", "start": 0.01, "end": 0.001}},
    "run": {
        "steps": 64 * 32 * 64,  # updates, environments, steps
        "num_envs": 32,
        "rollout_steps": 64,
        "settle_steps": 64,
        "average_updates": 10,
        "evaluate_every": 4,
        "checkpoint_every": 32,
    },
}
OVERLOAD = {"env.scenarios": ["overload"], "env.reward": {"scale": "episode"}}
NO_ROOM = -1.0  # prompt tokens that may wait on a replica: none has room but an empty one
WARM_START = {
    "warm_start": {"decisions": 50_000},
    "ppo.critic_first": 4,
    "exploration.temperature": {"kind": "linear", "start": 2.0, "end": 1.0},
}

# Environments and code with a bug ---------------------------------------------------------------------------


class Wrapped:
    """All of an environment's attributes but those that a subclass replaces."""

    def __init__(self, env: EntityEnv) -> None:
        self._env = env

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)


class WrongMask(Wrapped):
    """Shows another mask than it judges by; plays on with a legal action, and says that it had to."""

    def shown(self, mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
        raise NotImplementedError

    def reset(self, seed: int) -> Observation:
        return self._show(self._env.reset(seed))

    def _show(self, observation: Observation) -> Observation:
        self._true = observation.action_mask.copy()
        return observation._replace(action_mask=self.shown(self._true))

    def step(self, actions: NDArray[np.int64]) -> Step:
        is_legal = self._true[np.arange(len(actions)), actions]
        step = self._env.step(np.where(is_legal, actions, self._true.argmax(axis=1)))
        return step._replace(observation=self._show(step.observation), is_illegal=~is_legal)


class LateMask(WrongMask):
    """The mask of the step before."""

    _before: NDArray[np.bool_] | None = None

    def shown(self, mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
        shown = mask if self._before is None else self._before
        self._before = mask
        return shown


class OpenMask(WrongMask):
    """Every action looks legal."""

    def shown(self, mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
        return np.ones_like(mask)


Terms = dict[str, NDArray[Any]]
Change = Callable[[Step, NDArray[np.int64]], Terms]


class Rewarded(Wrapped):
    """Pays other rewards, in episodes too: `change` gives their terms. What limits on tails pay beside them,
    at prices that the trainer finds, counts `tails` times."""

    def __init__(self, env: EntityEnv, change: Change, tails: float) -> None:
        super().__init__(env)
        self._change = change
        self._tail_factor = np.float32(tails)
        self._returns = np.zeros(env.num_envs)

    def step(self, actions: NDArray[np.int64]) -> Step:
        step = self._env.step(actions)
        terms = {name: np.asarray(term, np.float32) for name, term in self._change(step, actions).items()}
        reward = np.sum(list(terms.values()), axis=0)
        self._returns += reward
        episodes = [one._replace(episode_return=float(self._returns[one.env])) for one in step.episodes]
        self._returns[[one.env for one in episodes]] = 0.0
        tails = {name: self._tail_factor * tail for name, tail in step.tails.items()}
        return step._replace(reward=reward.astype(np.float32), terms=terms, episodes=episodes, tails=tails)


def environment(wrap: Callable[[EntityEnv], Any]) -> Callable[[], Context[Any]]:
    """Plant it in every environment that training makes."""

    @contextmanager
    def planted() -> Iterator[None]:
        def broken(section: Any, num_envs: int) -> Any:
            return wrap(make_env(section, num_envs))

        with (
            mock.patch("pointsman.training.trainer.make_env", broken),
            mock.patch("pointsman.training.runs.make_env", broken),
        ):
            yield

    return planted


def rewards(change: Change, tails: float = 1.0) -> Callable[[], Context[Any]]:
    return environment(lambda env: Rewarded(env, change, tails))


def always_hold(env: Any) -> EntityEnv:
    """Requests may be held for no reason, in training and in evaluations; no configuration may say so."""
    env._own.rows.prefill_limit = NO_ROOM
    env.metadata["hold"] = {**env.metadata["hold"], "prefill_limit_tokens": NO_ROOM}
    return cast(EntityEnv, env)


def hold_bonus(size: float) -> Callable[[], Context[Any]]:
    def change(step: Step, actions: NDArray[np.int64]) -> Terms:
        return {**step.terms, "bonus": size * (actions == 0)}

    return environment(lambda env: Rewarded(always_hold(env), change, tails=1.0))


def entropy_sign() -> Context[Any]:
    """An entropy bonus that is a malus."""
    right = Exploration.knobs

    def wrong(self: Exploration, fraction_done: float) -> Any:
        knobs = right(self, fraction_done)
        return replace(knobs, entropy_coef=-knobs.entropy_coef)

    return mock.patch.object(Exploration, "knobs", wrong)


# The faults -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """`names` are the findings that name it; one of them has to come first."""

    what: str
    names: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    plant: Callable[[], Context[Any]] = nullcontext


HEALTHY = (Fault("healthy"), Fault("healthy, warm start", (), WARM_START))
FAULTS = (
    Fault("learning rate × 30", ("kl-brake-always-on", "overshoot"), {"ppo.learning_rate": 0.03}),
    Fault(
        "learning rate × 10, no clip, no KL stop",
        ("overshoot",),
        {
            "ppo.learning_rate": 0.01,
            "ppo.clip_ratio": 1.0,
            "ppo.num_epochs": 10,
            "ppo.target_kl": None,
            "ppo.entropy_jump_clip": None,
        },
    ),
    Fault(
        "learning rate / 300, one epoch", ("flat-learning",), {"ppo.learning_rate": 3e-6, "ppo.num_epochs": 1}
    ),
    Fault("mask shifted by one step", ("stale-mask",), OVERLOAD, environment(LateMask)),
    Fault("mask that allows everything", ("mask-bug",), {}, environment(OpenMask)),
    Fault("tanh reward", ("reward-saturation",), {"env.reward": "hybrid-tanh"}),
    Fault(
        "one reward term × 1000",
        ("reward-term-dominance",),
        {
            "env.reward": {
                "terms": {"outstanding": 1, "waiting": 4, "age": 4, "imbalance_range": 1000},
                "scale": "moment",
            }
        },
    ),
    Fault(
        "reward with the wrong sign",
        ("wrong-sign",),
        {},
        rewards(lambda step, actions: {name: -term for name, term in step.terms.items()}, tails=-1.0),
    ),
    Fault("value coefficient 0", ("critic-bottleneck",), {"ppo.value_coef": 0.0}),
    Fault("γ = 0.5", ("short-sighted",), {"ppo.discount": {"kind": "steps", "gamma": 0.5, "lam": 0.9}}),
    Fault("entropy coefficient 1", ("stuck-at-uniform",), {"exploration.entropy_coef": 1.0}),
    Fault(
        "entropy bonus with the wrong sign",
        ("entropy-collapse",),
        {"exploration.entropy_coef": 2.0},
        entropy_sign,
    ),
    Fault("bonus for doing nothing", ("noop-collapse",), {}, hold_bonus(1.0)),
    Fault(
        "reward for the first entity only",
        ("one-entity-collapse",),
        {"network.kind": "mlp"},
        rewards(lambda step, actions: {"first": 1.0 * (actions == 1)}, tails=0.0),
    ),
)


class Quiet:
    """A `Show` that shows nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments: None


def train(fault: Fault, seed: int, folder: Path) -> None:
    data = copy.deepcopy(CONFIG)
    for key, value in {"run.seed": seed, **fault.settings}.items():
        apply_override(data, f"{key}={json.dumps(value)}", "")
    config = parse_spec(TrainConfig, data)
    with fault.plant(), warnings.catch_warnings():
        warnings.simplefilter("ignore", PointsmanWarning)  # of the load of `overload`
        with suppress(
            DivergedError, RatioError, SafetyError
        ):  # the trainer refused; the run directory says why
            runs.start(config, folder, Quiet(), StopSwitch(), f"broken_runs.py: {fault.what}")


class Outcome(NamedTuple):
    fault: Fault
    seed: int
    diagnosis: Diagnosis

    @property
    def first(self) -> str:
        findings = self.diagnosis.findings
        return findings[0].name if findings else ""

    @property
    def is_right(self) -> bool:
        if not self.fault.names:
            return self.diagnosis.is_clean
        return not self.diagnosis.is_clean and self.first in self.fault.names


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path("/tmp/broken_runs"), help="runs that are there are kept"
    )
    parser.add_argument("--only", default="", help="faults with this in their name")
    parser.add_argument("--tuning", action="store_true", help="the seeds that thresholds were set on")
    parser.add_argument("--fresh", action="store_true", help="seeds that no rule was changed on")
    options = parser.parse_args()
    seeds: Sequence[int]
    if options.tuning:
        seeds, healthy = TUNING_SEEDS, TUNING_HEALTHY
    elif options.fresh:
        seeds, healthy = FRESH_SEEDS, FRESH_HEALTHY
    else:
        seeds, healthy = SEEDS, HEALTHY_SEEDS
    jobs = [(fault, seed) for fault in FAULTS for seed in seeds]
    jobs += [(fault, seed) for fault, its_seeds in zip(HEALTHY, healthy, strict=True) for seed in its_seeds]
    outcomes = []
    for fault, seed in jobs:
        if options.only not in fault.what:
            continue
        folder = options.out / f"{fault.what.replace(' ', '-').replace('/', 'by')}-{seed}"
        if not folder.exists():
            train(fault, seed, folder)
        outcome = Outcome(fault, seed, diagnose(read_run(folder)))
        outcomes.append(outcome)
        mark = "right" if outcome.is_right else "WRONG"
        found = ", ".join(f"{one.name} ({one.severity})" for one in outcome.diagnosis.findings)
        print(f"{mark}  {fault.what}, seed {seed}: {found or 'nothing'}", file=sys.stderr, flush=True)
    print(report(outcomes))


def report(outcomes: list[Outcome]) -> str:
    broken = [one for one in outcomes if one.fault.names]
    healthy = [one for one in outcomes if not one.fault.names]
    rows = [
        f"| {one.fault.what} | {one.seed} | {'yes' if one.is_right else '**no**'} | {_found(one)} |"
        for one in outcomes
    ]
    return "\n".join(
        (
            f"**Named first: {sum(one.is_right for one in broken)} of {len(broken)}. "
            f"Healthy and silent: {sum(one.is_right for one in healthy)} of {len(healthy)}.**",
            "",
            "| planted | seed | right | found, worst first |",
            "|---|--:|---|---|",
            *rows,
        )
    )


def _found(outcome: Outcome) -> str:
    return ", ".join(f"{one.name} ({one.severity})" for one in outcome.diagnosis.findings) or "nothing"


if __name__ == "__main__":
    main()
