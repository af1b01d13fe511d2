"""Decisions on live books: who may be chosen, fair shares when little happens, policies that are broken."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from simulator.factories import make_policy

from pointsman.inference.checkpoint import load_checkpoint, save_checkpoint
from pointsman.routing.books import Ledger
from pointsman.routing.decider import HOLD, Decider, PolicyError
from pointsman.routing.heuristics import HEURISTICS
from pointsman.routing.sources import DEFAULT_CHECKPOINT

POLICIES = [kind for kind in HEURISTICS if kind not in ("linear-score", "vidur-lor")] + ["default"]


def make_ledger(num_replicas: int = 4) -> Ledger:
    ledger = Ledger(now=0.0)
    for k in range(num_replicas):
        ledger.add(f"replica {k}", None)
    return ledger


@pytest.mark.parametrize("policy", POLICIES)
def test_quiet_traffic_is_shared(policy: str) -> None:
    """Backends that answer at once, one request at a time: nobody gets more than 1.5 times its share."""
    ledger = make_ledger()
    decider = Decider(ledger, policy, seed=1)
    counts: Counter[int] = Counter()
    rng = np.random.default_rng(0)
    now = 0.0
    for _ in range(800):
        now += float(rng.exponential(0.1))
        action = decider.choose(int(rng.integers(10, 1000)), 0.0, 1, now)
        counts[action] += 1
        handle = ledger.sent(action - 1, 100, now)
        ledger.first_token(handle, now + float(rng.uniform(0.0005, 0.002)))
        ledger.tokens(handle, 1, now + 0.003)
        ledger.finished(handle, now + float(rng.uniform(0.004, 0.006)), 100, 2)
    assert counts[HOLD] == 0
    assert max(counts.values()) <= 1.5 * 800 / 4, counts


@pytest.mark.parametrize("policy", POLICIES)
def test_only_those_that_may_are_chosen(policy: str) -> None:
    ledger = make_ledger()
    ledger.remove(1)
    ledger.set_accepting(3, False)
    decider = Decider(ledger, policy)
    assert {decider.choose(100, 0.0, 1, 1.0) for _ in range(50)} <= {1, 3}
    assert {decider.choose(100, 0.0, 1, 1.0, excluded=[0, 3, 7]) for _ in range(20)} == {3}
    assert decider.choose(100, 0.0, 1, 1.0, excluded=[0, 2]) == HOLD
    assert {decider.choose(100, 0.0, 1, 1.0) for _ in range(50)} <= {1, 3}, "exclusion is for one decision"
    assert decider.choose(10**9, 0.0, 1, 1.0) in (1, 3), "it is for the server to refuse what is too long"
    ledger.set_accepting(3, True)
    added = ledger.add("new", None)
    assert added == 1
    seen = {decider.choose(100, 0.0, 1, 1.0 + n) for n in range(200)}
    assert seen <= {1, 2, 3, 4} and len(seen) > 1


def test_work_goes_to_the_replica_with_less_of_it() -> None:
    ledger = make_ledger()
    for slot in (0, 1, 3):
        for _ in range(20):
            ledger.first_token(ledger.sent(slot, 2000, 1.0), 1.5)
    for policy in ("default", "least-outstanding", "least-tokens", "least-work", "least-delay"):
        assert Decider(ledger, policy).choose(500, 0.0, 1, 2.0) == 3, policy


def test_a_request_is_held_while_nobody_has_room_and_not_for_ever() -> None:
    ledger = make_ledger(2)
    waiting = [ledger.sent(slot, 5000, 1.0) for slot in (0, 0, 1, 1)]
    for policy in ("hold-until-room", "late-binding"):
        decider = Decider(ledger, policy, max_hold_s=5.0)
        assert decider.choose(100, 0.0, 1, 2.0) == HOLD
        assert decider.choose(100, 5.1, 1, 7.1) != HOLD
    decider = Decider(ledger, "hold-until-room", max_hold_s=5.0)
    assert decider.choose(100, 0.5, 1, 2.5) == HOLD
    for handle in waiting[2:]:
        ledger.first_token(handle, 2.6)
    assert decider.choose(100, 0.7, 1, 2.7) == 2


def changed_default(folder: Path, name: str, value: float) -> Path:
    """The default policy with one of its arrays changed."""
    checkpoint = load_checkpoint(DEFAULT_CHECKPOINT)
    checkpoint.arrays[name][...] = value
    save_checkpoint(folder / "changed.safetensors", checkpoint)
    return folder / "changed.safetensors"


def test_a_learned_hold_stands_until_there_is_room(tmp_path: Path) -> None:
    holds = str(changed_default(tmp_path, "head.hold.bias", 1e6))
    ledger = make_ledger(2)
    assert Decider(ledger, holds).choose(100, 0.0, 1, 1.0) != HOLD, "not legal while there is room"
    waiting = [ledger.sent(slot, 5000, 1.0) for slot in (0, 0, 1, 1)]
    decider = Decider(ledger, holds, max_hold_s=5.0)
    assert decider.choose(100, 0.0, 1, 2.0) == HOLD
    before = decider.explain()["hold"]
    ledger.sent(0, 3000, 2.1)
    assert decider.choose(100, 0.5, 1, 2.5) == HOLD
    assert decider.explain()["hold"] == before, "the network was not asked again"
    assert decider.choose(100, 1.5, 1, 3.5) == HOLD
    assert decider.explain()["hold"] != before, "after a while it is"
    assert decider.choose(100, 5.1, 1, 7.1) != HOLD
    for handle in waiting[2:]:
        ledger.first_token(handle, 7.2)
    assert decider.choose(100, 0.0, 1, 7.3) == 2


def test_sessions_stay() -> None:
    decider = Decider(make_ledger(), "session-affinity")
    homes = {session: decider.choose(10, 0.0, 1, 1.0, session=session) for session in range(40)}
    assert len(set(homes.values())) == 4
    assert homes == {session: decider.choose(10, 0.0, 1, 2.0, session=session) for session in range(40)}


def test_two_policies_on_the_same_books_do_not_disturb_each_other() -> None:
    ledger = make_ledger()
    alone = Decider(ledger, "round-robin")
    turns = [alone.choose(10, 0.0, 1, 1.0) for _ in range(8)]
    both = Decider(ledger, "round-robin"), Decider(ledger, "round-robin")
    pairs = [tuple(decider.choose(10, 0.0, 1, 1.0) for decider in both) for _ in range(8)]
    assert pairs == [(turn, turn) for turn in turns] and len(set(turns)) == 4


def test_a_broken_policy_says_so(tmp_path: Path) -> None:
    path = changed_default(tmp_path, "head.score.weight", 3e38)  # finite, and too large to add up
    decider = Decider(make_ledger(), str(path))
    with pytest.raises(PolicyError, match="not finite"):
        decider.choose(100, 0.0, 1, 1.0)


@pytest.mark.parametrize("policy", ["default", "least-delay", "round-robin"])
def test_a_decision_is_explained(policy: str) -> None:
    ledger = make_ledger()
    ledger.first_token(ledger.sent(2, 500, 1.0), 1.5)
    decider = Decider(ledger, policy)
    action = decider.choose(300, 0.0, 1, 2.0)
    explained = decider.explain()
    assert explained["policy"] == policy and explained["action"] == action
    assert explained["replica"] == f"replica {action - 1}"
    busy = explained["replicas"][2]
    assert (busy["outstanding"], busy["context_tokens"]) == (1.0, 501.0)
    if policy == "default":
        assert all(one["is_legal"] and np.isfinite(one["logit"]) for one in explained["replicas"])
        assert explained["hold"]["is_legal"] is False
    if policy == "round-robin":
        assert all(one["is_legal"] and one["score"] is None for one in explained["replicas"])
    if policy == "least-delay":
        assert busy["score"] > min(one["score"] for one in explained["replicas"])


def test_weights_of_a_linear_score_are_read() -> None:
    ledger = make_ledger()
    ledger.first_token(ledger.sent(0, 500, 1.0), 1.5)
    policy = make_policy("linear-score", weights={"outstanding": -1.0})
    assert {Decider(ledger, policy).choose(10, 0.0, 1, 2.0) for _ in range(9)} == {1}
