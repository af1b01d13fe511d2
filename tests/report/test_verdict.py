"""Verdicts are honest: they name what got worse, and do not call noise a gain."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pointsman.evaluation.bootstrap import Ratio
from pointsman.evaluation.compare import HEADLINES
from pointsman.experiments.objective import find_objective
from pointsman.experiments.setting import Setting
from pointsman.report.appraisal import BETTER, UNCLEAR, WORSE, by_evaluations, interval
from pointsman.report.comparison import ComparisonReport
from pointsman.report.evaluation import EvaluationReport
from pointsman.report.returns_page import verdict_of as verdict_of_returns
from pointsman.report.verdict import judged_text, verdict_of

from .factories import make_comparison

RNG = np.random.default_rng(1)
BASE = RNG.uniform(2.0, 2.2, 8)


def report(**policies: np.ndarray) -> EvaluationReport:
    """The first policy is judged against least-outstanding, then the others."""
    names = {name.replace("_", "-"): list(values) for name, values in policies.items()}
    first = next(iter(names))
    values = {first: names.pop(first), "least-outstanding": list(BASE), **names}
    return EvaluationReport(ComparisonReport([make_comparison(values)], "", 0.0))


def test_better() -> None:
    verdict = verdict_of(report(least_work=0.7 * BASE, random=9 * BASE))
    assert verdict.tone == BETTER
    plain = verdict.sentence.replace("\N{NO-BREAK SPACE}", " ")
    assert plain.startswith("least-work beats least-outstanding: TTFT mean −30 % [")
    assert "Also: better than random." in verdict.details
    assert "8 seeds (1000–1007)" in verdict.details[-1] and "95 % intervals" in verdict.details[-1]


@pytest.mark.parametrize(("rate_rps", "is_said"), [(5.0, False), (12.0, True), (None, True)])
def test_throughput_counts_where_it_is_not_that_of_the_arrivals(
    rate_rps: float | None, is_said: bool
) -> None:
    one = report(least_work=0.7 * BASE)
    setting = Setting("2 × H100", 1000, rate_rps, capacity_rps=10.0)
    (comparison,) = one.comparisons
    changed = EvaluationReport(ComparisonReport([replace(comparison, setting=setting)], "", 0.0))
    details = " ".join(verdict_of(changed).details)
    assert ("Requests per second, against least-outstanding" in details) is is_said
    assert f"Judged {setting.text}, 1,000 requests a run." in details


@pytest.mark.parametrize(
    ("rate_rps", "gain", "is_said"), [(200.0, 1.0, True), (900.0, 1.0, False), (200.0, 0.7, False)]
)
def test_a_light_load_is_named_where_nothing_is_gained(rate_rps: float, gain: float, is_said: bool) -> None:
    setting = Setting("2 × H100", 1000, rate_rps, capacity_rps=2345.6)
    (comparison,) = report(least_work=gain * BASE).comparisons
    _, verdict = ComparisonReport([replace(comparison, setting=setting)], "", 0.0).choice
    text = " ".join(verdict.details)
    assert f"({rate_rps:.0f} of 2,346 requests/s)" in text
    assert ("That is a light load" in text) is is_said
    assert "`" not in text, "pages would show it as it is"


@pytest.mark.parametrize("is_shared", [False, True])
def test_with_shared_prefixes_capacity_is_no_limit(is_shared: bool) -> None:
    """What is cached need not be computed, so that a cluster may well serve more than that."""
    setting = Setting("2 × H100", 1000, 18.0, 10.0, is_shared)
    (comparison,) = report(least_work=0.7 * BASE).comparisons
    text = " ".join(judged_text([replace(comparison, setting=setting)]))
    assert ("add servers first" in text) is not is_shared
    assert ("at 1.8 of what 2 × H100 can serve with nothing cached (18 of 10" in text) is is_shared


def test_the_baseline_is_best_where_others_are_the_same() -> None:
    values = {"random": BASE.tolist(), "least-outstanding": BASE.tolist(), "least-work": BASE.tolist()}
    best, verdict = ComparisonReport([make_comparison(values)], "", 0.0).choice
    assert best == "least-outstanding"
    assert verdict.sentence == "No policy here is better than least-outstanding."


def test_one_run_calls_nobody_as_good() -> None:
    """Half the cost may be luck, but there is no interval that says so."""
    values = {"least-work": [1.0], "least-outstanding": [2.0], "least-delay": [1.001], "random": [9.0]}
    _, verdict = ComparisonReport([make_comparison(values)], "", 0.0).choice
    assert verdict.sentence.startswith("One run cannot tell how sure it is: least-work looks best")
    assert verdict.details[0] == "Just as good, within 1 % or the interval: least-delay."


def test_a_shorter_mean_that_costs_the_tail_is_named_beside_the_best() -> None:
    """Limits of the objective count in the choice, as they do in training."""
    values = {"least-outstanding": BASE, "late-binding": 0.8 * BASE, "gathering": 0.7 * BASE}
    comparison = make_comparison({name: row.tolist() for name, row in values.items()})
    assert ComparisonReport([comparison], "", 0.0).choice[0] == "gathering"
    comparison.metrics["gathering"]["ttft_p99_s"] *= 1.4  # of 0.7: a fifth longer than late-binding's
    best, verdict = ComparisonReport([comparison], "", 0.0).choice
    assert best == "late-binding"
    (shorter,) = (line for line in verdict.details if line.startswith("If the mean is all that counts"))
    assert "gathering" in shorter and "P99\N{NO-BREAK SPACE}+2" in shorter
    absolute = find_objective("mean", {"ttft_p99": f"{0.9 * BASE.mean()}s"})
    assert ComparisonReport([comparison], "", 0.0, absolute).choice[0] == "late-binding"


def test_worse_is_said_so() -> None:
    verdict = verdict_of(report(least_work=1.2 * BASE))
    assert verdict.tone == WORSE
    assert verdict.sentence.startswith("least-work is worse than least-outstanding: ")


def test_noise_is_no_gain() -> None:
    verdict = verdict_of(report(least_work=BASE * RNG.uniform(0.9, 1.1, 8)))
    assert verdict.tone == UNCLEAR
    assert verdict.sentence.startswith("least-work is not clearly better than least-outstanding: ")


def test_one_seed_cannot_tell() -> None:
    values = {"least-work": [1.0], "least-outstanding": [2.0], "random": [9.0]}
    one = EvaluationReport(ComparisonReport([make_comparison(values)], "", 0.0))
    verdict = verdict_of(one)
    assert verdict.tone == UNCLEAR
    assert verdict.sentence.startswith("One run cannot tell whether least-work beats least-outstanding")
    assert verdict.details[-1].endswith("; for intervals, use at least 6 seeds (--seeds) or a longer trace.")
    assert not any("no clear difference from random" in line for line in verdict.details)


def test_no_better_than_another_heuristic_is_not_green() -> None:
    """A policy that only matches late-binding gains nothing that late-binding does not give."""
    verdict = verdict_of(report(least_work=0.7 * BASE, late_binding=0.7 * BASE * RNG.uniform(0.95, 1.05, 8)))
    assert verdict.tone == UNCLEAR
    assert verdict.sentence.endswith("But it is not clearly better than late-binding.")


def test_a_lost_tail_is_mixed() -> None:
    one = report(least_work=0.7 * BASE)
    metrics = one.comparisons[0].metrics["least-work"]
    assert isinstance(metrics, dict)
    metrics["e2e_p99_s"] = 1.3 * BASE
    verdict = verdict_of(one)
    assert verdict.tone == UNCLEAR
    assert ", but is worse on e2e\N{NO-BREAK SPACE}P99\N{NO-BREAK SPACE}+30" in verdict.sentence


def test_a_better_rival_is_named_in_the_sentence() -> None:
    verdict = verdict_of(report(least_work=0.7 * BASE, least_delay=0.5 * BASE))
    assert verdict.tone == UNCLEAR
    assert verdict.sentence.endswith(" But least-delay does better.")
    assert any(line.startswith("Also: worse than least-delay (TTFT") for line in verdict.details)


def test_scenarios_that_got_worse_are_named() -> None:
    good = make_comparison({"least-work": list(0.5 * BASE), "least-outstanding": list(BASE)})
    bad = make_comparison({"least-work": list(1.2 * BASE), "least-outstanding": list(BASE)}, name="bursty")
    verdict = verdict_of(EvaluationReport(ComparisonReport([good, bad], "", 0.0)))
    assert verdict.tone == BETTER
    (line,) = [line for line in verdict.details if line.startswith("Worse than")]
    assert line.startswith("Worse than least-outstanding in 1 of 2 scenarios: bursty (TTFT")
    assert all(header in line for header in ("e2e", "+20"))
    assert len(HEADLINES) == 4


@pytest.mark.parametrize(
    ("blocks", "tone", "words"),
    [
        ([0.3, 0.31, 0.29, 0.3], BETTER, "x beats sjf: score 0.3 against 0."),
        ([-0.3, -0.31, -0.29, -0.3], WORSE, "x is worse than sjf"),
        ([0.9, -0.5, 0.6, -0.8], UNCLEAR, "x is not clearly better than sjf"),
        ([0.3], UNCLEAR, "x is above sjf"),
    ],
)
def test_by_the_evaluations_of_the_run(blocks: list[float], tone: str, words: str) -> None:
    mean = float(np.mean(blocks))
    best = {"update": 5, "eval_score": mean, "eval_mean_return": mean, "eval_baseline_score": 0.0}
    best |= {f"eval_block{index}_return": value for index, value in enumerate(blocks)}
    verdict = by_evaluations("x", {"best": best}, "sjf").verdict
    assert verdict.tone == tone
    assert verdict.sentence.startswith(words)
    assert "the seeds that chose this checkpoint" in verdict.details[0]


def test_nothing_to_judge() -> None:
    for evaluations in ({}, {"best": {}}, {"best": {"eval_score": None}}):
        verdict = by_evaluations("x", evaluations, "sjf").verdict
        assert (verdict.tone, verdict.sentence) == (UNCLEAR, "x cannot be judged: it has no evaluation yet.")


def test_the_interval_of_a_mean() -> None:
    """Student's t by the book: 1, 2, 3 have the mean 2 ± 4.303 / √3."""
    assert interval([1.0, 2.0, 3.0]) == pytest.approx((2 - 2.4842, 2 + 2.4842), abs=1e-3)
    assert np.isnan(interval([1.0])).all()


