"""What may be done in the routing environment, and what its teachers advise."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pointsman.envs.entity import Observation
from pointsman.envs.routing import RoutingEnv
from pointsman.errors import InputError
from pointsman.routing.heuristics import HEURISTICS
from pointsman.routing.signals import DERIVED, SIGNAL_INDEX, SIGNALS

from .factories import CROWDED, any_legal, column, copy_of, make_env, same

IS_KEPT = np.array([signal.source != DERIVED for signal in SIGNALS])


def has_memory_and_room(env: RoutingEnv, i: int) -> tuple[list[bool], list[bool]]:
    """By the definition, from the router's own book-keeping."""
    clusters = env._clusters[i]
    assert clusters is not None
    signals = {name: clusters.signals[0][row] for name, row in SIGNAL_INDEX.items()}
    prompt = int(clusters.requests[0]["num_prefill"][env._sims["queue_head"][i]])
    rule = env.spec.hold
    already = signals["context_tokens"] + signals["pending_prefill_tokens"]
    grows = signals["expected_tokens"] >= 0.05 * already
    limit = np.where(grows, 1.0, 1.6) * rule.kv_limit * signals["kv_capacity_tokens"]
    is_idle = signals["outstanding"] == 0
    has_memory = is_idle | (already + prompt <= limit)
    has_room = is_idle | (has_memory & (signals["pending_prefill_tokens"] < rule.prefill_limit_tokens))
    return list(has_memory), list(has_room)


def test_holding_is_legal_only_while_no_replica_has_room() -> None:
    env = make_env(6, **CROWDED)
    rng = np.random.default_rng(0)
    seen = env.reset(0)
    num_held = num_sent = num_full = 0
    for _ in range(150):
        for i in range(env.num_envs):
            memory, room = has_memory_and_room(env, i)
            assert seen.action_mask[i, 0] == (not any(room))
            # Nothing is sent where memory is full; where only prompts wait, it may be.
            np.testing.assert_array_equal(seen.action_mask[i, 1 : 1 + len(room)], memory)
            num_full += memory.count(False)
            np.testing.assert_array_equal(column(seen, env, "has_room")[i, : len(room)], room)
        num_held += int(seen.action_mask[:, 0].sum())
        num_sent += int((~seen.action_mask[:, 0]).sum())
        seen = env.step(any_legal(seen, rng)).observation
    assert num_held > 50
    assert num_sent > 50
    assert num_full > 50


def test_holding_ends_after_max_hold_s() -> None:
    env = make_env(4, **CROWDED)
    seen = env.reset(0)
    env._sims["router"]["max_hold_s"] = 0.2
    num_overdue = 0
    for _ in range(300):
        waited_s = env._sims["now"] - [
            clusters.requests[0]["arrived_at"][head]  # type: ignore[union-attr]
            for clusters, head in zip(env._clusters, env._sims["queue_head"], strict=True)
        ]
        is_overdue = waited_s >= 0.2
        assert not seen.action_mask[is_overdue, 0].any()
        num_overdue += int(is_overdue.sum())
        # Hold whenever it is legal.
        seen = env.step(seen.action_mask.argmax(axis=1)).observation
    assert num_overdue > 20


def test_holding_can_be_switched_off() -> None:
    env = make_env(4, **CROWDED, hold={"allowed": False})
    rng = np.random.default_rng(0)
    seen = env.reset(0)
    for _ in range(100):
        assert not seen.action_mask[:, 0].any()
        seen = env.step(any_legal(seen, rng)).observation


def test_a_request_goes_only_where_its_first_token_is_due_soon() -> None:
    """Each episode draws how much later than at the soonest that may be; teachers keep to it as well."""
    env = make_env(8, detours_s=[0.05, None], decisions=40, teachers=[{"kind": "round-robin"}])
    free = make_env(8, decisions=40)
    rng = np.random.default_rng(0)
    seen, unlimited = env.reset(0), free.reset(0)
    drawn = set()
    num_forbidden = num_replaced = 0
    for _ in range(200):
        due_s = 2.0 * (np.exp2(column(seen, env, "backlog_after")[:, :4]) - 1.0)
        later_s = due_s - due_s.min(axis=1, keepdims=True)
        drawn |= set(env._own.rows.detour_s.tolist())
        is_soon = later_s <= env._own.rows.detour_s[:, None] + 1e-6
        np.testing.assert_array_equal(seen.action_mask[:, 1:5], is_soon)
        num_forbidden += int((~is_soon).sum())
        advice = env.advise(0)
        is_soonest = later_s[np.arange(8), advice - 1] == 0.0
        turns = advise_freely(env)
        is_replaced = advice != turns
        assert is_soonest[is_replaced].all() and not is_soon[is_replaced, turns[is_replaced] - 1].any()
        num_replaced += int(is_replaced.sum())
        seen = env.step(any_legal(seen, rng)).observation
    assert drawn == {0.05, np.inf} and num_forbidden > 50 and num_replaced > 5
    assert unlimited.action_mask[:, 1:5].all()
    assert (env.metadata["detour_s"], free.metadata["detour_s"]) == (0.05, None)


