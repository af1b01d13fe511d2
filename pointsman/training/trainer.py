"""The training loop, top to bottom: rollout, compute_gae, update; again.

Every rank runs `train` with environments of its own. Rank 0 has a `Host` as well, which keeps the clock,
evaluates and writes. Nothing here knows what is being learned: see envs/entity.py.

Exact resume. Environments cannot be saved, but they follow from their seed and the actions (recorded.py). So
that these stay few, they start anew every `checkpoint_every` updates, in uninterrupted runs too. Their seed
and all random numbers of an update follow from (seed, rank, number of the update).

Letters: T steps, N environments of this rank, B = T * N decisions.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pointsman.envs.entity import Episode
from pointsman.evaluation.problem import make_env
from pointsman.inference.checkpoint import Checkpoint
from pointsman.training.advantages import gae
from pointsman.training.buffers import Buffers, episode_metrics
from pointsman.training.config import TrainConfig
from pointsman.training.curriculum import Curriculum
from pointsman.training.exploration import Event, Exploration
from pointsman.training.flat import Adam
from pointsman.training.going_back import GoingBack
from pointsman.training.minibatches import Batch
from pointsman.training.networks import PolicyNetwork, TensorObservation, build_network
from pointsman.training.normalisers import RewardScale
from pointsman.training.passes import make_pass, use_one_thread
from pointsman.training.ppo import DivergedError, Knobs, RatioError
from pointsman.training.ppo import update as ppo_update
from pointsman.training.prices import Prices
from pointsman.training.ranks import Ranks
from pointsman.training.recorded import RecordedEnv
from pointsman.training.safety import Alert, Monitor, SafetyError
from pointsman.training.state import TrainerState, restore, save
from pointsman.training.stopping import CutError
from pointsman.training.warm_start import Teachers, enough_of, find_policy, take_over, warm_start
from pointsman.workers.peers import LostWorkerError, WorkerError

NUM_RECENT = 100  # episodes whose mean return a row shows: many updates end none

# What a random number is for; together with (seed, rank, update) it makes a seed.
WEIGHTS, ENVIRONMENTS, DECISIONS, SETTLING, WARM_START = range(5)


class Trainer:
    """All that changes in training, at one rank; the same parameters at each."""

    def __init__(self, config: TrainConfig, ranks: Ranks) -> None:
        self.config, self.ranks = config, ranks
        run = config.run
        num_envs = run.num_envs // ranks.size
        self.env = RecordedEnv(make_env(config.env, num_envs))
        space = self.env.env.space
        if config.run.start_from is not None:  # before its network is built, which may ask for other features
            find_policy(config.run.start_from).require_space(space, "run.start_from")
        self.network = build_network(config.network, space, self._seed(WEIGHTS, 0, rank=0))
        self.runner = make_pass(self.network)
        self.optimizer = Adam(self.network, config.ppo.adam_eps)
        # A minibatch is spread over the ranks, so that their number changes the speed and not the learning.
        self.ppo = config.ppo.model_copy(
            update={"minibatch_size": max(2, config.ppo.minibatch_size // ranks.size)}
        )
        self.exploration = Exploration(config.exploration, config.ppo)
        self.reference: PolicyNetwork | None = None  # the policy that learning starts from, frozen
        self.teachers = Teachers()  # whom the warm start imitated
        self.generator = torch.Generator()
        # [N, width], the memories of recurrent networks
        self.state = self.reference_state = self.network.initial_state(num_envs)
        width = 0 if self.state is None else self.state.shape[1]
        self.buffers = Buffers(run.rollout_steps, num_envs, space, width)
        self.curriculum = Curriculum(config.curriculum) if config.curriculum is not None else None
        if self.curriculum is not None:
            self.curriculum.check(self.env.env)
        self.monitor = Monitor(config.safety)
        memory = self.ppo.reward_memory
        self.reward_scale = RewardScale(len(self.env.env.groups), memory) if memory is not None else None
        self.average = copy.deepcopy(self.network).requires_grad_(False) if run.average_updates > 1 else None
        env = self.env.env
        self.prices = Prices(config.prices, getattr(env, "tails", ()), env.groups)
        self.going_back = GoingBack(run.going_back)
        self.best: dict[str, Tensor] = {}  # weights and optimizer at the best evaluation
        self.evaluation: dict[str, float] = {}  # the last one
        self.recent: list[tuple[float, float]] = []  # return and length of the last episodes, of all ranks
        self.num_updates = 0

    @property
    def num_decisions(self) -> int:
        """How many decisions all ranks have made since the run began."""
        return self.num_updates * self.config.run.steps_per_update

    def _seed(self, purpose: int, update: int, rank: int | None = None) -> int:
        rank = self.ranks.rank if rank is None else rank
        return int(np.random.SeedSequence([self.config.run.seed, rank, purpose, update]).generate_state(1)[0])

    # One update ---------------------------------------------------------------------------------------------

    def step(self, fraction_done: float) -> tuple[dict[str, float], list[Event]]:
        """One update; returns its metrics (the same at every rank) and what exploration changed."""
        stage = self.curriculum.stage(fraction_done, self.evaluation) if self.curriculum is not None else None
        news: list[Event] = []
        if stage is not None:
            self.env.set_difficulty(stage)
            assert self.curriculum is not None
            news = [self.curriculum.announced(self.num_updates + 1)]
        if stage is not None or self.num_updates % self.config.run.checkpoint_every == 0:
            self.restart()  # with a new stage, too: its episodes begin now, not when the old ones end
        self.generator.manual_seed(self._seed(DECISIONS, self.num_updates))
        knobs = self.exploration.knobs(fraction_done)
        knobs = replace(knobs, lr=knobs.lr * self.going_back.factor)
        if self.num_updates < self.ppo.critic_first:
            knobs = replace(knobs, entropy_coef=0.0)
        started = time.perf_counter()
        timings = self.rollout(knobs)
        for limit in self.prices.limits:
            self.buffers.price(limit, self.prices.of(limit))
        rolled_out = time.perf_counter()
        batch = self.compute_gae(knobs)
        metrics = self.update(batch, knobs)
        now = time.perf_counter()
        metrics |= self.buffers.metrics()
        metrics |= {f"time/{name}": value for name, value in timings.items()}
        metrics |= {"time/update_s": now - rolled_out} | self.prices.metrics() | self.going_back.metrics()
        if self.curriculum is not None:
            metrics["stage"] = float(self.curriculum.index + 1)  # counted from 1, as in the news
        metrics["steps_per_s"] = self.config.run.steps_per_update / (now - started)
        metrics = self._merge(metrics, self.buffers.episodes)
        self.num_updates += 1
        events = self.exploration.after_update(self.num_updates, fraction_done, metrics)
        return metrics, [*news, *events]

    @torch.no_grad()
    def rollout(self, knobs: Knobs) -> dict[str, float]:
        """Fill the buffers: T steps of the N environments with actions drawn from the policy."""
        buffers, clock = self.buffers, time.perf_counter
        buffers.clear()
        buffers.is_start[0] = self.env.is_start
        decide, shape = self.runner.policy(), (buffers.num_steps, buffers.num_envs)
        chance = torch.rand(shape, dtype=torch.float64, generator=self.generator).numpy()
        inference_s = env_s = 0.0
        for t in range(buffers.num_steps):
            start = clock()
            seen = buffers.see(t, self.env.observation)
            if buffers.states is not None:
                assert self.state is not None
                buffers.states[t] = self.state
            made = decide(seen, self.state, knobs.temperature, knobs.epsilon, chance[t])
            buffers.actions[t], buffers.logp[t] = made.actions, made.logp
            buffers.greedy_actions[t] = made.greedy_actions
            acted = clock()
            advice = self.teachers.advise(self.env) if knobs.imitation_coef > 0 else None
            step = self.env.step(buffers.actions[t])
            if advice is not None:
                luck = torch.rand(buffers.num_envs, dtype=torch.float64, generator=self.generator).numpy()
                buffers.teacher_actions[t] = self.teachers.pick(advice, step.groups, luck)
            buffers.record(t, step, made.state)
            if made.state is not None:
                self.state = made.state.masked_fill(torch.from_numpy(self.env.is_start)[:, None], 0.0)
            inference_s, env_s = inference_s + acted - start, env_s + clock() - acted
        buffers.see(buffers.num_steps, self.env.observation)
        if buffers.states is not None:
            assert self.state is not None
            buffers.states[-1] = self.state
        return {"inference_s": inference_s, "env_s": env_s}

    @torch.no_grad()
    def values(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """V of all observations [T + 1, N], and of the last ones of episodes cut off [T, N]."""
        buffers, network = self.buffers, self.network
        states = None if buffers.states is None else buffers.states.flatten(0, 1)
        values = self.runner.values(buffers.observation.flatten(), states).view(buffers.num_steps + 1, -1)
        final_values = np.zeros((buffers.num_steps, buffers.num_envs))
        if buffers.endings:
            seen = TensorObservation(
                *map(torch.cat, zip(*(end.observation for end in buffers.endings), strict=True))
            )
            memories = [end.state for end in buffers.endings if end.state is not None]
            states = torch.cat(memories) if memories else None
            steps = np.concatenate([np.full(len(end.envs), end.t) for end in buffers.endings])
            envs = np.concatenate([end.envs for end in buffers.endings])
            final_values[steps, envs] = network.value_scale.denormalise(
                self.runner.values(seen, states).double()
            ).numpy()
        return network.value_scale.denormalise(values.double()).numpy(), final_values

    def _leads(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """What the environment itself says of the future [T + 1, N], and at the ends of episodes [T, N].

        The network's values come on top: it need not learn what a plain model knows, and a decision shows in
        the next value instead of in the rewards of the next minute.
        """
        buffers = self.buffers
        lead = np.zeros((buffers.num_steps + 1, buffers.num_envs))
        final_lead = np.zeros((buffers.num_steps, buffers.num_envs))
        if not (self.ppo.lead and self.network.space.has_lead):
            return lead, final_lead
        lead += buffers.arrays.privileged[..., -1]
        for end in buffers.endings:
            final_lead[end.t, end.envs] = end.observation.privileged[:, -1].numpy()
        if self.reward_scale is not None:
            scale = self.reward_scale.scale(buffers.groups)
            lead /= np.concatenate((scale, scale[-1:]))
            final_lead /= scale
        return lead, final_lead

    def compute_gae(self, knobs: Knobs) -> Batch:
        """The rollout as a flat batch, with advantages and returns."""
        buffers, scale = self.buffers, self.network.value_scale
        values, final_values = self.values()
        discount, trace = self.ppo.discount.arrays(buffers.elapsed_s, buffers.lifetime_s)
        rewards = buffers.rewards.astype(np.float64)
        if self.reward_scale is not None:
            self.reward_scale.update(rewards, discount, buffers.groups, self.ranks.total)
            rewards = rewards / self.reward_scale.scale(buffers.groups)
        lead, final_lead = self._leads()
        advantages, returns = gae(
            rewards,
            values + lead,
            final_values + final_lead,
            buffers.terminated,
            buffers.truncated,
            discount,
            trace,
        )
        returns -= lead[:-1]
        if self.num_updates < self.ppo.critic_first:
            advantages = np.zeros_like(advantages)
        # The scale moves first: then returns and values are in the unit that the network predicts in.
        scale.update(torch.from_numpy(returns), self.ranks.total)

        def flat(array: NDArray[Any]) -> Tensor:
            return torch.from_numpy(array).flatten(0, 1)

        return Batch(
            observation=TensorObservation(*(tensor[:-1] for tensor in buffers.observation)).flatten(),
            actions=flat(buffers.actions),
            old_logp=flat(buffers.logp),
            advantages=flat(advantages),
            returns=scale.normalise(flat(returns)).float(),
            old_values=scale.normalise(flat(values[:-1])).float(),
            groups=flat(buffers.groups),
            ref_logits=self.reference_logits() if knobs.kl_ref_coef > 0 else None,
            teacher_actions=flat(buffers.teacher_actions) if knobs.imitation_coef > 0 else None,
            states=None if buffers.states is None else buffers.states[:-1].flatten(0, 1),
            is_start=flat(buffers.is_start[:-1]),
            num_envs=buffers.num_envs,
        )

    def update(self, batch: Batch, knobs: Knobs) -> dict[str, float]:
        """Improve the network; then let the feature scales follow, so that they stood still until here."""
        average = self.ranks.average_tensor_ if self.ranks.size > 1 else None
        metrics = ppo_update(self.ppo, self.network, self.optimizer, batch, knobs, self.generator, average)
        self.network.observe(batch.observation, self.ranks.total)
        self._follow()
        return metrics

    def _follow(self) -> None:
        """Let the averaged network follow. Gradients are noisy and decisions are an arg-max: the policy of a
        single update is worse in some corner that the next one repairs, their average is not."""
        if self.average is None:
            return
        weight = max(1.0 / (self.num_updates + 1), 1.0 / self.config.run.average_updates)
        mine = self.network.state_dict()
        for name, tensor in self.average.state_dict().items():
            if tensor.is_floating_point():
                tensor.lerp_(mine[name], weight)
            else:
                tensor.copy_(mine[name])

    def reference_logits(self) -> Tensor:
        """[B, A] of the reference policy on the rollout."""
        assert self.reference is not None
        seen = TensorObservation(*(tensor[:-1] for tensor in self.buffers.observation))
        is_start = torch.from_numpy(self.buffers.is_start[:-1])
        logits, self.reference_state = make_pass(self.reference).logits(seen, self.reference_state, is_start)
        return logits.flatten(0, 1)

    def _merge(self, metrics: dict[str, float], episodes: list[Episode]) -> dict[str, float]:
        """Means over the ranks; those of episodes over all that ended, their return over the last ones."""
        parts = self.ranks.gather((metrics, episodes))
        names = dict.fromkeys(name for part, _ in parts for name in part)
        merged = {name: float(np.mean([part[name] for part, _ in parts if name in part])) for name in names}
        ended = [episode for _, part in parts for episode in part]
        merged |= episode_metrics(ended, self.env.env.groups)
        self.recent += [(episode.episode_return, float(episode.length)) for episode in ended]
        self.recent = self.recent[-NUM_RECENT:]
        if self.recent:
            merged["mean_ep_return"], merged["mean_ep_length"] = np.mean(self.recent, axis=0).tolist()
        return merged

    # After an evaluation ------------------------------------------------------------------------------------

    def judged(self, found: dict[str, float]) -> list[Event]:
        """Let exploration, prices and step sizes follow an evaluation, the same at every rank."""
        self.evaluation = found
        if "eval_score" not in found:
            return []
        events = self.exploration.after_evaluation(
            self.num_updates, found["eval_score"], found.get("eval_baseline_score")
        )
        self.prices.after_evaluation(found)
        is_best, back = self.going_back.after_evaluation(self.num_updates, found)
        if is_best:
            self.best = {name: tensor.clone() for name, tensor in self._weights().items()}
        elif back:
            for name, tensor in self._weights().items():
                tensor.copy_(self.best[name])
        return events + back

    def _weights(self) -> dict[str, Tensor]:
        """All that learning moves, to be written in place; feature scales too, which values depend on."""
        found = {f"network/{name}": tensor for name, tensor in self.network.state_dict().items()}
        if self.average is not None:
            found |= {f"average/{name}": tensor for name, tensor in self.average.state_dict().items()}
        return found | {"optimizer/mean": self.optimizer.mean, "optimizer/square": self.optimizer.square}

    # Before the first update --------------------------------------------------------------------------------

    def prepare(self) -> dict[str, float]:
        """Take over a policy, or let the feature scales settle; imitate teachers; keep that as reference."""
        metrics: dict[str, float] = {}
        if self.config.run.start_from is not None:
            take_over(self.network, self.config.run.start_from)
        else:
            self.settle()
        if self.config.warm_start is not None:
            seed, env = self._seed(WARM_START, 0), enough_of(self.env.env, self.config.env)
            self.teachers, metrics = warm_start(self.network, env, self.config.warm_start, seed, self.ranks)
        if self.ppo.kl_reference.highest > 0:
            self.reference = copy.deepcopy(self.network).requires_grad_(False)
        if self.average is not None:
            self.average.load_state_dict(self.network.state_dict())
        return metrics

    def settle(self) -> None:
        """Random legal actions: the feature scales see what there is to see before anything is learned."""
        buffers, num_steps = self.buffers, self.config.run.settle_steps
        rng = np.random.default_rng(self._seed(SETTLING, 0))
        self.env.restart(self._seed(SETTLING, 1))
        for step in range(num_steps):
            t = step % buffers.num_steps
            buffers.see(t, self.env.observation)
            if t + 1 == buffers.num_steps or step + 1 == num_steps:
                seen = TensorObservation(*(tensor[: t + 1] for tensor in buffers.observation))
                self.network.observe(seen.flatten(), self.ranks.total)
            mask = self.env.observation.action_mask
            self.env.step((rng.random(mask.shape) * mask).argmax(1))

    def restart(self) -> None:
        """Start all environments anew; what they do from here on follows from the number of updates."""
        self.env.restart(self._seed(ENVIRONMENTS, self.num_updates))
        self.state = self.reference_state = self.network.initial_state(self.buffers.num_envs)

    def checkpoint(self) -> Checkpoint:
        """The policy, as evaluation and serving take it."""
        network = self.average or self.network
        arrays = {name: tensor.numpy().copy() for name, tensor in network.state_dict().items()}
        metadata = self.env.env.metadata | {"update": self.num_updates}
        return Checkpoint(self.config.network, self.env.env.space, arrays, metadata)


# The loop ---------------------------------------------------------------------------------------------------


class Outlook(NamedTuple):
    fraction_done: float  # of the run: schedules and the curriculum follow it
    is_asked_to_stop: bool

    @property
    def is_over(self) -> bool:
        return self.is_asked_to_stop or self.fraction_done >= 1.0


class Host(Protocol):
    """What rank 0 does beside training."""

    def cuttable(self) -> AbstractContextManager[None]:
        """In which the run may be cut off by a `CutError`."""
        ...

    def outlook(self, num_decisions: int) -> Outlook: ...

    def prepared(self, metrics: dict[str, float]) -> None:
        """How the warm start went."""
        ...

    def evaluate(self, checkpoint: Checkpoint) -> dict[str, float]: ...

    def record(self, row: dict[str, float], news: Sequence[Event | Alert]) -> None:
        """Log the metrics of an update, and what was done about them."""
        ...

    def failed(self, row: dict[str, float], error: Exception) -> None:
        """The run ends here: what is known of the update, and why."""
        ...

    def keep(self, state: TrainerState, checkpoint: Checkpoint) -> None:
        """What the run is now, between two updates: it can go on from there."""
        ...

    def save(self) -> None:
        """Write what was kept last."""
        ...


def train(
    ranks: Ranks, config: TrainConfig, state: TrainerState | None = None, host: Host | None = None
) -> Trainer:
    """Train until the host says the run is over. `state` is where to take up; None: from the beginning.

    A run that is cut off, or loses a worker, ends as the host kept it after its last whole update.
    """
    assert (host is not None) == (ranks.rank == 0)
    cuttable = host.cuttable if host else nullcontext
    use_one_thread()
    run = config.run
    trainer = Trainer(config, ranks)
    if state is not None:
        restore(trainer, state)
    else:
        with cuttable():
            prepared = trainer.prepare()
        if host and prepared:
            host.prepared(prepared)
        with cuttable():
            found = host.evaluate(trainer.checkpoint()) if host else {}
        trainer.judged(ranks.from_first(found))
    _keep(trainer, host)
    if host and state is None:
        host.save()
    outlook = ranks.from_first(_outlook(trainer, host))
    while not outlook.is_over:
        fraction_done = outlook.fraction_done
        row = {
            "update": trainer.num_updates + 1,
            "timesteps": trainer.num_decisions + run.steps_per_update,
            "fraction_done": fraction_done,
        }
        try:
            with cuttable():
                metrics, news = trainer.step(fraction_done)
                row |= metrics
                outlook = ranks.from_first(_outlook(trainer, host))
                if trainer.num_updates % run.evaluate_every == 0 or outlook.fraction_done >= 1.0:
                    found = ranks.from_first(host.evaluate(trainer.checkpoint()) if host else {})
                    row |= found
                    news += trainer.judged(found)
            alerts = trainer.monitor.check(row, fraction_done)
            _keep(trainer, host)
        except CutError:
            assert host is not None
            host.save()
            break
        except LostWorkerError:
            raise
        except (DivergedError, RatioError, WorkerError, SafetyError) as error:
            if host:
                host.failed(trainer.buffers.metrics() | row, error)
            raise
        row |= {"interventions": len(news), "alerts": len(alerts)} | trainer.monitor.metrics()
        if host:
            host.record(row, [*news, *alerts])
        if host and (trainer.num_updates % run.checkpoint_every == 0 or outlook.is_over):
            host.save()
    return trainer


def _keep(trainer: Trainer, host: Host | None) -> None:
    state = save(trainer)
    if host:
        host.keep(state, trainer.checkpoint())


def _outlook(trainer: Trainer, host: Host | None) -> Outlook:
    """Rank 0's is the one that counts."""
    return host.outlook(trainer.num_decisions) if host else Outlook(0.0, False)
