"""The environment is fair and honest: what it pays adds up, and what it shows a router could know."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from simulator.factories import GuardedClusters

from pointsman.envs import routing
from pointsman.envs.entity import Observation
from pointsman.envs.routing import RoutingEnv
from pointsman.errors import InputError
from pointsman.routing.heuristics import HEURISTICS
from pointsman.routing.policy import PolicySpec, PolicyTables
from pointsman.routing.signals import DERIVED, SIGNAL_INDEX, SIGNALS
from pointsman.simulator.run import run
from pointsman.simulator.state import DONE

from .factories import POLICY_SEES, any_legal, column, copy_of, make_env, same

CROWDED: dict[str, Any] = {"scenarios": ["overload", "tight-memory"], "warmup_requests": 1500}
IS_KEPT = np.array([signal.source != DERIVED for signal in SIGNALS])
ABSOLUTE = {"scale": "none", "relative": False}


def history(env: RoutingEnv, num_steps: int, seed: int) -> list[bytes]:
    """All that a run under random actions shows and pays."""
    rng = np.random.default_rng(0)
    seen = env.reset(seed)
    rows = [b"".join(array.tobytes() for array in seen)]
    for _ in range(num_steps):
        step = env.step(any_legal(seen, rng))
        seen = step.observation
        paid = (step.reward, step.elapsed_s, *step.terms.values())
        rows.append(b"".join(array.tobytes() for array in (*seen, *paid)))
    return rows


# Reward -----------------------------------------------------------------------------------------------------


def test_terms_add_up_to_the_reward() -> None:
    env = make_env(**CROWDED, objective="slo", reward={"scale": "episode"}, slo={"ttft_s": 0.2})
    rng = np.random.default_rng(0)
    seen = env.reset(0)
    sums = {}
    for _ in range(100):
        step = env.step(any_legal(seen, rng))
        np.testing.assert_allclose(sum(step.terms.values()), step.reward, rtol=1e-4, atol=1e-7)
        for name, term in step.terms.items():
            sums[name] = sums.get(name, 0.0) + np.abs(term).sum()
    assert set(sums) >= {"outstanding", "slo"}
    assert min(sums.values()) > 0


@pytest.mark.parametrize("scenario", ["mixed-hardware", "tight-memory"])
def test_doing_as_the_shadow_does_earns_exactly_nothing(scenario: str) -> None:
    """Of a policy that breaks ties by number: the others break them at random."""
    teachers = [{"kind": "vidur-lor"}, {"kind": "hold-until-room"}]
    env = make_env(
        scenarios=[scenario], shadow={"kind": "vidur-lor"}, teachers=teachers, hold={"allowed": False}
    )
    env.reset(1)
    for _ in range(200):
        assert not env.step(env.advise(env.teachers.index("vidur-lor"))).reward.any()
    # And anything else does not.
    assert any(env.step(env.advise(env.teachers.index("hold-until-room"))).reward.any() for _ in range(200))


@pytest.mark.parametrize(
    "keep",
    [
        {"ttft_p99": "round-robin", "e2e_p99": "round-robin"},  # the shadow
        {"ttft_p99": "least-delay", "e2e_p99": 0.9},  # others, which have to be run as well
        {"ttft_p99": "0.3s", "e2e_p99": "9s"},
    ],
)
def test_limits_are_about_seconds_beyond_where_tails_begin(keep: dict[str, Any]) -> None:
    """What a limit earns is read off both tables of requests; each episode has its own tail."""
    env = make_env(3, keep=keep, shadow={"kind": "round-robin"}, warmup_requests=50)
    env.reset(0)
    earned = {name: np.zeros(3) for name in env.tails}
    for _ in range(450):
        step = env.step(env.advise(0))
        for name, term in step.tails.items():
            earned[name] += term
    for i, clusters in enumerate(env._clusters):
        assert clusters is not None
        now = float(env._sims["now"][i])
        for name, end, begins in (
            ("ttft_p99", "first_token_at", "tail_ttft_s"),
            ("e2e_p99", "completed_at", "tail_e2e_s"),
        ):
            own, shadow = (
                beyond_s(clusters.requests[k], end, float(env._sims[begins][i]), now) for k in (0, 1)
            )
            unit = env._tail_costs[name][i]
            assert earned[name][i] == pytest.approx((shadow - own) * unit, rel=1e-3, abs=1e-2 * unit)
    begins_s = env._sims["tail_ttft_s"]
    assert len(np.unique(begins_s)) == env.num_envs
    np.testing.assert_array_equal(begins_s, env._shadows["tail_ttft_s"])
    assert earned["ttft_p99"].sum() > 0.0  # least-delay has the shorter tail


def beyond_s(requests: Any, end: str, begins_s: float, now: float) -> float:
    """Of requests that had their first or last token by now."""
    is_done = (requests[end] >= 0) & (requests[end] <= now)
    return sum(max(0.0, request[end] - request["arrived_at"] - begins_s) for request in requests[is_done])


def test_a_tail_begins_where_97_percent_of_the_reference_are_done() -> None:
    """And is as heavy as the reference's: at a price of 1 a shadow that breaks it pays a cost a second."""
    env = make_env(1, keep={"ttft_p99": "least-outstanding", "e2e_p99": "least-outstanding"}, decisions=2000)
    env.reset(0)
    clusters = env._clusters[0]
    assert clusters is not None
    seen = clusters.requests[2]
    seen = seen[(seen["arrived_at"] > env._sims["now"][0]) & (seen["completed_at"] >= 0)]
    e2e_s = seen["completed_at"] - seen["arrived_at"]
    share = float((e2e_s > env._sims["tail_e2e_s"][0]).mean())
    assert share == pytest.approx(0.03, abs=0.005)
    assert env.lifetime_s[0] == pytest.approx(e2e_s.mean(), rel=0.1)
    assert env.mean_in_system[0] == pytest.approx(
        env.lifetime_s[0] * 2000 / np.ptp(seen["arrived_at"]), rel=0.1
    )


