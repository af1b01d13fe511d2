"""Where learning starts from: imitation (the network learns to do as heuristics do), or a policy there is.

Each round, N environments make T decisions, and the teacher says at every one what it would have done. Who
acts is drawn anew for each environment and round: the student, the teacher, or chance. A stretch of chance
leads into imbalanced states, from which the next round shows the way back; the student's own stretches lead
where its mistakes lead (DAgger, Ross et al. 2011). As the simulator gives new data for nothing, a round is
used and dropped.

The clone is judged on new episodes that it routes itself, by how often it does what its teacher would. What
differs from a teacher who breaks ties at random is no mistake, but counts as one. So it is also judged by
what it earns, drawn and by arg-max, beside its teacher.

Letters: T steps, N environments, A actions, G groups, K teachers.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from pydantic import Field
from torch import Tensor

from pointsman.envs.entity import EntityEnv, Observation
from pointsman.errors import InputError
from pointsman.evaluation.problem import make_env
from pointsman.inference.checkpoint import Checkpoint, load_checkpoint
from pointsman.routing.policy import PolicySpec
from pointsman.routing.sources import SHIPPED, is_path
from pointsman.spec import Spec, parse_spec
from pointsman.training.buffers import Buffers
from pointsman.training.flat import Adam, FlatGradients
from pointsman.training.headroom import Choose, at_random, by_teacher, play
from pointsman.training.losses import entropy_of, policy_logp
from pointsman.training.minibatches import shuffled, shuffled_sequences
from pointsman.training.networks import PolicyNetwork, TensorObservation
from pointsman.training.passes import make_pass
from pointsman.training.ranks import Ranks
from pointsman.training.recorded import RecordedEnv

ROUND_STEPS = 64  # T of a round
MAX_ENVS = 32  # a group, at each rank
SEQUENCE_LENGTH = 16  # of recurrent networks
MAX_GRAD_NORM = 1.0
ADAM_EPS = 1e-8
NEAR_UNIFORM = 0.9  # entropy, as a share of the most there can be
# What a warm start tells of rewards, and in which words.
EARNED = {
    "teacher_reward_per_s": "teacher",
    "clone_reward_per_s": "clone",
    "clone_argmax_reward_per_s": "its arg-max",
}


class ActorShares(Spec):
    """Who acts while decisions are labelled, and in which proportions."""

    student: float = Field(default=0.5, ge=0)
    teacher: float = Field(default=0.3, ge=0)
    chance: float = Field(default=0.2, ge=0)


class WarmStartSpec(Spec):
    teachers: dict[str, float] = Field(
        default={}, description="weights of the heuristics to imitate; empty: the first of env.teachers"
    )
    best_by_group: bool = Field(
        default=False,
        description="in each group of episodes imitate the one teacher that earns most there, by trial; "
        "weights above 0 say who is tried, none: all of env.teachers",
    )
    trial_steps: int = Field(default=256, ge=1, description="decisions of an environment in such a trial")
    decisions: int = Field(default=100_000, ge=1, description="to label, of all workers together")
    actors: ActorShares = ActorShares()
    num_epochs: int = Field(default=2, ge=1, description="passes over the decisions of a round")
    minibatch_size: int = Field(default=512, ge=1, description="decisions a gradient step, about")
    learning_rate: float = Field(default=5e-3, gt=0, description="of Adam at first; falls to a twentieth")
    smoothing: float = Field(
        default=0.02,
        ge=0,
        lt=1,
        description="share of a label spread over all legal actions: room to explore",
    )


class Teachers:
    """Which teachers to imitate in which group: weights [G, K], each row summing to 1."""

    def __init__(self, weights: ArrayLike = ((),)) -> None:
        self.weights = np.asarray(weights, np.float64)
        self._used = np.flatnonzero(self.weights.any(axis=0))

    def advise(self, env: EntityEnv | RecordedEnv) -> NDArray[np.int64]:
        """[used, N] what each teacher with a weight would do now."""
        return np.stack([env.advise(int(teacher)) for teacher in self._used])

    def pick(
        self, advice: NDArray[np.int64], groups: NDArray[np.int64], chance: NDArray[np.float64]
    ) -> NDArray[np.int64]:
        """[N] one label for each environment from `advice`; groups [N], chance [N] uniform in [0, 1)."""
        shares = self.weights[groups][:, self._used].cumsum(axis=1)  # [N, used]
        drawn = (shares <= chance[:, None] * shares[:, -1:]).sum(axis=1)
        labels: NDArray[np.int64] = advice[drawn, np.arange(len(groups))]
        return labels


def choose_teachers(env: EntityEnv, spec: WarmStartSpec, seed: int, ranks: Ranks) -> Teachers:
    """Weights as configured, or all on the one that earns most per second in each group."""
    names = list(env.teachers)
    unknown = [name for name in spec.teachers if name not in names]
    if unknown:
        remedy = f"env.teachers has: {', '.join(names)}"
        raise InputError("warm_start.teachers", unknown[0], "is not a teacher of the environment", remedy)
    if not names:
        raise InputError(
            "env.teachers", names, "nobody to imitate", "name a heuristic, or switch warm_start off"
        )
    given = [spec.teachers.get(name, 0.0) for name in names]
    if min(given) < 0 or (spec.teachers and sum(given) <= 0):
        raise InputError("warm_start.teachers", spec.teachers, "weights must be above 0", "correct them")
    num_groups = len(env.groups)
    if not spec.best_by_group:
        row = np.array(given) if spec.teachers else np.eye(len(names))[0]
        return Teachers(np.tile(row / row.sum(), (num_groups, 1)))
    candidates = [k for k in range(len(names)) if not spec.teachers or given[k] > 0]
    earned = np.full((num_groups, len(names)), -np.inf)
    for k in candidates:
        result = play(env, by_teacher(env, k), spec.trial_steps, seed, ranks)
        earned[:, k] = np.nan_to_num([result.per_second(group) for group in range(num_groups)], nan=0.0)
    for name in set(env.groups):  # a scenario that is there twice has one teacher
        same = [group for group in range(num_groups) if env.groups[group] == name]
        earned[same] = earned[same].mean(axis=0)
    return Teachers(np.eye(len(names))[earned.argmax(axis=1)])


class Round(NamedTuple):
    """T decisions of N environments: `seen` [T, N, ...], and whose they are."""

    seen: TensorObservation
    labels: Tensor  # [T, N]
    groups: Tensor  # [T, N]
    is_start: Tensor  # [T, N]
    states: Tensor | None  # [T, N, width] recurrent networks: before each decision


class Classroom:
    """Environments with a student and its teachers in them."""

    def __init__(self, network: PolicyNetwork, env: EntityEnv, teachers: Teachers, seed: int) -> None:
        self.network, self.env, self.teachers = network, env, teachers
        state = network.initial_state(env.num_envs)
        width = 0 if state is None else state.shape[1]
        self.buffers = Buffers(ROUND_STEPS, env.num_envs, env.space, width)
        # As of the last step; whoever acts as teacher in a new episode may be the wrong one once.
        self.groups: NDArray[np.int64] = np.zeros(env.num_envs, np.int64)
        self.rng = np.random.default_rng(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.enter(seed)

    def enter(self, seed: int) -> None:
        """New episodes everywhere."""
        self.observation = self.env.reset(seed)
        self.state = self.network.initial_state(self.env.num_envs)
        self.is_start: NDArray[np.bool_] = np.ones(self.env.num_envs, np.bool_)

    @torch.no_grad()
    def earned(self, seed: int, ranks: Ranks) -> dict[str, float]:
        """Reward per second from the same states: of the teachers, of what the student draws, its arg-max."""
        decide, rng = make_pass(self.network).policy(), np.random.default_rng(seed)

        def taught(observation: Observation) -> NDArray[np.int64]:
            return self.teachers.pick(
                self.teachers.advise(self.env), self.groups, rng.random(self.env.num_envs)
            )

        def by_student(is_drawn: bool) -> Choose:
            state = self.network.initial_state(self.env.num_envs)

            def choose(observation: Observation) -> NDArray[np.int64]:
                nonlocal state
                seen = self.buffers.see(0, observation)
                made = decide(seen, state, 1.0, 0.0, rng.random(self.env.num_envs))
                state = made.state
                return made.actions if is_drawn else made.greedy_actions

            return choose

        ways = zip(EARNED, (taught, by_student(True), by_student(False)), strict=True)
        return {name: play(self.env, way, ROUND_STEPS, seed, ranks).per_second() for name, way in ways}

    @torch.no_grad()
    def collect(self, shares: ActorShares) -> Round:
        """T decisions, each environment under one actor, every one labelled by its teacher."""
        buffers, env = self.buffers, self.env
        buffers.clear()
        weights = np.array([shares.student, shares.teacher, shares.chance])
        actor = self.rng.choice(3, env.num_envs, p=weights / weights.sum())
        by_chance = at_random(int(self.rng.integers(1 << 32)))
        buffers.is_start[0] = self.is_start
        decide = make_pass(self.network).policy()
        for t in range(buffers.num_steps):
            seen = buffers.see(t, self.observation)
            if buffers.states is not None:
                assert self.state is not None
                buffers.states[t] = self.state
            own, _, _, state = decide(seen, self.state, 1.0, 0.0, self.rng.random(env.num_envs))
            advice, luck = self.teachers.advise(env), self.rng.random(env.num_envs)
            taught = self.teachers.pick(advice, self.groups, luck)
            step = env.step(np.choose(actor, (own, taught, by_chance(self.observation))))
            # Only now the group of a new episode is known for sure.
            buffers.teacher_actions[t] = self.teachers.pick(advice, step.groups, luck)
            buffers.record(t, step, state)
            self.observation, self.groups = step.observation, step.groups
            if state is not None:
                self.state = state.masked_fill(torch.from_numpy(buffers.is_start[t + 1])[:, None], 0.0)
        self.is_start = buffers.is_start[-1].copy()
        return Round(
            TensorObservation(*(tensor[:-1] for tensor in buffers.observation)),
            torch.from_numpy(buffers.teacher_actions),
            torch.from_numpy(buffers.groups),
            torch.from_numpy(buffers.is_start[:-1]),
            None if buffers.states is None else buffers.states[:-1],
        )


def policies_in(start_from: str) -> list[str]:
    """`A,B`: each of them; a path may have commas."""
    return [start_from] if Path(start_from).expanduser().exists() else start_from.split(",")


def find_policy(policy: str, where: str = "run.start_from") -> Checkpoint:
    """Load `default`, the best policy of a run directory, or a checkpoint."""
    remedy = "name `default`, a run or a checkpoint"
    try:
        path = parse_spec(PolicySpec, {"kind": policy}, where).checkpoint
    except InputError as error:  # it speaks of a policy, and of heuristics that there are
        is_named = is_path(policy) or Path(policy).expanduser().exists()
        near = difflib.get_close_matches(policy, SHIPPED, n=1)
        remedy = error.remedy if is_named else f"did you mean {near[0]!r}?" if near else remedy
        raise InputError(where, policy, error.problem, remedy) from None
    if path is None:
        raise InputError(where, policy, "was not trained", remedy)
    return load_checkpoint(path, where)


def take_over(network: PolicyNetwork, policy: str) -> None:
    """Make the network this policy, critic and scales included."""
    checkpoint = find_policy(policy).widened(network.space)
    arrays = {name: torch.from_numpy(array) for name, array in checkpoint.arrays.items()}
    mine = {name: tensor.shape for name, tensor in network.state_dict().items()}
    if checkpoint.network.kind != network.spec.kind or mine != {k: v.shape for k, v in arrays.items()}:
        remedy = "leave out `network`: it is taken from the policy"
        raise InputError("run.start_from", policy, "has another network", remedy)
    network.load_state_dict(arrays)


def enough_of(env: EntityEnv, section: Mapping[str, Any]) -> EntityEnv:
    """`env`, made of `section`, or fewer of its kind. Where lives are long there are hundreds, so that an
    update has its decisions; here they begin a dozen times, which would take longer than the training."""
    most = MAX_ENVS * len(env.groups)
    return env if env.num_envs <= most else make_env(section, most)


def warm_start(
    network: PolicyNetwork, env: EntityEnv, spec: WarmStartSpec, seed: int, ranks: Ranks
) -> tuple[Teachers, dict[str, float]]:
    """Train the network to do as the teachers do; returns them, and how well it went."""
    choosing, training, judging = (int(s) for s in np.random.SeedSequence(seed).generate_state(3))
    teachers = choose_teachers(env, spec, choosing, ranks)
    classroom = Classroom(network, env, teachers, training)
    num_rounds = max(1, round(spec.decisions / (ROUND_STEPS * env.num_envs * ranks.size)))
    optimizer, flat = Adam(network, ADAM_EPS), FlatGradients(network)
    loss = float("nan")
    for index in range(num_rounds):
        learning_rate = spec.learning_rate * 0.05 ** (index / num_rounds)
        data = classroom.collect(spec.actors)
        network.observe(data.seen.flatten(), ranks.total)
        loss = _learn(network, optimizer, flat, learning_rate, data, spec, classroom.generator, ranks)
    network.zero_grad(set_to_none=True)
    classroom.enter(judging)
    metrics = _judge(network, classroom.collect(ActorShares(student=1, teacher=0, chance=0)), env, ranks)
    return teachers, {"clone_loss": loss, **metrics, **classroom.earned(judging, ranks)}


def doubt(metrics: Mapping[str, float]) -> str | None:
    """What to know of a clone that cannot tell what its teacher would do; None of one that can.

    Teachers that take turns or draw lots give no reasons, so the clone is near-uniform. Drawn from, it does
    as they do. Its arg-max, which evaluations and serving take, follows whatever slight preference is left.
    """
    if metrics.get("clone_entropy_frac", 0.0) < NEAR_UNIFORM:
        return None
    figures = ", ".join(f"{what} {metrics[name]:.3g}" for name, what in EARNED.items() if name in metrics)
    return (
        f"the clone is near-uniform (entropy {metrics['clone_entropy_frac']:.2f} of the maximum): sampling "
        "from it imitates its teacher, but its arg-max, which evaluations use, follows slight preferences "
        f"(reward per second: {figures})"
    )


def _learn(
    network: PolicyNetwork,
    optimizer: Adam,
    flat: FlatGradients,
    learning_rate: float,
    data: Round,
    spec: WarmStartSpec,
    generator: torch.Generator,
    ranks: Ranks,
) -> float:
    """A few passes over a round; returns the mean loss of the last [nats], over all ranks."""
    losses: list[float] = []
    for _ in range(spec.num_epochs):
        losses.clear()
        for logits, labels, mask in _minibatches(network, data, spec.minibatch_size // ranks.size, generator):
            loss = cross_entropy(logits, labels, mask, spec.smoothing)
            flat.gradients.zero_()
            torch.autograd.backward(loss)
            ranks.average_tensor_(flat.gradients)
            flat.clip(MAX_GRAD_NORM)
            optimizer.step(flat.gradients, learning_rate)
            losses.append(float(loss.detach()))
    return float(np.mean(ranks.gather(np.mean(losses))))


def _minibatches(
    network: PolicyNetwork, data: Round, size: int, generator: torch.Generator
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Logits, labels and legal actions of every decision once, in random parts."""
    flat, labels = data.seen.flatten(), data.labels.flatten()
    num_steps, num_envs = data.labels.shape
    if data.states is None:
        for index in shuffled(len(labels), max(1, size), generator):
            rows = flat.rows(index)
            yield network.act(rows)[0], labels[index], rows.action_mask
        return
    states = data.states.flatten(0, 1)
    for index in shuffled_sequences(num_steps, num_envs, SEQUENCE_LENGTH, size, generator):
        rows = flat.rows(index)  # [length, M, ...]
        output = network.forward_sequence(rows, states[index[0]], data.is_start.flatten()[index])
        yield output.logits.flatten(0, 1), labels[index].flatten(), rows.action_mask.flatten(0, 1)


