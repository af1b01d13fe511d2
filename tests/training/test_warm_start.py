from __future__ import annotations

import socket
import threading
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from pointsman.envs.entity import Step
from pointsman.errors import InputError
from pointsman.inference.checkpoint import NetworkSpec
from pointsman.training.networks import PolicyNetwork, build_network
from pointsman.training.ranks import Ranks
from pointsman.training.warm_start import (
    ActorShares,
    Classroom,
    Teachers,
    WarmStartSpec,
    choose_teachers,
    cross_entropy,
    enough_of,
    warm_start,
)
from pointsman.workers.peers import LinkedProcess

from .fakes import FakeEnv, FakeSpec

NUM_ENVS = 32
QUICK = WarmStartSpec(decisions=8000, learning_rate=1e-2, minibatch_size=128)


def make_student(env: FakeEnv, seed: int = 0, **fields: Any) -> PolicyNetwork:
    return build_network(NetworkSpec(**{"width": 16, "depth": 1, **fields}), env.space, seed)


def make_env() -> FakeEnv:
    return FakeEnv(FakeSpec(), NUM_ENVS)


def parameters(network: PolicyNetwork) -> bytes:
    return b"".join(tensor.numpy().tobytes() for tensor in network.state_dict().values())


class Divided(FakeEnv):
    """Two teachers, each good in one group and bad in the other."""

    def advise(self, teacher: int) -> NDArray[np.int64]:
        costs = np.where(np.isfinite(self._costs), self._costs, -np.inf)
        best, worst = self._costs.argmin(1) + 1, costs.argmax(1) + 1
        return np.where((self._num > 2) == bool(teacher), best, worst)


class Erratic(FakeEnv):
    """A teacher that has no reasons."""

    def advise(self, teacher: int) -> NDArray[np.int64]:
        return self._rng.integers(1, self._num + 1)


@pytest.mark.parametrize("kind", ["pooled", "attention", "attention+gru", "mlp"])
def test_the_student_does_as_the_teacher_on_episodes_it_never_saw(kind: str) -> None:
    env = make_env()
    _, metrics = warm_start(make_student(env, kind=kind), env, QUICK, 0, Ranks())
    assert metrics["clone_accuracy"] > (0.9 if kind == "mlp" else 0.95)
    assert 0 < metrics["clone_entropy_frac"] < 0.5  # sure of itself, but not deaf to anything else


def test_nothing_can_be_learned_from_a_teacher_without_reasons() -> None:
    env = Erratic(FakeSpec(), NUM_ENVS)
    _, metrics = warm_start(make_student(env), env, QUICK, 0, Ranks())
    assert metrics["clone_accuracy"] < 0.5


def test_accuracy_counts_only_real_choices() -> None:
    """Where one action is legal, agreeing is no merit."""

    class Forced(FakeEnv):
        def _draw(self) -> Any:
            seen = super()._draw()
            seen.action_mask[::2, 1:] = False
            seen.action_mask[::2, 0] = True
            return seen

        def advise(self, teacher: int) -> NDArray[np.int64]:
            advice = self._rng.integers(1, self._num + 1)
            advice[::2] = 0
            return advice

    env = Forced(FakeSpec(), NUM_ENVS)
    _, metrics = warm_start(make_student(env), env, QUICK, 0, Ranks())
    assert metrics["clone_accuracy"] < 0.5  # with the forced half it would be above 0.6


def test_each_group_follows_the_teacher_that_earns_most_there() -> None:
    env = Divided(FakeSpec(), NUM_ENVS)
    best = QUICK.model_copy(update={"best_by_group": True})
    teachers, metrics = warm_start(make_student(env), env, best, 0, Ranks())
    assert teachers.weights.tolist() == [[1, 0], [0, 1]]
    assert metrics["clone_accuracy/few"] > 0.95
    assert metrics["clone_accuracy/many"] > 0.9
    one_for_all, _ = warm_start(make_student(env), env, QUICK, 0, Ranks())
    assert one_for_all.weights.tolist() == [[1, 0], [1, 0]]


def test_a_scenario_that_is_there_twice_has_one_teacher() -> None:
    class Twice(Divided):
        groups = ("both", "both")

    spec = QUICK.model_copy(update={"best_by_group": True})
    first, second = choose_teachers(Twice(FakeSpec(), NUM_ENVS), spec, 0, Ranks()).weights.tolist()
    assert first == second


def test_only_named_teachers_are_tried() -> None:
    spec = WarmStartSpec(best_by_group=True, teachers={"first": 1.0}, trial_steps=8)
    teachers = choose_teachers(make_env(), spec, 0, Ranks())
    assert teachers.weights.tolist() == [[0, 1], [0, 1]]


def test_labels_come_from_each_teacher_by_its_weight() -> None:
    env = make_env()
    teachers = choose_teachers(env, WarmStartSpec(teachers={"cheapest": 1, "first": 3}), 0, Ranks())
    advice = np.array([[1] * 4000, [2] * 4000])
    luck = np.random.default_rng(0).random(4000)
    labels = teachers.pick(advice, np.zeros(4000, np.int64), luck)
    assert (labels == 2).mean() == pytest.approx(0.75, abs=0.02)
    assert (Teachers([[0, 1]]).pick(advice[1:], np.zeros(4000, np.int64), luck) == 2).all()


