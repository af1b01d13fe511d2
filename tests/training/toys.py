"""Two problems small enough to know the answer, and the shortest training loop that can solve them.

`Servers`: each step a job arrives and joins one of two unequal servers with short queues. Few states, so the
best policy and the value of any policy follow from linear algebra. `Recall`: a cue at t = 0, the answer at 8.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from pointsman.envs.entity import Observation
from pointsman.inference.space import EntitySpace, Feature
from pointsman.training.advantages import gae
from pointsman.training.flat import Adam
from pointsman.training.networks import PolicyNetwork, TensorObservation
from pointsman.training.ppo import Batch, Knobs, PpoSpec, sample, update

Array = NDArray[Any]


def features(*names: str) -> tuple[Feature, ...]:
    return tuple(Feature(name, "1", "toy", name) for name in names)


class ToyStep(NamedTuple):
    reward: Array  # [N]
    terminated: Array  # [N]
    truncated: Array  # [N]
    final: Observation  # [N, ...] before the reset
    observation: Observation  # [N, ...] after it


class Servers:
    """State (q1, q2): jobs at each server. Cost: the jobs there after placing, and 5 for a lost one."""

    limit = 6
    rates = np.array([0.4, 0.1])  # probability that a job is finished in a slot
    slots = 3  # from one arrival to the next
    gamma = 0.9
    space = EntitySpace(2, features("queue", "rate"), features("load"), ())
    episode_steps = 10

    def __init__(self, num_envs: int, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.queues = self.rng.integers(0, self.limit + 1, (num_envs, 2))
        self.age = self.rng.integers(0, self.episode_steps, num_envs)

    @classmethod
    def observe(cls, queues: Array) -> Observation:
        """[N, 2] -> observations; a full server cannot be chosen; if both are full, the job is lost."""
        num = len(queues)
        entities = np.stack((queues / cls.limit, np.broadcast_to(cls.rates, (num, 2))), -1)
        has_room = queues < cls.limit
        mask = np.concatenate((~has_room.any(1, keepdims=True), has_room), 1)
        context = queues.sum(1, keepdims=True) / cls.limit
        return Observation(
            entities.astype(np.float32),
            context.astype(np.float32),
            np.ones((num, 2), bool),
            mask,
            np.zeros((num, 0), np.float32),
        )

    def observation(self) -> Observation:
        return self.observe(self.queues)

    def step(self, actions: Array) -> ToyStep:
        num = len(actions)
        queues = self.queues + (actions[:, None] == [1, 2])
        reward = -queues.sum(1) - 5.0 * (actions == 0)
        for _ in range(self.slots):
            queues -= (queues > 0) & (self.rng.random((num, 2)) < self.rates)
        self.age += 1
        truncated = self.age >= self.episode_steps
        final = self.observe(queues)
        queues[truncated] = self.rng.integers(0, self.limit + 1, (truncated.sum(), 2))
        self.age[truncated] = 0
        self.queues = queues
        return ToyStep(reward, np.zeros(num, bool), truncated, final, self.observe(queues))

    @classmethod
    def model(cls) -> tuple[Array, Array, Array]:
        """All states [S, 2], rewards [S, A] (-inf: illegal), transitions [S, A, S]."""
        side = cls.limit + 1
        states = np.array([(a, b) for a in range(side) for b in range(side)])
        rewards = np.full((len(states), 3), -np.inf)
        transitions = np.zeros((len(states), 3, len(states)))
        service = []  # of each server: [side, side], from jobs there to jobs there at the next arrival
        for rate in cls.rates:
            slot = np.diag([1.0] + [1 - rate] * cls.limit) + np.diag([rate] * cls.limit, -1)
            service.append(np.linalg.matrix_power(slot, cls.slots))
        for s, (a, b) in enumerate(states):
            for action, queues in enumerate([(a, b), (a + 1, b), (a, b + 1)]):
                if max(queues) > cls.limit or (action == 0) != (min(a, b) == cls.limit):
                    continue
                rewards[s, action] = -sum(queues) - 5.0 * (action == 0)
                transitions[s, action] = np.outer(service[0][queues[0]], service[1][queues[1]]).ravel()
        return states, rewards, transitions

    @classmethod
    def values_of(cls, policy: Array) -> Array:
        """[S] exact value of a policy [S, A]."""
        states, rewards, transitions = cls.model()
        reward = np.where(policy > 0, policy * np.where(policy > 0, rewards, 0), 0).sum(1)
        move = np.einsum("sa,sat->st", policy, transitions)
        value: Array = np.linalg.solve(np.eye(len(states)) - cls.gamma * move, reward)
        return value

    @classmethod
    def best_values(cls) -> Array:
        """[S] by value iteration."""
        _, rewards, transitions = cls.model()
        values = np.zeros(len(rewards))
        for _ in range(400):
            values = (rewards + cls.gamma * transitions @ values).max(1)
        return values


class Recall:
    """Hold for 8 steps, then pick the entity that the context named at first: 1 if right, else 0."""

    gamma = 0.9
    delay = 8
    space = EntitySpace(2, features("sign"), features("cue", "is_time"), ())

    def __init__(self, num_envs: int, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.cue = self.rng.choice([-1.0, 1.0], num_envs)
        self.age = self.rng.integers(0, self.delay + 1, num_envs)  # most of them missed their first cue

    def observation(self) -> Observation:
        num = len(self.cue)
        is_time = self.age == self.delay
        context = np.stack((np.where(self.age == 0, self.cue, 0.0), is_time), 1)
        signs = np.broadcast_to(np.array([[-1.0], [1.0]], np.float32), (num, 2, 1)).copy()
        mask = np.stack((~is_time, is_time, is_time), 1)
        return Observation(
            signs, context.astype(np.float32), np.ones((num, 2), bool), mask, np.zeros((num, 0), np.float32)
        )

    def step(self, actions: Array) -> ToyStep:
        final = self.observation()
        is_end = self.age == self.delay
        reward = np.where(is_end & ((actions == 2) == (self.cue > 0)), 1.0, 0.0)
        self.age = np.where(is_end, 0, self.age + 1)
        self.cue[is_end] = self.rng.choice([-1.0, 1.0], is_end.sum())
        return ToyStep(reward, is_end, np.zeros_like(is_end), final, self.observation())


def learn(
    env: Servers | Recall,
    spec: PpoSpec,
    network: PolicyNetwork,
    num_updates: int,
    num_steps: int,
    seed: int,
    truncation_is_end: bool = False,
) -> list[float]:
    """Rollout, advantages, update; again. Returns the mean reward of each rollout."""
    optimizer, generator = Adam(network, spec.adam_eps), torch.Generator().manual_seed(seed)
    scale, rewards = network.value_scale, []
    now = TensorObservation.from_numpy(env.observation())
    num_envs = len(now.context)
    state, is_start = network.initial_state(num_envs), torch.ones(num_envs, dtype=torch.bool)
    for done in range(num_updates):
        knobs = Knobs(
            lr=spec.learning_rate.value(done / num_updates), entropy_coef=0.01 * (1 - done / num_updates)
        )
        rows: list[Any] = []
        with torch.no_grad():
            for _ in range(num_steps):
                logits, new_state = network.act(now, state)
                actions, logp = sample(logits, 1.0, 0.0, now.action_mask, generator)
                step = env.step(actions.numpy())
                rows.append((now, actions, logp, state, is_start, step))
                is_start = torch.from_numpy(step.terminated | step.truncated)
                state = None if new_state is None else new_state.masked_fill(is_start[:, None], 0.0)
                now = TensorObservation.from_numpy(step.observation)
            seen, actions_, logp_, states, starts, steps = zip(*rows, strict=True)
            observation = TensorObservation(*map(torch.cat, zip(*seen, strict=True)))
            finals = TensorObservation(
                *(torch.from_numpy(np.concatenate(a)) for a in zip(*(s.final for s in steps), strict=True))
            )

            def values_of(observation: TensorObservation) -> Array:
                values = scale.denormalise(network.value(observation).double())
                result: Array = values.view(-1, num_envs).numpy()
                return result

            values = np.concatenate((values_of(observation), values_of(now)))
            reward, terminated, truncated = (
                np.stack([getattr(s, name) for s in steps]) for name in ("reward", "terminated", "truncated")
            )
            discount, trace = spec.discount.arrays(reward, np.ones_like(reward))
            ends = terminated | truncated if truncation_is_end else terminated
            advantages, returns = gae(reward, values, values_of(finals), ends, truncated, discount, trace)
            scale.update(torch.from_numpy(returns))
        batch = Batch(
            observation,
            torch.cat(actions_),
            torch.cat(logp_),
            torch.from_numpy(advantages).flatten(),
            scale.normalise(torch.from_numpy(returns)).flatten(),
            scale.normalise(torch.from_numpy(values[:-1])).flatten(),
            states=None if state is None else torch.cat(states),
            is_start=torch.cat(starts),
            num_envs=num_envs,
        )
        update(spec, network, optimizer, batch, knobs, generator)
        network.observe(observation)
        rewards.append(float(reward.mean()))
    return rewards
