"""Do advantages say what an action really changed? GAE against branches of the simulator.

    .venv/bin/python benchmarks/advantage_check.py --points 3000 --jobs 2        # about ten minutes

From one state, every legal action is taken, and after each of them the policy goes on, on the same arrivals
and with the same random numbers, for as long as an action is felt. What one action earns more than another,
discounted, is the truth; beside it stands what generalised advantage estimation says of the same decisions,
from rollouts that are cut where a training would cut them. The policy is the warm start of `quick`, frozen;
each row has a critic of its own, trained on that policy with the discount and the rollouts of the row.

One action among thousands changes little, and what follows is chaotic: a single branch is nearly all noise.
So each state is branched twice, with other random numbers. What the two have in common is not noise: the
covariance of their returns is the variance of the truth, that of their estimates the variance of the mean
estimate, that of the estimates of one and the returns of the other the covariance of estimate and truth.

    one estimate    its correlation with the truth: what PPO has to learn from, bias and noise together
    mean estimate   the same for the mean of many estimates of an action: bias alone
    slope           of the mean estimate by the truth; below 1, part of what an action changes is not seen
    noise           standard deviation of an estimate, in standard deviations of the truth
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from pointsman.envs import routing
from pointsman.envs.entity import Observation
from pointsman.envs.routing import RoutingEnv
from pointsman.training.advantages import LifetimeDiscount, TimeDiscount, gae
from pointsman.training.config import load_train_config
from pointsman.training.networks import TensorObservation
from pointsman.training.passes import use_one_thread
from pointsman.training.ranks import Ranks
from pointsman.training.trainer import Trainer

Floats = NDArray[np.float64]

# (what, discount, steps of a rollout, environments)
ROWS: list[tuple[str, Any, int, int]] = [
    ("before: trace 1.3 s, horizon 20 s, 128 steps", TimeDiscount(horizon_s=20, trace_s=1.3), 128, 128),
    ("trace 4 s, horizon 60 s, 128 steps", TimeDiscount(horizon_s=60, trace_s=4), 128, 128),
    ("after: trace 1.7, horizon 8 lifetimes, 528 steps", LifetimeDiscount(), 528, 32),
    ("trace 4, horizon 8 lifetimes, 528 steps", LifetimeDiscount(trace=4.0), 528, 32),
]
TRUTH = LifetimeDiscount()
LIFETIMES = 2.0  # for which an action is followed
TEMPERATURE = 0.3  # near the arg-max: what branches have in common stays in common for longer
POINTS_AT_ONCE = 8
STREAMS = 2


class Branches(NamedTuple):
    """Of P states, 2 streams of random numbers and R actions, of which some may be illegal."""

    truth: Floats  # [P, 2, R] discounted returns
    estimates: Floats  # [rows, P, 2, R]
    probabilities: Floats  # [P, R] of the policy; 0 where illegal


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--points", type=int, default=400, help="states to branch from")
    parser.add_argument("--updates", type=int, default=60, help="of each critic")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the rows there")
    options = parser.parse_args()
    started = time.perf_counter()
    share = -(-options.points // (options.jobs * POINTS_AT_ONCE))
    tasks = [(options.seed + job, share, options.updates) for job in range(options.jobs)]
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        parts = list(pool.map(measure, tasks))
    joined = Branches(
        np.concatenate([part.truth for part, _ in parts]),
        np.concatenate([part.estimates for part, _ in parts], axis=1),
        np.concatenate([part.probabilities for part, _ in parts]),
    )
    explained = np.mean([row for _, row in parts], axis=0)
    num_points = len(joined.truth)
    print(f"{num_points} states, {LIFETIMES:g} lifetimes, {time.perf_counter() - started:.0f} s")
    rows = [
        {"what": what, "explained_variance": float(value), **compare(joined, index)}
        for index, ((what, *_), value) in enumerate(zip(ROWS, explained, strict=True))
    ]
    header = ["correlation of one estimate", "of the mean estimate", "slope by the truth"]
    header += ["noise of an estimate [std of the truth]", "critic explains"]
    print(f"\n| | {' | '.join(header)} |\n|---|{'--:|' * len(header)}")
    for row in rows:
        cells = (with_error(row, name) for name in ("one", "mean", "slope"))
        print(
            f"| {row['what']} | {' | '.join(cells)} | {row['noise']:.1f} | {row['explained_variance']:.2f} |"
        )
    if options.json:
        options.json.write_text(json.dumps({"points": num_points, "rows": rows}, indent=1), encoding="utf-8")


def with_error(row: dict[str, Any], name: str) -> str:
    return f"{row[name]:.2f} ± {row[f'{name}_error']:.2f}"


def measure(task: tuple[int, int, int]) -> tuple[Branches, list[float]]:
    """Critics, and branches that all of them estimate, in a process of its own."""
    seed, num_batches, num_updates = task
    warnings.simplefilter("ignore")
    use_one_thread()
    trainers = []
    explained = []
    for _, discount, num_steps, num_envs in ROWS:
        trainer = make_trainer(discount, num_steps, num_envs, seed)
        trainer.prepare()
        for _ in range(num_updates):
            metrics, _ = trainer.step(0.0)
        explained.append(metrics["explained_variance"])
        trainers.append(trainer)
    batches = [branch(trainers, seed * 100_000 + k) for k in range(num_batches)]
    return Branches(
        np.concatenate([one.truth for one in batches]),
        np.concatenate([one.estimates for one in batches], axis=1),
        np.concatenate([one.probabilities for one in batches]),
    ), explained


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


def branch(trainers: list[Trainer], seed: int) -> Branches:
    """Play P copies of 2 R environments to a state, take all R actions there, and go on."""
    actor = trainers[0]  # all have the same policy
    rng = np.random.default_rng([seed, 0xADA])
    num_actions = actor.env.env.space.num_actions - 1
    shape = (POINTS_AT_ONCE, STREAMS, num_actions)
    env = copies(actor, shape, seed)
    decide = actor.runner.policy()

    def act(chance: Floats) -> NDArray[np.int64]:
        """`chance` broadcasts to [P, 2, R]."""
        return decide(
            env._observation, None, TEMPERATURE, 0.0, np.broadcast_to(chance, shape).ravel().copy()
        ).actions

    for _ in range(int(rng.integers(50, 300))):
        env.step(act(rng.random((POINTS_AT_ONCE, 1, 1))))
    first = Observation(
        *(array.reshape(POINTS_AT_ONCE, -1, *array.shape[1:])[:, 0] for array in env._observation)
    )
    for array, of_point in zip(env._observation, first, strict=True):
        assert (array == np.repeat(of_point, STREAMS * num_actions, axis=0)).all(), "copies have parted"
    is_legal = first.action_mask[:, 1:]  # [P, R]
    probabilities = shares(actor, first)[:, 1:] * is_legal
    # Where an action is illegal its branch does something legal, and does not count.
    wanted = np.where(is_legal, np.arange(1, num_actions + 1), is_legal.argmax(axis=1)[:, None] + 1)
    actions = np.broadcast_to(wanted[:, None], shape).ravel().copy()
    num_steps = int(LIFETIMES * env.mean_in_system.max())
    rewards, elapsed_s, seen = [], [], [copied(env)]
    for _ in range(num_steps):
        step = env.step(actions)
        reward = step.reward.astype(np.float64)
        for limit in actor.prices.limits:
            reward += actor.prices.of(limit)[0] * step.tails[limit]
        assert not (step.terminated | step.truncated).any()
        rewards.append(reward)
        elapsed_s.append(step.elapsed_s.astype(np.float64))
        seen.append(copied(env))
        actions = act(rng.random((POINTS_AT_ONCE, STREAMS, 1)))
    run = Run(np.stack(rewards), np.stack(elapsed_s), env.lifetime_s.copy(), seen)
    cuts = rng.random(env.num_envs // num_actions).repeat(num_actions)  # the same for all actions
    return Branches(
        run.returns().reshape(shape),
        np.stack([run.estimates(trainer, cuts).reshape(shape) for trainer in trainers]),
        probabilities / probabilities.sum(axis=1, keepdims=True),
    )


def copies(actor: Trainer, shape: tuple[int, int, int], seed: int) -> RoutingEnv:
    """Environments of which those of a point are in the same state: the same episode, entered alike."""
    spec = actor.env.env.spec  # type: ignore[attr-defined]
    env = RoutingEnv(
        spec.model_copy(update={"decisions": 1500, "warmup_requests": 1000}), int(np.prod(shape))
    )
    draw, last = routing.draw, (-1, None, None)
    env._rngs = []

    def draw_once(*arguments: Any) -> Any:
        nonlocal last
        point, rng = (len(env._rngs) - 1) // (shape[1] * shape[2]), env._rngs[-1]
        if last[0] != point:
            last = point, draw(*arguments), rng.bit_generator.state  # type: ignore[assignment]
        rng.bit_generator.state = last[2]
        return last[1]

    routing.draw = draw_once
    try:
        for i in range(env.num_envs):
            env._rngs.append(np.random.default_rng([seed, i // (shape[1] * shape[2])]))
            env._begin(i)
    finally:
        routing.draw = draw
    env._look(0, env.num_envs)
    env._before = env._totals()
    return env


def copied(env: RoutingEnv) -> Observation:
    return Observation(*(array.copy() for array in env._observation))


def shares(actor: Trainer, seen: Observation) -> Floats:
    """[P, A] of the policy."""
    tensors = TensorObservation.from_numpy(Observation(*(array[None].copy() for array in seen)))
    is_start = torch.zeros((1, len(seen.context)), dtype=torch.bool)
    logits, _ = actor.runner.logits(tensors, None, is_start)
    return torch.softmax(logits[0].double() / TEMPERATURE, -1).numpy()


class Run(NamedTuple):
    rewards: Floats  # [H, N]
    elapsed_s: Floats  # [H, N]
    lifetime_s: Floats  # [N]
    seen: list[Observation]  # [H + 1] of [N, ...]

    def returns(self) -> Floats:
        """[N] what was earned in the lifetimes that count, discounted."""
        discount, _ = TRUTH.arrays(self.elapsed_s, self.lifetime_s)
        before = np.cumprod(np.concatenate((np.ones_like(discount[:1]), discount[:-1])), axis=0)
        counts = np.cumsum(self.elapsed_s, axis=0) <= LIFETIMES * self.lifetime_s
        total: Floats = (before * self.rewards * counts).sum(axis=0)
        return total

    def estimates(self, trainer: Trainer, cuts: Floats) -> Floats:
        """[N] advantages by GAE, in units of rewards; a rollout is cut at a share of its length."""
        of_group = np.zeros(1, np.int64)
        unit = 1.0 if trainer.reward_scale is None else float(trainer.reward_scale.scale(of_group)[0])
        seen = TensorObservation.from_numpy(Observation(*map(np.concatenate, zip(*self.seen, strict=True))))
        values = trainer.network.value_scale.denormalise(trainer.runner.values(seen, None).double()).numpy()
        values = values.reshape(len(self.seen), -1)
        discount, trace = trainer.ppo.discount.arrays(self.elapsed_s, self.lifetime_s)
        # What is cut ends there, and the value of what was seen next is still to come.
        num_steps = len(self.rewards)
        ends = np.minimum((cuts * trainer.config.run.rollout_steps).astype(np.int64), num_steps - 1)
        truncated = np.arange(num_steps)[:, None] == ends
        never = np.zeros_like(truncated)
        advantages, _ = gae(self.rewards / unit, values, values[1:], never, truncated, discount, trace)
        first: Floats = unit * advantages[0]
        return first


# The table --------------------------------------------------------------------------------------------------


def compare(branches: Branches, row: int) -> dict[str, float]:
    """Moments over all legal branches; errors by resampling states."""
    rng = np.random.default_rng(0)
    num_points = len(branches.truth)
    sums = moments(branches, row)  # [P, 4]
    found = statistics(sums.sum(axis=0))
    samples = [statistics(sums[rng.integers(num_points, size=num_points)].sum(axis=0)) for _ in range(400)]
    errors = {f"{name}_error": float(np.nanstd([one[name] for one in samples])) for name in found}
    return found | errors


def moments(branches: Branches, row: int) -> Floats:
    """[P, 4] of a state: truth × truth, estimate × estimate, estimate × truth, across streams; estimate²."""
    weights = (branches.probabilities > 0)[:, None].astype(np.float64)

    def centred(values: Floats) -> Floats:
        """[P, 2, R] what an action earns more than the mean of the legal ones."""
        return weights * (
            values - (weights * values).sum(axis=-1, keepdims=True) / weights.sum(axis=-1, keepdims=True)
        )

    truth, estimate = centred(branches.truth), centred(branches.estimates[row])
    other = truth[:, ::-1]
    return np.stack(
        [
            (truth[:, 0] * truth[:, 1]).sum(axis=-1),
            (estimate[:, 0] * estimate[:, 1]).sum(axis=-1),
            0.5 * (estimate * other).sum(axis=(1, 2)),
            0.5 * np.square(estimate).sum(axis=(1, 2)),
        ],
        axis=1,
    )


def statistics(sums: Floats) -> dict[str, float]:
    truth, mean, both, single = sums
    with np.errstate(invalid="ignore"):
        return {
            "one": float(both / np.sqrt(truth * single)),
            "mean": float(both / np.sqrt(truth * mean)),
            "slope": float(both / truth),
            "noise": float(np.sqrt((single - mean) / truth)),
        }


if __name__ == "__main__":
    main()