def test_a_label_is_of_the_group_the_decision_was_in() -> None:
    """Not of the episode before: groups are known only after the step."""
    env = Divided(FakeSpec(episode_steps=2), NUM_ENVS)
    classroom = Classroom(make_student(env), env, Teachers([[1, 0], [0, 1]]), 0)
    data = classroom.collect(ActorShares())
    costs = data.seen.entities[..., 0].masked_fill(~data.seen.entity_mask, np.inf)
    assert torch.equal(data.labels, costs.argmin(-1) + 1)


def test_students_teachers_and_chance_all_act() -> None:
    """By how often the cheapest is picked: always, or one time in as many as there are."""

    def hits(**shares: float) -> float:
        picked: list[float] = []

        class Watched(FakeEnv):
            def step(self, actions: NDArray[np.int64]) -> Step:
                picked.append(float((actions == self._costs.argmin(1) + 1).mean()))
                return super().step(actions)

        env = Watched(FakeSpec(), NUM_ENVS)
        actors = ActorShares(**{"student": 0, "teacher": 0, "chance": 0, **shares})
        Classroom(make_student(env), env, Teachers([[1, 0]] * 2), 0).collect(actors)
        return float(np.mean(picked))

    assert hits(teacher=1) == 1.0
    assert 0.3 < hits(chance=1) < 0.45  # of 2 to 4
    assert 0.2 < hits(student=1) < 0.4  # near-uniform at first, and it may hold
    assert 0.5 < hits(teacher=1, chance=1) < 0.85


def test_smoothed_cross_entropy_against_its_definition() -> None:
    rng = np.random.default_rng(0)
    mask = rng.random((50, 5)) < 0.6
    mask[:, 2] = True
    logits = torch.from_numpy(np.where(mask, rng.normal(size=(50, 5)), -1e9)).float()
    labels = torch.full((50,), 2)
    expected = 0.0
    for row, legal in zip(logits.double().numpy(), mask, strict=True):
        share = np.exp(row[legal]) / np.exp(row[legal]).sum()
        target = np.full(len(share), 0.1 / len(share))
        target[legal[:2].sum()] += 0.9
        expected -= float((target * np.log(share)).sum()) / 50
    ours = cross_entropy(logits, labels, torch.from_numpy(mask), 0.1)
    assert float(ours) == pytest.approx(expected, rel=1e-5)
    torch_own = torch.nn.functional.cross_entropy(logits, labels, label_smoothing=0.1)
    assert float(torch_own) > 1e6  # it smooths over illegal actions too


def test_hundreds_of_environments_are_not_all_begun_to_imitate() -> None:
    """With long prompts there are a hundred at each rank, and beginning them took most of five minutes."""
    section = {"kind": "tests.training.fakes"}
    few, many = (FakeEnv(FakeSpec(), num_envs) for num_envs in (64, 65))
    assert enough_of(few, section) is few
    assert enough_of(many, section).num_envs == 64  # 32 for each of its two groups


def test_same_seed_same_bytes_and_the_critic_is_left_alone() -> None:
    students = []
    spec = QUICK.model_copy(update={"decisions": 4000})
    for seed in (0, 0, 1):
        env = make_env()
        student = make_student(env)
        critic = [parameter.clone() for parameter in student.critic.parameters()]  # type: ignore[union-attr]
        warm_start(student, env, spec, seed, Ranks())
        assert all(map(torch.equal, student.critic.parameters(), critic))  # type: ignore[union-attr]
        assert all(parameter.grad is None for parameter in student.parameters())
        students.append(parameters(student))
    assert students[0] == students[1] != students[2]


def test_ranks_learn_the_same_from_their_own_environments() -> None:
    """Threads stand for processes: what they share is what `started` gives them."""
    mine, theirs = socket.socketpair()
    results: dict[int, tuple[bytes, dict[str, float]]] = {}

    def work(ranks: Ranks) -> None:
        env = make_env()
        student = make_student(env)
        _, metrics = warm_start(student, env, QUICK, seed=ranks.rank, ranks=ranks)
        results[ranks.rank] = parameters(student), metrics

    other = threading.Thread(target=work, args=(Ranks(1, 2, [LinkedProcess(theirs, "rank 0")]),))
    other.start()
    with mine, theirs:
        work(Ranks(0, 2, [LinkedProcess(mine, "rank 1")]))
        other.join()
    assert results[0] == results[1]
    assert results[0][1]["clone_accuracy"] > 0.95


@pytest.mark.parametrize(
    ("teachers", "message"),
    [({"oracle": 1.0}, "cheapest, first"), ({"first": 0.0}, "above 0"), ({"first": -1.0}, "above 0")],
)
def test_bad_teachers_are_named(teachers: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        choose_teachers(make_env(), WarmStartSpec(teachers=teachers), 0, Ranks())
