"""What the routing environment pays adds up, and is what the times of the requests say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pointsman.routing.policy import PolicySpec, PolicyTables
from pointsman.simulator.run import run
from pointsman.simulator.state import DONE

from .factories import CROWDED, any_legal, make_env

ABSOLUTE = {"scale": "none", "relative": False}


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
