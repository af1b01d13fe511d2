"""Do advantages say what an action really changed? GAE against branches of the simulator.

    .venv/bin/python benchmarks/advantage_check.py --points 40        # a few minutes on one core

From one state, every legal action is taken, and after each of them the policy goes on, on the same arrivals
and with the same random numbers, for as long as an action is felt. What one action earns more than another,
discounted, is the truth; beside it stands what generalised advantage estimation says of the same decisions,
from rollouts that are cut where a training would cut them. The policy is the warm start of `quick`, frozen;
each row has a critic of its own, trained on that policy with the discount and the rollouts of the row.

    correlation, of one estimate     what PPO has to learn from: bias and noise together
    correlation, of the mean         bias alone, nearly: estimates of a branch are averaged first
    slope                            of the mean estimate by the truth; below 1, what comes late is not seen
    noise                            standard deviation of an estimate, in standard deviations of the truth

Truth and estimates come from different random numbers, so that noise they share does not look like agreement.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pointsman.envs import routing
from pointsman.envs.routing import RoutingEnv
from pointsman.training.advantages import LifetimeDiscount, TimeDiscount, gae
from pointsman.training.config import load_train_config
from pointsman.training.networks import TensorObservation
from pointsman.training.ranks import Ranks
from pointsman.training.trainer import Trainer

Floats = NDArray[np.float64]

BEFORE = TimeDiscount(horizon_s=20.0, trace_s=1.3)
# (what, discount, steps of a rollout, environments)
ROWS: list[tuple[str, Any, int, int]] = [
    ("before: trace 1.3 s, horizon 20 s, 128 steps", BEFORE, 128, 128),
    ("trace 4 s, horizon 60 s, 128 steps", TimeDiscount(horizon_s=60.0, trace_s=4.0), 128, 128),
    ("after: trace 1.7, horizon 8 lifetimes, 528 steps", LifetimeDiscount(), 528, 31),
    ("trace 4, horizon 8 lifetimes, 528 steps", LifetimeDiscount(trace=4.0), 528, 31),
]
TRUTH = LifetimeDiscount()
NUM_STREAMS = 16  # of random numbers: half for the truth, half for the estimates
LIFETIMES = 4.0  # for which an action is followed
TEMPERATURE = 1.4


@dataclass
class Branches:
    """One state, A actions, K streams, H steps."""

    probabilities: Floats  # [A] of the policy
    rewards: Floats  # [H, K, A]
    elapsed_s: Floats  # [H, K, A]
    lifetime_s: float
    seen: TensorObservation  # [(H + 1) * K * A, ...]

    @property
    def num_steps(self) -> int:
        return len(self.rewards)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--points", type=int, default=40, help="states to branch from")
    parser.add_argument("--updates", type=int, default=40, help="of each critic")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the rows there")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    started = time.perf_counter()
    actor = make_trainer(*ROWS[2][1:], options.seed)
    actor.prepare()
    points = [branch(actor, options.seed * 10_000 + k) for k in range(options.points)]
    num_branches = sum(len(point.probabilities) for point in points)
    print(f"{len(points)} states, {num_branches} branches, {time.perf_counter() - started:.0f} s", flush=True)
    truths = [truth(point) for point in points]
    print(f"reliability of the truth {reliability(points):.2f}", flush=True)
    rows = []
    for what, discount, num_steps, num_envs in ROWS:
        trainer = make_trainer(discount, num_steps, num_envs, options.seed)
        trainer.prepare()
        for _ in range(options.updates):
            metrics, _ = trainer.step(0.0)
        row = {"what": what, "explained_variance": metrics["explained_variance"]}
        row |= compare(trainer, points, truths, options.seed)
        rows.append(row)
        print(json.dumps(row), flush=True)
    print("\n| | one estimate | mean | slope | noise | critic explains |\n|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['what']} | {row['correlation_of_one']:.2f} | {row['correlation_of_mean']:.2f} "
            f"| {row['slope']:.2f} | {row['noise']:.1f} | {row['explained_variance']:.2f} |"
        )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")


def make_trainer(discount: Any, num_steps: int, num_envs: int, seed: int) -> Trainer:
    """The warm start of `quick`, whose policy stays as it is: only the critic learns."""
    config = load_train_config(
        "quick",
        [
            f"ppo.discount={json.dumps(discount.model_dump())}",
            f"run.rollout_steps={num_steps}",
            f"run.num_envs={num_envs}",
            f"run.seed={seed}",
            f"exploration.temperature={TEMPERATURE}",
            "run.rollout_lifetimes=null",
            "run.workers=1",
            "ppo.critic_first=1000000",
        ],
    )
    return Trainer(config, Ranks())


# Branches ---------------------------------------------------------------------------------------------------


def branch(actor: Trainer, seed: int) -> Branches:
    """Play to a state, take every legal action there, and go on."""
    rng = np.random.default_rng([seed, 0xADA])
    num_before = int(rng.integers(50, 300))
    num_actions = actor.env.env.space.num_actions - 1
    env = copies(actor, NUM_STREAMS * num_actions, seed, num_before)
    decide = actor.runner.policy()
    for chance in rng.random(num_before):
        seen = env._observation
        made = decide(seen, None, TEMPERATURE, 0.0, np.full(env.num_envs, chance))
        env.step(made.actions)
    assert all((array == array[:1]).all() for array in env._observation), "copies have parted"
    logits = actor.runner.logits(
        TensorObservation.from_numpy(
            type(env._observation)(*(array[:1][None] for array in env._observation))
        ),
        None,
        torch.zeros((1, 1), dtype=torch.bool),
    )[0][0, 0]
    probabilities = torch.softmax(logits.double() / TEMPERATURE, 0).numpy()
    legal = np.flatnonzero(env._observation.action_mask[0])
    legal = legal[legal > 0]
    actions = legal[np.arange(env.num_envs) % num_actions % len(legal)]
    lifetime_s = float(env.lifetime_s[0])
    num_steps = int(LIFETIMES * env.mean_in_system[0])
    chances = np.repeat(rng.random((num_steps, NUM_STREAMS)), num_actions, axis=1)  # [H, K * R]
    rows: list[tuple[Any, ...]] = []
    observations = [copied(env)]
    for t in range(num_steps):
        step = env.step(actions)
        reward = step.reward.astype(np.float64)
        for limit in actor.prices.limits:
            reward += actor.prices.of(limit)[0] * step.limits[limit]
        assert not (step.terminated | step.truncated).any()
        rows.append((reward, step.elapsed_s.astype(np.float64)))
        observations.append(copied(env))
        actions = decide(env._observation, None, TEMPERATURE, 0.0, chances[t]).actions
    chosen = np.arange(len(legal))  # of R columns a stream, as many as there are legal actions
    columns = (np.arange(NUM_STREAMS)[:, None] * num_actions + chosen).ravel()
    shape = (num_steps, NUM_STREAMS, len(legal))
    rewards, elapsed_s = (np.stack(part)[:, columns].reshape(shape) for part in zip(*rows, strict=True))
    seen_all = TensorObservation.from_numpy(
        type(env._observation)(
            *(np.concatenate([one[columns] for one in part]) for part in zip(*observations, strict=True))
        )
    )
    share = probabilities[legal]
    return Branches(share / share.sum(), rewards, elapsed_s, lifetime_s, seen_all)


def copies(actor: Trainer, count: int, seed: int, num_before: int) -> RoutingEnv:
    """Environments in the same state: the same episode, entered at the same place."""
    spec = actor.env.env.spec.model_copy(update={"decisions": 2500, "warmup_requests": 1000})  # type: ignore[attr-defined]
    env = RoutingEnv(spec, count)
    drawn: dict[str, Any] = {}
    draw = routing.draw

    def draw_once(*arguments: Any) -> Any:
        if not drawn:
            drawn["episode"], drawn["state"] = draw(*arguments), arguments[-1].bit_generator.state
        arguments[-1].bit_generator.state = drawn["state"]
        return drawn["episode"]

    routing.draw = draw_once  # type: ignore[assignment]
    try:
        env._rngs = [np.random.default_rng(seed) for _ in range(count)]
        for i in range(count):
            env._begin(i)
    finally:
        routing.draw = draw
    env._look(0, count)
    env._before = routing.Totals.of(env._sims), routing.Totals.of(env._shadows)
    return env


def copied(env: RoutingEnv) -> list[NDArray[Any]]:
    return [array.copy() for array in env._observation]


# Truth and estimates ----------------------------------------------------------------------------------------


def returns(point: Branches, streams: slice) -> Floats:
    """[A] discounted, mean over streams, centred by the policy."""
    discount, _ = TRUTH.arrays(point.elapsed_s, np.full_like(point.elapsed_s, point.lifetime_s))
    before = np.cumprod(np.concatenate((np.ones_like(discount[:1]), discount[:-1])), axis=0)
    sums = (before * point.rewards)[:, streams].sum(axis=0).mean(axis=0)
    return centred(point, sums)


def centred(point: Branches, values: Floats) -> Floats:
    """Advantages: what an action earns more than the policy does, on average over its actions."""
    result: Floats = values - (point.probabilities * values).sum(axis=-1, keepdims=True)
    return result


def truth(point: Branches) -> Floats:
    return returns(point, slice(0, None, 2))


def reliability(points: list[Branches]) -> float:
    """Correlation that half of the streams have with the other half."""
    halves = [(returns(point, slice(0, None, 2)), returns(point, slice(1, None, 2))) for point in points]
    return correlation(*(np.concatenate(part) for part in zip(*halves, strict=True)))


def correlation(one: Floats, other: Floats) -> float:
    return float(np.corrcoef(one, other)[0, 1])


def estimates(trainer: Trainer, point: Branches, rng: np.random.Generator) -> Floats:
    """[K / 2, A] advantages by GAE, in units of rewards; a rollout is cut anywhere, the same for all actions."""
    scale = trainer.network.value_scale
    unit = (
        1.0 if trainer.reward_scale is None else float(trainer.reward_scale.scale(np.zeros(1, np.int64))[0])
    )
    values = scale.denormalise(trainer.runner.values(point.seen, None).double()).numpy()
    values = values.reshape(point.num_steps + 1, NUM_STREAMS, -1)
    found = []
    for stream in range(1, NUM_STREAMS, 2):
        cut = min(int(rng.integers(1, trainer.config.run.rollout_steps + 1)), point.num_steps)
        elapsed_s = point.elapsed_s[:cut, stream]
        discount, trace = trainer.ppo.discount.arrays(elapsed_s, np.full_like(elapsed_s, point.lifetime_s))
        rewards, never = point.rewards[:cut, stream] / unit, np.zeros(elapsed_s.shape, np.bool_)
        advantages, _ = gae(
            rewards, values[: cut + 1, stream], np.zeros(rewards.shape), never, never, discount, trace
        )
        found.append(unit * advantages[0])
    return np.array(found)


def compare(trainer: Trainer, points: list[Branches], truths: list[Floats], seed: int) -> dict[str, float]:
    rng = np.random.default_rng([seed, 0xC07])
    singles = [centred(point, estimates(trainer, point, rng)) for point in points]
    true = np.concatenate(truths)
    means = np.concatenate([one.mean(axis=0) for one in singles])
    repeated = np.concatenate(
        [np.broadcast_to(a, one.shape).ravel() for a, one in zip(truths, singles, strict=True)]
    )
    every = np.concatenate([one.ravel() for one in singles])
    deviations = np.concatenate([(one - one.mean(axis=0)).ravel() for one in singles])
    return {
        "correlation_of_one": correlation(every, repeated),
        "correlation_of_mean": correlation(means, true),
        "slope": float((means * true).sum() / np.square(true).sum()),
        "noise": float(deviations.std() / true.std()),
    }


if __name__ == "__main__":
    main()
