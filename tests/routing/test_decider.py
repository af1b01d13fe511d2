"""Decisions on live books: who may be chosen, fair shares when little happens, policies that are broken."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulator.factories import make_policy

from pointsman.inference.checkpoint import load_checkpoint, save_checkpoint
from pointsman.routing.books import Books
from pointsman.routing.core import Request
from pointsman.routing.decider import HOLD, Decider, PolicyError
from pointsman.routing.heuristics import HEURISTICS
from pointsman.routing.signals import PREFILL_S_PER_TOKEN
from pointsman.routing.sources import DEFAULT_CHECKPOINT

from .asking import decide

POLICIES = [kind for kind in HEURISTICS if kind not in ("linear-score", "vidur-lor")] + ["default"]


def make_books(num_replicas: int = 4) -> Books:
    books = Books(now=0.0)
    for k in range(num_replicas):
        books.add(f"replica {k}", None)
    return books


@pytest.mark.parametrize("policy", POLICIES)
def test_quiet_traffic_is_shared(policy: str) -> None:
    """Backends that answer at once, one request at a time: nobody gets more than 1.5 times its share."""
    books = make_books()
    decider = Decider(books, policy, seed=1)
    counts: Counter[int] = Counter()
    rng = np.random.default_rng(0)
    now = 0.0
    for _ in range(800):
        now += float(rng.exponential(0.1))
        action = decide(decider, int(rng.integers(10, 1000)), now)
        counts[action] += 1
        ticket = books.sent(action - 1, 100, now)
        books.first_token(ticket, now + float(rng.uniform(0.0005, 0.002)))
        books.tokens(ticket, 1, now + 0.003)
        books.finished(ticket, now + float(rng.uniform(0.004, 0.006)), 100, 2)
    assert counts[HOLD] == 0
    assert max(counts.values()) <= 1.5 * 800 / 4, counts


@pytest.mark.parametrize("policy", POLICIES)
def test_only_those_that_may_are_chosen(policy: str) -> None:
    books = make_books()
    books.remove(1)
    books.set_accepting(3, False)
    decider = Decider(books, policy)
    assert {decide(decider, 100, 1.0) for _ in range(50)} <= {1, 3}
    assert {decide(decider, 100, 1.0, excluded=[0, 3, 7]) for _ in range(20)} == {3}
    assert decide(decider, 100, 1.0, excluded=[0, 2]) == HOLD
    assert {decide(decider, 100, 1.0) for _ in range(50)} <= {1, 3}, "exclusion is for one decision"
    assert decide(decider, 10**9, 1.0) in (1, 3), "it is for the server to refuse what is too long"
    books.set_accepting(3, True)
    added = books.add("new", None)
    assert added == 1
    seen = {decide(decider, 100, 1.0 + n) for n in range(200)}
    assert seen <= {1, 2, 3, 4} and len(seen) > 1


def test_work_goes_to_the_replica_with_less_of_it() -> None:
    books = make_books()
    for slot in (0, 1, 3):
        for _ in range(20):
            books.first_token(books.sent(slot, 2000, 1.0), 1.5)
    for policy in ("default", "least-outstanding", "least-tokens", "least-work", "least-delay"):
        assert decide(Decider(books, policy), 500, 2.0) == 3, policy


@given(
    waiting=st.lists(st.integers(0, 3000), min_size=2, max_size=6),
    prompt=st.integers(1, 6000),
    detour_s=st.sampled_from([0.0, 0.02, 0.1, 0.4]),
)
@settings(max_examples=60, deadline=None)
def test_a_detour_is_never_longer_than_it_may_be(waiting: list[int], prompt: int, detour_s: float) -> None:
    """Waiting prompts and its own, at the calibrated time of a token: nobody is chosen that takes longer."""
    books = make_books(len(waiting))
    for slot, tokens in enumerate(waiting):
        books.first_token(books.sent(slot, 100, 0.5), 0.6)
        if tokens:
            books.sent(slot, tokens, 1.0)
    s_per_token = float(books.signals[PREFILL_S_PER_TOKEN, 0])
    allowed = {
        slot + 1
        for slot, tokens in enumerate(waiting)
        if (tokens - min(waiting)) * s_per_token <= detour_s + 1e-9
    }
    assert decide(Decider(books, f"default-mean:{detour_s}s", seed=1), prompt, 1.1) in {HOLD, *allowed}


@pytest.mark.parametrize("policy", ["default", "late-binding", "round-robin"])
@pytest.mark.parametrize("shadow", [kind for kind in POLICIES if kind != "default"])
def test_a_shadow_that_is_taken_along_says_what_it_would_say_alone(policy: str, shadow: str) -> None:
    """And the policy decides as it does without one. Servers come and go, some are left out."""
    books = make_books(3)
    alone, other_alone = Decider(books, policy, seed=1), Decider(books, shadow, seed=2)
    decider, other = Decider(books, policy, seed=1), Decider(books, shadow, seed=2)
    decider.take_along(other)
    rng = np.random.default_rng(0)
    tickets: list[int] = []
    said = Counter[int]()
    for number in range(300):
        now = 1.0 + 0.01 * number
        if number == 100:
            books.add("one more", None)
        elif number == 200:
            books.remove(1)
        tokens, session = int(rng.integers(10, 3000)), int(rng.integers(-1, 20))
        excluded = [0] if number % 7 == 0 else []
        asked = [decide(one, tokens, now, session=session, excluded=excluded) for one in (alone, other_alone)]
        assert decide(decider, tokens, now, session=session, excluded=excluded) == asked[0]
        assert decider.shadow_action == asked[1]
        said[asked[1]] += 1
        if asked[0] != HOLD:
            tickets.append(books.sent(asked[0] - 1, tokens, now))
            books.first_token(tickets[-1], now)
        while len(tickets) > 20 or (tickets and asked[0] == HOLD):
            books.finished(tickets.pop(0), now, None, 5)
    assert len(said) > 2


def test_a_request_is_held_while_nobody_has_room_and_not_for_ever() -> None:
    books = make_books(2)
    waiting = [books.sent(slot, 5000, 1.0) for slot in (0, 0, 1, 1)]
    for policy in ("hold-until-room", "late-binding"):
        decider = Decider(books, policy, max_hold_s=5.0)
        assert decide(decider, 100, 2.0) == HOLD
        assert decide(decider, 100, 7.1, waited_s=5.1) != HOLD
    decider = Decider(books, "hold-until-room", max_hold_s=5.0)
    assert decide(decider, 100, 2.5, waited_s=0.5) == HOLD
    for ticket in waiting[2:]:
        books.first_token(ticket, 2.6)
    assert decide(decider, 100, 2.7, waited_s=0.7) == 2


def changed_default(folder: Path, name: str, value: float) -> Path:
    """The default policy with one of its arrays changed."""
    checkpoint = load_checkpoint(DEFAULT_CHECKPOINT)
    checkpoint.arrays[name][...] = value
    save_checkpoint(folder / "changed.safetensors", checkpoint)
    return folder / "changed.safetensors"


def test_a_learned_hold_stands_until_there_is_room(tmp_path: Path) -> None:
    holds = str(changed_default(tmp_path, "head.hold.bias", 1e6))
    books = make_books(2)
    assert decide(Decider(books, holds), 100, 1.0) != HOLD, "not legal while there is room"
    waiting = [books.sent(slot, 5000, 1.0) for slot in (0, 0, 1, 1)]
    decider = Decider(books, holds, max_hold_s=5.0)
    request = Request(100, arrived_at=2.0)
    assert decider.decide(request, 1, 2.0) == HOLD
    before = decider.explain()["hold"]
    books.sent(0, 3000, 2.1)
    assert decider.decide(request, 1, 2.5) == HOLD
    assert decider.explain()["hold"] == before, "the network was not asked again"
    assert decider.decide(request, 1, 3.5) == HOLD
    assert decider.explain()["hold"] != before, "after a while it is"
    assert decider.decide(request, 1, 7.1) != HOLD
    for ticket in waiting[2:]:
        books.first_token(ticket, 7.2)
    assert decide(decider, 100, 7.3) == 2


def test_sessions_stay() -> None:
    decider = Decider(make_books(), "session-affinity")
    homes = {session: decide(decider, 10, 1.0, session=session) for session in range(40)}
    assert len(set(homes.values())) == 4
    assert homes == {session: decide(decider, 10, 2.0, session=session) for session in range(40)}


def test_two_policies_on_the_same_books_do_not_disturb_each_other() -> None:
    books = make_books()
    alone = Decider(books, "round-robin")
    turns = [decide(alone, 10, 1.0) for _ in range(8)]
    both = Decider(books, "round-robin"), Decider(books, "round-robin")
    pairs = [tuple(decide(decider, 10, 1.0) for decider in both) for _ in range(8)]
    assert pairs == [(turn, turn) for turn in turns] and len(set(turns)) == 4


def test_a_broken_policy_says_so(tmp_path: Path) -> None:
    path = changed_default(tmp_path, "head.score.weight", 3e38)  # finite, and too large to add up
    decider = Decider(make_books(), str(path))
    with pytest.raises(PolicyError, match="not finite"):
        decide(decider, 100, 1.0)


@pytest.mark.parametrize("policy", ["default", "least-delay", "round-robin"])
def test_a_decision_is_explained(policy: str) -> None:
    books = make_books()
    books.first_token(books.sent(2, 500, 1.0), 1.5)
    decider = Decider(books, policy)
    action = decide(decider, 300, 2.0)
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
    books = make_books()
    books.first_token(books.sent(0, 500, 1.0), 1.5)
    policy = make_policy("linear-score", weights={"outstanding": -1.0})
    assert {decide(Decider(books, policy), 10, 2.0) for _ in range(9)} == {1}
