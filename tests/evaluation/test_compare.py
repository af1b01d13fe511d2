from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from routing.learned import make_run

from pointsman.config import Config
from pointsman.errors import PointsmanWarning
from pointsman.evaluation import compare as module
from pointsman.evaluation.compare import (
    NEED_PREFIXES,
    Comparison,
    LatencyHistogram,
    choose_policies,
    compare,
    geometric_mean,
    geometric_means,
)
from pointsman.experiments.metrics import latency
from pointsman.experiments.objective import find_objective
from pointsman.experiments.scenarios import find_scenario
from pointsman.experiments.simulate import Outcome, Prepared, prepare, simulate, simulate_digests
from pointsman.routing.heuristics import HEURISTICS
from pointsman.routing.policy import PolicySpec

SEEDS = (1000, 1001, 1002)
POLICIES = ("round-robin", "least-outstanding", "least-work")


def configs(*overrides: str, num_requests: int = 400) -> list[Config]:
    one = find_scenario("steady-chat")
    return [one.config(seed, [f"workload.requests={num_requests}", *overrides]) for seed in SEEDS]


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    return compare("chat", "what", configs(), POLICIES)


def test_metrics_are_those_of_single_runs(comparison: Comparison) -> None:
    for index, config in enumerate(configs()):
        for policy in POLICIES:
            alone = config.model_copy(update={"policy": PolicySpec(kind=policy)})
            (outcome,) = simulate([prepare(alone)])
            for metric, value in outcome.metrics.items():
                np.testing.assert_equal(comparison.metrics[policy][metric][index], value)


@pytest.mark.parametrize(("workers", "batch_requests"), [(2, 2_000_000), (1, 500), (2, 1)])
def test_threads_and_portions_change_nothing(
    comparison: Comparison, monkeypatch: pytest.MonkeyPatch, workers: int, batch_requests: int
) -> None:
    monkeypatch.setattr(module, "BATCH_REQUESTS", batch_requests)
    shares: list[float] = []
    other = compare("chat", "what", configs(), POLICIES, workers=workers, progress=shares.append)
    assert sum(shares) == pytest.approx(1)
    for policy in POLICIES:
        for metric, values in comparison.metrics[policy].items():
            np.testing.assert_array_equal(other.metrics[policy][metric], values)
        for curve, histogram in comparison.curves[policy].items():
            np.testing.assert_array_equal(other.curves[policy][curve].counts, histogram.counts)


def test_ratios_are_of_means(comparison: Comparison) -> None:
    for policy in POLICIES:
        mine, other = (comparison.metrics[name]["ttft_p99_s"] for name in (policy, "least-outstanding"))
        assert comparison.ratios[policy]["ttft_p99_s"].ratio == pytest.approx(mine.mean() / other.mean())


def test_least_work_beats_least_outstanding_on_first_tokens(comparison: Comparison) -> None:
    assert comparison.ratios["least-work"]["ttft_mean_s"].high < 1


def test_geometric_means(comparison: Comparison) -> None:
    other = compare("light", "what", configs("workload.arrivals.load=0.5"), POLICIES[:2])
    means = geometric_means([comparison, other], "e2e_mean_s")
    assert list(means) == ["round-robin", "least-outstanding"]
    ratios = [one.ratios["round-robin"]["e2e_mean_s"].ratio for one in (comparison, other)]
    mean = means["round-robin"]
    assert mean.ratio == pytest.approx(math.sqrt(ratios[0] * ratios[1]))
    assert mean.low <= mean.ratio <= mean.high


def test_default_policies_need_nothing() -> None:
    plain = prepare(configs()[0])
    names = [spec.label for spec in choose_policies(None, "least-outstanding", plain)]
    left_out = {"linear-score", "session-affinity", *NEED_PREFIXES}
    heuristics = [name for name in HEURISTICS if name not in left_out]
    assert names == [*heuristics, "default", "default-mean"], "the policies of this package are among them"
    with_sessions = prepare(configs("workload.sessions=5")[0])
    kinds = [spec.kind for spec in choose_policies(None, "least-outstanding", with_sessions)]
    assert "session-affinity" in kinds and "linear-score" not in kinds