def cross_entropy(logits: Tensor, labels: Tensor, mask: Tensor, smoothing: float) -> Tensor:
    """[] of labels [B] that leave a share `smoothing` to all legal actions evenly; logits, mask [B, A]."""
    logp = policy_logp(logits, 1.0)
    told = logp.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    if smoothing == 0.0:
        return -told.mean()
    # Illegal actions have a log-probability of -1e9, which must not enter the sum.
    even = torch.where(mask, logp, 0.0).sum(-1) / mask.sum(-1)
    return -((1.0 - smoothing) * told + smoothing * even).mean()


@torch.no_grad()
def _judge(network: PolicyNetwork, data: Round, env: EntityEnv, ranks: Ranks) -> dict[str, float]:
    """Agreement with the teachers where there was a choice: overall, and by group."""
    output = network.forward_sequence(
        data.seen, data.states[0] if data.states is not None else None, data.is_start
    )
    logp = policy_logp(output.logits, 1.0)
    num_legal = data.seen.action_mask.sum(-1)
    is_choice = num_legal > 1
    agrees = (logp.argmax(-1) == data.labels) & is_choice
    entropy = entropy_of(logp) / num_legal.clamp(min=2).float().log()
    num_groups = len(env.groups)
    groups = data.groups[is_choice]
    totals = torch.stack(
        (
            torch.bincount(groups, minlength=num_groups).double(),
            torch.bincount(groups, agrees[is_choice].double(), minlength=num_groups),
            torch.bincount(groups, entropy[is_choice].double(), minlength=num_groups),
        )
    )
    counts, agreed, entropies = ranks.total(totals).numpy()
    metrics = {
        "clone_accuracy": float(agreed.sum() / max(counts.sum(), 1.0)),
        "clone_entropy_frac": float(entropies.sum() / max(counts.sum(), 1.0)),
    }
    if num_groups > 1:
        metrics |= {
            f"clone_accuracy/{name}": float(agreed[i] / counts[i])
            for i, name in enumerate(env.groups)
            if counts[i] > 0
        }
    return metrics
