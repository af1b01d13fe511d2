"""The policies that ship with the package: they load, are small, and better than least-outstanding."""

from __future__ import annotations

import warnings

import pytest

from pointsman.errors import PointsmanWarning
from pointsman.experiments.objective import find_objective
from pointsman.experiments.scenarios import SELECTION_SEEDS, find_scenario
from pointsman.experiments.simulate import Outcome, prepare, simulate
from pointsman.routing.policy import PolicySpec
from pointsman.routing.sources import DEFAULT_CHECKPOINT


def outcomes(kind: str, scenario: str, requests: int) -> list[Outcome]:
    overrides = [f"workload.requests={requests}", f"policy={{kind: '{kind}'}}"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PointsmanWarning)  # overload is meant
        return simulate(
            [prepare(find_scenario(scenario).config(seed, overrides)) for seed in SELECTION_SEEDS[-2:]]
        )


def mean_cost(runs: list[Outcome]) -> float:
    return sum(find_objective("balanced").cost(run.metrics) for run in runs) / len(runs)


def test_it_is_small() -> None:
    assert DEFAULT_CHECKPOINT.stat().st_size < 1_000_000


@pytest.mark.parametrize(
    ("scenario", "requests", "most"),
    [
        ("steady-chat", 4000, 0.98),
        ("mixed-hardware", 4000, 0.95),
        ("overload", 6000, 0.5),
        ("wide-16", 8000, 0.98),
    ],
)
def test_it_costs_less_than_least_outstanding(scenario: str, requests: int, most: float) -> None:
    learned = outcomes("default", scenario, requests)
    assert all(run.metrics["num_unfinished"] == 0 for run in learned)
    assert mean_cost(learned) < most * mean_cost(outcomes("least-outstanding", scenario, requests))


def test_what_a_detour_may_take_moves_it_between_mean_and_tail() -> None:
    def figures(kind: str) -> tuple[float, float]:
        runs = outcomes(kind, "steady-chat", 6000)
        return tuple(  # type: ignore[return-value]
            sum(run.metrics[name] for run in runs) for name in ("e2e_mean_s", "ttft_p99_s")
        )

    means, tails = zip(*map(figures, ("default-mean:0.1s", "default-mean:0.4s", "default-mean")), strict=True)
    assert means[0] > 1.01 * means[1] > 1.01**2 * means[2]
    assert 1.1**2 * tails[0] < 1.1 * tails[1] < tails[2]
    assert means[2] < 0.95 * figures("late-binding")[0] and tails[2] > 1.3 * figures("late-binding")[1]


@pytest.mark.parametrize("num_replicas", [1, 3, 64])
def test_it_runs_on_any_number_of_replicas(num_replicas: int) -> None:
    config = find_scenario("steady-chat").config(
        0, ["workload.requests=600", f"cluster.replicas={num_replicas}"]
    )
    config = config.model_copy(update={"policy": PolicySpec(kind="default")})
    (run,) = simulate([prepare(config)])
    assert run.metrics["num_unfinished"] == 0
    assert run.metrics["share_min"] > 0
