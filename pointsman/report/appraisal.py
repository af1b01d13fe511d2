"""What a problem says of a policy: the verdict, what to show, and the numbers.

An `Appraise` compares a run's policy with others on seeds that nothing was trained or selected on. Problems
name theirs in evaluation/problem.py. For one without, the run's own evaluations have to do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from pointsman.evaluation.bootstrap import LEVEL, student_t_quantile
from pointsman.report.figure import short
from pointsman.report.page import Section, paragraphs, unbroken

BETTER, UNCLEAR, WORSE = "better", "unclear", "worse"


@dataclass(frozen=True)
class Verdict:
    tone: str  # BETTER, WORSE, or UNCLEAR, which a mixed result is as well
    sentence: str
    details: Sequence[str] = field(default=())

    @property
    def lines(self) -> list[str]:
        return [self.sentence, *self.details]

    def html(self) -> str:
        return (
            f'<div class="verdict {self.tone}"><p><strong>{unbroken(self.sentence)}</strong></p>'
            f"{paragraphs(self.details)}</div>"
        )


@dataclass(frozen=True)
class Appraisal:
    verdict: Verdict
    sections: Sequence[Section] = field(default=())
    results: Mapping[str, Any] = field(default_factory=dict)  # for JSON
    notes: Sequence[str] = field(default=())  # how the numbers came about
    command: str = ""  # that gives the same numbers


class Appraise(Protocol):
    def __call__(
        self,
        section: Mapping[str, Any],  # `env` of the configuration
        run: Path,
        num_seeds: int | None,  # None: as many as it takes
        num_threads: int,
        advance: Callable[[float], None],
    ) -> Appraisal:
        """`run` is a run directory with a checkpoint; `advance` is told shares of the work when done."""
        ...


def untrained(appraisal: Appraisal, name: str) -> Appraisal:
    """The same of a run whose best policy is the one it started from, such as a clone of a heuristic."""
    verdict = appraisal.verdict
    sentence = f"Training gained nothing: the best policy of {name} is the one it started from."
    tone = UNCLEAR if verdict.tone == BETTER else verdict.tone
    return replace(appraisal, verdict=Verdict(tone, sentence, verdict.lines))


def by_evaluations(name: str, evaluations: Mapping[str, Any], baseline: str) -> Appraisal:
    """From what the run measured itself while it trained."""
    best = evaluations.get("best") or {}
    score, known = best.get("eval_score"), best.get("eval_baseline_score")
    if not isinstance(score, int | float):
        return Appraisal(Verdict(UNCLEAR, f"{name} cannot be judged: it has no evaluation yet."))
    at = f"at update {best.get('update', 0):.0f}"
    details = [
        f"Measured {at}, on the seeds that chose this checkpoint: expect a little less on others.",
        *_blocks(best),
    ]
    if not isinstance(known, int | float):
        return Appraisal(Verdict(UNCLEAR, f"{name} scores {short(score)}; there is no baseline.", details))
    low, high = interval(_returns(best))
    shift = score - best.get("eval_mean_return", score)  # what the score charges beside the mean
    if not math.isfinite(low):
        tone, word = UNCLEAR, "is above" if score > known else "is not above"
    elif low + shift > known:
        tone, word = BETTER, "beats"
    elif high + shift < known:
        tone, word = WORSE, "is worse than"
    else:
        tone, word = UNCLEAR, "is not clearly better than"
    return Appraisal(
        Verdict(tone, f"{name} {word} {baseline}: score {short(score)} against {short(known)}.", details)
    )


def _returns(best: Mapping[str, Any]) -> list[float]:
    found: list[float] = []
    while isinstance(value := best.get(f"eval_block{len(found)}_return"), int | float):
        found.append(float(value))
    return found


def _blocks(best: Mapping[str, Any]) -> list[str]:
    values = _returns(best)
    low, high = interval(values)
    if not math.isfinite(low):
        return []
    mean = sum(values) / len(values)
    ends = f"[{short(low)}, {short(high)}]"
    return [
        f"Mean return over {len(values)} blocks of seeds: {short(mean)}, {LEVEL * 100:.0f} % interval {ends}."
    ]


def interval(values: Sequence[float], num_compared: int = 1) -> tuple[float, float]:
    """The confidence interval of the mean, by Student's t; NaN for fewer than two values.

    Of the best of `num_compared`, it is wider: the chance to be wrong is shared between them (Bonferroni).
    """
    count = len(values)
    if count < 2:
        return math.nan, math.nan
    mean = sum(values) / count
    variance = sum((value - mean) ** 2 for value in values) / (count - 1)
    half = student_t_quantile(1.0 - (1.0 - LEVEL) / (2 * num_compared), count - 1) * math.sqrt(
        variance / count
    )
    return mean - half, mean + half