def test_options_of_the_configuration_hold_for_the_policies_that_have_them() -> None:
    policy = "policy={kind: linear-score, weights: {outstanding: 2}, kv_limit: 0.5}"
    prepared = prepare(configs(policy)[0])
    specs = {spec.kind: spec for spec in choose_policies(None, "least-outstanding", prepared)}
    assert specs["linear-score"].weights == {"outstanding": 2}
    assert specs["hold-until-room"].kv_limit == 0.5
    assert specs["hold-until-room"].weights == {}


def test_policies_are_asked_for_once() -> None:
    names = ["random", "least-work", "random"]
    kinds = [spec.kind for spec in choose_policies(names, "least-kv", prepare(configs()[0]))]
    assert kinds == ["least-kv", "random", "least-work"]


def write_policy(path: Path, outstanding: float) -> Path:
    path.parent.mkdir(exist_ok=True)
    weights = {"outstanding": outstanding, "pending_prefill_tokens": 0.01}
    path.write_text(yaml.safe_dump({"policy": {"kind": "linear-score", "weights": weights}}))
    return path


def test_policies_by_path_have_short_names_of_their_own(tmp_path: Path) -> None:
    files = [
        write_policy(tmp_path / folder / "tuned.yaml", weight) for folder, weight in (("a", 1), ("b", 2))
    ]
    same = write_policy(tmp_path / "c" / "same.yaml", 1)
    run = make_run(tmp_path / "first-run")
    names = [str(path) for path in (*files, same, run, run / "checkpoints" / "best.safetensors")]
    specs = choose_policies([*names, "random"], str(files[1]), prepare(configs()[0]))
    assert [spec.label for spec in specs] == ["tuned", "tuned-2", "first-run", "random"]
    assert [spec.kind for spec in specs] == ["linear-score", "linear-score", "learned", "random"]
    assert specs[1].weights["outstanding"] == 2


def test_baseline_by_path(tmp_path: Path) -> None:
    names = [str(write_policy(tmp_path / folder / "tuned.yaml", 1 + len(folder))) for folder in ("a", "bb")]
    one = compare("chat", "what", configs(num_requests=60)[:2], names, names[1])
    assert one.names == ["tuned", "tuned-2"]
    assert one.baseline == "tuned-2"
    alone = compare("chat", "what", configs(num_requests=60)[:2], [names[0]], names[1])
    assert (alone.names, alone.baseline) == (["tuned", "tuned-2"], "tuned")
    np.testing.assert_array_equal(alone.metrics["tuned"]["e2e_mean_s"], one.metrics["tuned-2"]["e2e_mean_s"])


def test_learned_policies_run_like_any_other(tmp_path: Path) -> None:
    """Alone and among others, on one thread and on two; another checkpoint decides otherwise."""
    names = [str(make_run(tmp_path / "a")), str(make_run(tmp_path / "b", seed=5))]
    some = configs(num_requests=100)
    among = compare("chat", "what", some, [*names, "random"], workers=2)
    alone = compare("chat", "what", some, names[:1], names[0])
    np.testing.assert_array_equal(alone.metrics["a"]["e2e_mean_s"], among.metrics["a"]["e2e_mean_s"])
    assert not np.array_equal(among.metrics["a"]["e2e_mean_s"], among.metrics["b"]["e2e_mean_s"])
    assert not among.is_oracle("a")


