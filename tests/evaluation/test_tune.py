from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import pytest

from pointsman.evaluation import tune as module
from pointsman.evaluation.tune import (
    STARTS,
    Bench,
    Budget,
    ParameterSpace,
    Situation,
    Tuned,
    WeightSpace,
    shortened,
    tune,
)
from pointsman.experiments.objective import BREACH_WEIGHT, TOLERANCE, find_objective
from pointsman.experiments.scenarios import REPORT_SEEDS, SELECTION_SEEDS, find_scenario
from pointsman.experiments.simulate import simulate
from pointsman.routing.policy import PolicySpec
from pointsman.routing.signals import SIGNAL_INDEX, SIGNALS

BALANCED = find_objective("balanced").model_copy(update={"limits": ()})
LOR = PolicySpec(kind="least-outstanding")


def short(name: str, num_requests: int = 100) -> Situation:
    return shortened(find_scenario(name), [f"workload.requests={num_requests}"])


@pytest.fixture(autouse=True)
def few_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REQUESTS_PER_SCORE", 300)


def tuned(decisions: int = 30_000, seed: int = 0, workers: int = 1) -> Tuned:
    return tune([short("mixed-hardware")], BALANCED, Budget(decisions), seed, workers=workers)


def test_finds_better_weights_than_it_starts_from() -> None:
    found = tuned()
    bench = Bench([short("mixed-hardware")], BALANCED, 1)
    space = WeightSpace(bench.signal_spreads(found.search_seeds[:4]))
    starts = [space.policy(space.point(start)) for start in STARTS]
    scores = bench.scores([found.policy, *starts], found.check_seeds)
    costs = bench.judge([found.policy], found.check_seeds).cost
    assert costs[0] == pytest.approx(math.log(found.cost_ratio)), "the policy that was judged is given"
    assert scores[0] < scores[1:].min() - 0.01 < -0.01


def test_a_search_that_learns_nothing_returns_a_start(monkeypatch: pytest.MonkeyPatch) -> None:
    class Backwards(module.EvolutionStrategy):
        def tell(self, costs: np.ndarray) -> None:
            super().tell(-costs)

    monkeypatch.setattr(module, "EvolutionStrategy", Backwards)
    found = tuned(10_000)
    assert set(found.policy.weights) in [set(start) for start in STARTS]
    assert found.cost_ratio <= 1.0


def test_a_seed_gives_one_policy_whatever_the_threads() -> None:
    one = tuned(10_000)
    assert one == tuned(10_000, workers=2)
    assert one.policy != tuned(10_000, seed=1).policy


def test_only_selection_seeds_and_the_last_word_on_unseen_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def situation(seed: int):  # type: ignore[no-untyped-def]
        seen.append(seed)
        return short("steady-chat")(seed)

    found = tune([situation], BALANCED, Budget(30_000))
    assert not set(seen) & set(REPORT_SEEDS)
    assert set(seen) <= {*found.search_seeds, *found.check_seeds} < set(SELECTION_SEEDS)
    assert not set(found.search_seeds) & set(found.check_seeds)
    assert len(seen) == len(set(seen)), "each is prepared once"
    assert set(found.check_seeds) < set(seen)


@pytest.mark.parametrize("decisions", [1, 10_000, 25_000])
def test_budget_of_decisions(decisions: int) -> None:
    found = tuned(decisions)
    assert found.num_generations >= 1
    smallest = tuned(1).num_decisions
    assert found.num_decisions <= max(smallest, 1.05 * decisions)
    assert found.num_decisions > 0.6 * decisions


def test_budget_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock:
        """A generation takes one second, and so does all that comes before the first."""

        now_s = 0.0

        def perf_counter(self) -> float:
            self.now_s += 1.0
            return self.now_s

    monkeypatch.setattr(module, "time", Clock())
    shares: list[float] = []
    found = tune([short("steady-chat")], BALANCED, Budget(minutes=0.1), progress=shares.append)
    assert found.num_generations == 5, "the sixth second is for the choice"
    assert sum(shares) == pytest.approx(1.0)
    assert all(share >= 0 for share in shares)


def test_scores_are_logarithms_of_cost_ratios() -> None:
    situations = [short("steady-chat"), short("mixed-hardware")]
    bench = Bench(situations, BALANCED, 1)
    policies = [LOR, PolicySpec(kind="random")]
    logs = []
    for seed in (5, 6):
        for situation in situations:
            prepared = situation(seed)
            costs = [BALANCED.cost(one.metrics) for one in simulate([prepared] * 2, policies=policies)]
            logs.append(math.log(costs[1] / costs[0]))
    np.testing.assert_allclose(bench.scores(policies, (5, 6)), [0.0, np.mean(logs)], atol=1e-12)
    assert bench.num_decisions == 100 * 2 * 2 * 3, "two policies and the baseline"


def test_what_is_beyond_a_limit_counts_as_cost() -> None:
    kept = find_objective("balanced", {"ttft_p99": "least-outstanding", "e2e_p99": "1000s"})
    policies = [LOR, PolicySpec(kind="random")]
    found = simulate([short("steady-chat")(5)] * 2, policies=policies)
    own, other = (one.metrics["ttft_p99_s"] for one in reversed(found))
    judged = Bench([short("steady-chat")], kept, 1).judge(policies, (5,))
    penalties = judged.penalty
    np.testing.assert_allclose(judged.breaches["ttft_p99"], [[0.0, math.log(own / other)]], atol=1e-12)
    assert (judged.breaches["e2e_p99"] < 0).all()
    assert penalties[0] == 0.0
    assert penalties[1] == pytest.approx(BREACH_WEIGHT * (math.log(own / other) - TOLERANCE))
    assert penalties[1] > 0.1