def test_costs_are_latencies() -> None:
    """What was paid equals sums over the table of requests: cut off in the middle, and run to the end."""
    env = make_env(
        1,
        scenarios=["tight-memory"],
        warmup_requests=0,
        slo={"ttft_s": 0.3, "tpot_s": 0.02},
        reward={**ABSOLUTE, "terms": {"outstanding": 1, "waiting": 1, "age": 1, "slo": 1}},
    )
    rng = np.random.default_rng(0)
    seen = env.reset(3)
    paid: dict[str, float] = {}
    for _ in range(400):
        step = env.step(any_legal(seen, rng))
        for name, term in step.terms.items():
            paid[name] = paid.get(name, 0.0) - float(term[0])
    clusters, now = env._clusters[0], float(env._sims["now"][0])
    assert clusters is not None
    requests = clusters.requests[0]
    here = requests[requests["arrived_at"] <= now]
    assert 0 < (here["completed_at"] < 0).sum() < len(here)  # some are still in the system

    def until(field: str) -> NDArray[np.float64]:
        return np.where(here[field] >= 0, here[field], now) - here["arrived_at"]

    assert paid["outstanding"] == pytest.approx(until("completed_at").sum(), rel=1e-5)
    assert paid["waiting"] == pytest.approx(until("first_token_at").sum(), rel=1e-5)
    assert paid["age"] == pytest.approx((until("first_token_at") ** 2).sum() / 2, rel=1e-5)
    assert paid["slo"] == pytest.approx(slo_excess_s(here, 0.3, 0.02), rel=1e-5)
    assert paid["slo"] > 0

    policies = PolicyTables([PolicySpec()], env.spec.max_replicas)
    run(env._sims, policies.rows, np.zeros(1, np.int64), 0, 1)
    assert env._sims["status"][0] == DONE
    e2e, ttft = (requests[name] - requests["arrived_at"] for name in ("completed_at", "first_token_at"))
    sim = env._sims[0]
    assert sim.in_system_area == pytest.approx(e2e.sum())
    assert sim.sum_e2e_s == pytest.approx(e2e.sum())
    assert sim.unstarted_area == pytest.approx(ttft.sum())
    assert sim.age_area == pytest.approx((ttft**2).sum() / 2)
    assert sim.slo_excess_s == pytest.approx(slo_excess_s(requests, 0.3, 0.02))
    assert sim.num_in_system == sim.num_unstarted == sim.num_decode_left == 0


def slo_excess_s(requests: Any, ttft_limit_s: float, tpot_limit_s: float) -> float:
    """Beyond the limits: to the first token of those that have one, and from there to the last."""
    started, ended = requests["first_token_at"] >= 0, requests["completed_at"] >= 0
    ttft = (requests["first_token_at"] - requests["arrived_at"])[started]
    rest = (requests["completed_at"] - requests["first_token_at"])[ended]
    allowed = (requests["num_decode"][ended] - 1) * tpot_limit_s
    return float(np.maximum(0, ttft - ttft_limit_s).sum() + np.maximum(0, rest - allowed).sum())


def test_scaled_rewards_are_shares_of_what_the_shadow_pays() -> None:
    """An idle twin pays nothing, so absolute rewards under the shadow's own policy are about -1 a second."""
    env = make_env(8, reward={"relative": False}, shadow={"kind": "least-delay"}, warmup_requests=1000)
    env.reset(0)
    reward = time_s = 0.0
    for _ in range(300):
        step = env.step(env.advise(0))
        reward, time_s = reward + float(step.reward.sum()), time_s + float(step.elapsed_s.sum())
    assert -1.5 < reward / time_s < -0.6