def test_cost_is_a_metric_where_an_objective_is_asked_for(comparison: Comparison) -> None:
    objective = find_objective("tail")
    other = compare("chat", "what", configs(), POLICIES, objective=objective)
    assert other.headlines == (*comparison.headlines, "cost")
    for policy in POLICIES:
        metrics = comparison.metrics[policy]
        expected = metrics["e2e_mean_s"] + objective.waiting * metrics["ttft_mean_s"]
        expected += 0.5 * objective.age * metrics["ttft_square_mean_s2"]
        np.testing.assert_allclose(other.metrics[policy]["cost"], expected)
        assert "cost" not in metrics
    assert other.ratios["least-work"]["cost"].high < 1


def test_any_two_policies_can_be_compared(comparison: Comparison) -> None:
    ratio = comparison.ratios_between("round-robin", "least-work")["e2e_mean_s"]
    back = comparison.ratios_between("least-work", "round-robin")["e2e_mean_s"]
    assert ratio.ratio > 1
    np.testing.assert_allclose(
        (ratio.low, ratio.ratio, ratio.high), 1 / np.array([back.high, back.ratio, back.low])
    )
    to_baseline = comparison.ratios_between("round-robin", "least-outstanding")
    assert repr(to_baseline) == repr(comparison.ratios["round-robin"])  # NaN is not equal to itself
    mean = geometric_mean([comparison] * 2, ["e2e_mean_s", "held_share"], "round-robin", "least-work")
    assert mean[0].ratio == pytest.approx(ratio.ratio)
    assert math.isnan(mean[1].ratio), "nobody holds"


def test_oracles_are_known() -> None:
    policy = "policy={kind: linear-score, weights: {queue_length: 1}}"
    names = ["least-work", "vidur-lor", "linear-score"]
    some = compare("chat", "what", configs(policy, num_requests=50)[:1], names)
    assert [some.is_oracle(name) for name in ("least-work", "vidur-lor", "linear-score")] == [
        False,
        True,
        True,
    ]
    every = compare("chat", "what", configs("cluster.signals.oracle=true", num_requests=50)[:1], names[:1])
    assert every.is_oracle("least-work")


def test_unfinished_requests_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "simulate_digests", _losing_one)
    with pytest.warns(PointsmanWarning, match="chat, least-work: 2 requests never finished"):
        compare("chat", "what", configs(num_requests=20)[:2], ["least-work"], "least-work")


def _losing_one(runs: list[Prepared], digest: Callable[..., object], *others: Any) -> list[object]:
    def of_less(run: Prepared, outcome: Outcome) -> object:
        outcome.metrics["num_unfinished"] = 1.0
        return digest(run, outcome)

    return simulate_digests(runs, of_less, *others)


def test_survival_is_the_share_above() -> None:
    values = np.random.default_rng(3).lognormal(size=20_000)
    histogram = LatencyHistogram()
    histogram.add(values[:5000])
    histogram.add(values[5000:])
    seconds, shares = histogram.survival()
    assert 80 < len(seconds) < 200
    assert seconds == sorted(seconds) and shares == sorted(shares, reverse=True)
    exact = [(values > x).mean() for x in seconds]
    np.testing.assert_allclose(shares, exact, atol=2.5e-3, rtol=0.02)
    assert shares[-1] <= 2 / len(values), "the tail is there to the last request"
    assert seconds[-1] == pytest.approx(values.max(), rel=0.15)


@pytest.mark.parametrize("values", [[], [1.0], [0.0, 1e9], [2.0] * 1000])
def test_survival_of_few_values(values: list[float]) -> None:
    histogram = LatencyHistogram()
    histogram.add(np.array(values))
    seconds, shares = histogram.survival()
    assert len(seconds) == len(shares)
    assert all(0 < share <= 1 for share in shares)


def test_curves_hold_all_requests(comparison: Comparison) -> None:
    assert int(comparison.curves["least-work"]["e2e"].counts.sum()) == 400 * len(SEEDS)
    (outcome,) = simulate([prepare(configs()[0])])
    assert len(latency(outcome.requests, "e2e")) == 400