def advise_freely(env: RoutingEnv) -> NDArray[np.int64]:
    """What round-robin has just named, whether it may or not."""
    return np.array([memory.round_robin for memory in env._memories[0]])


def test_no_detour_ends_before_it_begins() -> None:
    with pytest.raises(InputError, match=r"env.detours_s = -1.*is not a time"):
        make_env(1, detours_s=[0.5, -1])
    with pytest.raises(InputError, match=r"env.detours_s = \[\]: is empty"):
        make_env(1, detours_s=[])


@pytest.mark.parametrize("action", [0, 5, 6, 7, -1, 1 << 40])
def test_illegal_actions_are_named_and_change_nothing(action: int) -> None:
    env = make_env(3, scenarios=["light-chat"], warmup_requests=0)
    before = copy_of(env.reset(0))
    with pytest.raises(InputError, match=rf"environment 1 = {action}: is not legal; legal: \[1, 2, 3, 4\]"):
        env.step(np.array([1, action, 1]))
    assert same(env._observation, before, *Observation._fields)


def test_an_action_beyond_a_full_cluster_is_not_taken_for_its_last_replica() -> None:
    env = make_env(1, scenarios=["light-chat"], warmup_requests=0, max_replicas=4)
    env.reset(0)
    for action in (5, 99):
        with pytest.raises(InputError, match="is not legal"):
            env.step(np.array([action]))
    env.step(np.array([4]))


def all_teachers() -> list[dict[str, Any]]:
    weights = {"linear-score": {"weights": {"outstanding": 1.0, "work_s": 0.1}}}
    return [{"kind": kind} | weights.get(kind, {}) for kind in HEURISTICS] + [{"kind": "default"}]


def everything(env: RoutingEnv) -> list[bytes]:
    """All that the clusters are, without what is derived anew at every decision."""
    parts = [env._sims.tobytes(), env._shadows.tobytes()]
    for clusters in env._clusters:
        assert clusters is not None
        tables = {id(signals) for signals in clusters.signals}
        parts += [array.tobytes() for array in clusters.sims._held if id(array) not in tables]
        parts += [signals[IS_KEPT].tobytes() for signals in clusters.signals]
    return parts


def test_advice_is_legal_and_changes_nothing() -> None:
    """Of every teacher, one that keeps credit or counts turns among them: not a byte of the clusters."""
    asked, left_alone = make_env(**CROWDED, teachers=all_teachers()), make_env(**CROWDED)
    rng = np.random.default_rng(0)
    seen, other = asked.reset(0), left_alone.reset(0)
    for _ in range(80):
        before = everything(asked)
        for teacher in range(len(asked.teachers)):
            advice = asked.advise(teacher)
            assert seen.action_mask[np.arange(4), advice].all()
            is_same = everything(asked) == before
            assert is_same, asked.teachers[teacher]
        actions = any_legal(seen, rng)
        seen, other = asked.step(actions).observation, left_alone.step(actions).observation
        assert same(seen, other, *Observation._fields)


@pytest.mark.parametrize("kind", ["round-robin", "weighted-round-robin", "random", "power-of-two"])
def test_a_teacher_goes_on_from_one_decision_to_the_next(kind: str) -> None:
    """It names one replica after the other, as it would if it routed itself."""
    env = make_env(2, scenarios=["light-chat"], teachers=[{"kind": kind}], decisions=1000)
    env.reset(0)
    advice = []
    for _ in range(400):
        advice.append(env.advise(0))
        env.step(advice[-1])
    named = np.array(advice)
    for i in range(2):
        shares = np.bincount(named[:, i], minlength=5)[1:5] / len(named)
        assert np.all(np.abs(shares - 0.25) < (0.02 if "robin" in kind else 0.1)), shares
        if "robin" in kind:
            assert (np.diff(named[:, i]) % 4 == 1).all()
    # Each episode begins at its beginning.
    first = named[:50].tolist()
    env.reset(0)
    again = []
    for _ in range(50):
        again.append(env.advise(0).tolist())
        env.step(np.array(again[-1]))
    assert again == first


def test_the_baseline_is_a_teacher() -> None:
    assert make_env(1).teachers == ("least-delay", "hold-until-room", "least-outstanding")
    assert make_env(1).baseline == "least-outstanding"
    env = make_env(1, teachers=[{"kind": "least-outstanding"}], shadow={"kind": "hold-until-room"})
    assert env.teachers == ("least-outstanding",)