def test_strictness_is_a_factor_on_age_and_slo_alone() -> None:
    def paid(strictness: float) -> dict[str, float]:
        env = make_env(2, **CROWDED, objective="slo", reward=ABSOLUTE)
        env.set_difficulty({"strictness": strictness})
        env.reset(0)
        steps = [env.step(env.advise(0)) for _ in range(50)]
        return {name: sum(float(step.terms[name].sum()) for step in steps) for name in steps[0].terms}

    lax, strict = paid(1.0), paid(3.0)
    for name, value in lax.items():
        assert strict[name] == pytest.approx(value * (3.0 if name in ("age", "slo") else 1.0), rel=1e-4)


# What is seen -----------------------------------------------------------------------------------------------


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


# Masks ------------------------------------------------------------------------------------------------------


def has_memory_and_room(env: RoutingEnv, i: int) -> tuple[list[bool], list[bool]]:
    """By the definition, from the router's own book-keeping."""
    clusters = env._clusters[i]
    assert clusters is not None
    signals = {name: clusters.signals[0][row] for name, row in SIGNAL_INDEX.items()}
    prompt = int(clusters.requests[0]["num_prefill"][env._sims["queue_head"][i]])
    rule = env.spec.hold
    booked = signals["context_tokens"] + signals["pending_prefill_tokens"] + prompt
    is_idle = signals["outstanding"] == 0
    has_memory = is_idle | (booked <= rule.kv_limit * signals["kv_capacity_tokens"])
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


