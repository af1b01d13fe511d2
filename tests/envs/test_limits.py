from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pointsman.envs.entity import Episode
from pointsman.envs.limits import LimitSpec, ttft_p99_passed
from pointsman.simulator.state import REQUEST
from pointsman.training.buffers import episode_metrics
from pointsman.training.safety import Monitor, SafetySpec

from .factories import make_env


def early_ends(choose: str, **limits: Any) -> tuple[int, set[str], float]:
    """How many episodes of a crowded cluster end early, for what, and the lowest reward."""
    env = make_env(4, scenarios=["overload"], warmup_requests=0, limits={"overhang": None, **limits})
    seen = env.reset(0)
    count, why, lowest = 0, set(), 0.0
    for _ in range(450):
        first = seen.action_mask.argmax(axis=1)
        last = seen.action_mask.shape[1] - 1 - seen.action_mask[:, ::-1].argmax(axis=1)
        step = env.step(env.advise(0) if choose == "well" else np.where(first > 0, first, last))
        seen = step.observation
        lowest = min(lowest, float(step.reward.min()))
        for episode in step.episodes:
            reasons = {name for name in episode.metrics if name.startswith("ended/")}
            count += bool(reasons)
            why |= reasons
            assert bool(reasons) == bool(step.terminated[episode.env])
    return count, why, lowest


@pytest.mark.parametrize(
    ("limit", "value"),
    [
        ("overhang", 10.0),
        ("queue", 30.0),
        ("wait_s", 3.0),
        ("ttft_p99_s", 1.0),
        ("ttft_p99_ratio", 1.5),
        ("imbalance_cv", 1.0),
    ],
)
def test_a_policy_that_sends_all_to_one_replica_passes_every_limit(limit: str, value: float) -> None:
    count, why, lowest = early_ends("badly", **{limit: value})
    assert count > 0
    assert why == {f"ended/{limit}"}
    assert lowest < early_ends("badly")[2], "an early end costs"


def test_without_limits_nothing_ends_early_and_a_good_policy_keeps_them() -> None:
    assert early_ends("badly")[0] == 0
    limits = {"overhang": 10.0, "queue": 400.0, "wait_s": 60.0, "ttft_p99_ratio": 3.0, "imbalance_cv": 2.0}
    assert early_ends("well", **limits)[0] == 0


def test_a_p99_is_of_the_last_requests_and_of_enough() -> None:
    own, shadow = np.zeros(1000, REQUEST), np.zeros(1000, REQUEST)
    shadow["first_token_at"] = 1.0
    own["first_token_at"] = np.where(np.arange(1000) < 500, 9.0, 1.0)
    spec = LimitSpec(ttft_p99_s=2.0, ttft_p99_ratio=2.0)
    assert ttft_p99_passed(spec, own, shadow) == []
    assert ttft_p99_passed(spec, own[:700], shadow[:700]) == ["ttft_p99_s", "ttft_p99_ratio"]
    assert ttft_p99_passed(spec, own[:99], shadow[:99]) == []


def test_every_early_end_is_counted_and_the_first_is_said() -> None:
    ends = [
        Episode(i, 0, 0.0, 5, {"in_system": 1.0, **reason})
        for i, reason in enumerate(({"ended/queue": 1.0}, {}, {"ended/queue": 1.0, "ended/wait_s": 1.0}))
    ]
    metrics = episode_metrics(ends, ("a",))
    assert (metrics["ended/queue"], metrics["ended/wait_s"], metrics["episode/in_system"]) == (2, 1, 1)
    monitor = Monitor(SafetySpec())
    row = {"update": 3, "approx_kl_max": 0.0, "entropy_frac": 0.5, **metrics}
    alerts = monitor.check(row, 0.5)
    assert [str(alert) for alert in alerts] == [
        "update 3: 2 episodes were ended early, beyond env.limits.queue",
        "update 3: 1 episodes were ended early, beyond env.limits.wait_s",
    ]
    assert monitor.check(row, 0.5) == []
    assert monitor.metrics()["safety/queue"] == 4
    assert monitor.metrics()["safety/wait_s"] == 2
