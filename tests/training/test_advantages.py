"""Advantages against an O(T²) sum written from the definition; and broken variants that must not pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pointsman.errors import InputError
from pointsman.spec import Spec, parse_spec
from pointsman.training.advantages import DiscountSpec, LifetimeDiscount, StepDiscount, TimeDiscount, gae

Gae = Callable[..., tuple[Any, Any]]
NO_LIFETIMES = np.full((1, 1), np.nan)


def rollout(
    seed: int = 0, num_steps: int = 40, num_envs: int = 5, trace: float | None = None
) -> dict[str, Any]:
    """Random numbers everywhere, ends of both kinds, an end in the first and in the last step."""
    rng = np.random.default_rng(seed)
    shape = (num_steps, num_envs)
    terminated = rng.random(shape) < 0.06
    truncated = (rng.random(shape) < 0.08) & ~terminated
    truncated[0, 0] = truncated[-1, 1] = terminated[-1, 2] = terminated[0, 3] = True
    truncated[-1, 2] = truncated[0, 3] = terminated[0, 0] = terminated[-1, 1] = False
    return {
        "rewards": rng.normal(size=shape),
        "values": rng.normal(size=(num_steps + 1, num_envs)),
        "final_values": np.where(truncated, rng.normal(size=shape), np.nan),  # undefined elsewhere
        "terminated": terminated,
        "truncated": truncated,
        "discount": rng.uniform(0.8, 1.0, size=shape),
        "trace": rng.uniform(0.5, 1.0, size=shape) if trace is None else np.full(shape, trace),
    }


def brute_force(
    rewards: Any, values: Any, final_values: Any, terminated: Any, truncated: Any, discount: Any, trace: Any
) -> Any:
    """A_t = Σ_k (Π_{j<k} discount_j trace_j) δ_k, up to the end of the episode: each start on its own."""
    advantages = np.zeros(rewards.shape)
    for n in range(rewards.shape[1]):
        for t in range(len(rewards)):
            weight = 1.0
            for k in range(t, len(rewards)):
                if terminated[k, n]:
                    following = 0.0
                elif truncated[k, n]:
                    following = final_values[k, n]
                else:
                    following = values[k + 1, n]
                advantages[t, n] += weight * (rewards[k, n] + discount[k, n] * following - values[k, n])
                if terminated[k, n] or truncated[k, n]:
                    break
                weight *= discount[k, n] * trace[k, n]
    return advantages


def check_against_brute_force(estimate: Gae) -> None:
    data = rollout()
    advantages, returns = estimate(**data)
    np.testing.assert_allclose(advantages, brute_force(**data), rtol=0, atol=1e-12)
    np.testing.assert_allclose(returns, advantages + data["values"][:-1], rtol=0, atol=1e-12)


def check_constant_reward(estimate: Gae) -> None:
    """Reward 1 for ever, γ = 0.9, cut into episodes: from every state 1 / (1 - 0.9) = 10 is to come."""
    data = rollout(seed=1)
    shape = data["rewards"].shape
    data["truncated"] |= data["terminated"]
    data["terminated"] = np.zeros(shape, dtype=bool)
    data |= {"rewards": np.ones(shape), "discount": np.full(shape, 0.9)}
    data["values"] = np.full((len(data["values"]), shape[1]), 10.0)
    # The critic does not know the first observation of an episode yet.
    data["values"][1:][data["truncated"]] = -3.0
    data["final_values"] = np.where(data["truncated"], 10.0, np.nan)
    _, returns = estimate(**data)
    np.testing.assert_allclose(returns, 10.0, rtol=0, atol=1e-12)


CHECKS = [check_against_brute_force, check_constant_reward]


def off_by_one_end(**data: Any) -> tuple[Any, Any]:
    for name in ("terminated", "truncated"):
        data[name] = np.roll(data[name], 1, axis=0)
    data["final_values"] = np.roll(data["final_values"], 1, axis=0)
    return gae(**data)


def truncation_as_termination(**data: Any) -> tuple[Any, Any]:
    data["terminated"] = data["terminated"] | data["truncated"]
    return gae(**data)


def bootstrap_from_reset_observation(**data: Any) -> tuple[Any, Any]:
    return gae(**data | {"final_values": data["values"][1:]})


def carry_over_truncation(**data: Any) -> tuple[Any, Any]:
    return gae(**data | {"truncated": np.zeros_like(data["truncated"])})


@pytest.mark.parametrize("check", CHECKS)
def test_advantages_are_right(check: Callable[[Gae], None]) -> None:
    check(gae)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize(
    "broken",
    [
        off_by_one_end,
        truncation_as_termination,
        bootstrap_from_reset_observation,
        carry_over_truncation,
    ],
)
def test_broken_variants_fail_the_same_checks(check: Callable[[Gae], None], broken: Gae) -> None:
    with pytest.raises(AssertionError):
        check(broken)


def test_trace_0_is_the_one_step_error() -> None:
    data = rollout(trace=0.0)
    following = np.where(data["truncated"], data["final_values"], data["values"][1:])
    following = np.where(data["terminated"], 0.0, following)
    error = data["rewards"] + data["discount"] * following - data["values"][:-1]
    np.testing.assert_allclose(gae(**data)[0], error, rtol=0, atol=1e-12)


def test_trace_1_is_the_discounted_sum_of_rewards() -> None:
    data = rollout(trace=1.0)
    _, returns = gae(**data)
    num_steps, num_envs = data["rewards"].shape
    for n in range(num_envs):
        for t in range(num_steps):
            total, weight = 0.0, 1.0
            for k in range(t, num_steps):
                total += weight * data["rewards"][k, n]
                weight *= data["discount"][k, n]
                if data["terminated"][k, n]:
                    break
                if data["truncated"][k, n] or k == num_steps - 1:
                    last = data["final_values"] if data["truncated"][k, n] else data["values"][1:]
                    total += weight * last[k, n]
                    break
            assert returns[t, n] == pytest.approx(total, abs=1e-12)


def test_values_need_a_row_more_than_rewards() -> None:
    data = rollout()
    with pytest.raises(ValueError, match="41"):
        gae(**data | {"values": data["values"][:-1]})


def test_single_precision_input_is_summed_in_double() -> None:
    data = rollout(num_steps=2000)
    single = {
        name: array.astype(np.float32) if array.dtype == np.float64 else array for name, array in data.items()
    }
    advantages, _ = gae(**single)
    assert advantages.dtype == np.float64
    exact = gae(**{name: np.asarray(a, np.float64) if a.dtype != bool else a for name, a in single.items()})[
        0
    ]
    np.testing.assert_allclose(advantages, exact, rtol=0, atol=1e-12)


def test_time_discount_does_not_depend_on_how_often_one_decides() -> None:
    """Ten decisions in a second discount as much as one, and a horizon later 1/e is left."""
    spec = TimeDiscount(horizon_s=20.0, trace_s=1.3, horizon_steps=1.0, trace_steps=1.0)
    discount, trace = spec.arrays(np.full((200, 1), 0.1), NO_LIFETIMES)
    once, _ = spec.arrays(np.array([[1.0]]), NO_LIFETIMES)
    assert np.prod(discount[:10]) == pytest.approx(once[0, 0], rel=1e-12)
    assert np.prod(discount) == pytest.approx(np.exp(-1), rel=1e-12)
    assert np.prod(trace[:13]) == pytest.approx(np.exp(-1), rel=1e-12)


def test_time_discount_reaches_a_number_of_decisions_however_long_they_take() -> None:
    spec = TimeDiscount(horizon_s=20.0, trace_s=1.3, horizon_steps=100.0, trace_steps=10.0)
    discount, trace = spec.arrays(np.array([[60.0], [0.01]]), NO_LIFETIMES)
    assert discount[0, 0] == pytest.approx(np.exp(-1 / 100))
    assert trace[0, 0] == pytest.approx(np.exp(-1 / 10))
    assert discount[1, 0] == pytest.approx(np.exp(-0.01 / 20))
    assert trace[1, 0] == pytest.approx(np.exp(-0.01 / 1.3))


def test_step_discount_is_the_same_for_all() -> None:
    discount, trace = StepDiscount(gamma=0.9, lam=0.8).arrays(np.array([[0.1, 7.0]]), NO_LIFETIMES)
    assert discount.tolist() == [[0.9, 0.9]]
    assert trace.tolist() == [[0.8, 0.8]]


def test_lifetimes_reach_as_many_requests_whatever_they_are_like() -> None:
    """A lifetime is as many decisions as there are requests in the system: 10/s of 8 s, and 2/s of 40 s."""
    spec = LifetimeDiscount(horizon=2.0, trace=0.5, horizon_steps=1.0, trace_steps=1.0)
    short, slow = (spec.arrays(np.full((160, 1), 1 / rate), np.full((160, 1), 80 / rate)) for rate in (10, 2))
    np.testing.assert_allclose(short, slow, rtol=1e-12)
    discount, trace = short
    assert np.prod(discount) == pytest.approx(np.exp(-1), rel=1e-12)  # 160 decisions: two lifetimes
    assert np.prod(trace[:40]) == pytest.approx(np.exp(-1), rel=1e-12)
    floored = LifetimeDiscount(horizon_steps=200.0, trace_steps=32.0).arrays(np.ones((1, 1)), np.ones((1, 1)))
    np.testing.assert_allclose(floored, [[[np.exp(-1 / 200)]], [[np.exp(-1 / 32)]]])


@pytest.mark.parametrize("cut", [1, 7, 20, 39])
def test_a_cut_changes_nothing_where_the_critic_is_right(cut: int) -> None:
    """Two rollouts in a row against one of both: the first one's last value is what the second earns."""
    whole = rollout(trace=1.0)
    advantages, returns = gae(**whole)
    first = {name: array[: cut + 1 if name == "values" else cut].copy() for name, array in whole.items()}
    first["values"][-1] = returns[cut]  # what is still to come, exactly
    second = {name: array[cut:] for name, array in whole.items()}
    pieces = np.concatenate((gae(**first)[0], gae(**second)[0]))
    np.testing.assert_allclose(pieces, advantages, rtol=0, atol=1e-12)
    first["values"][-1] = 0.0  # a cut that is taken for an end
    assert np.abs(gae(**first)[0] - advantages[:cut]).max() > 0.1


def test_the_discount_is_chosen_by_kind() -> None:
    class Section(Spec):
        discount: DiscountSpec = TimeDiscount()

    assert parse_spec(Section, {"discount": {"kind": "steps", "gamma": 0.99}}).discount == StepDiscount(
        gamma=0.99
    )
    with pytest.raises(InputError, match=r"ppo.discount.kind.*steps"):
        parse_spec(Section, {"discount": {"kind": "step"}})
