"""What the routing environment shows, a router could know."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pointsman.envs import routing
from pointsman.envs.entity import Observation
from pointsman.errors import InputError

from .factories import POLICY_SEES, any_legal, column, copy_of, make_env, same


@pytest.mark.parametrize("scenario", ["tight-memory", "mixed-hardware"])
@pytest.mark.parametrize("which", ["running", "to come"])
def test_true_lengths_show_only_when_requests_end(which: str, scenario: str) -> None:
    """Lengthen requests in one of two equal runs: a router sees no difference until the first of them would
    have ended. The critic's part does show it, so the change is real. Requests in the system show what is
    read while they run, those to come also what is noted when they are placed."""
    whole, longer = (make_env(1, scenarios=[scenario], warmup_requests=1000) for _ in range(2))
    seen, also = whole.reset(5), longer.reset(5)
    assert same(seen, also, *Observation._fields)
    clusters = longer._clusters[0]
    assert clusters is not None
    requests, sim = clusters.requests[0], longer._sims[0]
    is_here = requests["arrived_at"] <= sim.now
    # Short ones, or those about to end, would leave nothing to compare.
    is_long = requests["num_decode"] > 200
    if which == "running":
        chosen = is_here & is_long & (requests["completed_at"] < 0) & (requests["arrived_at"] > sim.now - 2.0)
        assert (requests["first_token_at"][chosen] >= 0).any()
    else:
        chosen = ~is_here & is_long
    changed = np.flatnonzero(chosen)
    assert len(changed) > 3
    requests["num_decode"][changed] += 400
    if which == "running":
        requests["limit"][changed] += 400  # noted by its replica when it came
        sim.num_decode_left += 400 * len(changed)  # counted on arrival

    rng = np.random.default_rng(0)
    num_same, is_critic_told = 0, False
    first_end = np.inf
    for _ in range(400):
        actions = any_legal(seen, rng)
        seen, also = copy_of(whole.step(actions).observation), longer.step(actions).observation
        original = whole._clusters[0].requests[0]  # type: ignore[union-attr]
        ends = original["completed_at"][changed]
        first_end = min([first_end, *ends[ends >= 0]])
        if whole._sims["now"][0] >= first_end:
            break
        assert same(seen, also, *POLICY_SEES)
        num_same += 1
        is_critic_told |= not same(seen, also, "privileged")
    assert num_same > 10
    assert is_critic_told
    # Once they end in one run and not in the other, it shows.
    for _ in range(100):
        actions = any_legal(seen, rng)
        seen, also = copy_of(whole.step(actions).observation), longer.step(actions).observation
        if not same(seen, also, "entities"):
            return
    pytest.fail("requests that ended and others that did not look the same")


def test_replicas_have_no_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same cluster with its replicas in another order shows the same rows in that order."""
    order = np.array([2, 0, 3, 1])
    plain = make_env(1, scenarios=["mixed-hardware"], warmup_requests=0)
    first = copy_of(plain.reset(2))
    draw = routing.draw

    def shuffled(*arguments: Any) -> Any:
        one = draw(*arguments)
        return replace(one, plans=[one.plans[k] for k in order])

    monkeypatch.setattr(routing, "draw", shuffled)
    other = make_env(1, scenarios=["mixed-hardware"], warmup_requests=0)
    second = other.reset(2)
    assert first.entities.shape[1] >= len(order)
    rng = np.random.default_rng(0)
    place = np.argsort(order)  # where a replica of the first cluster stands in the second
    for _ in range(150):
        np.testing.assert_allclose(second.entities[0, :4], first.entities[0, order], atol=1e-5)
        np.testing.assert_allclose(second.context, first.context, atol=1e-5)
        assert second.action_mask[0, 1:5].tolist() == first.action_mask[0, 1 + order].tolist()
        action = any_legal(first, rng)
        moved = np.where(action > 0, place[action - 1] + 1, 0)
        first, second = copy_of(plain.step(action).observation), other.step(moved).observation
    with pytest.raises(AssertionError):  # replicas differ, so the order matters
        np.testing.assert_allclose(second.entities[0, :4], first.entities[0, :4], atol=1e-5)


def test_padding_is_empty_and_never_legal() -> None:
    env = make_env(scenarios=["steady-chat", "mixed-hardware"])
    rng = np.random.default_rng(0)
    seen = env.reset(0)
    for _ in range(50):
        assert seen.entity_mask.tolist() == [[True] * 4 + [False] * 2] * 4
        assert not seen.entities[:, 4:].any()
        assert not seen.action_mask[:, 5:].any()
        assert seen.entities[:, :4].any(axis=2).all()
        seen = env.step(any_legal(seen, rng)).observation


def test_padding_follows_the_number_of_replicas_from_episode_to_episode() -> None:
    env = make_env(1, scenarios=["random"], decisions=2, warmup_requests=40, difficulty={"max_replicas": 6})
    rng = np.random.default_rng(0)
    seen = env.reset(0)
    sizes = set()
    for _ in range(24):
        size = int(seen.entity_mask[0].sum())
        sizes.add(size)
        assert seen.entity_mask[0].tolist() == [k < size for k in range(6)]
        assert not seen.entities[0, size:].any()
        assert not seen.action_mask[0, size + 1 :].any()
        seen = env.step(any_legal(seen, rng)).observation
    assert len(sizes) > 2
    assert min(sizes) >= 2


def test_features_switched_off_read_zero_and_others_do_not() -> None:
    env, ablated = make_env(), make_env(features_off=["trend", "hint"])
    seen, dark = env.reset(0), ablated.reset(0)
    for features, bright, off in (
        (env.space.entity_features, seen.entities, dark.entities),
        (env.space.context_features, seen.context, dark.context),
    ):
        for i, feature in enumerate(features):
            expected = 0.0 if feature.group in ("trend", "hint") else bright[..., i]
            np.testing.assert_array_equal(off[..., i], np.broadcast_to(expected, off[..., i].shape))
    assert column(seen, env, "step_excess").any()
    with pytest.raises(InputError, match="unknown feature group"):
        make_env(features_off=["trends"])