def test_large_workloads_are_run_in_portions_and_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    policies = [PolicySpec(kind=kind) for kind in ("random", "least-work", "round-robin")]
    whole = Bench([short("steady-chat")], BALANCED, 1).scores(policies, (0, 1))
    monkeypatch.setattr(module, "BATCH_REQUESTS", 200)
    monkeypatch.setattr(module, "MAX_KEPT_REQUESTS", 150)
    bench = Bench([short("steady-chat")], BALANCED, 1)
    np.testing.assert_array_equal(bench.scores(policies, (0, 1)), whole)
    assert len(bench._prepared) == 1


def test_spreads_of_signals() -> None:
    equal = Bench([short("steady-chat", 600)], BALANCED, 1).signal_spreads((0, 1))
    assert equal["step_floor_s"] == equal["prefill_s_per_token"] == 0.0, "equal replicas"
    assert 0.3 < equal["outstanding"] < 3
    assert 0.03 < equal["prefill_backlog_s"] <= equal["work_s"] < 1
    mixed = Bench([short("mixed-hardware", 600)], BALANCED, 1).signal_spreads((0, 1))
    both = Bench([short(name, 600) for name in ("steady-chat", "mixed-hardware")], BALANCED, 1)
    assert both.signal_spreads((0, 1))["step_floor_s"] == pytest.approx(mixed["step_floor_s"])
    mean = math.sqrt(equal["outstanding"] * mixed["outstanding"])
    assert both.signal_spreads((0, 1))["outstanding"] == pytest.approx(mean)


def test_points_are_weights_in_units_of_the_spread() -> None:
    spreads = dict.fromkeys(module.TUNED_SIGNALS, 1.0) | {"work_s": 0.25, "step_floor_s": 0.0}
    space = WeightSpace(spreads)
    assert "step_floor_s" not in space.names
    point = space.point({"work_s": 3.0, "outstanding": 4.0, "step_floor_s": 9.0})
    assert np.linalg.norm(point) == pytest.approx(1.0)
    assert space.policy(point).weights == {"outstanding": 0.8, "work_s": 2.4}
    assert sum(space.influence(point).values()) == pytest.approx(1.0)
    assert space.influence(point)["outstanding"] == pytest.approx(4 / 7)
    assert space.policy(point / 3 * np.pi).weights == {"outstanding": 0.8378, "work_s": 2.513}


def test_a_cluster_with_nothing_to_choose() -> None:
    """One request at a time: no signal differs, and any policy is as good as any other."""
    idle = [
        "workload={arrivals: {kind: poisson, rate: 0.05}, lengths: {kind: fixed, prompt: 9, output: 2}, \
requests: 100}"
    ]
    found = tune([shortened(find_scenario("steady-chat"), idle)], BALANCED, Budget(1))
    assert list(found.policy.weights) == ["outstanding"]
    assert found.cost_ratio == pytest.approx(1.0)


def test_no_oracle_is_tuned() -> None:
    for name in module.TUNED_SIGNALS:
        assert SIGNALS[SIGNAL_INDEX[name]].source != "oracle"


def test_scenarios_are_shortened_unless_their_length_is_given() -> None:
    one = find_scenario("failure")
    config = shortened(one)(3).config
    assert config.workload.requests == 2000 and config.seed == 3
    assert [event.at_s for event in config.cluster.events] == pytest.approx(
        [event.at_s / 4 for event in one.config(3).cluster.events]
    )
    assert shortened(one, ["workload.requests=70"])(0).config.workload.requests == 70
    timed = shortened(one, ["workload.duration_s=30"])(0).config.workload
    assert (timed.requests, timed.duration_s) == (8000, 30)


class CheapestAt(Bench):
    """A cost that grows with the distance of a parameter from what is best, and nothing is simulated."""

    best: ClassVar = {"overlap_weight": 5.0, "temperature": 0.1}
    num_requests = 1000

    def judge(self, policies: Sequence[PolicySpec], seeds: Sequence[int]) -> module.Judged:
        self.num_decisions += len(policies)
        away = [[one.parameters[name] - value for name, value in self.best.items()] for one in policies]
        return module.Judged(np.square(away).sum(axis=1), np.zeros(len(policies)), {})


def test_finds_the_best_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Bench", CheapestAt)
    found = tune([], BALANCED, Budget(600), kind="overlap-cost")
    assert found.policy.kind == "overlap-cost" and found.influence == {}
    assert found.policy.parameters == pytest.approx(CheapestAt.best, abs=0.05)


def test_usual_parameters_win_where_the_search_finds_none_better(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CheapestAt, "best", {"overlap_weight": 1.0, "temperature": 0.0})
    monkeypatch.setattr(module, "Bench", CheapestAt)
    found = tune([], BALANCED, Budget(1), kind="overlap-cost")
    assert found.policy.parameters == CheapestAt.best


def test_a_parameter_stays_in_its_range_and_starts_at_what_is_usual() -> None:
    space = ParameterSpace("prefix-hash")
    assert space.policy(space.starts[0]).parameters == {"prefix_tokens": 256.0, "load_factor": 1.25}
    assert space.policy(np.array([-3.0, 9.0])).parameters == {"prefix_tokens": 16.0, "load_factor": 4.0}