def test_nothing_is_written_outside_its_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels reach their arrays by address: only guards beside them would show it."""
    begun: list[GuardedClusters] = []

    def guarded(*arguments: Any) -> GuardedClusters:
        begun.append(GuardedClusters(*arguments))
        return begun[-1]

    monkeypatch.setattr(routing, "Clusters", guarded)
    scenarios = ["random", "failure", "tight-memory", "overload"]
    env = make_env(4, scenarios=scenarios, max_replicas=8, decisions=40)
    rng = np.random.default_rng(0)
    seen = env.reset(0)
    for t in range(100):
        # In turn: any legal action, and holding wherever it is legal.
        seen = env.step(any_legal(seen, rng) if t % 2 else seen.action_mask.argmax(axis=1)).observation
        env.advise(t % len(env.teachers))
    assert len(begun) >= 3 * env.num_envs
    assert [clusters.broken_guards() for clusters in begun] == [[]] * len(begun)


# Episodes ---------------------------------------------------------------------------------------------------


def test_same_seed_same_bytes() -> None:
    settings = {"scenarios": ["steady-chat", "random"], "decisions": 20, "max_replicas": 8}
    first = history(make_env(**settings), 50, seed=7)
    again = make_env(**settings)
    history(again, 3, seed=1)  # what came before a reset leaves no trace
    assert history(again, 50, seed=7) == first
    assert history(again, 50, seed=8) != first


def test_environments_differ_from_each_other() -> None:
    seen = make_env(4).reset(0)
    assert len({row.tobytes() for row in seen.context}) == 4


def test_a_window_is_cut_off_and_what_was_seen_last_is_kept() -> None:
    cut, whole = make_env(2, decisions=20), make_env(2, decisions=20)
    cut.reset(0)
    whole.reset(0)
    whole._lengths -= 1  # the same traffic, cut off one decision later
    returns = np.zeros(2)
    for count in range(1, 21):
        step, after = cut.step(cut.advise(0)), whole.step(whole.advise(0))
        returns += step.reward
        assert not step.terminated.any()
        assert step.truncated.tolist() == [count == 20] * 2
        assert not after.truncated.any()
    assert same(step.final_observation, after.observation, *Observation._fields)
    assert not same(step.final_observation, step.observation, "entities", "context")
    for i, episode in enumerate(step.episodes):
        assert (episode.env, episode.group, episode.length) == (i, 0, 20)
        assert episode.episode_return == pytest.approx(returns[i], rel=1e-4, abs=1e-6)
        assert episode.metrics["in_system"] > 0
    # The next one begins at 0 and is as long.
    for count in range(1, 21):
        assert cut.step(cut.advise(0)).truncated.tolist() == [count == 20] * 2


def test_only_an_overhang_terminates_and_it_does_not_pay() -> None:
    env = make_env(2, scenarios=["overload"], warmup_requests=0, limits={"overhang": 2.0, "bad_end_s": 10.0})
    everything_to_one = np.ones(2, np.int64)
    env.reset(0)
    num_steps = 1
    while not (step := env.step(everything_to_one)).terminated.any():
        num_steps += 1
    assert num_steps < env.spec.decisions
    assert not step.truncated.any()
    i = int(np.argmax(step.terminated))
    excess = step.episodes[0].metrics["in_system"] - step.episodes[0].metrics["shadow_in_system"]
    assert excess > 2.0 * 4
    terms = sum(float(term[i]) for term in step.terms.values())
    assert step.reward[i] == pytest.approx(terms - 10.0 * excess, rel=1e-4)
    # The same again, but the window ends with that very decision: it still is a bad end.
    env.reset(0)
    for _ in range(num_steps - 1):
        env.step(everything_to_one)
    env._lengths[:] = env.spec.decisions - 1
    step = env.step(everything_to_one)
    assert step.terminated[i]
    assert step.truncated.tolist() == (~step.terminated).tolist()


def test_groups_take_turns_over_the_environments() -> None:
    env = make_env(5, scenarios=["steady-chat", "overload"], decisions=4)
    env.reset(0)
    for _ in range(9):
        assert env.step(env.advise(0)).groups.tolist() == [0, 1, 0, 1, 0]


def test_time_passes_between_decisions() -> None:
    env = make_env(2)
    env.reset(0)
    for _ in range(50):
        before = env._sims["now"].copy()
        step = env.step(env.advise(0))
        np.testing.assert_allclose(step.elapsed_s, env._sims["now"] - before, rtol=1e-5, atol=1e-6)
        assert env._shadows["now"].tolist() == env._sims["now"].tolist()


def test_difficulty_is_taken_back_by_an_empty_stage() -> None:
    env = make_env(1, difficulty={"load": 0.9})
    env.set_difficulty({"load": 0.5, "load_jitter": 0.0})
    assert (env.difficulty.load, env.difficulty.load_jitter) == (0.5, 0.0)
    env.set_difficulty({})
    assert env.difficulty == env.spec.difficulty
    with pytest.raises(InputError, match="loads"):
        env.set_difficulty({"loads": 1.0})
    with pytest.raises(InputError, match="at most 6"):
        make_env(1, scenarios=["random"], difficulty={"max_replicas": 7})
    make_env(1, scenarios=["steady-chat"], difficulty={"max_replicas": 7})  # it draws no clusters


def test_a_cluster_too_large_for_the_observation_is_named() -> None:
    with pytest.raises(InputError, match="an episode has 4 replicas"):
        make_env(1, max_replicas=3).reset(0)


# The lead ---------------------------------------------------------------------------------------------------


def test_the_lead_counts_all_that_is_still_to_come() -> None:
    """Failures, requests that grow too long and held ones included."""
    env = make_env(num_envs=4, scenarios=["failure", "tight-memory"], decisions=4000, warmup_requests=0)
    rng = np.random.default_rng(0)
    seen = env.reset(1)
    for t in range(800):
        seen = env.step(any_legal(seen, rng)).observation
        if t % 100 == 0:
            for i in range(4):
                clusters = env._clusters[i]
                assert clusters is not None
                for number, sim in enumerate((env._sims[i], env._shadows[i])):
                    assert_everything_is_counted(sim, clusters.requests[number], clusters.replicas[number])


def test_the_lead_foresees_what_will_be_earned() -> None:
    env = make_env(num_envs=8, scenarios=["steady-chat"], decisions=4000, warmup_requests=0)
    rng = np.random.default_rng(0)
    seen = env.reset(1)
    leads, earned = [], []
    for _ in range(1500):
        leads.append(seen.privileged[:, -1].copy())
        actions = np.where(rng.random(8) < 0.1, any_legal(seen, rng), env.advise(0))
        step = env.step(actions)
        seen = step.observation
        earned.append(step.terms["outstanding"].copy())
    total = np.cumsum(earned, axis=0)
    horizon = 600  # decisions: more than three lifetimes
    ahead = (total[horizon:] - total[:-horizon]).ravel()
    lead = np.array(leads)[1 : len(leads) - horizon + 1].ravel()
    assert 0.5 < np.polyfit(lead, ahead, 1)[0] < 1.7
    assert np.corrcoef(lead, ahead)[0, 1] > 0.4


def assert_everything_is_counted(sim: Any, requests: Any, replicas: Any) -> None:
    """True output by replica and prompts in the queue, beside sums over the requests."""
    is_here = (requests["arrived_at"] <= sim.now) & (requests["completed_at"] < 0)
    for k, replica in enumerate(replicas):
        assert replica.sum_decode == requests["num_decode"][is_here & (requests["replica"] == k)].sum()
    is_queued = is_here & (requests["replica"] < 0)
    assert sim.queued_prompt == requests["num_prefill"][is_queued].sum()