def test_by_returns() -> None:
    gains = {"sjf": Ratio(0.1, 0.05, 0.15), "fifo": Ratio(0.2, 0.1, 0.3)}
    verdict = verdict_of_returns("x", gains, "sjf", range(1000, 1300))
    assert (verdict.tone, verdict.sentence) == (BETTER, "x beats sjf: +0.100 [0.050, 0.150] in return.")
    gains["best-fit"] = Ratio(-0.2, -0.3, -0.1)
    verdict = verdict_of_returns("x", gains, "sjf", range(1000, 1300))
    assert verdict.tone == UNCLEAR and verdict.sentence.endswith("But best-fit does better.")
    assert verdict_of_returns("x", {"sjf": Ratio(-0.1, -0.2, -0.01)}, "sjf", range(9)).tone == WORSE


def test_a_policy_that_is_as_good_is_named_once() -> None:
    verdict = verdict_of(report(least_work=0.7 * BASE, late_binding=0.7 * BASE, random=9 * BASE))
    assert verdict.sentence.endswith("But it is not clearly better than late-binding.")
    assert "Also: better than random." in verdict.details
    alone = verdict_of(report(least_work=0.7 * BASE, late_binding=0.7 * BASE))
    assert not any(line.startswith("Also") for line in alone.details)
