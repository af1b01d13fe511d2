from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from pointsman.evaluation.returns import RETURN, Metrics, Returns, block_means, estimate, play_all
from pointsman.inference.checkpoint import Checkpoint
from pointsman.report.returns import ReturnsReport, signed, with_interval

RNG = np.random.default_rng(0)


class FakeJudge:
    """`better` earns one more than `plain` in every episode."""

    baseline = "plain"
    heuristics: Mapping[str, str] = {"plain": "what it gets", "better": "one more"}
    rivals: Sequence[str] = tuple(heuristics)
    headers: Mapping[str, str] = {"lazy": "lazy"}

    def play(self, policy: str | Checkpoint, seeds: Sequence[int], where: str = "policy") -> Metrics:
        luck = np.array([np.random.default_rng(seed).normal() for seed in seeds])
        return {RETURN: luck + (policy == "better"), "lazy": np.full(len(seeds), 0.25)}


def returns(num_seeds: int = 60) -> Returns:
    judge = FakeJudge()
    done: list[float] = []
    found = play_all(judge, {"plain": "plain", "better": "better"}, "plain", range(num_seeds), done.append)
    assert done == [1, 1]
    return found


def test_an_interval_covers_the_mean_as_often_as_it_says() -> None:
    num_covered = 0
    for _ in range(200):
        one = estimate(RNG.normal(3.0, 2.0, 25))
        assert one.low < one.ratio < one.high
        num_covered += one.low < 3.0 < one.high
    assert 0.9 < num_covered / 200 <= 0.99


def test_differences_are_paired() -> None:
    """The luck of an episode is the same for both, and cancels."""
    found = returns()
    gain, mean = found.gain("better", "plain"), found.means["better"]
    assert (gain.ratio, gain.low, gain.high) == pytest.approx((1, 1, 1))
    assert mean.high - mean.low > 0.3


def test_blocks_are_consecutive() -> None:
    assert block_means(np.arange(12.0), 3).tolist() == [1.5, 5.5, 9.5]
    assert block_means(np.arange(5.0), 2).tolist() == [1.0, 3.5]
    assert (returns(60).num_blocks, returns(25).num_blocks, returns(3).num_blocks) == (3, 1, 1)
    found = returns(60)
    assert found.blocks("plain") == pytest.approx(found.metrics["plain"][RETURN].reshape(3, 20).mean(axis=1))


def test_a_report_says_who_is_better() -> None:
    report = ReturnsReport(returns(), FakeJudge.headers, {"kind": "fake"}, "pointsman compare", 1.0)
    plain, better = report.rows()
    assert (plain.gain, plain.direction, plain.is_best) == ("", 0, False)
    assert (better.gain, better.direction, better.is_best) == ("+1.000 [1.000, 1.000]", -1, True)
    assert better.shown == ("25.0 %",)
    assert "| **better** |" in report.markdown()
    results = report.results()
    assert results["policies"]["better"]["gain"]["mean"] == pytest.approx(1)
    assert results["policies"]["better"]["worst_block"] == min(results["policies"]["better"]["blocks"])
    judged = ReturnsReport(returns(), {}, {"kind": "fake"}, "pointsman evaluate", 1.0, policy="plain")
    assert judged.columns[2] == "plain has more"
    assert [row.direction for row in judged.rows()] == [0, 1]


def test_numbers_as_people_read_them() -> None:
    assert [signed(x) for x in (0.76149, -0.5, 0.0, -0.0001)] == ["0.761", "−0.500", "0.000", "−0.000"]
    assert signed(0.5, "+") == "+0.500"
    assert with_interval(estimate(np.array([1.0]))) == "1.000"
