"""Is it better? One plain sentence, and what has to be said beside it.

Better or worse is only what the 95 % interval leaves no doubt about, in every headline: a policy that wins
the mean and loses the tail is not better but mixed, and the sentence says where it loses. And a policy that
is no better than one of the others, which may need no training at all, is not simply better either.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pointsman.evaluation.bootstrap import LEVEL, MIN_SEEDS, Ratio
from pointsman.plain import counted
from pointsman.report.appraisal import BETTER, UNCLEAR, WORSE, Verdict
from pointsman.report.tables import HEADERS, change, direction, does, listed, samples_text

if TYPE_CHECKING:
    from pointsman.evaluation.compare import Comparison
    from pointsman.report.evaluation import EvaluationReport

NO_BREAK = "\N{NO-BREAK SPACE}"
MAX_NAMED = 4  # places where it is worse; the others are counted


@dataclass(frozen=True)
class Standing:
    """Headlines in which a policy is clearly better than another, worse, or neither."""

    better: dict[str, Ratio]
    worse: dict[str, Ratio]
    unclear: dict[str, Ratio]

    @property
    def tone(self) -> str:
        if self.better and not self.worse:
            return BETTER
        return WORSE if self.worse and not self.better else UNCLEAR

    @property
    def is_mixed(self) -> bool:
        return bool(self.better and self.worse)


def standing(ratios: Mapping[str, Ratio], metrics: Sequence[str]) -> Standing:
    """Where the policy stands in metrics that are better when smaller."""
    parts: dict[int, dict[str, Ratio]] = {-1: {}, 0: {}, 1: {}}
    for metric in metrics:
        parts[direction(ratios[metric])][metric] = ratios[metric]
    return Standing(parts[-1], parts[1], parts[0])


def verdict_of(report: EvaluationReport) -> Verdict:
    """Judge the policy against the first of the others; the details name the rest."""
    metrics = report.base.headlines
    standings = {other: standing(row, metrics) for other, row in report.geometric_means.items()}
    main, *others = report.against
    first = standings[main]
    is_told = not any(math.isnan(ratio.low) for ratio in report.geometric_means[main].values())
    tone, sentence = first.tone, _sentence(report.policy, main, first)
    beaten_by = [other for other in others if standings[other].tone == WORSE]
    matched_by = [other for other in others if standings[other].tone == UNCLEAR]
    if tone == BETTER and beaten_by:
        tone, sentence = UNCLEAR, f"{sentence} But {listed(beaten_by)} {does(beaten_by)} better."
    elif tone == BETTER and matched_by:
        tone, sentence = UNCLEAR, f"{sentence} But it is not clearly better than {listed(matched_by)}."
        others = [other for other in others if other not in matched_by or standings[other].is_mixed]
    details: list[str] = []
    if report.base.num_samples < 2 and not is_told:
        sentence = f"One run cannot tell whether {report.policy} beats {main}: {changes_text(first.unclear)}."
    else:
        details += [_others({other: standings[other] for other in others})] if others else []
        details += _exceptions(report, main)
    details.append(_throughput(report, main))
    details += judged_text(report.comparisons)
    details.append(_basis(report))
    return Verdict(tone, sentence, [line for line in details if line])


def _sentence(policy: str, main: str, found: Standing) -> str:
    if found.is_mixed:
        return (
            f"{policy} beats {main} on {changes_text(found.better)}, but is worse on "
            f"{changes_text(found.worse)}.{_unclear(found)}"
        )
    if found.better:
        return f"{policy} beats {main}: {changes_text(found.better)}.{_unclear(found)}"
    if found.worse:
        return f"{policy} is worse than {main}: {changes_text(found.worse)}.{_unclear(found)}"
    return f"{policy} is not clearly better than {main}: {changes_text(found.unclear)}."


def _unclear(found: Standing) -> str:
    return f" No clear difference in {changes_text(found.unclear)}." if found.unclear else ""


def changes_text(ratios: Mapping[str, Ratio]) -> str:
    texts = (f"{HEADERS[metric]} {change(ratio)}" for metric, ratio in ratios.items())
    return ", ".join(text.replace(" ", NO_BREAK) for text in texts)


def _others(standings: Mapping[str, Standing]) -> str:
    groups: dict[str, list[str]] = {}
    for other, found in standings.items():
        if found.is_mixed:
            key, name = "mixed against", f"{other} (worse: {changes_text(found.worse)})"
        elif found.tone == WORSE:
            key, name = "worse than", f"{other} ({changes_text(found.worse)})"
        else:
            key, name = ("better than" if found.better else "no clear difference from"), other
        groups.setdefault(key, []).append(name)
    return f"Also: {'; '.join(f'{key} {listed(names)}' for key, names in groups.items())}."


def _exceptions(report: EvaluationReport, main: str) -> list[str]:
    """Scenarios in which something got worse, which means hide."""
    if len(report.comparisons) < 2:
        return []
    found = []
    for one in report.comparisons:
        worse = standing(one.ratios_between(report.policy, main), report.base.headlines).worse
        if worse:
            found.append(f"{one.name} ({changes_text(worse)})")
    if not found:
        return [f"In no scenario is a headline clearly worse than {main}'s."]
    rest = f" and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else ""
    count = f"{len(found)} of {len(report.comparisons)} scenarios"
    return [f"Worse than {main} in {count}: {', '.join(found[:MAX_NAMED])}{rest}."]


def judged_text(comparisons: Sequence[Comparison]) -> list[str]:
    """Say on what the policies were judged, and at which load."""
    settings = [one.setting for one in comparisons if one.setting is not None]
    if not settings:
        return []
    if len(settings) == 1:
        (only,) = settings
        lines = [f"Judged {only.text}, {counted(only.num_requests, 'request')} a run."]
    else:
        loads = [setting.load for setting in settings if setting.load is not None]
        span = f" at {min(loads):.2g} to {max(loads):.2g} of their capacity" if loads else ""
        lines = [f"Judged in {len(comparisons)} situations{span}."]
    if all(one.load is not None and one.load > 1 and not one.is_shared for one in settings):
        lines.append("That is more than it can serve: queues grow whatever the policy; add servers first.")
    return lines


def _throughput(report: EvaluationReport, main: str) -> str:
    """Below capacity it is that of the arrivals, and differs by how long the last request takes."""
    loads = [one.setting.load for one in report.comparisons if one.setting is not None]
    if any(load is not None and load < 1 for load in loads):
        return ""
    ratio = report.geometric_means[main].get("requests_per_s")
    return f"Requests per second, against {main}: {change(ratio)}." if ratio is not None else ""


def _basis(report: EvaluationReport) -> str:
    count = len(report.comparisons)
    where = report.comparisons[0].name if count == 1 else f"{count} scenarios (geometric means)"
    is_few = report.base.num_samples < MIN_SEEDS
    few = f" Fewer than {MIN_SEEDS}: intervals are too narrow." if is_few else ""
    told = f"in brackets {LEVEL * 100:.0f} % intervals.{few}"
    if report.base.num_samples < 2:
        told = f"for intervals, use at least {MIN_SEEDS} seeds (--seeds) or a longer trace."
    return f"On {where}, {samples_text(report.comparisons)} that nothing was trained or selected on; {told}"
